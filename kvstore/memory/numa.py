"""NUMA nodes of this host, and the binding of threads to one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from kvstore.errors import ConfigError

NODES: Final = Path("/sys/devices/system/node")


def nodes_with_memory() -> list[int]:
    """The NUMA nodes with memory, in order; node 0 alone if they are unknown."""
    try:
        return _numbers((NODES / "has_memory").read_text())
    except OSError:
        return [0]


def check_node(number: int) -> None:
    """Raises ConfigError: there is no such node, or it has no memory."""
    known = nodes_with_memory()
    if number not in known:
        raise ConfigError(
            f"there is no NUMA node {number} with memory on this host",
            advice=f"There are: {', '.join(map(str, known))}. See numactl --hardware.",
            key="numa_node",
        )


def processors_of(number: int) -> set[int]:
    """The processors of a NUMA node that this process may use."""
    try:
        found = _numbers((NODES / f"node{number}" / "cpulist").read_text())
    except OSError:
        return set()
    return set(found) & os.sched_getaffinity(0)


def run_on(number: int) -> None:
    """Binds this thread, and those it starts, to the processors of a NUMA node, if it has any."""
    processors = processors_of(number)
    if processors:
        os.sched_setaffinity(0, processors)


def _numbers(text: str) -> list[int]:
    """``0-3,8`` as numbers."""
    found: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            found += range(int(first), int(last or first) + 1)
    return found
