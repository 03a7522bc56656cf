"""What a node finds in its memory, and in which order it tells it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest
from xxhash import xxh3_64_intdigest

from kvstore.limits import Key, Namespace
from kvstore.memory.header import (
    HEADER_BYTES,
    SUPERBLOCK_BYTES,
    Header,
    pack_into,
    unpack,
)
from kvstore.memory.segment import NodeSegment
from kvstore.node import inventory

N = Namespace("n")


@pytest.fixture
def segment() -> Iterator[NodeSegment]:
    segment = NodeSegment.create(f"inventory-{os.getpid()}", 1 << 20)
    yield segment
    segment.close()


def write(
    segment: NodeSegment, at: int, key: str, *, parent: str = "", counter: int, size: int = 100
) -> int:
    """An object at the place ``at`` (a KiB each), as a client writes it; its offset."""
    offset = SUPERBLOCK_BYTES + at * 1024
    payload = key.encode() * size
    start = offset + HEADER_BYTES
    segment.memory[start : start + size] = payload[:size]
    above = Key(parent.encode()) if parent else None
    checksum = xxh3_64_intdigest(payload[:size])
    header = Header(N, Key(key.encode()), above, size, 5, counter, checksum, b"")
    pack_into(segment.memory[offset : offset + HEADER_BYTES], header, segment.seed, offset)
    return offset


def told(found: list[inventory.Found]) -> str:
    return "".join(header.key.decode() for _, header in found)


def test_the_newest_comes_first_but_behind_its_ancestors(segment: NodeSegment) -> None:
    write(segment, 0, "r", counter=1)
    write(segment, 10, "x", counter=2)
    write(segment, 4, "s", parent="r", counter=3)
    write(segment, 6, "y", counter=4, parent="gone")
    write(segment, 2, "t", parent="s", counter=5)

    assert told(inventory.take(segment)) == "rstyx"


def test_a_ring_of_parents_is_told_once(segment: NodeSegment) -> None:
    write(segment, 0, "a", parent="b", counter=1)
    write(segment, 4, "b", parent="a", counter=2)

    assert sorted(told(inventory.take(segment))) == ["a", "b"]


def test_of_two_that_overlap_the_newer_is_told_and_the_other_wiped(segment: NodeSegment) -> None:
    old = write(segment, 0, "a", counter=1, size=5_000)
    write(segment, 3, "b", counter=7)
    write(segment, 20, "c", counter=9, size=5_000)
    young = write(segment, 22, "d", counter=8)

    assert told(inventory.take(segment)) == "cb"
    for offset in (old, young):
        assert unpack(segment.memory[offset : offset + 1024], segment.seed, offset) is None


def test_what_is_not_whole_is_wiped_and_not_told(
    segment: NodeSegment, caplog: pytest.LogCaptureFixture
) -> None:
    good = write(segment, 0, "a", counter=1)
    bad = write(segment, 4, "b", counter=2)
    segment.memory[bad + HEADER_BYTES + 7] ^= 1

    with caplog.at_level(logging.WARNING, "kvstore.node"):
        found = inventory.verified(segment, inventory.take(segment))

    assert [offset for offset, _ in found] == [good]
    assert told(inventory.take(segment)) == "a"
    assert "corrupt_object_wiped" in caplog.text


def test_what_was_given_up_and_has_landed_since_is_wiped_and_not_told(segment: NodeSegment) -> None:
    late = write(segment, 0, "a", counter=1)
    newer = write(segment, 4, "b", counter=3)

    assert told(inventory.take(segment, {(late, 5, 1), (newer, 5, 2), (1 << 40, 5, 4)})) == "b"
    assert unpack(segment.memory[late : late + 1024], segment.seed, late) is None


def test_a_message_names_each_namespace_once(segment: NodeSegment) -> None:
    write(segment, 0, "a", counter=1)
    write(segment, 4, "b", parent="a", counter=2)

    message = inventory.claims(3, inventory.take(segment), first=True, last=False)

    assert message.segment == 3
    assert message.namespaces == [N]
    assert message.namespace_of == [0, 0]
    assert message.keys == [b"a", b"b"]
    assert message.parents == [None, b"a"]
    assert message.offsets == [SUPERBLOCK_BYTES, SUPERBLOCK_BYTES + 4096]


def test_memory_is_attached_with_what_it_holds(segment: NodeSegment) -> None:
    name, uuid = segment.node, segment.uuid
    write(segment, 0, "a", counter=1)
    segment.close(unlink=False)

    again = NodeSegment.attach(name, 1 << 20)

    assert again is not None
    assert again.uuid == uuid
    assert again.generation > 2, "nobody of before writes there"
    assert told(inventory.take(again)) == "a"
    again.close()
    assert NodeSegment.attach(name, 1 << 20) is None
