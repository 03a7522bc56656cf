"""The steps of the hot path, compiled or in Python: their arguments and their results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol, TypeVar

from kvstore.limits import Key

AnyRecord = TypeVar("AnyRecord")

CLOCK: Final = 7
"""Linux's number of the clock that ``kvstore.clocks.uptime`` reads."""

BatchEnd = int
"""Why a batch was not carried out as a whole: ``GONE``, ``LATE`` or ``OUTSIDE``."""

GONE: Final = 1
"""The segment has another generation than the batch."""
LATE: Final = 2
"""The deadline has passed."""
OUTSIDE: Final = 3
"""A row is not within the segment; nothing was moved."""

STALE: Final = 1
"""The outcome of a row: no valid header of that object is at its offset."""
CORRUPT: Final = 2
"""The outcome of a row: the payload does not match the checksum in its header."""

ANSWERED: Final = 0
TIMED_OUT: Final = 1
NOT_SENT: Final = 2
BROKEN: Final = 3
ENDED: Final = 4
GARBLED: Final = 5
UNASKED: Final = 6
"""The socket had received something before the request was sent; nothing was sent."""

REFUSED: Final = 8
"""The other end refused, with a ``Status``; -1: it speaks another protocol."""

CAPABILITY_BYTES: Final = 32
"""Expiry, order and MAC of a capability (``kvstore.network.tcp_protocol``)."""

STAMP_BYTES: Final = 16
"""A MAC behind a header (``kvstore.memory.header``)."""

ORDERS_BYTES: Final = 8 << 18
"""Of a table of orders: ``Steps.call_back``. At 5,000 wiped extents a second a put of 10 ms meets
the order of another extent once in 5,000 times, and then its client asks again."""

ASKED_BYTES: Final = 8 * (1 + 4096)
"""The number of extents that a connection is writing, and the offset of each."""

Buffers = list[memoryview]
ReadRow = tuple[int, int, int, int, bytes, Buffers | None, bytes]
"""Offset of the extent, payload bytes, epoch and counter of the version, key, and where the payload
goes (its sizes add up to the payload's); None: it stays where it is, in mapped memory. Last the
capability for the extent; empty: the client has none."""

WriteRow = tuple[int, int, int, int, bytes, Buffers | None, bytes, bytes, bytes]
"""As ``ReadRow``, with the buffers that the payload comes from (None: it is in its place already);
then the parent's key (empty: a root), the descriptor, and the capability, with the ``STAMP_BYTES``
of the header behind it if the master has made a stamp."""


class Wire(Protocol):
    """A ``socket.socket`` of the lane, or a ``kvstore.network.stream.Stream`` of tcp. The master's
    state imports this module, which therefore knows neither."""

    def fileno(self) -> int: ...


