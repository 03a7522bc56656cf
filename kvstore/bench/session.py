"""One client's measurements: prepares a row's keys and memory, times the calls, cleans up.

All memory is warm: the client's memory and the pool are written once before. Each call is timed
alone, and its result is checked between two calls.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvstore.bench.driver import EXIST, GET, GET_AGAIN, MATCH, MEMCPY, PUT, READS, Driver, Work
from kvstore.bench.processor import Shares, processor_seconds
from kvstore.errors import InternalError, InvalidArgumentError, NoSpaceError

if TYPE_CHECKING:
    from kvstore.bench.driver import Bytes

BATCH = 64
CHAIN_BLOCKS = 8_192
CHAIN_BLOCK_BYTES = 4_096
PUT_AT_ONCE = 1_024
"""Keys per put of objects that are prepared only so that their keys exist."""
WARM_PIECE = 1 << 20
WARM_PART = 0.9
"""The part of the pool that is written once; above 0.95 Mooncake begins to evict."""
USED_PART = 0.8
"""The part of the pool that removed objects may still use before a session waits."""
ROW_PART = 0.5
"""The part of the pool that one row may put."""
OBJECTS_MAX = 2_000
"""Single objects that one row puts, at most."""
BATCHES_MAX = 100
READ_BATCHES_MAX = 20
"""Batches that are put to be read in turn, at most."""
CALLS_MAX = 200_000
CALLS_MIN = 3


def timed(
    call: Callable[[int], Any], seconds: float, limit: int, check: Callable[[Any], None]
) -> list[float]:
    """Seconds of each call: as many as fit into ``seconds``, at least 3, at most ``limit``."""
    samples = []
    end = time.perf_counter() + seconds
    index = 0
    while index < limit and (index < CALLS_MIN or time.perf_counter() < end):
        start = time.perf_counter()
        result = call(index)
        samples.append(time.perf_counter() - start)
        check(result)
        del result  # a view holds its lease as long as it exists
        index += 1
    return samples


def percentile(samples: Sequence[float], part: float) -> float:
    """The sample below which the given part of the samples lies."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(len(ordered) * part))]


def median_us(samples: Sequence[float]) -> float:
    return statistics.median(samples) * 1e6


def require(well: bool, what: str) -> None:
    """Raises InternalError unless ``well``: the call did not do the intended work."""
    if not well:
        raise InternalError(
            f"an object {what}", advice="Does another program use this store, or is it too small?"
        )


def memory(size: int) -> tuple[Bytes, Bytes]:
    """Random bytes to put, and memory of the same size to get into; all of it touched."""
    import numpy as np

    source = np.empty(size, dtype=np.uint8)
    fill_randomly(source)
    return source, np.full_like(source, 1)


def fill_randomly(source: Bytes) -> None:
    import numpy as np

    source[:] = np.random.default_rng(0).integers(0, 255, len(source), dtype=np.uint8)


def time_memcpy(
    source: Bytes, target: Bytes, size: int, seconds: float, limit: int = CALLS_MAX
) -> list[float]:
    """One numpy copy of ``size`` bytes between warm memory, in one thread."""
    import numpy as np

    one, other = source[:size], target[:size]
    return timed(lambda _: np.copyto(other, one), seconds, limit, lambda _: None)


