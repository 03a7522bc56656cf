"""Complete objects between a segment and the memory of a device.

If the segment is mapped and its pages are locked, the device copies directly. Otherwise the bytes
pass through the ring of page-locked memory or ordinary memory, and the usual transfer follows. In
the memory of the same device it copies there, and also to the ring if the host needs a checksum.

The host hashes one group in the pool while the device copies the next. The lease guarantees that
these bytes do not change in between.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self, TypeVar

import numpy as np

from kvstore.calls import SegmentInfo
from kvstore.client.flows.object_transfers import (
    ObjectReads,
    ObjectWrites,
    Outcome,
    headers,
)
from kvstore.client.flows.steps import WaitForDevice
from kvstore.client.validation import Stream
from kvstore.client.values import Payload
from kvstore.device.device import GROUP_BYTES, Device
from kvstore.device.driver import Direction, Event
from kvstore.device.memory import DeviceMemory, layout_copies
from kvstore.device.page_locks import LockedSegment
from kvstore.device.streams import handle_of
from kvstore.limits import Namespace
from kvstore.memory.header import HEADER_BYTES, SUPERBLOCK_BYTES, WIPE, Header
from kvstore.memory.process_memory import address_of
from kvstore.native.interface import CORRUPT, OUTSIDE, STALE, ReadRow, WriteRow
from kvstore.native.object_headers import header_of, write_header
from kvstore.runtime.cancellation import check_current
from kvstore.transport.base import Transport
from kvstore.transport.common import RangeCopy, batch_ended
from kvstore.transport.device import DeviceTransport, DeviceView
from kvstore.transport.device_ranges import DeviceRanges

RowT = TypeVar("RowT", ReadRow, WriteRow)


def ready(device: Device, payloads: Sequence[Payload], stream: Stream | None) -> WaitForDevice:
    """Return the step that waits for the payloads' events, or without one for the stream."""
    memories = [payload for payload in payloads if not isinstance(payload, list)]
    events = [event for memory in memories for event in memory.after]
    if stream is not None or not all(memory.after for memory in memories):
        events.append(device.driver.record_event(handle_of(stream)))
    return WaitForDevice(device, events)


class DeviceReads(ObjectReads):
    """Reads into the memory of one device; each row holds a ``DeviceMemory``."""

    __slots__ = ()

    def run(self, transport: Transport, deadline: float) -> None:
        values = _values(self.rows)
        if not values:
            super().run(transport, deadline)
            return
        device = values[0].device
        outcomes: list[Outcome] = []
        if isinstance(transport, DeviceTransport) and transport.is_on(self.segment, device):
            for group in _groups(self.rows, GROUP_BYTES):
                outcomes += self._within(group, device, transport, deadline)
            self.outcomes = outcomes
            return
        with (
            _direct(device, transport, self.segment) as locked,
            _DeviceCopies(device, deadline) as in_progress,
        ):
            for group in _groups(self.rows, GROUP_BYTES):
                check_current()
                if locked is not None and _lock(device, locked, group, self.segment):
                    outcomes += self._direct(group, in_progress, transport, locked)
                    in_progress.wait_for_copies(all_but=1)
                else:
                    for part in _groups(group, device.ring.slot_bytes):
                        outcomes += self._staged(part, device, transport, deadline)
        if locked is not None:
            transport.memory(self.segment)  # raises if the segment was unmounted
        self.outcomes = outcomes

    def _direct(
        self,
        group: list[ReadRow],
        in_progress: _DeviceCopies,
        transport: Transport,
        locked: LockedSegment,
    ) -> list[Outcome]:
        """Let the device copy the payloads, and verify them meanwhile."""
        memory = transport.memory(self.segment)
        bare = _bare(group)
        found = headers(memory, self.segment, self.namespace, bare)
        intact = [row for row, each in zip(group, found, strict=True) if isinstance(each, bytes)]
        in_progress.copy(Direction.LOAD, intact, locked.base, locked)
        if not self.verify or not intact:
            return found
        deadline = in_progress.deadline
        return transport.read_objects(self.segment, self.namespace, bare, True, deadline)

    def _within(
        self, group: list[ReadRow], device: Device, transport: DeviceTransport, deadline: float
    ) -> list[Outcome]:
        """Check the headers, then let the device copy within its memory."""
        with (
            transport.open_ranges(self.segment, _extents(group), deadline) as (ranges, check),
            _DeviceCopies(device, deadline) as in_progress,
        ):
            found = _headers_on(self, group, ranges, deadline, check)
            intact = [row for row, header in zip(group, found, strict=True) if header is not None]
            in_progress.copy(Direction.LOAD, intact, ranges.base)
            return _checked_on(self, group, found, ranges, deadline, check)

    def _staged(
        self, group: list[ReadRow], device: Device, transport: Transport, deadline: float
    ) -> list[Outcome]:
        with _staging_memory(device, _payload_bytes(group), deadline) as staging:
            reads = ObjectReads(self.segment, self.namespace, verify=self.verify)
            reads.rows = _into(group, staging.memory)
            reads.run(transport, deadline)
            outcomes = reads.outcomes
            intact = [isinstance(found, bytes) for found in outcomes]
            staging.copy(Direction.LOAD, group, intact, deadline)
        return outcomes


