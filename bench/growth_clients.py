"""Growing numbers of clients: their total throughput, and whether one of them starves."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from bench.rows import KIB, MIB, SHM
from bench.worker import OURS, Settings, Worker, environment
from kvstore.bench.ours import own_store
from kvstore.bench.session import EXIST, GET
from kvstore.bench.timing import median_us
from kvstore.demo.processes import Children

POOL_BYTES: Final = 2 << 30
STOP_SECONDS: Final = 20.0


class Kind(NamedTuple):
    """The work of every client."""

    title: str
    op: str
    size: int
    batch: int


KINDS: Final = (
    Kind("get 4 KiB, shm", GET, 4 * KIB, 1),
    Kind("get 64 x 1 MiB, shm", GET, MIB, 64),
    Kind("exist 64 keys", EXIST, 0, 64),
)


class Together(NamedTuple):
    """One kind of work by ``clients`` clients. Medians of the rounds; objects or keys a second."""

    work: str
    clients: int
    per_second: float
    """The total of all clients."""
    slowest_part: float
    """The slowest client's rate over the mean."""
    call_us: float
    """The median of one call."""


def measure(
    counts: Sequence[int], rounds: int, seconds: float, progress: Callable[[str, int], None]
) -> list[Together]:
    """Measures every kind of work with each number of clients. Each client is a process; all begin
    together.

    Raises:
        ChildError, KVStoreError: a process failed.
    """
    found: dict[tuple[str, int], list[Together]] = {}
    most = max(counts)
    with (
        own_store(POOL_BYTES) as store,
        Children(environment(), stop_seconds=STOP_SECONDS) as children,
        contextlib.ExitStack() as stack,
    ):
        workers = []
        for number in range(most):
            progress(f"client {number + 1} of {most} is starting", 0)
            settings = Settings(
                system=OURS, behind="", mode=SHM, address=store.address,
                pool_bytes=POOL_BYTES // most, memory_bytes=64 * MIB, warm=True, processes={},
            )  # fmt: skip
            worker = Worker(children, f"client-{number}", settings)
            stack.callback(worker.close)
            worker.ready()
            workers.append(worker)
        for number in range(rounds):
            for kind in KINDS:
                for count in counts:
                    progress(f"round {number + 1} of {rounds}: {kind.title}, {count} clients", 1)
                    one = _together(kind, workers[:count], seconds)
                    found.setdefault((kind.title, count), []).append(one)
    return [_medians(some) for some in found.values()]


def steps(counts: Sequence[int], rounds: int) -> int:
    """Number of progress steps."""
    return rounds * len(KINDS) * len(counts)


def _together(kind: Kind, workers: Sequence[Worker], seconds: float) -> Together:
    for worker in workers:
        worker.prepare(kind.op, kind.size, kind.batch, seconds)
    for worker in workers:
        worker.go()
    samples = [worker.samples() for worker in workers]
    rates = [len(some) * kind.batch / max(seconds, sum(some)) for some in samples]
    return Together(
        work=kind.title,
        clients=len(workers),
        per_second=sum(rates),
        slowest_part=min(rates) / statistics.mean(rates),
        call_us=median_us([each for some in samples for each in some]),
    )


def _medians(rounds: Sequence[Together]) -> Together:
    first = rounds[0]
    return first._replace(
        per_second=statistics.median(each.per_second for each in rounds),
        slowest_part=statistics.median(each.slowest_part for each in rounds),
        call_us=statistics.median(each.call_us for each in rounds),
    )
