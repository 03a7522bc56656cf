"""The primitives in short Python, if not compiled; with the same results. Threads: any."""

from __future__ import annotations

import contextlib
import errno
import hmac
import math
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Final, NamedTuple

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
from kvstore.native.siphash import siphash as siphash  # noqa: PLC0414  # a primitive
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

PIECE_BYTES: Final = 64 << 10
"""Copied, hashed, sent or received between checks of clock and generation. xxhash releases the GIL
above 100 KB, and regaining it from a busy thread may cost 5 ms."""

SERVED_BYTES: Final = 1 << 20
SERVED_PARTS: Final = 512
"""Maximum buffers that a node's connection sends or receives per system call."""

_LANE_HEAD: Final = struct.Struct("<IQBB")
"""As in ``kvstore.wire.frames``: length of the rest, call id, kind, length of the name."""

_MOUNT: Final = struct.Struct("<16sQQ")
"""A mount as in ``issue_capabilities``: key, generation, expiry."""

_HEADER_MAC_INPUT: Final = struct.Struct("<8s5Q")
_HEADER_MAC_TAG: Final = b"KVhead\0\1"
"""Prefix of the MAC's input; offset, size, version, namespace and key follow."""

_ORDER_BITS: Final = 18
_GOLDEN: Final = 0x9E3779B97F4A7C15
_WORD: Final = (1 << 64) - 1

_counting: Final = threading.Lock()


class _EndedEarlyError(Exception):
    def __init__(self, how: BatchEnd) -> None:
        super().__init__(how)
        self.how = how


def read_objects(
    memory: memoryview, generation: int, seed: int, namespace: str, rows: list[ReadRow],
    verify: bool, deadline: float, threads: int, /,
) -> list[bytes | int] | BatchEnd:  # fmt: skip
    """Check the header of each row, and copy its payload.

    Args:
        memory: the complete segment, mapped.
        generation: expected one; checked before each 256 KiB.
        seed: of the segment's header checksums.
        verify: hash and compare the payload.
        deadline: a ``uptime()`` value, checked as often.
        threads: maximum threads that copy, each its own rows.

    Returns:
        Per row its descriptor, ``STALE`` or ``CORRUPT``. Or the reason why the batch ended; the
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
            for source, chunk in _beside(memory[offset + HEADER_BYTES :][:size], buffers):
                _check_may_continue(memory, generation, deadline)
                if buffers is not None:
                    chunk[:] = source
                if verify:
                    hasher.update(chunk)  # the copy: others may write to the source
            if verify and hasher.intdigest() != header.payload_checksum:
                outcomes[-1] = interface.CORRUPT
    except _EndedEarlyError as ended:
        return ended.how
    return outcomes


def write_objects(
    memory: memoryview, generation: int, seed: int, namespace: str, rows: list[WriteRow],
    deadline: float, threads: int, /,
) -> BatchEnd:  # fmt: skip
    """Wipe each row's header, copy its payload, write its header. Returns 0 if all are complete."""
    del threads
    try:
        _check(rows, len(memory))
        for row in rows:
            offset, size, buffers = row[0], row[1], row[5]
            _check_may_continue(memory, generation, deadline)
            memory[offset : offset + len(WIPE)] = WIPE  # first: a header implies a complete payload
            hasher = xxhash.xxh3_64()
            for target, chunk in _beside(memory[offset + HEADER_BYTES :][:size], buffers):
                _check_may_continue(memory, generation, deadline)
                if buffers is not None:
                    target[:] = chunk
                hasher.update(chunk)
            _check_may_continue(memory, generation, deadline)
            write_header(memory[offset:], seed, namespace, row, hasher.intdigest())
    except _EndedEarlyError as ended:
        return ended.how
    return 0


def _check(rows: Sequence[ReadRow | WriteRow], room: int) -> None:
    """Raise _EndedEarlyError if a row exceeds ``room`` bytes; ValueError: wrong sizes."""
    for row in rows:
        if row[5] is not None and sum(map(len, row[5])) != row[1]:
            raise ValueError("buffers and payload differ in size")
        if row[0] < SUPERBLOCK_BYTES or row[0] + HEADER_BYTES + row[1] > room:
            raise _EndedEarlyError(interface.OUTSIDE)


