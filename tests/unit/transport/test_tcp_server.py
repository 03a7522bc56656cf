"""The data server against peers that do not keep to the protocol, on purpose or not."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore import native
from kvstore.errors import AddressInUseError, StartupError
from kvstore.memory.header import SUPERBLOCK_BYTES
from kvstore.memory.segment import OwnedSegment
from kvstore.native import pure_python
from kvstore.runtime.clock import uptime
from kvstore.runtime.tcp_protocol import (
    RANGES_MAX,
    STATUS_BYTES,
    Hello,
    Op,
    TransferStatus,
    pack_hello,
    pack_request,
    pack_status,
    unpack_status,
)
from kvstore.transport import tcp_connection
from kvstore.transport.tcp_server import DataServer

MIB = 1 << 20
STALL_S = 1.0


@pytest.fixture
def segment() -> Iterator[OwnedSegment]:
    segment = OwnedSegment.create(f"server-{os.getpid()}", 4 * MIB)
    yield segment
    segment.close()


@pytest.fixture(params=[native.steps, pure_python], ids=["built", "slow"])
def server(
    segment: OwnedSegment, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[DataServer]:
    monkeypatch.setattr(tcp_connection, "steps", request.param)
    server = DataServer([segment], "127.0.0.1", stall_s=STALL_S, connections_max=8)
    server.start()
    yield server
    server.stop()
    assert server.connections == 0


@contextlib.contextmanager
def connected(server: DataServer) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
        yield sock


@contextlib.contextmanager
def greeted(
    server: DataServer, segment: OwnedSegment, client: int = 0, connection: int = 0
) -> Iterator[socket.socket]:
    with connected(server) as sock:
        sock.sendall(hello(segment, client, connection))
        assert status(sock) is TransferStatus.OK
        yield sock


def hello(segment: OwnedSegment, client: int = 0, connection: int = 0) -> bytes:
    number = client, connection
    return pack_hello(Hello(segment.uuid, segment.token, segment.generation, *number))


def status(sock: socket.socket) -> TransferStatus | None:
    return unpack_status(received(sock, STATUS_BYTES))


def received(sock: socket.socket, size: int) -> bytes:
    raw = b""
    while len(raw) < size:
        part = sock.recv(size - len(raw))
        assert part, f"closed after {len(raw)} of {size} bytes"
        raw += part
    return raw


def is_closed(sock: socket.socket) -> bool:
    """Waits for the end; fails on a byte or a time-out."""
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def wait_until(condition: str, server: DataServer, wanted: int) -> None:
    """For a counter that the server's thread is about to reach."""
    deadline = uptime() + 10
    while getattr(server.counters(), condition) < wanted:
        assert uptime() < deadline, server.counters()
        time.sleep(0.001)


def assert_serves(server: DataServer, segment: OwnedSegment) -> None:
    """Another client is served as if nothing had happened."""
    with greeted(server, segment) as sock:
        sock.sendall(pack_request(Op.WRITE, [(8192, 5)]) + b"hello")
        assert status(sock) is TransferStatus.OK
        sock.sendall(pack_request(Op.READ, [(8192, 5), (8193, 3), (8192, 0)]))
        assert status(sock) is TransferStatus.OK
        assert received(sock, 8) == b"helloell"


def test_a_connection_serves_many_requests(server: DataServer, segment: OwnedSegment) -> None:
    payload = random.Random(0).randbytes(2 * MIB)
    with greeted(server, segment) as sock:
        for _ in range(3):
            sock.sendall(pack_request(Op.WRITE, [(MIB, MIB), (SUPERBLOCK_BYTES, MIB - 4096)]))
            sock.sendall(payload[: 2 * MIB - 4096])
            assert status(sock) is TransferStatus.OK
            ranges = [(MIB, 10), (MIB, MIB), (MIB + 5, 33_000), (SUPERBLOCK_BYTES, 7)]
            sock.sendall(pack_request(Op.READ, ranges))
            assert status(sock) is TransferStatus.OK
            expected = payload[:10] + payload[:MIB] + payload[5:33_005] + payload[MIB : MIB + 7]
            assert received(sock, len(expected)) == expected
    wait_until("reads", server, 3)  # an answer is counted after it was sent
    counters = server.counters()
    assert (counters.reads, counters.writes) == (3, 3)
    assert counters.written_bytes == 3 * (2 * MIB - 4096)
    assert counters.refused_hellos == counters.bad_requests == 0


