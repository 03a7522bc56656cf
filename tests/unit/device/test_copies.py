"""Lists of copies, compared with what a loop over single bytes says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.device.copies import CopyList, merged, split_at_windows
from kvstore.device.device import Device
from kvstore.device.memory import DeviceMemory, layout_copies
from kvstore.errors import InvalidArgumentError
from tests.support.fake_device import FakeDriver

DEVICE = Device(FakeDriver(), ring_bytes=8)

Runs = list[tuple[int, int]]
runs = st.lists(st.tuples(st.integers(0, 400), st.integers(1, 40)), min_size=1, max_size=6)


def memory(each: Runs) -> DeviceMemory:
    addresses, sizes = zip(*each, strict=True)
    return DeviceMemory(DEVICE, np.array(addresses), np.array(sizes))


def pairs(copies: CopyList) -> list[tuple[int, int]]:
    """Byte by byte: its address on the device, and the other one."""
    return [
        (device + at, other + at)
        for device, other, size in zip(*(each.tolist() for each in copies), strict=True)
        for at in range(size)
    ]


def expected(values: list[Runs], places: list[int]) -> list[tuple[int, int]]:
    found = []
    for value, place in zip(values, places, strict=True):
        for address, size in value:
            found += [(address + at, place + at) for at in range(size)]
            place += size
    return found


@given(st.lists(st.tuples(runs, st.integers(0, 10_000)), min_size=1, max_size=5))
def test_runs_of_a_value_lie_end_to_end_from_its_place(rows: list[tuple[Runs, int]]) -> None:
    values, places = [row[0] for row in rows], [row[1] for row in rows]
    copies = layout_copies([memory(each) for each in values], places)
    assert pairs(copies) == expected(values, places)


@given(st.lists(st.tuples(runs, st.integers(0, 300)), min_size=1, max_size=4), st.integers(1, 64))
def test_no_copy_crosses_a_border(rows: list[tuple[Runs, int]], window: int) -> None:
    base = 7
    places = [base + row[1] for row in rows]
    whole = layout_copies([memory(row[0]) for row in rows], places)
    pieces = split_at_windows(whole, base, window)
    assert pairs(pieces) == pairs(whole)
    assert all(pieces.sizes > 0)
    assert all(
        (pieces.other - base) // window == (pieces.other + pieces.sizes - 1 - base) // window
    )


def test_copies_that_touch_on_both_sides_are_one() -> None:
    one = CopyList(np.array([10, 14, 20]), np.array([110, 114, 120]), np.array([4, 6, 5]))
    assert [each.tolist() for each in merged(one)] == [[10], [110], [15]]
    apart = CopyList(np.array([10, 14]), np.array([110, 115]), np.array([4, 4]))
    assert merged(apart) is apart


@given(runs, st.data())
def test_the_first_bytes_of_a_memory(each: Runs, data: st.DataObject) -> None:
    whole = memory(each)
    size = data.draw(st.integers(1, whole.nbytes))
    first = whole.first(size)
    assert len(first) == first.nbytes == size == int(first.sizes.sum())
    assert pairs(layout_copies([first], [0])) == expected([each], [0])[:size]
    assert len(whole) == sum(length for _, length in each)  # unchanged


@pytest.mark.parametrize("size", [0, -1, 6])
def test_more_than_a_memory_has(size: int) -> None:
    with pytest.raises(InvalidArgumentError):
        memory([(0, 5)]).first(size)
