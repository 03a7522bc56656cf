"""Puts on their way: granted ones, and those that wait for room.

    put_start ──► granted ──put_end──► stored
                    │ ├─────put_revoke──► revoked: extents free at once (settled) or quarantined
                    │ └─────deadline────► expired: token refused, extents quarantined
                    └ segment lost ─────► refused at put_end

A *quarantined* extent is free again ``quarantine_ms`` after the deadline of its put: a writer that
respects its deadline has stopped by then, and so has whatever a transport buffered for it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass

from kvstore.calls import Allocate, PutStart, Version
from kvstore.master.state.records import Extent, ObjectRecord, Remains, Segment
from kvstore.memory.header import extent_bytes


class PendingPut:
    """A grant. Its token is the counter of the version that it writes."""

    # Made for each object that is put; a dataclass would not be compiled.
    __slots__ = (
        "deadline_ms",
        "extents",
        "length",
        "moves",
        "overwrite",
        "record",
        "size",
        "token",
    )

    def __init__(
        self,
        token: int,
        record: ObjectRecord | None,
        extents: list[Extent],
        size: int,
        deadline_ms: int,
        *,
        overwrite: bool = False,
        moves: Version | None = None,
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
        self.overwrite = overwrite
        self.moves = moves
        """Of the object whose bytes are copied from elsewhere; it is not the record's writer."""

    def remains(self, epoch: int) -> Remains:
        """What its writer may have left where it was to write."""
        record = self.record
        name = None if record is None else (record.namespace, record.key)
        return Remains(name, self.size, epoch, self.token, self.extents)


@dataclass(slots=True, eq=False)
class WaitingPut:
    """A request that found no room and may wait for it."""

    ticket: int
    request: PutStart | Allocate
    deadline_ms: int


class Pending:
    """Grants by token, in the order of their deadlines; and extents in quarantine."""

    def __init__(self) -> None:
        self._by_token: OrderedDict[int, PendingPut] = OrderedDict()
        self._quarantine: deque[tuple[int, Remains]] = deque()  # (free at, ...)

    def __len__(self) -> int:
        return len(self._by_token)

    def __iter__(self) -> Iterator[PendingPut]:
        return iter(self._by_token.values())

    def get(self, token: int) -> PendingPut | None:
        return self._by_token.get(token)

    def add(self, put: PendingPut) -> None:
        """Its deadline must not be earlier than that of any other, here and in ``renew``."""
        self._by_token[put.token] = put

    def renew(self, put: PendingPut, deadline_ms: int) -> None:
        put.deadline_ms = deadline_ms
        self._by_token.move_to_end(put.token)

    def pop(self, token: int) -> PendingPut | None:
        return self._by_token.pop(token, None)

    def pop_expired(self, now_ms: int) -> Iterator[PendingPut]:
        """Those whose deadline has passed, which are pending no more."""
        while self._by_token:
            put = next(iter(self._by_token.values()))
            if put.deadline_ms >= now_ms:
                return
            del self._by_token[put.token]
            yield put

    def next_deadline_ms(self) -> int | None:
        """When the first of them counts as expired."""
        first = next(iter(self._by_token.values()), None)
        return None if first is None else first.deadline_ms + 1

    def quarantine(self, remains: Remains, until_ms: int) -> None:
        self._quarantine.append((until_ms, remains))

    def pop_quarantined(self, now_ms: int) -> Iterator[Remains]:
        """What may be free now.

        In the order they came; one that waits for a later time than those behind it delays them
        by less than one put deadline, which is simpler than a second heap.
        """
        while self._quarantine and self._quarantine[0][0] <= now_ms:
            yield self._quarantine.popleft()[1]

    def next_release_ms(self) -> int | None:
        return self._quarantine[0][0] if self._quarantine else None

    def ranges(self) -> Iterator[tuple[Segment, int, int]]:
        """All that is granted or in quarantine, as (segment, offset, length)."""
        for put in self._by_token.values():
            for segment, offset in put.extents:
                yield segment, offset, put.length
        for _, remains in self._quarantine:
            for segment, offset in remains.extents:
                yield segment, offset, extent_bytes(remains.size)

    def check_invariants(self) -> None:
        deadlines = [put.deadline_ms for put in self]
        assert deadlines == sorted(deadlines)
