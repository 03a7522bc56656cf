"""The owner's side of segments of POSIX shared memory; clients have a ``Mapping``."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, Protocol

from xxhash import xxh3_64_intdigest

from kvstore.calls import NO_VERSION, DeviceLocation, Version
from kvstore.errors import ConfigError
from kvstore.limits import plausible_epoch_max
from kvstore.memory import cgroup, pages
from kvstore.memory import header as layout
from kvstore.memory.allocation import (
    SIZE_STEP,
    MemoryOptions,
    check_room,
    directory_for,
    map_file,
    prefault_pages,
    size_granularity,
)
from kvstore.memory.private_file import PrivateFile, has_private
from kvstore.memory.shared_descriptors import SharedDescriptors, lend
from kvstore.memory.shm_entries import (
    SHM_PREFIX,
    check_name,
    directories,
    group_id,
    is_same_file,
    left_superblock,
    of_another_cluster,
    of_no_use,
    open_left,
    open_locked,
    raw_owner,
    reclaim_elsewhere,
    set_access,
    unlink_entry,
    unlink_own,
)
from kvstore.runtime.host import SHM_DIRECTORY

log = logging.getLogger("kvstore.node")

ZERO_STEP: Final = 16 << 20
"""Bytes that are zeroed at a time: 2 to 10 ms."""


def is_plausible_epoch(epoch: int) -> bool:
    """Whether to believe memory that records this epoch. A higher epoch is damage."""
    return epoch <= plausible_epoch_max(time.time_ns() // 1_000_000)


class RangeAccess(Protocol):
    """Reads and writes, by offset, bytes of a segment outside of this process's address space."""

    def read(self, ranges: Sequence[tuple[int, memoryview]], deadline: float) -> None: ...
    def write(self, ranges: Sequence[tuple[int, memoryview]], deadline: float) -> None: ...


