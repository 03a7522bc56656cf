"""``LRU`` against a list that is sorted anew for every call."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.limits import Key, Namespace
from kvstore.master.state.eviction import LRU
from kvstore.master.state.records import ObjectRecord


class LRUMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.policy = LRU()
        self.now_ms = 0
        self.detached: dict[ObjectRecord, bool] = {}  # every candidate
        self.made = 0

    def _candidate(self, data: st.DataObject) -> ObjectRecord:
        return data.draw(st.sampled_from(sorted(self.detached, key=lambda record: record.key)))

    @rule(detached=st.booleans(), used_before=st.integers(0, 30), lease=st.integers(-5, 10))
    def add(self, detached: bool, used_before: int, lease: int) -> None:
        record = ObjectRecord(Namespace("n"), Key(b"%06d" % self.made))
        record.last_used_ms = max(0, self.now_ms - used_before)
        record.lease_until_ms = max(0, self.now_ms + lease)
        self.made += 1
        self.policy.add(record, detached=detached)
        self.detached[record] = detached

    @precondition(lambda self: self.detached)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        record = self._candidate(data)
        self.policy.discard(record)
        del self.detached[record]
        assert record.ticket == 0

    @precondition(lambda self: self.detached)
    @rule(data=st.data(), lease=st.integers(0, 20))
    def use(self, data: st.DataObject, lease: int) -> None:
        record = self._candidate(data)
        record.last_used_ms = self.now_ms
        record.lease_until_ms = max(record.lease_until_ms, self.now_ms + lease)

    @precondition(lambda self: self.detached)
    @rule(data=st.data())
    def end_lease(self, data: st.DataObject) -> None:
        record = self._candidate(data)
        record.lease_until_ms = min(record.lease_until_ms, self.now_ms)
        self.policy.lease_ended(record)

    @rule(by=st.integers(1, 15))
    def let_time_pass(self, by: int) -> None:
        self.now_ms += by

    @rule()
    def evict(self) -> None:
        victim = self._check_peek()
        if victim is not None:
            self.policy.discard(victim)
            del self.detached[victim]

    @rule()
    def look(self) -> None:
        self._check_peek()

    @rule(ticket_of=st.data(), count=st.integers(1, 5))
    def sweep(self, ticket_of: st.DataObject, count: int) -> None:
        in_order = list(self.policy)
        start = ticket_of.draw(st.integers(0, len(in_order)))
        ticket = in_order[start - 1].ticket if start else 0
        assert self.policy.after(ticket, count) == in_order[start : start + count]

    def _check_peek(self) -> ObjectRecord | None:
        victim = self.policy.peek(self.now_ms)
        free = [r for r in self.detached if r.lease_until_ms <= self.now_ms]
        if not free:
            assert victim is None
            assert not self.policy.unfinished
            ends = [record.lease_until_ms for record in self.detached]
            first_end_ms = self.policy.next_lease_end_ms()
            if ends:
                assert first_end_ms is not None
                assert self.now_ms < first_end_ms <= min(ends), "would be woken too late"
            else:
                assert first_end_ms is None
            return None
        assert victim is not None
        order = sorted(free, key=self._rank)
        assert self._rank(victim) == self._rank(order[0]), "not the least recently used"
        assert self.policy.detached(victim) == self.detached[victim]
        return victim

    def _rank(self, record: ObjectRecord) -> tuple[bool, int]:
        if self.detached[record]:
            return False, 0
        return True, record.last_used_ms

    @invariant()
    def nothing_is_lost(self) -> None:
        self.policy.check_invariants()
        assert set(self.policy) == set(self.detached)
        assert len(self.policy) == len(self.detached)


LRUMachine.TestCase.settings = settings(stateful_step_count=40)
test_lru = LRUMachine.TestCase


def test_a_peek_that_meets_too_many_leased_says_that_it_is_unfinished_and_gets_there() -> None:
    policy = LRU()
    records = [ObjectRecord(Namespace("n"), Key(b"%06d" % index)) for index in range(2_000)]
    for record in records:
        policy.add(record)
        record.lease_until_ms = 10
    records[-1].lease_until_ms = 0

    answers = [policy.peek(5)]
    while policy.unfinished:
        answers.append(policy.peek(5))

    assert answers[-1] is records[-1]
    assert answers[:-1] == [None] * (len(answers) - 1)
    assert len(answers) > 2
    policy.check_invariants()
