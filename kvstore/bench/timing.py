"""Wall-clock and processor times of calls, and their summary."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import InternalError

Bytes = NDArray[np.uint8]

CALLS_MIN: Final = 3
CALLS_MAX: Final = 200_000
_ALL_THREADS: Final = 2
"""CPUCLOCK_SCHED of Linux's ``posix-timers_types.h``: the clock of a process with all its threads,
including ended ones."""


class Spread(NamedTuple):
    """Median, smallest and largest of one value per round."""

    median: float
    smallest: float
    largest: float

    @classmethod
    def of_ratios(cls, above: Sequence[float], below: Sequence[float]) -> Self:
        """Return ``above / below`` within each round."""
        values = [one / other for one, other in zip(above, below, strict=True)]
        return cls(statistics.median(values), min(values), max(values))

    @property
    def range(self) -> str:
        return f"{self.smallest:.2f} to {self.largest:.2f}"


def timed(
    call: Callable[[int], Any],
    seconds: float,
    limit: int = CALLS_MAX,
    check: Callable[[Any], None] = lambda _: None,
) -> list[float]:
    """Return the seconds of each call: as many as fit into ``seconds``, 3 to ``limit``.

    Args:
        check: called between two calls with the result of the last one.
    """
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


def processor_seconds(pid: int) -> float:
    """Return the processor time in seconds of a process and its living descendants, to the
    nanosecond, busy polling included.

    Raises:
        OSError: there is no such process.
    """
    # The clock id that glibc's clock_getcpuclockid makes.
    used = time.clock_gettime((~pid << 3) | _ALL_THREADS)
    threads = Path(f"/proc/{pid}/task").glob("*/children")
    children = [int(child) for thread in threads for child in thread.read_text().split()]
    return used + sum(map(processor_seconds, children))


def percentile(samples: Sequence[float], part: float) -> float:
    """Return the sample below which this part of the samples lies."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(len(ordered) * part))]


def require(well: bool, what: str) -> None:
    """Raise InternalError unless ``well``: the call did not do the intended work."""
    if not well:
        raise InternalError(
            f"an object {what}", advice="Does another program use this store, or is it too small?"
        )


def memory(size: int) -> tuple[Bytes, Bytes]:
    """Return random bytes to put, and memory of the same size to get into; all of it touched."""
    source = np.empty(size, dtype=np.uint8)
    fill_randomly(source)
    return source, np.full_like(source, 1)


def fill_randomly(source: Bytes) -> None:
    source[:] = np.random.default_rng(0).integers(0, 255, len(source), dtype=np.uint8)


def time_memcpy(source: Bytes, target: Bytes, size: int, seconds: float) -> list[float]:
    """Time one numpy copy of ``size`` bytes between warm memory, in one thread."""
    one, other = source[:size], target[:size]
    return timed(lambda _: np.copyto(other, one), seconds)