class OwnedSegment:
    """A pool of memory, owned by this process.

    Life cycle: ``create``, then serve, then ``close``. After a crash the entry in ``/dev/shm``
    stays: ``attach`` makes it a segment again, ``create`` discards it.

    Threads: any thread may call any method; call ``close`` when no thread uses the memory.
    """

    ranges: RangeAccess | None = None
    """Reads and writes the extents, if they are not in ``memory``."""
    location: DeviceLocation | None = None
    """Where the extents are in the memory of a device; None: in ``memory``."""
    header_mac_key: bytes = b""
    """Of the stamps behind the headers, for the master alone; empty: there are none."""
    header_filter: layout.HeaderFilter | None = None
    """Which valid headers ``scan`` yields; None: all."""

    def __init__(
        self, *, path: str, fd: int, mapped: mmap.mmap, superblock: layout.Superblock, locked: bool
    ) -> None:
        """Internal: use ``create`` or ``attach``. Takes over ``fd`` and ``mapped``."""
        self.path: Final = path
        self.shm_name: Final = os.path.basename(path)
        """Entry in ``/dev/shm``, or in a hugetlbfs."""
        self.locked: Final = locked
        """Whether the memory is locked against swapping."""
        self.node: Final = superblock.node
        self.size: Final = superblock.size
        """Bytes, superblock included; a multiple of ``SIZE_STEP``."""
        self.uuid: Final = superblock.uuid
        self.seed: Final = superblock.seed
        self.token: Final = secrets.token_bytes(16)
        """The token that the data server demands from clients; not stored in the shared memory."""
        self.memory: Final = memoryview(mapped)
        """All of the segment, writable. Valid until ``close``; slices keep the mapping alive."""
        self.attached = False
        """Whether the segment was attached, with a previous process's objects in it."""
        self._mapped: mmap.mmap | None = mapped
        self._fd = fd
        self._words = self.memory[: layout.SUPERBLOCK_BYTES].cast("Q")
        at = layout.MARK_OFFSET // 8
        self._mark = Version(self._words[at], self._words[at + 1])
        at = layout.EPOCH_OFFSET // 8
        epoch, check = self._words[at], self._words[at + 1]
        self._epoch = epoch if check == layout.epoch_checksum(epoch) else 0
        self._private: PrivateFile | None = None
        self._closing = threading.Lock()

    @classmethod
    def create(
        cls,
        name: str,
        size: int,
        *,
        progress: Callable[[int, int], None] | None = None,
        options: MemoryOptions | None = None,
        owner: layout.SegmentOwner | None = None,
    ) -> OwnedSegment:
        """A new segment ``/dev/shm/kvstore.<name>``, reserved and pre-faulted.

        Args:
            name: of the node that owns the segment: letters, digits, ``.``, ``_`` and ``-``, at
                most 128.
            size: bytes, at least ``SIZE_STEP``; rounded down to its multiples, and to whole pages
                with reserved huge pages.
            progress: called in this thread with bytes done and bytes in all after each
                ``RESERVE_BYTES``. If it raises, the creation ends.
            options: how the memory is allocated.
            owner: the cluster that the segment belongs to, written in the superblock.

        Raises:
            ConfigError: a bad name, a size below ``SIZE_STEP``.
            NodeNameTakenError: a live process, or another user, owns a segment of this name.
            SharedMemoryTooSmallError, MemoryLimitError: there is no room, or a control group does
                not allow it; nothing is left behind.
            StartupError: ``/dev/shm`` does not exist or is not writable, or cannot provide what
                ``options`` require.
        """
        options = options or MemoryOptions()
        check_name(name)
        if size < SIZE_STEP:
            raise ConfigError(
                f"a segment must have at least 1 MiB, not {size} bytes",
                advice='Give the size with its unit, like "4GiB".',
                size=size,
            )
        group = group_id(options.group)
        shm_name = SHM_PREFIX + name
        directory = directory_for(options)
        reclaim_elsewhere(shm_name, directory)
        size -= size % size_granularity(directory)
        path = f"{directory}/{shm_name}"
        fd = open_locked(path)
        try:
            check_room(directory, size)
            os.ftruncate(fd, size)
            mapped = map_file(fd, directory, size)
            try:
                locked = prefault_pages(fd, mapped, directory, options, progress)
                set_access(fd, path, group)
                superblock = write_superblock(mapped, name, size, owner or layout.SegmentOwner())
                return cls(path=path, fd=fd, mapped=mapped, superblock=superblock, locked=locked)
            except BaseException:
                with contextlib.suppress(BufferError):
                    mapped.close()
                raise
        except BaseException:
            unlink_entry(path)
            os.close(fd)
            raise

    @classmethod
    def attach(
        cls,
        name: str,
        size: int,
        *,
        progress: Callable[[int, int], None] | None = None,
        options: MemoryOptions | None = None,
        owner: layout.SegmentOwner | None = None,
        adopt: bool = False,
        discard: bool = False,
        private: bool | None = None,
    ) -> OwnedSegment | None:
        """The segment ``/dev/shm/kvstore.<name>`` that a previous process left, with its objects;
        None: there is none. Arguments as ``create``.

        Raises the segment's generation, so that earlier writers cannot write to it any more.

        Args:
            owner: the cluster that asks; None: the segment's own, whichever it is.
            adopt: take the segment even if it belongs to another cluster.
            discard: take the segment without its objects: it gets another uuid and seed, under
                which no header in it is valid. Clients that have it mapped keep the memory, so
                there may be no room for new memory instead.
            private: whether the process that left the memory had an identity, as its private file
                shows. Memory of the other kind is discarded. None: either kind is taken.

        Raises:
            ClusterMismatchError: the segment belongs to another cluster; it is left unchanged.
            LeftOverMemoryError: the segment has another size, node, format or kind of pages, or a
                damaged superblock; it is left unchanged.
            NodeNameTakenError: a live process, or another user, owns it.
            ConfigError, StartupError: as ``create``.
        """
        options = options or MemoryOptions()
        check_name(name)
        group = group_id(options.group)
        wanted = directory_for(options)
        for directory in sorted(directories(), key=lambda each: each != wanted):
            path = f"{directory}/{SHM_PREFIX}{name}"
            fd = open_left(path)
            if fd < 0:
                continue
            try:
                left = layout.unpack_owner(raw_owner(fd))
                if left is not None and left.on_device:  # nothing is left: ``create`` removes it
                    os.close(fd)
                    continue
                if left is not None and owner is not None and not (adopt or discard):
                    why = layout.owner_mismatch(left, owner)
                    if why:
                        raise of_another_cluster(path, left, why)
                superblock = left_superblock(
                    fd,
                    path,
                    name,
                    size - size % size_granularity(wanted),
                    volatile=left is not None and left.volatile,
                )
                if superblock is None:
                    os.close(fd)
                    continue
                if left is None:
                    raise of_no_use(path, "its record of its cluster is damaged")
                if directory != wanted:
                    raise of_no_use(path, f"memory of {wanted} was asked for")
                os.ftruncate(fd, superblock.size)
                if directory == SHM_DIRECTORY:
                    cgroup.check(max(0, size - os.fstat(fd).st_blocks * 512))
                mapped = map_file(fd, directory, superblock.size)
                locked = prefault_pages(fd, mapped, directory, options, progress, is_left=True)
                if options.huge_pages == "transparent" and not pages.huge_bytes(mapped):
                    raise of_no_use(path, "it has small pages")
                set_access(fd, path, group)
                if private not in (None, has_private(os.path.basename(path), superblock.uuid)):
                    kind = "no identity" if private else "an identity"
                    log.warning(
                        "left_over_memory_discarded node=%s reason=%r", name,
                        f"the process that left it had {kind}",
                    )  # fmt: skip
                    discard = True
                if discard:
                    uuid, seed = secrets.token_bytes(16), secrets.randbits(64)
                    superblock = superblock._replace(uuid=uuid, seed=seed)
                    packed = layout.pack_superblock(superblock)
                    mapped[: len(packed)] = packed
                    at = layout.MARK_OFFSET  # the epoch follows; both may be another cluster's
                    mapped[at : at + 32] = bytes(32)
                segment = cls(path=path, fd=fd, mapped=mapped, superblock=superblock, locked=locked)
            except BaseException:
                os.close(fd)
                raise
            segment.attached = True
            segment.bump_generation()
            return segment
        return None

    @property
    def fd(self) -> int:
        """The descriptor of the shared memory, for ``sendfile``; the segment owns it. -1 once
        closed, and for reserved huge pages, which ``sendfile`` refuses."""
        return self._fd if self.path.startswith(f"{SHM_DIRECTORY}/") else -1

    def share(self) -> SharedDescriptors:
        """Descriptors for other processes, which the caller owns. Raises OSError."""
        return lend(self._fd)

    def has_shm_entry(self) -> bool:
        """Whether the entry is still in its directory: anybody with the rights may have removed it.
        Without it no process can map the memory any more, or find it when the owner has ended."""
        return is_same_file(self._fd, self.path)

    def huge_bytes(self) -> int:
        """How many bytes huge pages hold; 0 once closed. Slow: ``pages.huge_bytes``."""
        return 0 if self._mapped is None else pages.huge_bytes(self._mapped)

    @property
    def generation(self) -> int:
        """Counts mounts from 1; 0 once closed. A read of one aligned word: never torn."""
        try:
            return self._words[layout.GENERATION_OFFSET // 8]
        except ValueError:  # the memory was released
            return 0

    def bump_generation(self) -> int:
        """Sets and returns a new generation: connections and writers of older ones stop."""
        generation = self.generation + 1
        self._words[layout.GENERATION_OFFSET // 8] = generation
        return generation

    @property
    def removal_watermark(self) -> Version:
        """The last mark that was kept; ``NO_VERSION`` if its epoch is damaged. Read from the
        superblock once: clients can write there."""
        return self._mark if is_plausible_epoch(self._mark.epoch) else NO_VERSION

    def keep_removal_watermark(self, mark: Version) -> None:
        """Keeps ``removal_watermark``, unless a newer one is kept. If the process is killed
        half-way, the segment has an older mark."""
        if mark > self.removal_watermark:
            self._mark = mark
            if self._private is not None:
                self._private.change(lambda now: now._replace(removal_watermark=mark))
            at = layout.MARK_OFFSET // 8
            self._words[at + 1] = 0
            self._words[at], self._words[at + 1] = mark

    @property
    def epoch(self) -> int:
        """The highest epoch that was kept; 0: none, or it is damaged. As ``removal_watermark``."""
        return self._epoch if is_plausible_epoch(self._epoch) else 0

    def keep_epoch(self, epoch: int) -> None:
        """Keeps the epoch of a joined master, unless a higher one is kept."""
        if epoch > self.epoch:
            self._epoch = epoch
            if self._private is not None:
                self._private.change(lambda now: now._replace(epoch=epoch))
            at = layout.EPOCH_OFFSET // 8
            self._words[at], self._words[at + 1] = epoch, layout.epoch_checksum(epoch)

    def keep_private(self) -> PrivateFile:
        """The segment's private file. From now on mark and epoch are what it says, and are kept
        there, too.

        Raises:
            StartupError: as ``PrivateFile``.
        """
        self._private = private = PrivateFile(self.shm_name, self.uuid)
        self._mark, self._epoch = private.now.removal_watermark, private.now.epoch
        return private

    @property
    def owner(self) -> layout.SegmentOwner:
        start = layout.OWNER_OFFSET
        raw = bytes(self.memory[start : start + layout.OWNER_BYTES_MAX])
        return layout.unpack_owner(raw) or layout.SegmentOwner()

    def keep_owner(self, owner: layout.SegmentOwner) -> None:
        packed = layout.pack_owner(owner)
        self.memory[layout.OWNER_OFFSET : layout.OWNER_OFFSET + len(packed)] = packed

    def wipe(self, offsets: Sequence[int], epochs: Sequence[int], counters: Sequence[int]) -> int:
        """Wipes the header at each offset if it has the given version; returns how many.

        Idempotent: a late order, after the extent was used again, finds another version and wipes
        nothing. As long as the header has that version, the order has not been carried out, so the
        master has not granted the extent again: no client writes between the check and the wipe.
        Offsets outside the segment are ignored.
        """
        wiped = 0
        for offset, epoch, counter in zip(offsets, epochs, counters, strict=True):
            if not layout.SUPERBLOCK_BYTES <= offset <= self.size - layout.HEADER_BYTES:
                continue
            place = self.memory[offset : offset + layout.HEADER_BYTES]
            found = layout.unpack(place, self.seed, offset)
            if found is not None and found.epoch == epoch and found.counter == counter:
                place[: len(layout.WIPE)] = layout.WIPE
                wiped += 1
        return wiped

    def zero(
        self, ranges: Iterable[tuple[int, int]], is_over: Callable[[], bool] = lambda: False
    ) -> None:
        """Overwrites these (offset, length) with zeros, without the GIL. Ranges that are not within
        the segment are ignored. Ends early when ``is_over`` says so, which is asked every
        ``ZERO_STEP``."""
        for offset, length in ranges:
            stop = offset + length
            if offset < layout.SUPERBLOCK_BYTES or stop > self.size:
                continue
            for start in range(offset, stop, ZERO_STEP):
                if is_over():
                    return
                self._zero(start, min(ZERO_STEP, stop - start))

    def _zero(self, start: int, length: int) -> None:
        pages.zero(self.memory, start, length)

    def checksum(self, offset: int, length: int) -> int:
        """Of bytes within the segment, as headers have it of their payload."""
        return xxh3_64_intdigest(self.memory[offset : offset + length])

    def scan(self) -> Iterator[tuple[int, layout.Header]]:
        """As ``header.scan``. The segment must be fenced first."""
        return layout.scan(self.memory, self.seed, self.header_filter)

    def close(self, *, unlink: bool = True) -> None:
        """Gives the segment up. Idempotent.

        Clients that map it see generation 0 and stop. Memoryviews that were handed out stay valid;
        the memory is returned to the system when the last of them, and the last client, is gone.

        Args:
            unlink: remove the entry in ``/dev/shm``. Otherwise another process may ``attach`` it;
                until then no process writes to it.
        """
        with self._closing:
            if self._fd < 0:
                return
            if unlink:
                self._words[layout.GENERATION_OFFSET // 8] = 0
                unlink_own(self.path)
                if self._private is not None:
                    self._private.remove()
            else:
                self.bump_generation()
            self._words.release()
            _release(self.memory, self._mapped)
            self._mapped = None
            # The mapping holds a duplicate of the descriptor: closing would not release the lock.
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            os.close(self._fd)
            self._fd = -1


def write_superblock(
    mapped: mmap.mmap, name: str, size: int, owner: layout.SegmentOwner
) -> layout.Superblock:
    """Writes what makes memory the segment of this node, and returns it."""
    uuid, seed = secrets.token_bytes(16), secrets.randbits(64)
    superblock = layout.Superblock(uuid, name, size, seed, generation=1)
    packed_owner, packed = layout.pack_owner(owner), layout.pack_superblock(superblock)
    mapped[layout.OWNER_OFFSET : layout.OWNER_OFFSET + len(packed_owner)] = packed_owner
    mapped[: len(packed)] = packed
    return superblock


def _release(memory: memoryview, mapped: mmap.mmap | None) -> None:
    """Unmaps now, or leaves it to the last memoryview; then the caller must drop its reference."""
    with contextlib.suppress(BufferError):
        memory.release()
        if mapped is not None:
            mapped.close()
