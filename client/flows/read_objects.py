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
from typing import NamedTuple

from kvstore import calls
from kvstore.client.flows.location_cache import LeasedLocation, Replica
from kvstore.client.flows.object_transfers import ObjectReads
from kvstore.client.flows.read_targets import (
    CorruptReplica,
    NewDeviceMemory,
    NewMemory,
    ReadGroup,
    ReadTargets,
    select,
)
from kvstore.client.flows.steps import (
    CallMaster,
    Context,
    Flow,
    ask,
    resolve_placements,
    unreachable,
)
from kvstore.client.leases.read_leases import ReadLease
from kvstore.client.values import Found, Kind
from kvstore.errors import KVStoreError
from kvstore.limits import Key, Namespace
from kvstore.native.interface import STALE

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
    targets: ReadTargets,
    leases: Sequence[ReadLease],
) -> list[ReadLease]:
    """Cache locations of which only ranges were read. Returns the other leases, which end now."""
    kept: set[ReadLease] = set()
    for key, placed in zip(targets.keys, targets.placed, strict=True):
        if placed is not None and placed.lease is not None:
            kept.add(placed.lease)
            context.placements.remember(namespace, [key], [placed])
    return [lease for lease in leases if lease not in kept]


def _leases_of(placed: Sequence[LeasedLocation | None]) -> list[ReadLease]:
    return [row.lease for row in placed if row is not None and row.lease is not None]


def read(
    context: Context,
    namespace: Namespace,
    targets: ReadTargets,
    timeout_ms: int | None = None,
) -> Flow[None]:
    """Read every stored target; first replicas get a third of ``timeout_ms``.

    Raises:
        BufferMismatchError: caller's memory is too small; nothing was read into it.
        MasterUnreachableError, DeadlineExceededError
    """
    leases: list[ReadLease] = []
    todo: Sequence[int] = range(len(targets.keys))
    try:
        for attempt in range(ATTEMPTS):
            keys = select(targets.keys, todo)
            placed = yield from locate(context, namespace, keys, fresh=attempt > 0, leases=leases)
            groups = _group(context, targets, todo, placed)
            if not groups:
                todo = ()
                break
            transfers: list[ObjectReads] = []
            for group in groups:
                reads = targets.transfer(namespace, group, verify=context.verify_payload)
                if not attempt and all(len(known.replicas) > 1 for known in group.placed):
                    patience_s = context.failover_s if timeout_ms is None else timeout_ms / 3000
                    reads.deadline = context.clock() + patience_s
                transfers.append(reads)
            errors = yield transfers
            assert isinstance(errors, list)
            again: list[int] = []
            for reads, group, error in zip(transfers, groups, errors, strict=True):
                if error is None:
                    again += _finish(context, targets, reads, group)
                else:
                    yield from unreachable(context, reads.segment, error)
                    if error.fields.get("final"):
                        raise copy(error)  # no frame refers to the copy
                    again += group.numbers
            todo = again
            if not todo:
                break
            for number in todo:
                context.placements.forget(namespace, targets.keys[number])
        if targets.bad:
            # A single bad read of a target that was not found may have met a removal.
            yield from report_corrupt(context, namespace, [
                read
                for number, reads_of_one in targets.bad.items()
                if targets.placed[number] is not None or (number in todo and len(reads_of_one) > 1)
                for read in reads_of_one
            ])  # fmt: skip
    finally:
        if leases or context.leases.expects:
            keys = targets.keys
            if leases:
                context.leases.note_reads(namespace, keys)
            if targets.is_partial:
                leases = _kept_for_the_rest(context, namespace, targets, leases)
                keys = []
            context.leases.give_up(namespace, keys, leases)


def _group(
    context: Context,
    targets: ReadTargets,
    numbers: Sequence[int],
    located: Sequence[LeasedLocation | None],
) -> list[ReadGroup]:
    """Choose a replica of each object that was found, and group them by segment."""
    is_choosing = context.segments.failing or bool(targets.bad)
    rows: dict[int, list[tuple[int, LeasedLocation, Replica]]] = {}
    for number, known in zip(numbers, located, strict=True):
        if known is None:
            continue
        replica = known.replicas[0]
        if is_choosing:
            replicas = _reachable(context, targets, number, known)
            if not replicas:
                context.count("avoided_reads")
                continue  # a miss: none of its nodes has replied
            replica = replicas[0]
        rows.setdefault(id(replica.segment), []).append((number, known, replica))
    return [ReadGroup(*zip(*of_segment, strict=True)) for of_segment in rows.values()]


def _reachable(
    context: Context, targets: ReadTargets, number: int, known: LeasedLocation
) -> Sequence[Replica]:
    """Return the replicas to try, in order. Forgets bad reads of earlier versions."""
    bad = confirmed(targets.bad.pop(number, []), known)
    if bad:
        targets.bad[number] = bad
    return context.segments.reachable(order_replicas(known, bad))


def read_values(context: Context, keys: Sequence[Key], options: GetOptions) -> Flow[list[Found]]:
    if options.device:
        tensors = NewDeviceMemory(keys, context.pool.devices.of(options.device))
        yield from read(context, options.namespace, tensors, options.timeout_ms)
        return tensors.values()
    targets = NewMemory(keys)
    yield from read(context, options.namespace, targets, options.timeout_ms)
    return targets.values(options.kind)


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


def _finish(
    context: Context, targets: ReadTargets, reads: ObjectReads, group: ReadGroup
) -> list[int]:
    """Process the results of the reads; returns the objects without valid bytes."""
    again: list[int] = []
    now = context.clock()
    for number, known, replica, outcome in zip(*group, reads.outcomes, strict=True):
        if now >= known.until:
            context.count("late_reads")
        elif isinstance(outcome, bytes):
            targets.descriptors[number] = outcome
            targets.placed[number] = known
            continue
        else:
            key = targets.keys[number]
            if outcome == STALE:
                context.count("stale_reads")
            else:
                mismatch(context, reads.namespace, key, replica)
            targets.bad.setdefault(number, []).append(CorruptReplica(key, known, replica))
        again.append(number)
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