@pytest.mark.parametrize(
    ("changed", "wanted"),
    [
        ({"token": bytes(16)}, TransferStatus.DENIED),
        ({"uuid": bytes(16)}, TransferStatus.UNMOUNTED),
        ({"generation": 2}, TransferStatus.UNMOUNTED),
        ({"generation": 0}, TransferStatus.UNMOUNTED),
    ],
)
def test_a_wrong_hello_is_refused_and_counted(
    server: DataServer,
    segment: OwnedSegment,
    changed: dict[str, bytes | int],
    wanted: TransferStatus,
) -> None:
    right = Hello(segment.uuid, segment.token, segment.generation)
    with connected(server) as sock:
        sock.sendall(pack_hello(right._replace(**changed)))  # type: ignore[arg-type]
        assert status(sock) is wanted
        assert is_closed(sock)
    assert server.counters().refused_hellos == 1
    assert_serves(server, segment)


@given(st.binary(max_size=200))
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_arbitrary_bytes_instead_of_a_hello(
    server: DataServer, segment: OwnedSegment, raw: bytes
) -> None:
    before = segment.memory.tobytes()
    with connected(server) as sock:
        sock.sendall(raw)
        sock.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(100) in (b"", pack_status(TransferStatus.BAD_REQUEST))
    assert segment.memory.tobytes() == before


@given(st.binary(max_size=200))
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_arbitrary_bytes_instead_of_a_request(
    server: DataServer, segment: OwnedSegment, raw: bytes
) -> None:
    before = segment.memory.tobytes()
    with greeted(server, segment) as sock:
        sock.sendall(raw)
        sock.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(100) in (b"", pack_status(TransferStatus.BAD_REQUEST))
    assert segment.memory.tobytes() == before


