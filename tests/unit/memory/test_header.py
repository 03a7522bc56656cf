"""The header says what was written, and nothing else ever passes for one."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kvstore.limits import KEY_BYTES_MAX, NAMESPACE_BYTES_MAX, Key, Namespace
from kvstore.memory.header import (
    DESCRIPTOR_BYTES_MAX,
    EXTENT_ALIGN,
    HEADER_BYTES,
    SUPERBLOCK_BYTES,
    WIPE,
    Header,
    Superblock,
    extent_bytes,
    pack_into,
    pack_superblock,
    scan,
    unpack,
    unpack_superblock,
    write_header_mac,
)

SEED = 0x0123_4567_89AB_CDEF
OFFSET = SUPERBLOCK_BYTES + 7 * EXTENT_ALIGN


def _fits(name: str) -> bool:
    try:
        return len(name.encode()) <= NAMESPACE_BYTES_MAX
    except UnicodeEncodeError:
        return False


u64 = st.integers(0, 2**64 - 1)
keys = st.binary(min_size=1, max_size=KEY_BYTES_MAX).map(Key)
namespaces = st.text(min_size=1, max_size=NAMESPACE_BYTES_MAX).filter(_fits).map(Namespace)
headers = st.builds(
    Header,
    namespace=namespaces,
    key=keys,
    parent=st.none() | keys,
    payload_size=u64,
    epoch=u64,
    counter=u64,
    payload_checksum=u64,
    descriptor=st.binary(max_size=DESCRIPTOR_BYTES_MAX),
)
LARGEST = Header(
    Namespace("n" * NAMESPACE_BYTES_MAX),
    Key(b"k" * KEY_BYTES_MAX),
    Key(b"p" * KEY_BYTES_MAX),
    2**64 - 1,
    2**64 - 1,
    2**64 - 1,
    2**64 - 1,
    b"d" * DESCRIPTOR_BYTES_MAX,
)
SMALL = Header(Namespace("default"), Key(b"key"), None, 3000, 1, 2, 3, b"")


def packed(header: Header, seed: int = SEED, offset: int = OFFSET) -> bytearray:
    buffer = bytearray(HEADER_BYTES)
    pack_into(buffer, header, seed, offset)
    return buffer


@given(headers, u64, st.integers(0, 2**40))
@example(LARGEST, SEED, OFFSET)
@example(SMALL, 0, 0)
def test_what_is_packed_is_unpacked(header: Header, seed: int, offset: int) -> None:
    assert unpack(packed(header, seed, offset), seed, offset) == header


@given(st.binary(max_size=2 * HEADER_BYTES), u64, u64)
def test_arbitrary_bytes_are_no_header(raw: bytes, seed: int, offset: int) -> None:
    assert unpack(raw, seed, offset) is None
    assert unpack(memoryview(packed(SMALL)[:8] + raw), seed, offset) is None


@given(st.binary(min_size=48, max_size=HEADER_BYTES - 16))
def test_arbitrary_fields_under_a_right_checksum_never_raise(fields: bytes) -> None:
    checksum = xxh3_64_intdigest(fields, SEED ^ OFFSET).to_bytes(8, "little")
    found = unpack(packed(SMALL)[:8] + checksum + fields, SEED, OFFSET)
    assert found is None or found.key


@given(headers, st.data())
def test_one_changed_byte_is_noticed(header: Header, data: st.DataObject) -> None:
    raw = packed(header)
    used = len(bytes(raw).rstrip(b"\0"))
    position = data.draw(st.integers(0, used - 1))
    raw[position] ^= data.draw(st.integers(1, 255))
    assert unpack(raw, SEED, OFFSET) is None


def test_a_header_is_valid_only_at_its_place_in_its_segment() -> None:
    raw = packed(SMALL)
    assert unpack(raw, SEED, OFFSET) == SMALL
    assert unpack(raw, SEED, OFFSET + EXTENT_ALIGN) is None
    assert unpack(raw, SEED ^ 1, OFFSET) is None


def test_a_wiped_header_is_none() -> None:
    raw = packed(LARGEST)
    raw[: len(WIPE)] = WIPE
    assert unpack(raw, SEED, OFFSET) is None


def test_a_shortened_header_is_none() -> None:
    raw = packed(LARGEST)
    assert all(unpack(raw[:size], SEED, OFFSET) is None for size in range(HEADER_BYTES))


def test_packing_leaves_the_rest_of_the_buffer_alone() -> None:
    buffer = bytearray(b"\xff" * 2 * HEADER_BYTES)
    pack_into(buffer, LARGEST, SEED, OFFSET)
    assert buffer[HEADER_BYTES:] == b"\xff" * HEADER_BYTES
    assert unpack(buffer, SEED, OFFSET) == LARGEST


@pytest.mark.parametrize(
    ("payload", "extent"),
    [(0, 1024), (1, 2048), (1024, 2048), (1025, 3072), (1 << 20, (1 << 20) + 1024)],
)
def test_extents_are_whole(payload: int, extent: int) -> None:
    assert extent_bytes(payload) == extent


def segment(size: int = 64 * 1024) -> memoryview:
    return memoryview(bytearray(size))


def place(memory: memoryview, offset: int, header: Header) -> None:
    pack_into(memory[offset : offset + HEADER_BYTES], header, SEED, offset)


def test_a_stamp_leaves_the_header_as_it_is() -> None:
    for header, room in ((SMALL, True), (LARGEST, False)):
        buffer = packed(header)
        end = pack_into(buffer, header, SEED, OFFSET)
        before = bytes(buffer)
        write_header_mac(buffer, end, b"s" * 16)
        assert unpack(buffer, SEED, OFFSET) == header
        assert buffer[:end] == before[:end]
        assert (buffer[end : end + 16] == b"s" * 16) is room
        assert len(buffer) == HEADER_BYTES


def test_a_scan_yields_the_headers_that_are_believed() -> None:
    """Asked with the private copy that was checked, and its stamp."""
    memory = segment()
    asked = []
    for number, offset in enumerate((SUPERBLOCK_BYTES, OFFSET)):
        header = SMALL._replace(counter=number, parent=Key(b"p"), descriptor=b"d" * number)
        head = memory[offset : offset + HEADER_BYTES]
        write_header_mac(head, pack_into(head, header, SEED, offset), bytes([number + 1]) * 16)

    def believed(offset: int, header: Header, stamp: bytes) -> bool:
        asked.append((offset, header.counter, stamp))
        return header.counter == 1

    assert [offset for offset, _ in scan(memory, SEED, believed)] == [OFFSET]
    assert asked == [(SUPERBLOCK_BYTES, 0, b"\1" * 16), (OFFSET, 1, b"\2" * 16)]


def test_a_scan_finds_every_header_in_order() -> None:
    memory = segment()
    last = len(memory) - extent_bytes(SMALL.payload_size)
    for offset in (SUPERBLOCK_BYTES, OFFSET, last):
        place(memory, offset, SMALL._replace(counter=offset))
    found = list(scan(memory, SEED))
    assert [offset for offset, _ in found] == [SUPERBLOCK_BYTES, OFFSET, last]
    assert all(header == SMALL._replace(counter=offset) for offset, header in found)


def test_a_scan_reports_overlaps() -> None:
    """An evicted object's header may stand in front of a younger object: both are reported."""
    memory = segment()
    place(memory, OFFSET, SMALL)
    place(memory, OFFSET + EXTENT_ALIGN, SMALL._replace(counter=9))
    assert [header.counter for _, header in scan(memory, SEED)] == [2, 9]


