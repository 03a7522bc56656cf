"""The steps of the hot path in Python, for where ``fast`` was not built. Any thread may call them.

They are written to be short: no polling, no threads, one system call per piece. Their results, and
what they leave in memory or on a socket, are those of the compiled steps.
"""

from __future__ import annotations

import errno
import hmac
import math
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import xxhash

from kvstore.errors import DeadlineExceededError
from kvstore.limits import KEY_BYTES_MAX, NAMESPACE_BYTES_MAX, Key
from kvstore.memory.header import (
    EXTENT_ALIGN,
    GENERATION_OFFSET,
    HEADER_BYTES,
    SUPERBLOCK_BYTES,
    WIPE,
)
from kvstore.memory.medium import RangeAccess
from kvstore.memory.process_memory import address_of
from kvstore.native import interface
from kvstore.native.interface import AnyRecord, BatchEnd, ReadRow, WriteRow
from kvstore.native.object_headers import header_of, write_header
from kvstore.native.siphash import siphash as siphash  # noqa: PLC0414  # it is a step
from kvstore.runtime import tcp_protocol as protocol
from kvstore.runtime.clock import uptime, uptime_ms
from kvstore.runtime.stream import ConnectionEndedError, StalledError, Stream
from kvstore.runtime.tcp_protocol import (
    NO_EXTENT,
    Extent,
    Op,
    RefusedTransferError,
    TransferStatus,
)
from kvstore.security.tls_stream import NO_TLS, NeedsTlsError

PIECE_BYTES: Final = 64 << 10
"""Copied, hashed, sent or received in one go, after a look at the clock and the generation. xxhash
gives the GIL back above 100 KB, and taking it again from a busy thread may cost 5 ms."""

SERVED_BYTES: Final = 1 << 20
SERVED_PARTS: Final = 512
"""The most bytes and buffers that a node's connection sends or receives in one go."""

_LANE_HEAD: Final = struct.Struct("<IQBB")
"""As in ``kvstore.wire.frames``: length of what follows, call id, kind, bytes of the name."""

_MOUNT: Final = struct.Struct("<16sQQ")
"""As ``seal`` takes them: key, generation, expiry."""

_STAMPED: Final = struct.Struct("<8s5Q")
_STAMP_TAG: Final = b"KVhead\0\1"
"""What a stamp covers: this tag, offset, payload bytes, epoch, counter, bytes of the namespace;
then namespace and key."""

_ORDER_BITS: Final = 18
_GOLDEN: Final = 0x9E3779B97F4A7C15
_WORD: Final = (1 << 64) - 1

_counting: Final = threading.Lock()


# --- objects in mapped memory --------------------------------------------------------------------


class _EndedEarlyError(Exception):
    """The batch ended early: ``how``."""

    def __init__(self, how: BatchEnd) -> None:
        super().__init__(how)
        self.how = how


def read_objects(
    memory: memoryview, generation: int, seed: int, namespace: str, rows: list[ReadRow],
    verify: bool, deadline: float, threads: int, /,
) -> list[bytes | int] | BatchEnd:  # fmt: skip
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
    del threads
    outcomes: list[bytes | int] = []
    try:
        _check(rows, len(memory))
        for row in rows:
            offset, size, buffers = row[0], row[1], row[5]
            _check_may_continue(memory, generation, deadline)
            header = header_of(memory[offset : offset + HEADER_BYTES], seed, namespace, row)
            outcomes.append(interface.STALE if header is None else header.descriptor)
            if header is None or (buffers is None and not verify):
                continue
            hasher = xxhash.xxh3_64()
            for place, piece in _beside(memory[offset + HEADER_BYTES :][:size], buffers):
                _check_may_continue(memory, generation, deadline)
                if buffers is not None:
                    piece[:] = place
                if verify:
                    hasher.update(piece)  # what was copied: others may write to the place
            if verify and hasher.intdigest() != header.payload_checksum:
                outcomes[-1] = interface.CORRUPT
    except _EndedEarlyError as ended:
        return ended.how
    return outcomes


