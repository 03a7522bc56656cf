"""The owner's side of a segment in the memory of a device.

The entry in ``/dev/shm`` is one page, the superblock. The extents are in one allocation of the
device, at the same offsets as in any segment. They end with the process, so such a segment is never
attached again: the next node of its name removes the entry.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from collections.abc import Callable, Sequence

from kvstore.calls import DeviceLocation, SegmentOffer
from kvstore.device.device import Device
from kvstore.device.drivers import driver_of
from kvstore.device.staging_ring import RING_BYTES
from kvstore.errors import DeviceError
from kvstore.memory import header as layout
from kvstore.memory import owner_futex
from kvstore.memory.medium import MediumTraits, RangeMedium, check_request, write_superblock
from kvstore.memory.shm_entries import (
    SHM_PREFIX,
    group_id,
    of_no_use,
    open_locked,
    read_left,
    reclaim_elsewhere,
    set_access,
    unlink_entry,
)
from kvstore.runtime.clock import uptime
from kvstore.runtime.host import SHM_DIRECTORY
from kvstore.transport.common import RangeCopy
from kvstore.transport.device import LOCK
from kvstore.transport.device_ranges import DeviceRanges

OPEN_S = 3.0
"""How long a segment that ends waits for processes that have it open; clients check once a second
(``kvstore.client.transport_selector.SWEEP_S``)."""


class DeviceSegment(RangeMedium):
    """The medium of a device's memory. Create and close one in the same thread, which lives as long
    as the process.

    A device that fails raises RuntimeError: the node cannot serve, and its process ends.
    """

    _is_on_device = True

    def __init__(
        self, *, path: str, fd: int, mapped: mmap.mmap, superblock: layout.Superblock,
        device: Device, base: int, handle: str, futex: int,
    ) -> None:  # fmt: skip
        """Internal: use ``on``. ``futex``: of ``owner_futex.acquire_owner_futex``."""
        super().__init__(path=path, fd=fd, mapped=mapped, superblock=superblock)
        self._device = device
        self._base = base
        self._futex = futex
        self.traits = MediumTraits(
            name=device.name, is_opaque=True, survives_process=False, is_cleared=False
        )
        self._extents = _OwnRanges(DeviceRanges(device, base))
        self.location = DeviceLocation(device.name, self.shm_name, handle)

    @classmethod
    def on(
        cls, device_name: str, name: str, size: int, *, group: str = "",
        owner: layout.SegmentOwner | None = None, discard: bool = False,
    ) -> DeviceSegment:  # fmt: skip
        """Creates a segment of ``size`` bytes (rounded down to ``SIZE_STEP``) on a device.

        Args:
            device_name: ``cuda:0``.
            name: as ``OwnedSegment.create``; the node's name, too.
            group: as ``MemoryOptions.group``.
            owner: as ``OwnedSegment.create``.
            discard: drop memory of the host that a node of this name has left.

        Raises:
            DeviceError: the device cannot be used, or has not as much free memory.
            LeftOverMemoryError: memory of the host would be lost; it remains unchanged.
            ConfigError, NodeNameTakenError, StartupError: as ``OwnedSegment.create``.
        """
        size = check_request(name, size)
        gid = group_id(group)
        shm_name = SHM_PREFIX + name
        path = f"{SHM_DIRECTORY}/{shm_name}"
        left = read_left(path)
        if left is not None and left.node and not left.owner.on_device and not discard:
            raise of_no_use(path, "memory of a device was asked for")
        reclaim_elsewhere(shm_name, SHM_DIRECTORY)
        fd = open_locked(path)
        try:
            os.ftruncate(fd, layout.SUPERBLOCK_BYTES)
            os.posix_fallocate(fd, 0, layout.SUPERBLOCK_BYTES)
            device = Device(driver_of(device_name), ring_bytes=RING_BYTES)
            base = device.driver.allocate(size)
            try:
                handle = device.driver.export(base)
                mapped = mmap.mmap(fd, layout.SUPERBLOCK_BYTES)
                set_access(fd, path, gid)
                futex = owner_futex.acquire_owner_futex(fd, layout.ALIVE_OFFSET)
                owner = (owner or layout.SegmentOwner())._replace(on_device=True)
                superblock = write_superblock(mapped, name, size, owner)
                return cls(
                    path=path, fd=fd, mapped=mapped, superblock=superblock, device=device,
                    base=base, handle=handle, futex=futex,
                )  # fmt: skip
            except BaseException:
                device.driver.free(base)
                raise
        except BaseException:
            unlink_entry(path)
            os.close(fd)
            raise

    def make_offer(self) -> SegmentOffer:
        return super().make_offer()._replace(device=self.location)

    def _end_access(self) -> None:
        """Waits until no process has the memory open, as CUDA demands, and frees it."""
        deadline = uptime() + OPEN_S
        while self._is_open_elsewhere() and uptime() < deadline:
            time.sleep(0.02)
        self._device.close()
        if not self._device.has_failed:
            self._device.driver.free(self._base)
        owner_futex.release_owner_futex(self._futex)

    def _is_open_elsewhere(self) -> bool:
        lock = LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
        found = LOCK.unpack(fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, lock))
        return bool(found[0] != fcntl.F_UNLCK)


class _OwnRanges:
    """Implements ``RangeAccess`` in the process that owns the memory."""

    def __init__(self, ranges: DeviceRanges) -> None:
        self._ranges = ranges

    def read(self, ranges: Sequence[tuple[int, memoryview]], deadline: float) -> None:
        self._run(self._ranges.read, ranges, deadline)

    def write(self, ranges: Sequence[tuple[int, memoryview]], deadline: float) -> None:
        self._run(self._ranges.write, ranges, deadline)

    def _run(
        self, move: Callable[[Sequence[RangeCopy], float, Callable[[], None]], None],
        ranges: Sequence[tuple[int, memoryview]], deadline: float,
    ) -> None:  # fmt: skip
        try:
            move([RangeCopy(*each) for each in ranges], deadline, lambda: None)
        except DeviceError as error:
            raise RuntimeError(f"the device has failed: {error}") from error
