"""Views: the flows of ``get(copy=False)``, whose values are leased memory of the pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

from kvstore.calls import SegmentInfo
from kvstore.client.flows import read_objects
from kvstore.client.flows.device_io import DeviceHeaderChecks
from kvstore.client.flows.location_cache import LeasedLocation, Replica
from kvstore.client.flows.object_transfers import headers
from kvstore.client.flows.read_objects import GetOptions, read_values
from kvstore.client.flows.read_targets import tensor_of, unreadable
from kvstore.client.flows.steps import Context, Flow
from kvstore.client.leases.lease_table import LeasedExtent, ObjectLease, Watched
from kvstore.client.values import (
    UNREADABLE,
    Bytes1D,
    Found,
    Value,
    array_over,
    decode,
    read_descriptor,
)
from kvstore.errors import InvalidRangeError, SegmentUnmountedError
from kvstore.limits import Key, Namespace
from kvstore.memory.header import HEADER_BYTES
from kvstore.memory.process_memory import address_of
from kvstore.native.interface import STALE, ReadRow


class _HeaderChecks(NamedTuple):
    segment: SegmentInfo
    shown: memoryview
    rows: list[ReadRow]
    of: list[tuple[int, LeasedLocation, Replica]]


def view_values(context: Context, keys: Sequence[Key], options: GetOptions) -> Flow[list[Found]]:
    """Return leased views; copies of objects that are not mapped, or were twice not at their
    location: the copying flow tries other replicas and reports bad memory."""
    namespace = options.namespace
    views: list[Found] = [None] * len(keys)
    todo = list(range(len(keys)))
    copied: list[int] = []
    for fresh in (False, True):
        placed = yield from read_objects.locate(
            context, namespace, [keys[index] for index in todo], fresh=fresh
        )
        mapped: dict[int, _HeaderChecks] = {}
        for index, known in zip(todo, placed, strict=True):
            if known is None:
                continue
            for replica in known.replicas:
                segment, offset, _ = replica
                looks = mapped.get(id(segment))
                if looks is None and (shown := context.pool.readonly_memory(segment)) is not None:
                    looks = mapped[id(segment)] = _HeaderChecks(segment, shown, [], [])
                if looks is not None:
                    size, epoch, counter, _, _, _ = known
                    looks.rows.append((offset, size, epoch, counter, keys[index], None, b""))
                    looks.of.append((index, known, replica))
                    break
            else:
                copied.append(index)
        todo = []
        for looks in mapped.values():
            todo += _look(context, options, looks, views)
        for index in todo:
            context.placements.forget(namespace, keys[index])
        if not todo:
            break
    yield from _copy(context, keys, options, [*copied, *todo], views)
    return views


def _copy(
    context: Context,
    keys: Sequence[Key],
    options: GetOptions,
    rows: Sequence[int],
    views: list[Found],
) -> Flow[None]:
    if rows:
        values = yield from read_values(context, [keys[index] for index in rows], options)
        for index, value in zip(rows, values, strict=True):
            views[index] = value


def _look(
    context: Context,
    options: GetOptions,
    checks: _HeaderChecks,
    views: list[Found],
) -> list[int]:
    """Store values over the segment in ``views``. Returns the indexes of missing objects."""
    segment, shown, rows, of = checks
    namespace, kind = options.namespace, options.kind
    try:
        memory = context.pool.memory(segment)
        mounted = context.pool.watch(segment)
        found = headers(memory, segment, namespace, rows, verify=context.verify_views)
    except (SegmentUnmountedError, InvalidRangeError):
        context.segments.forget(segment)
        return [index for index, _, _ in of]
    base = address_of(shown)
    read_only = shown.toreadonly()
    stale: list[int] = []
    leased: list[Watched] = []
    now = context.clock()
    for row, (index, placed, replica), descriptor in zip(rows, of, found, strict=True):
        offset, size, epoch, counter, key, _, _ = row
        if now >= placed.until:
            stale.append(index)
            continue
        if not isinstance(descriptor, bytes):
            if descriptor == STALE:
                context.count("stale_reads")
            else:
                read_objects.mismatch(context, namespace, Key(key), replica)
            stale.append(index)
            continue
        at = offset + HEADER_BYTES
        tensor: Value | None = None
        try:
            requested = kind or read_descriptor(descriptor).kind
            claimed = shown if requested == "torch" else read_only  # torch wants it writable
            array = array_over(descriptor, kind, claimed, at, size)
            if requested == "numpy":
                views[index] = array
            elif requested == "bytes":
                views[index] = memoryview(array)  # type: ignore[arg-type]
            else:
                views[index] = tensor = decode(descriptor, cast("Bytes1D", array), kind)
        except UNREADABLE as error:
            views[index] = unreadable(error, Key(key))
            continue
        if size:
            named = ObjectLease(namespace, Key(key), epoch, counter)
            location = LeasedExtent(segment.uuid, offset)
            leased.append((array, base + at, named, placed.until, location, tensor))
    context.views.add_many(leased, mounted)
    return stale


def view_tensors(context: Context, keys: Sequence[Key], options: GetOptions) -> Flow[list[Found]]:
    """Return leased tensors over objects in the memory of this device, and copies of all others."""
    namespace, device = options.namespace, context.pool.devices.of(options.device)
    views: list[Found] = [None] * len(keys)
    mapped: dict[int, tuple[DeviceHeaderChecks, list[tuple[int, LeasedLocation, int]]]] = {}
    placed = yield from read_objects.locate(context, namespace, keys)
    for index, known in enumerate(placed):
        if known is None or not known.size:
            continue
        for segment, offset, _ in known.replicas:
            if context.pool.is_on(segment, device):
                looks = DeviceHeaderChecks(segment, namespace, verify=context.verify_views)
                looks, of = mapped.setdefault(id(segment), (looks, []))
                size, epoch, counter, _, _, _ = known
                looks.rows.append((offset, size, epoch, counter, keys[index], None, b""))
                of.append((index, known, offset))
                break
    if mapped:
        errors = yield [looks for looks, _ in mapped.values()]
        assert isinstance(errors, list)
        for (looks, of), error in zip(mapped.values(), errors, strict=True):
            if error is None:
                _lend(context, namespace, keys, looks, of, views)
    rest = [index for index, view in enumerate(views) if view is None]
    yield from _copy(context, keys, options, rest, views)
    return views


def _lend(
    context: Context,
    namespace: Namespace,
    keys: Sequence[Key],
    looks: DeviceHeaderChecks,
    of: Sequence[tuple[int, LeasedLocation, int]],
    views: list[Found],
) -> None:
    """Store tensors over the objects that were found in ``views``, and watch them."""
    leased: list[Watched] = []
    now = context.clock()
    rows = zip(of, looks.outcomes, looks.shared_views, strict=True)
    for (index, placed, offset), descriptor, lent in rows:
        if lent is None or not isinstance(descriptor, bytes) or now >= placed.until:
            continue
        views[index] = tensor = tensor_of(keys[index], descriptor, lent.tensor)
        if isinstance(tensor, UNREADABLE):
            continue
        named = ObjectLease(namespace, keys[index], placed.epoch, placed.counter)
        location = LeasedExtent(looks.segment.uuid, offset, ends_with_owner=True)
        leased.append((lent.owner, lent.address, named, placed.until, location, tensor))
    context.views.add_many(leased, context.pool.watch(looks.segment))
