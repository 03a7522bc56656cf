"""The contract of a medium: memory, or storage, in which a node keeps objects.

A medium has one superblock page and extents at offsets up to its size (``kvstore.memory.header``).
The node uses every medium through ``Medium``; the master places objects by the ``SegmentOffer``
that the medium makes. ``tests/conformance/test_media.py`` tests each implementation.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ClassVar, Final, NamedTuple, Protocol

from xxhash import xxh3_64

from kvstore.calls import NO_VERSION, SegmentOffer, Version
from kvstore.errors import ConfigError
from kvstore.limits import plausible_epoch_max
from kvstore.memory import header as layout
from kvstore.memory.allocation import SIZE_STEP
from kvstore.memory.private_file import PrivateFile, has_private
from kvstore.memory.shared_descriptors import SharedDescriptors
from kvstore.memory.shm_entries import (
    check_name,
    is_same_file,
    key_path,
    left_superblock,
    of_another_cluster,
    of_no_use,
    raw_owner,
    unlink_own,
)
from kvstore.runtime.clock import uptime

log = logging.getLogger("kvstore.node")

ZERO_STEP: Final = 16 << 20
"""Bytes that are zeroed at a time: 2 to 10 ms."""

SCAN_BYTES: Final = 32 << 20
"""Bytes that are copied to ordinary memory per step of a scan or a checksum."""

STEP_S: Final = 10.0
"""The longest that one step of a scan or a wipe may wait for the medium."""

_ZEROS: Final = memoryview(bytes(ZERO_STEP))


def is_plausible_epoch(epoch: int) -> bool:
    """Whether to accept memory that records this epoch. A higher epoch is damage."""
    return epoch <= plausible_epoch_max(time.time_ns() // 1_000_000)


class RangeAccess(Protocol):
    """Reads and writes, by offset, bytes of a segment outside of this process's address space."""

    def read(self, ranges: Sequence[tuple[int, memoryview]], deadline: float) -> None: ...
    def write(self, ranges: Sequence[tuple[int, memoryview]], deadline: float) -> None: ...


class MediumTraits(NamedTuple):
    """The properties of a medium on which its users depend."""

    name: str
    """For people: ``file``; ``cuda:0``, with a colon, of a device; empty: memory of the host."""
    is_opaque: bool
    """Clients cannot write to it as to an array: it takes puts, but no allocations."""
    survives_process: bool
    """``attach`` finds the objects after the process was killed."""
    is_cleared: bool
    """New memory holds zeros, not bytes of other processes."""


