"""Cutting and grouping keeps every byte and its order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstore.transport.pieces import windows

buffers = st.lists(st.binary(max_size=50), max_size=20)


@given(buffers, st.integers(1, 60), st.integers(1, 5))
def test_windows_hold_every_byte_in_order(
    contents: list[bytes], window_bytes: int, window_buffers: int
) -> None:
    found = [b""] * len(contents)
    seen: list[int] = []
    for window in windows(
        [memoryview(content) for content in contents],
        window_bytes=window_bytes,
        window_buffers=window_buffers,
    ):
        assert 0 < len(window) <= window_buffers
        assert sum(len(piece) for _, piece in window) <= window_bytes
        for index, piece in window:
            found[index] += piece
            seen.append(index)
    assert found == contents
    assert seen == sorted(seen)
    assert set(seen) == set(range(len(contents))), "an empty buffer appears, too"