class DeviceHeaderChecks(ObjectReads):
    """Header checks of objects that a program is to use in device memory. Rows have no buffers."""

    __slots__ = ("shared_views",)

    def __init__(self, segment: SegmentInfo, namespace: Namespace, *, verify: bool) -> None:
        super().__init__(segment, namespace, verify=verify)
        self.shared_views: list[DeviceView | None] = []

    def run(self, transport: Transport, deadline: float) -> None:
        self.shared_views = [None] * len(self.rows)
        self.outcomes = [STALE for _ in self.rows]
        if not isinstance(transport, DeviceTransport):
            return
        with transport.open_ranges(self.segment, _extents(self.rows), deadline) as (ranges, check):
            found = _headers_on(self, self.rows, ranges, deadline, check)
            self.outcomes = _checked_on(self, self.rows, found, ranges, deadline, check)
            self.shared_views = [
                transport.make_view(self.segment, row[0] + HEADER_BYTES, row[1])
                if isinstance(outcome, bytes)
                else None
                for row, outcome in zip(self.rows, self.outcomes, strict=True)
            ]


class DeviceWrites(ObjectWrites):
    """Writes from the memory of one device; each row holds a ``DeviceMemory``."""

    __slots__ = ()

    def run(self, transport: Transport, deadline: float) -> None:
        values = _values(self.rows)
        if not values:
            super().run(transport, deadline)
            return
        device = values[0].device
        if isinstance(transport, DeviceTransport) and transport.is_on(self.segment, device):
            for group in _groups(self.rows, GROUP_BYTES):
                self._within(group, device, transport, deadline)
            return
        without_header: deque[list[WriteRow]] = deque()
        with (
            _direct(device, transport, self.segment) as locked,
            _DeviceCopies(device, deadline) as in_progress,
        ):
            for group in _groups(self.rows, GROUP_BYTES):
                check_current()
                if locked is not None and _lock(device, locked, group, self.segment):
                    self._begin(group, in_progress, transport, locked)
                    without_header.append(group)
                    if len(without_header) > 1:  # one is hashed while the next is copied
                        in_progress.wait_for_copies(all_but=1)
                        self._write_headers(without_header.popleft(), transport, deadline)
                else:
                    for part in _groups(group, device.ring.slot_bytes):
                        self._staged(part, device, transport, deadline)
            in_progress.wait_for_copies()
            for group in without_header:
                self._write_headers(group, transport, deadline)

    def _within(
        self, group: list[WriteRow], device: Device, transport: DeviceTransport, deadline: float
    ) -> None:
        """Let the device copy within its memory; checksums cover the bytes in the segment."""
        wipes = [RangeCopy(row[0], memoryview(WIPE)) for row in group]
        with transport.open_ranges(self.segment, _extents(group), deadline) as (ranges, check):
            ranges.write(wipes, deadline, check)
            with _DeviceCopies(device, deadline) as in_progress:
                in_progress.copy(Direction.SAVE, group, ranges.base)
            payloads = [(row[0] + HEADER_BYTES, row[1]) for row in group]
            heads = [RangeCopy(row[0], memoryview(bytearray(HEADER_BYTES))) for row in group]
            hashers = ranges.hashed(payloads, deadline, check)
            for row, head, hasher in zip(group, heads, hashers, strict=True):
                checksum = hasher.intdigest()
                write_header(head.buffer, self.segment.seed, self.namespace, row, checksum)
            ranges.write(heads, deadline, check)

    def _begin(
        self,
        group: list[WriteRow],
        in_progress: _DeviceCopies,
        transport: Transport,
        locked: LockedSegment,
    ) -> None:
        memory = transport.memory(self.segment)
        for row in group:
            memory[row[0] : row[0] + len(WIPE)] = WIPE
        in_progress.copy(Direction.SAVE, group, locked.base, locked)

    def _write_headers(self, group: list[WriteRow], transport: Transport, deadline: float) -> None:
        transport.write_objects(self.segment, self.namespace, _bare(group), deadline)

    def _staged(
        self, group: list[WriteRow], device: Device, transport: Transport, deadline: float
    ) -> None:
        with _staging_memory(device, _payload_bytes(group), deadline) as staging:
            staging.copy(Direction.SAVE, group, [True] * len(group), deadline)
            writes = ObjectWrites(self.segment, self.namespace, deadline)
            writes.rows = _into(group, staging.memory)
            writes.run(transport, deadline)