def write_objects(
    memory: memoryview, generation: int, seed: int, namespace: str, rows: list[WriteRow],
    deadline: float, threads: int, /,
) -> BatchEnd:  # fmt: skip
    """Wipe each row's header position, copy its payload, then write its header. 0: all of it
    is done; otherwise some rows may be."""
    del threads
    try:
        _check(rows, len(memory))
        for row in rows:
            offset, size, buffers = row[0], row[1], row[5]
            _check_may_continue(memory, generation, deadline)
            memory[offset : offset + len(WIPE)] = WIPE  # first: a header promises a whole payload
            hasher = xxhash.xxh3_64()
            for place, piece in _beside(memory[offset + HEADER_BYTES :][:size], buffers):
                _check_may_continue(memory, generation, deadline)
                if buffers is not None:
                    place[:] = piece
                hasher.update(piece)
            _check_may_continue(memory, generation, deadline)
            write_header(memory[offset:], seed, namespace, row, hasher.intdigest())
    except _EndedEarlyError as ended:
        return ended.how
    return 0


def _check(rows: Sequence[ReadRow | WriteRow], room: int) -> None:
    """Raises _EndedEarlyError: a row is not within ``room`` bytes; ValueError: wrong sizes."""
    for row in rows:
        if row[5] is not None and sum(map(len, row[5])) != row[1]:
            raise ValueError("buffers and payload differ in size")
        if row[0] < SUPERBLOCK_BYTES or row[0] + HEADER_BYTES + row[1] > room:
            raise _EndedEarlyError(interface.OUTSIDE)


def _check_may_continue(memory: memoryview, generation: int, deadline: float) -> None:
    """Raises _EndedEarlyError: the segment was mounted anew, or it is too late."""
    if memory[GENERATION_OFFSET : GENERATION_OFFSET + 8].cast("Q")[0] != generation:
        raise _EndedEarlyError(interface.GONE)
    if uptime() >= deadline:
        raise _EndedEarlyError(interface.LATE)


def _beside(
    payload: memoryview, buffers: Sequence[memoryview] | None
) -> Iterator[tuple[memoryview, memoryview]]:
    """Yields the payload's place in pieces, each beside its piece of ``buffers`` (None: itself)."""
    at = 0
    for piece in _pieces([payload] if buffers is None else buffers):
        yield payload[at : at + len(piece)], piece
        at += len(piece)


def _pieces(buffers: Sequence[memoryview] | None) -> Iterator[memoryview]:
    for buffer in buffers or ():
        for start in range(0, len(buffer), PIECE_BYTES):
            yield buffer[start : start + PIECE_BYTES]


# --- keys, records, buffers ----------------------------------------------------------------------


def pack_keys(keys: Sequence[object], /) -> tuple[bytes, int] | None:
    """All keys in one piece, and their length; None unless they are ``bytes`` of one length
    from 1 to 256, and at least one."""
    packable = [key for key in keys if type(key) is bytes]
    sizes = set(map(len, packable))
    if len(packable) != len(keys) or len(sizes) != 1 or not 0 < max(sizes) <= KEY_BYTES_MAX:
        return None
    return b"".join(packable), sizes.pop()


def get_many(
    shards: list[dict[Key, AnyRecord]], mask: int, data: bytes, stride: int, /
) -> list[AnyRecord | None]:
    """The record of each key of ``data``, looked up in ``shards[hash(key) & mask]``."""
    if stride < 1 or not 0 <= mask < len(shards):
        raise ValueError("no stride, or a mask for more shards")
    keys = [Key(data[at : at + stride]) for at in range(0, len(data), stride)]
    return [shards[hash(key) & mask].get(key) for key in keys]


