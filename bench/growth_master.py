"""Measures a master with more and more objects: time per call, memory, pauses, eviction.

One real master process is filled up to each number of objects in turn. Its nodes are simulated
(``kvstore.bench.virtual``), one for each step, with room for the objects of that step and little
more, so that the store is full when eviction is measured.
"""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from bench.page import Advance, Found
from kvstore import calls
from kvstore.bench import virtual
from kvstore.bench.ours import LEASE_MS, own_master
from kvstore.bench.timing import median_us, timed
from kvstore.bench.virtual import CHAIN_BLOCKS, NAMESPACE, STEP_BLOCKS, ask, chain
from kvstore.errors import KVStoreError
from kvstore.limits import BATCH_KEYS_MAX, NAMESPACES_MAX, PUT_KEYS_MAX, Key, Namespace
from kvstore.memory.header import HEADER_BYTES, extent_bytes

if TYPE_CHECKING:
    from kvstore.client.calling.stub import MasterStub

SLACK_BLOCKS: Final = 32 * CHAIN_BLOCKS
"""Room beyond a step's objects, so that the measured puts need no eviction."""
EVICTED: Final = 100_000
REQUESTS: Final = 400
"""Number of different requests of each kind; their objects are chosen at random."""
PUTS_MAX: Final = 400
LOAD_SECONDS: Final = 1.0
"""Time for the load to start up before pauses are measured."""
GONE_SECONDS: Final = 60.0
CHUNK_CHAINS: Final = 64
BIG_BLOCKS: Final = 16
"""Least size of a large object, in blocks, in the measurement where many objects make room for
few."""
BIG_FIRST: Final = 1 << 40
"""Number of the first chain that is put to evict others, far from all other chains' numbers."""