def _check_may_continue(memory: memoryview, generation: int, deadline: float) -> None:
    """Raise _EndedEarlyError after a new mount of the segment or the deadline."""
    if memory[GENERATION_OFFSET : GENERATION_OFFSET + 8].cast("Q")[0] != generation:
        raise _EndedEarlyError(interface.UNMOUNTED)
    if uptime() >= deadline:
        raise _EndedEarlyError(interface.LATE)


def _beside(
    payload: memoryview, buffers: Sequence[memoryview] | None
) -> Iterator[tuple[memoryview, memoryview]]:
    """Yield the payload's memory in chunks, each with its chunk of ``buffers`` (None: itself)."""
    at = 0
    for chunk in _pieces([payload] if buffers is None else buffers):
        yield payload[at : at + len(chunk)], chunk
        at += len(chunk)


def _pieces(buffers: Sequence[memoryview] | None) -> Iterator[memoryview]:
    for buffer in buffers or ():
        for start in range(0, len(buffer), PIECE_BYTES):
            yield buffer[start : start + PIECE_BYTES]


def pack_keys(keys: Sequence[object], /) -> tuple[bytes, int] | None:
    """Return the packed keys and their length; None unless they are ``bytes`` of one length."""
    packable = [key for key in keys if type(key) is bytes]
    sizes = set(map(len, packable))
    if len(packable) != len(keys) or len(sizes) != 1 or not 0 < max(sizes) <= KEY_BYTES_MAX:
        return None
    return b"".join(packable), sizes.pop()


def unpack_keys(data: bytes, stride: int, /) -> list[Key]:
    """Return the keys of ``data``, each of ``stride`` bytes."""
    if stride < 1:
        raise ValueError("no stride")
    return [Key(data[at : at + stride]) for at in range(0, len(data) - stride + 1, stride)]


def get_many(
    shards: list[dict[Key, AnyRecord]], mask: int, data: bytes, stride: int, /
) -> list[AnyRecord | None]:
    """Return the record of each key of ``data``, from ``shards[hash(key) & mask]``."""
    if stride < 1 or not 0 <= mask < len(shards):
        raise ValueError("no stride, or a mask for more shards")
    return [shards[hash(key) & mask].get(key) for key in unpack_keys(data, stride)]


def overlap(buffers: list[memoryview], /) -> tuple[int, int] | None:
    """Return the indices of two buffers that share a byte, or None."""
    spans = sorted(
        (address_of(buffer), len(buffer), index)
        for index, buffer in enumerate(buffers)
        if len(buffer)
    )
    for (start, size, index), (after, _, other) in pairwise(spans):
        if start + size > after:
            return index, other
    return None


def flat_views(
    of_type: type, values: Sequence[object], writable: bool, /
) -> list[memoryview | None]:
    """Return a view of each value of exactly this type whose memory is one row of bytes, not empty,
    and writable if that is asked for; None: of other values."""
    views: list[memoryview | None] = []
    for value in values:
        view = None
        if type(value) is of_type:
            with contextlib.suppress(ValueError):  # a dtype that memoryview does not know
                view = memoryview(value)  # type: ignore[arg-type]
        is_flat = view is not None and view.ndim == 1 and view.format == "B" and view.c_contiguous
        if view is not None and (not is_flat or not view.nbytes or (writable and view.readonly)):
            view = None
        views.append(view)
    return views


def records(of_type: type[AnyRecord], /, *columns: Sequence[Any]) -> list[AnyRecord]:
    """Return named tuples of this type, one per row of the columns (lists or tuples)."""
    new: Any = tuple.__new__
    return list(map(partial(new, of_type), zip(*columns, strict=True)))


def xxh3_64(data: bytes | memoryview, seed: int = 0, /) -> int:
    return xxhash.xxh3_64_intdigest(data, seed)