def _headers_on(
    reads: ObjectReads,
    group: Sequence[ReadRow],
    ranges: DeviceRanges,
    deadline: float,
    check: Callable[[], None],
) -> list[Header | None]:
    """Return the headers of these rows on a device; None: another object is there."""
    heads = [bytearray(HEADER_BYTES) for _ in group]
    copies = [RangeCopy(row[0], memoryview(head)) for row, head in zip(group, heads, strict=True)]
    ranges.read(copies, deadline, check)
    return [
        header_of(head, reads.segment.seed, reads.namespace, row)
        for row, head in zip(group, heads, strict=True)
    ]


def _checked_on(
    reads: ObjectReads,
    group: Sequence[ReadRow],
    found: Sequence[Header | None],
    ranges: DeviceRanges,
    deadline: float,
    check: Callable[[], None],
) -> list[Outcome]:
    """Return the outcomes of these rows; verifies payloads if the reads do."""
    bad: set[int] = set()
    if reads.verify:
        pairs = zip(group, found, strict=True)
        intact = [(row, header) for row, header in pairs if header is not None]
        payloads = [(row[0] + HEADER_BYTES, row[1]) for row, _ in intact]
        hashers = ranges.hashed(payloads, deadline, check)
        bad = {
            row[0]
            for (row, header), hasher in zip(intact, hashers, strict=True)
            if hasher.intdigest() != header.payload_checksum
        }
    return [
        STALE if header is None else CORRUPT if row[0] in bad else header.descriptor
        for row, header in zip(group, found, strict=True)
    ]


class _DeviceCopies:
    """Copies in progress on the device; leaving the ``with`` block waits for them."""

    def __init__(self, device: Device, deadline: float) -> None:
        self.deadline = deadline
        self._device = device
        self._events: deque[Event | None] = deque()
        """One per group, in sequence; None: a group without bytes."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait_for_copies()

    def copy(
        self,
        direction: Direction,
        rows: Sequence[Any],
        base: int,
        locked: LockedSegment | None = None,
    ) -> None:
        """Queue copies between rows and their extents. ``base``: the segment's address."""
        with_bytes = [row for row in rows if row[1]]
        event = None
        if with_bytes:
            addresses = [base + row[0] + HEADER_BYTES for row in with_bytes]
            copies = layout_copies([row[5] for row in with_bytes], addresses)
            event = self._device.copy(direction, copies, locked)
        self._events.append(event)

    def wait_for_copies(self, all_but: int = 0) -> None:
        """Wait for the copies of all groups except the last ``all_but``."""
        while len(self._events) > all_but:
            if (event := self._events[0]) is not None:
                self._device.wait_for_copies(event, self.deadline)
            self._events.popleft()


