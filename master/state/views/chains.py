"""Views of the prefix forest for operators: the most used chains and their forks.

A record knows its parent and its number of children. So the tree is built from the tips: each chain
is walked to its root, or to a branch of another walk. A branch ends where the chain forks, so walks
remember only forks and tips.

Tips are those of the last matches (``traffic``), and leaves among the newest records of a
namespace. A reply is computed in slices between other calls: it is not one moment's state, but each
branch existed when it was walked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Final

from kvstore import calls
from kvstore.errors import BusyError
from kvstore.limits import CHAINS_MAX, Key
from kvstore.master.state.background_jobs import DRAW
from kvstore.master.state.effects import DeferredReply, SendReply
from kvstore.master.state.records import NEVER_MS, NamespaceTable, ObjectRecord
from kvstore.master.state.state_context import StateContext
from kvstore.master.state.traffic import MatchTip

STEPS = 6_000
"""Records that one slice walks over: 1 ms."""

LOOKS = 2_000
"""Records that one slice scans for tips before the next namespace: 1 ms."""

STEPS_MAX = 400_000
"""Records that the walks of one reply visit: 70 ms, in slices. Longer chains are truncated."""

BRANCHES_MAX = 256
"""Maximum number of branches in a reply."""

SPACES_MAX: Final = 256
"""Namespaces that a query for all of them examines."""

NEWEST: Final = 512
"""Newest records of a namespace that are searched for leaves; four times as many in a table with
many shards, an eighth in a query for several namespaces."""

WAITING_MAX: Final = 16
"""Maximum number of pending queries."""

SEGMENTS_TOLD: Final = 8
"""Segments listed per branch: those with the most replicas of its blocks."""

_NEVER: Final = 1 << 62
"""Later than any time."""


class _WalkStart:
    """A block from which a chain may be walked."""

    def __init__(self, record: ObjectRecord, tip: MatchTip | None) -> None:
        self.record = record
        self.matched = 0 if tip is None else tip.matched
        self.first_ms = _NEVER if tip is None else tip.first_ms


class _OpenBranch:
    """A ``calls.Branch`` in progress."""

    def __init__(self, last: ObjectRecord) -> None:
        self.last = last
        self.top = last
        self.above: _OpenBranch | None = None
        self.below: list[_OpenBranch] = []
        self.number = 0
        """Number in the reply, from 1."""
        self.blocks = 0
        self.missing = 0
        self.being_written = 0
        self.size = 0
        self.children = last.children
        self.matched = 0
        self.ended = 0
        self.counted_ms = _NEVER
        """Start of the oldest of its match counts."""
        self.used_ms = NEVER_MS
        self.leased_ms = NEVER_MS
        """End of the last lease on one of its blocks."""
        self.pinned = 0
        self.cut = False
        self.places: dict[int, int] = {}


class _ChainQuery:
    """A query and its progress."""

    def __init__(self, ticket: int, names: list[str], count: int) -> None:
        self.ticket = ticket
        self.names = names
        """Namespaces that are not searched for tips yet."""
        self.newest = NEWEST if len(names) == 1 else NEWEST >> 3
        self.count = count
        self.found: list[_WalkStart] = []
        self.tips: list[_WalkStart] = []
        """The chosen tips, after the search."""
        self.place = 0
        """Number of tips whose walk has begun."""
        self.branches: list[_OpenBranch] = []
        self.marks: dict[ObjectRecord, _OpenBranch | None] = {}
        """Forks and tips, with the branch that ends there; None: not walked yet."""
        self.branch: _OpenBranch | None = None
        """The current branch."""
        self.at: ObjectRecord | None = None
        """The next block of the current branch."""
        self.steps_left = STEPS_MAX
        self.whole = True


class ChainQueries:
    def __init__(self, common: StateContext) -> None:
        self._common = common
        self._forest = common.forest
        self._pool = common.pool
        self._pins = common.pool.pins
        self._lifetimes = common.pool.lifetimes
        self._jobs = common.jobs
        self._questions: deque[_ChainQuery] = deque()

    # --- calls --------------------------------------------------------------------------------

    def find(self, now_ms: int, request: calls.Chains) -> DeferredReply:
        """Raise BusyError if too many queries are pending."""
        del now_ms
        if len(self._questions) >= WAITING_MAX:
            raise BusyError(
                f"too many pending chain queries (limit {WAITING_MAX})", advice="Try again."
            )
        count = request.limit or CHAINS_MAX
        names = [request.namespace] if request.namespace else self._names()
        question = _ChainQuery(self._common.new_reply_id(), [] if request.keys else names, count)
        table = self._forest.table(request.namespace)
        if request.keys and table is not None:
            known = dict(self._tips(request.namespace))
            for key in dict.fromkeys(request.keys):
                record = table.get(key)
                if record is not None:
                    question.found.append(_WalkStart(record, known.get(key)))
        self._questions.append(question)
        self._jobs.due |= DRAW
        return DeferredReply(question.ticket)

    def _names(self) -> list[str]:
        """Return the last used namespaces, and others if those are few."""
        names: dict[str, None] = {}
        for space in reversed(self._common.traffic.spaces("")):
            names[space.name] = None
        for name in islice(self._forest.namespaces.tables, SPACES_MAX):
            names[name] = None
        return list(islice(names, SPACES_MAX))

    def _tips(self, namespace: str) -> list[tuple[Key, MatchTip]]:
        spaces = self._common.traffic.spaces(namespace)
        return spaces[0].tips.items() if spaces else []

    def blocks(self, now_ms: int, request: calls.Blocks) -> calls.BlocksReply:
        table = self._forest.table(request.namespace)
        found: list[calls.BlockStatus] = []
        record: ObjectRecord | None = None
        for key in request.keys:
            record = None if table is None else table.get(key)
            found.append(self._block(now_ms, key, record))
        for _ in range(request.above):
            record = None if record is None else record.parent
            if record is None:
                break
            found.append(self._block(now_ms, record.key, record))
        return calls.BlocksReply(found)

    def _block(self, now_ms: int, key: Key, record: ObjectRecord | None) -> calls.BlockStatus:
        if record is None:
            return calls.BlockStatus(key, "absent", b"", 0, 0, 0, 0, 0, 0, [])
        there = self._pool.is_stored(record, now_ms)
        segments: list[int] = []
        if there:
            segments = [segment.segment_id for segment, _ in record.extents() if segment.alive]
        state = "complete" if there else "being_written" if record.writer else "missing"
        return calls.BlockStatus(
            key=key,
            state=state,
            parent=b"" if record.parent is None else record.parent.key,
            children=record.children,
            depth=record.depth,
            size=record.size if there else 0,
            idle_ms=max(0, now_ms - record.last_used_ms),
            leased_ms=max(0, record.lease_until_ms - now_ms),
            pinned_ms=max(0, self._pins.ends.expiry_of(record) - now_ms),
            segments=segments,
        )

    def cancel(self, ticket: int) -> None:
        for question in self._questions:
            if question.ticket == ticket:
                self._questions.remove(question)
                self._jobs.note(DRAW, bool(self._questions))
                return

    # --- slices -------------------------------------------------------------------------------

    def walk_on(self, now_ms: int) -> None:
        """Run a slice of the first query: search tips, walk, or reply."""
        question = self._questions[0]
        if question.names:
            self._visit(now_ms, question)
        elif not question.tips:
            self._choose(now_ms, question)
        elif question.branch is not None or question.place < len(question.tips):
            self._walk(now_ms, question)
        else:
            self._reply(now_ms, question)

    def _visit(self, now_ms: int, question: _ChainQuery) -> None:
        """Search the next namespaces for tips."""
        steps = 0
        while question.names and steps < LOOKS:
            name = question.names.pop()
            table = self._forest.table(name)
            if table is None:
                continue
            known = self._tips(name)
            steps += len(known) + 16
            for key, tip in known:
                record = table.get(key)
                if record is not None and self._pool.is_stored(record, now_ms):
                    question.found.append(_WalkStart(record, tip))
            steps += self._visit_newest(question, table)
        question.found = _best(question.found, question.count)

    def _visit_newest(self, question: _ChainQuery, table: NamespaceTable) -> int:
        """Find leaves among the newest records. Return the number of scanned records."""
        shards, each = len(table.shards), question.newest
        if shards > 1:
            each = max(1, 4 * each // shards)
        steps = 0
        for shard in table.shards:
            for record in islice(reversed(shard.values()), each):
                steps += 1
                if not record.children:
                    question.found.append(_WalkStart(record, None))
        return steps

    def _choose(self, now_ms: int, question: _ChainQuery) -> None:
        """Choose the tips from which chains are walked."""
        chosen = _best(question.found, question.count)
        question.found = []
        if not chosen:
            self._finish(now_ms, question, [])
            return
        question.tips = chosen
        for tip in chosen:
            question.marks[tip.record] = None

    def _walk(self, now_ms: int, question: _ChainQuery) -> None:
        """Continue the walks, over up to ``STEPS`` records."""
        steps = min(STEPS, question.steps_left)
        question.steps_left -= steps
        marks, pins = question.marks, self._pins
        some_ended = now_ms >= self._lifetimes.next_ms
        while steps > 0:
            branch, at = question.branch, question.at
            if branch is None or at is None:
                if question.place == len(question.tips):
                    return
                steps -= 1
                tip = question.tips[question.place]
                record = tip.record
                question.place += 1
                if self._forest.get(record.namespace, record.key) is not record:
                    continue  # removed or evicted in the meantime
                above = marks[record]
                if above is None:
                    above = self._begin(question, record)
                    if above is None:
                        return
                above.ended = above.matched = tip.matched
                above.counted_ms = tip.first_ms
                continue
            steps -= 1
            branch.blocks += 1
            branch.top = at
            branch.used_ms = max(branch.used_ms, at.last_used_ms)
            branch.leased_ms = max(branch.leased_ms, at.lease_until_ms)
            segment = at.segment
            if (
                segment is None
                or not (segment.alive or at.complete)
                or (some_ended and self._lifetimes.ended(at, now_ms))
            ):
                if at.writer:
                    branch.being_written += 1
                else:
                    branch.missing += 1
            else:
                branch.size += at.size
                places = branch.places
                if segment.alive:
                    places[segment.segment_id] = places.get(segment.segment_id, 0) + 1
                for other, _ in at.more:
                    if other.alive:
                        places[other.segment_id] = places.get(other.segment_id, 0) + 1
            if pins.holds(at):
                branch.pinned += 1
            parent = at.parent
            question.at = parent
            if parent is None:
                question.branch = None
            elif parent.children > 1 or parent in marks:
                known = marks.get(parent)
                branch.above = known
                if known is None:
                    branch.above = self._begin(question, parent)
                    if branch.above is None:
                        branch.cut = True
                        return
                else:
                    question.branch = None
        if not question.steps_left and (question.branch or question.place < len(question.tips)):
            question.whole = False
            question.place = len(question.tips)
            if question.branch is not None:
                question.branch.cut = True
                question.branch = None

    def _begin(self, question: _ChainQuery, last: ObjectRecord) -> _OpenBranch | None:
        """Begin a branch that ends at ``last``; None ends the walks: there are too many."""
        if len(question.branches) == BRANCHES_MAX:
            question.whole = False
            question.place = len(question.tips)
            question.branch = None
            return None
        branch = _OpenBranch(last)
        question.branches.append(branch)
        question.marks[last] = branch
        question.branch, question.at = branch, last
        return branch

    def _reply(self, now_ms: int, question: _ChainQuery) -> None:
        """Sort the branches, parents first, and reply."""
        roots: list[_OpenBranch] = []
        for branch in question.branches:
            if branch.blocks:
                (roots if branch.above is None else branch.above.below).append(branch)
        ordered = _downwards(roots)
        for branch in reversed(ordered):
            above = branch.above
            if above is not None:
                above.matched += branch.matched
                above.used_ms = max(above.used_ms, branch.used_ms)
                above.leased_ms = max(above.leased_ms, branch.leased_ms)
                above.counted_ms = min(above.counted_ms, branch.counted_ms)
        for branch in ordered:
            branch.below.sort(key=_rank)
        roots.sort(key=_rank)
        ordered = _downwards(roots)
        for number, branch in enumerate(ordered, 1):
            branch.number = number
            branch.below = []  # avoids a reference cycle
        self._finish(now_ms, question, [_to_branch(branch, now_ms) for branch in ordered])

    def _finish(self, now_ms: int, question: _ChainQuery, branches: Sequence[calls.Branch]) -> None:
        common = self._common
        self._questions.popleft()
        self._jobs.note(DRAW, bool(self._questions))
        uptime_ms = now_ms - common.started_ms
        reply = calls.ChainsReply(common.epoch, uptime_ms, branches, question.whole)
        common.effect(SendReply(question.ticket, reply))


def _best(found: list[_WalkStart], count: int) -> list[_WalkStart]:
    """Return up to ``count`` starts: half the most matched, half the last used."""
    distinct: dict[ObjectRecord, _WalkStart] = {}
    for each in found:
        known = distinct.get(each.record)
        if known is None or known.matched < each.matched:
            distinct[each.record] = each
    matched = [each for each in distinct.values() if each.matched]
    matched.sort(key=lambda found: -found.matched)
    chosen = matched[: (count + 1) // 2]
    for each in chosen:
        del distinct[each.record]
    rest = list(distinct.values())
    rest.sort(key=lambda found: -found.record.last_used_ms)
    return chosen + rest[: count - len(chosen)]


def _rank(branch: _OpenBranch) -> tuple[int, int]:
    return -branch.matched, -branch.used_ms


def _downwards(roots: list[_OpenBranch]) -> list[_OpenBranch]:
    """Return these branches and their descendants, parents first. Branches whose chain was broken
    up between two slices are omitted."""
    ordered: list[_OpenBranch] = []
    waiting = roots[::-1]
    while waiting:
        branch = waiting.pop()
        ordered.append(branch)
        waiting += branch.below[::-1]
    return ordered


def _to_branch(branch: _OpenBranch, now_ms: int) -> calls.Branch:
    places = sorted(branch.places.items(), key=lambda place: -place[1])[:SEGMENTS_TOLD]
    return calls.Branch(
        namespace=branch.last.namespace,
        above=0 if branch.above is None else branch.above.number,
        first=branch.top.key,
        last=branch.last.key,
        blocks=branch.blocks,
        missing=branch.missing,
        being_written=branch.being_written,
        size=branch.size,
        depth=branch.last.depth,
        children=branch.children,
        matched=branch.matched,
        matches_ended=branch.ended,
        counted_ms=max(0, now_ms - branch.counted_ms),
        idle_ms=max(0, now_ms - branch.used_ms),
        leased_ms=max(0, branch.leased_ms - now_ms),
        pinned=branch.pinned,
        truncated=branch.cut,
        segments=[segment for segment, _ in places],
        replicas=[count for _, count in places],
    )
