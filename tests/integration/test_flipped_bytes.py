"""Bytes of a segment that change on their own: never returned, counted, logged, and got rid of.

The test maps the segment of a real node and flips bits of headers and payloads. Whatever is hit,
a get returns what was put or a miss, by every way that a value takes.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest

from kvstore import PutOutcome
from kvstore.client.flows.read_objects import ATTEMPTS
from kvstore.memory.header import HEADER_BYTES
from kvstore.runtime.logs import BURST
from tests.integration.conftest import either_client
from tests.support.cluster import Cluster, Node
from tests.support.workload import content

STORED = PutOutcome.STORED
FLIPS = 600
OBJECTS = 24
SIZES = (0, 1, 64, 1_000, 4_096, 9_999)


@contextlib.contextmanager
def mapped(node: Node) -> Iterator[mmap.mmap]:
    with node.entry.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        yield memory


def flip(memory: mmap.mmap, offset: int, random: Random) -> None:
    memory[offset] ^= 1 << random.randrange(8)


def counter_of(cluster: Cluster, name: str) -> int:
    return dict(cluster.status().counters).get(name, 0)


def get_copy(client: Any, key: str, size: int) -> bytes | None:
    return client.get(key)  # type: ignore[no-any-return]


def get_view(client: Any, key: str, size: int) -> bytes | None:
    view = client.get(key, copy=False)
    return None if view is None else bytes(view)


def get_batch(client: Any, key: str, size: int) -> bytes | None:
    return client.get_many([key, "never put"])[0]  # type: ignore[no-any-return]


def get_into(client: Any, key: str, size: int) -> bytes | None:
    buffer = bytearray(size)
    [got] = client.get_into([key], [buffer])
    assert got in (size, None)
    return None if got is None else bytes(buffer)


def key_of(number: int) -> tuple[str, int]:
    return f"key-{number}", SIZES[number % len(SIZES)]


def places(client: Any) -> dict[str, int]:
    """Of the extents, by key."""
    return {key: client.stat(key).detail.placements.offsets[0] for key, _ in map(key_of, ALL)}


ALL = range(OBJECTS)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_no_flipped_byte_is_ever_returned(
    cluster: Cluster, transport: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.start(memory="128MiB")
    random = Random(f"{transport} {kind}")
    ways: list[Callable[[Any, str, int], bytes | None]] = [
        get_copy, get_view, get_batch, get_into,
    ]  # fmt: skip
    settings = {"transports": (transport,), "verify": "all"}
    hits = misses = late = looks = 0
    with (
        either_client(kind, cluster.address, **settings) as client,
        mapped(cluster.nodes[0]) as memory,
    ):
        for key, size in map(key_of, ALL):
            assert client.put(key, content(key, size)) is STORED
        where = places(client)
        for _ in range(FLIPS):
            key, size = key_of(random.randrange(OBJECTS))
            # As often in the header, of which a part is not used, as in the payload.
            first, length = random.choice(((0, HEADER_BYTES // 4), (HEADER_BYTES, size)))
            if not length:
                continue
            flip(memory, where[key] + first + random.randrange(length), random)
            late_before = client.stats().counters.get("late_reads", 0)
            way = random.choice(ways)
            value = way(client, key, size)
            if value is not None:
                assert value == content(key, size), f"wrong bytes of {key}"
                assert first == 0, "a flipped payload passes as right"
                hits += 1
                continue
            misses += 1
            looks += 2 if way is get_view and transport == "shm" else 0
            late += client.stats().counters.get("late_reads", 0) - late_before
            assert not client.exists(key), "what is bad is still offered"
            assert client.put(key, content(key, size), wait_ms=5_000) is STORED
            where[key] = client.stat(key).detail.placements.offsets[0]
            assert client.get(key) == content(key, size)
        counters = client.stats().counters
    assert misses > FLIPS // 2
    assert hits, "the part of a header that means nothing was never hit"
    assert counters["corrupt_objects"] == misses
    # An attempt that ended after its lease, on a stalled machine, has judged nothing.
    judged = counters["checksum_mismatches"] + counters["stale_reads"]
    assert judged + late == ATTEMPTS * misses + looks
    assert counter_of(cluster, "corrupt_objects") == misses
    assert counter_of(cluster, "corrupt_replicas") == misses
    lines = cluster.master_server.errors.count("corrupt_object ")
    assert min(BURST, misses) <= lines <= misses, "lines of one kind are limited in rate"
    logged = [record.getMessage() for record in caplog.records]
    assert any("checksum_mismatch" in line and cluster.nodes[0].name in line for line in logged)
    assert any("corrupt_objects namespace=default objects=1" in line for line in logged)
