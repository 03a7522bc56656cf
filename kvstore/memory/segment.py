"""The owner's side of segments of POSIX shared memory; clients have a ``Mapping``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from xxhash import xxh3_64_intdigest

from kvstore.calls import SegmentOffer
from kvstore.memory import cgroup, pages
from kvstore.memory import header as layout
from kvstore.memory.allocation import (
    MemoryOptions,
    check_room,
    directory_for,
    map_file,
    prefault_pages,
    size_granularity,
)
from kvstore.memory.medium import (
    Medium,
    MediumTraits,
    check_request,
    discard_objects,
    leftover_superblock,
    should_discard,
    write_superblock,
)
from kvstore.memory.shared_descriptors import SharedDescriptors
from kvstore.memory.shm_entries import (
    SHM_PREFIX,
    check_name,
    directories,
    group_id,
    key_path,
    of_no_use,
    open_left,
    open_locked,
    reclaim_elsewhere,
    set_access,
    unlink_entry,
)
from kvstore.runtime.host import SHM_DIRECTORY

HOST_MEMORY: Final = MediumTraits(name="", is_opaque=False, survives_process=True, is_cleared=True)


class OwnedSegment(Medium):
    """A pool of shared memory, owned by this process: the medium of the host's memory.

    Life cycle: ``create``, then serve, then ``close``. After a crash the entry in ``/dev/shm``, or
    in a hugetlbfs, stays: ``attach`` makes it a segment again, ``create`` discards it.
    """

    traits = HOST_MEMORY

    @classmethod
    def create(
        cls, name: str, size: int, *, progress: Callable[[int, int], None] | None = None,
        options: MemoryOptions | None = None, owner: layout.SegmentOwner | None = None,
    ) -> OwnedSegment:  # fmt: skip
        """Creates the segment ``/dev/shm/kvstore.<name>``, reserved and pre-faulted.

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
            SharedMemoryTooSmallError, MemoryLimitError: there is no space, or a control group does
                not allow it; no entry remains.
            StartupError: ``/dev/shm`` does not exist or is not writable, or cannot provide what
                ``options`` require.
        """
        options = options or MemoryOptions()
        check_request(name, size)
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
        cls, name: str, size: int, *, progress: Callable[[int, int], None] | None = None,
        options: MemoryOptions | None = None, owner: layout.SegmentOwner | None = None,
        adopt: bool = False, discard: bool = False, private: bool | None = None,
    ) -> OwnedSegment | None:  # fmt: skip
        """Attaches the segment ``/dev/shm/kvstore.<name>`` of a previous process, with its objects,
        under a higher generation, which stops earlier writers. Arguments as ``create``.

        Returns:
            None if there is no such segment.

        Args:
            owner: the cluster of this process; None: any.
            adopt: accept a segment of another cluster.
            discard: drop the objects: the segment gets another uuid and seed, under which no header
                is valid. Clients that map it keep the memory, so new memory might not fit.
            private: whether the previous process had an identity, as its private file shows. Memory
                of the other kind is discarded. None: either kind is accepted.

        Raises:
            ClusterMismatchError: the segment belongs to another cluster; it remains unchanged.
            LeftOverMemoryError: the segment has another size, node, format or kind of pages, or a
                damaged superblock; it remains unchanged.
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
                granularity = size_granularity(wanted)
                superblock = leftover_superblock(
                    fd, path, name, size - size % granularity,
                    None if adopt or discard else owner,
                )  # fmt: skip
                if superblock is None:
                    os.close(fd)
                    continue
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
                if should_discard(name, key_path(path), superblock.uuid, private) or discard:
                    superblock = discard_objects(mapped, superblock)
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
        """The file descriptor for ``sendfile``, which the segment owns; -1 once closed, and for
        reserved huge pages, which ``sendfile`` refuses."""
        return self._fd if self.path.startswith(f"{SHM_DIRECTORY}/") else -1

    def share(self) -> SharedDescriptors:
        path = f"/proc/self/fd/{self._fd}"  # lock and offset are not shared
        to_read = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return SharedDescriptors(to_read, os.open(path, os.O_RDWR | os.O_CLOEXEC))
        except BaseException:
            os.close(to_read)
            raise

    def huge_bytes(self) -> int:
        """The bytes in huge pages; 0 once closed. Slow: ``pages.huge_bytes``."""
        return 0 if self._mapped is None else pages.huge_bytes(self._mapped)

    def make_offer(self) -> SegmentOffer:
        return super().make_offer()._replace(shm_name=self.shm_name)

    def wipe(self, offsets: Sequence[int], epochs: Sequence[int], counters: Sequence[int]) -> int:
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

    def _zero(self, start: int, length: int) -> None:
        pages.zero(self.memory, start, length)

    def checksum(self, offset: int, length: int) -> int:
        return xxh3_64_intdigest(self.memory[offset : offset + length])

    def scan(self) -> Iterator[tuple[int, layout.Header]]:
        return layout.scan(self.memory, self.seed, self.header_filter)