class Session:
    """Measures rows with one driver. Its keys are unique: several sessions may share a store."""

    def __init__(
        self,
        driver: Driver,
        pool_bytes: int,
        *,
        name: str = "",
        processes: Mapping[str, int] | None = None,
    ) -> None:
        """
        Args:
            pool_bytes: how much of the store's memory this session may fill.
            name: prefix of all its keys.
            processes: process ids whose processor time ``measure`` takes.
        """
        self.driver = driver
        self.processor: Shares = {}
        """Seconds of all calls of the last measurement, of each of ``processes``."""
        self._processes = processes or {}
        self._pool = pool_bytes
        self._name = name
        self._rows = 0
        self._asked: list[str] = []
        self._chain: list[str] = []
        self._kept = 0
        self._spent = 0

    def warm(self) -> None:
        """Write the whole pool once, so that no row pays for a first touch."""
        assert len(self.driver.source) >= WARM_PIECE
        pieces = int(self._pool * WARM_PART) // WARM_PIECE
        keys = [f"{self._name}warm{number}" for number in range(pieces)]
        work = self.driver.work(PUT, [[key] for key in keys], WARM_PIECE)
        with contextlib.suppress(NoSpaceError):  # the pool may hold objects of others
            for number in range(pieces):
                work.check(work.call(number))
        self.driver.remove(keys)
        self.driver.settle()

    def measure(
        self,
        op: str,
        size: int,
        batch: int,
        seconds: float,
        *,
        prepared: Callable[[], None] = lambda: None,
    ) -> list[float]:
        """Seconds of each call.

        Args:
            size: bytes of each object; 0 for calls that move no bytes.
            prepared: called immediately before the first call.

        Raises:
            InternalError: a call returned a wrong result.
            InvalidArgumentError: there is not enough memory for the row.
        """
        assert batch * size <= len(self.driver.source), "more than the driver's memory"
        if op == MEMCPY:
            prepared()
            return time_memcpy(self.driver.source, self.driver.target, size * batch, seconds)
        if op in (EXIST, MATCH):
            keys = (self._chain_keys() if op == MATCH else self._asked_keys())[:batch]
            return self._timed(self.driver.work(op, [keys], 0), seconds, CALLS_MAX, prepared)
        if op not in (PUT, *READS):
            raise InvalidArgumentError(f"{op} cannot be measured on this system")
        room = int(self._pool * ROW_PART) // size // batch
        if not room:
            raise InvalidArgumentError(
                f"{batch} objects of {size} bytes need more memory than this store has",
                advice="Give the store more memory.",
            )
        return self._move(op, size, batch, room, seconds, prepared)

    def close(self) -> None:
        self.driver.close()

    # --- internal -----------------------------------------------------------------------------

    def _move(
        self,
        op: str,
        size: int,
        batch: int,
        room: int,
        seconds: float,
        prepared: Callable[[], None],
    ) -> list[float]:
        most = OBJECTS_MAX if batch == 1 else BATCHES_MAX if op == PUT else READ_BATCHES_MAX
        count = 1 if op == GET_AGAIN else min(most, room)
        self._rows += 1
        batches = [
            [f"{self._name}{self._rows}-{number}-{index}" for index in range(batch)]
            for number in range(count)
        ]
        self._make_room(count * batch * size)
        putting = self.driver.work(PUT, batches, size)
        done = 0
        try:
            if op in READS:
                for done in range(1, count + 1):
                    putting.check(putting.call(done - 1))
                work = self.driver.work(op, batches, size)
                self.driver.target[: batch * size] = 1
                samples = self._timed(work, seconds, CALLS_MAX, prepared)
                if op == GET:
                    self._same_bytes(batch * size)
            else:
                done = count
                samples = self._timed(putting, seconds, count, prepared)
                done = len(samples)
        finally:
            self.driver.remove([key for some in batches[:done] for key in some])
        return samples

    def _timed(
        self, work: Work, seconds: float, limit: int, prepared: Callable[[], None]
    ) -> list[float]:
        prepared()
        before = {name: processor_seconds(pid) for name, pid in self._processes.items()}
        samples = timed(work.call, seconds, limit, work.check)
        for name, pid in self._processes.items():
            self.processor[name] = processor_seconds(pid) - before[name]
        return samples

    def _make_room(self, needed: int) -> None:
        if self._kept + self._spent + needed > self._pool * USED_PART:
            self.driver.settle()
            self._spent = 0
        self._spent += needed

    def _same_bytes(self, size: int) -> None:
        same = self.driver.target[:size] == self.driver.source[:size]
        require(bool(same.all()), "came back with other bytes")

    def _asked_keys(self) -> list[str]:
        if not self._asked:
            keys = [f"{self._name}asked-{i:06d}-0123456789abcdef" for i in range(CHAIN_BLOCKS)]
            batches = [keys[i : i + BATCH] for i in range(0, len(keys), BATCH)]
            self._keep()
            work = self.driver.work(PUT, batches, CHAIN_BLOCK_BYTES)
            for number in range(len(batches)):
                work.check(work.call(number))
            self._asked = keys
        return self._asked

    def _chain_keys(self) -> list[str]:
        if not self._chain:
            keys = [f"{self._name}chain-{i:06d}-0123456789abcdef" for i in range(CHAIN_BLOCKS)]
            self._keep()
            self.driver.put_chain(keys, CHAIN_BLOCK_BYTES)
            self._chain = keys
        return self._chain

    def _keep(self) -> None:
        size = CHAIN_BLOCKS * CHAIN_BLOCK_BYTES
        self._make_room(size)
        self._spent -= size
        self._kept += size * 5 // 4  # includes what a system adds to each object
