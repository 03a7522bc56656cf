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

SPACES_MAX: Final = 256
"""Namespaces that a query for all of them examines."""

NEWEST: Final = 512
"""Newest records of a namespace that are searched for leaves; four times as many in a table with
many shards, an eighth in a query for several namespaces."""

WAITING_MAX: Final = 16
"""Maximum number of pending queries."""

SEGMENTS_REPORTED: Final = 8
"""Segments listed per branch: those with the most replicas of its blocks."""

_NEVER: Final = 1 << 62


class _WalkStart:
    def __init__(self, record: ObjectRecord, tip: MatchTip | None) -> None:
        self.record = record
        self.matched = 0 if tip is None else tip.matched
        self.first_ms = _NEVER if tip is None else tip.first_ms


class _OpenBranch:
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
        self.truncated = False
        self.counts: dict[int, int] = {}


class _ChainQuery:
    def __init__(self, reply_id: int, names: list[str], count: int) -> None:
        self.reply_id = reply_id
        self.names = names
        """Namespaces that are not searched for tips yet."""
        self.newest = NEWEST if len(names) == 1 else NEWEST >> 3
        self.count = count
        self.found: list[_WalkStart] = []
        self.tips: list[_WalkStart] = []
        """The chosen tips, after the search."""
        self.started = 0
        """Number of tips whose walk has begun."""
        self.branches: list[_OpenBranch] = []
        self.ends: dict[ObjectRecord, _OpenBranch | None] = {}
        """Forks and tips, with the branch that ends there; None: not walked yet."""
        self.branch: _OpenBranch | None = None
        self.at: ObjectRecord | None = None
        self.steps_left = STEPS_MAX
        self.is_complete = True


