"""One client's measurements: prepares a row's keys and memory, times the calls, cleans up.

All memory is warm: the client's memory and the pool are written once before. Each call is timed
alone, and its result is checked between two calls. A ``StoreDriver`` makes one system's calls; its
``Work`` adds as little as possible to the system's own call, the same for all systems.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from kvstore.bench.timing import CALLS_MAX, Bytes, processor_seconds, require, time_memcpy, timed
from kvstore.errors import InvalidArgumentError, NoSpaceError

PUT: Final = "put"
GET: Final = "get"
GET_VIEW: Final = "get_view"
"""A get without a copy: an array over the pool's own memory."""
GET_AGAIN: Final = "get_again"
"""A get of the same object again, under a live lease."""
PUT_FULL: Final = "put_full"
"""A put into a full pool. Each batch is read once, some puts later, as a decoder reads the blocks
of a prefiller."""
GET_DISK: Final = "get_disk"
"""A get of objects that are on a disk only: each batch is read in turn, and all of them take three
times the memory of the store."""
EXIST: Final = "exist"
MATCH: Final = "match_prefix"
MEMCPY: Final = "memcpy"
"""One numpy copy of the same bytes inside the client; uses no system."""

READS: Final = (GET, GET_VIEW, GET_AGAIN)

BATCH = 64
CHAIN_BLOCKS = 8_192
CHAIN_BLOCK_BYTES = 4_096
WARM_PIECE = 1 << 20
WARM_PART = 0.9
"""Share of the pool that is written once; above 0.95 Mooncake begins to evict."""
USED_PART = 0.8
"""Share of the pool that removed objects may still use before a session waits."""
ROW_PART = 0.5
"""Share of the pool that one row may put."""
OBJECTS_MAX = 2_000
"""Maximum single objects that one row puts."""
BATCHES_MAX = 100
READ_BATCHES_MAX = 20
"""Maximum batches that are put to be read in turn."""
FULL_PART = 1.3
"""Bytes put before ``PUT_FULL`` is measured, as a share of the pool."""
FULL_BATCHES_MAX = 5_000
DISK_PART = 3.0
"""Bytes that are put before ``GET_DISK`` is measured, as a share of the pool."""
READ_AFTER = 1 / 8
"""Bytes put between a batch of ``PUT_FULL`` and its read, as a share of the pool."""


class Work(NamedTuple):
    call: Callable[[int], Any]
    """The timed call; its argument is the call's number."""
    check: Callable[[Any], None]
    """Raises InternalError if the result of a call is wrong."""


class StoreDriver:
    """A client of one system. Use it in one thread."""

    source: Bytes
    """The caller's memory to put from, touched: chunk ``i`` of a size is at ``i * size``."""
    target: Bytes
    """The caller's memory to get into, of the same size, touched."""

    def work(self, op: str, batches: Sequence[Sequence[str]], size: int) -> Work:
        """Return work whose call ``n`` uses the keys ``batches[n % len(batches)]``. All batches
        have the same length; a batch of one key uses the system's call for a single object.

        Args:
            op: one of the names above that this system has, except ``MEMCPY``.
            size: bytes of each object; key ``i`` of a batch belongs to chunk ``i``.
        """
        raise NotImplementedError

    def put_all(self, keys: Sequence[str], size: int) -> None:
        """Put objects that need only exist."""
        batches = [keys[start : start + BATCH] for start in range(0, len(keys), BATCH)]
        work = self.work(PUT, batches, size)
        for number in range(len(batches)):
            work.check(work.call(number))

    def put_chain(self, keys: Sequence[str], size: int) -> None:
        """As ``put_all``; each object is the parent of the next if the system supports parents."""
        self.put_all(keys, size)

    def remove(self, keys: Sequence[str]) -> None:
        """Remove these objects now."""

    def wait_until_written(self) -> None:
        """Wait until nothing is being written to a disk."""

    def wait_until_free(self) -> None:
        """Wait until the memory of all removed objects is free."""

    def close(self) -> None:
        """Release all memory and connections."""


