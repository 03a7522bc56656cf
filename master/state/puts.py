"""Puts under way: granted ones, and those that wait for space.

    put_start ──► granted ──put_end──► stored
                    │ ├─────put_revoke──► revoked: extents free at once (settled) or quarantined
                    │ └─────deadline────► expired: token refused, extents quarantined
                    └ segment lost ─────► refused at put_end

An abandoned attempt that is not settled is cut and wiped at once: its node ends the data
connections that may carry its bytes, and then wipes the header (ADR 5). Removals of the key wait
for that. A *quarantined* extent is free again ``quarantine_ms`` after the deadline of its put, and
is wiped once more: a writer through shared memory that respects its deadline has stopped by then.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvstore.calls import Allocate, PutStart, Version
from kvstore.master.state.records import Extent, MountedSegment, ObjectRecord, Residue, Writer
from kvstore.memory.header import extent_bytes


class PendingPut:
    """A grant. Its token is the counter of the version that it writes."""

    # Made for each object that is put; a dataclass would not be compiled.
    __slots__ = (
        "client_number",
        "deadline_ms",
        "extents",
        "length",
        "missing",
        "moves",
        "overwrite",
        "record",
        "repairs",
        "size",
        "token",
        "ttl_ms",
    )

    def __init__(
        self,
        token: int,
        record: ObjectRecord | None,
        extents: list[Extent],
        size: int,
        deadline_ms: int,
        *,
        client_number: int = 0,
        overwrite: bool = False,
        moves: Version | None = None,
        repairs: bool = False,
        missing: int = 0,
        ttl_ms: int = 0,
    ) -> None:
        self.token = token
        self.record = record
        """None: an allocation, which gets its key by ``commit``."""
        self.extents = extents
        self.length = extent_bytes(size)
        """Bytes of each extent."""
        self.size = size
        """Payload bytes granted."""
        self.deadline_ms = deadline_ms
        self.client_number = client_number
        self.overwrite = overwrite
        self.moves = moves
        """Of a copy: the version that is copied. The put is then not the record's writer."""
        self.repairs = repairs
        """Whether the copy keeps that version, and becomes one more replica of it."""
        self.missing = missing
        """Replicas that were asked for and found no node."""
        self.ttl_ms = ttl_ms
        """How long the object lives once it is stored; 0: no end."""

    def residue(self, epoch: int) -> Residue:
        """The bytes that the writer may have left in the granted extents."""
        record = self.record
        name = None if record is None else (record.namespace, record.key)
        version = epoch, self.token
        if self.repairs and self.moves is not None:
            version = self.moves.epoch, self.moves.counter
        return Residue(name, self.size, *version, self.extents, forbid=not self.repairs)

    def writers(self, connections: Sequence[int] = ()) -> list[Writer]:
        """Connections whose bytes may still land; by default all of the put's client."""
        return [(self.client_number, number) for number in connections or (0,)]


@dataclass(slots=True, eq=False)
class WaitingPut:
    """A request that found no room and may wait for it."""

    ticket: int
    request: PutStart | Allocate
    deadline_ms: int


class Pending:
    """Grants by token, in the order of their deadlines; and extents in quarantine."""

    def __init__(self) -> None:
        self.last_token = 0
        """The highest that was ever given out."""
        self._by_token: OrderedDict[int, PendingPut] = OrderedDict()
        self._quarantine: OrderedDict[int, tuple[int, Residue]] = OrderedDict()
        """By token: the time when the extents are free, and the extents."""

    def __len__(self) -> int:
        return len(self._by_token)

    def __iter__(self) -> Iterator[PendingPut]:
        return iter(self._by_token.values())

    def get(self, token: int) -> PendingPut | None:
        return self._by_token.get(token)

    def take_tokens(self, count: int) -> int:
        """Returns the token before the first of ``count`` new ones."""
        before = self.last_token
        self.last_token += count
        return before

    def add(self, put: PendingPut) -> None:
        """Its deadline must not be earlier than that of any other, here and in ``renew``."""
        self._by_token[put.token] = put
        for segment, _ in put.extents:
            segment.pending_bytes += put.length

    def renew(self, put: PendingPut, deadline_ms: int) -> None:
        put.deadline_ms = deadline_ms
        self._by_token.move_to_end(put.token)

    def pop(self, token: int) -> PendingPut | None:
        put = self._by_token.pop(token, None)
        if put is not None:
            _ended(put)
        return put

    def pop_expired(self, now_ms: int) -> Iterator[PendingPut]:
        """Removes and yields the puts whose deadline has passed."""
        while self._by_token:
            put = next(iter(self._by_token.values()))
            if put.deadline_ms >= now_ms:
                return
            del self._by_token[put.token]
            _ended(put)
            yield put

    def first_token(self) -> int | None:
        """The lowest token: every put that was granted before it has ended. O(puts)."""
        return min(self._by_token, default=None)

    def next_deadline_ms(self) -> int | None:
        """When the first put counts as expired."""
        first = next(iter(self._by_token.values()), None)
        return None if first is None else first.deadline_ms + 1

    def quarantine(self, token: int, residue: Residue, until_ms: int) -> None:
        self._quarantine[token] = until_ms, residue
        for segment, _ in residue.extents:
            segment.quarantined_bytes += extent_bytes(residue.size)

    def quarantined(self, token: int) -> Residue | None:
        held = self._quarantine.get(token)
        return None if held is None else held[1]

    def pop_quarantined(self, now_ms: int) -> Iterator[Residue]:
        """Removes and yields the extents whose quarantine is over.

        In the order of their arrival: an entry with a later end than those behind it delays them
        by less than one put deadline, which is simpler than a heap.
        """
        while self._quarantine:
            token, (until_ms, residue) = next(iter(self._quarantine.items()))
            if until_ms > now_ms:
                return
            del self._quarantine[token]
            for segment, _ in residue.extents:
                segment.quarantined_bytes -= extent_bytes(residue.size)
            yield residue

    def next_release_ms(self) -> int | None:
        first = next(iter(self._quarantine.values()), None)
        return None if first is None else first[0]

    def ranges(self) -> Iterator[tuple[MountedSegment, int, int]]:
        """All that is granted or in quarantine, as (segment, offset, length)."""
        for put in self._by_token.values():
            for segment, offset in put.extents:
                yield segment, offset, put.length
        for _, residue in self._quarantine.values():
            for segment, offset in residue.extents:
                yield segment, offset, extent_bytes(residue.size)

    def check_invariants(self) -> None:
        deadlines = [put.deadline_ms for put in self]
        assert deadlines == sorted(deadlines)


def _ended(put: PendingPut) -> None:
    for segment, _ in put.extents:
        segment.pending_bytes -= put.length
