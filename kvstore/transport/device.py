"""Transport to segments in the memory of a device of this host, which another process owns.

The node exports its memory, and this process opens it (CUDA IPC). Headers and payloads are there;
the entry in ``/dev/shm`` has the superblock, with the generation and the owner's mutex. The memory
ends with its owner, even while it is open here. So each call checks both before each copy and at
its end, and copied bytes count only if the owner lived until then.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import mmap
import os
import struct
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.calls import DeviceLocation, SegmentInfo
from kvstore.device.device import Device
from kvstore.device.drivers import driver_of_handle
from kvstore.errors import ClosedError, DeviceError, KVStoreError, NodeUnreachableError
from kvstore.memory import owner_futex
from kvstore.memory.header import (
    ALIVE_OFFSET,
    GENERATION_OFFSET,
    OWNER_OFFSET,
    SUPERBLOCK_BYTES,
    unpack_owner,
    unpack_superblock,
)
from kvstore.memory.shm_entries import SHM_PREFIX, is_of_a_node, open_shared
from kvstore.runtime.cancellation import check_current
from kvstore.runtime.clock import uptime
from kvstore.runtime.host import SHM_DIRECTORY, host_id
from kvstore.runtime.tasks import uninterrupted
from kvstore.transport.base import Transport
from kvstore.transport.common import RangeCopy, deadline_exceeded, invalid_range, segment_unmounted
from kvstore.transport.device_ranges import DeviceRanges

if TYPE_CHECKING:
    import torch

log = logging.getLogger("kvstore.transport")

LOCK: Final = struct.Struct("hhqqi4x")
"""``struct flock``. Processes with open memory hold a shared lock on the entry's first byte; the
owner waits for them before it frees the memory (``kvstore.node.device_segment``)."""

AGAIN_S: Final = 30.0
"""Pause between attempts to open memory, which may take half a second."""

LOGGED_MAX: Final = 1_000


class DeviceView(NamedTuple):
    """Memory of a segment that a program uses in place."""

    tensor: torch.Tensor
    """One-dimensional, of uint8."""
    owner: NDArray[np.uint8]
    """Lives as long as the tensor's storage. Never read: its memory is on a device."""
    address: int


