"""``IntervalSet`` against a set of integers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.master.state import inventory
from kvstore.master.state.inventory import IntervalSet

END = 200


@given(st.lists(st.tuples(st.integers(0, END - 1), st.integers(1, 6)), max_size=80))
def test_ranges_are_what_was_added(pairs: list[tuple[int, int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inventory, "RUN_MAX", 4)
        ranges, taken = IntervalSet(), set[int]()
        for start, length in pairs:
            wanted = set(range(start, start + length))
            assert ranges.is_free(start, start + length) == taken.isdisjoint(wanted)
            if taken.isdisjoint(wanted):
                ranges.add(start, start + length)
                taken |= wanted
        for at in (0, 1, END // 2, END):
            behind = list(ranges.behind(at))
            found = {number for start, stop in behind for number in range(start, stop)}
            assert {n for n in found if n >= at} == {n for n in taken if n >= at}
            assert all(stop > at for _, stop in behind)
            assert behind == sorted(behind)
