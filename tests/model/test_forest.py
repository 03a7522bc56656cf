"""``Forest`` against dictionaries from which reachability is computed anew every time."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.calls import SegmentOffer
from kvstore.errors import InvalidArgumentError
from kvstore.limits import Key, Namespace
from kvstore.master.state.forest import Forest
from kvstore.master.state.liveness import JoinedNode
from kvstore.master.state.records import MountedSegment, ObjectRecord
from tests.support.invariants import check_invariants

NAMESPACE = Namespace("n")
KEYS = [Key(b"%02d" % index) for index in range(20)]
CHAINS = st.builds(lambda start, count: KEYS[start : start + count], *[st.integers(0, 20)] * 2)
ANY_KEYS = CHAINS | st.lists(st.sampled_from(KEYS), max_size=8)


def segment(number: int) -> MountedSegment:
    offer = SegmentOffer(1 << 20, b"%016d" % number, "", "", b"", 0, 1, True)
    return MountedSegment(number, JoinedNode("node", "host", None, 0), offer, 0)


class ForestMachine(RuleBasedStateMachine):
    """Plays the part of ``Pool``: it gives bytes and takes them, and forgets what has no reason."""

    def __init__(self) -> None:
        super().__init__()
        self.forest = Forest()
        self.segments = {number: segment(number) for number in range(2)}
        self.parent: dict[Key, Key | None] = {}  # of every record
        self.on: dict[Key, int] = {}  # number of its segment, for complete ones
        self.written: set[Key] = set()

    # --- what a put, a removal and a death do ------------------------------------------------

    @rule(key=st.sampled_from(KEYS), parent=st.none() | st.sampled_from(KEYS), on=st.integers(0, 1))
    def store(self, key: Key, parent: Key | None, on: int) -> None:
        self._store(key, parent, on)

    @rule(key=st.sampled_from(KEYS), parent=st.none() | st.sampled_from(KEYS))
    def begin(self, key: Key, parent: Key | None) -> None:
        """A put starts: its record has a place, but no bytes yet."""
        self._place(key, parent)

    @precondition(lambda self: self.written)
    @rule(data=st.data(), on=st.integers(0, 1), given_up=st.booleans())
    def end(self, data: st.DataObject, on: int, given_up: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.written)))
        self._finish(key, None if given_up else on)

    @rule(keys=CHAINS, on=st.integers(0, 1), backwards=st.booleans(), data=st.data())
    def store_chain(self, keys: list[Key], on: int, backwards: bool, data: st.DataObject) -> None:
        """The blocks of one prefix, most often in order, in reverse, or shuffled."""
        pairs = list(zip(keys, [None, *keys], strict=False))
        if keys and keys[0] != KEYS[0]:
            pairs[0] = (keys[0], KEYS[KEYS.index(keys[0]) - 1])
        if backwards:
            pairs.reverse()
        elif data.draw(st.integers(0, 3)) == 0:
            pairs = data.draw(st.permutations(pairs))
        for key, parent in pairs:
            self._store(key, parent, on)

    def _store(self, key: Key, parent: Key | None, on: int) -> None:
        self._place(key, parent)
        if key in self.written:
            self._finish(key, on)

    def _place(self, key: Key, parent: Key | None) -> None:
        if key in self.on or key in self.written or key == parent:
            return  # found, being written, or refused by the caller
        record = self.forest.ensure(NAMESPACE, key)
        if record.lost:
            self.forest.drop_bytes(record)
        self.parent.setdefault(key, None)
        above = None
        if parent is not None:
            above = self.forest.ensure(NAMESPACE, parent)
            self.parent.setdefault(parent, None)
        rings = self._leads_to(parent, key)
        try:
            before = self.forest.link(record, above)
        except InvalidArgumentError:
            assert rings
            self._tidy(record)
            if above is not None:
                self._tidy(above)
            return
        assert not rings, "closed a ring"
        self.parent[key] = parent
        record.writer = 1
        self.written.add(key)
        if before is not None:
            self._tidy(before)

    def _finish(self, key: Key, on: int | None) -> None:
        record = self.forest.get(NAMESPACE, key)
        assert record is not None
        record.writer = 0
        self.written.remove(key)
        if on is None:
            self._tidy(record)
            return
        record.segment = self.segments[on]
        self.forest.mark_complete(record, 1)
        self.on[key] = on

    @precondition(lambda self: self.on)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        """Anywhere, also in the middle of a chain."""
        key = data.draw(st.sampled_from(sorted(self.on)))
        record = self.forest.get(NAMESPACE, key)
        assert record is not None
        self.forest.drop_bytes(record)
        del self.on[key]
        self._tidy(record)

    @rule(number=st.integers(0, 1))
    def segment_dies(self, number: int) -> None:
        self.segments[number].alive = False
        self.forest.breaks += 1
        self.on = {key: on for key, on in self.on.items() if on != number}
        self.segments[number] = segment(number)

    @rule()
    def sweep(self) -> None:
        """Lost leaves go, as the pool's sweeps let them."""
        for key in list(self.parent):
            record = self.forest.get(NAMESPACE, key)
            if record is not None and record.lost and not record.children:
                self.forest.drop_bytes(record)
                self._tidy(record)

    def _tidy(self, record: ObjectRecord | None) -> None:
        while record is not None and not record.children:
            if record.lost:
                self.forest.drop_bytes(record)
            if record.segment is not None or record.writer:
                return
            if self.forest.get(NAMESPACE, record.key) is not record:
                return
            del self.parent[record.key]
            record = self.forest.forget(record)

    def _leads_to(self, start: Key | None, key: Key) -> bool:
        while start is not None:
            if start == key:
                return True
            start = self.parent[start]
        return False

    # --- what is asked -----------------------------------------------------------------------

    def _reachable(self, key: Key) -> bool:
        at: Key | None = key
        while at is not None:
            if at not in self.on:
                return False
            at = self.parent[at]
        return True

    def _is_chain(self, keys: list[Key]) -> bool:
        return all(self.parent.get(key) == above for above, key in pairwise(keys))

    @rule(keys=ANY_KEYS)
    def match(self, keys: list[Key]) -> None:
        table = self.forest.table(NAMESPACE)
        if table is None:
            assert not self.on
            return
        expected = 0
        while expected < len(keys) and self._reachable(keys[expected]):
            expected += 1

        found = self.forest.match(table, keys, records=True)

        assert found.matched == expected
        assert [record.key for record in found.records] == keys[:expected]
        held = {key for tip in found.holding for key in self._path(tip.key)}
        assert held >= set(keys[:expected]), "matched, but no lease holds it"
        if self._is_chain(keys):
            quick = self.forest.match(table, keys)
            assert quick.matched == expected
            assert len(quick.holding) == min(expected, 1)

    def _path(self, key: Key) -> list[Key]:
        path: list[Key] = []
        at: Key | None = key
        while at is not None:
            path.append(at)
            at = self.parent[at]
        return path

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=4))
    def look(self, keys: list[Key]) -> None:
        for key in keys:
            record = self.forest.get(NAMESPACE, key)
            if record is not None:
                assert self.forest.is_reachable(record) == self._reachable(key)
            else:
                assert key not in self.on

    @invariant()
    def forest_and_model_agree(self) -> None:
        check_invariants(self.forest)
        records = {record.key: record for record in self.forest.records()}
        assert {key for key, record in records.items() if record.complete} == set(self.on)
        for key, record in records.items():
            assert self.parent[key] == (None if record.parent is None else record.parent.key)
        assert records.keys() == self.parent.keys()

    def teardown(self) -> None:
        for key in sorted(self.written):
            self._finish(key, None)
        for key in KEYS:  # whatever happened: everything stored anew is one whole chain
            self._store(key, KEYS[KEYS.index(key) - 1] if key != KEYS[0] else None, 0)
        table = self.forest.table(NAMESPACE)
        assert table is not None
        if self._is_chain(KEYS):
            assert self.forest.match(table, KEYS).matched == len(KEYS)


ForestMachine.TestCase.settings = settings(stateful_step_count=40)
test_forest = ForestMachine.TestCase
