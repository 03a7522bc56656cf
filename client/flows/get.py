"""Reads of values: the flows of ``get`` and its siblings; ranges are not hashed."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from kvstore.calls import SegmentInfo
from kvstore.client.flows import views
from kvstore.client.flows.device_io import DeviceReads, ready
from kvstore.client.flows.location_cache import LeasedLocation, Replica
from kvstore.client.flows.object_transfers import ObjectReads, ReadRequest
from kvstore.client.flows.read_objects import (
    GetOptions,
    ReadTarget,
    look_up_to_read,
    read,
    read_values,
)
from kvstore.client.flows.steps import Context, Flow, Transfer
from kvstore.client.validation import Stream, check_no_overlap
from kvstore.client.values import (
    UNREADABLE,
    Buffer,
    Found,
    View,
    as_writable,
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
    wanted: Iterable[tuple[Key, Buffer | Sequence[Buffer]]],
    options: GetOptions,
    stream: Stream | None,
) -> Flow[list[int | None]]:
    targets = [ReadTarget(key, *as_writable(each, context.pool.devices)) for key, each in wanted]
    device = check_no_overlap(
        [target.key for target in targets], [target.views or [] for target in targets]
    )
    kind = ObjectReads
    if device is not None:
        yield ready(device, [target.views or [] for target in targets], stream)
        kind = DeviceReads
    yield from read(context, options.namespace, targets, options.timeout_ms, kind)
    return [None if target.placed is None else target.placed.size for target in targets]


def lookup(context: Context, namespace: Namespace, keys: Sequence[Key]) -> Flow[list[int | None]]:
    placed = yield from look_up_to_read(context, namespace, keys)
    return [None if known is None else known.size for known in placed]


class ObjectParts(ReadTarget):
    """Ranges of one object to read, and the caller's memory for them."""

    __slots__ = ("head", "ranges")

    def __init__(self, key: Key, ranges: Sequence[tuple[int, memoryview]]) -> None:
        super().__init__(key)
        self.ranges = ranges
        """Offset in the payload and memory of each; none is empty."""
        self.head = bytearray(HEADER_BYTES)


class PartReads(ObjectReads):
    __slots__ = ("heads",)

    is_partial = True

    def __init__(self, segment: SegmentInfo, namespace: Namespace, *, verify: bool) -> None:
        super().__init__(segment, namespace, verify=verify)
        self.heads: list[bytearray] = []

    def add(self, items: Sequence[tuple[ReadRequest, LeasedLocation, Replica]]) -> None:
        """As ``ObjectReads.add``. Raises BufferMismatchError: a range is not within the payload."""
        for request, placed, (_, offset, capability) in items:
            assert isinstance(request, ObjectParts)
            self._add_parts(request, placed, offset, capability)

    def _add_parts(
        self, target: ObjectParts, placed: LeasedLocation, offset: int, capability: bytes
    ) -> None:
        extent = extent_of(offset, placed.size, capability)
        self.moves.append(RangeCopy(offset, memoryview(target.head), extent=extent))
        for start, view in target.ranges:
            if start + len(view) > placed.size:
                raise BufferMismatchError(
                    f"the object has {placed.size} bytes, a range ends at {start + len(view)}",
                    advice="Call lookup(keys) for the sizes first.",
                    size_bytes=placed.size,
                    key=target.key.hex(),
                )
            self.moves.append(RangeCopy(offset + HEADER_BYTES + start, view, extent=extent))
        size, epoch, counter = placed.size, placed.epoch, placed.counter
        self.rows.append((offset, size, epoch, counter, target.key, None, capability))
        self.heads.append(target.head)

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
    wanted: Sequence[ObjectParts],
    timeout_ms: int | None = None,
) -> Flow[list[int | None]]:
    """As ``Client.get_ranges``."""
    yield from read(context, namespace, wanted, timeout_ms, PartReads)
    return [None if parts.placed is None else parts.placed.size for parts in wanted]
