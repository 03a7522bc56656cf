"""The contract of a medium: memory, or storage, in which a node keeps objects.

A medium has one superblock page and extents at offsets up to its size (``kvstore.memory.header``).
The node uses every medium through ``Medium``; the master places objects by the ``SegmentOffer``
that the medium makes. ``tests/conformance/test_media.py`` tests each implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from kvstore.calls import SegmentOffer, Version
from kvstore.memory.header import EXTENT_ALIGN, Header, HeaderFilter, SegmentOwner
from kvstore.memory.private_file import PrivateFile
from kvstore.memory.shared_descriptors import SharedDescriptors


class RangeAccess(Protocol):
    """Reads and writes, by offset, bytes of a segment outside of this process's address space."""

    def read(self, ranges: Sequence[tuple[int, memoryview]], deadline: float) -> None: ...
    def write(self, ranges: Sequence[tuple[int, memoryview]], deadline: float) -> None: ...


class MediumTraits(NamedTuple):
    """The properties of a medium that its users may depend on."""

    name: str
    """For people: ``file``; ``cuda:0``, with a colon, of a device; empty: memory of the host."""
    is_opaque: bool
    """Clients cannot write to it as to an array: it takes puts, but no allocations."""
    survives_process: bool
    """``attach`` finds the objects after the process was killed."""
    survives_host: bool
    """``attach`` finds the objects after the host was restarted."""
    is_cleared: bool
    """New memory holds zeros, not bytes of other processes."""
    alignment: int = EXTENT_ALIGN
    """Extents start and end at multiples of this."""
    block_bytes: int = 1 << 20
    """The size from which one read or write of the medium is efficient."""
    read_us: int = 0
    """The order of magnitude of the latency of a small read on the host."""


class Medium(Protocol):
    """One owned segment. A class method ``create`` (or ``on``) makes one, ``attach`` finds the one
    that a previous process left, ``close`` keeps or drops it.

    Threads: any thread may call any method; call ``close`` when no thread uses the memory.
    """

    header_mac_key: bytes
    """The key of the header MACs; empty: headers have none."""
    header_filter: HeaderFilter | None
    """Selects the valid headers that ``scan`` yields; None: all."""
    attached: bool
    """Whether the segment was attached, with objects of a previous process."""

    @property
    def traits(self) -> MediumTraits: ...
    @property
    def ranges(self) -> RangeAccess | None:
        """Reads and writes the extents; None: they are in ``memory``."""
        ...

    @property
    def node(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def shm_name(self) -> str:
        """Name of the entry; names of the node's other entries derive from it."""
        ...

    @property
    def private_path(self) -> str:
        """Path of the private file (``keep_private``)."""
        ...

    @property
    def size(self) -> int: ...
    @property
    def uuid(self) -> bytes: ...
    @property
    def seed(self) -> int: ...
    @property
    def token(self) -> bytes:
        """The token that the data server demands from clients; never stored."""
        ...

    @property
    def memory(self) -> memoryview:
        """The segment, or its superblock alone if there are ``ranges``."""
        ...

    @property
    def fd(self) -> int:
        """A file descriptor for ``sendfile`` of ``memory``; -1: there is none."""
        ...

    @property
    def locked(self) -> bool: ...
    def huge_bytes(self) -> int: ...
    def has_entry(self) -> bool:
        """Whether the entry is still in its directory: another program may have removed it."""
        ...

    def share(self) -> SharedDescriptors:
        """Opens file descriptors for other processes, which the caller owns.

        Raises:
            OSError: there are none; other processes cannot map this medium.
        """
        ...

    def make_offer(self) -> SegmentOffer:
        """Describes the segment to a master; the node adds its addresses."""
        ...

    @property
    def generation(self) -> int:
        """Counts mounts from 1; 0 once closed."""
        ...

    def bump_generation(self) -> int:
        """Sets and returns a new generation: connections and writers of older ones stop."""
        ...

    @property
    def removal_watermark(self) -> Version: ...
    def keep_removal_watermark(self, watermark: Version) -> None: ...
    @property
    def epoch(self) -> int: ...
    def keep_epoch(self, epoch: int) -> None: ...
    @property
    def owner(self) -> SegmentOwner: ...
    def keep_owner(self, owner: SegmentOwner) -> None: ...
    def keep_private(self) -> PrivateFile: ...

    def wipe(self, offsets: Sequence[int], epochs: Sequence[int], counters: Sequence[int]) -> int:
        """Wipes the header at each offset if it has the given version; returns how many.

        Idempotent: a late request, after the extent was granted again, finds another version and
        wipes nothing. As long as the header has that version, the request has not been carried out,
        so the master has not granted the extent again: no client writes between the check and the
        wipe. Offsets outside the segment are ignored.
        """
        ...

    def zero(
        self, ranges: Iterable[tuple[int, int]], is_over: Callable[[], bool] = lambda: False
    ) -> None:
        """Overwrites these (offset, length) with zeros, without the GIL; ignores ranges outside the
        segment. Returns early when ``is_over``, which it calls every ``ZERO_STEP``."""
        ...

    def checksum(self, offset: int, length: int) -> int:
        """The checksum of bytes within the segment, as headers have it of their payload."""
        ...

    def scan(self) -> Iterator[tuple[int, Header]]:
        """As ``header.scan``. The segment must be fenced first."""
        ...

    def close(self, *, unlink: bool = True) -> None:
        """Closes the segment, and drops it (``unlink``) or keeps it for ``attach``. Idempotent."""
        ...
