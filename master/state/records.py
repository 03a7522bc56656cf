"""The records that the master keeps per object, per namespace and per segment.

An ``ObjectRecord`` costs well under 600 bytes, table and eviction queue included (measured with
millions of them: docs/performance.md). So records have slots, and one replica needs no tuple.

Links run one way only: from child to parent, from record to segment to node. Without links back
there are no reference cycles, so the cyclic collector never has to look at millions of records, and
a dropped record is freed at once. So a record has its namespace's name, not its table.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar

from kvstore.calls import Presence, SegmentOffer
from kvstore.limits import Key, Namespace
from kvstore.master.state.allocator import Allocator
from kvstore.master.state.tenant import Tenant
from kvstore.memory.header import DISK_ALIGN, EXTENT_ALIGN, SUPERBLOCK_BYTES, extent_bytes
from kvstore.native import steps
from kvstore.native.packed_keys import PackedKeys

if TYPE_CHECKING:
    from kvstore.master.state.liveness import JoinedNode

TABLE_SHARDS = 256
"""Dictionaries of a large namespace. One dictionary of a million entries stops the loop for 150 ms
when it grows (measured); of 256 with ten million objects, none takes longer than 3 ms."""

ONE_SHARD_RECORDS = 4_096
"""A namespace of up to so many records has one dictionary, because 256 empty ones take 18 KiB."""

RESERVE_SHIFT = 5
RESERVE_BYTES_MAX = 64 << 20
"""A full segment keeps a 32nd of its memory free, at most so many bytes: evicted extents must be
wiped before they are granted, and a put should not have to wait for that."""

ABOVE_DISK_RESERVE_SHIFT = 3
ABOVE_DISK_RESERVE_BYTES_MAX = 1 << 30
"""The same for memory above a disk, to which objects are written before they are evicted."""

NEVER_MS: Final = -(1 << 60)
"""Earlier than any time."""

_ABSENT: Final = int(Presence.ABSENT)
_COMPLETE: Final = int(Presence.COMPLETE)
_BEING_WRITTEN: Final = int(Presence.BEING_WRITTEN)
_ONE: Final = tuple(bytes([presence]) for presence in (_ABSENT, _COMPLETE, _BEING_WRITTEN))

_NOTHING_HELD: Final[dict[int, int]] = {}
"""Shared by all tables where there are no tenants; never changed."""

HITS_MAX: Final = 3
"""What a counter of hits reaches: two bits."""

HIT_GAP_MS: Final = 1_000
"""A use within this time after the last one is not counted as a hit: engines repeat lookups."""


class MountedSegment:
    """A segment since its mounting. Dead is final: memory that returns is another instance."""

    def __init__(
        self,
        segment_id: int,
        node: JoinedNode,
        offer: SegmentOffer,
        usable_at_ms: int,
    ) -> None:
        self.segment_id = segment_id
        self.node = node
        self.offer = offer
        self.is_disk = offer.disk is not None
        """Whether only the node reads and writes it; else clients do, too."""
        self.align = DISK_ALIGN if self.is_disk else EXTENT_ALIGN
        self.has_disk = False
        """Whether its node has a disk for the objects that are evicted here."""
        self.alive = True
        self.died_ms = NEVER_MS
        """When the segment died; ``NEVER_MS`` if it lives, or had no readers left when it died."""
        self.inventory_complete = offer.fresh
        """Whether all objects from before its mounting are known; else its inventory follows."""
        self.allocator = Allocator(SUPERBLOCK_BYTES, offer.size & -self.align, empty=offer.fresh)
        self.zeroes = offer.takes_capabilities
        """Whether its node zeroes memory before it belongs to another object. Clients that reach an
        extent by a capability then find nothing of its former objects."""
        self.unready = False
        """Whether the node has yet to zero the first of the bytes that no object claimed."""
        self.usable_at_ms = usable_at_ms
        """No allocation before this time: promises from before its mounting may still hold."""
        self.allocated_until_ms = 0
        """Until when owners of allocations may write, whom no fence stops: they map the memory."""
        self.pressed = False
        """Whether something was evicted here: the segment is full, so a reserve is kept free."""
        self.takers: dict[Tenant, int] = {}
        """Bytes of the full segment that puts of each tenant took since the last eviction ahead of
        need, less those evicted for them (kept by ``TenantAccounting``)."""
        self.wiping_bytes = 0
        """Bytes evicted ahead of need, which are free once the node has wiped their headers."""
        self.pending_bytes = 0
        """Bytes granted to puts in progress (kept by ``PendingGrants``)."""
        self.quarantined_bytes = 0
        """Bytes of abandoned puts whose writers may still write (kept by ``PendingGrants``)."""
        self.reclaim_bytes = 0
        """Bytes of ended objects that are not free yet (kept by ``SpaceReclaimer``)."""

    @property
    def reserve_bytes(self) -> int:
        """Bytes to keep free once the segment is full."""
        if self.has_disk:
            return min(self.capacity >> ABOVE_DISK_RESERVE_SHIFT, ABOVE_DISK_RESERVE_BYTES_MAX)
        return min(self.capacity >> RESERVE_SHIFT, RESERVE_BYTES_MAX)

    def extent_bytes(self, payload_size: int) -> int:
        """The size of an extent here: header and payload, rounded up to ``align``."""
        return (extent_bytes(payload_size) + self.align - 1) & -self.align

    def usable(self, now_ms: int) -> bool:
        """Whether extents of the segment may be granted now."""
        return self.inventory_complete and self.usable_at_ms <= now_ms and not self.unready

    @property
    def capacity(self) -> int:
        """Bytes that extents may take in all."""
        return self.allocator.end - self.allocator.start

    def __repr__(self) -> str:
        return f"<Segment {self.segment_id} of {self.node.name}>"


Extent = tuple[MountedSegment, int]
"""Segment and offset; the length follows from the object's size."""