def overlap(buffers: list[memoryview], /) -> tuple[int, int] | None:
    """The indices of two buffers that share a byte; None: no two do."""
    spans = sorted(
        (address_of(each), len(each), index) for index, each in enumerate(buffers) if len(each)
    )
    for (start, size, index), (after, _, other) in pairwise(spans):
        if start + size > after:
            return index, other
    return None


def xxh3_64(data: bytes | memoryview, seed: int = 0, /) -> int:
    """As ``xxhash.xxh3_64_intdigest``."""
    return xxhash.xxh3_64_intdigest(data, seed)


# --- a lane's socket -----------------------------------------------------------------------------


def exchange(
    sock: socket.socket, request: bytes, call_id: int, spin_s: float, deadline: float,
    length_max: int, /,
) -> tuple[int, int, int, bytes | None]:  # fmt: skip
    """Send one frame on a lane's socket (non-blocking) and receive the answer to it.

    Args:
        spin_s: how long to poll for the answer before sleeping; ``kvstore.wire.busy_poll_gauge``
            has the outcomes.
        deadline: a ``uptime()`` value.
        length_max: of the answer's frame.

    Returns:
        ``ANSWERED``, the outcome of polling, the frame's kind and its payload. Or what
        went wrong, an errno (of ``NOT_SENT`` and ``BROKEN``), 0 and None; of ``GARBLED`` with
        an answer to another call its kind and payload.
    """
    del spin_s
    if uptime() >= deadline:
        return interface.TIMED_OUT, 0, 0, None
    if not _is_quiet(sock):
        return interface.UNASKED, 0, 0, None
    failure = interface.NOT_SENT
    try:
        sock.settimeout(_left(deadline))
        sock.sendall(request)
        failure = interface.BROKEN
        head = _received(sock, _LANE_HEAD.size, deadline)
        length, answered, kind, name_size = _LANE_HEAD.unpack(head)
        size = length + 4 - _LANE_HEAD.size
        if size < 0 or length > length_max:
            return interface.GARBLED, 0, 0, None
        payload = _received(sock, size, deadline)
    except OSError as error:
        how, number = _classify_error(error)
        return (failure if how == interface.BROKEN else how), number, 0, None
    if name_size:
        return interface.GARBLED, 0, 0, None
    return (interface.ANSWERED if answered == call_id else interface.GARBLED), 0, kind, payload


def _is_quiet(sock: socket.socket) -> bool:
    """Whether the connection is open and no byte has come."""
    if isinstance(sock, ssl.SSLSocket) and sock.pending():
        return False
    try:
        sock.setblocking(False)
        socket.socket.recv(sock, 1, socket.MSG_PEEK)  # within TLS ``sock.recv`` would decrypt
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def _received(sock: socket.socket, size: int, deadline: float) -> bytes:
    received = bytearray()
    while len(received) < size:
        sock.settimeout(_left(deadline))
        some = sock.recv(min(size - len(received), SERVED_BYTES))
        if not some:
            raise ConnectionEndedError(len(received))
        received += some
    return bytes(received)


def _left(deadline: float) -> float:
    left_s = deadline - uptime()
    if left_s <= 0:
        raise TimeoutError
    return left_s


def _classify_error(error: OSError | RefusedTransferError) -> tuple[int, int]:
    """How an exchange ended with ``error``, and its errno or ``TransferStatus``."""
    if isinstance(error, RefusedTransferError):
        return interface.REFUSED, -1 if error.status is None else error.status
    if isinstance(error, TimeoutError):
        return interface.TIMED_OUT, 0
    if isinstance(error, ConnectionEndedError):
        return interface.ENDED, 0
    if isinstance(error, ssl.SSLError):  # its number is none of the system's
        return interface.BROKEN, errno.EBADMSG
    return interface.BROKEN, error.errno or 0


# --- the client's end of a data connection -------------------------------------------------------


