"""The tables of compared work. Each row is a piece of work and its goal."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from bench.client import MOONCAKE, REDIS
from kvstore.bench.session import EXIST, GET, GET_AGAIN, GET_VIEW, MATCH, MEMCPY, PUT, WARM_PIECE

KIB: Final = 1 << 10
MIB: Final = 1 << 20

TCP: Final = "tcp"
SHM: Final = "shm"
MODES: Final = (SHM, TCP)

LMCACHE: Final = "lmcache"
"""Rows in which the benchmark calls LMCache, which uses either system as storage."""

HICACHE: Final = "hicache"
"""Rows in which the benchmark calls SGLang's HiCache, which uses either system as storage."""

BUSY: Final = "busy"
"""Rows next to busy loops of the same priority."""

DROP_IN: Final = "drop-in"
NATIVE: Final = "native"
NATIVE_SHM: Final = "native, shm"

VERIFIED = (
    "Ours writes a checked header and an xxh3 checksum of the payload with each put, and verifies"
    " both with each copying get; Mooncake writes and verifies neither by default."
)
ASKED = (
    "A call that moves no payload goes from the client to the master alone: ours through a Unix"
    " socket on the master's own host (TCP elsewhere), Mooncake's through TCP."
)
LEASED = (
    "Not the same work, and ours does more: Mooncake has no prefixes, so its users ask whether"
    " each key exists, without a lease; ours finds the longest prefix and leases it."
)
NOT_COPIED = (
    "Not the same work: ours returns arrays over the pool's own memory, leased, with only the"
    " headers checked; Mooncake's client has only a call that copies."
)
REMEMBERED = (
    "Not the same work: ours makes no call to the master while the lease lives (1 s here), and"
    " copies and verifies; Mooncake's client keeps no placements, so each get asks its storage"
    " process."
)
BEHIND_LMCACHE = "LMCache's connector asks for one key after the other; ours leases what it finds."
OVER_TCP = (
    "Not the same path: LMCache has no way to Mooncake's shared-memory client, so Mooncake's bytes"
    " travel by TCP."
)
BY_SOCKET = (
    "`shm`: ours through shared memory, Redis through its Unix socket. `tcp`: both through TCP."
)
NOT_VERIFIED = (
    "Ours writes a checked header and an xxh3 checksum of the payload with each put, and each get"
    " verifies both and fills the caller's memory. Redis keeps no checksum; redis-py returns new"
    " bytes objects, and their copy into the caller's memory is not timed. redis-py has the faster"
    " settings: reads of 1 MiB, hiredis, and its own packer for objects of 1 MiB or more."
)
COUNTED = (
    "Ours asks the master through a Unix socket in either mode, and learns it of each key; Redis's"
    " `EXISTS` counts the keys that are there."
)
PIPELINED = (
    "Not the same work, and ours does more: Redis has no prefixes, so its users ask for each key"
    " by one pipeline, without a lease; ours finds the longest prefix in one call and leases it."
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the comparison: the same bytes, by the same calls, on both systems."""

    op: str
    """The operation of kvstore's client."""
    mode: str
    """Transport on both sides: ``shm`` within the host, or ``tcp``. Behind HiCache: the class that
    runs on kvstore (``DROP_IN`` ...); on Mooncake, SGLang's own class always runs, over TCP."""
    goal: float
    """The peer's time divided by kvstore's should be at least this."""
    batch: int = 1
    size: int = 0
    """Bytes of each object; 0: no bytes move."""
    peer_op: str = ""
    """The call that the peer's users make instead, if the peer has no such call; else empty."""
    memcpy_goal: float = 0.0
    """The time of a memcpy of the same bytes divided by kvstore's should be at least this; 0: no
    such goal."""
    notes: tuple[str, ...] = ()
    behind: str = ""
    """What is between the benchmark and the systems: ``LMCACHE``, ``HICACHE``, or nothing."""
    peer: str = MOONCAKE
    """The system beside kvstore."""
    busy: int = 0
    """Busy loops that run meanwhile."""

    @property
    def table(self) -> str:
        """The name of its table in ``TABLES``."""
        if self.busy:
            return BUSY
        return self.behind or ("" if self.peer == MOONCAKE else self.peer)

    @property
    def id(self) -> str:
        """A name that is unique in the row's table: ``put/tcp/1MiB/64``."""
        busy = (str(self.busy),) if self.busy else ()
        return "/".join((self.op, self.mode, size_name(self.size), str(self.batch), *busy))

    @property
    def title(self) -> str:
        what = TITLES[self.op]
        busy = f", {self.busy} busy loops" if self.busy else ""
        if not self.size:
            return f"{what} {self.batch:,} {'key' if self.batch == 1 else 'keys'}{busy}"
        many = f"{self.batch} x " if self.batch > 1 else ""
        return f"{what} {many}{size_name(self.size, ' ')}{busy}"

    @property
    def processor_goal(self) -> float:
        """The peer's processor time of client, master and storage, over kvstore's, at least."""
        return 1.5 if self.size == 4 * KIB else 1.0

    @property
    def their_op(self) -> str:
        return self.peer_op or self.op


TITLES: Final = {
    PUT: "put",
    GET: "get",
    GET_VIEW: "get, not copied,",
    GET_AGAIN: "get again, leased,",
    EXIST: "exist",
    MATCH: "match_prefix",
    MEMCPY: "memcpy",
}


def size_name(size: int, between: str = "") -> str:
    """``4KiB``, ``1MiB``; ``-`` for no bytes."""
    if not size:
        return "-"
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            return f"{size // unit}{between}{name}"
    return f"{size}{between}B"


def _pair(
    mode: str, size: int, batch: int, goals: tuple[float, float], *, memcpy_goal: float = 0.0
) -> tuple[Row, Row]:
    return (
        Row(op=PUT, mode=mode, size=size, batch=batch, goal=goals[0], memcpy_goal=memcpy_goal,
            notes=(VERIFIED,)),
        Row(op=GET, mode=mode, size=size, batch=batch, goal=goals[1], memcpy_goal=memcpy_goal,
            notes=(VERIFIED,)),
    )  # fmt: skip


ROWS: Final[tuple[Row, ...]] = (
    Row(op=EXIST, mode=TCP, batch=1, goal=2, notes=(ASKED,)),
    Row(op=EXIST, mode=TCP, batch=64, goal=2, notes=(ASKED,)),
    Row(op=EXIST, mode=TCP, batch=1024, goal=4, notes=(ASKED,)),
    Row(op=EXIST, mode=TCP, batch=8192, goal=7, notes=(ASKED,)),
    Row(op=MATCH, mode=TCP, batch=1024, goal=10, peer_op=EXIST, notes=(ASKED, LEASED)),
    Row(op=MATCH, mode=TCP, batch=8192, goal=20, peer_op=EXIST, notes=(ASKED, LEASED)),
    *_pair(SHM, 4 * KIB, 1, (2, 3)),
    *_pair(TCP, 4 * KIB, 1, (1.5, 2)),
    Row(op=GET_AGAIN, mode=SHM, size=4 * KIB, goal=8, peer_op=GET, notes=(REMEMBERED,)),
    *_pair(SHM, MIB, 1, (1.8, 1.8)),
    *_pair(TCP, MIB, 1, (1.8, 1.5)),
    *_pair(SHM, 64 * KIB, 64, (1.3, 1.3)),
    *_pair(SHM, MIB, 64, (1.1, 1.1), memcpy_goal=0.8),
    Row(op=GET_VIEW, mode=SHM, size=MIB, batch=64, goal=15, peer_op=GET, notes=(NOT_COPIED,)),
    *_pair(TCP, MIB, 64, (2, 2)),
    *_pair(TCP, 4 * MIB, 64, (2, 2)),
    *_pair(TCP, 4 * KIB, 64, (2, 2)),
    *_pair(SHM, 4 * KIB, 64, (1.2, 1.2)),
)
"""The goals of the project, in its order."""

LMCACHE_ROWS: Final = tuple(
    Row(op=op, mode=mode, size=size, batch=64, goal=1, behind=LMCACHE, notes=notes)
    for mode in MODES
    for op, size, notes in (
        (EXIST, 0, (BEHIND_LMCACHE,)),
        *(
            (op, size, (VERIFIED, OVER_TCP) if mode == SHM else (VERIFIED,))
            for size in (64 * KIB, MIB)
            for op in (PUT, GET)
        ),
    )
)

HICACHE_ROWS: Final = tuple(
    Row(op=op, mode=mode, size=size, batch=64, goal=1, behind=HICACHE, notes=(note,))
    for mode, note in (
        (DROP_IN, "SGLang's MooncakeStore on both sides, over TCP: on kvstore's mooncake.store and"
                  " on Mooncake's."),
        (NATIVE, "KVStoreHiCache, over TCP, beside SGLang's MooncakeStore on Mooncake."),
        (NATIVE_SHM, "KVStoreHiCache as it runs by default on the node's host: shared memory."
                     " Not the same path: SGLang's MooncakeStore, over TCP here, shares memory only"
                     " with a pool of Mooncake's own allocator."),
    )
    for op, size in ((PUT, 64 * KIB), (GET, 64 * KIB), (PUT, MIB), (GET, MIB), (EXIST, 0))
)  # fmt: skip

REDIS_ROWS: Final = tuple(
    Row(op=op, mode=mode, size=size, batch=batch, goal=1, peer=REDIS, notes=(BY_SOCKET, note))
    for mode in MODES
    for op, size, batch, note in (
        *((EXIST, 0, batch, COUNTED) for batch in (1, 64)),
        *((MATCH, 0, batch, PIPELINED) for batch in (64, 1024)),
        *((op, size, 1, NOT_VERIFIED)
          for size in (512, 4 * KIB, 64 * KIB, MIB, 16 * MIB) for op in (PUT, GET)),
        *((op, size, 64, NOT_VERIFIED) for size in (4 * KIB, MIB) for op in (PUT, GET)),
    )
)  # fmt: skip

BUSY_ROWS: Final = tuple(
    Row(op=op, mode=mode, size=size, goal=1, busy=busy, notes=notes)
    for busy in (2, 8)
    for op, mode, size, notes in (
        (EXIST, TCP, 0, (ASKED,)),
        *((op, mode, size, (VERIFIED,))
          for mode in MODES for size in (4 * KIB, MIB) for op in (PUT, GET)),
    )
)  # fmt: skip

TABLES: Final = {
    "": ROWS, BUSY: BUSY_ROWS, LMCACHE: LMCACHE_ROWS, HICACHE: HICACHE_ROWS, REDIS: REDIS_ROWS,
}  # fmt: skip
"""The tables by their names (``Row.table``)."""


def chosen(patterns: Sequence[str], rows: Sequence[Row] = ROWS) -> list[Row]:
    """The rows whose id, or a prefix of it, matches a pattern: ``put``, ``*/tcp/*/64``."""
    return [
        row
        for row in rows
        if any(fnmatch.fnmatchcase(row.id, p) or fnmatch.fnmatchcase(row.id, p + "/*")
               for p in patterns)
    ]  # fmt: skip


def memory_needed(rows: Sequence[Row]) -> int:
    """Bytes of memory that a client needs to put from or get into, and to warm the pool."""
    return max(WARM_PIECE, *(row.size * row.batch for row in rows))