@pytest.mark.parametrize(
    "raw",
    [
        struct.pack("<4sHHI", b"KVdt", 1, 0, 0),
        struct.pack("<4sHHI", b"KVdt", 1, 0, RANGES_MAX + 1),
        struct.pack("<4sHHI", b"KVdt", 1, 0, 2**32 - 1),
        struct.pack("<4sHHI", b"KVdt", 3, 0, 1),
        struct.pack("<4sHHI", b"KVdt", 1, 1, 1),
        struct.pack("<4sHHI", b"kvdt", 1, 0, 1),
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
def test_what_is_no_request_is_refused(
    server: DataServer, segment: OwnedSegment, raw: bytes
) -> None:
    with greeted(server, segment) as sock:
        sock.sendall(raw)
        assert status(sock) is TransferStatus.BAD_REQUEST
        assert is_closed(sock)
    wait_until("bad_requests", server, 1)
    assert_serves(server, segment)


@pytest.mark.parametrize("op", list(Op))
@pytest.mark.parametrize(
    "bad",
    [
        (SUPERBLOCK_BYTES, 4 << 30),
        (SUPERBLOCK_BYTES, 2**64 - SUPERBLOCK_BYTES),
        (2**64 - 1, 2),
        (0, 16),
        (SUPERBLOCK_BYTES - 1, 2),
        (4 * MIB - 1, 2),
        (4 * MIB + 1, 0),
    ],
)
def test_a_range_outside_moves_nothing(
    server: DataServer, segment: OwnedSegment, op: Op, bad: tuple[int, int]
) -> None:
    before = segment.memory.tobytes()
    with greeted(server, segment) as sock:
        sock.sendall(pack_request(op, [(8192, 4), bad]) + b"evil" * 100)
        assert status(sock) is TransferStatus.INVALID_RANGE
        sock.shutdown(socket.SHUT_WR)
        assert is_closed(sock)
    wait_until("bad_requests", server, 1)
    assert segment.memory.tobytes() == before
    assert_serves(server, segment)


def test_ranges_that_sum_up_to_too_much(server: DataServer, segment: OwnedSegment) -> None:
    with greeted(server, segment) as sock:
        sock.sendall(pack_request(Op.READ, [(MIB, 3 * MIB)] * RANGES_MAX))
        assert status(sock) is TransferStatus.INVALID_RANGE
    assert_serves(server, segment)


def test_the_sender_of_a_refused_write_gets_to_read_why(
    server: DataServer, segment: OwnedSegment
) -> None:
    """It sends all of its bytes before it listens."""
    with greeted(server, segment) as sock:
        sock.sendall(pack_request(Op.WRITE, [(0, 3 * MIB)]))
        sock.sendall(bytes(3 * MIB))
        assert status(sock) is TransferStatus.INVALID_RANGE


@pytest.mark.parametrize(
    "part",
    [
        b"",
        b"KVdt",
        pack_request(Op.READ, [(8192, 4)])[:-1],
        # Elsewhere than what the others write: its bytes may land after theirs.
        pack_request(Op.WRITE, [(MIB, 4)]) + b"abc",
    ],
)
def test_half_a_request_is_cut_and_harms_nobody(
    server: DataServer, segment: OwnedSegment, part: bytes
) -> None:
    with greeted(server, segment) as sock:
        sock.sendall(part)
        assert_serves(server, segment)
        if part:
            assert is_closed(sock)
            wait_until("stalls", server, 1)
        else:  # between requests there is no hurry
            sock.sendall(pack_request(Op.READ, [(8192, 5)]))
            assert status(sock) is TransferStatus.OK


def test_half_a_hello_is_cut(server: DataServer, segment: OwnedSegment) -> None:
    with connected(server) as sock:
        sock.sendall(hello(segment)[:-1])
        assert is_closed(sock)
    assert server.counters().refused_hellos == 1


def test_one_byte_at_a_time_is_too_slow(server: DataServer, segment: OwnedSegment) -> None:
    """The bound is on the whole hello, not on the silence between its bytes."""
    start = uptime()
    with connected(server) as sock, contextlib.suppress(ConnectionError):
        for byte in hello(segment)[:-1]:
            sock.sendall(bytes([byte]))
            time.sleep(STALL_S / 20)
        pytest.fail("it listened to all of it")
    assert uptime() - start < 10 * STALL_S


def test_a_reader_that_does_not_read_is_cut(server: DataServer, segment: OwnedSegment) -> None:
    with greeted(server, segment) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        for _ in range(20):
            sock.sendall(pack_request(Op.READ, [(MIB, 3 * MIB)]))
        wait_until("stalls", server, 1)
        assert_serves(server, segment)


def test_a_writer_that_leaves_has_written_what_it_sent(
    server: DataServer, segment: OwnedSegment
) -> None:
    with greeted(server, segment) as sock:
        sock.sendall(pack_request(Op.WRITE, [(8192, 5), (MIB, 5)]) + b"firstse")
    deadline = uptime() + 10
    while server.connections:
        assert uptime() < deadline
        time.sleep(0.001)
    assert bytes(segment.memory[8192:8197]) == b"first"
    assert bytes(segment.memory[MIB : MIB + 5]) == b"se\0\0\0"
    assert server.counters().writes == 0
    assert_serves(server, segment)


def test_an_idle_connection_is_closed(segment: OwnedSegment) -> None:
    server = DataServer([segment], "127.0.0.1", stall_s=0.05, idle_s=0.1)
    server.start()
    with greeted(server, segment) as sock:
        assert is_closed(sock)
    assert server.counters().stalls == 0
    server.stop()


def test_too_many_connections_are_refused_at_once(
    server: DataServer, segment: OwnedSegment
) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(greeted(server, segment))
        for _ in range(3):
            with connected(server) as sock:
                assert status(sock) is TransferStatus.BUSY
                assert is_closed(sock)
    counters = server.counters()
    assert (counters.connections, counters.refused_busy) == (11, 3)


def test_strangers_cannot_take_all_connections(segment: OwnedSegment) -> None:
    """When it is full, whoever has not shown a token has to go."""
    server = DataServer([segment], "127.0.0.1", connections_max=4)
    server.start()
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(connected(server)) for _ in range(9)]
        assert_serves(server, segment)
        assert all(is_closed(each) for each in strangers[:6])
    server.stop()


def test_after_a_fence_no_older_byte_lands(server: DataServer, segment: OwnedSegment) -> None:
    """A writer in the middle of its request goes on sending; nothing of that reaches memory."""
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(greeted(server, segment)) for _ in range(4)]
        for sock in writers:
            sock.sendall(pack_request(Op.WRITE, [(MIB, 2 * MIB)]) + b"x" * 1000)
        segment.bump_generation()
        server.fence()
        assert server.connections == 0
        segment.memory[MIB : 3 * MIB] = bytes(2 * MIB)
        for sock in writers:
            with contextlib.suppress(ConnectionError):
                sock.sendall(b"y" * MIB)
        for sock in writers:
            with contextlib.suppress(ConnectionError):
                while sock.recv(4096):
                    pass
        assert bytes(segment.memory[MIB : 3 * MIB]) == bytes(2 * MIB)
        assert_serves(server, segment)


