"""Reads of objects: the flow under ``get`` and its siblings.

A lookup (or the cache) gives locations; the flow reads header and payload and verifies both. On a
stale or corrupt result or an unreachable node it tries the next replica with a fresh lookup,
``ATTEMPTS`` times in all; then it is a miss.

The bytes are valid only if the lease, counted on the client's clock from before the request, had
not ended when the last byte arrived. A get that finds other bytes under a lease, and gets the same
location again, has found bad memory and reports it to the master.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from copy import copy
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvstore import calls
from kvstore.client.flows.device_io import DeviceReads
from kvstore.client.flows.location_cache import LeasedLocation, Replica
from kvstore.client.flows.object_transfers import ObjectReads
from kvstore.client.flows.steps import (
    CallMaster,
    Context,
    Flow,
    ask,
    resolve_placements,
    unreachable,
)
from kvstore.client.leases.read_leases import ReadLease
from kvstore.client.values import (
    UNREADABLE,
    Bytes1D,
    Found,
    Kind,
    Payload,
    Unreadable,
    check_dtype,
    decode,
    decode_tensor,
)
from kvstore.device.memory import memory_of
from kvstore.errors import BufferMismatchError, KVStoreError
from kvstore.limits import Key, Namespace
from kvstore.native.interface import STALE
from kvstore.runtime.formatting import key_text

if TYPE_CHECKING:
    import torch

    from kvstore.device.device import Device

log = logging.getLogger("kvstore.client")

ATTEMPTS = 4


class GetOptions(NamedTuple):
    namespace: Namespace
    kind: Kind | None = None
    copy: bool = True
    """False: views of the pool's memory, where it is mapped."""
    device: str = ""
    """Device of returned tensors; empty: host memory."""
    timeout_ms: int | None = None
    """Of the complete call; None: the client's."""


class ReadTarget:
    __slots__ = ("bad", "descriptor", "dtype", "key", "placed", "room", "views")

    def __init__(self, key: Key, views: Payload | None = None, dtype: str = "") -> None:
        self.key = key
        self.views = views
        """Caller's memory, filled in sequence; None: memory is allocated once the size is known."""
        self.dtype = dtype
        self.descriptor: bytes | None = None
        """Descriptor of the object that was read; None: a miss."""
        self.placed: LeasedLocation | None = None
        self.room: Bytes1D | None = None
        """The memory that was allocated here, with the payload if there is a descriptor."""
        self.bad: Sequence[CorruptReplica] = ()
        """Reads under a valid lease that found other bytes."""

    def allocate(self, size: int) -> Payload:
        """Return ``size`` bytes of memory. Raises BufferMismatchError: the caller's has less."""
        views = self.views
        if isinstance(views, list):
            if len(views) == 1 and len(views[0]) == size:
                return views
            return _first_bytes(views, size, self.key)
        if views is not None:
            _check_room(views.nbytes, size, self.key)
            return views.first(size) if size else []
        self.room = np.empty(size, np.uint8)
        return [memoryview(self.room)] if size else []  # type: ignore[arg-type]

    def value(self, kind: Kind | None) -> Found:
        """Return the value as ``kind``, or (None) as it was put; None: a miss."""
        if self.descriptor is None or self.room is None:
            return None
        try:
            return decode(self.descriptor, self.room, kind)
        except UNREADABLE as error:
            return unreadable(error, self.key)


class _OnDevice(ReadTarget):
    __slots__ = ("device", "tensor")

    def __init__(self, key: Key, device: Device) -> None:
        super().__init__(key)
        self.device = device
        self.tensor = device.driver.empty(0)

    def allocate(self, size: int) -> Payload:
        if self.tensor.numel() != size:
            self.tensor = self.device.driver.empty(size)
        return memory_of(self.device, self.tensor) if size else []

    def value(self, kind: Kind | None) -> Found:
        del kind
        return (
            None if self.descriptor is None else tensor_of(self.key, self.descriptor, self.tensor)
        )