def tcp_read(
    stream: Stream, size: int, seed: int, namespace: str, rows: list[ReadRow], verify: bool,
    deadline: float, stall_s: float, spin_s: float, sealed: bool, /,
) -> tuple[int, int, int, list[bytes | int] | None]:  # fmt: skip
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
    del stall_s, spin_s
    outcomes: list[bytes | int] = []
    scratch = memoryview(bytearray(PIECE_BYTES))

    def receive(stream: Stream) -> None:
        for row in rows:
            head = bytearray(HEADER_BYTES)
            stream.receive([memoryview(head)], deadline)
            header = header_of(head, seed, namespace, row)
            hasher = xxhash.xxh3_64()
            for piece in _pieces(row[5]):
                # Without the right header these are bytes of another object: not for the caller.
                into = scratch[: len(piece)] if header is None else piece
                stream.receive([into], deadline)
                if verify:
                    hasher.update(into)
            outcomes.append(interface.STALE if header is None else header.descriptor)
            if verify and header and hasher.intdigest() != header.payload_checksum:
                outcomes[-1] = interface.CORRUPT

    try:
        _check(rows, size)
    except _EndedEarlyError:
        return interface.REFUSED, TransferStatus.INVALID_RANGE, 1, None
    ranges = [(row[0], HEADER_BYTES + row[1]) for row in rows]
    extents = [_extent(row) for row in rows] if sealed else None
    how, number, settled = request(stream, Op.READ, ranges, extents, receive, deadline)
    return how, number, settled, outcomes if how == interface.ANSWERED else None


def tcp_write(
    stream: Stream, size: int, seed: int, namespace: str, rows: list[WriteRow], deadline: float,
    stall_s: float, spin_s: float, sealed: bool, /,
) -> tuple[int, int, int, None]:  # fmt: skip
    """``write_objects`` over such a connection; at most a third of ``RANGES_MAX`` rows."""
    del stall_s, spin_s

    def send(stream: Stream) -> None:
        for row in rows:
            stream.send([WIPE], deadline, socket.MSG_MORE)
            hasher, head = xxhash.xxh3_64(), bytearray(HEADER_BYTES)
            for piece in _pieces(row[5]):
                hasher.update(piece)
                stream.send([piece], deadline, socket.MSG_MORE)
            write_header(head, seed, namespace, row, hasher.intdigest())
            more = 0 if row is rows[-1] else socket.MSG_MORE
            stream.send([memoryview(head)], deadline, more)

    try:
        _check(rows, size)
    except _EndedEarlyError:
        return interface.REFUSED, TransferStatus.INVALID_RANGE, 1, None
    ranges: list[tuple[int, int]] = []
    for offset, length, *_ in rows:
        ranges += [(offset, len(WIPE)), (offset + HEADER_BYTES, length), (offset, HEADER_BYTES)]
    extents = [_extent(row) for row in rows for _ in range(3)] if sealed else None
    return *request(stream, Op.WRITE, ranges, extents, send, deadline), None


def _extent(row: ReadRow | WriteRow) -> Extent:
    shown = row[-1][: interface.CAPABILITY_BYTES]
    return Extent(row[0], HEADER_BYTES + row[1], shown or NO_EXTENT.capability)


def request(
    stream: Stream, op: Op, ranges: Sequence[tuple[int, int]], extents: Sequence[Extent] | None,
    move: Callable[[Stream], None], deadline: float,
) -> tuple[int, int, int]:  # fmt: skip
    """One request on a greeted connection; with ``extents`` on one with capabilities. ``move``
    sends, or receives, the bytes of all ranges. Returns as ``tcp_read``, without outcomes."""
    is_read = op is Op.READ
    if not stream.is_idle():
        return interface.UNASKED, 0, 1
    how, number = interface.ANSWERED, 0
    try:
        # Bytes to write follow at once, so the request travels with the first of them.
        more = 0 if is_read else socket.MSG_MORE
        stream.send([protocol.pack_request(op, ranges, extents)], deadline, more)
        if is_read:
            receive_status(stream, deadline)
        move(stream)
    except (OSError, RefusedTransferError) as error:
        how, number = _classify_error(error)
    if is_read or (how != interface.ANSWERED and number not in (errno.EPIPE, errno.ECONNRESET)):
        return how, number, int(is_read)
    try:
        receive_status(stream, deadline)  # says also why the peer has hung up
    except (OSError, RefusedTransferError) as error:
        said, status = _classify_error(error)
        is_refused = said == interface.REFUSED
        if how == interface.ANSWERED or is_refused:
            how, number = said, status
        return how, number, int(is_refused)
    return how, number, 1


