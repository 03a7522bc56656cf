"""What a node finds in its memory, and in which order it tells it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import Any

import pytest
from xxhash import xxh3_64_intdigest

from kvstore.limits import Key, Namespace
from kvstore.memory.header import (
    HEADER_BYTES,
    SUPERBLOCK_BYTES,
    Header,
    pack_into,
    unpack,
    write_header_mac,
)
from kvstore.memory.segment import OwnedSegment
from kvstore.native import steps
from kvstore.node import inventory
from kvstore.node.inventory import enable_header_macs

N = Namespace("n")


@pytest.fixture
def segment() -> Iterator[OwnedSegment]:
    segment = OwnedSegment.create(f"inventory-{os.getpid()}", 1 << 20)
    yield segment
    segment.close()


def write(
    segment: OwnedSegment, at: int, key: str, *, parent: str = "", counter: int, size: int = 100
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


def test_the_newest_comes_first_but_behind_its_ancestors(segment: OwnedSegment) -> None:
    write(segment, 0, "r", counter=1)
    write(segment, 10, "x", counter=2)
    write(segment, 4, "s", parent="r", counter=3)
    write(segment, 6, "y", counter=4, parent="gone")
    write(segment, 2, "t", parent="s", counter=5)

    assert told(inventory.build_inventory(segment)) == "rstyx"


def test_a_ring_of_parents_is_told_once(segment: OwnedSegment) -> None:
    write(segment, 0, "a", parent="b", counter=1)
    write(segment, 4, "b", parent="a", counter=2)

    assert sorted(told(inventory.build_inventory(segment))) == ["a", "b"]


def test_of_two_that_overlap_the_newer_is_told_and_the_other_wiped(segment: OwnedSegment) -> None:
    old = write(segment, 0, "a", counter=1, size=5_000)
    write(segment, 3, "b", counter=7)
    write(segment, 20, "c", counter=9, size=5_000)
    young = write(segment, 22, "d", counter=8)

    assert told(inventory.build_inventory(segment)) == "cb"
    for offset in (old, young):
        assert unpack(segment.memory[offset : offset + 1024], segment.seed, offset) is None


def test_what_is_not_whole_is_wiped_and_not_told(
    segment: OwnedSegment, caplog: pytest.LogCaptureFixture
) -> None:
    good = write(segment, 0, "a", counter=1)
    bad = write(segment, 4, "b", counter=2)
    segment.memory[bad + HEADER_BYTES + 7] ^= 1

    with caplog.at_level(logging.WARNING, "kvstore.node"):
        found = inventory.verified(segment, inventory.build_inventory(segment))

    assert [offset for offset, _ in found] == [good]
    assert told(inventory.build_inventory(segment)) == "a"
    assert "corrupt_object_wiped" in caplog.text


def test_what_was_given_up_and_has_landed_since_is_wiped_and_not_told(
    segment: OwnedSegment,
) -> None:
    late = write(segment, 0, "a", counter=1)
    newer = write(segment, 4, "b", counter=3)

    assert (
        told(inventory.build_inventory(segment, {(late, 5, 1), (newer, 5, 2), (1 << 40, 5, 4)}))
        == "b"
    )
    assert unpack(segment.memory[late : late + 1024], segment.seed, late) is None


def test_a_message_names_each_namespace_once(segment: OwnedSegment) -> None:
    write(segment, 0, "a", counter=1)
    write(segment, 4, "b", parent="a", counter=2)

    message = inventory.claims(3, inventory.build_inventory(segment), first=True, last=False)

    assert message.segment == 3
    assert message.namespaces == [N]
    assert message.namespace_of == [0, 0]
    assert message.keys == [b"a", b"b"]
    assert message.parents == [None, b"a"]
    assert message.offsets == [SUPERBLOCK_BYTES, SUPERBLOCK_BYTES + 4096]


def test_memory_is_attached_with_what_it_holds(segment: OwnedSegment) -> None:
    name, uuid = segment.node, segment.uuid
    write(segment, 0, "a", counter=1)
    segment.close(unlink=False)

    again = OwnedSegment.attach(name, 1 << 20)

    assert again is not None
    assert again.uuid == uuid
    assert again.generation > 2, "nobody of before writes there"
    assert told(inventory.build_inventory(again)) == "a"
    again.close()
    assert OwnedSegment.attach(name, 1 << 20) is None


# --- stamps --------------------------------------------------------------------------------------


def stamp(segment: OwnedSegment, at: int, **said: Any) -> None:
    """Stamps the header at ``at``, as a master that granted it, or granted what is ``said``."""
    head = segment.memory[at : at + HEADER_BYTES]
    header = unpack(head, segment.seed, at)
    assert header is not None
    end = pack_into(head, header, segment.seed, at)
    offset, granted = said.pop("offset", at), header._replace(**said)
    made = steps.compute_header_macs(
        {1: segment.header_mac_key}, [1], [offset], [granted.payload_size], [granted.epoch],
        [granted.counter], [granted.namespace], [granted.key],
    )  # fmt: skip
    write_header_mac(head, end, made)


@pytest.fixture
def stamped(segment: OwnedSegment) -> OwnedSegment:
    enable_header_macs(segment)
    return segment


def test_only_what_is_stamped_is_told(
    stamped: OwnedSegment, caplog: pytest.LogCaptureFixture
) -> None:
    granted = write(stamped, 0, "a", counter=1)
    stamp(stamped, granted)
    write(stamped, 4, "b", counter=2)
    with caplog.at_level(logging.WARNING, "kvstore.node"):
        assert told(inventory.build_inventory(stamped)) == "a"
    assert f"headers_without_mac node={stamped.node} count=1" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, "kvstore.node"):
        assert told(inventory.build_inventory(stamped)) == "a"
    assert "count=1" in caplog.text, "of this scan alone"


def test_an_unstamped_header_overlaps_nothing(stamped: OwnedSegment) -> None:
    write(stamped, 4, "x", counter=1 << 60, size=30_000)
    for at, key in ((0, "a"), (10, "b"), (20, "c")):
        stamp(stamped, write(stamped, at, key, counter=1 + at))

    found = inventory.build_inventory(stamped)

    assert sorted(told(found)) == ["a", "b", "c"]
    assert len(inventory.build_inventory(stamped)) == 3, "and none of theirs is wiped"


@pytest.mark.parametrize(
    "said",
    [
        {"offset": SUPERBLOCK_BYTES + 1024}, {"payload_size": 99}, {"epoch": 4}, {"counter": 2},
        {"namespace": Namespace("other")}, {"key": Key(b"b")},
    ],
    ids=lambda said: next(iter(said)),
)  # fmt: skip
def test_a_stamp_of_something_else_is_none(stamped: OwnedSegment, said: dict[str, Any]) -> None:
    offset = write(stamped, 0, "a", counter=1)
    stamp(stamped, offset, **said)
    assert inventory.build_inventory(stamped) == []
    stamp(stamped, offset)
    assert told(inventory.build_inventory(stamped)) == "a"


def test_a_header_that_covers_an_older_one_counts_only_with_its_payload(
    stamped: OwnedSegment,
) -> None:
    """Its stamp is of a put that was there before; the older one is a copy for repair, which came
    later and has its object's version."""
    wide = write(stamped, 4, "w", counter=100, size=10_000)
    stamp(stamped, wide)
    within = [write(stamped, at, key, counter=50) for at, key in ((5, "a"), (8, "b"))]
    for offset in within:
        stamp(stamped, offset)

    assert sorted(told(inventory.build_inventory(stamped))) == ["a", "b"]
    head = stamped.memory[wide : wide + HEADER_BYTES]
    assert unpack(head, stamped.seed, wide) is None, "it is wiped"