def exchange(
    sock: socket.socket, request: bytes, call_id: int, spin_s: float, deadline: float,
    length_max: int, /,
) -> tuple[int, int, int, bytes | None]:  # fmt: skip
    """Send one frame on a lane's socket (non-blocking) and receive the reply.

    Args:
        spin_s: busy-polling time before sleeping; ``kvstore.wire.busy_poll_gauge`` has the
            outcomes.
        deadline: a ``uptime()`` value.
        length_max: of the reply's frame.

    Returns:
        ``ANSWERED``, the outcome of polling, the frame's kind and its payload. Or the error, an
            errno (of ``NOT_SENT`` and ``BROKEN``), 0 and None; for ``GARBLED`` with a reply to
            another call its kind and payload.
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
    """Return whether the connection is open and idle."""
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
    """Classify ``error``; returns the end of the exchange, and the errno or ``TransferStatus``."""
    if isinstance(error, RefusedTransferError):
        return interface.REFUSED, -1 if error.status is None else error.status
    if isinstance(error, TimeoutError):
        return interface.TIMED_OUT, 0
    if isinstance(error, ConnectionEndedError):
        return interface.ENDED, 0
    if isinstance(error, ssl.SSLError):  # not a number of the system
        return interface.BROKEN, errno.EBADMSG
    return interface.BROKEN, error.errno or 0


def tcp_read(
    stream: Stream, size: int, seed: int, namespace: str, rows: list[ReadRow], verify: bool,
    deadline: float, stall_s: float, spin_s: float, with_capabilities: bool, /,
) -> tuple[int, int, int, list[bytes | int] | None]:  # fmt: skip
    """As ``read_objects``, in one request over an open connection to a data server.

    Args:
        stream: its timeouts are changed.
        size: of the segment, bytes.
        rows: at most ``RANGES_MAX``; none without buffers.
        stall_s: ``TIMED_OUT`` also after this time without a byte in either direction.
        with_capabilities: whether the connection requires the rows' capabilities.

    Returns:
        ``ANSWERED``, the outcome of polling, 1, and the outcomes. Or the error, the errno or
            ``Status``, whether no byte can arrive in the segment any more, and None.
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
            for chunk in _pieces(row[5]):
                # Without the right header these are bytes of another object: not for the caller.
                into = scratch[: len(chunk)] if header is None else chunk
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
    extents = [_extent(row) for row in rows] if with_capabilities else None
    how, number, quiesced = request(stream, Op.READ, ranges, extents, receive, deadline)
    return how, number, quiesced, outcomes if how == interface.ANSWERED else None


def tcp_write(
    stream: Stream, size: int, seed: int, namespace: str, rows: list[WriteRow], deadline: float,
    stall_s: float, spin_s: float, with_capabilities: bool, /,
) -> tuple[int, int, int, None]:  # fmt: skip
    """As ``write_objects`` over such a connection; at most ``RANGES_MAX`` / 3 rows."""
    del stall_s, spin_s

    def send(stream: Stream) -> None:
        for row in rows:
            stream.send([WIPE], deadline, socket.MSG_MORE)
            hasher, head = xxhash.xxh3_64(), bytearray(HEADER_BYTES)
            for chunk in _pieces(row[5]):
                hasher.update(chunk)
                stream.send([chunk], deadline, socket.MSG_MORE)
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
    extents = [_extent(row) for row in rows for _ in range(3)] if with_capabilities else None
    return *request(stream, Op.WRITE, ranges, extents, send, deadline), None


def _extent(row: ReadRow | WriteRow) -> Extent:
    capability = row[-1][: interface.CAPABILITY_BYTES]
    return Extent(row[0], HEADER_BYTES + row[1], capability or NO_EXTENT.capability)


def request(
    stream: Stream, op: Op, ranges: Sequence[tuple[int, int]], extents: Sequence[Extent] | None,
    move: Callable[[Stream], None], deadline: float,
) -> tuple[int, int, int]:  # fmt: skip
    """Make one request. ``move`` sends or receives all bytes. Returns as ``tcp_read``."""
    is_read = op is Op.READ
    if not stream.is_idle():
        return interface.UNASKED, 0, 1
    how, number = interface.ANSWERED, 0
    try:
        # Bytes to write follow at once, so the request is sent with the first of them.
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
        receive_status(stream, deadline)  # has the reason if the peer has closed
    except (OSError, RefusedTransferError) as error:
        said, status = _classify_error(error)
        is_refused = said == interface.REFUSED
        if how == interface.ANSWERED or is_refused:
            how, number = said, status
        return how, number, int(is_refused)
    return how, number, 1


def receive_status(stream: Stream, deadline: float) -> None:
    """Receive a status.

    Raises:
        RefusedTransferError: the status is not OK.
        StalledError, EndedError, OSError: as ``Stream.receive``.
    """
    raw = bytearray(protocol.STATUS_BYTES)
    stream.receive([memoryview(raw)], deadline)
    if (status := protocol.unpack_status(raw)) is not TransferStatus.OK:
        raise RefusedTransferError(status)