def test_a_scan_passes_over_what_only_looks_like_a_header() -> None:
    memory = segment()
    place(memory, OFFSET, SMALL)
    copied = memory[OFFSET : OFFSET + HEADER_BYTES]
    memory[OFFSET + 8 * EXTENT_ALIGN :][:HEADER_BYTES] = copied
    place(memory, len(memory) - EXTENT_ALIGN, SMALL)  # its payload would leave the segment
    place(memory, OFFSET + 16 * EXTENT_ALIGN + 512, SMALL)  # not where extents start
    assert [offset for offset, _ in scan(memory, SEED)] == [OFFSET]
    assert list(scan(memory, SEED + 1)) == []


SUPERBLOCK = Superblock(bytes(range(16)), "node-1", 1 << 30, SEED, 7)


def test_a_superblock_is_read_back() -> None:
    assert unpack_superblock(pack_superblock(SUPERBLOCK)) == SUPERBLOCK


def test_the_generation_changes_without_a_new_checksum() -> None:
    raw = bytearray(pack_superblock(SUPERBLOCK))
    raw[16:24] = (8).to_bytes(8, "little")
    assert unpack_superblock(raw) == SUPERBLOCK._replace(generation=8)


@given(st.binary(max_size=SUPERBLOCK_BYTES))
def test_arbitrary_bytes_are_no_superblock(raw: bytes) -> None:
    assert unpack_superblock(raw) is None


@given(st.integers(0, 255).filter(lambda at: not 16 <= at < 24), st.integers(1, 255))
def test_one_changed_byte_of_a_superblock_is_noticed(position: int, change: int) -> None:
    raw = bytearray(pack_superblock(SUPERBLOCK))
    raw[position] ^= change
    assert unpack_superblock(raw) is None
