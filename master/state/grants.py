"""Puts under way: puts that were granted memory, and puts that wait for space.

    put_start ──► granted ──put_end──► stored
                    │ ├─────put_revoke──► revoked: extents free at once (settled) or quarantined
                    │ └─────deadline────► expired: token refused, extents quarantined
                    └ segment lost ─────► refused at put_end

An abandoned attempt that is not settled is cut and wiped at once: its node ends the data
connections that may carry its bytes, and then wipes the header. Removals of the key wait
for that. A *quarantined* extent is free again ``quarantine_ms`` after the deadline of its put, and
is wiped once more: a writer through shared memory that respects its deadline has stopped by then.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

from kvstore.calls import Allocate, PutStart, Version
from kvstore.master.state.records import Extent, ObjectRecord, StaleExtents, Writer
from kvstore.master.state.tenant import Tenant
from kvstore.memory.header import extent_bytes


class Grant:
    """Memory that a client may write until a deadline, under a token: the counter of the version
    that it writes."""

    # Made for each object that is put; a dataclass would not be compiled.
    __slots__ = ("client_number", "deadline_ms", "extents", "length", "size", "token")

    def __init__(
        self, token: int, extents: list[Extent], size: int, deadline_ms: int, client_number: int
    ) -> None:
        self.token = token
        self.extents = extents
        self.length = extent_bytes(size)
        """Bytes of each extent."""
        self.size = size
        """Payload bytes granted."""
        self.deadline_ms = deadline_ms
        self.client_number = client_number

    def stale_extents(self, epoch: int) -> StaleExtents:
        """The granted extents, in which the writer may have left bytes."""
        return StaleExtents(None, self.size, epoch, self.token, self.extents, forbid=True)

    def writers(self, connections: Sequence[int] = ()) -> list[Writer]:
        """Connections whose bytes may still land; by default all of the client."""
        return [(self.client_number, number) for number in connections or (0,)]


@final
class AllocationGrant(Grant):
    """Memory of an allocation: ``commit`` makes it an object; until then it has no key."""

    __slots__ = ("namespace", "tenant")

    def __init__(
        self, token: int, extents: list[Extent], size: int, deadline_ms: int, client_number: int,
        namespace: str, tenant: Tenant | None,
    ) -> None:  # fmt: skip
        super().__init__(token, extents, size, deadline_ms, client_number)
        self.namespace = namespace
        self.tenant = tenant
        """That of the namespace since the last renewal; None: the master has no tenants."""


class ObjectGrant(Grant):
    """Memory of a put, or of a copy."""

    __slots__ = ("missing", "overwrite", "record")

    def __init__(
        self, token: int, record: ObjectRecord, extents: list[Extent], size: int, deadline_ms: int,
        client_number: int, overwrite: bool, missing: int,
    ) -> None:  # fmt: skip
        super().__init__(token, extents, size, deadline_ms, client_number)
        self.record = record
        self.overwrite = overwrite
        """Whether this version replaces one that is stored already."""
        self.missing = missing
        """Replicas that were asked for and found no node."""

    def stale_extents(self, epoch: int) -> StaleExtents:
        return super().stale_extents(epoch)._replace(name=(self.record.namespace, self.record.key))


@final
class PutGrant(ObjectGrant):
    """A put by a client. Its token is the ``writer`` of its record."""

    __slots__ = ("ttl_ms",)

    def __init__(
        self, token: int, record: ObjectRecord, extents: list[Extent], size: int, deadline_ms: int,
        client_number: int, overwrite: bool, missing: int, ttl_ms: int,
    ) -> None:  # fmt: skip
        # Not by super().__init__(), which makes put_start and put_end 5 % slower.
        self.token = token
        self.extents = extents
        self.length = extent_bytes(size)
        self.size = size
        self.deadline_ms = deadline_ms
        self.client_number = client_number
        self.record = record
        self.overwrite = overwrite
        self.missing = missing
        self.ttl_ms = ttl_ms
        """How long the object lives once it is stored; 0: no end."""


@final
class CopyGrant(ObjectGrant):
    """A copy of a stored object, which changes neither its lifetime nor who writes it."""

    __slots__ = ("copied", "repairs")

    def __init__(
        self, token: int, record: ObjectRecord, extents: list[Extent], deadline_ms: int,
        client_number: int, repairs: bool, missing: int,
    ) -> None:  # fmt: skip
        super().__init__(
            token, record, extents, record.size, deadline_ms, client_number, not repairs, missing
        )
        self.copied = Version(record.epoch, record.counter)
        self.repairs = repairs
        """Whether the copy keeps the copied version, and becomes one more replica of it."""

    def stale_extents(self, epoch: int) -> StaleExtents:
        if not self.repairs:
            return super().stale_extents(epoch)
        (copied_epoch, counter), residue = self.copied, super().stale_extents(epoch)
        return residue._replace(epoch=copied_epoch, counter=counter, forbid=False)


@dataclass(slots=True, eq=False)
class WaitingPut:
    """A request that found no room and may wait for it."""

    reply_id: int
    request: PutStart | Allocate
    deadline_ms: int
    tenant: Tenant | None = None
    """None: the master has no tenants."""


class GrantListener:
    """Receives each grant, its renewal and its end, and extents in quarantine: the base of
    ``TenantAccounting``. This one counts nothing."""

    def granted(self, put: Grant) -> None:
        pass

    def renewed(self, put: Grant) -> None:
        pass

    def ended(self, put: Grant) -> None:
        pass

    def owner(self, put: Grant) -> Tenant | None:
        """The tenant that holds the extents of a put; None: of a copy, or without tenants."""
        return None

    def on_quarantine(self, owner: Tenant, extents: Sequence[Extent], length: int) -> None:
        """Counts extents in quarantine. ``length``: bytes of each; negative: it is over."""


class PendingGrants:
    """Grants by token, in the order of their deadlines; and extents in quarantine."""

    def __init__(self) -> None:
        self.tenants = GrantListener()
        self.last_token = 0
        """The highest token that was ever given out."""
        self._by_token: OrderedDict[int, Grant] = OrderedDict()
        self._quarantine: OrderedDict[int, tuple[int, StaleExtents, Tenant | None]] = OrderedDict()
        """By token: the time when the extents are free, the extents, and who holds them."""

    def __len__(self) -> int:
        return len(self._by_token)

    def __iter__(self) -> Iterator[Grant]:
        return iter(self._by_token.values())

    def get(self, token: int) -> Grant | None:
        return self._by_token.get(token)

    def take_tokens(self, count: int) -> int:
        """Returns the token before the first of ``count`` new ones."""
        before = self.last_token
        self.last_token += count
        return before

    def add(self, put: Grant) -> None:
        """Adds a grant. No other may have a later deadline; the same holds for ``renew``."""
        self._by_token[put.token] = put
        for segment, _ in put.extents:
            segment.pending_bytes += put.length
        self.tenants.granted(put)

    def renew(self, put: Grant, deadline_ms: int) -> None:
        put.deadline_ms = deadline_ms
        self._by_token.move_to_end(put.token)
        self.tenants.renewed(put)

    def pop(self, token: int) -> Grant | None:
        put = self._by_token.pop(token, None)
        if put is not None:
            self._ended(put)
        return put

    def pop_expired(self, now_ms: int) -> Iterator[Grant]:
        """Removes and yields the puts whose deadline has passed."""
        while self._by_token:
            put = next(iter(self._by_token.values()))
            if put.deadline_ms >= now_ms:
                return
            del self._by_token[put.token]
            self._ended(put)
            yield put

    def _ended(self, put: Grant) -> None:
        for segment, _ in put.extents:
            segment.pending_bytes -= put.length
        self.tenants.ended(put)

    def first_token(self) -> int | None:
        """The lowest token: every put that was granted before it has ended. O(puts)."""
        return min(self._by_token, default=None)

    def quarantine(self, put: Grant, residue: StaleExtents, until_ms: int) -> None:
        """Keeps the extents of a put that has ended; its tenant holds them until then."""
        owner = self.tenants.owner(put)
        if owner is not None:
            self.tenants.on_quarantine(owner, put.extents, put.length)
        self._quarantine[put.token] = until_ms, residue, owner
        for segment, _ in residue.extents:
            segment.quarantined_bytes += put.length

    def quarantined(self, token: int) -> StaleExtents | None:
        held = self._quarantine.get(token)
        return None if held is None else held[1]

    def pop_quarantined(self, now_ms: int) -> Iterator[StaleExtents]:
        """Removes and yields the extents whose quarantine is over.

        They come in the order of their arrival: an entry with a later end than those behind it
        delays these by less than one put deadline, which is simpler than a heap.
        """
        while self._quarantine:
            token, (until_ms, residue, owner) = next(iter(self._quarantine.items()))
            if until_ms > now_ms:
                return
            del self._quarantine[token]
            length = extent_bytes(residue.size)
            for segment, _ in residue.extents:
                segment.quarantined_bytes -= length
            if owner is not None:
                self.tenants.on_quarantine(owner, residue.extents, -length)
            yield residue
