"""The rows of benchmark tables, and the systems that a table compares."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from kvstore.bench.processes import Servers
from kvstore.bench.session import (
    BATCH,
    CHAIN_BLOCKS,
    EXIST,
    GET,
    GET_AGAIN,
    GET_DISK,
    GET_VIEW,
    MATCH,
    MEMCPY,
    PUT,
    PUT_FULL,
    WARM_PIECE,
)  # fmt: skip

KIB: Final = 1 << 10
MIB: Final = 1 << 20

TCP: Final = "tcp"
SHM: Final = "shm"
ENGINE: Final = "mooncake"
"""Mooncake's transfer engine as the transport of this store."""
MODES: Final = (SHM, TCP)

TITLES: Final = {
    PUT: "put",
    PUT_FULL: "put into a full pool,",
    GET: "get",
    GET_VIEW: "get, not copied,",
    GET_AGAIN: "get again, leased,",
    GET_DISK: "get from a disk,",
    EXIST: "exist",
    MATCH: "match_prefix",
    MEMCPY: "memcpy",
}


@dataclass(frozen=True, kw_only=True)
class ComparisonCase:
    """One line of a table: the same bytes, by the same calls, on each system."""

    op: str
    """The operation of kvstore's client."""
    mode: str
    """The data path: ``shm``, ``tcp``, or a name of the table's own."""
    batch: int = 1
    size: int = 0
    """Bytes of each object; 0: no transfer."""
    clients: int = 1
    """Concurrent client processes."""
    loops: int = 0
    """Busy loops that run during the measurement."""
    goal: float = 1.0
    """Minimum ratio of the first peer's time to kvstore's."""
    peer_op: str = ""
    """The call that the peers' users make instead, if a peer has no such call."""
    notes: tuple[str, ...] = ()
    name: str = ""
    """The title of the work, if it does not follow from the other fields."""

    @property
    def id(self) -> str:
        """A unique name in the table: ``put/tcp/1MiB/64``, ``.../4-clients/2-loops``."""
        more = [f"{self.clients}-clients"] if self.clients > 1 else []
        more += [f"{self.loops}-loops"] if self.loops else []
        return "/".join((self.op, self.mode, size_name(self.size), str(self.batch), *more))

    @property
    def title(self) -> str:
        what = self.name or TITLES[self.op]
        if self.name:
            pass
        elif not self.size:
            what += f" {self.batch:,} {'key' if self.batch == 1 else 'keys'}"
        else:
            many = f"{self.batch} x " if self.batch > 1 else ""
            what += f" {many}{size_name(self.size, ' ')}"
        what += f", {self.clients} clients" if self.clients > 1 else ""
        return what + (f", {self.loops} busy loops" if self.loops else "")

    @property
    def processor_goal(self) -> float:
        """Minimum ratio of the first peer's processor time of all processes to kvstore's."""
        return 1.5 if self.size == 4 * KIB else 1.0

    @property
    def peers_op(self) -> str:
        return self.peer_op or self.op


class System(NamedTuple):
    """The start of a system, and its driver."""

    start: Callable[[int], AbstractContextManager[Servers]]
    """Takes the bytes of the system's memory."""
    driver: str
    """``module:Class`` of a ``StoreDriver``."""
    options: Mapping[str, Any] = {}
    """More arguments of the driver; for JSON."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows that are measured in one run, and the systems that are compared."""

    name: str
    title: str
    rows: tuple[ComparisonCase, ...]
    systems: Mapping[str, System]
    """This store first."""
    packages: tuple[str, ...] = ()
    """Packages whose versions the report names."""
    missing: Callable[[], str | None] = lambda: None
    """Returns the reason why the table cannot be measured here, or None."""
    pool_bytes: int = 2 << 30
    seconds: float = 0.5
    """Time per row, round and system, unless set by the user."""
    rounds: int = 5
    keeps_processes: bool = False
    """The servers of all rounds are the same, because they take minutes to start."""


def size_name(size: int, between: str = "") -> str:
    """Format as ``4KiB``, ``1MiB``; ``-`` for no bytes."""
    if not size:
        return "-"
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            return f"{size // unit}{between}{name}"
    return f"{size}{between}B"


def choose(patterns: str, rows: Sequence[ComparisonCase]) -> list[ComparisonCase]:
    """Select the rows whose ids match a pattern, or, where none does, a prefix of whose id does:
    ``put,*/tcp/*/64``.

    Raises:
        ValueError: a pattern selects no row; the message lists the ids of all rows.
    """
    found: set[ComparisonCase] = set()
    for pattern in (text.strip() for text in patterns.split(",")):
        for name in (pattern, f"{pattern}/*"):
            if some := {row for row in rows if fnmatch.fnmatchcase(row.id, name)}:
                break
        else:
            ids = ", ".join(row.id for row in rows)
            raise ValueError(f"{pattern[:100]} selects no row; the rows are {ids}")
        found |= some
    return [row for row in rows if row in found]


def memory_needed(rows: Sequence[ComparisonCase]) -> int:
    """Return the bytes that a client needs to put from or get into, and to warm the pool."""
    return max(WARM_PIECE, *(row.size * row.batch for row in rows))


def rows_of_host(modes: Sequence[str]) -> tuple[ComparisonCase, ...]:
    sizes = (4 * KIB, 64 * KIB, MIB, 4 * MIB)
    rows = []
    for mode in modes:
        ops = (PUT, GET, GET_VIEW, MEMCPY) if mode == SHM else (PUT, GET)
        rows += [
            ComparisonCase(op=op, mode=mode, size=size, batch=batch)
            for size in sizes for batch in (1, BATCH) for op in ops
        ]  # fmt: skip
        if mode != ENGINE:
            rows.append(ComparisonCase(op=GET_AGAIN, mode=mode, size=4 * KIB))
            rows += [
                ComparisonCase(op=EXIST, mode=mode, batch=n) for n in (1, 64, 1024, CHAIN_BLOCKS)
            ]
            rows += [ComparisonCase(op=MATCH, mode=mode, batch=n) for n in (1024, CHAIN_BLOCKS)]
    return tuple(rows)
