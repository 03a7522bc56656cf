"""A data server that takes capabilities, and peers without a valid one."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import cast

import pytest

from kvstore import native
from kvstore.master.authorizer import assign_client_number
from kvstore.memory.header import HEADER_BYTES, SUPERBLOCK_BYTES
from kvstore.memory.segment import OwnedSegment
from kvstore.native import pure_python
from kvstore.runtime import tcp_protocol as protocol
from kvstore.runtime.clock import uptime
from kvstore.runtime.tcp_protocol import (
    NONCE_BYTES,
    PROOF_BYTES,
    RANGES_MAX,
    Extent,
    Hello,
    Op,
    TransferStatus,
)
from kvstore.security.identity import validated_identity
from kvstore.transport import tcp_connection
from kvstore.transport.tcp_server import DataServer
from tests.support.capabilities import HOLDER, extent, in_ms
from tests.support.wait import until
from tests.unit.transport.test_tcp_server import is_closed, received, status

MIB = 1 << 20
AT, SIZE = 64 << 10, 4096
"""Of the extent that a peer has a capability for."""
CLIENT = 3 << 32 | 5
RIGHTS = {Op.READ: 1, Op.WRITE: 2}


@pytest.fixture
def segment() -> Iterator[OwnedSegment]:
    segment = OwnedSegment.create(f"capable-{os.getpid()}", 4 * MIB)
    segment.memory[AT : AT + MIB] = b"s" * MIB
    yield segment
    segment.close()


class InRanges:
    """A segment as that of a device: the server reaches its bytes by ``ranges`` alone."""

    fd = -1

    def __init__(self, segment: OwnedSegment) -> None:
        self._segment = segment
        self.uuid, self.token, self.size = segment.uuid, segment.token, segment.size

    @property
    def memory(self) -> memoryview:
        return self._segment.memory[:SUPERBLOCK_BYTES]

    @property
    def ranges(self) -> InRanges:
        return self

    @property
    def generation(self) -> int:
        return self._segment.generation

    def read(self, parts: Sequence[tuple[int, memoryview]], deadline: float) -> None:
        for offset, part in parts:
            part[:] = self._segment.memory[offset : offset + len(part)]

    def write(self, parts: Sequence[tuple[int, memoryview]], deadline: float) -> None:
        for offset, part in parts:
            self._segment.memory[offset : offset + len(part)] = part


@pytest.fixture(params=["built", "slow", "ranges"])
def server(
    segment: OwnedSegment, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[DataServer]:
    monkeypatch.setattr(
        tcp_connection, "steps", pure_python if request.param == "slow" else native.steps
    )
    served: OwnedSegment = segment
    if request.param == "ranges":
        served = cast(OwnedSegment, InRanges(segment))
    server = DataServer([served], "127.0.0.1", stall_s=1.0, capabilities=True)
    server.start()
    yield server
    server.stop()


@contextlib.contextmanager
def connected(server: DataServer) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
        yield sock


@contextlib.contextmanager
def greeted(
    server: DataServer, segment: OwnedSegment, holder: int = HOLDER, connection: int = 0
) -> Iterator[socket.socket]:
    with connected(server) as sock:
        hello = hello_of(segment, holder, connection)
        sock.sendall(hello)
        sock.sendall(protocol.prove(key_of(segment, holder), nonce(sock), hello))
        assert status(sock) is TransferStatus.OK
        yield sock


def hello_of(segment: OwnedSegment, holder: int = HOLDER, connection: int = 0) -> bytes:
    place = segment.uuid, b"", segment.generation
    return protocol.pack_hello(Hello(*place, CLIENT, connection, holder))


def key_of(segment: OwnedSegment, holder: int = HOLDER) -> bytes:
    return protocol.holder_key(segment.token, segment.uuid, segment.generation, holder)


def nonce(sock: socket.socket) -> bytes:
    assert status(sock) is TransferStatus.OK
    return received(sock, NONCE_BYTES)


def of(segment: OwnedSegment, op: Op, **changed: int) -> Extent:
    return extent(segment.token, segment.generation, AT, SIZE, RIGHTS[op], **changed)


def asked(
    sock: socket.socket, op: Op, ranges: Sequence[tuple[int, int]], extents: Sequence[Extent]
) -> TransferStatus | None:
    """The status of a request, with as many bytes as it announces if it is a WRITE."""
    sock.sendall(protocol.pack_request(op, ranges, extents))
    if op is Op.WRITE:
        sock.sendall(b"e" * sum(length for _, length in ranges))
    return status(sock)


def assert_serves(server: DataServer, segment: OwnedSegment) -> None:
    """The holder is served, in the whole of its extent."""
    with greeted(server, segment) as sock:
        payload, whole = (AT + HEADER_BYTES, SIZE), (AT, HEADER_BYTES + SIZE)
        assert asked(sock, Op.WRITE, [payload, (AT, 64)], [of(segment, Op.WRITE)] * 2) is (
            TransferStatus.OK
        )
        assert asked(sock, Op.READ, [whole, (AT + 3, 0)], [of(segment, Op.READ)] * 2) is (
            TransferStatus.OK
        )
        expected = b"e" * 64 + b"s" * (HEADER_BYTES - 64) + b"e" * SIZE
        assert received(sock, len(expected)) == expected


def assert_refused(
    server: DataServer,
    segment: OwnedSegment,
    op: Op,
    bad: Extent,
    place: tuple[int, int] = (AT, 64),
    holder: int = HOLDER,
) -> None:
    """Neither ``bad`` alone, nor behind a good one, moves a byte."""
    before = segment.memory.tobytes()
    good = of(segment, op, holder=holder)
    refused = server.counters().refused_capabilities
    for ranges, extents in (([place], [bad]), ([(AT, 8), place], [good, bad])):
        with greeted(server, segment, holder) as sock:
            assert asked(sock, op, ranges, extents) is TransferStatus.NOT_ALLOWED
            sock.shutdown(socket.SHUT_WR)
            assert is_closed(sock)
    assert segment.memory.tobytes() == before
    counted = server.counters()
    assert counted.refused_capabilities == refused + 2
    assert counted.bad_requests == counted.reads == counted.writes == 0


def test_a_holder_is_served(server: DataServer, segment: OwnedSegment) -> None:
    assert_serves(server, segment)


def test_as_many_ranges_as_a_request_may_have(server: DataServer, segment: OwnedSegment) -> None:
    with greeted(server, segment) as sock:
        ranges = [(AT + index, 1) for index in range(RANGES_MAX)]
        assert asked(sock, Op.READ, ranges, [of(segment, Op.READ)] * RANGES_MAX) is (
            TransferStatus.OK
        )
        assert received(sock, RANGES_MAX) == b"s" * RANGES_MAX


@pytest.mark.parametrize("op", list(Op))
class TestRefused:
    def test_no_capability(self, server: DataServer, segment: OwnedSegment, op: Op) -> None:
        assert_refused(server, segment, op, protocol.NO_EXTENT)
        assert_refused(server, segment, op, Extent(AT, SIZE, bytes(32)))

    def test_a_forged_one(self, server: DataServer, segment: OwnedSegment, op: Op) -> None:
        good = of(segment, op)
        for at in (8, 16, 31):  # of the order, the first and the last byte of the MAC
            flipped = bytearray(good.capability)
            flipped[at] ^= 1
            assert_refused(server, segment, op, good._replace(capability=bytes(flipped)))

    def test_one_under_the_key_of_a_holder(
        self, server: DataServer, segment: OwnedSegment, op: Op
    ) -> None:
        """A holder knows its own key, and not the segment's."""
        mine = extent(key_of(segment), segment.generation, AT, SIZE, RIGHTS[op])
        assert_refused(server, segment, op, mine)

    def test_one_of_another_holder(self, server: DataServer, segment: OwnedSegment, op: Op) -> None:
        assert_refused(server, segment, op, of(segment, op, holder=HOLDER + 1))
        assert_refused(server, segment, op, of(segment, op), holder=HOLDER + 1)

    @pytest.mark.parametrize("changed", [(-1024, 0), (0, 1), (1024, 0)])
    def test_one_for_another_extent(
        self, server: DataServer, segment: OwnedSegment, op: Op, changed: tuple[int, int]
    ) -> None:
        good = of(segment, op)
        wider = good._replace(offset=good.offset + changed[0], length=good.length + changed[1])
        assert_refused(server, segment, op, wider, (AT + 1024, 8))

    @pytest.mark.parametrize(
        "place",
        [(AT - 1, 8), (AT + 8, HEADER_BYTES + SIZE), (AT + HEADER_BYTES + SIZE, 1), (MIB, 8),
         (AT + HEADER_BYTES + SIZE + 1, 0), (AT - 1, 0), (AT + 8, 2**64 - 1)],
    )  # fmt: skip
    def test_a_range_outside_of_its_extent(
        self, server: DataServer, segment: OwnedSegment, op: Op, place: tuple[int, int]
    ) -> None:
        if place[1] > MIB and op is Op.WRITE:
            return  # so many bytes follow no write
        assert_refused(server, segment, op, of(segment, op), place)

    def test_one_for_the_other_verb(
        self, server: DataServer, segment: OwnedSegment, op: Op
    ) -> None:
        other = Op.READ if op is Op.WRITE else Op.WRITE
        assert_refused(server, segment, op, of(segment, other))  # its rights are said wrongly
        good = of(segment, other)
        record = bytearray(protocol.pack_request(op, [(AT, 8)], [good]))
        record[protocol.REQUEST_BYTES + 40] = RIGHTS[other]  # and rightly
        with greeted(server, segment) as sock:
            sock.sendall(record + b"e" * 8)
            assert status(sock) is TransferStatus.NOT_ALLOWED

    def test_one_that_has_expired(self, server: DataServer, segment: OwnedSegment, op: Op) -> None:
        for expired in (in_ms(-0.001), 1, 0):
            assert_refused(server, segment, op, of(segment, op, expires_ms=expired))
        longer = of(segment, op, expires_ms=in_ms(-1))
        later = in_ms(10).to_bytes(8, "little") + longer.capability[8:]
        assert_refused(server, segment, op, longer._replace(capability=later))

    def test_one_of_an_older_generation(
        self, server: DataServer, segment: OwnedSegment, op: Op
    ) -> None:
        older = of(segment, op)
        segment.bump_generation()
        server.fence()
        assert_refused(server, segment, op, older)