def receive_status(stream: Stream, deadline: float) -> None:
    """
    Raises:
        RefusedTransferError: the status is not OK.
        NeedsTlsError: the server speaks TLS, and this stream does not.
        StalledError, EndedError, OSError: as ``Stream.receive``.
    """
    raw = bytearray(protocol.STATUS_BYTES)
    try:
        stream.receive([memoryview(raw)], deadline)
    except OSError:
        if raw.startswith(NO_TLS):
            raise NeedsTlsError from None
        raise
    if (status := protocol.unpack_status(raw)) is not TransferStatus.OK:
        raise RefusedTransferError(status)


# --- capabilities --------------------------------------------------------------------------------


def seal(
    mounts: dict[int, bytes], segments: Sequence[int], offsets: Sequence[int], sizes: Sequence[int],
    holder: int, order: int, rights: int, /,
) -> bytes:  # fmt: skip
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
    made: list[bytes] = []
    for segment, offset, size in zip(segments, offsets, sizes, strict=True):
        mount = mounts.get(segment)
        if mount is None:
            made.append(NO_EXTENT.capability)
            continue
        if len(mount) != _MOUNT.size:
            raise ValueError("a mount has 32 bytes")
        key, generation, expires_ms = _MOUNT.unpack(mount)
        length = HEADER_BYTES + size
        said = protocol.sealed(generation, holder, offset, length, expires_ms, order, rights)
        made.append(protocol.pack_capability(expires_ms, order, siphash(key, said)))
    return b"".join(made)


def stamp(
    mounts: dict[int, bytes], segments: Sequence[int], offsets: Sequence[int], sizes: Sequence[int],
    epochs: Sequence[int], counters: Sequence[int], namespaces: Sequence[str], keys: Sequence[Key],
    /,
) -> bytes:  # fmt: skip
    """Makes the stamps of headers (``kvstore.memory.header``), ``STAMP_BYTES`` for each.

    Args:
        mounts: by segment its stamp key, 16 bytes. The stamps of other segments are zeros.
        segments, offsets, sizes: of each extent; its payload bytes.
        epochs, counters, namespaces, keys: of the object that may be there.

    Raises:
        ValueError: columns of different length, a key of another length, or a name that is too
            long.
    """
    made: list[bytes] = []
    rows = zip(offsets, sizes, epochs, counters, namespaces, keys, strict=True)
    for segment, (*numbers, namespace, key) in zip(segments, rows, strict=True):
        secret = mounts.get(segment)
        if secret is None:
            made.append(bytes(interface.STAMP_BYTES))
            continue
        name = namespace.encode()
        if len(name) > NAMESPACE_BYTES_MAX or len(key) > KEY_BYTES_MAX:
            raise ValueError("a namespace or key is too long")
        made.append(siphash(secret, _STAMPED.pack(_STAMP_TAG, *numbers, len(name)) + name + key))
    return b"".join(made)