Name = tuple[Namespace, Key]

Writer = tuple[int, int]
"""Number of a client, and of its connection to a data server; 0: all of them."""


class ObjectRecord:
    """One key of the forest: an object, or a placeholder of one that is missing or being written.
    It stays in the table while it is complete, has a writer, or has children."""

    __slots__ = (
        "checked",
        "children",
        "counter",
        "depth",
        "epoch",
        "hint",
        "hits",
        "kept_until_ms",
        "key",
        "last_used_ms",
        "lease_until_ms",
        "more",
        "namespace",
        "offset",
        "parent",
        "position",
        "queue",
        "readers",
        "segment",
        "size",
        "writer",
    )

    def __init__(self, namespace: Namespace, key: Key) -> None:
        self.namespace = namespace
        self.key = key
        self.parent: ObjectRecord | None = None
        self.children = 0
        self.depth = 0
        """Number of ancestors, as far as known when the record was linked; a search hint."""
        self.checked = 0
        """When ``Forest.is_reachable`` last checked the record, and the result; 0: unknown."""
        self.writer = 0
        """Grant token of the put in progress; 0: none."""
        self.segment: MountedSegment | None = None
        """The segment of the first replica; None: the object has no bytes."""
        self.offset = 0
        self.more: tuple[Extent, ...] = ()
        """Further replicas; those on segments that are not alive are missing."""
        self.size = 0
        self.epoch = 0
        self.counter = 0
        self.last_used_ms = 0
        self.lease_until_ms = 0
        """When the longest lease on the bytes ends, or the last one ended."""
        self.readers = 0
        """Leases that may be released before that (``leases.ReaderLeases``)."""
        self.kept_until_ms = 0
        """Until when no release ends the lease."""
        self.queue = 0
        """Its queue among the eviction candidates of the first replica's segment, by the number of
        the tenant; 0: it is no candidate."""
        self.position = 0
        """The position in this queue; only what has set it reads it."""
        self.hits = 0
        """Up to ``HITS_MAX``; higher bits, and the decrease, are the eviction policy's business."""
        self.hint = 0
        """What a client expects of the object, encoded by ``eviction_hints``; 0: nothing."""

    def keep_until(self, until_ms: int) -> None:
        """Leases the bytes until then; no release ends the lease earlier."""
        self.kept_until_ms = max(self.kept_until_ms, until_ms)
        self.lease_until_ms = max(self.lease_until_ms, until_ms)

    @property
    def complete(self) -> bool:
        """Whether the object has bytes on a segment that is alive."""
        segment = self.segment
        return segment is not None and (
            segment.alive or (bool(self.more) and any(other.alive for other, _ in self.more))
        )

    @property
    def lost(self) -> bool:
        """Whether the object was complete, and its segments have died since."""
        return self.segment is not None and not self.complete

    def extents(self) -> list[Extent]:
        if self.segment is None:
            return []
        return [(self.segment, self.offset), *self.more]

    def __repr__(self) -> str:
        return f"<ObjectRecord {self.namespace}/{self.key!r}>"