@pytest.mark.parametrize("order", [1, -1])
def test_a_write_ends_when_a_capability_does(
    server: DataServer, segment: OwnedSegment, order: int
) -> None:
    """Its sender sends byte by byte, and would go on for longer than a stall."""
    with greeted(server, segment) as sock:
        both = [of(segment, Op.WRITE, expires_ms=in_ms(0.3)), of(segment, Op.WRITE)][::order]
        sock.sendall(protocol.pack_request(Op.WRITE, [(AT, SIZE), (AT, 8)], both))
        started = uptime()
        with contextlib.suppress(ConnectionError):
            while uptime() < started + 5:
                sock.sendall(b"e")
                time.sleep(0.02)
        assert 0.2 < uptime() - started < 0.9
    assert server.counters().stalls == 1
    assert bytes(segment.memory[AT : AT + SIZE]).count(b"e") < 30


def test_a_read_ends_when_its_capability_does(server: DataServer, segment: OwnedSegment) -> None:
    size = 3 * MIB
    with greeted(server, segment) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        place = segment.token, segment.generation, AT, size, RIGHTS[Op.READ]
        last = extent(*place, expires_ms=in_ms(0.3))
        for _ in range(20):  # more than sockets buffer
            sock.sendall(protocol.pack_request(Op.READ, [(AT, size)], [last]))
        deadline = uptime() + 10
        while server.connections:
            assert uptime() < deadline
            time.sleep(0.01)
    assert server.counters().stalls == 1