class Session:
    """Measures rows with one driver. Its keys are unique: several sessions may share a store."""

    def __init__(
        self,
        driver: StoreDriver,
        pool_bytes: int,
        *,
        name: str = "",
        processes: Mapping[str, int] | None = None,
    ) -> None:
        """
        Args:
            pool_bytes: bytes of the store's memory that this session may fill.
            name: prefix of all its keys.
            processes: process ids whose processor time ``measure`` takes.
        """
        self.driver = driver
        self.processor: dict[str, float] = {}
        """Processor seconds of each of ``processes`` in all calls of the last measurement."""
        self.found = 1.0
        """The hit ratio of the reads of the last measurement."""
        self._processes = processes or {}
        self._pool = pool_bytes
        self._name = name
        self._prepared: Callable[[], None] = lambda: None
        self._rows = 0
        self._keys: dict[str, list[str]] = {}
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
        self.driver.wait_until_free()

    def measure(
        self,
        op: str,
        size: int,
        batch: int,
        seconds: float,
        *,
        prepared: Callable[[], None] = lambda: None,
    ) -> list[float]:
        """Return the seconds of each call.

        Args:
            size: bytes of each object; 0 for calls without transfers.
            prepared: called immediately before the first call.

        Raises:
            InternalError: a call returned a wrong result.
            InvalidArgumentError: there is not enough memory for the row.
        """
        assert batch * size <= len(self.driver.source), "more than the driver's memory"
        self._prepared = prepared
        if op == MEMCPY:
            prepared()
            return time_memcpy(self.driver.source, self.driver.target, size * batch, seconds)
        if op in (EXIST, MATCH):
            keys = self._kept_keys(op)[:batch]
            return self._timed(self.driver.work(op, [keys], 0), seconds)
        if op == PUT_FULL:
            return self._put_full(size, batch, seconds)
        if op == GET_DISK:
            return self._get_from_disk(size, batch, seconds)
        if op not in (PUT, *READS):
            raise InvalidArgumentError(f"{op} cannot be measured on this system")
        return self._move(op, size, batch, seconds)

    def close(self) -> None:
        self.driver.close()

    def _move(self, op: str, size: int, batch: int, seconds: float) -> list[float]:
        room = int(self._pool * ROW_PART) // size // batch
        if not room:
            raise InvalidArgumentError(
                f"{batch} objects of {size} bytes need more memory than this store has",
                advice="Give the store more memory.",
            )
        most = OBJECTS_MAX if batch == 1 else BATCHES_MAX if op == PUT else READ_BATCHES_MAX
        count = 1 if op == GET_AGAIN else min(most, room)
        batches = self._new_keys(count, batch)
        self._free_space(count * batch * size)
        putting = self.driver.work(PUT, batches, size)
        done = 0
        try:
            if op == PUT:
                done = count
                samples = self._timed(putting, seconds, count)
                done = len(samples)
                return samples
            for done in range(1, count + 1):
                putting.check(putting.call(done - 1))
            work = self.driver.work(op, batches, size)
            self.driver.target[: batch * size] = 1
            samples = self._timed(work, seconds)
            if op == GET:
                self._check_bytes(batch * size)
            return samples
        finally:
            self.driver.remove([key for some in batches[:done] for key in some])

    def _new_keys(self, count: int, batch: int) -> list[list[str]]:
        """Return keys of one length, as hashes of blocks have."""
        self._rows += 1
        row = f"{self._name}{self._rows}"
        return [
            [f"{row}-{number:06}-{index:05}" for index in range(batch)] for number in range(count)
        ]

    def _check_bytes(self, count: int) -> None:
        """Raise InternalError: the last get did not return what was put."""
        same = self.driver.target[:count] == self.driver.source[:count]
        require(bool(same.all()), "came back with other bytes")

    def _put_full(self, size: int, batch: int, seconds: float) -> list[float]:
        """Count a rejected batch as not found."""
        filling = int(self._pool * FULL_PART) // size // batch
        lag = int(self._pool * READ_AFTER) // size // batch
        batches = self._new_keys(filling + FULL_BATCHES_MAX, batch)
        putting = self.driver.work(PUT, batches, size)
        getting = self.driver.work(GET, batches, size)
        found: list[int] = []

        def put(number: int) -> None:
            with contextlib.suppress(NoSpaceError):
                putting.check(putting.call(number))

        def read(_: object) -> None:
            result = getting.call(filling + len(found) - lag)
            found.append(sum(each > 0 if isinstance(each, int) else each is not None
                             for each in result))  # fmt: skip

        for number in range(filling):
            put(number)
        work = Work(lambda number: put(filling + number), read)
        samples = self._timed(work, seconds, FULL_BATCHES_MAX)
        self.found = sum(found) / batch / len(found)
        return samples

    def _get_from_disk(self, size: int, batch: int, seconds: float) -> list[float]:
        count = int(self._pool * DISK_PART) // size // batch
        batches = self._new_keys(count, batch)
        putting = self.driver.work(PUT, batches, size)
        try:
            for number in range(count):
                putting.check(putting.call(number))
                self.driver.wait_until_written()
            getting = self.driver.work(GET, batches, size)
            found: list[float] = []

            def read(result: Any) -> None:
                results = result if isinstance(result, list) else [result is not False]
                found.append(sum(map(bool, results)) / len(results))
                if found[-1] == 1.0:
                    self._check_bytes(batch * size)

            samples = self._timed(Work(getting.call, read), seconds)
            self.found = sum(found) / len(found)
            return samples
        finally:
            self.driver.remove([key for keys in batches for key in keys])

    def _timed(self, work: Work, seconds: float, limit: int = CALLS_MAX) -> list[float]:
        self._prepared()
        before = {name: processor_seconds(pid) for name, pid in self._processes.items()}
        samples = timed(work.call, seconds, limit, work.check)
        for name, pid in self._processes.items():
            self.processor[name] = processor_seconds(pid) - before[name]
        return samples

    def _free_space(self, needed: int) -> None:
        if self._kept + self._spent + needed > self._pool * USED_PART:
            self.driver.wait_until_free()
            self._spent = 0
        self._spent += needed

    def _kept_keys(self, op: str) -> list[str]:
        """Return keys of small objects that stay: a chain for ``MATCH``."""
        if op not in self._keys:
            keys = [f"{self._name}{op[:5]}-{i:06d}-0123456789abcdef" for i in range(CHAIN_BLOCKS)]
            size = CHAIN_BLOCKS * CHAIN_BLOCK_BYTES
            self._free_space(size)
            self._spent -= size
            self._kept += size * 5 // 4  # includes what a system adds to each object
            put = self.driver.put_chain if op == MATCH else self.driver.put_all
            put(keys, CHAIN_BLOCK_BYTES)
            self._keys[op] = keys
        return self._keys[op]
