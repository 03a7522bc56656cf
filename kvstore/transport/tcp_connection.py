"""One connection of a data server: hello, then requests, until one end closes it.

The server does not trust its peer: it makes every check before a byte of a segment moves, and
bounds every wait. A peer that breaks a rule gets the reason, is counted, and loses its connection.
"""

from __future__ import annotations

import hmac
import logging
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from kvstore.clocks import uptime
from kvstore.errors import DeadlineExceededError
from kvstore.memory.header import SUPERBLOCK_BYTES
from kvstore.memory.segment import Ranges
from kvstore.native import fast
from kvstore.native.kinds import REFUSED, TIMED_OUT, Fast
from kvstore.transport import tcp_protocol as protocol
from kvstore.transport.pieces import windows
from kvstore.transport.stream import StalledError, Stream
from kvstore.transport.tcp_protocol import Op, Status

GATHER_BYTES: Final = 32 << 10
"""Ranges up to this size are sent many in one ``sendmsg``; longer ones each with ``sendfile``,
which copies nothing on this side (7.7 GB/s instead of 4)."""

WINDOW_BYTES: Final = 256 << 10
WINDOW_BUFFERS: Final = 512
"""Buffers in one ``sendmsg`` or ``recvmsg_into``; the kernel takes 1024. Receiving writes of 60 MiB
ran at 4.7 GB/s in windows of 256 KiB, 3.7 in windows of 1 MiB."""

_FILE_BYTES: Final = 8 << 20
"""Bytes in one ``sendfile``: a slow peer gets ``stall_s`` for each."""

_COPIED_BYTES: Final = 1 << 20
"""Bytes of a device that are copied to the host before they are sent, or received before they are
copied."""

_LINGER_BYTES: Final = 64 << 20
_LINGER_S: Final = 2.0
"""How much of a refused write is read and dropped, and for how long, so that its sender can read
the status: data left unread at ``close`` would reset the connection and lose the status."""

_OK: Final = protocol.pack_status(Status.OK)

_log = logging.getLogger(__name__)


class ServedSegment(Protocol):
    """What a data server needs of a segment; ``kvstore.memory.segment.Segment`` has it."""

    @property
    def uuid(self) -> bytes: ...
    @property
    def token(self) -> bytes: ...
    @property
    def size(self) -> int: ...
    @property
    def memory(self) -> memoryview: ...
    @property
    def fd(self) -> int: ...
    @property
    def generation(self) -> int: ...
    @property
    def ranges(self) -> Ranges | None:
        """Has the bytes, if they are not in ``memory``."""
        ...


@dataclass(slots=True)
class DataServerCounters:
    """What happened since the server was made."""

    connections: int = 0
    """Accepted, refused ones included."""
    refused_busy: int = 0
    refused_hellos: int = 0
    """Not this protocol, a wrong token, an unknown segment or generation, or no hello in time."""
    bad_requests: int = 0
    """Not this protocol, ranges outside the segment, or of an older generation."""
    stalls: int = 0
    """Connections that were cut because the peer stalled within a request."""
    reads: int = 0
    read_bytes: int = 0
    writes: int = 0
    written_bytes: int = 0


@dataclass(slots=True)
class ServerContext:
    """What the connections of one server share."""

    segments: Mapping[bytes, ServedSegment]
    """By uuid; does not change."""
    stall_s: float
    idle_s: float
    moved: bytearray = field(default_factory=lambda: bytearray(32))
    """Counts of the connections that compiled code serves: reads, their bytes, writes, their bytes;
    8 bytes each, added to without a lock."""
    _counters: DataServerCounters = field(default_factory=DataServerCounters)
    _counting: threading.Lock = field(default_factory=threading.Lock)

    def count(self, **amounts: int) -> None:
        """Add to counters by name."""
        with self._counting:
            for name, amount in amounts.items():
                setattr(self._counters, name, getattr(self._counters, name) + amount)

    def snapshot(self) -> DataServerCounters:
        """A copy of the counters."""
        reads, read_bytes, writes, written_bytes = struct.unpack("=4Q", self.moved)
        with self._counting:
            counted = self._counters
            return replace(
                counted,
                reads=counted.reads + reads,
                read_bytes=counted.read_bytes + read_bytes,
                writes=counted.writes + writes,
                written_bytes=counted.written_bytes + written_bytes,
            )


class _RefusedError(Exception):
    """The peer broke a rule; ``status`` says which."""

    def __init__(self, status: Status) -> None:
        super().__init__(status.name)
        self.status = status