def measure(sizes: Sequence[int], seconds: float, progress: Advance) -> list[Found]:
    """Measures each number of objects, the smallest first.

    Args:
        seconds: time for each kind of call; each measurement of pauses takes four times as long.
        progress: called with the number of chains put, of ``steps`` in all.

    Raises:
        KVStoreError: the master failed.
    """
    found: list[Found] = []
    with contextlib.ExitStack() as stack:
        address, pid = stack.enter_context(own_master("--lease-ms", str(LEASE_MS)))
        stub = stack.enter_context(virtual.stub_of(address))
        before = virtual.resident(pid)
        chains = 0
        for number, size in enumerate(sorted(sizes)):
            wanted = -(-size // CHAIN_BLOCKS)
            room = (wanted - chains) * CHAIN_BLOCKS + SLACK_BLOCKS
            name = f"bench-{number}"
            stack.enter_context(virtual.virtual_node(address, room, name=name))
            rate = _fill(stub, chains, wanted, progress)
            chains = wanted
            objects = sum(each.objects for each in _status(stub).namespaces)
            step = _Step(address, stub, chains, seconds, progress)
            memory = (virtual.resident(pid) - before) / objects
            found.append(step.measure(objects, memory, rate))
    return found


def steps(sizes: Sequence[int]) -> int:
    """Number of progress steps."""
    return -(-max(sizes) // CHAIN_BLOCKS)


class _Step:
    """The measurements at one number of objects."""

    def __init__(
        self,
        address: str,
        stub: MasterStub,
        chains: int,
        seconds: float,
        progress: Advance,
    ) -> None:
        self.address = address
        self.stub = stub
        self.chains = chains
        self.seconds = seconds
        self.progress = progress
        self.random = random.Random(chains)  # noqa: S311 - which objects are asked for

    def measure(self, objects: int, bytes_per_object: float, rate: float) -> Found:
        what = f"{objects:,} objects"
        self.progress(f"{what}: calls", 0)
        call_us = self._calls()
        self.progress(f"{what}: pauses", 0)
        idle = self._pauses()
        with virtual.load(self.address, virtual.MIX, 2 * BIG_FIRST + self.chains * CHAIN_BLOCKS):
            time.sleep(LOAD_SECONDS)
            mixed = self._pauses()
        self._until_alone()
        self.progress(f"{what}: eviction", 0)
        blocks = min(EVICTED, objects // 2)
        evictions = [self._evict_by_steps(blocks), self._evict_at_once(blocks)]
        self.progress(f"{what}: large calls", 0)
        large = self._large()
        return {
            "objects": objects, "bytes_per_object": round(bytes_per_object, 1),
            "fill_per_second": round(rate), "call_us": call_us, "idle": idle, "mixed": mixed,
            "evictions": evictions, "large": large,
            "longest_step_us": self._counters()["longest_step_us"],
        }  # fmt: skip

    def _calls(self) -> dict[str, float]:
        chosen = self._present(REQUESTS)
        keys = [self.random.choice(some) for some in chosen]
        mixed = [self.random.choices(keys, k=STEP_BLOCKS) for _ in chosen]
        return {
            "exist 1": self._time([calls.Exists(NAMESPACE, [key]) for key in keys]),
            "exist 64": self._time([calls.Exists(NAMESPACE, some) for some in mixed]),
            "lookup 64": self._time([calls.Lookup(NAMESPACE, some) for some in mixed]),
            "match 1,024": self._time(
                [calls.MatchPrefix([NAMESPACE], some, False) for some in chosen]
            ),
            "put 64": self._time_puts(),
        }

    def _time(self, requests: Sequence[calls.Request]) -> float:
        def one(index: int) -> calls.Reply:
            return ask(self.stub, requests[index % len(requests)])

        return round(median_us(timed(one, self.seconds, 1 << 20)), 1)

    def _time_puts(self) -> float:
        """The time to put 64 new objects, which takes two calls; they are removed again."""
        first = 3 * BIG_FIRST + self.chains * CHAIN_BLOCKS
        new = [chain(first + number, STEP_BLOCKS) for number in range(PUTS_MAX)]
        samples = timed(lambda index: virtual.put(self.stub, new[index]), self.seconds, PUTS_MAX)
        for keys in new[: len(samples)]:
            ask(self.stub, calls.Remove(NAMESPACE, keys))
        return round(median_us(samples), 1)

    def _pauses(self) -> dict[str, float]:
        return self._waits(lambda seconds: seconds > self.seconds * 4)

    def _waits(self, until: Callable[[float], bool]) -> dict[str, float]:
        return virtual.pauses(self.stub, chain(0)[0], until)

    def _evict_by_steps(self, blocks: int) -> Found:
        """Evicts as engines do: by puts of 64 new objects."""
        free, before = SLACK_BLOCKS, self._counters()["evicted_objects"]
        first = BIG_FIRST + self.chains * CHAIN_BLOCKS
        with virtual.load(self.address, virtual.EVICT, first, blocks + free) as process:
            found = self._waits(lambda _: process.poll() is not None)
            assert process.stdout is not None
            said = json.loads(process.stdout.read())
        return {
            "how": "64 new objects at a time",
            "evicted": self._counters()["evicted_objects"] - before,
            "seconds": round(said["seconds"], 3), "put_us": round(said["put_us"], 1),
            "pauses": found,
        }  # fmt: skip

    def _evict_at_once(self, blocks: int) -> Found:
        """Evicts in the worst case: one call that needs the room of ``blocks`` objects."""
        before = self._counters()["evicted_objects"]
        count = min(PUT_KEYS_MAX, blocks // BIG_BLOCKS)
        keys = chain(BIG_FIRST + (1 << 39) + self.chains, count)
        size = blocks // len(keys) * extent_bytes(virtual.OBJECT_BYTES) - HEADER_BYTES
        seconds, found = self._beside(lambda stub: virtual.put(stub, keys, size=size))
        ask(self.stub, calls.Remove(NAMESPACE, keys))
        return {
            "how": f"{len(keys):,} objects in one call, as large as all of those",
            "evicted": self._counters()["evicted_objects"] - before,
            "seconds": round(seconds, 3), "put_us": round(seconds * 1e6, 1), "pauses": found,
        }  # fmt: skip

    def _large(self) -> list[Found]:
        """Measures every kind of call that has many keys, with the largest number of keys. The last
        calls remove their keys."""
        chains = min(BATCH_KEYS_MAX // CHAIN_BLOCKS, self.chains)
        chosen = self.random.sample(range(self.chains), chains)
        keys = [key for number in chosen for key in chain(number)]  # some were evicted
        new = chain(BIG_FIRST + (1 << 38) + self.chains, len(keys))
        half = len(keys) // 2
        placed = ask(self.stub, calls.Lookup(NAMESPACE, keys[half:]))
        assert isinstance(placed, calls.Found)
        rows = placed.placements
        described = ask(self.stub, calls.DescribeSegments(sorted(set(rows.segments))))
        assert isinstance(described, calls.Segments)
        uuids = {each.segment_id: each.uuid for each in described.segments}
        hits = [index for index, replicas in enumerate(rows.replicas) if replicas]
        corrupt = calls.ReportCorrupt(
            NAMESPACE,
            [keys[half + index] for index in hits],
            [rows.epochs[index] for index in hits],
            [rows.counters[index] for index in hits],
            [uuids[segment] for segment in rows.segments],
        )
        spaces = [NAMESPACE, *(Namespace(f"none-{number}") for number in range(1, NAMESPACES_MAX))]

        def put_and_revoke(stub: MasterStub) -> None:
            tokens: list[int] = []
            epoch = 0
            for start in range(0, len(new), PUT_KEYS_MAX):
                grants = ask(stub, virtual.putting(new[start : start + PUT_KEYS_MAX]))
                assert isinstance(grants, calls.Grants)
                epoch = grants.epoch
                tokens += grants.tokens
            ask(stub, calls.PutRevoke(epoch, tokens, True))

        def asking(request: calls.Request) -> Callable[[MasterStub], object]:
            return lambda stub: ask(stub, request)

        work: dict[str, Callable[[MasterStub], object]] = {
            f"exists of {len(keys):,} keys": asking(calls.Exists(NAMESPACE, keys)),
            f"lookup of {len(keys):,} keys": asking(calls.Lookup(NAMESPACE, keys)),
            f"match of {CHAIN_BLOCKS:,} keys in {len(spaces)} namespaces": asking(
                calls.MatchPrefix(spaces, keys[:CHAIN_BLOCKS], False)
            ),
            f"start and revoke of {len(new):,} puts": put_and_revoke,
            f"report of {len(hits):,} corrupt objects": asking(corrupt),
            f"remove of {half:,} keys": asking(calls.Remove(NAMESPACE, keys[:half])),
            f"clear of {half:,} objects": asking(calls.Clear(NAMESPACE, half)),
        }
        found = []
        for what, do in work.items():
            seconds, pauses = self._beside(do)
            found.append({"what": what, "seconds": round(seconds, 3), "pauses": pauses})
        return found

    def _beside(self, work: Callable[[MasterStub], object]) -> tuple[float, dict[str, float]]:
        """Seconds that ``work`` took, and the pauses of another client meanwhile."""
        ended: list[float | KVStoreError] = []

        def run() -> None:
            with virtual.stub_of(self.address) as stub:
                start = time.perf_counter()
                try:
                    work(stub)
                except KVStoreError as error:
                    ended.append(error)
                else:
                    ended.append(time.perf_counter() - start)

        thread = threading.Thread(target=run)
        thread.start()
        found = self._waits(lambda _: not thread.is_alive())
        thread.join()
        [outcome] = ended
        if isinstance(outcome, KVStoreError):
            raise outcome
        return outcome, found

    def _present(self, count: int) -> list[list[Key]]:
        """``count`` complete chains, chosen at random."""
        found: list[list[Key]] = []
        while len(found) < count:
            keys = chain(self.random.randrange(self.chains))
            matched = ask(self.stub, calls.MatchPrefix([NAMESPACE], keys, False))
            assert isinstance(matched, calls.Matched)
            if matched.matches[0].matched == len(keys):
                found.append(keys)
        return found

    def _counters(self) -> dict[str, int]:
        return {"evicted_objects": 0, **dict(_status(self.stub).counters)}

    def _until_alone(self) -> None:
        """Waits until the master has dropped the load's node, and so the memory of that node."""
        deadline = time.monotonic() + GONE_SECONDS
        while any(node.name == virtual.LOAD for node in _status(self.stub).nodes):
            if time.monotonic() > deadline:
                return
            time.sleep(0.1)


def _fill(stub: MasterStub, done: int, wanted: int, progress: Advance) -> float:
    """Puts chains ``done`` up to ``wanted``; returns the number of objects put per second."""
    start = time.perf_counter()
    for number in range(done, wanted, CHUNK_CHAINS):
        some = range(number, min(number + CHUNK_CHAINS, wanted))
        for each in some:
            virtual.put_chain(stub, chain(each))
        progress(f"filling a master: {some.stop * CHAIN_BLOCKS:,} objects", len(some))
    return (wanted - done) * CHAIN_BLOCKS / (time.perf_counter() - start)


def _status(stub: MasterStub) -> calls.ClusterStatus:
    status = ask(stub, calls.Status())
    assert isinstance(status, calls.ClusterStatus)
    return status
