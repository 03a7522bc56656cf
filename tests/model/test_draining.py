"""Draining against a dictionary: whatever happens meanwhile, a move changes no object.

The version of a key says which bytes it holds; a move gives it a new version. So the model knows
for each version which put its bytes are from, and for each key which bytes it must have.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore import calls
from kvstore.calls import DrainStep, PutOutcome, Version
from kvstore.errors import BusyError, InvalidArgumentError, NoSpaceError
from kvstore.limits import Key
from kvstore.master.state.effects import Later
from kvstore.master.state.rules import MasterRules
from tests.unit.master.cluster import EPOCH, NAMESPACE, Cluster

NAMES = "abcde"
NODES = ("n0", "n1", "n2")

names = st.sampled_from(NAMES)
nodes = st.sampled_from(NODES)


class DrainMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.cluster = Cluster(dict.fromkeys(NODES, 6), MasterRules())
        self.puts = 0
        self.holds: dict[str, int] = {}
        """Number of the put whose bytes a key has, if it is there; what is evicted stays here."""
        self.written: dict[Version, int] = {}
        """Of each version that is or was complete, the number of that put."""
        self.moves: dict[int, tuple[str, Version]] = {}
        """By token: what was to be moved."""
        self.overwrites: dict[int, tuple[str, int]] = {}
        self.evicts = False
        """Whether the next drain may evict."""
        self.evict_up_to = calls.NO_VERSION

    # --- what others do ----------------------------------------------------------------------

    @rule(start=st.integers(0, 4), count=st.integers(1, 4), node=nodes)
    def put_chain(self, start: int, count: int, node: str) -> None:
        some = NAMES[start : start + count]
        parent = NAMES[start - 1] if start else None
        request = calls.PutStart(
            NAMESPACE, [Key(name.encode()) for name in some], [3072] * len(some),
            None if parent is None else Key(parent.encode()), True, 1, False, 0, f"host-{node}",
        )  # fmt: skip
        self._put(some, request)

    @rule(name=names, node=nodes, later=st.booleans())
    def overwrite(self, name: str, node: str, later: bool) -> None:
        parent = NAMES[NAMES.index(name) - 1] if name != "a" else None
        request = calls.PutStart(
            NAMESPACE, [Key(name.encode())], [3072],
            None if parent is None else Key(parent.encode()), True, 1, True, 0, f"host-{node}",
        )  # fmt: skip
        self._put(name, request, later=later)

    def _put(self, some: str, request: calls.PutStart, *, later: bool = False) -> None:
        cluster = self.cluster
        try:
            result = cluster.state.putting.put_start(cluster.now_ms, request)
        except (NoSpaceError, InvalidArgumentError, BusyError):
            cluster._settle()
            return
        cluster._settle()
        grants = cluster.answers.pop(result.ticket) if isinstance(result, Later) else result
        assert isinstance(grants, calls.Grants)
        granted = [n for n, o in zip(some, grants.outcomes, strict=True) if o == PutOutcome.WRITE]
        for name, token in zip(granted, grants.tokens, strict=True):
            self.puts += 1
            self.overwrites[token] = (name, self.puts)
        if not later:
            self._end(list(grants.tokens))

    @precondition(lambda self: self.overwrites)
    @rule(data=st.data())
    def end_an_overwrite(self, data: st.DataObject) -> None:
        self._end([data.draw(st.sampled_from(sorted(self.overwrites)))])

    @rule(name=names)
    def remove(self, name: str) -> None:
        self.cluster.remove(name)
        self.holds.pop(name, None)

    @rule(count=st.integers(1, 5))
    def match(self, count: int) -> None:
        self.cluster.match(NAMES[:count])

    @rule(ms=st.sampled_from([250, 3_000, 11_000, 60_000]))
    def time_passes(self, ms: int) -> None:
        self.cluster.after(ms)
        until = MasterRules().put_deadline_ms
        if ms > until:
            self.overwrites.clear()
            self.moves.clear()

    # --- draining ----------------------------------------------------------------------------

    @rule(node=nodes, step=st.sampled_from([DrainStep.BEGIN, DrainStep.BEGIN, DrainStep.UNDO]))
    def drain(self, node: str, step: DrainStep) -> None:
        drained = self.cluster.state.nodes.drain(self.cluster.now_ms, calls.Drain(node, step))
        self.evict_up_to = drained.began if self.evicts else calls.NO_VERSION
        self.cluster._settle()

    @rule(evicts=st.booleans())
    def choose(self, evicts: bool) -> None:
        self.evicts = evicts

    @rule(node=nodes, limit=st.integers(1, 5), again=st.booleans(), end=st.booleans())
    def move(self, node: str, limit: int, again: bool, end: bool) -> None:
        if not self.cluster.state.membership.nodes[node].draining:
            return
        cursor = 0
        for _ in range(64):
            cursor = self._start_moves(node, cursor, limit)
            if end:
                self._end(sorted(self.moves))
            if not cursor or not again:
                return
        raise AssertionError("the pass does not end")

    @rule(
        node=nodes,
        limit=st.integers(1, 5),
        name=names,
        meanwhile=st.sampled_from(["overwritten", "removed", "moved", "removed and put"]),
    )
    def move_what_changes(self, node: str, limit: int, name: str, meanwhile: str) -> None:
        self.drain(node, DrainStep.BEGIN)
        self._start_moves(node, 0, limit)
        match meanwhile:
            case "overwritten":
                self.overwrite(name, NODES[0], later=False)
            case "removed":
                self.remove(name)
            case "removed and put":
                self.remove(name)
                self.put_chain(NAMES.index(name), 1, NODES[0])
            case _:
                self._start_moves(node, 0, limit)
        self._end(sorted(self.moves))

    def _start_moves(self, node: str, cursor: int, limit: int) -> int:
        cluster = self.cluster
        request = calls.StartMoves(node, cursor, limit, 1 << 30, evict_up_to=self.evict_up_to)
        before = {name: version for name in NAMES if (version := self._version(name))}
        result = cluster.state.copying.start_moves(cluster.now_ms, request)
        evicted = [before[name] for name in before if self._version(name) is None]
        assert all(version <= self.evict_up_to for version in evicted), (evicted, request)
        cluster._settle()
        started = cluster.reply(result)
        assert isinstance(started, calls.MovesStarted)
        draining = {n.name for n in cluster.state.membership.nodes.values() if n.draining}
        targets = {cluster.segments[segment] for segment in started.grants.segments}
        assert not targets & draining, "moved to a node that is drained, too"
        sources = started.sources
        rows = zip(
            started.keys, sources.epochs, sources.counters, started.grants.tokens, strict=True
        )
        for key, epoch, counter, token in rows:
            self.moves[token] = (key.decode(), Version(epoch, counter))
        return started.next_cursor

    @precondition(lambda self: self.moves)
    @rule(data=st.data(), all_of_them=st.booleans())
    def end_moves(self, data: st.DataObject, all_of_them: bool) -> None:
        tokens = sorted(self.moves)
        if not all_of_them:
            tokens = data.draw(st.lists(st.sampled_from(tokens), unique=True, min_size=1))
        self._end(tokens)

    @precondition(lambda self: self.moves)
    @rule(data=st.data(), settled=st.booleans())
    def give_a_move_up(self, data: st.DataObject, settled: bool) -> None:
        token = data.draw(st.sampled_from(sorted(self.moves)))
        del self.moves[token]
        request = calls.PutRevoke(EPOCH, [token], settled)
        self.cluster.state.putting.put_revoke(self.cluster.now_ms, request)
        self.cluster._settle()

    # --- what must hold ----------------------------------------------------------------------

    def _end(self, tokens: list[int]) -> None:
        before = {name: self._version(name) for name in NAMES}
        outcomes = self.cluster.end_tokens(tokens)
        for token, outcome in zip(tokens, outcomes, strict=True):
            version = Version(EPOCH, token)
            if token in self.moves:
                name, copied = self.moves.pop(token)
                unchanged = before[name] == copied
                assert (outcome is PutOutcome.STORED) is unchanged, (name, copied, before)
                if unchanged:
                    self.written[version] = self.written[copied]
                    before[name] = version
            else:
                name, number = self.overwrites.pop(token)
                if outcome is PutOutcome.STORED:
                    self.written[version] = self.holds[name] = number
                    before[name] = version

    def _version(self, name: str) -> Version | None:
        if name not in self.cluster.present(NAMES):
            return None
        return self.cluster.stat(name).version

    @invariant()
    def what_is_there_is_what_was_put(self) -> None:
        self.cluster.state.check_invariants()
        for name in self.cluster.present(NAMES):
            version = self.cluster.stat(name).version
            assert self.written[version] == self.holds.get(name), f"{name} has other bytes"


TestDraining = DrainMachine.TestCase
TestDraining.settings = settings(stateful_step_count=40)