class Steps(Protocol):
    """See ``fast.c`` and ``slow``. All functions may be called by any thread."""

    def read_objects(
        self,
        memory: memoryview,
        generation: int,
        seed: int,
        namespace: str,
        rows: list[ReadRow],
        verify: bool,
        deadline: float,
        threads: int,
        /,
    ) -> list[bytes | int] | BatchEnd:
        """Check the header of each row where it stands, and copy its payload.

        Args:
            memory: the whole segment, mapped.
            generation: the one that the segment must have; checked before each 256 KiB.
            seed: of the segment's header checksums.
            verify: hash the payload as it is copied, or where it stays, and compare.
            deadline: a ``uptime()`` value, checked as often.
            threads: at most so many threads copy, each its own rows.

        Returns:
            Per row its descriptor, or ``STALE`` or ``CORRUPT``. Or how the whole batch ended; the
            contents of the buffers are undefined then.
        """
        ...

    def write_objects(
        self,
        memory: memoryview,
        generation: int,
        seed: int,
        namespace: str,
        rows: list[WriteRow],
        deadline: float,
        threads: int,
        /,
    ) -> BatchEnd:
        """Wipe each row's header position, copy its payload, then write its header. 0: all of it
        is done; otherwise some rows may be."""
        ...

    def pack_keys(self, keys: Sequence[object], /) -> tuple[bytes, int] | None:
        """All keys in one piece, and their length; None unless they are ``bytes`` of one length
        from 1 to 256, and at least one."""
        ...

    def get_many(
        self, shards: list[dict[Key, AnyRecord]], mask: int, data: bytes, stride: int, /
    ) -> list[AnyRecord | None]:
        """The record of each key of ``data``, looked up in ``shards[hash(key) & mask]``."""
        ...

    def overlap(self, buffers: list[memoryview], /) -> tuple[int, int] | None:
        """The indices of two buffers that share a byte; None: no two do."""
        ...

    def exchange(
        self,
        sock: Wire,
        request: bytes,
        call_id: int,
        spin_s: float,
        deadline: float,
        length_max: int,
        /,
    ) -> tuple[int, int, int, bytes | None]:
        """Send one frame on a lane's socket (non-blocking) and receive the answer to it.

        Args:
            spin_s: how long to poll for the answer before sleeping; ``kvstore.wire.spinning``
                has the outcomes.
            deadline: a ``uptime()`` value.
            length_max: of the answer's frame.

        Returns:
            ``ANSWERED``, the outcome of polling, the frame's kind and its payload. Or what
            went wrong, an errno (of ``NOT_SENT`` and ``BROKEN``), 0 and None; of ``GARBLED`` with
            an answer to another call its kind and payload.
        """
        ...

    def tcp_read(
        self,
        stream: Wire,
        size: int,
        seed: int,
        namespace: str,
        rows: list[ReadRow],
        verify: bool,
        deadline: float,
        stall_s: float,
        spin_s: float,
        sealed: bool,
        /,
    ) -> tuple[int, int, int, list[bytes | int] | None]:
        """``read_objects`` over a greeted connection to a data server; one request.

        Args:
            stream: its time-outs are changed.
            size: of the segment, bytes.
            rows: at most ``RANGES_MAX``; none without buffers.
            stall_s: also ``TIMED_OUT`` when no byte moved in either direction for so long.
            sealed: whether the connection is one with capabilities, so that the rows' are shown.

        Returns:
            ``ANSWERED``, the outcome of polling, 1, and the outcomes. Or what went wrong, the
            errno or ``Status``, whether no byte can land in the segment any more, and None.
        """
        ...

    def tcp_write(
        self,
        stream: Wire,
        size: int,
        seed: int,
        namespace: str,
        rows: list[WriteRow],
        deadline: float,
        stall_s: float,
        spin_s: float,
        sealed: bool,
        /,
    ) -> tuple[int, int, int, None]:
        """``write_objects`` over such a connection; at most a third of ``RANGES_MAX`` rows."""
        ...

    def serve(
        self,
        stream: Wire,
        file: int,
        memory: memoryview,
        generation: int,
        cut: bytearray,
        counts: bytearray,
        stall_s: float,
        idle_s: float,
        key: bytes,
        holder: int,
        orders: memoryview,
        asked: memoryview,
        /,
    ) -> tuple[int, int]:
        """Serve the requests of a greeted connection until it ends.

        Args:
            file: descriptor of the segment.
            cut: once its first byte is not 0, the connection ends when nothing is being received.
            counts: four numbers of 8 bytes, added to: reads, their bytes, writes, their bytes.
            stall_s: how long the peer may take over one piece.
            idle_s: how long a connection may wait for its next request.
            key: of the segment, with which capabilities are checked; empty: the connection is one
                without them.
            holder: of the capabilities.
            orders: as of ``call_back``; ``key`` empty: not used.
            asked: ``ASKED_BYTES``, in which others read what is being written; not used as above.

        Returns:
            How it ended, and the errno or, of ``REFUSED``, the ``Status`` to be told.
        """
        ...

    def siphash(self, key: bytes, data: bytes, /) -> bytes:
        """SipHash-2-4 of 128 bits. Raises ValueError: the key has not 16 bytes."""
        ...

    def call_back(self, orders: memoryview, offsets: Sequence[int], order: int, /) -> None:
        """Ends the right to write of all capabilities for these extents that are older than the
        order. Requests that have begun go on: ``asked`` of ``serve`` names them.

        Args:
            orders: ``ORDERS_BYTES``, zeros at first: the last order of each extent, by a hash of
                its offset.

        Raises:
            ValueError: ``orders`` has another size.
        """
        ...

    def seal(
        self,
        mounts: dict[int, bytes],
        segments: Sequence[int],
        offsets: Sequence[int],
        sizes: Sequence[int],
        holder: int,
        order: int,
        rights: int,
        /,
    ) -> bytes:
        """Makes the capabilities of a batch, ``CAPABILITY_BYTES`` for each extent.

        Args:
            mounts: by segment its key (16 bytes), generation and the expiry in ms of its node's
                clock (8 bytes each, little-endian). The capabilities of other segments are zeros,
                which no node accepts.
            segments, offsets, sizes: of each extent; its payload bytes.
            order: the number of the last order to wipe.
            rights: one bit for each ``Op``.

        Raises:
            ValueError: columns of different length, or a mount that has not 32 bytes.
        """
        ...

    def stamp(
        self,
        mounts: dict[int, bytes],
        segments: Sequence[int],
        offsets: Sequence[int],
        sizes: Sequence[int],
        epochs: Sequence[int],
        counters: Sequence[int],
        namespaces: Sequence[str],
        keys: Sequence[Key],
        /,
    ) -> bytes:
        """Makes the stamps of headers (``kvstore.memory.header``), ``STAMP_BYTES`` for each.

        Args:
            mounts: by segment its stamp key, 16 bytes. The stamps of other segments are zeros.
            segments, offsets, sizes: of each extent; its payload bytes.
            epochs, counters, namespaces, keys: of the object that may be there.

        Raises:
            ValueError: columns of different length, a key of another length, or a name that is too
                long.
        """
        ...

    def xxh3_64(self, data: bytes | memoryview, seed: int = 0, /) -> int:
        """As ``xxhash.xxh3_64_intdigest``."""
        ...
