"""Reads of values: the flows of ``get`` and its siblings; ranges are not hashed."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from kvstore.calls import SegmentInfo
from kvstore.client.flows import views
from kvstore.client.flows.device_io import DeviceReads, ready
from kvstore.client.flows.location_cache import LeasedLocation
from kvstore.client.flows.object_transfers import ObjectReads
from kvstore.client.flows.read_objects import GetOptions, look_up_to_read, read, read_values
from kvstore.client.flows.read_targets import CallerMemory, ReadGroup, ReadTargets
from kvstore.client.flows.steps import Context, Flow, Transfer
from kvstore.client.validation import Stream, check_no_overlap
from kvstore.client.values import (
    UNREADABLE,
    Buffer,
    Found,
    View,
    all_writable,
    check_dtype,
)
from kvstore.errors import BufferMismatchError
from kvstore.limits import Key, Namespace
from kvstore.memory.header import HEADER_BYTES
from kvstore.native.interface import STALE
from kvstore.native.object_headers import header_of
from kvstore.transport.base import Transport
from kvstore.transport.common import RangeCopy, extent_of

log = logging.getLogger("kvstore.client")


def get(context: Context, key: Key, options: GetOptions) -> Flow[View | None]:
    (found,) = yield from _found(context, [key], options)
    if isinstance(found, UNREADABLE):
        raise found
    return found


def get_many(context: Context, keys: Sequence[Key], options: GetOptions) -> Flow[list[View | None]]:
    found = yield from _found(context, keys, options)
    values = [None if isinstance(value, UNREADABLE) else value for value in found]
    unreadable = [value for value in found if isinstance(value, UNREADABLE)]
    if unreadable:
        context.count("unreadable_objects", len(unreadable))
        log.warning(
            "unreadable_objects namespace=%s objects=%d first=%s",
            options.namespace, len(unreadable), unreadable[0],
        )  # fmt: skip
    return values


def _found(context: Context, keys: Sequence[Key], options: GetOptions) -> Flow[list[Found]]:
    if options.copy:
        return read_values(context, keys, options)
    view = views.view_tensors if options.device else views.view_values
    return view(context, keys, options)


def get_into(
    context: Context,
    keys: Sequence[Key],
    buffers: Sequence[Buffer | Sequence[Buffer]],
    options: GetOptions,
    stream: Stream | None,
) -> Flow[list[int | None]]:
    payloads, dtypes = all_writable(buffers, context.pool.devices)
    device = check_no_overlap(keys, payloads)
    targets = CallerMemory(keys, payloads, ObjectReads if device is None else DeviceReads)
    if device is not None:
        yield ready(device, payloads, stream)
    yield from read(context, options.namespace, targets, options.timeout_ms)
    if any(dtypes):
        for descriptor, dtype in zip(targets.descriptors, dtypes, strict=True):
            if dtype and descriptor is not None:
                check_dtype(descriptor, dtype)
    return targets.sizes()


def lookup(context: Context, namespace: Namespace, keys: Sequence[Key]) -> Flow[list[int | None]]:
    placed = yield from look_up_to_read(context, namespace, keys)
    return [None if known is None else known.size for known in placed]


class ObjectParts(ReadTargets):
    """Objects of which ranges are read, and the caller's memory for them."""

    __slots__ = ("ranges",)

    is_partial = True

    def __init__(
        self, keys: Sequence[Key], ranges: Sequence[Sequence[tuple[int, memoryview]]]
    ) -> None:
        """Create targets. ``ranges``: offset in the payload and memory of each; none is empty."""
        super().__init__(keys)
        self.ranges = ranges

    def transfer(self, namespace: Namespace, group: ReadGroup, *, verify: bool) -> PartReads:
        """As ``ReadTargets.transfer``. Raises BufferMismatchError: a range is not within the
        payload."""
        reads = PartReads(group.replicas[0].segment, namespace, verify=verify)
        for number, placed, (_, offset, capability) in zip(*group, strict=True):
            reads.add(self.keys[number], self.ranges[number], placed, offset, capability)
        return reads


class PartReads(ObjectReads):
    __slots__ = ("heads",)

    def __init__(self, segment: SegmentInfo, namespace: Namespace, *, verify: bool) -> None:
        super().__init__(segment, namespace, verify=verify)
        self.heads: list[bytearray] = []

    def add(
        self,
        key: Key,
        ranges: Sequence[tuple[int, memoryview]],
        placed: LeasedLocation,
        offset: int,
        capability: bytes,
    ) -> None:
        size, epoch, counter, *_ = placed
        extent = extent_of(offset, size, capability)
        self.heads.append(head := bytearray(HEADER_BYTES))
        self.moves.append(RangeCopy(offset, memoryview(head), extent=extent))
        for start, view in ranges:
            if start + len(view) > size:
                raise BufferMismatchError(
                    f"the object has {size} bytes, a range ends at {start + len(view)}",
                    advice="Call lookup(keys) for the sizes first.",
                    size_bytes=size,
                    key=key.hex(),
                )
            self.moves.append(RangeCopy(offset + HEADER_BYTES + start, view, extent=extent))
        self.rows.append((offset, size, epoch, counter, key, None, capability))

    def size(self) -> int:
        return Transfer.size(self)

    def run(self, transport: Transport, deadline: float) -> None:
        transport.read(self.segment, self.moves, deadline)
        self.check()

    def check(self) -> None:
        for row, head in zip(self.rows, self.heads, strict=True):
            header = header_of(head, self.segment.seed, self.namespace, row)
            self.outcomes.append(STALE if header is None else header.descriptor)


def get_ranges(
    context: Context,
    namespace: Namespace,
    targets: ObjectParts,
    timeout_ms: int | None = None,
) -> Flow[list[int | None]]:
    """As ``Client.get_ranges``."""
    yield from read(context, namespace, targets, timeout_ms)
    return targets.sizes()