class Medium(ABC):
    """One owned segment: ``create`` (or ``on``) makes it, ``attach`` finds the one that a previous
    process left, ``close`` keeps or drops it.

    Threads: any thread may call any method; call ``close`` when no thread uses the memory.
    """

    traits: MediumTraits
    header_mac_key: bytes = b""
    """The key of the header MACs; empty: headers have none."""
    header_filter: layout.HeaderFilter | None = None
    """Selects the valid headers that ``scan`` yields; None: all."""
    header_signer: Callable[[int, layout.Header], bytes] | None = None
    """Computes the MAC of a header at an offset; None: headers have none."""
    attached = False
    """Whether the segment was attached, with objects of a previous process."""
    _is_on_device: ClassVar[bool] = False

    def __init__(
        self, *, path: str, fd: int, mapped: mmap.mmap, superblock: layout.Superblock,
        locked: bool = False,
    ) -> None:  # fmt: skip
        """Internal: takes over ``fd``, which has the lock of the entry, and ``mapped``."""
        self.path: Final = path
        self.shm_name: Final = os.path.basename(path)
        """Name of the entry; names of the node's other entries derive from it."""
        self.locked: Final = locked
        """Whether the memory is locked against swapping."""
        self.node: Final = superblock.node
        self.size: Final = superblock.size
        """Bytes, superblock included; a multiple of ``SIZE_STEP``."""
        self.uuid: Final = superblock.uuid
        self.seed: Final = superblock.seed
        self.token: Final = secrets.token_bytes(16)
        """The token that the data server demands from clients; never stored."""
        self.memory: Final = memoryview(mapped)
        """The segment, or its superblock alone if there are ``ranges``; writable. Valid until
        ``close``; slices keep the mapping alive."""
        self._mapped: mmap.mmap | None = mapped
        self._fd = fd
        self._words = self.memory[: layout.SUPERBLOCK_BYTES].cast("Q")
        at = layout.MARK_OFFSET // 8
        self._watermark = Version(self._words[at], self._words[at + 1])
        at = layout.EPOCH_OFFSET // 8
        epoch, check = self._words[at], self._words[at + 1]
        self._epoch = epoch if check == layout.epoch_checksum(epoch) else 0
        self._private: PrivateFile | None = None
        self._closing = threading.Lock()

    @property
    def ranges(self) -> RangeAccess | None:
        """Reads and writes the extents; None: they are in ``memory``."""
        return None

    @property
    def fd(self) -> int:
        """A file descriptor of ``memory`` for ``sendfile``; -1: there is none."""
        return -1

    @property
    def private_path(self) -> str:
        """Path of the private file."""
        return key_path(self.shm_name)

    def huge_bytes(self) -> int:
        return 0

    def share(self) -> SharedDescriptors:
        """Open file descriptors for other processes, which the caller owns. Raises OSError."""
        raise OSError(errno.ENOTSUP, "this medium cannot be mapped")

    def make_offer(self) -> SegmentOffer:
        """Describe the segment to a master; the node adds its addresses."""
        return SegmentOffer(
            size=self.size,
            uuid=self.uuid,
            shm_name="",
            address="",
            token=self.token,
            seed=self.seed,
            generation=self.generation,
            fresh=not self.attached,
            removal_watermark=self.removal_watermark,
            header_mac_key=self.header_mac_key,
            medium=self.traits.name,
            is_opaque=self.traits.is_opaque,
        )

    def has_entry(self) -> bool:
        """Whether the entry is still in its directory. Without it no process can map the memory, or
        attach it after the owner has ended."""
        return is_same_file(self._fd, self.path)

    @property
    def generation(self) -> int:
        """The number of mounts; 0 once closed. Reads one aligned word: never torn."""
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
        """The last watermark that was kept; ``NO_VERSION`` if its epoch is damaged. It is read from
        the superblock once: clients can write there."""
        return self._watermark if is_plausible_epoch(self._watermark.epoch) else NO_VERSION

    def keep_removal_watermark(self, watermark: Version) -> None:
        """Keep a watermark, unless a newer one is kept. If the process is killed half-way, the
        segment has an older one."""
        if watermark > self.removal_watermark:
            self._watermark = watermark
            if self._private is not None:
                self._private.change(lambda now: now._replace(removal_watermark=watermark))
            at = layout.MARK_OFFSET // 8
            self._words[at + 1] = 0
            self._words[at], self._words[at + 1] = watermark
            self._persist()

    @property
    def epoch(self) -> int:
        """The highest epoch that was kept; 0: none, or it is damaged."""
        return self._epoch if is_plausible_epoch(self._epoch) else 0

    def keep_epoch(self, epoch: int) -> None:
        """Keep the epoch of a joined master, unless a higher one is kept."""
        if epoch > self.epoch:
            self._epoch = epoch
            if self._private is not None:
                self._private.change(lambda now: now._replace(epoch=epoch))
            at = layout.EPOCH_OFFSET // 8
            self._words[at], self._words[at + 1] = epoch, layout.epoch_checksum(epoch)
            self._persist()

    def keep_private(self) -> PrivateFile:
        """Open the segment's private file. From now on it decides watermark and epoch, which are
        kept there, too.

        Raises:
            StartupError: as ``PrivateFile``.
        """
        self._private = private = PrivateFile(self.private_path, self.uuid)
        self._watermark, self._epoch = private.now.removal_watermark, private.now.epoch
        return private

    @property
    def owner(self) -> layout.SegmentOwner:
        start = layout.OWNER_OFFSET
        raw = bytes(self.memory[start : start + layout.OWNER_BYTES_MAX])
        return layout.unpack_owner(raw) or layout.SegmentOwner()

    def keep_owner(self, owner: layout.SegmentOwner) -> None:
        packed = layout.pack_owner(owner._replace(on_device=self._is_on_device))
        self.memory[layout.OWNER_OFFSET : layout.OWNER_OFFSET + len(packed)] = packed
        self._persist()

    def _persist(self) -> None:  # noqa: B027  # most media need nothing
        """Make what was written survive the host, if the medium does."""

    def _end_access(self) -> None:  # noqa: B027  # most media need nothing
        """Called once, after clients were stopped and before the superblock is unmapped."""

    @abstractmethod
    def wipe(self, offsets: Sequence[int], epochs: Sequence[int], counters: Sequence[int]) -> int:
        """Wipes the header at each offset if it has the given version; returns how many.

        Idempotent: a late request, after the extent was granted again, finds another version and
        wipes nothing. As long as the header has that version, the request has not been carried out,
        so the master has not granted the extent again: no client writes between the check and the
        wipe. Offsets outside the segment are ignored.
        """

    @abstractmethod
    def checksum(self, offset: int, length: int) -> int:
        """The checksum of bytes within the segment, as headers have it of their payload."""

    @abstractmethod
    def scan(self) -> Iterator[tuple[int, layout.Header]]:
        """As ``header.scan``. The segment must be fenced first."""

    @abstractmethod
    def _zero(self, start: int, length: int) -> None:
        """Overwrites bytes with zeros, without the GIL."""

    def sign(self, offset: int, header: layout.Header) -> bytes:
        """The header MAC at this offset; empty: the segment has no key."""
        return b"" if self.header_signer is None else self.header_signer(offset, header)

    def zero(
        self, ranges: Iterable[tuple[int, int]], is_over: Callable[[], bool] = lambda: False
    ) -> None:
        """Overwrites these (offset, length) with zeros; ignores ranges outside the segment. Returns
        early when ``is_over``, which it calls every ``ZERO_STEP``."""
        for offset, length in ranges:
            stop = offset + length
            if offset < layout.SUPERBLOCK_BYTES or stop > self.size:
                continue
            for start in range(offset, stop, ZERO_STEP):
                if is_over():
                    return
                self._zero(start, min(ZERO_STEP, stop - start))

    def close(self, *, unlink: bool = True) -> None:
        """Closes the segment. Idempotent.

        Clients that map it see generation 0 and stop. Memoryviews of it stay valid; the memory is
        returned to the system when the last of them, and the last client, has ended.

        Args:
            unlink: remove the entry, as always if the medium does not survive its process.
                Otherwise another process may ``attach`` it; until then no process writes to it.
        """
        with self._closing:
            if self._fd < 0:
                return
            if unlink or not self.traits.survives_process:
                self._words[layout.GENERATION_OFFSET // 8] = 0
                unlink_own(self.path)
                if self._private is not None:
                    self._private.remove()
            else:
                self.bump_generation()
                self._persist()
            self._end_access()
            self._words.release()
            _release(self.memory, self._mapped)
            self._mapped = None
            # The mapping holds a duplicate of the descriptor: closing would not release the lock.
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            os.close(self._fd)
            self._fd = -1


class RangeMedium(Medium):
    """A segment of which ``memory`` has the superblock alone; ``ranges`` reach the extents."""

    _extents: RangeAccess

    @property
    def ranges(self) -> RangeAccess:
        return self._extents

    def wipe(self, offsets: Sequence[int], epochs: Sequence[int], counters: Sequence[int]) -> int:
        last = self.size - layout.HEADER_BYTES
        rows = [
            (offset, (epoch, counter), memoryview(bytearray(layout.HEADER_BYTES)))
            for offset, epoch, counter in zip(offsets, epochs, counters, strict=True)
            if layout.SUPERBLOCK_BYTES <= offset <= last
        ]
        deadline = uptime() + STEP_S
        self._extents.read([(offset, head) for offset, _, head in rows], deadline)
        wiped = []
        for offset, version, head in rows:
            found = layout.unpack(head, self.seed, offset)
            if found is not None and (found.epoch, found.counter) == version:
                wiped.append((offset, memoryview(layout.WIPE)))
        self._extents.write(wiped, deadline)
        self._persist()
        return len(wiped)

    def _zero(self, start: int, length: int) -> None:
        self._extents.write([(start, _ZEROS[:length])], uptime() + STEP_S)

    def _parts(self, start: int, stop: int) -> Iterator[tuple[int, memoryview]]:
        """Copies a range to ordinary memory, ``SCAN_BYTES`` at a time, into one buffer."""
        memory = memoryview(bytearray(min(SCAN_BYTES, stop - start)))
        for at in range(start, stop, SCAN_BYTES):
            part = memory[: min(SCAN_BYTES, stop - at)]
            self._extents.read([(at, part)], uptime() + STEP_S)
            yield at, part

    def checksum(self, offset: int, length: int) -> int:
        hasher = xxh3_64()
        for _, part in self._parts(offset, offset + length):
            hasher.update(part)
        return hasher.intdigest()

    def scan(self) -> Iterator[tuple[int, layout.Header]]:
        for start, part in self._parts(layout.SUPERBLOCK_BYTES, self.size):
            yield from layout.scan_part(part, start, self.size, self.seed, self.header_filter)


def check_request(name: str, size: int) -> int:
    """Return the size, rounded down to ``SIZE_STEP``.

    Raises:
        ConfigError: a bad name, a size below ``SIZE_STEP``.
    """
    check_name(name)
    if size < SIZE_STEP:
        raise ConfigError(
            f"a segment must have at least 1 MiB, not {size} bytes",
            advice='Give the size with its unit, like "4GiB".',
            size=size,
        )
    return size - size % SIZE_STEP


def write_superblock(
    mapped: mmap.mmap, name: str, size: int, owner: layout.SegmentOwner
) -> layout.Superblock:
    """Writes the records that make memory the segment of this node; returns the superblock."""
    uuid, seed = secrets.token_bytes(16), secrets.randbits(64)
    superblock = layout.Superblock(uuid, name, size, seed, generation=1)
    packed_owner, packed = layout.pack_owner(owner), layout.pack_superblock(superblock)
    mapped[layout.OWNER_OFFSET : layout.OWNER_OFFSET + len(packed_owner)] = packed_owner
    mapped[: len(packed)] = packed
    return superblock


def leftover_superblock(
    fd: int, path: str, node: str, size: int, owner: layout.SegmentOwner | None
) -> layout.Superblock | None:
    """The superblock of memory that a previous process left; None: it has no objects.

    Args:
        owner: the cluster that attaches it; None: any.

    Raises:
        ClusterMismatchError: it belongs to another cluster.
        LeftOverMemoryError: it has another size, node or format, or a damaged superblock.
    """
    left = layout.unpack_owner(raw_owner(fd))
    if left is not None and left.on_device:  # its objects ended with the process
        return None
    if left is not None and owner is not None and (why := layout.owner_mismatch(left, owner)):
        raise of_another_cluster(path, left, why)
    volatile = left is not None and left.volatile
    superblock = left_superblock(fd, path, node, size, volatile=volatile)
    if superblock is not None and left is None:
        raise of_no_use(path, "its record of its cluster is damaged")
    return superblock


def should_discard(node: str, private_path: str, uuid: bytes, private: bool | None) -> bool:
    """Whether the process that left the memory differs in having an identity (``private``), as its
    private file shows. Logs it."""
    if private in (None, has_private(private_path, uuid)):
        return False
    kind = "no identity" if private else "an identity"
    log.warning(
        "left_over_memory_discarded node=%s reason=%r", node, f"the process that left it had {kind}"
    )
    return True


def discard_objects(mapped: mmap.mmap, superblock: layout.Superblock) -> layout.Superblock:
    """Writes another uuid and seed, under which no header is valid; returns the superblock."""
    uuid, seed = secrets.token_bytes(16), secrets.randbits(64)
    superblock = superblock._replace(uuid=uuid, seed=seed)
    packed = layout.pack_superblock(superblock)
    mapped[: len(packed)] = packed
    at = layout.MARK_OFFSET  # the epoch follows; both may be another cluster's
    mapped[at : at + 32] = bytes(32)
    return superblock


def _release(memory: memoryview, mapped: mmap.mmap | None) -> None:
    """Unmaps now, or leaves it to the last memoryview; then the caller must drop its reference."""
    with contextlib.suppress(BufferError):
        memory.release()
        if mapped is not None:
            mapped.close()