class DeviceMapping:
    """The memory of one segment, open in this process."""

    def __init__(self, device: Device, base: int, page: mmap.mmap, fd: int) -> None:
        """Internal: use ``attach``. Takes over all but ``device``."""
        self.device: Final = device
        self.ranges: Final = DeviceRanges(device, base)
        self._memory: Final = memoryview(page)
        self._words: Final = self._memory.cast("Q")
        self._alive: Final = self._memory.cast("I")
        self._fd = fd
        self._users: set[object] = set()
        """Each removes itself in one step, also if a signal handler raises."""
        self._is_ending = False
        self._is_closed = False
        self._changing = threading.Lock()
        self._shared: dict[int, weakref.ref[NDArray[np.uint8]]] = {}
        self._returned: deque[weakref.ref[NDArray[np.uint8]]] = deque()

    @classmethod
    def attach(
        cls, place: DeviceLocation, segment: SegmentInfo,
        device_of: Callable[[DeviceLocation], Device],
    ) -> DeviceMapping:  # fmt: skip
        """Raises DeviceError, NodeUnreachableError: the memory cannot be opened here."""
        name = place.entry
        if not name.startswith(SHM_PREFIX) or "/" in name:
            raise _not_here(segment, f"{name!r} is no name of a segment")
        try:
            fd = open_shared(f"{SHM_DIRECTORY}/{name}")
        except OSError as error:
            raise _not_here(segment, f"{SHM_DIRECTORY}/{name}: {error.strerror}") from None
        try:
            page, there = os.pread(fd, SUPERBLOCK_BYTES, 0), os.fstat(fd)
            found = unpack_superblock(page)
            if found is None or len(page) != there.st_size or found.uuid != segment.uuid:
                raise _not_here(segment, f"{SHM_DIRECTORY}/{name} is another segment's")
            owner = unpack_owner(page[OWNER_OFFSET:])
            if owner is None or not owner.on_device or not is_of_a_node(there):
                raise _not_here(segment, f"{SHM_DIRECTORY}/{name} was not made by a node")
            if found.size != segment.size:
                raise _not_here(segment, f"it has {found.size} bytes, not {segment.size}")
            lock = LOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 1, 0)
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, lock)
            mapped = mmap.mmap(fd, SUPERBLOCK_BYTES)
            device = device_of(place)
            return cls(device, device.driver.open(place.ipc_handle), mapped, fd)
        except OSError as error:
            os.close(fd)
            raise _not_here(segment, f"{SHM_DIRECTORY}/{name}: {error.strerror}") from None
        except BaseException:
            os.close(fd)
            raise

    def is_mounted(self, generation: int) -> bool:
        """Whether the owner lives, and the segment was not mounted again."""
        return self._words[GENERATION_OFFSET // 8] == generation and owner_futex.is_owner_alive(
            self._alive[ALIVE_OFFSET // 4]
        )

    @property
    def is_current(self) -> bool:
        """Whether the segment still exists."""
        return self.is_mounted(self._words[GENERATION_OFFSET // 8] or -1)

    @property
    def is_usable(self) -> bool:
        return not self._is_ending and not self.device.has_failed

    @contextmanager
    def keep_open(self) -> Iterator[bool]:
        """Keeps the memory open. False: it is closed."""
        me = object()
        try:
            with self._changing:
                is_open = not self._is_ending
                if is_open:
                    self._users.add(me)
            yield is_open
        finally:
            self._users.discard(me)
            if self._is_ending:
                uninterrupted(self.close_if_unused)

    def make_view(self, offset: int, size: int) -> DeviceView:
        """A tensor over these bytes, which keeps the memory open until the next
        ``close_if_unused``. The caller is within ``keep_open``."""
        address = self.ranges.base + offset
        owner = np.frombuffer(memoryview((ctypes.c_char * size).from_address(address)), np.uint8)
        tensor = self.device.driver.tensor_over(address, size, owner)
        with self._changing:
            watch = weakref.ref(owner, self._returned.append)
            self._shared[id(watch)] = watch
        return DeviceView(tensor, owner, address)

    def close_if_unused(self) -> bool:
        """Closes the memory after ``end``, if unused; returns whether it is closed. Finalizers must
        not do that: closing calls the driver."""
        with self._changing:
            is_last, is_closed = self._is_last(), self._is_closed
        if is_last:
            self._close()
        return is_closed

    def end(self) -> None:
        """Closes the memory, when it is unused. Idempotent."""
        with self._changing:
            self._is_ending = True
            is_last = self._is_last()
        if is_last:
            self._close()

    def close_after_fork(self) -> None:
        """In the child of a fork: does not call the device."""
        if not self._is_closed:
            os.close(self._fd)

    def _is_last(self) -> bool:
        """Whether to close the memory now; True once. The caller holds the lock."""
        while self._returned:
            self._shared.pop(id(self._returned[0]), None)
            self._returned.popleft()
        in_use = self._users or self._shared
        is_last = self._is_ending and not in_use and not self._is_closed
        self._is_closed = self._is_closed or is_last
        return is_last

    def _close(self) -> None:
        if not self.device.has_failed:  # otherwise copies may never end
            with contextlib.suppress(DeviceError):
                self.device.driver.close(self.ranges.base)
        # The mapping of the page has a copy of the file descriptor: closing does not unlock.
        fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, LOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, 0, 1, 0))
        os.close(self._fd)


class DeviceTransport(Transport):
    """Reaches segments in the memory of this host's devices. No byte lands after a call, unless the
    device has failed. Threads: any."""

    name: str = "device"

    def __init__(self, ring_bytes: int) -> None:
        """``ring_bytes``: page-locked memory per device, for bytes to or from the host."""
        self._ring_bytes = ring_bytes
        self._devices: dict[str, Device] = {}
        self._attached: dict[bytes, DeviceMapping | None] = {}
        """By uuid of the segment; None: its memory could not be opened here."""
        self._ending: list[DeviceMapping] = []
        """Dropped attachments that are still used, for example by a tensor."""
        self._again_at = 0.0
        """Time of the next attempt to open memory that failed."""
        self._logged: set[bytes] = set()
        self._changing = threading.Lock()
        self._closed = False

    def can_reach(self, segment: SegmentInfo) -> bool:
        """As ``Transport.can_reach``: opens the memory the first time."""
        if segment.device is None:
            return False
        attachment = self._attachment(segment)
        return attachment is not None and attachment.is_usable

    def is_on(self, segment: SegmentInfo, device: Device) -> bool:
        """Whether the segment is in the memory of this device, and open."""
        attachment = self._attachment(segment)
        return attachment is not None and attachment.device.driver is device.driver

    def make_view(self, segment: SegmentInfo, offset: int, size: int) -> DeviceView:
        """A tensor over bytes of the segment, which stays open until the ``sweep`` after the
        tensor's end, or until the process ends if the transport is closed before.

        Raises:
            NodeUnreachableError: the memory is not open.
        """
        attachment = self._attachment(segment)
        if attachment is None:
            raise _not_here(segment, "it is not open")
        return attachment.make_view(offset, size)

    def mount_checker(self, segment: SegmentInfo) -> Callable[[], bool] | None:
        """As ``Transport.mount_checker``, of a segment that is open."""
        attachment = self._attached.get(segment.uuid)
        return None if attachment is None else partial(attachment.is_mounted, segment.generation)

    def read(self, segment: SegmentInfo, moves: Sequence[RangeCopy], deadline: float) -> None:
        with self.open_ranges(segment, _ranges_of(moves), deadline) as (ranges, check):
            ranges.read(moves, deadline, check)

    def write(self, segment: SegmentInfo, moves: Sequence[RangeCopy], deadline: float) -> None:
        with self.open_ranges(segment, _ranges_of(moves), deadline) as (ranges, check):
            ranges.write(moves, deadline, check)

    def forget(self, segment: SegmentInfo) -> None:
        self._drop(
            lambda uuid, attached: uuid == segment.uuid and not (attached and attached.is_current)
        )

    def sweep(self) -> None:
        """As ``Transport.sweep``; retries later to open memory that failed."""
        for attachment in list(self._attached.values()):
            if attachment is not None:
                attachment.close_if_unused()
        is_time = uptime() >= self._again_at

        def is_due(uuid: bytes, attachment: DeviceMapping | None) -> bool:
            return is_time if attachment is None else not attachment.is_current

        self._drop(is_due)
        self._close_unused()

    def close_after_fork(self) -> None:
        for attachment in (*self._attached.values(), *self._ending):
            if attachment is not None:
                attachment.close_after_fork()

    def close(self) -> None:
        with self._changing:
            self._closed = True
        self._drop(lambda uuid, attachment: True)
        self._close_unused()
        for device in self._devices.values():
            device.close()

    @contextmanager
    def open_ranges(
        self, segment: SegmentInfo, ranges: Sequence[tuple[int, int]], deadline: float
    ) -> Iterator[tuple[DeviceRanges, Callable[[], None]]]:
        """Yields the memory of a segment, and a function that raises if the call must end.

        Args:
            ranges: offset and length of all ranges of the call.

        Raises:
            As ``Transport.read``; SegmentUnmountedError, also at the end, if the owner has ended.
        """
        attachment = self._attachment(segment)
        if attachment is None:
            raise self._closed_error() if self._closed else _not_here(segment, "it is not open")
        for offset, length in ranges:
            if offset < SUPERBLOCK_BYTES or offset + length > segment.size:
                raise invalid_range(offset, length, segment.size)

        def check() -> None:
            if self._closed:
                raise self._closed_error()
            if not attachment.is_mounted(segment.generation):
                raise segment_unmounted(segment)
            if uptime() >= deadline:
                raise deadline_exceeded(segment)
            check_current()

        with attachment.keep_open() as is_open:
            if not is_open:
                raise segment_unmounted(segment)
            check()
            try:
                yield attachment.ranges, check
            except DeviceError as error:
                if not attachment.is_mounted(segment.generation):
                    raise segment_unmounted(segment) from None
                raise _failed(segment, error) from None
            if not attachment.is_mounted(segment.generation):
                raise segment_unmounted(segment)

    def _attachment(self, segment: SegmentInfo) -> DeviceMapping | None:
        uuid = segment.uuid
        try:
            return self._attached[uuid]
        except KeyError:
            pass
        place = segment.device
        if place is None or segment.host != host_id():
            return None
        return uninterrupted(partial(self._open, place, segment))

    def _open(self, place: DeviceLocation, segment: SegmentInfo) -> DeviceMapping | None:
        uuid = segment.uuid
        with self._changing:
            if self._closed:
                return None
            if uuid not in self._attached:
                try:
                    self._attached[uuid] = DeviceMapping.attach(place, segment, self._device_of)
                except KVStoreError as error:
                    self._attached[uuid] = None
                    self._again_at = uptime() + AGAIN_S
                    if uuid not in self._logged and len(self._logged) < LOGGED_MAX:
                        self._logged.add(uuid)
                        log.warning("device_memory_not_opened node=%s reason=%s",
                                    segment.node, str(error))  # fmt: skip
            return self._attached[uuid]

    def _device_of(self, place: DeviceLocation) -> Device:
        driver = driver_of_handle(place.device, place.ipc_handle)
        device = self._devices.get(driver.name)
        if device is None:
            device = Device(driver, ring_bytes=self._ring_bytes)
            self._devices[driver.name] = device
        return device

    def _drop(self, is_due: Callable[[bytes, DeviceMapping | None], bool]) -> None:
        with self._changing:
            due = {
                uuid: attached
                for uuid, attached in self._attached.items()
                if is_due(uuid, attached)
            }
            for uuid in due:
                del self._attached[uuid]
            self._ending += [attached for attached in due.values() if attached is not None]
        for attachment in due.values():
            if attachment is not None:
                attachment.end()

    def _close_unused(self) -> None:
        with self._changing:
            ending, self._ending = self._ending, []
        left = [attached for attached in ending if not attached.close_if_unused()]
        with self._changing:
            self._ending += left

    def _closed_error(self) -> ClosedError:
        return ClosedError("the transport was closed", quiesced=1)


def _ranges_of(moves: Sequence[RangeCopy]) -> list[tuple[int, int]]:
    return [(move.offset, len(move.buffer)) for move in moves]


def _not_here(segment: SegmentInfo, why: str) -> NodeUnreachableError:
    return NodeUnreachableError(
        f"the device's memory of node {segment.node!r} is not open in this process: {why}",
        node=segment.node,
        quiesced=1,
    )


def _failed(segment: SegmentInfo, error: DeviceError) -> NodeUnreachableError:
    return NodeUnreachableError(
        f"node {segment.node}: {error.message}",
        advice=error.advice,
        node=segment.node,
        quiesced=error.fields.get("quiesced", 1),
    )
