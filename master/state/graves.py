"""Removed objects: hidden at once, wiped on their nodes, their bytes free one lease later.

Extents of evicted objects and abandoned puts are wiped, too, before they are granted again. So a
valid header in memory always belongs to an object, and implies its payload after a restart.

The master does not count the readers of a removed object. Its extents are free when (a) the longest
possible lease on it has ended, and (b) its node has reported that the header is wiped, so that no
restart finds the object again. A removal is acknowledged at (b), because readers refuse a wiped
header. A segment that dies counts as wiped at (a): the master accepts none of its objects when it
joins anew, but until then a client with a lease may read there, if only the master cannot reach
the node.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from kvstore import calls
from kvstore.calls import NO_MARK, MasterWipe, Version
from kvstore.master.state.effects import Answer, Effect, Send
from kvstore.master.state.records import Name, ObjectRecord, Remains, Segment, Writer
from kvstore.memory.header import extent_bytes

WIPES_PER_ORDER = 1_024
"""Extents of an order are freed in one step: about 2 ms."""


@dataclass(slots=True, eq=False)
class Grave:
    """The extents of one wipe order, all on one segment."""

    order: int
    segment: Segment
    free_at_ms: int
    removals: list[_Removal]
    names: list[Name] = field(default_factory=list)
    namespaces: set[str] = field(default_factory=set)
    """Of those."""
    offsets: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)
    counters: list[int] = field(default_factory=list)
    wiped: bool = False
    ended: bool = False
    """Whether the last possible lease has ended."""
    mark: Version = NO_MARK
    """The mark that the node must keep, when the headers are wiped."""
    writers: dict[Writer, None] = field(default_factory=dict)
    """Connections that the node must end before it wipes the headers."""
    ahead: bool = False
    """Evicted ahead of need."""
    released: bool = False
    """Whether the extents have been handed back, to the allocator or to quarantine."""

    def free(self) -> None:
        if self.segment.alive:
            for offset, length in zip(self.offsets, self.lengths, strict=True):
                self.segment.allocator.free(offset, length)

    def order_message(self) -> MasterWipe:
        uuid = self.segment.offer.uuid
        return MasterWipe(
            self.order,
            uuid,
            self.offsets,
            self.epochs,
            self.counters,
            self.mark,
            [client for client, _ in self.writers],
            [connection for _, connection in self.writers],
        )


@dataclass(slots=True, eq=False)
class _Removal:
    """An answer that waits until the last of these orders is done."""

    ticket: int
    reply: calls.Reply
    orders: int = 0


class Graveyard:
    """All removed objects whose extents are not free."""

    def __init__(self) -> None:
        self._by_end: deque[Grave] = deque()
        self._unwiped: dict[int, Grave] = {}
        self._unwiped_of: dict[Name, list[Grave]] = {}
        self._unclean: dict[Segment, dict[int, Grave]] = {}
        """Released orders not done yet, by segment and number."""
        self._mourned: deque[tuple[Version, Grave]] = deque()
        """Segments that died within the last lease, each with ``newest`` of ``mourn``."""
        self._held: dict[Segment, Grave] = {}
        """Segments that have not told yet what they hold."""
        self._next_order = 0
        self._ordered: deque[tuple[int, int]] = deque()
        """Times at which ``unanswered`` was called, and the last order at each."""

    def of_objects(self, names: Iterable[Name]) -> list[Grave]:
        """Unfinished orders that concern these objects."""
        graves = {grave.order: grave for name in names for grave in self._unwiped_of.get(name, ())}
        return list(graves.values())

    def of_namespace(self, namespace: str) -> list[Grave]:
        """Unfinished orders that concern this namespace; empty: any namespace."""
        return [
            grave
            for grave in self._unwiped.values()
            if not namespace or namespace in grave.namespaces
        ]

    def bury(
        self,
        gone: Iterable[Remains],
        free_at_ms: int,
        ticket: int,
        reply: calls.Reply,
        earlier: Sequence[Grave],
    ) -> tuple[list[Effect], bool]:
        """Order the headers wiped, and answer ``ticket`` with ``reply`` when they are, and those
        of ``earlier`` orders, too.

        ``free_at_ms``: when no lease of the usual length is left. One grave with a longer one (an
        allocation that was put) delays those behind it, which is simpler than a heap. Returns the
        effects and whether there is anything to wait for.
        """
        removal = _Removal(ticket, reply)
        graves = self._dig(gone, free_at_ms)
        self._by_end.extend(graves)
        for grave in dict.fromkeys((*graves, *earlier)):
            grave.removals.append(removal)
            removal.orders += 1
        return [effect for grave in graves for effect in _send(grave)], removal.orders > 0

    def clean(self, gone: Iterable[Remains]) -> list[Effect]:
        """Orders headers wiped in extents whose release is counted elsewhere."""
        effects: list[Effect] = []
        for grave in self._dig(gone, 0):
            grave.ended = grave.released = True
            self._unclean.setdefault(grave.segment, {})[grave.order] = grave
            effects += _send(grave)
        return effects

    def mourn(self, segment: Segment, newest: Version, until_ms: int) -> None:
        """Called when a segment died; until ``until_ms`` clients may read leased objects on it.

        Args:
            newest: versions up to this one were stored before, if at all.
            until_ms: not earlier than in any call before.
        """
        self._next_order += 1
        grave = Grave(self._next_order, segment, until_ms, [])
        self._unwiped[grave.order] = grave
        self._mourned.append((newest, grave))

    def mourned(self, record: ObjectRecord | None) -> list[Grave]:
        """Dead segments on which clients may still read an earlier version of this object, or a
        version that this master no longer knows."""
        if not self._mourned:
            return []
        if record is None or not record.complete:
            return [grave for _, grave in self._mourned]
        version = record.epoch, record.counter
        on = {segment for segment, _ in record.extents()}
        return [g for newest, g in self._mourned if version > newest or g.segment in on]

    def keep_mark(self, segment: Segment, mark: Version) -> list[Effect]:
        """Orders the node to keep the mark, after all earlier orders."""
        self._next_order += 1
        grave = Grave(self._next_order, segment, 0, [], mark=mark, ended=True, released=True)
        self._unwiped[grave.order] = grave
        self._unclean.setdefault(segment, {})[grave.order] = grave
        return _send(grave)

    def unmarked(self) -> list[Grave]:
        """Unfinished orders to keep a mark."""
        return [
            grave
            for graves in self._unclean.values()
            for grave in graves.values()
            if grave.mark != NO_MARK
        ]

    def clean_ahead(self, gone: Iterable[Remains]) -> list[Effect]:
        """Order headers wiped, and free their extents when that is done; they are counted in their
        segments' ``wiping_bytes``."""
        graves = self._dig(gone, 0)
        for grave in graves:
            grave.ended = grave.ahead = True
        return [effect for grave in graves for effect in _send(grave)]

    def unclean(self, segments: Iterable[Segment]) -> list[Grave]:
        """Orders that must be done before a client may write to free extents of these segments."""
        if not self._unclean:
            return []
        return [
            grave
            for segment in dict.fromkeys(segments)
            for grave in self._unclean.get(segment, {}).values()
        ]

    def _dig(self, gone: Iterable[Remains], free_at_ms: int) -> list[Grave]:
        graves: list[Grave] = []
        open_graves: dict[Segment, Grave] = {}
        for remains in gone:
            length = extent_bytes(remains.size)
            for segment, offset in remains.extents:
                if not segment.alive:
                    continue
                grave = open_graves.get(segment)
                if grave is None or len(grave.offsets) == WIPES_PER_ORDER:
                    self._next_order += 1
                    grave = Grave(self._next_order, segment, free_at_ms, [])
                    open_graves[segment] = grave
                    graves.append(grave)
                    self._unwiped[grave.order] = grave
                if remains.name is not None:
                    grave.names.append(remains.name)
                    grave.namespaces.add(remains.name[0])
                    self._unwiped_of.setdefault(remains.name, []).append(grave)
                grave.free_at_ms = max(grave.free_at_ms, remains.lease_until_ms)
                grave.offsets.append(offset)
                grave.lengths.append(length)
                grave.epochs.append(remains.epoch)
                grave.counters.append(remains.counter)
                grave.writers.update(dict.fromkeys(remains.writers))
        return graves

    def hold(self, segment: Segment) -> None:
        """Removals must wait for this segment (``held``), until ``let_go``."""
        self._held[segment] = Grave(0, segment, 0, [])

    def held(self) -> list[Grave]:
        """In place of the segments that removals must wait for."""
        return list(self._held.values())

    def let_go(self, segment: Segment) -> list[Effect]:
        """Removals that waited for this segment now wait for its wipings, if any."""
        held = self._held.pop(segment)
        wipings = self.unclean((segment,))
        for removal in held.removals:
            further = [grave for grave in wipings if removal not in grave.removals]
            removal.orders += len(further) - 1
            for grave in further:
                grave.removals.append(removal)
        return [Answer(done.ticket, done.reply) for done in held.removals if not done.orders]

    def wiped(self, order: int) -> list[Effect]:
        """Called when the node has done the order (or is dead)."""
        grave = self._unwiped.pop(order, None)
        if grave is None:
            return []
        grave.wiped = True
        if grave.released:
            unclean = self._unclean[grave.segment]
            del unclean[order]
            if not unclean:
                del self._unclean[grave.segment]
        elif grave.ended:
            grave.free()
        if grave.ahead:
            grave.segment.wiping_bytes -= sum(grave.lengths)
        for name in grave.names:
            graves = self._unwiped_of[name]
            graves.remove(grave)
            if not graves:
                del self._unwiped_of[name]
        for removal in grave.removals:
            removal.orders -= 1
        return [Answer(done.ticket, done.reply) for done in grave.removals if not done.orders]

    def segment_of(self, order: int) -> Segment | None:
        grave = self._unwiped.get(order)
        return None if grave is None else grave.segment

    def unanswered(self, now_ms: int, patience_ms: int) -> list[Segment]:
        """Living segments whose nodes have not done an order for ``patience_ms``. The interval
        between calls is the precision."""
        ordered = self._ordered
        if not ordered or ordered[-1][1] != self._next_order:
            ordered.append((now_ms, self._next_order))
        while len(ordered) > 1 and ordered[1][0] + patience_ms <= now_ms:
            ordered.popleft()
        since_ms, last = ordered[0]
        if since_ms + patience_ms > now_ms:
            return []
        late = takewhile(lambda grave: grave.order <= last, self._unwiped.values())
        return [grave.segment for grave in late if grave.segment.alive]

    def send_again(self, segment: Segment) -> list[Effect]:
        """The orders that a node may have missed while its stream was broken."""
        return [effect for grave in self._on(segment) for effect in _send(grave)]

    def segment_died(self, segment: Segment) -> list[Effect]:
        ended = [grave for grave in self._on(segment) if grave.ended]
        return [effect for grave in ended for effect in self.wiped(grave.order)]

    def end_next(self, now_ms: int) -> tuple[list[Effect], bool]:
        """Free one order's extents, of those that nobody can hold a lease on any more. Returns
        the effects and whether there was such an order."""
        if not self._by_end or self._by_end[0].free_at_ms > now_ms:
            return [], False
        grave = self._by_end.popleft()
        grave.ended = True
        if grave.wiped:
            grave.free()
        return ([] if grave.segment.alive else self.wiped(grave.order)), True

    def end_mourning(self, now_ms: int) -> list[Effect]:
        """Ends the waiting for readers of segments that died long enough ago."""
        effects: list[Effect] = []
        while self._mourned and self._mourned[0][1].free_at_ms <= now_ms:
            effects += self.wiped(self._mourned.popleft()[1].order)
        return effects

    def next_end_ms(self) -> int | None:
        ends = [self._by_end[0].free_at_ms] if self._by_end else []
        if self._mourned:
            ends.append(self._mourned[0][1].free_at_ms)
        return min(ends, default=None)

    def ranges(self) -> Iterator[tuple[Segment, int, int]]:
        """All extents that are not free, as (segment, offset, length)."""
        unwiped = self._unwiped.values()
        ended = [grave for grave in unwiped if grave.ended and not grave.released]
        for grave in (*self._by_end, *ended):
            for offset, length in zip(grave.offsets, grave.lengths, strict=True):
                yield grave.segment, offset, length

    def check_invariants(self) -> None:
        of_names: set[tuple[Name, int]] = set()
        for grave in self._unwiped.values():
            assert not grave.wiped
            assert all(removal.orders > 0 for removal in grave.removals)
            of_names.update((name, grave.order) for name in grave.names)
        assert of_names == {
            (name, grave.order) for name, graves in self._unwiped_of.items() for grave in graves
        }
        unclean = {order for graves in self._unclean.values() for order in graves}
        assert unclean == {g.order for g in self._unwiped.values() if g.released}

    def _on(self, segment: Segment) -> list[Grave]:
        return [grave for grave in self._unwiped.values() if grave.segment is segment]


def _send(grave: Grave) -> list[Effect]:
    session = grave.segment.node.session
    return [] if session is None else [Send(session, grave.order_message())]
