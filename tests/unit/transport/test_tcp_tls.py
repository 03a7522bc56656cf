"""A data server that encrypts, and peers that are not what they should be, on both ends."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvstore.calls import SegmentInfo
from kvstore.errors import (
    BusyError,
    ConfigError,
    DeadlineExceededError,
    KVStoreError,
    NodeUnreachableError,
    PermissionDeniedError,
)
from kvstore.memory.segment import OwnedSegment
from kvstore.native.interface import ReadRow, WriteRow
from kvstore.runtime.clock import uptime
from kvstore.runtime.tcp_protocol import (
    STATUS_BYTES,
    Hello,
    TransferStatus,
    pack_hello,
)
from kvstore.security.certificates import CertificateRequest
from kvstore.security.credentials import NODE_NAME
from kvstore.security.data_port_tls import ClientTls
from kvstore.security.identity import identity_of
from kvstore.security.tls_stream import TlsStream
from kvstore.transport.common import RangeCopy
from kvstore.transport.tcp import TcpTransport
from kvstore.transport.tcp_server import DataServer
from tests.support.encryption import TlsEndpoints
from tests.support.identities import ENGINE, MASTER, NODE, shake, uris
from tests.unit.transport.test_tcp_server import is_closed, wait_until

MIB = 1 << 20
STALL_S = 1.0
NAME = f"encrypted-{os.getpid()}"
SIZE = 3 * MIB


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> TlsEndpoints:
    return TlsEndpoints(tmp_path_factory.mktemp("ends"))


@pytest.fixture
def segment() -> Iterator[OwnedSegment]:
    segment = OwnedSegment.create(NAME, 8 * MIB)
    yield segment
    segment.close()


@pytest.fixture
def server(segment: OwnedSegment, ends: TlsEndpoints) -> Iterator[DataServer]:
    with serving(segment, ends) as server:
        yield server


@contextlib.contextmanager
def serving(
    segment: OwnedSegment, ends: TlsEndpoints, wanted: CertificateRequest = NODE, **settings: object
) -> Iterator[DataServer]:
    revoked = str(settings.pop("revoked", ""))
    tls = ends.node(wanted, revoked=revoked)
    at: dict[str, object] = {"stall_s": STALL_S, "connections_max": 8} | settings
    server = DataServer([segment], "127.0.0.1", tls=tls, **at)  # type: ignore[arg-type]
    server.start()
    try:
        yield server
    finally:
        server.stop()
    assert server.connections == 0


def described(segment: OwnedSegment, port: int, *, encrypts: bool = True) -> SegmentInfo:
    return SegmentInfo(
        1, segment.node, "", segment.size, segment.uuid, "", f"127.0.0.1:{port}", segment.token,
        segment.seed, segment.generation, encrypts=encrypts,
    )  # fmt: skip


@contextlib.contextmanager
def transport(tls: ClientTls | None, stall_s: float = STALL_S) -> Iterator[TcpTransport]:
    made = TcpTransport(tls=tls, stall_s=stall_s)
    yield made
    made.close()


def read(way: TcpTransport, info: SegmentInfo, size: int = 16) -> bytes:
    into = bytearray(size)
    way.read(info, [RangeCopy(MIB, memoryview(into))], uptime() + 5)
    return bytes(into)


def write(way: TcpTransport, info: SegmentInfo, data: bytes) -> None:
    way.write(info, [RangeCopy(MIB, memoryview(bytearray(data)))], uptime() + 5)


def greet(stream: TlsStream, segment: OwnedSegment) -> None:
    """Handshake, hello and the answer to it."""
    hello = pack_hello(Hello(segment.uuid, segment.token, segment.generation))
    stream.begin(uptime() + 5)
    stream.send([hello], uptime() + 5)
    stream.receive([memoryview(bytearray(STATUS_BYTES))], uptime() + 5)


def assert_serves(server: DataServer, segment: OwnedSegment, ends: TlsEndpoints) -> None:
    with transport(ends.client()) as way:
        write(way, described(segment, server.port), b"written")
        assert read(way, described(segment, server.port), 7) == b"written"


# --- who does not get in -------------------------------------------------------------------------


def test_a_client_without_tls_gets_nothing(
    server: DataServer, segment: OwnedSegment, ends: TlsEndpoints
) -> None:
    with (
        transport(ends.client()) as way,
        pytest.raises(NodeUnreachableError, match=r"(ended|broke) the tcp connection"),
    ):
        read(way, described(segment, server.port, encrypts=False))
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
        sock.sendall(pack_hello(Hello(segment.uuid, segment.token, segment.generation)))
        heard = b""
        with contextlib.suppress(ConnectionResetError):
            while some := sock.recv(100):
                heard += some
        assert not heard
    assert server.counters().refused_hellos == 2
    assert server.counters().reads == 0
    assert_serves(server, segment, ends)


def other_authority(ends: TlsEndpoints, folder: Path) -> ssl.SSLContext:
    theirs = TlsEndpoints(folder).credentials(ENGINE).client()
    theirs.check_hostname = False
    theirs.verify_mode = ssl.CERT_NONE
    return theirs


def no_certificate(ends: TlsEndpoints, folder: Path) -> ssl.SSLContext:
    del ends, folder
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def older_tls(ends: TlsEndpoints, folder: Path) -> ssl.SSLContext:
    del folder
    context = ends.credentials(ENGINE).client()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    return context


@pytest.mark.parametrize("stranger", [other_authority, no_certificate, older_tls])
def test_a_stranger_gets_no_answer_to_a_hello(
    server: DataServer,
    segment: OwnedSegment,
    ends: TlsEndpoints,
    tmp_path: Path,
    stranger: Callable[[TlsEndpoints, Path], ssl.SSLContext],
) -> None:
    context = stranger(ends, tmp_path)
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
        stream = TlsStream(sock, context, server_name=NODE_NAME)
        with pytest.raises(ConnectionError):
            greet(stream, segment)
    wait_until("refused_hellos", server, 1)
    assert server.counters().reads == 0
    assert_serves(server, segment, ends)


def test_who_has_another_authority_is_told_so(
    server: DataServer, segment: OwnedSegment, tmp_path: Path
) -> None:
    with (
        transport(TlsEndpoints(tmp_path).client()) as way,
        pytest.raises(PermissionDeniedError, match="certificate") as caught,
    ):
        read(way, described(segment, server.port))
    assert f"node {segment.node}" in caught.value.message
    assert caught.value.fields["quiesced"] == 1


def test_who_has_no_identity_is_told_what_to_do(server: DataServer, segment: OwnedSegment) -> None:
    with (
        transport(None) as way,
        pytest.raises(PermissionDeniedError, match="encrypts its data port") as caught,
    ):
        read(way, described(segment, server.port))
    assert "KVSTORE_AUTH" in caught.value.advice
    assert caught.value.fields["quiesced"] == 1


def test_the_revoked_are_denied(segment: OwnedSegment, ends: TlsEndpoints, tmp_path: Path) -> None:
    """From their next connection on; other engines are served."""
    credentials = ends.credentials(ENGINE)
    _, seen = shake(credentials.client(), ends.credentials(NODE).server(), NODE_NAME)
    revoked = tmp_path / "revoked"
    revoked.write_text(identity_of(uris(seen)).number + "\n")
    with serving(segment, ends, revoked=revoked) as server:
        with transport(ClientTls(credentials)) as way, pytest.raises(PermissionDeniedError):
            read(way, described(segment, server.port))
        assert server.counters().refused_hellos == 1
        assert_serves(server, segment, ends)


def test_a_handshake_that_stalls_is_ended(
    server: DataServer, segment: OwnedSegment, ends: TlsEndpoints
) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
        sock.sendall(b"\x16\x03\x01\x02")
        assert is_closed(sock)
    assert server.counters().refused_hellos == 1
    assert_serves(server, segment, ends)


def test_strangers_make_room(segment: OwnedSegment, ends: TlsEndpoints) -> None:
    """Also those within a handshake; who finds none is told, before TLS."""
    info = None
    with serving(segment, ends, connections_max=1, stall_s=30.0) as server:
        info = described(segment, server.port)
        with (
            socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock,
            transport(ends.client()) as way,
        ):
            sock.sendall(b"\x16")
            wait_until("connections", server, 1)
            assert len(read(way, info)) == 16
            assert is_closed(sock)
            with transport(ends.client()) as late, pytest.raises(BusyError):
                read(late, info)


# --- what is no node -----------------------------------------------------------------------------


@pytest.mark.parametrize("wanted", [ENGINE, MASTER])
def test_who_is_no_node_does_not_start_as_one(
    ends: TlsEndpoints, wanted: CertificateRequest
) -> None:
    with pytest.raises(ConfigError, match=f"not one that clients accept from {NODE_NAME}") as error:
        ends.node(wanted)
    assert "--role node" in error.value.advice


def test_the_node_of_another_name_gets_no_byte(segment: OwnedSegment, ends: TlsEndpoints) -> None:
    other = CertificateRequest("other", ("node",), nodes=("other-*",))
    with (
        serving(segment, ends, other) as server,
        transport(ends.client()) as way,
        pytest.raises(PermissionDeniedError, match="identity of another node"),
    ):
        write(way, described(segment, server.port), b"secret")
    assert server.counters().writes == 0
    own = CertificateRequest("own", ("node",), nodes=("encrypted-*",))
    with serving(segment, ends, own) as server:
        assert_serves(server, segment, ends)


def test_a_node_has_the_identity_with_which_it_has_joined(
    segment: OwnedSegment, ends: TlsEndpoints
) -> None:
    """Each server here gets a new certificate, so the first one is one that was renewed."""
    with serving(segment, ends) as server, transport(ends.client()) as way:
        info = described(segment, server.port)
        write(way, info._replace(certified=f"kvstore:{NODE.name}"), b"renewed")
    with (
        serving(segment, ends) as server,
        transport(ends.client()) as way,
        pytest.raises(PermissionDeniedError, match="has joined as kvstore:other"),
    ):
        write(way, described(segment, server.port)._replace(certified="kvstore:other"), b"secret")
    assert server.counters().writes == 0


def test_a_client_that_demands_encryption_connects_to_no_other_node(
    segment: OwnedSegment, ends: TlsEndpoints
) -> None:
    demanding = ClientTls(ends.credentials(ENGINE), demands=True)
    with serving(segment, ends) as server, transport(demanding) as way:
        plain = described(segment, server.port, encrypts=False)
        with pytest.raises(NodeUnreachableError, match="does not encrypt its data port") as error:
            write(way, plain, b"secret")
        assert error.value.fields["tried"] == 0, "the master is not told that the node fails"
        assert "--data-encryption tls" in error.value.advice
        assert server.counters().connections == 0
        write(way, described(segment, server.port), b"secret")


def test_the_identity_that_joined_is_the_one_that_is_accepted(ends: TlsEndpoints) -> None:
    client = ends.client()
    ours = {"subjectAltName": (("URI", "kvstore:node/n?id=3f0a"),)}
    assert client.accepts(ours, "any", "kvstore:n")
    assert not client.accepts(ours, "any", "kvstore:n?id=3f0a")
    for other in ("kvstore:engine/e", "kvstore:none", "spiffe://prod/node"):
        assert not client.accepts({"subjectAltName": (("URI", other),)}, "any")
    assert not ends.node().accepts({"subjectAltName": (("URI", "spiffe://prod/e"),)})


@contextlib.contextmanager
def listening(serve: Callable[[socket.socket], None]) -> Iterator[int]:
    """The port of a server that hands its connections to ``serve``, one after the other."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    with listener.accept()[0] as sock:
                        sock.settimeout(10)
                        with contextlib.suppress(OSError):
                            serve(sock)

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_no_secret_is_told_to_a_server_without_tls(
    segment: OwnedSegment, ends: TlsEndpoints
) -> None:
    """There is no way back to plain, whatever the other end says."""
    heard = bytearray()

    def serve(sock: socket.socket) -> None:
        heard.extend(sock.recv(1 << 16))
        sock.sendall(b"KVdt" + bytes([TransferStatus.BAD_REQUEST, 0, 0, 0]))
        while some := sock.recv(1 << 16):
            heard.extend(some)

    with (
        listening(serve) as port,
        transport(ends.client()) as way,
        pytest.raises(NodeUnreachableError, match="does not speak TLS on its data port") as caught,
    ):
        write(way, described(segment, port), b"secret")
    assert "--data-encryption tls" in caught.value.advice
    assert heard[:2] == b"\x16\x03"
    assert segment.token not in heard
    assert segment.uuid not in heard
    assert b"secret" not in heard