class CapabilityVerifier(NamedTuple):
    """What the capabilities of one connection are checked with."""

    key: bytes
    """Of the segment."""
    generation: int
    holder: int
    mac: Callable[[bytes, bytes], bytes]
    """``siphash``, in Python or compiled."""
    wipe_seqs: memoryview
    writes_in_progress: memoryview
    """As ``serve`` takes them."""

    def check(self, record: protocol.CapabilityRange, op: Op) -> None:
        """Raises RefusedTransferError: it is no capability of this holder for ``op`` on the range
        now."""
        place = record.extent_offset, record.extent_length
        said = protocol.sealed(
            self.generation, self.holder, *place, record.expires_ms, record.wipe_seq, record.rights
        )
        if not hmac.compare_digest(record.mac, self.mac(self.key, said)):
            raise RefusedTransferError(TransferStatus.NOT_ALLOWED)
        if record.expires_ms <= uptime_ms():
            raise RefusedTransferError(TransferStatus.NOT_ALLOWED)
        if not record.rights & op:
            raise RefusedTransferError(TransferStatus.NOT_ALLOWED)
        if not record.covers():
            raise RefusedTransferError(TransferStatus.NOT_ALLOWED)

    def begin_write(self, records: Sequence[protocol.CapabilityRange]) -> None:
        """Notes which extents are written, and then compares the capabilities with the last orders
        for them: whoever makes an order known finds this write, or it is refused here.

        Raises:
            RefusedTransferError: a capability is older than an order to wipe its extent.
        """
        asked, orders = self.writes_in_progress.cast("Q"), self.wipe_seqs.cast("Q")
        for index, record in enumerate(records, 1):
            asked[index] = record.extent_offset
        asked[0] = len(records)
        if any(record.wipe_seq < orders[_slot(record.extent_offset)] for record in records):
            raise RefusedTransferError(TransferStatus.NOT_ALLOWED)

    def end_write(self) -> None:
        self.writes_in_progress.cast("Q")[0] = 0


def call_back(orders: memoryview, offsets: Sequence[int], order: int, /) -> None:
    """Ends the right to write of all capabilities for these extents that are older than the
    order. Requests that have begun go on: ``writes_in_progress`` of ``serve`` names them.

    Args:
        orders: ``ORDERS_BYTES``, zeros at first: the last order of each extent, by a hash of
            its offset.

    Raises:
        ValueError: ``wipe_seqs`` has another size.
    """
    if orders.nbytes != interface.ORDERS_BYTES:
        raise ValueError("no table of orders")
    words = orders.cast("Q")
    for offset in offsets:
        if offset < 0:
            raise OverflowError("an offset below 0")
        slot = _slot(offset)
        words[slot] = max(words[slot], order)