class _HostMemory:
    """Host memory for the payloads of a group, end to end."""

    def __init__(self, device: Device, memory: memoryview, is_locked: bool) -> None:
        self.memory = memory
        self._device = device
        self._is_locked = is_locked

    def copy(
        self, direction: Direction, group: Sequence[Any], selected: Sequence[bool], deadline: float
    ) -> None:
        """Copy the payloads of the ``selected`` rows between the device and this memory."""
        base = address_of(self.memory)
        values: list[DeviceMemory] = []
        addresses: list[int] = []
        for row, is_selected in zip(group, selected, strict=True):
            if is_selected and row[1]:
                values.append(row[5])
                addresses.append(base)
            base += row[1]
        if values:
            copies = layout_copies(values, addresses)
            copy = self._device.copy if self._is_locked else self._device.copy_ordinary
            self._device.wait_for_copies(copy(direction, copies), deadline)


@contextmanager
def _staging_memory(device: Device, size: int, deadline: float) -> Iterator[_HostMemory]:
    """Yield a slot of the page-locked ring; ordinary memory, if ``size`` exceeds a slot."""
    if size > device.ring.slot_bytes:
        ordinary = np.empty(size, np.uint8)
        yield _HostMemory(device, memoryview(ordinary), False)  # type: ignore[arg-type]
        return
    with device.slot(deadline) as slot:
        yield _HostMemory(device, slot, True)


@contextmanager
def _direct(
    device: Device, transport: Transport, segment: SegmentInfo
) -> Iterator[LockedSegment | None]:
    """Yield the mapped segment, for direct copies by the device; None: it is not mapped."""
    is_mounted: Callable[[], bool] | None = (
        transport.mount_checker(segment) if transport.maps else None
    )
    if is_mounted is None:
        yield None
        return
    with device.locks.of(transport.memory(segment), is_mounted) as locked:
        yield locked


def _lock(
    device: Device, locked: LockedSegment, group: Sequence[ReadRow] | Sequence[WriteRow],
    segment: SegmentInfo,
) -> bool:  # fmt: skip
    """Lock the pages of these extents. Raises InvalidRangeError: one is not in the segment."""
    for row in group:
        offset, size = row[:2]
        if offset < SUPERBLOCK_BYTES or offset + HEADER_BYTES + size > segment.size:
            raise batch_ended(OUTSIDE, segment)
    return all(device.locks.lock(locked, row[0], HEADER_BYTES + row[1]) for row in group)


def _groups(rows: list[RowT], size_max: int) -> Iterator[list[RowT]]:
    """Group the rows by total payload size; a larger row is a group of its own."""
    group: list[RowT] = []
    size = 0
    for row in rows:
        if group and size + row[1] > size_max:
            yield group
            group, size = [], 0
        group.append(row)
        size += row[1]
    if group:
        yield group


def _values(rows: Sequence[Any]) -> list[DeviceMemory]:
    return [row[5] for row in rows if row[1]]


def _extents(rows: Sequence[Any]) -> list[tuple[int, int]]:
    return [(row[0], HEADER_BYTES + row[1]) for row in rows]


def _payload_bytes(rows: Sequence[Any]) -> int:
    return sum(row[1] for row in rows)


def _into(rows: Sequence[Any], memory: memoryview) -> list[Any]:
    """Return the rows with host memory instead of device memory, end to end."""
    made = []
    at = 0
    for row in rows:
        views = [memory[at : at + row[1]]] if row[1] else []
        made.append((*row[:5], views, *row[6:]))
        at += row[1]
    return made


def _bare(rows: Sequence[Any]) -> list[Any]:
    """Return the rows without buffers: their payloads stay in the segment."""
    return [(*row[:5], None, *row[6:]) for row in rows]