def test_a_node_whose_handshake_stalls_is_given_up(
    segment: OwnedSegment, ends: TlsEndpoints
) -> None:
    def serve(sock: socket.socket) -> None:
        while sock.recv(1 << 16):
            pass

    with listening(serve) as port, transport(ends.client(), stall_s=0.2) as way:
        with pytest.raises(NodeUnreachableError) as caught:
            read(way, described(segment, port))
        assert caught.value.fields["silent_ms"] == 200
        with pytest.raises(DeadlineExceededError):
            way.read(
                described(segment, port), [RangeCopy(MIB, memoryview(bytearray(1)))], uptime() + 0.1
            )


# --- bytes that are changed on their way ---------------------------------------------------------


class Changer:
    """Between client and server: flips one bit of what goes ``to`` the client or the server, at
    ``at``, counted from the beginning of the connection."""

    def __init__(self, port: int, to: str, at: int) -> None:
        self._port, self._to, self._at = port, to, at

    def serve(self, client: socket.socket) -> None:
        with socket.create_connection(("127.0.0.1", self._port), timeout=10) as server:
            back = threading.Thread(target=self._hand_on, args=(server, client, "client"))
            back.start()
            self._hand_on(client, server, "server")
            back.join()

    def _hand_on(self, one: socket.socket, other: socket.socket, to: str) -> None:
        seen = 0
        with contextlib.suppress(OSError):
            while some := bytearray(one.recv(64 << 10)):
                if to == self._to and 0 <= self._at - seen < len(some):
                    some[self._at - seen] ^= 4
                seen += len(some)
                other.sendall(some)
        for sock in (one, other):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("to", ["client", "server"])