class StaleExtents(NamedTuple):
    """The extents of an object that was taken out of the forest, or has never been in it."""

    name: Name | None
    """None: unknown."""
    size: int
    epoch: int
    counter: int
    extents: list[Extent]
    lease_until_ms: int = 0
    writers: Sequence[Writer] = ()
    """Data connections that may still carry bytes for these extents."""
    forbid: bool = False
    """Whether only this version has ended, and must not return with memory that departs before the
    wipe. A removal forbids all earlier versions of the key instead."""
    kept: bool = False
    """Whether clients may use the extents until they are freed: now only headers are wiped."""

    @classmethod
    def of(cls, record: ObjectRecord, *, forbid: bool = False) -> StaleExtents:
        name = record.namespace, record.key
        version = record.epoch, record.counter
        until_ms = record.lease_until_ms
        return cls(name, record.size, *version, record.extents(), until_ms, forbid=forbid)


Value = TypeVar("Value")


class KeyTable(Generic[Value]):
    """Values by key, in several dictionaries once there are many, as in ``NamespaceTable``."""

    __slots__ = ("_mask", "count", "shards")

    def __init__(self) -> None:
        self.shards: list[dict[Key, Value]] = [{}]
        self._mask = 0
        self.count = 0

    def get(self, key: Key) -> Value | None:
        return self.shards[hash(key) & self._mask].get(key)

    def add(self, key: Key, value: Value) -> None:
        """Add a value whose key has none."""
        self.shards[hash(key) & self._mask][key] = value
        self.count += 1
        if self.count > ONE_SHARD_RECORDS and not self._mask:
            self.shards = _split(self.shards[0])
            self._mask = TABLE_SHARDS - 1

    def drop(self, key: Key) -> None:
        del self.shards[hash(key) & self._mask][key]
        self.count -= 1

    def __iter__(self) -> Iterator[Value]:
        for shard in self.shards:
            yield from shard.values()


def _split(single: dict[Key, Value]) -> list[dict[Key, Value]]:
    shards: list[dict[Key, Value]] = [{} for _ in range(TABLE_SHARDS)]
    for key, value in single.items():
        shards[hash(key) & TABLE_SHARDS - 1][key] = value
    return shards