def test_who_is_older_than_the_order_to_wipe_does_not_write(
    server: DataServer, segment: OwnedSegment
) -> None:
    assert server.revoke_writes(segment.uuid, [AT], 7) == 0
    assert server.revoke_writes(segment.uuid, [AT], 5) == 0, "an order that was sent again"
    assert (
        server.revoke_writes(segment.uuid, [], 9) == server.revoke_writes(bytes(16), [AT], 9) == 0
    )
    assert_refused(server, segment, Op.WRITE, of(segment, Op.WRITE, order=6))
    beside = extent(segment.token, segment.generation, AT + MIB, SIZE, RIGHTS[Op.WRITE], order=6)
    with greeted(server, segment) as sock:
        for at, given in ((AT, of(segment, Op.WRITE, order=7)), (AT + MIB, beside)):
            assert asked(sock, Op.WRITE, [(at, 64)], [given]) is TransferStatus.OK
        assert asked(sock, Op.READ, [(AT, 64)], [of(segment, Op.READ)]) is TransferStatus.OK
        assert received(sock, 64) == b"e" * 64
    segment.bump_generation()
    server.fence()
    with greeted(server, segment) as sock:
        given = of(segment, Op.WRITE)
        assert asked(sock, Op.WRITE, [(AT, 64)], [given]) is TransferStatus.OK, "of another mount"