def _slot(offset: int) -> int:
    """The word of an extent's last order. Extents that share a word share the higher order."""
    return (offset // EXTENT_ALIGN * _GOLDEN & _WORD) >> (64 - _ORDER_BITS)


# --- the node's end ------------------------------------------------------------------------------


def serve(
    stream: Stream, file: int, memory: memoryview, generation: int, cut: bytearray,
    counts: bytearray, stall_s: float, idle_s: float, key: bytes, holder: int,
    orders: memoryview, asked: memoryview, /,
) -> tuple[int, int]:  # fmt: skip
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
    del file
    sealed = CapabilityVerifier(key, generation, holder, siphash, orders, asked) if key else None
    bounds = counts, stall_s, idle_s
    return serve_ranges(stream, None, len(memory), memory, generation, cut, *bounds, sealed)


def serve_ranges(
    stream: Stream, held: RangeAccess | None, size: int, memory: memoryview, generation: int,
    cut: bytearray, counts: bytearray, stall_s: float, idle_s: float,
    sealed: CapabilityVerifier | None,
) -> tuple[int, int]:  # fmt: skip
    """As ``serve``, a segment of ``size`` bytes. If ``memory`` has the superblock alone, ``held``
    reads and writes the extents; compiled steps cannot serve such a segment. ``sealed``: None: the
    connection is one without capabilities."""
    words = memory[GENERATION_OFFSET : GENERATION_OFFSET + 8].cast("Q")
    counted = memoryview(counts).cast("Q")
    copied = None if held is None else memoryview(bytearray(SERVED_BYTES))

    def soon() -> float:
        return uptime() + stall_s

    def check() -> None:
        if cut[0] or words[0] != generation:
            raise RefusedTransferError(TransferStatus.GONE)

    try:
        while (asked := _next_request(stream, soon, idle_s, sealed)) is not None:
            op, ranges, until = asked

            def in_time(until: float = until) -> float:
                return min(soon(), until)

            total = _total(ranges, size)
            check()
            ahead: list[bytes | memoryview] = [protocol.pack_status(TransferStatus.OK)]
            for parts in _parts(ranges, memory, copied):
                if op is Op.READ:
                    if held is not None:
                        held.read(parts, in_time())
                    stream.send([*ahead, *(part for _, part in parts)], in_time())
                    ahead = []
                    continue
                check()
                stream.receive([part for _, part in parts], in_time())
                if held is not None:
                    check()
                    held.write(parts, in_time())
            if sealed is not None:
                sealed.end_write()  # before the client may know
            if ahead:
                stream.send(ahead, in_time())
            with _counting:
                at = 0 if op is Op.READ else 2
                counted[at] += 1
                counted[at + 1] += total
    except DeadlineExceededError:  # too many connections copy at once
        return interface.TIMED_OUT, 0
    except (OSError, RefusedTransferError) as error:
        return _classify_error(error)
    finally:
        if sealed is not None:
            sealed.end_write()
    return interface.ENDED, 0


def _next_request(
    stream: Stream, soon: Callable[[], float], idle_s: float, sealed: CapabilityVerifier | None
) -> tuple[Op, list[tuple[int, int]], float] | None:
    """Op and ranges, and until when (``uptime()``) bytes of them may move; None: no request came
    for ``idle_s``.

    Raises:
        RefusedTransferError: no such request, or a range without a valid capability.
    """
    raw = bytearray(protocol.REQUEST_BYTES)
    idle_until = uptime() + idle_s
    while True:
        try:
            stream.receive([memoryview(raw)], soon())
            break
        except StalledError as stalled:
            if stalled.received:
                raise
            if uptime() >= idle_until:
                return None
    request = protocol.unpack_request(raw)
    if request is None:
        raise RefusedTransferError(TransferStatus.BAD_REQUEST)
    op, count = request
    raw = bytearray(count * (protocol.RECORD_BYTES if sealed else protocol.RANGE_BYTES))
    stream.receive([memoryview(raw)], soon())
    if sealed is None:
        return op, protocol.unpack_ranges(raw), math.inf
    records = protocol.unpack_records(raw)
    for record in records:
        sealed.check(record, op)
    if op is Op.WRITE:
        sealed.begin_write(records)
    ranges = [(record.offset, record.length) for record in records]
    return op, ranges, min(record.expires_ms for record in records) / 1000


def _total(ranges: list[tuple[int, int]], size: int) -> int:
    """The sum of the lengths.

    Raises:
        RefusedTransferError: a range is outside the segment, or all together are larger than it.
    """
    total = sum(length for _, length in ranges)
    is_outside = any(at < SUPERBLOCK_BYTES or at + length > size for at, length in ranges)
    if is_outside or total > size:
        raise RefusedTransferError(TransferStatus.INVALID_RANGE)
    return total


def _parts(
    ranges: list[tuple[int, int]], memory: memoryview, copied: memoryview | None
) -> Iterator[list[tuple[int, memoryview]]]:
    """The ranges in groups of at most ``SERVED_BYTES``: offsets, and their bytes in ``memory``, or
    places for them in ``copied``."""
    group: list[tuple[int, memoryview]] = []
    used = 0
    for start, length in ranges:
        offset, end = start, start + length
        while offset < end:
            size = min(end - offset, SERVED_BYTES - used)
            part = memory[offset : offset + size] if copied is None else copied[used : used + size]
            group.append((offset, part))
            offset += size
            used += size
            if used == SERVED_BYTES or len(group) == SERVED_PARTS:
                yield group
                group, used = [], 0
    if group:
        yield group
