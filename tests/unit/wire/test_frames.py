"""Frames survive any split of the stream; what is no stream of frames is refused."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import KVStoreError, PermissionDeniedError, ProtocolError
from kvstore.limits import REQUEST_BYTES_MAX
from kvstore.wire.frames import (
    BUFFER_BYTES,
    CALL,
    HEAD_BYTES,
    HELLO,
    MAGIC,
    Frame,
    FrameKind,
    FrameReader,
    frame,
    read_hello,
)

FRAME = st.tuples(
    st.integers(0, 2**64 - 1),
    st.sampled_from([int(kind) for kind in FrameKind]),
    st.binary(max_size=20),
    st.binary(max_size=300),
)


def feed(reader: FrameReader, data: bytes, step: int | None = None) -> list[Frame]:
    """What ``reader`` makes of ``data``, given to it at most ``step`` bytes at a time."""
    frames = []
    rest = memoryview(data)
    while rest:
        space = reader.space()
        count = min(len(space), len(rest), step or len(rest))
        space[:count] = rest[:count]
        rest = rest[count:]
        reader.received(count)
        while (received := reader.next()) is not None:
            frames.append(received)
    return frames


@given(frames=st.lists(FRAME, max_size=8), cuts=st.lists(st.integers(0, 2_000), max_size=8))
def test_any_split_gives_the_same_frames(frames: list[Frame], cuts: list[int]) -> None:
    stream = b"".join(frame(*each) for each in frames)
    reader = FrameReader()
    received: list[Frame] = []
    at = 0
    for cut in [*sorted(cuts), len(stream)]:
        received += feed(reader, stream[at : max(at, cut)])
        at = max(at, cut)
    assert received == frames
    assert reader.buffered == 0


@pytest.mark.parametrize("step", [1, pytest.param(7, marks=pytest.mark.slow), 4096, None])
def test_frames_larger_than_the_buffer(step: int | None) -> None:
    size = 3 * BUFFER_BYTES + 5
    sent = [(1, CALL, b"Exists", b"a" * size), (2, CALL, b"x", b"b"), (3, CALL, b"", b"c" * 70_000)]
    assert feed(FrameReader(), b"".join(frame(*each) for each in sent), step) == sent


@pytest.mark.parametrize("length", [0, HEAD_BYTES - 5, REQUEST_BYTES_MAX + 1, 2**32 - 1])
def test_an_absurd_length_is_refused_as_soon_as_it_is_read(length: int) -> None:
    with pytest.raises(ProtocolError):
        feed(FrameReader(), struct.pack("<I", length))
    with pytest.raises(ProtocolError):
        feed(FrameReader(), struct.pack("<IQBB", length, 1, CALL, 0) + bytes(100))


@given(data=st.binary(max_size=400))
def test_random_bytes_are_refused_or_frames(data: bytes) -> None:
    reader = FrameReader(1_000)
    try:
        for received in feed(reader, data):
            read_hello(received)
    except KVStoreError:
        pass


@pytest.mark.parametrize(
    ("kind", "payload", "error"),
    [
        (CALL, MAGIC + struct.pack("<I", 1) + b"token", ProtocolError),
        (HELLO, b"GET / HTTP/1.1\r\n", ProtocolError),
        (HELLO, MAGIC, ProtocolError),
        (HELLO, MAGIC + struct.pack("<I", 2) + b"token", ProtocolError),
        (HELLO, MAGIC + struct.pack("<I", 1), PermissionDeniedError),
        (HELLO, MAGIC + struct.pack("<I", 1) + b"t" * 97, PermissionDeniedError),
    ],
)
def test_a_bad_hello_is_refused(kind: int, payload: bytes, error: type[KVStoreError]) -> None:
    with pytest.raises(error):
        read_hello((0, kind, b"", payload))