ReadItem = tuple[ReadTarget, LeasedLocation, Replica]


class CorruptReplica(NamedTuple):
    """A location where a read under a lease found other bytes than the object's."""

    key: Key
    placed: LeasedLocation
    replica: Replica


def locate(
    context: Context,
    namespace: Namespace,
    keys: Sequence[Key],
    *,
    fresh: bool = False,
    leases: list[ReadLease] | None = None,
) -> Flow[list[LeasedLocation | None]]:
    """Return leased locations, from the cache unless ``fresh``.

    ``leases`` receives the lease shares to release; None: leases end by time.
    """
    remembered = context.placements
    placed: list[LeasedLocation | None] = []
    missing = keys
    if not fresh and len(remembered):
        placed = [remembered.get(namespace, key) for key in keys]
        if leases is not None:
            leases += _leases_of(placed)
        else:
            _keep_by_time(context, namespace, keys, placed)
        missing = [key for key, known in zip(keys, placed, strict=True) if known is None]
        if not missing:
            return placed
    parts: list[tuple[Sequence[Key], int]] = [(missing, 0)]
    if leases is not None:
        again = context.leases.read_again(namespace, missing)
        once = [key for key in missing if key not in again] if again else missing
        parts = [(list(again), 0)] if again else []
        if once:
            leases.append(context.leases.new())
            parts.append((once, leases[-1].number))
    of_key: dict[Key, LeasedLocation | None] = {}
    for part, number in parts:
        rows = yield from _look_up(context, namespace, part, number)
        if part is keys:
            return rows
        of_key.update(zip(part, rows, strict=True))
    return [of_key.get(key) if known is None else known for key, known in zip_longest(keys, placed)]


def _look_up(
    context: Context, namespace: Namespace, keys: Sequence[Key], number: int = 0
) -> Flow[list[LeasedLocation | None]]:
    """Lease the objects under this number; 0: by time, and cache the locations."""
    requested_at = context.clock()
    found = yield CallMaster(calls.Lookup(namespace, keys, number, context.leases.take()))
    assert isinstance(found, calls.LookupReply)
    until = requested_at + found.lease_ms / 1000 - context.lease_margin_s
    rows = yield from resolve_placements(context, found.epoch, found.placements, until)
    if not number:
        context.placements.remember(namespace, keys, rows)
    return rows


def look_up_to_read(
    context: Context, namespace: Namespace, keys: Sequence[Key]
) -> Flow[list[LeasedLocation | None]]:
    """Lease the objects until the last later read, or ``release``."""
    lease = context.leases.new()
    rows = yield from _look_up(context, namespace, keys, lease.number)
    release(context, namespace, keys)  # the new lease replaces earlier ones
    found = {
        key: row._replace(lease=lease)
        for key, row in zip(keys, rows, strict=True)
        if row is not None
    }
    lease.unread = len(found)
    context.placements.remember(namespace, found.keys(), found.values())
    return rows


def release(context: Context, namespace: Namespace, keys: Sequence[Key]) -> None:
    """Release leases of ``look_up_to_read`` and ``ReadLeases.expect`` on these objects."""
    placed = [context.placements.get(namespace, key) for key in keys]
    context.leases.give_up(namespace, keys, _leases_of(placed))


def _keep_by_time(
    context: Context,
    namespace: Namespace,
    keys: Sequence[Key],
    placed: Sequence[LeasedLocation | None],
) -> None:
    """Put locations back into the cache; their leases are not released, but end by time."""
    for key, row in zip(keys, placed, strict=True):
        if row is not None and row.lease is not None:
            context.placements.remember(namespace, [key], [row._replace(lease=None)])


def _kept_for_the_rest(
    context: Context,
    namespace: Namespace,
    targets: Sequence[ReadTarget],
    leases: Sequence[ReadLease],
) -> list[ReadLease]:
    """Cache locations of which only ranges were read. Returns the other leases, which end now."""
    kept: set[ReadLease] = set()
    for target in targets:
        placed = target.placed
        if placed is not None and placed.lease is not None:
            kept.add(placed.lease)
            context.placements.remember(namespace, [target.key], [placed])
    return [lease for lease in leases if lease not in kept]


