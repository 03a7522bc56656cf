"""A segment in the memory of a device: the side of its node, which owns it.

The superblock is alone in ``/dev/shm``, in an entry of one page. The extents are in one allocation
of the device, at the same offsets as in any segment. When the process ends, however it ends, the
extents are gone: such a segment is not attached again, and the next node of its name removes the
entry.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from xxhash import xxh3_64

from kvstore.calls import DeviceLocation
from kvstore.device.device import Device
from kvstore.device.drivers import driver_of
from kvstore.device.staging_ring import RING_BYTES
from kvstore.errors import ConfigError, DeviceError
from kvstore.memory import header as layout
from kvstore.memory import owner_futex
from kvstore.memory.allocation import SIZE_STEP
from kvstore.memory.segment import ZERO_STEP, OwnedSegment, write_superblock
from kvstore.memory.shm_entries import (
    SHM_PREFIX,
    check_name,
    group_id,
    of_no_use,
    open_locked,
    read_left,
    reclaim_elsewhere,
    set_access,
    unlink_entry,
    unlink_own,
)
from kvstore.runtime.clock import uptime
from kvstore.runtime.host import SHM_DIRECTORY
from kvstore.transport.common import RangeCopy
from kvstore.transport.device import LOCK
from kvstore.transport.device_ranges import DeviceRanges

SCAN_BYTES: Final = 32 << 20
"""Bytes per step of a scan, in ordinary memory."""

OPEN_S: Final = 3.0
"""How long a segment that ends waits for processes that have it open; clients look once a second
(``kvstore.client.transport_selector.SWEEP_S``)."""

STEP_S: Final = 10.0
"""The longest that one step of a scan or a wipe may wait for the device."""

_ZEROS: Final = memoryview(bytes(ZERO_STEP))


class DeviceSegment(OwnedSegment):
    """See the module. Create and close one in the same thread, which lives as long as the process.

    A device that fails raises RuntimeError: the node cannot serve, and its process ends.
    """

    def __init__(
        self, *, path: str, fd: int, mapped: mmap.mmap, superblock: layout.Superblock,
        device: Device, base: int, handle: str, held: int,
    ) -> None:  # fmt: skip
        """Internal: use ``on``. ``held``: as ``kvstore.memory.owner_futex.hold`` returned it."""
        super().__init__(path=path, fd=fd, mapped=mapped, superblock=superblock, locked=False)
        self._device = device
        self._base = base
        self._held = held
        self.ranges = self._ranges = _OwnRanges(DeviceRanges(device, base))
        self.location = DeviceLocation(device.name, self.shm_name, handle)

    @classmethod
    def on(
        cls,
        device_name: str,
        name: str,
        size: int,
        *,
        group: str = "",
        owner: layout.SegmentOwner | None = None,
        discard: bool = False,
    ) -> DeviceSegment:
        """A new segment of ``size`` bytes (rounded down to ``SIZE_STEP``) on a device.

        Args:
            device_name: ``cuda:0``.
            name: as ``OwnedSegment.create``; the node's name, too.
            group: as ``MemoryOptions.group``.
            owner: as ``OwnedSegment.create``.
            discard: also if a node of this name has left memory of the host.

        Raises:
            DeviceError: the device cannot be used, or has not as much free memory.
            LeftOverMemoryError: memory of the host would be lost; it is left unchanged.
            ConfigError, NodeNameTakenError, StartupError: as ``OwnedSegment.create``.
        """
        check_name(name)
        if size < SIZE_STEP:
            raise ConfigError(f"a segment must have at least 1 MiB, not {size} bytes", size=size)
        size -= size % SIZE_STEP
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
                held = owner_futex.acquire_owner_futex(fd, layout.ALIVE_OFFSET)
                whose = (owner or layout.SegmentOwner())._replace(on_device=True)
                superblock = write_superblock(mapped, name, size, whose)
                return cls(
                    path=path, fd=fd, mapped=mapped, superblock=superblock, device=device,
                    base=base, handle=handle, held=held,
                )  # fmt: skip
            except BaseException:
                device.driver.free(base)
                raise
        except BaseException:
            unlink_entry(path)
            os.close(fd)
            raise

    @property
    def fd(self) -> int:
        """-1: there is no file that has the bytes."""
        return -1

    def huge_bytes(self) -> int:
        return 0

    def keep_owner(self, owner: layout.SegmentOwner) -> None:
        super().keep_owner(owner._replace(on_device=True))

    def wipe(self, offsets: Sequence[int], epochs: Sequence[int], counters: Sequence[int]) -> int:
        most = self.size - layout.HEADER_BYTES
        rows = [
            (offset, (epoch, counter), memoryview(bytearray(layout.HEADER_BYTES)))
            for offset, epoch, counter in zip(offsets, epochs, counters, strict=True)
            if layout.SUPERBLOCK_BYTES <= offset <= most
        ]
        deadline = uptime() + STEP_S
        self._ranges.read([(offset, head) for offset, _, head in rows], deadline)
        wiped = []
        for offset, version, head in rows:
            found = layout.unpack(head, self.seed, offset)
            if found is not None and (found.epoch, found.counter) == version:
                wiped.append((offset, memoryview(layout.WIPE)))
        self._ranges.write(wiped, deadline)
        return len(wiped)

    def _zero(self, start: int, length: int) -> None:
        self._ranges.write([(start, _ZEROS[:length])], uptime() + STEP_S)

    def checksum(self, offset: int, length: int) -> int:
        """As ``OwnedSegment.checksum``: copies the bytes to the host, a part at a time."""
        made, stop = xxh3_64(), offset + length
        memory = memoryview(bytearray(min(SCAN_BYTES, length)))
        for start in range(offset, stop, SCAN_BYTES):
            part = memory[: min(SCAN_BYTES, stop - start)]
            self._ranges.read([(start, part)], uptime() + STEP_S)
            made.update(part)
        return made.intdigest()

    def scan(self) -> Iterator[tuple[int, layout.Header]]:
        """As ``OwnedSegment.scan``: copies all of the segment to the host, a part at a time."""
        memory = memoryview(bytearray(min(SCAN_BYTES, self.size)))
        for start in range(layout.SUPERBLOCK_BYTES, self.size, len(memory)):
            part = memory[: min(len(memory), self.size - start)]
            self._ranges.read([(start, part)], uptime() + STEP_S)
            yield from layout.scan_part(part, start, self.size, self.seed, self.header_filter)

    def close(self, *, unlink: bool = True) -> None:
        """As ``OwnedSegment.close``, but nothing is ever left for another process. Waits up to
        ``OPEN_S`` until no process has the memory open, as CUDA demands, and frees it."""
        del unlink
        with self._closing:
            if self._fd < 0:
                return
            self._words[layout.GENERATION_OFFSET // 8] = 0
            unlink_own(self.path)
            give_up = uptime() + OPEN_S
            while self._is_open_elsewhere() and uptime() < give_up:
                time.sleep(0.02)
            self._words.release()
            self._device.close()
            if not self._device.has_failed:
                self._device.driver.free(self._base)
            owner_futex.release_owner_futex(self._held)
            with contextlib.suppress(BufferError):
                self.memory.release()
                if self._mapped is not None:
                    self._mapped.close()
            self._mapped = None
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            os.close(self._fd)
            self._fd = -1

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
        self,
        move: Callable[[Sequence[RangeCopy], float, Callable[[], None]], None],
        ranges: Sequence[tuple[int, memoryview]],
        deadline: float,
    ) -> None:
        try:
            move([RangeCopy(*each) for each in ranges], deadline, lambda: None)
        except DeviceError as error:
            raise RuntimeError(f"the device has failed: {error}") from error