@pytest.mark.parametrize("at", [3, 700, 5_000, 40_000, 2 * MIB])
def test_a_changed_bit_never_gets_through(
    server: DataServer, segment: OwnedSegment, ends: TlsEndpoints, to: str, at: int
) -> None:
    """In the handshake, in a request, in bytes of objects: an error, and no wrong byte."""
    payload = os.urandom(SIZE)
    with transport(ends.client(), stall_s=5.0) as honest:
        row: WriteRow = (MIB, SIZE, 1, 1, b"k", [memoryview(payload)], b"", b"d", b"")
        honest.write_objects(described(segment, server.port), "ns", [row], uptime() + 10)
    before = bytes(segment.memory[MIB : MIB + SIZE])
    with (
        listening(Changer(server.port, to, at).serve) as port,
        transport(ends.client(), stall_s=5.0) as way,
    ):
        into = bytearray(SIZE)
        reading: ReadRow = (MIB, SIZE, 1, 1, b"k", [memoryview(into)], b"")
        other = described(segment, port)
        if to == "client":
            with pytest.raises(KVStoreError):
                way.read_objects(other, "ns", [reading], True, uptime() + 10)
            landed = len(bytes(into).rstrip(b"\0"))
            assert into[:landed] == payload[:landed]
        else:
            writing: WriteRow = (MIB, SIZE, 1, 1, b"k", [memoryview(payload)], b"", b"d", b"")
            with pytest.raises(KVStoreError):
                way.write_objects(other, "ns", [writing], uptime() + 10)
    server.fence()
    after = bytes(segment.memory[MIB + 1024 : MIB + SIZE])
    assert after == before[1024:], "what was written is what was there"


# --- the end -------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["fence", "cut", "stop"])
def test_nothing_lands_after_the_end(
    server: DataServer, segment: OwnedSegment, ends: TlsEndpoints, how: str
) -> None:
    """A writer is under way, with bytes that are received and not decrypted yet."""
    begun, info = threading.Event(), described(segment, server.port)

    def writing() -> None:
        with transport(ends.client()) as way:
            for number in range(1_000_000):
                write(way, info, bytes([1 + number % 255]) * SIZE)
                begun.set()

    with ThreadPoolExecutor(1) as pool:
        writer = pool.submit(writing)
        assert begun.wait(10)
        segment.bump_generation()  # so it does not come back
        if how == "cut":
            server.close_writers([(0, 0)])
        elif how == "fence":
            server.fence()
        else:
            server.stop()
        seen = bytes(segment.memory[MIB : MIB + SIZE])
        with pytest.raises(KVStoreError):
            writer.result(20)
    assert bytes(segment.memory[MIB : MIB + SIZE]) == seen


def test_an_end_wakes_a_handshake(server: DataServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
        sock.sendall(b"\x16")
        wait_until("connections", server, 1)
        started = uptime()
        server.stop()
        assert uptime() - started < STALL_S / 2
        assert is_closed(sock)