def _leases_of(placed: Sequence[LeasedLocation | None]) -> list[ReadLease]:
    return [row.lease for row in placed if row is not None and row.lease is not None]


def read(
    context: Context,
    namespace: Namespace,
    targets: Sequence[ReadTarget],
    timeout_ms: int | None = None,
    kind: type[ObjectReads] = ObjectReads,
) -> Flow[None]:
    """Read every stored target; first replicas get a third of ``timeout_ms``.

    Raises:
        BufferMismatchError: caller's memory is too small (nothing was read into it) or of another
            dtype (its contents are undefined).
        MasterUnreachableError, DeadlineExceededError
    """
    leases: list[ReadLease] = []
    try:
        todo = list(targets)
        fresh = False
        for attempt in range(ATTEMPTS):
            keys = [target.key for target in todo]
            placed = yield from locate(context, namespace, keys, fresh=fresh, leases=leases)
            is_failing = context.segments.failing
            of_segment: dict[int, list[ReadItem]] = {}
            for target, known in zip(todo, placed, strict=True):
                if known is None:
                    continue
                replica = known.replicas[0]
                if is_failing or target.bad:
                    target.bad = confirmed(target.bad, known)
                    replicas = context.segments.reachable(order_replicas(known, target.bad))
                    if not replicas:
                        context.count("avoided_reads")
                        continue  # a miss: none of its nodes has replied
                    replica = replicas[0]
                of_segment.setdefault(id(replica.segment), []).append((target, known, replica))
            if not of_segment:
                todo = []
                break
            groups = list(of_segment.values())
            transfers = [
                kind(items[0][2].segment, namespace, verify=context.verify_payload)
                for items in groups
            ]
            for reads, items in zip(transfers, groups, strict=True):
                reads.add(items)
            if not attempt:
                patience_s = context.failover_s if timeout_ms is None else timeout_ms / 3000
                failover = context.clock() + patience_s
                for reads, items in zip(transfers, groups, strict=True):
                    if all(len(known.replicas) > 1 for _, known, _ in items):
                        reads.deadline = failover
            errors = yield transfers
            assert isinstance(errors, list)
            todo = []
            for reads, items, error in zip(transfers, groups, errors, strict=True):
                if error is None:
                    todo += _finish(context, reads, items)
                else:
                    yield from unreachable(context, reads.segment, error)
                    if error.fields.get("final"):
                        raise copy(error)  # no frame refers to the copy
                    todo += [target for target, _, _ in items]
            if not todo:
                break
            for target in todo:
                context.placements.forget(namespace, target.key)
            fresh = True
        # A single bad read of a target that was not found may have met a removal.
        bad = [target.bad for target in todo if len(target.bad) > 1]
        bad += [target.bad for target in targets if target.bad and target.placed is not None]
        yield from report_corrupt(context, namespace, [each for of_one in bad for each in of_one])
    finally:
        if leases or context.leases.expects:
            keys = [target.key for target in targets]
            if leases:
                context.leases.note_reads(namespace, keys)
            if kind.is_partial:
                leases = _kept_for_the_rest(context, namespace, targets, leases)
                keys = []
            context.leases.give_up(namespace, keys, leases)


def read_values(context: Context, keys: Sequence[Key], options: GetOptions) -> Flow[list[Found]]:
    reads, targets = ObjectReads, [ReadTarget(key) for key in keys]
    if options.device:
        device = context.pool.devices.of(options.device)
        reads, targets = DeviceReads, [_OnDevice(key, device) for key in keys]
    yield from read(context, options.namespace, targets, options.timeout_ms, reads)
    return [target.value(options.kind) for target in targets]