class ChainQueries:
    def __init__(self, common: StateContext) -> None:
        self._common = common
        self._forest = common.forest
        self._pool = common.pool
        self._pins = common.pool.pins
        self._lifetimes = common.pool.lifetimes
        self._jobs = common.jobs
        self._queries: deque[_ChainQuery] = deque()

    def find(self, now_ms: int, request: calls.Chains) -> DeferredReply:
        """Raise BusyError if too many queries are pending."""
        del now_ms
        if len(self._queries) >= WAITING_MAX:
            raise BusyError(
                f"too many pending chain queries (limit {WAITING_MAX})", advice="Try again."
            )
        count = request.limit or CHAINS_MAX
        names = [request.namespace] if request.namespace else self._names()
        query = _ChainQuery(self._common.new_reply_id(), [] if request.keys else names, count)
        table = self._forest.table(request.namespace)
        if request.keys and table is not None:
            known = dict(self._tips(request.namespace))
            for key in dict.fromkeys(request.keys):
                record = table.get(key)
                if record is not None:
                    query.found.append(_WalkStart(record, known.get(key)))
        self._queries.append(query)
        self._jobs.due |= DRAW
        return DeferredReply(query.reply_id)

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
        found = [self._block(now_ms, request.namespace, key) for key in request.keys]
        for _ in range(request.above):
            if not found or not found[-1].parent:
                break
            found.append(self._block(now_ms, request.namespace, Key(found[-1].parent)))
        return calls.BlocksReply(found)

    def _block(self, now_ms: int, namespace: str, key: Key) -> calls.BlockStatus:
        record = self._forest.get(namespace, key)
        is_stored = record is not None and self._pool.is_stored(record, now_ms)
        copy = None if is_stored else self._common.disks.get_readable(namespace, key)
        if copy is not None:
            parent, idle_ms = copy.parent or b"", max(0, now_ms - copy.used_ms)
            children = 0 if record is None else record.children
            return calls.BlockStatus(
                key, "on_disk", parent, children, 0, copy.size, idle_ms, 0, 0, []
            )
        if record is None:
            return calls.BlockStatus(key, "absent", b"", 0, 0, 0, 0, 0, 0, [])
        segments: list[int] = []
        if is_stored:
            segments = [segment.segment_id for segment, _ in record.extents() if segment.alive]
        state = "complete" if is_stored else "being_written" if record.writer else "missing"
        return calls.BlockStatus(
            key=key,
            state=state,
            parent=b"" if record.parent is None else record.parent.key,
            children=record.children,
            depth=record.depth,
            size=record.size if is_stored else 0,
            idle_ms=max(0, now_ms - record.last_used_ms),
            leased_ms=max(0, record.lease_until_ms - now_ms),
            pinned_ms=max(0, self._pins.ends.expiry_of(record) - now_ms),
            segments=segments,
        )

    def cancel(self, reply_id: int) -> None:
        for query in self._queries:
            if query.reply_id == reply_id:
                self._queries.remove(query)
                self._jobs.note(DRAW, bool(self._queries))
                return

    def walk_on(self, now_ms: int) -> None:
        """Run a slice of the first query: search tips, walk, or reply."""
        query = self._queries[0]
        if query.names:
            self._visit(now_ms, query)
        elif not query.tips:
            self._choose(now_ms, query)
        elif query.branch is not None or query.started < len(query.tips):
            self._walk(now_ms, query)
        else:
            self._reply(now_ms, query)

    def _visit(self, now_ms: int, query: _ChainQuery) -> None:
        steps = 0
        while query.names and steps < LOOKS:
            name = query.names.pop()
            table = self._forest.table(name)
            if table is None:
                continue
            known = self._tips(name)
            steps += len(known) + 16
            for key, tip in known:
                record = table.get(key)
                if record is not None and self._pool.is_stored(record, now_ms):
                    query.found.append(_WalkStart(record, tip))
            steps += self._visit_newest(query, table)
        query.found = _best(query.found, query.count)

    def _visit_newest(self, query: _ChainQuery, table: NamespaceTable) -> int:
        """Find leaves among the newest records. Return the number of scanned records."""
        shards, limit = len(table.shards), query.newest
        if shards > 1:
            limit = max(1, 4 * limit // shards)
        steps = 0
        for shard in table.shards:
            for record in islice(reversed(shard.values()), limit):
                steps += 1
                if not record.children:
                    query.found.append(_WalkStart(record, None))
        return steps

    def _choose(self, now_ms: int, query: _ChainQuery) -> None:
        chosen = _best(query.found, query.count)
        query.found = []
        if not chosen:
            self._finish(now_ms, query, [])
            return
        query.tips = chosen
        for tip in chosen:
            query.ends[tip.record] = None

    def _walk(self, now_ms: int, query: _ChainQuery) -> None:
        steps = min(STEPS, query.steps_left)
        query.steps_left -= steps
        ends, pins = query.ends, self._pins
        some_ended = now_ms >= self._lifetimes.next_ms
        while steps > 0:
            branch, at = query.branch, query.at
            if branch is None or at is None:
                if query.started == len(query.tips):
                    return
                steps -= 1
                tip = query.tips[query.started]
                record = tip.record
                query.started += 1
                if self._forest.get(record.namespace, record.key) is not record:
                    continue  # removed or evicted in the meantime
                known = ends[record]
                if known is None:
                    known = self._begin(query, record)
                    if known is None:
                        return
                known.ended = known.matched = tip.matched
                known.counted_ms = tip.first_ms
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
                counts = branch.counts
                if segment.alive:
                    counts[segment.segment_id] = counts.get(segment.segment_id, 0) + 1
                for other, _ in at.more:
                    if other.alive:
                        counts[other.segment_id] = counts.get(other.segment_id, 0) + 1
            if pins.holds(at):
                branch.pinned += 1
            parent = at.parent
            query.at = parent
            if parent is None:
                query.branch = None
            elif parent.children > 1 or parent in ends:
                known = ends.get(parent)
                branch.above = known
                if known is None:
                    branch.above = self._begin(query, parent)
                    if branch.above is None:
                        branch.truncated = True
                        return
                else:
                    query.branch = None
        if not query.steps_left and (query.branch or query.started < len(query.tips)):
            query.is_complete = False
            query.started = len(query.tips)
            if query.branch is not None:
                query.branch.truncated = True
                query.branch = None

    def _begin(self, query: _ChainQuery, last: ObjectRecord) -> _OpenBranch | None:
        """Begin a branch that ends at ``last``; None ends the walks: there are too many."""
        if len(query.branches) == BRANCHES_MAX:
            query.is_complete = False
            query.started = len(query.tips)
            query.branch = None
            return None
        branch = _OpenBranch(last)
        query.branches.append(branch)
        query.ends[last] = branch
        query.branch, query.at = branch, last
        return branch

    def _reply(self, now_ms: int, query: _ChainQuery) -> None:
        roots: list[_OpenBranch] = []
        for branch in query.branches:
            if branch.blocks:
                (roots if branch.above is None else branch.above.below).append(branch)
        ordered = _downwards(roots)
        for branch in reversed(ordered):
            parent = branch.above
            if parent is not None:
                parent.matched += branch.matched
                parent.used_ms = max(parent.used_ms, branch.used_ms)
                parent.leased_ms = max(parent.leased_ms, branch.leased_ms)
                parent.counted_ms = min(parent.counted_ms, branch.counted_ms)
        for branch in ordered:
            branch.below.sort(key=_rank)
        roots.sort(key=_rank)
        ordered = _downwards(roots)
        for number, branch in enumerate(ordered, 1):
            branch.number = number
            branch.below = []  # avoids a reference cycle
        self._finish(now_ms, query, [_to_branch(branch, now_ms) for branch in ordered])

    def _finish(self, now_ms: int, query: _ChainQuery, branches: Sequence[calls.Branch]) -> None:
        common = self._common
        self._queries.popleft()
        self._jobs.note(DRAW, bool(self._queries))
        uptime_ms = now_ms - common.started_ms
        reply = calls.ChainsReply(common.epoch, uptime_ms, branches, query.is_complete)
        common.effect(SendReply(query.reply_id, reply))


def _best(found: list[_WalkStart], count: int) -> list[_WalkStart]:
    """Return up to ``count`` starts: half the most matched, half the last used."""
    distinct: dict[ObjectRecord, _WalkStart] = {}
    for start in found:
        known = distinct.get(start.record)
        if known is None or known.matched < start.matched:
            distinct[start.record] = start
    matched = [start for start in distinct.values() if start.matched]
    matched.sort(key=lambda found: -found.matched)
    chosen = matched[: (count + 1) // 2]
    for start in chosen:
        del distinct[start.record]
    rest = list(distinct.values())
    rest.sort(key=lambda found: -found.record.last_used_ms)
    return chosen + rest[: count - len(chosen)]


def _rank(branch: _OpenBranch) -> tuple[int, int]:
    return -branch.matched, -branch.used_ms


def _downwards(roots: list[_OpenBranch]) -> list[_OpenBranch]:
    """Return these branches and their descendants, parents first, except parts of broken chains."""
    ordered: list[_OpenBranch] = []
    waiting = roots[::-1]
    while waiting:
        branch = waiting.pop()
        ordered.append(branch)
        waiting += branch.below[::-1]
    return ordered


def _to_branch(branch: _OpenBranch, now_ms: int) -> calls.Branch:
    counts = sorted(branch.counts.items(), key=lambda row: -row[1])[:SEGMENTS_REPORTED]
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
        truncated=branch.truncated,
        segments=[segment for segment, _ in counts],
        replicas=[count for _, count in counts],
    )