@pytest.mark.parametrize(
    ("writers", "ended"),
    [
        ([(1, 1)], {(1, 1)}),
        ([(1, 0)], {(1, 1), (1, 2)}),
        ([(2, 2)], set()),
        ([(2, 1), (1, 2), (9, 0)], {(2, 1), (1, 2)}),
        ([(0, 0)], {(1, 1), (1, 2), (2, 1), (0, 0)}),
    ],
)
def test_only_connections_of_those_writers_are_cut(
    server: DataServer,
    segment: OwnedSegment,
    writers: list[tuple[int, int]],
    ended: set[tuple[int, int]],
) -> None:
    numbers = [(1, 1), (1, 2), (2, 1), (0, 0)]
    with contextlib.ExitStack() as stack:
        peers = {each: stack.enter_context(greeted(server, segment, *each)) for each in numbers}
        assert server.close_writers(writers) == len(ended)
        for number, sock in peers.items():
            if number in ended:
                assert is_closed(sock)
            else:
                sock.sendall(pack_request(Op.READ, [(8192, 5)]))
                assert status(sock) is TransferStatus.OK
    assert_serves(server, segment)


@pytest.mark.parametrize("sent", [b"", b"x" * 1000], ids=["nothing", "some"])
def test_after_a_cut_no_byte_lands_that_was_on_its_way(
    server: DataServer, segment: OwnedSegment, sent: bytes
) -> None:
    """Neither the rest of a write that has begun, nor a write of which nothing had come."""
    with greeted(server, segment, 1, 5) as sock:
        request = pack_request(Op.WRITE, [(MIB, 2 * MIB)]) if sent else b""
        sock.sendall(request + sent)
        deadline = uptime() + 10
        while bytes(segment.memory[MIB : MIB + len(sent)]) != sent:
            assert uptime() < deadline
            time.sleep(0.001)
        assert server.close_writers([(1, 5)]) == 1
        segment.memory[MIB : 3 * MIB] = bytes(2 * MIB)
        with contextlib.suppress(ConnectionError):
            for _ in range(3):
                sock.sendall(b"y" * MIB if sent else pack_request(Op.WRITE, [(MIB, 1)]) + b"y")
            sock.recv(4096)
        assert server.connections == 0
        assert bytes(segment.memory[MIB : 3 * MIB]) == bytes(2 * MIB)
    assert_serves(server, segment)


