"""Cutting and grouping keeps every byte and its order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstore.transport.common import windows

buffers = st.lists(st.binary(max_size=50), max_size=20)


@given(buffers, st.integers(1, 60), st.integers(1, 5))
def test_windows_hold_every_byte_in_order(
    contents: list[bytes], bytes_max: int, pieces_max: int
) -> None:
    found = [b""] * len(contents)
    seen: list[int] = []
    for window in windows([len(content) for content in contents], bytes_max, pieces_max):
        assert 0 < len(window) <= pieces_max
        assert sum(size for _, _, size in window) <= bytes_max
        for index, start, size in window:
            found[index] += contents[index][start : start + size]
            seen.append(index)
    assert found == contents
    assert seen == sorted(seen)
    assert set(seen) == set(range(len(contents))), "an empty buffer appears, too"