def issue_capabilities(
    mounts: dict[int, bytes], segments: Sequence[int], offsets: Sequence[int], sizes: Sequence[int],
    holder: int, order: int, rights: int, /,
) -> bytes:  # fmt: skip
    """Issue capabilities, ``CAPABILITY_BYTES`` for each extent.

    Args:
        mounts: by segment its key (16 bytes), generation and the expiry in ms of its node's clock
            (8 bytes each, little-endian). The capabilities of other segments are zeros, which no
            node accepts.
        segments, offsets, sizes: of each extent; its payload bytes.
        order: the last wipe sequence number.
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
        signed = protocol.pack_capability_input(
            generation, holder, offset, length, expires_ms, order, rights
        )
        made.append(protocol.pack_capability(expires_ms, order, siphash(key, signed)))
    return b"".join(made)


def compute_header_macs(
    mounts: dict[int, bytes], segments: Sequence[int], offsets: Sequence[int], sizes: Sequence[int],
    epochs: Sequence[int], counters: Sequence[int], namespaces: Sequence[str], keys: Sequence[Key],
    /,
) -> bytes:  # fmt: skip
    """Compute header MACs (``kvstore.memory.header``), ``HEADER_MAC_BYTES`` for each.

    Args:
        mounts: by segment its MAC key, 16 bytes. The MACs of other segments are zeros.
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
            made.append(bytes(interface.HEADER_MAC_BYTES))
            continue
        name = namespace.encode()
        if len(name) > NAMESPACE_BYTES_MAX or len(key) > KEY_BYTES_MAX:
            raise ValueError("a namespace or key is too long")
        made.append(
            siphash(
                secret, _HEADER_MAC_INPUT.pack(_HEADER_MAC_TAG, *numbers, len(name)) + name + key
            )
        )
    return b"".join(made)


class CapabilityVerifier(NamedTuple):
    key: bytes
    generation: int
    holder: int
    mac: Callable[[bytes, bytes], bytes]
    """``siphash``, in Python or compiled."""
    wipe_seqs: memoryview
    writes_in_progress: memoryview

    def check(self, record: protocol.CapabilityRange, op: Op) -> None:
        """Raise RefusedTransferError unless it permits ``op`` on the range to this holder."""
        extent = record.extent_offset, record.extent_length
        signed = protocol.pack_capability_input(
            self.generation, self.holder, *extent, record.expires_ms, record.wipe_seq, record.rights
        )
        if not hmac.compare_digest(record.mac, self.mac(self.key, signed)):
            raise RefusedTransferError(TransferStatus.NOT_ALLOWED)
        if record.expires_ms <= uptime_ms():
            raise RefusedTransferError(TransferStatus.NOT_ALLOWED)
        if not record.rights & op:
            raise RefusedTransferError(TransferStatus.NOT_ALLOWED)
        if not record.covers():
            raise RefusedTransferError(TransferStatus.NOT_ALLOWED)

    def begin_write(self, records: Sequence[protocol.CapabilityRange]) -> None:
        """Record the written extents, then compare their capabilities with the wipe sequence
        numbers: a concurrent wipe finds this write, or it is refused here.

        Raises:
            RefusedTransferError: a capability is older than a wipe request for its extent.
        """
        writes, wipe_seqs = self.writes_in_progress.cast("Q"), self.wipe_seqs.cast("Q")
        for index, record in enumerate(records, 1):
            writes[index] = record.extent_offset
        writes[0] = len(records)
        if any(record.wipe_seq < wipe_seqs[_slot(record.extent_offset)] for record in records):
            raise RefusedTransferError(TransferStatus.NOT_ALLOWED)

    def end_write(self) -> None:
        self.writes_in_progress.cast("Q")[0] = 0


def revoke_writes(wipe_seqs: memoryview, offsets: Sequence[int], order: int, /) -> None:
    """Revoke the write capabilities for these extents that are older than the wipe request.

    Requests in progress continue: ``writes_in_progress`` of ``serve`` names them.

    Args:
        wipe_seqs: ``WIPE_TABLE_BYTES``, initially zeros: the last wipe sequence number of each
            extent, by a hash of its offset.

    Raises:
        ValueError: ``wipe_seqs`` has another size.
    """
    if wipe_seqs.nbytes != interface.WIPE_TABLE_BYTES:
        raise ValueError("no table of wipe sequence numbers")
    words = wipe_seqs.cast("Q")
    for offset in offsets:
        if offset < 0:
            raise OverflowError("an offset below 0")
        slot = _slot(offset)
        words[slot] = max(words[slot], order)