def is_written(server: DataServer, at: int) -> bool:
    return any(each.writes_to(frozenset((at,))) for each in list(server._connections))


def test_a_write_under_way_is_called_back(server: DataServer, segment: OwnedSegment) -> None:
    """The extent is another's when ``call_back`` returns."""
    beside = extent(segment.token, segment.generation, AT + MIB, SIZE, RIGHTS[Op.WRITE])
    with greeted(server, segment) as one, greeted(server, segment) as other:
        one.sendall(protocol.pack_request(Op.WRITE, [(AT, 64)], [of(segment, Op.WRITE)]) + b"x")
        other.sendall(protocol.pack_request(Op.WRITE, [(AT + MIB, 64)], [beside]) + b"y")
        for at in (AT, AT + MIB):
            until(partial(is_written, server, at))
        assert server.revoke_writes(segment.uuid, [4096, AT], 1) == 1
        segment.memory[AT : AT + 64] = b"n" * 64
        with contextlib.suppress(OSError):
            one.sendall(b"x" * 63)
        assert is_closed(one)
        assert segment.memory[AT : AT + 64] == b"n" * 64
        other.sendall(b"y" * 63)
        assert status(other) is TransferStatus.OK
        assert server.revoke_writes(segment.uuid, [AT + MIB], 2) == 0, "it is done"
        assert asked(other, Op.READ, [(AT, 1)], [of(segment, Op.READ)]) is TransferStatus.OK


@pytest.mark.parametrize("wrong", ["key", "nonce", "hello", "holder", "length"])
def test_a_wrong_proof_is_denied(server: DataServer, segment: OwnedSegment, wrong: str) -> None:
    with connected(server) as sock:
        hello = hello_of(segment, HOLDER + 1 if wrong == "holder" else HOLDER)
        sock.sendall(hello)
        given = nonce(sock)
        key = segment.token if wrong == "key" else key_of(segment)
        said = bytes(NONCE_BYTES) if wrong == "nonce" else given
        signed = hello_of(segment, connection=1) if wrong == "hello" else hello
        proof = protocol.prove(key, said, signed)
        sock.sendall(bytes(PROOF_BYTES) if wrong == "length" else proof)
        assert status(sock) is TransferStatus.DENIED
        assert is_closed(sock)
    assert server.counters().refused_hellos == 1
    assert_serves(server, segment)