def test_a_whole_object_still_outlasts_an_older_header_within_it(stamped: OwnedSegment) -> None:
    wide = write(stamped, 4, "w", counter=100, size=10_000)
    old = write(stamped, 6, "o", counter=50)
    stamp(stamped, old)
    end = wide + HEADER_BYTES
    header = Header(
        N, Key(b"w"), None, 10_000, 5, 100, xxh3_64_intdigest(stamped.memory[end : end + 10_000]),
        b"",
    )  # fmt: skip
    pack_into(stamped.memory[wide : wide + HEADER_BYTES], header, stamped.seed, wide)
    stamp(stamped, wide)

    assert told(inventory.build_inventory(stamped)) == "w"


def test_covering_headers_cannot_make_a_node_read_its_memory_many_times(
    stamped: OwnedSegment, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    checksum = OwnedSegment.checksum

    def counted(segment: OwnedSegment, offset: int, length: int) -> int:
        read.append(length)
        return checksum(segment, offset, length)

    monkeypatch.setattr(OwnedSegment, "checksum", counted)
    for at in range(8):
        stamp(stamped, write(stamped, at, "w", counter=100 - at, size=300_000))
    stamp(stamped, write(stamped, 40, "o", counter=1))

    assert told(inventory.build_inventory(stamped)) == "o"
    assert 0 < sum(read) <= stamped.size