def _slot(offset: int) -> int:
    """Return the word of an extent's wipe sequence number; extents may share the higher one."""
    return (offset // EXTENT_ALIGN * _GOLDEN & _WORD) >> (64 - _ORDER_BITS)


def serve(
    stream: Stream, file: int, memory: memoryview, generation: int, cut: bytearray,
    counts: bytearray, stall_s: float, idle_s: float, key: bytes, holder: int,
    wipe_seqs: memoryview, writes: memoryview, /,
) -> tuple[int, int]:  # fmt: skip
    """Serve the requests of an open connection until it ends.

    Args:
        file: file descriptor of the segment.
        cut: a non-zero byte ends the connection once nothing is being received.
        counts: four numbers of 8 bytes, added to: reads, their bytes, writes, their bytes.
        stall_s: how long the peer may take over one chunk.
        idle_s: how long a connection may wait for its next request.
        key: of the segment, for checks of capabilities; empty: none are required.
        holder: of the capabilities.
        wipe_seqs: as for ``revoke_writes``; unused without ``key``.
        writes: ``WRITES_BYTES``, in which others read what is being written; unused without
            ``key``.

    Returns:
        The end of the connection, and the errno or, for ``REFUSED``, the ``Status`` to send.
    """
    del file
    verifier = (
        CapabilityVerifier(key, generation, holder, siphash, wipe_seqs, writes) if key else None
    )
    bounds = counts, stall_s, idle_s
    return serve_ranges(stream, None, len(memory), memory, generation, cut, *bounds, verifier)


def serve_ranges(
    stream: Stream, held: RangeAccess | None, size: int, memory: memoryview, generation: int,
    cut: bytearray, counts: bytearray, stall_s: float, idle_s: float,
    verifier: CapabilityVerifier | None,
) -> tuple[int, int]:  # fmt: skip
    """As ``serve``; ``held`` accesses extents that ``memory`` lacks. ``verifier``: None: a
    token."""
    words = memory[GENERATION_OFFSET : GENERATION_OFFSET + 8].cast("Q")
    counted = memoryview(counts).cast("Q")
    copied = None if held is None else memoryview(bytearray(SERVED_BYTES))

    def soon() -> float:
        return uptime() + stall_s

    def check() -> None:
        if cut[0] or words[0] != generation:
            raise RefusedTransferError(TransferStatus.UNMOUNTED)

    try:
        while (message := _next_request(stream, soon, idle_s, verifier)) is not None:
            op, ranges, until = message

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
            if verifier is not None:
                verifier.end_write()  # before the client may know
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
        if verifier is not None:
            verifier.end_write()
    return interface.ENDED, 0


def _next_request(
    stream: Stream, soon: Callable[[], float], idle_s: float, verifier: CapabilityVerifier | None
) -> tuple[Op, list[tuple[int, int]], float] | None:
    """Return operation, ranges and deadline, or None. Raises RefusedTransferError."""
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
    raw = bytearray(count * (protocol.RECORD_BYTES if verifier else protocol.RANGE_BYTES))
    stream.receive([memoryview(raw)], soon())
    if verifier is None:
        return op, protocol.unpack_ranges(raw), math.inf
    records = protocol.unpack_records(raw)
    for record in records:
        verifier.check(record, op)
    if op is Op.WRITE:
        verifier.begin_write(records)
    ranges = [(record.offset, record.length) for record in records]
    return op, ranges, min(record.expires_ms for record in records) / 1000


def _total(ranges: list[tuple[int, int]], size: int) -> int:
    """Return the sum of the lengths. Raises RefusedTransferError: it is out of range."""
    total = sum(length for _, length in ranges)
    is_outside = any(at < SUPERBLOCK_BYTES or at + length > size for at, length in ranges)
    if is_outside or total > size:
        raise RefusedTransferError(TransferStatus.INVALID_RANGE)
    return total


def _parts(
    ranges: list[tuple[int, int]], memory: memoryview, copied: memoryview | None
) -> Iterator[list[tuple[int, memoryview]]]:
    """Group the ranges by ``SERVED_BYTES``: offsets, and bytes in ``memory`` or ``copied``."""
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