class NamespaceTable:
    """The records of one namespace by key, the copies on disks, and their counts."""

    __slots__ = (
        "_mask",
        "_searched",
        "bent",
        "copies",
        "disk_bytes",
        "held",
        "name",
        "objects",
        "pending",
        "records",
        "shards",
        "size",
        "tenant",
    )

    def __init__(self, name: Namespace, tenant: Tenant | None = None) -> None:
        self.name = name
        self.tenant = tenant
        """None: the master has no tenants; then the next two stay as they are."""
        self.held: dict[int, int] = _NOTHING_HELD if tenant is None else {}
        """Bytes of memory by segment id, with puts in progress (kept by ``TenantAccounting``)."""
        self.pending = 0
        """Puts in progress."""
        self.shards: list[dict[Key, ObjectRecord]] = [{}]
        self._mask = 0
        self._searched = 0
        self.bent = False
        """Whether a record with children ever got another parent, so that depths may be wrong."""
        self.records = 0
        self.objects = 0
        """Records with bytes. Lost ones count until the background work has seen them."""
        self.size = 0
        """Payload bytes of these objects, replicas not counted."""
        self.copies: KeyTable[Any] = KeyTable()
        """The copies on disks (``DiskIndex``), those of dead disks included."""
        self.disk_bytes = 0
        """Bytes of their extents."""

    def get(self, key: Key) -> ObjectRecord | None:
        return self.shards[hash(key) & self._mask].get(key)

    def get_many(self, keys: Sequence[Key]) -> list[ObjectRecord | None]:
        """``get`` of each key."""
        if len(keys) == 1:  # the usual request, without a map
            return [self.get(keys[0])]
        if isinstance(keys, PackedKeys):
            return steps.get_many(self.shards, self._mask, keys.data, keys.stride)
        if not self._mask:
            return list(map(self.shards[0].get, keys))
        shards, mask = self.shards, self._mask
        return [shards[hash(key) & mask].get(key) for key in keys]

    def presence(self, keys: Sequence[Key]) -> bytes:
        """One ``Presence`` per key."""
        if len(keys) == 1:  # without a list of one
            return _ONE[presence_of(self.get(keys[0]))]
        return bytes([presence_of(record) for record in self.get_many(keys)])

    def add(self, key: Key) -> ObjectRecord:
        record = self.shards[hash(key) & self._mask][key] = ObjectRecord(self.name, key)
        self.records += 1
        if self.records > ONE_SHARD_RECORDS and not self._mask:
            self.shards = _split(self.shards[0])
            self._mask = TABLE_SHARDS - 1
        return record

    def drop(self, record: ObjectRecord) -> None:
        del self.shards[hash(record.key) & self._mask][record.key]
        self.records -= 1

    def __iter__(self) -> Iterator[ObjectRecord]:
        for shard in self.shards:
            yield from shard.values()

    def stored_records(self) -> Iterator[ObjectRecord]:
        """Records with bytes. Begins in the dictionary where the last search stopped: a caller that
        removes what it finds, and searches again, does not pass the others every time."""
        for _ in range(len(self.shards) if self.objects else 0):
            records = self.shards[self._searched & self._mask].values()
            for record in records:
                if record.segment is not None:
                    yield record
            self._searched += 1


def with_bytes(tables: Iterable[NamespaceTable]) -> Iterator[ObjectRecord]:
    """The records with bytes of all these tables."""
    for table in tables:
        yield from table.stored_records()


class Namespaces:
    """Tables by name, in the order in which they were added."""

    def __init__(self) -> None:
        self.tables: dict[str, NamespaceTable] = {}
        self._last: NamespaceTable | None = None
        """What ``of`` found last: the next record is often there, too."""

    def of(self, record: ObjectRecord) -> NamespaceTable:
        """The table of a record, which has its table's name."""
        last = self._last
        if last is None or last.name is not record.namespace:
            last = self._last = self.tables[record.namespace]
        return last

    def drop_if_empty(self, table: NamespaceTable) -> None:
        if not table.records and not table.copies.count:
            self._last = None
            del self.tables[table.name]

    def values(self) -> list[NamespaceTable]:
        """All tables: 2 ms for 300,000."""
        return list(self.tables.values())


def shards_from(
    tables: Iterable[NamespaceTable], first: int, *, copies: bool = False
) -> Iterator[dict[Key, Any]]:
    """All dictionaries of these tables but the ``first`` ones: those of records, and, with
    ``copies``, of copies on disks."""
    for table in tables:
        shards: list[dict[Key, Any]] = [*table.shards]
        if copies:
            shards += table.copies.shards
        yield from shards[first:]
        first = max(0, first - len(shards))


def presence_of(record: ObjectRecord | None) -> int:
    if record is None:
        return _ABSENT
    segment = record.segment
    if segment is not None and (segment.alive or record.complete):  # most often ``alive``
        return _COMPLETE
    return _BEING_WRITTEN if record.writer else _ABSENT