def test_a_proof_is_for_one_connection(server: DataServer, segment: OwnedSegment) -> None:
    """A nonce is never given twice, so what was overheard opens no second connection."""
    with connected(server) as one, connected(server) as other:
        hello = hello_of(segment)
        one.sendall(hello)
        first = nonce(one)
        other.sendall(hello)
        assert nonce(other) != first
        proof = protocol.prove(key_of(segment), first, hello)
        other.sendall(proof)
        assert status(other) is TransferStatus.DENIED
        one.sendall(proof)
        assert status(one) is TransferStatus.OK


def test_half_a_proof_is_cut(server: DataServer, segment: OwnedSegment) -> None:
    with connected(server) as sock:
        sock.sendall(hello_of(segment))
        nonce(sock)
        sock.sendall(b"half")
        assert is_closed(sock)
    assert server.counters().refused_hellos == 1


def test_one_holder_has_half_of_the_connections(segment: OwnedSegment) -> None:
    server = DataServer([segment], "127.0.0.1", connections_max=8, capabilities=True)
    server.start()
    for _ in range(2):  # what it leaves can be had again
        with contextlib.ExitStack() as stack:
            for number in range(4):
                stack.enter_context(greeted(server, segment, connection=1 + number))
            for _ in range(2):
                with connected(server) as sock:
                    hello = hello_of(segment)
                    sock.sendall(hello)
                    sock.sendall(protocol.prove(key_of(segment), nonce(sock), hello))
                    assert status(sock) is TransferStatus.BUSY
                    assert is_closed(sock)
            until(lambda: server.connections == 4)
            with greeted(server, segment, HOLDER + 1):
                pass
        until(lambda: server.connections == 0)
    counted = server.counters()
    assert (counted.refused_busy, counted.refused_hellos) == (4, 0)
    server.stop()


def test_a_holder_of_another_mount_is_told_so(server: DataServer, segment: OwnedSegment) -> None:
    hello, key = hello_of(segment), key_of(segment)
    segment.bump_generation()
    with connected(server) as sock:
        sock.sendall(hello)
        sock.sendall(protocol.prove(key, nonce(sock), hello))
        assert status(sock) is TransferStatus.UNMOUNTED


def test_a_token_is_not_enough(server: DataServer, segment: OwnedSegment) -> None:
    with connected(server) as sock:
        hello = Hello(segment.uuid, segment.token, segment.generation)
        sock.sendall(protocol.pack_hello(hello))
        assert status(sock) is TransferStatus.DENIED
        assert is_closed(sock)
    assert server.takes_capabilities


def test_what_follows_the_holder_is_nothing(server: DataServer, segment: OwnedSegment) -> None:
    hello = bytearray(hello_of(segment))
    hello[39] = 1
    with connected(server) as sock:
        sock.sendall(hello)
        assert status(sock) is TransferStatus.BAD_REQUEST


def test_connections_of_holders_are_cut_by_their_clients_numbers(
    server: DataServer, segment: OwnedSegment
) -> None:
    """The master knows only the lower half of the number that a client with an identity chose."""
    number = assign_client_number(validated_identity("e", ["engine"]), CLIENT)
    with greeted(server, segment, connection=1) as one, greeted(server, segment, 7, 2) as other:
        assert server.close_writers([(number, 1)]) == 1
        assert is_closed(one)
        assert asked(other, Op.READ, [(AT, 1)], [of(segment, Op.READ, holder=7)]) is (
            TransferStatus.OK
        )


def test_without_capabilities_there_is_one_protocol(segment: OwnedSegment) -> None:
    server = DataServer([segment], "127.0.0.1")
    server.start()
    with connected(server) as sock:
        sock.sendall(hello_of(segment))
        assert status(sock) is TransferStatus.BAD_REQUEST
    assert not server.takes_capabilities
    server.stop()