def tensor_of(key: Key, descriptor: bytes, flat: torch.Tensor) -> torch.Tensor | Unreadable:
    try:
        return decode_tensor(descriptor, flat)
    except UNREADABLE as error:
        return unreadable(error, key)


def unreadable(error: Unreadable, key: Key) -> Unreadable:
    """Return a copy of the error that names this object."""
    named = type(error)(
        f"no value can be made of {key_text(key)}: {error.message}", advice=error.advice
    )
    named.fields = {**error.fields, "key": key.hex()}
    return named


def confirmed(bad: Sequence[CorruptReplica], placed: LeasedLocation) -> list[CorruptReplica]:
    """Return the bad reads of the current version. A removal precedes the wipe of the header, so a
    reader with an older reply has not found bad memory."""
    version = placed.epoch, placed.counter
    return [read for read in bad if (read.placed.epoch, read.placed.counter) == version]


def order_replicas(placed: LeasedLocation, bad: Sequence[CorruptReplica]) -> Sequence[Replica]:
    """Sort the replicas to try: as listed (failed nodes later), bad ones last."""
    if not bad:
        return placed.replicas
    failures = Counter(bad_read.replica.location for bad_read in bad)
    return sorted(placed.replicas, key=lambda replica: failures[replica.location])


def report_corrupt(
    context: Context, namespace: Namespace, bad: Sequence[CorruptReplica]
) -> Flow[None]:
    """Report bad memory to the master, which removes an object without another replica."""
    if not bad:
        return
    rows = {
        (key, placed.epoch, placed.counter, replica.segment.uuid): None
        for key, placed, replica in bad
    }
    keys, epochs, counters, uuids = map(list, zip(*rows, strict=True))
    for key in keys:
        context.placements.forget(namespace, key)  # its first replica is a bad one
    objects = len(set(keys))
    context.count("corrupt_objects", objects)
    log.error("corrupt_objects namespace=%s objects=%d", namespace, objects)
    try:
        request = calls.ReportCorrupt(namespace, keys, epochs, counters, uuids)
        yield from ask(request, calls.ReportCorruptReply)
    except KVStoreError as error:
        log.warning("corruption_not_reported objects=%d error=%s", objects, str(error))


def _finish(context: Context, reads: ObjectReads, items: Sequence[ReadItem]) -> list[ReadTarget]:
    """Process the results of the reads; returns the targets without valid bytes."""
    again: list[ReadTarget] = []
    now = context.clock()
    for (target, known, replica), outcome in zip(items, reads.outcomes, strict=True):
        if now >= known.until:
            context.count("late_reads")
        elif isinstance(outcome, bytes):
            if target.dtype:
                check_dtype(outcome, target.dtype)
            target.descriptor = outcome
            target.placed = known
            continue
        else:
            if outcome == STALE:
                context.count("stale_reads")
            else:
                mismatch(context, reads.namespace, target.key, replica)
            target.bad = [*target.bad, CorruptReplica(target.key, known, replica)]
        again.append(target)
    return again


def mismatch(context: Context, namespace: Namespace, key: Key, replica: Replica) -> None:
    """Count and log a payload that does not match the checksum in its header."""
    context.count("checksum_mismatches")
    log.warning(
        "checksum_mismatch namespace=%s key=%s node=%s offset=%d",
        namespace,
        key.hex(),
        replica.segment.node,
        replica.offset,
    )


def _first_bytes(total: list[memoryview], size: int, key: Key) -> list[memoryview]:
    _check_room(sum(len(view) for view in total), size, key)
    views = []
    for view in total:
        if not size:
            break
        if len(view):  # an empty buffer has no memory to fill
            views.append(view[:size] if len(view) > size else view)
            size -= len(views[-1])
    return views


def _check_room(available: int, size: int, key: Key) -> None:
    if available < size:
        raise BufferMismatchError(
            f"the object has {size} bytes, the buffer {available}",
            advice="Call stat(key) for the size first.",
            size_bytes=size,
            buffer_bytes=available,
            key=key.hex(),
        )
