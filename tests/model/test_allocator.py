"""``Allocator`` against a map with one entry per unit of memory."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.master.state.allocator import Allocator
from tests.support.invariants import check_invariants, holes

UNIT = 1024
START = 4 * UNIT


class AllocatorMachine(RuleBasedStateMachine):
    @initialize(units=st.integers(0, 24))
    def begin(self, units: int) -> None:
        self.used = [False] * units
        self.taken: list[tuple[int, int]] = []  # (first unit, units)
        self.allocator = Allocator(START, START + units * UNIT)

    @rule(units=st.integers(1, 8))
    def allocate(self, units: int) -> None:
        offset = self.allocator.allocate(units * UNIT)
        if offset is None:
            assert units > max(self._holes(), default=0), "refused what there is room for"
            return
        first = (offset - START) // UNIT
        whole = [hole for hole in self._holes() if hole >= units]
        assert self._hole_at(first) == min(whole), "not the best fit"
        assert not any(self.used[first : first + units])
        assert first + units <= len(self.used)
        self.used[first : first + units] = [True] * units
        self.taken.append((first, units))

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        first, units = self.taken.pop(data.draw(st.integers(0, len(self.taken) - 1)))
        self._free(first, units)

    @precondition(lambda self: any(units > 1 for _, units in self.taken))
    @rule(data=st.data())
    def free_the_tail(self, data: st.DataObject) -> None:
        chosen = data.draw(st.sampled_from([taken for taken in self.taken if taken[1] > 1]))
        first, units = chosen
        kept = data.draw(st.integers(1, units - 1))
        self.taken[self.taken.index(chosen)] = (first, kept)
        self._free(first + kept, units - kept)

    @rule()
    def free_everything(self) -> None:
        for first, units in self.taken:
            self._free(first, units)
        self.taken = []
        size = len(self.used) * UNIT
        assert holes(self.allocator) == ([(START, size)] if size else []), "did not coalesce"

    @invariant()
    def bytes_are_conserved(self) -> None:
        check_invariants(self.allocator)
        assert self.allocator.free_bytes == self.used.count(False) * UNIT
        assert self.allocator.largest_free == max(self._holes(), default=0) * UNIT

    def _free(self, first: int, units: int) -> None:
        self.allocator.free(START + first * UNIT, units * UNIT)
        self.used[first : first + units] = [False] * units

    def _holes(self) -> list[int]:
        runs = "".join(" x"[used] for used in self.used).split("x")
        return [len(run) for run in runs if run]

    def _hole_at(self, first: int) -> int:
        last = first
        while last < len(self.used) and not self.used[last]:
            last += 1
        while first > 0 and not self.used[first - 1]:
            first -= 1
        return last - first


AllocatorMachine.TestCase.settings = settings(stateful_step_count=40)
test_allocator = AllocatorMachine.TestCase