class Connection:
    """Serves one connected stream in a thread of its own. ``cut`` and ``join`` from any other."""

    def __init__(
        self, stream: Stream, context: ServerContext, *, ended: Callable[[Connection], None]
    ) -> None:
        """Takes over ``stream``. ``ended`` is called last, in this connection's thread."""
        self.is_greeted = False
        """Whether the peer has shown the token of a segment."""
        self.client = self.number = 0
        """The peer's number as a client, and its number for this connection, once it is greeted."""
        self._stream = stream
        self._context = context
        self._ended = ended
        self._cut = bytearray(1)  # not 0: end it
        self._memory: memoryview | None = None
        self._thread = threading.Thread(target=self._run, name="kvstore-data", daemon=True)

    def start(self) -> None:
        """Raises RuntimeError: the system has no thread left."""
        self._thread.start()

    def cut(self, *, gently: bool = False) -> None:
        """Ends the connection. Only bytes that are being received already can land in a segment.

        ``gently``: a read that is being answered is answered to its end.
        """
        self._cut[0] = 1
        self._stream.shutdown(socket.SHUT_RD if gently else socket.SHUT_RDWR)

    def join(self, timeout_s: float) -> bool:
        """Whether the thread has ended within that time."""
        if self._thread.ident is None:  # not started yet: it will find itself cut
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._serve()
        except OSError:
            pass  # the peer left, or we were cut
        finally:
            self._stream.close()
            self._ended(self)

    def _serve(self) -> None:
        try:
            segment, generation = self._greet()
        except (_RefusedError, OSError) as error:
            self._context.count(refused_hellos=1)
            if isinstance(error, _RefusedError):
                self._refuse("hello", error.status)
            return
        self.is_greeted = True
        self._reply(Status.OK)
        try:
            if fast is not None and segment.ranges is None:
                self._serve_fast(fast, segment, generation)
            else:
                while self._await_request(segment, generation):
                    pass
        except StalledError:
            self._context.count(stalls=1)
        except _RefusedError as refused:
            self._context.count(bad_requests=1)
            self._refuse("request", refused.status)
            self._linger()

    def _serve_fast(self, fast: Fast, segment: ServedSegment, generation: int) -> None:
        """Serves requests as ``_await_request`` does, but in compiled code."""
        context = self._context
        how, number = fast.serve(
            self._stream.fileno, segment.fd, segment.memory, generation, self._cut, context.moved,
            context.stall_s, context.idle_s,
        )  # fmt: skip
        if how == TIMED_OUT:
            raise StalledError(0)
        if how == REFUSED:
            raise _RefusedError(Status(number))

    def _greet(self) -> tuple[ServedSegment, int]:
        raw = bytearray(protocol.HELLO_BYTES)
        self._stream.receive([memoryview(raw)], self._soon())
        hello = protocol.unpack_hello(raw)
        if hello is None:
            raise _RefusedError(Status.BAD_REQUEST)
        segment = self._context.segments.get(hello.uuid)
        if segment is None:
            raise _RefusedError(Status.GONE)
        if not hmac.compare_digest(hello.token, segment.token):
            raise _RefusedError(Status.DENIED)
        if hello.generation != segment.generation:
            raise _RefusedError(Status.GONE)
        self.client, self.number = hello.client, hello.connection
        return segment, hello.generation

    def _await_request(self, segment: ServedSegment, generation: int) -> bool:
        """Wait for the next request and serve it; False: none came for ``idle_s``."""
        raw = bytearray(protocol.REQUEST_BYTES)
        idle_until = uptime() + self._context.idle_s
        while True:
            try:
                self._stream.receive([memoryview(raw)], self._soon())
                break
            except StalledError as stalled:
                if stalled.received:
                    raise
                if uptime() >= idle_until:
                    return False
        request = protocol.unpack_request(raw)
        if request is None:
            raise _RefusedError(Status.BAD_REQUEST)
        op, count = request
        raw = bytearray(count * protocol.RANGE_BYTES)
        self._stream.receive([memoryview(raw)], self._soon())
        ranges = protocol.unpack_ranges(raw)
        total = _check(ranges, segment.size)
        if self._cut[0] or segment.generation != generation:
            raise _RefusedError(Status.GONE)
        if op is Op.READ:
            if segment.ranges is None:
                self._send_ranges(segment, ranges)
            else:
                self._send_copied(segment.ranges, ranges)
            self._context.count(reads=1, read_bytes=total)
        else:
            if segment.ranges is None:
                self._receive_ranges(segment, generation, ranges)
            else:
                self._receive_copied(segment, segment.ranges, generation, ranges)
            self._context.count(writes=1, written_bytes=total)
            self._reply(Status.OK)
        return True

    def _send_ranges(self, segment: ServedSegment, ranges: list[tuple[int, int]]) -> None:
        """Sends the status, then the ranges. ``sendfile`` lends the pages themselves to the kernel:
        the peer may get bytes that are written to them before it acknowledges. A lease outlives its
        reads, and the checksum exposes a read that outlives its lease."""
        memory = segment.memory
        gathered: list[memoryview | bytes] = [_OK]
        gathered_bytes = 0
        for offset, length in ranges:
            if length <= GATHER_BYTES:
                if len(gathered) == WINDOW_BUFFERS or gathered_bytes >= WINDOW_BYTES:
                    self._stream.send(gathered, self._soon())
                    gathered, gathered_bytes = [], 0
                gathered.append(memory[offset : offset + length])
                gathered_bytes += length
                continue
            if gathered:
                self._stream.send(gathered, self._soon(), socket.MSG_MORE)
                gathered, gathered_bytes = [], 0
            for start in range(offset, offset + length, _FILE_BYTES):
                size = min(_FILE_BYTES, offset + length - start)
                if segment.fd >= 0:
                    self._stream.send_file(segment.fd, start, size, self._soon())
                else:  # reserved huge pages, of which there is no sendfile
                    self._stream.send([memory[start : start + size]], self._soon())
        if gathered:
            self._stream.send(gathered, self._soon())

    def _receive_ranges(
        self, segment: ServedSegment, generation: int, ranges: list[tuple[int, int]]
    ) -> None:
        memory = segment.memory
        places = [memory[offset : offset + length] for offset, length in ranges]
        for window in windows(places, window_bytes=WINDOW_BYTES, window_buffers=WINDOW_BUFFERS):
            if self._cut[0] or segment.generation != generation:
                raise _RefusedError(Status.GONE)
            self._stream.receive([piece for _, piece in window], self._soon())

    def _send_copied(self, source: Ranges, ranges: list[tuple[int, int]]) -> None:
        """As ``_send_ranges``, of bytes that are not in this address space."""
        self._stream.send([_OK], self._soon(), socket.MSG_MORE)
        memory = self._copied()
        for group in _cut(ranges, len(memory)):
            parts = _parts(group, memory)
            self._copy(source.read, parts)
            self._stream.send([part for _, part in parts], self._soon())

    def _receive_copied(
        self, segment: ServedSegment, target: Ranges, generation: int,
        ranges: list[tuple[int, int]],
    ) -> None:  # fmt: skip
        memory = self._copied()
        for group in _cut(ranges, len(memory)):
            parts = _parts(group, memory)
            self._stream.receive([part for _, part in parts], self._soon())
            if self._cut[0] or segment.generation != generation:
                raise _RefusedError(Status.GONE)
            self._copy(target.write, parts)

    def _copy(
        self, copy: Callable[[list[tuple[int, memoryview]], float], None],
        parts: list[tuple[int, memoryview]],
    ) -> None:  # fmt: skip
        try:
            copy(parts, self._soon())
        except DeadlineExceededError:  # too many connections copy at once
            raise StalledError(0) from None

    def _copied(self) -> memoryview:
        """Memory for bytes on their way, which this connection keeps."""
        if self._memory is None:
            self._memory = memoryview(bytearray(_COPIED_BYTES))
        return self._memory

    def _reply(self, status: Status) -> None:
        self._stream.send([protocol.pack_status(status)], self._soon())

    def _refuse(self, what: str, status: Status) -> None:
        # After a takeover, connections of an older mount are normal; other refusals are not.
        level = logging.DEBUG if status is Status.GONE else logging.WARNING
        _log.log(
            level,
            "event=data_refused what=%s status=%s peer=%s",
            what,
            status.name,
            self._stream.peer,
        )
        self._reply(status)

    def _linger(self) -> None:
        self._stream.shutdown(socket.SHUT_WR)
        scratch = memoryview(bytearray(WINDOW_BYTES))
        deadline = uptime() + _LINGER_S
        for _ in range(_LINGER_BYTES // WINDOW_BYTES):
            self._stream.receive([scratch], deadline)

    def _soon(self) -> float:
        return uptime() + self._context.stall_s


def _check(ranges: list[tuple[int, int]], size: int) -> int:
    """The sum of the lengths. Raises _RefusedError: a range outside, or more than the segment."""
    total = 0
    for offset, length in ranges:
        if offset < SUPERBLOCK_BYTES or offset + length > size:
            raise _RefusedError(Status.INVALID_RANGE)
        total += length
    if total > size:
        raise _RefusedError(Status.INVALID_RANGE)
    return total


def _cut(ranges: list[tuple[int, int]], size_max: int) -> Iterator[list[tuple[int, int]]]:
    """The ranges in groups of at most ``size_max`` bytes and ``WINDOW_BUFFERS`` ranges; longer ones
    are cut. Ranges of no bytes are left out."""
    group: list[tuple[int, int]] = []
    room = size_max
    for start, length in ranges:
        offset, end = start, start + length
        while offset < end:
            size = min(end - offset, room)
            group.append((offset, size))
            offset += size
            room -= size
            if not room or len(group) == WINDOW_BUFFERS:
                yield group
                group, room = [], size_max
    if group:
        yield group


def _parts(group: list[tuple[int, int]], memory: memoryview) -> list[tuple[int, memoryview]]:
    """Each range's offset, and its part of ``memory``, end to end."""
    parts: list[tuple[int, memoryview]] = []
    at = 0
    for offset, size in group:
        parts.append((offset, memory[at : at + size]))
        at += size
    return parts
