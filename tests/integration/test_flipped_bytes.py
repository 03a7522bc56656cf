"""Bytes of a segment that change on their own: never returned, counted, logged, and got rid of.

The test maps the segment of a real node and flips bits of it: of headers, of payloads, of the
superblock. Whatever is hit, a get returns what was put or a miss, by every way that a value takes.
"""

from __future__ import annotations

import contextlib
import mmap
from collections import Counter
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest

from kvstore import Client, PutOutcome
from kvstore.client.flows.reading import ATTEMPTS
from kvstore.memory.header import HEADER_BYTES
from kvstore.process.logs import BURST
from tests.integration.conftest import either_client
from tests.support.cluster import Cluster, Node
from tests.support.traffic import content
from tests.support.waiting import until

STORED = PutOutcome.STORED
FLIPS = 600
OBJECTS = 24
SIZES = (0, 1, 64, 1_000, 4_096, 9_999)
SUPERBLOCK_USED = 256


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
    hits = misses = late = 0
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
            value = random.choice(ways)(client, key, size)
            if value is not None:
                assert value == content(key, size), f"wrong bytes of {key}"
                assert first == 0, "a flipped payload passes as right"
                hits += 1
                continue
            misses += 1
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
    assert judged + late == ATTEMPTS * misses
    assert counter_of(cluster, "corrupt_objects") == misses
    assert counter_of(cluster, "corrupt_replicas") == misses
    lines = cluster.master_server.errors.count("corrupt_object ")
    assert min(BURST, misses) <= lines <= misses, "lines of one kind are limited in rate"
    logged = [record.getMessage() for record in caplog.records]
    assert any("checksum_mismatch" in line and cluster.nodes[0].name in line for line in logged)
    assert any("corrupt_objects namespace=default objects=1" in line for line in logged)


def test_a_bad_replica_is_passed_over_and_offered_last(cluster: Cluster) -> None:
    cluster.start(2)
    client = cluster.client()
    key, size = "k", 5_000
    assert client.put(key, content(key, size), replicas=2) is STORED
    entries = {node.name: node for node in cluster.nodes}
    segments = {
        segment.segment_id: entries[node.name]
        for node in client.status().nodes
        for segment in node.segments
    }

    def spoil() -> None:
        """The replica that is offered first."""
        stat = client.stat(key)
        assert stat is not None
        ids, offsets = stat.detail.placements.segments, stat.detail.placements.offsets
        with mapped(segments[ids[0]]) as memory:
            flip(memory, offsets[0] + HEADER_BYTES + 77, Random(1))

    for transport, copy in (("tcp", True), ("shm", False)):
        spoil()
        with Client(cluster.address, transports=(transport,), verify="all") as reader:
            value = reader.get(key, copy=copy)
            if copy:
                assert value == content(key, size)
                assert reader.stats().counters["checksum_mismatches"] == 1
                assert reader.get(key) == content(key, size)
                assert reader.stats().counters["checksum_mismatches"] == 1, "offered first again"
                assert counter_of(cluster, "corrupt_objects") == 0
            else:  # now both are bad
                assert value is None
                assert counter_of(cluster, "corrupt_objects") == 1
    assert client.put(key, content(key, size), replicas=2) is STORED
    assert client.get(key) == content(key, size)


def test_a_chain_with_a_bad_block_ends_before_it_until_that_is_put_again(cluster: Cluster) -> None:
    cluster.start()
    client = cluster.client()
    keys = [f"b{number}" for number in range(8)]
    values = [content(key, 2_000) for key in keys]
    client.put_chain(keys, values)
    stat = client.stat("b3")
    assert stat is not None
    with mapped(cluster.nodes[0]) as memory:
        flip(memory, stat.detail.placements.offsets[0] + HEADER_BYTES, Random(1))
    assert client.get_many(keys) == [None if key == "b3" else content(key, 2_000) for key in keys]
    assert client.match_prefix(keys) == 3
    assert client.put_chain(keys, values).count(STORED) == 1
    assert client.match_prefix(keys) == 8
    assert client.get_many(keys) == values


def test_only_the_header_is_checked_where_only_that_was_asked_for(cluster: Cluster) -> None:
    cluster.start()
    trusting = cluster.client(verify="header")
    trusting.put("k", content("k", 3_000))
    stat = trusting.stat("k")
    assert stat is not None
    with mapped(cluster.nodes[0]) as memory:
        flip(memory, stat.detail.placements.offsets[0] + HEADER_BYTES, Random(1))
        assert trusting.get("k") != content("k", 3_000)
        flip(memory, stat.detail.placements.offsets[0] + 20, Random(1))
        assert trusting.get("k") is None
    assert trusting.stats().counters["corrupt_objects"] == 1
    assert trusting.put("k", content("k", 3_000)) is STORED


@pytest.mark.parametrize("transports", [("shm", "tcp"), ("tcp",)], ids=["shm", "tcp"])
def test_a_flipped_superblock_returns_nothing_wrong(
    cluster: Cluster, transports: tuple[str, ...]
) -> None:
    """It says whose memory this is: who cannot believe it reads over tcp, or nothing at all."""
    cluster.start()
    writer = cluster.client()
    keys = [f"k{number}" for number in range(4)]
    for key in keys:
        writer.put(key, content(key, 3_000))
    random = Random(f"{transports}")
    outcomes: Counter[str] = Counter()
    with mapped(cluster.nodes[0]) as memory:
        for _ in range(60):
            offset = random.randrange(SUPERBLOCK_USED)
            before = memory[offset]
            flip(memory, offset, random)
            with Client(cluster.address, transports=transports, timeout_ms=2_000) as client:
                key = random.choice(keys)
                value = client.get(key)
            assert value in (None, content(key, 3_000))
            outcomes["miss" if value is None else "right"] += 1
            memory[offset] = before
    assert outcomes["right"], outcomes
    until(lambda: writer.get(keys[0]) == content(keys[0], 3_000))