def test_a_read_that_is_being_answered_outlives_a_cut(
    server: DataServer, segment: OwnedSegment
) -> None:
    size = 3 * MIB
    with greeted(server, segment, 1, 5) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        sock.sendall(pack_request(Op.READ, [(SUPERBLOCK_BYTES, size)]))
        assert status(sock) is TransferStatus.OK
        cutting = threading.Thread(target=server.close_writers, args=([(1, 0)],))
        cutting.start()
        assert received(sock, size) == bytes(segment.memory[SUPERBLOCK_BYTES:][:size])
        assert is_closed(sock)
        cutting.join()


def test_a_reader_that_does_not_read_holds_no_cut_up(segment: OwnedSegment) -> None:
    server = DataServer([segment], "127.0.0.1")
    server.start()
    with greeted(server, segment, 1, 5) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        for _ in range(20):
            sock.sendall(pack_request(Op.READ, [(MIB, 3 * MIB)]))
        start = uptime()
        assert server.close_writers([(1, 5)]) == 1
        assert uptime() - start < 4
        assert server.connections == 0
    server.stop()


def test_a_new_generation_ends_a_write_without_a_fence(
    server: DataServer, segment: OwnedSegment
) -> None:
    with greeted(server, segment) as sock:
        sock.sendall(pack_request(Op.WRITE, [(MIB, 2 * MIB)]) + b"x" * MIB)
        deadline = uptime() + 10
        while segment.memory[2 * MIB - 1] != ord("x"):
            assert uptime() < deadline
            time.sleep(0.001)
        segment.bump_generation()
        # It may be receiving the next piece already; whatever is asked after that is refused.
        sock.sendall(b"x" * MIB)
        first = status(sock)
        if first is TransferStatus.OK:
            sock.sendall(pack_request(Op.READ, [(MIB, 1)]))
            first = status(sock)
        assert first is TransferStatus.UNMOUNTED


@pytest.mark.parametrize("op", list(Op))
def test_a_request_under_an_older_generation_is_refused(
    server: DataServer, segment: OwnedSegment, op: Op
) -> None:
    """Also before the node has ended the connection."""
    with greeted(server, segment) as sock:
        segment.bump_generation()
        sock.sendall(pack_request(op, [(8192, 1)]) + (b"x" if op is Op.WRITE else b""))
        assert status(sock) is TransferStatus.UNMOUNTED
    assert segment.memory[8192] == 0


def test_stopping_ends_everything_and_twice_is_once(segment: OwnedSegment) -> None:
    server = DataServer([segment], "127.0.0.1")
    server.start()
    port, threads = server.port, threading.active_count()
    with contextlib.ExitStack() as stack:
        idle = stack.enter_context(greeted(server, segment))
        silent = stack.enter_context(connected(server))
        busy = stack.enter_context(greeted(server, segment))
        busy.sendall(pack_request(Op.READ, [(MIB, 3 * MIB)]) * 20)
        start = uptime()
        server.stop()
        server.stop()
        assert uptime() - start < 2
        assert is_closed(idle)
        assert is_closed(silent)
    assert threading.active_count() < threads
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


def test_a_port_in_use_is_said(server: DataServer, segment: OwnedSegment) -> None:
    second = DataServer([segment], "127.0.0.1", server.port)
    with pytest.raises(AddressInUseError) as caught:
        second.start()
    assert caught.value.fields["port"] == server.port
    second.stop()


def test_an_address_that_is_not_ours_is_said(segment: OwnedSegment) -> None:
    server = DataServer([segment], "192.0.2.1")
    with pytest.raises(StartupError):
        server.start()
    server.stop()
