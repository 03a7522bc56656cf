"""Grants of memory to writers, puts that wait for space, and quarantine.

    put_start ──► granted ──put_end──► stored
                    │ ├─────put_revoke──► revoked: extents free (quiesced) or quarantined
                    │ └─────deadline────► expired: token rejected, extents quarantined
                    └ segment lost ─────► rejected at put_end

The extents of an abandoned put that is not quiesced are wiped immediately: the node closes the data
connections that may carry its bytes, then wipes the headers. Removals of the key wait for this. A
*quarantined* extent is wiped again and freed ``quarantine_ms`` after the deadline: a writer through
shared memory that respects its deadline has stopped by then.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

from kvstore.calls import Allocate, PutStart, Version
from kvstore.master.state.disk_index import Disk, DiskCopy
from kvstore.master.state.records import Extent, ObjectRecord, StaleExtents, Writer
from kvstore.master.state.tenant import Tenant
from kvstore.memory.header import extent_bytes


class Grant:
    """Memory that a client may write until a deadline; the token is the new version's counter."""

    # Made for each put object; a dataclass would not be compiled.
    __slots__ = ("client_number", "deadline_ms", "extents", "length", "size", "token")

    def __init__(
        self, token: int, extents: list[Extent], size: int, deadline_ms: int, client_number: int
    ) -> None:
        self.token = token
        self.extents = extents
        self.length = extent_bytes(size)
        """Bytes of each extent."""
        self.size = size
        self.deadline_ms = deadline_ms
        self.client_number = client_number

    def stale_extents(self, epoch: int) -> StaleExtents:
        """Return the granted extents, which may hold bytes of the writer."""
        return StaleExtents(None, self.size, epoch, self.token, self.extents, forbid=True)

    def writers(self, connections: Sequence[int] = ()) -> list[Writer]:
        """Return the connections that may still carry bytes, by default all of the client."""
        return [(self.client_number, number) for number in connections or (0,)]


@final
class AllocationGrant(Grant):
    """Memory without a key, until ``commit`` makes it an object."""

    __slots__ = ("namespace", "tenant")

    def __init__(
        self, token: int, extents: list[Extent], size: int, deadline_ms: int, client_number: int,
        namespace: str, tenant: Tenant | None,
    ) -> None:  # fmt: skip
        super().__init__(token, extents, size, deadline_ms, client_number)
        self.namespace = namespace
        self.tenant = tenant


class ObjectGrant(Grant):
    __slots__ = ("missing", "overwrite", "record")

    def __init__(
        self, token: int, record: ObjectRecord, extents: list[Extent], size: int, deadline_ms: int,
        client_number: int, overwrite: bool, missing: int,
    ) -> None:  # fmt: skip
        super().__init__(token, extents, size, deadline_ms, client_number)
        self.record = record
        self.overwrite = overwrite
        self.missing = missing
        """Requested replicas for which there was no node."""

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
        # Not super().__init__(), which makes put_start and put_end 5 % slower.
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
        """TTL of the object once it is stored; 0: none."""


class DiskGrant(ObjectGrant):
    """A copy between a disk and the memory of its node, which makes it."""

    __slots__ = ("copied", "disk", "source")

    def __init__(
        self, token: int, record: ObjectRecord, size: int, copied: Version, source: Extent,
        target: Extent, deadline_ms: int, disk: Disk,
    ) -> None:  # fmt: skip
        super().__init__(token, record, [target], size, deadline_ms, 0, False, 0)
        self.length = target[0].extent_bytes(size)
        self.copied = copied
        self.source = source
        self.disk = disk

    def stale_extents(self, epoch: int) -> StaleExtents:
        copied_epoch, counter = self.copied
        stale = super().stale_extents(epoch)
        return stale._replace(epoch=copied_epoch, counter=counter, forbid=False)


@final
class DiskWriteGrant(DiskGrant):
    """A copy of a stored object to a disk."""

    __slots__ = ()


@final
class BringGrant(DiskGrant):
    """A copy of an object on a disk to memory. Its token is the ``writer`` of its record."""

    __slots__ = ("copy",)

    def __init__(
        self, token: int, record: ObjectRecord, target: Extent, deadline_ms: int, copy: DiskCopy
    ) -> None:
        source = copy.disk.segment, copy.offset
        version = Version(copy.epoch, copy.counter)
        super().__init__(token, record, copy.size, version, source, target, deadline_ms, copy.disk)
        self.copy = copy


@final
class CopyGrant(ObjectGrant):
    """A copy of a stored object; does not change its TTL or its writer."""

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
        """Whether the copy becomes a further replica of the same version."""

    def stale_extents(self, epoch: int) -> StaleExtents:
        if not self.repairs:
            return super().stale_extents(epoch)
        (copied_epoch, counter), stale = self.copied, super().stale_extents(epoch)
        return stale._replace(epoch=copied_epoch, counter=counter, forbid=False)


@dataclass(slots=True, eq=False)
class WaitingPut:
    reply_id: int
    request: PutStart | Allocate
    deadline_ms: int
    tenant: Tenant | None = None


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
    """Grants by token, in the order of their deadlines, and extents in quarantine."""

    def __init__(self) -> None:
        self.tenants = GrantListener()
        self.last_token = 0
        self._by_token: OrderedDict[int, Grant] = OrderedDict()
        self._quarantine: OrderedDict[int, tuple[int, StaleExtents, Tenant | None]] = OrderedDict()
        """By token: when the extents are free, the extents and their tenant."""

    def __len__(self) -> int:
        return len(self._by_token)

    def __iter__(self) -> Iterator[Grant]:
        return iter(self._by_token.values())

    def get(self, token: int) -> Grant | None:
        return self._by_token.get(token)

    def take_tokens(self, count: int) -> int:
        """Reserve ``count`` tokens and return the one before the first."""
        before = self.last_token
        self.last_token += count
        return before

    def add(self, put: Grant) -> None:
        """Add a grant; its deadline must not be earlier than any other (also for ``renew``)."""
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
        """Return the lowest pending token; every put before it has ended. O(puts)."""
        return min(self._by_token, default=None)

    def quarantine(self, put: Grant, stale: StaleExtents, until_ms: int) -> None:
        """Keeps the extents of a put that has ended; its tenant holds them until then."""
        owner = self.tenants.owner(put)
        if owner is not None:
            self.tenants.on_quarantine(owner, put.extents, put.length)
        self._quarantine[put.token] = until_ms, stale, owner
        for segment, _ in stale.extents:
            segment.quarantined_bytes += put.length

    def quarantined(self, token: int) -> StaleExtents | None:
        entry = self._quarantine.get(token)
        return None if entry is None else entry[1]

    def pop_quarantined(self, now_ms: int) -> Iterator[StaleExtents]:
        """Remove and yield the extents whose quarantine has ended, in order of arrival: simpler
        than a heap, and late by less than one put deadline."""
        while self._quarantine:
            token, (until_ms, stale, owner) = next(iter(self._quarantine.items()))
            if until_ms > now_ms:
                return
            del self._quarantine[token]
            for segment, _ in stale.extents:
                segment.quarantined_bytes -= segment.extent_bytes(stale.size)
            if owner is not None:
                self.tenants.on_quarantine(owner, stale.extents, -extent_bytes(stale.size))
            yield stale
