"""A stream within TLS: what it says arrives whole, or not at all."""

from __future__ import annotations

import contextlib
import random
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvstore.runtime.clock import uptime
from kvstore.runtime.stream import ConnectionEndedError, StalledError
from kvstore.security.certificates import CertificateRequest
from kvstore.security.tls_stream import BUSY, TlsError, TlsStream
from tests.support.encryption import TlsEndpoints
from tests.support.identities import ENGINE, MASTER

MIB = 1 << 20
SIZES = [0, 1, 5, (16 << 10) - 1, 16 << 10, (16 << 10) + 1, 128 << 10, MIB + 3]


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> TlsEndpoints:
    return TlsEndpoints(tmp_path_factory.mktemp("ends"))


def soon(seconds: float = 10.0) -> float:
    return uptime() + seconds


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        return one, listener.accept()[0]


def both(ends: TlsEndpoints, one: socket.socket, two: socket.socket) -> tuple[TlsStream, TlsStream]:
    """The streams of client and node, after their handshake."""
    client = ends.client().stream(one, 5.0)
    node = ends.node().stream(two)
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(node.begin, soon())
        client.begin(soon())
        done.result()
    return client, node


@contextlib.contextmanager
def pair(ends: TlsEndpoints) -> Iterator[tuple[TlsStream, TlsStream]]:
    client, node = both(ends, *connected())
    yield client, node
    client.close()
    node.close()


def received(stream: TlsStream, *sizes: int) -> list[bytes]:
    buffers = [memoryview(bytearray(size)) for size in sizes]
    stream.receive(buffers, soon())
    return [bytes(each) for each in buffers]


@pytest.mark.parametrize("cut", ["as sent", "otherwise"])
def test_what_one_end_sends_the_other_receives(ends: TlsEndpoints, cut: str) -> None:
    parts = [random.Random(size).randbytes(size) for size in SIZES]
    total = sum(SIZES)
    with pair(ends) as (client, node), ThreadPoolExecutor(1) as pool:
        for one, other in ((client, node), (node, client)):
            sent = pool.submit(one.send, parts, soon())
            sizes = SIZES if cut == "as sent" else [7, total // 2, total - 7 - total // 2]
            assert b"".join(received(other, *sizes)) == b"".join(parts)
            sent.result()
        assert client.is_idle()
        assert node.is_idle()


def test_small_buffers_share_a_record_until_the_last(ends: TlsEndpoints) -> None:
    with pair(ends) as (client, node):
        client.send([b"first"], soon(), socket.MSG_MORE)
        with pytest.raises(StalledError) as caught:
            node.receive([memoryview(bytearray(1))], soon(0.05))
        assert caught.value.received == 0
        client.send([b"second"], soon())
        assert received(node, 11) == [b"firstsecond"]


def test_bytes_that_nobody_has_asked_for_are_noticed(ends: TlsEndpoints) -> None:
    with pair(ends) as (client, node):
        node.send([b"0123456789"], soon())
        assert received(client, 3) == [b"012"]
        assert not client.is_idle(), "the rest is decrypted already"


def test_each_end_sees_who_the_other_is(ends: TlsEndpoints) -> None:
    with pair(ends) as (client, node):
        assert ends.client().accepts(client.certificate, "n")
        assert ends.node().accepts(node.certificate)


class Between:
    """Hands bytes on from one socket to another, and changes what it is told to."""

    def __init__(self, change: Callable[[bytes], bytes]) -> None:
        """``change``: of each piece from the node to the client."""
        self.client, self._left = connected()
        self._right, self.node = connected()
        self._threads = [
            threading.Thread(target=self._hand_on, args=(self._left, self._right, bytes)),
            threading.Thread(target=self._hand_on, args=(self._right, self._left, change)),
        ]
        for thread in self._threads:
            thread.start()

    def _hand_on(
        self, one: socket.socket, other: socket.socket, change: Callable[[bytes], bytes]
    ) -> None:
        with contextlib.suppress(OSError):
            while some := one.recv(64 << 10):
                other.sendall(change(some))
            other.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for thread in self._threads:
            thread.join()
        self._left.close()
        self._right.close()


def test_a_changed_byte_is_an_error_and_lands_nowhere(ends: TlsEndpoints) -> None:
    changes = False

    def change(some: bytes) -> bytes:
        return some[:50] + bytes([some[50] ^ 1]) + some[51:] if changes else some

    between = Between(change)
    client, node = both(ends, between.client, between.node)
    node.send([b"a" * 1000], soon())
    assert received(client, 1000) == [b"a" * 1000]
    changes = True
    node.send([b"b" * 1000], soon())
    into = bytearray(1000)
    with pytest.raises(TlsError, match=r"bad record mac|record layer failure"):
        client.receive([memoryview(into)], soon())
    assert into == bytes(1000)
    client.close()
    node.close()
    between.close()


@pytest.mark.parametrize("how", ["closed", "announced"])
def test_an_end_within_a_message(ends: TlsEndpoints, how: str) -> None:
    """Also one that TLS announces, which some programs do: it is no reason to ask for ever."""
    with pair(ends) as (client, node):
        node.send([b"12345"], soon())
        if how == "announced":
            with contextlib.suppress(ssl.SSLWantReadError):
                node._tls.settimeout(0)
                node._tls.unwrap()
        else:
            node.shutdown()
        into = bytearray(9)
        with pytest.raises(ConnectionEndedError):
            client.receive([memoryview(into)], soon())
        assert into == b"12345" + bytes(4)


def test_a_call_that_waits_is_woken_by_a_shutdown(ends: TlsEndpoints) -> None:
    with pair(ends) as (client, _), ThreadPoolExecutor(1) as pool:
        waits = pool.submit(client.receive, [memoryview(bytearray(1))], soon(30))
        client.shutdown()
        with pytest.raises((ConnectionEndedError, OSError)):
            waits.result(10)


def test_a_peer_that_takes_nothing_stalls_the_sender(ends: TlsEndpoints) -> None:
    with pair(ends) as (client, _), pytest.raises(StalledError):
        client.send([bytes(32 * MIB)], soon(0.2))


def test_a_handshake_that_stalls_ends_by_its_deadline(ends: TlsEndpoints) -> None:
    one, two = connected()
    with one:
        node = ends.node().stream(two)
        one.sendall(b"\x16\x03\x01")
        started = uptime()
        with pytest.raises(StalledError):
            node.begin(soon(0.1))
        assert uptime() - started < 5
        node.close()


@pytest.mark.parametrize(
    ("answer", "says"), [(b"KVdt\1\0\0\0", "does not speak TLS"), (BUSY, "internal error")]
)
def test_an_answer_without_a_handshake(ends: TlsEndpoints, answer: bytes, says: str) -> None:
    one, two = connected()
    with two:
        two.sendall(answer)
        client = ends.client().stream(one, 5.0)
        with pytest.raises(TlsError, match=says) as caught:
            client.begin(soon())
        assert caught.value.is_plain == (answer != BUSY)
        assert caught.value.is_busy == (answer == BUSY)
        client.close()


@pytest.mark.parametrize(
    ("wanted", "says"), [(ENGINE, "unsuitable certificate purpose"), (MASTER, "hostname mismatch")]
)
def test_another_role_is_no_node(ends: TlsEndpoints, wanted: CertificateRequest, says: str) -> None:
    one, two = connected()
    liar = TlsStream(two, ends.credentials(wanted).server())
    client = ends.client().stream(one, 5.0)
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(liar.begin, soon())
        with pytest.raises(TlsError, match=says):
            client.begin(soon())
        with pytest.raises(TlsError):
            answers.result()
    client.close()
    liar.close()
