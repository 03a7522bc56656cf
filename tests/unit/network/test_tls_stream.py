"""A stream within TLS: what it says arrives whole, or not at all."""

from __future__ import annotations

import contextlib
import random
import socket
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvstore.auth.certificates import Wanted
from kvstore.clocks import uptime
from kvstore.network.stream import EndedError, StalledError
from kvstore.network.tls_stream import BUSY, TlsError, TlsStream
from tests.support.encryption import Ends
from tests.support.identities import ENGINE, MASTER

MIB = 1 << 20
SIZES = [0, 1, 5, (16 << 10) - 1, 16 << 10, (16 << 10) + 1, 128 << 10, MIB + 3]


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Ends:
    return Ends(tmp_path_factory.mktemp("ends"))


def soon(seconds: float = 10.0) -> float:
    return uptime() + seconds


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        return one, listener.accept()[0]


def both(ends: Ends, one: socket.socket, two: socket.socket) -> tuple[TlsStream, TlsStream]:
    """The streams of client and node, after their handshake."""
    client = ends.client().stream(one, 5.0)
    node = ends.node().stream(two)
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(node.begin, soon())
        client.begin(soon())
        done.result()
    return client, node


@contextlib.contextmanager
def pair(ends: Ends) -> Iterator[tuple[TlsStream, TlsStream]]:
    client, node = both(ends, *connected())
    yield client, node
    client.close()
    node.close()


def received(stream: TlsStream, *sizes: int) -> list[bytes]:
    buffers = [memoryview(bytearray(size)) for size in sizes]
    stream.receive(buffers, soon())
    return [bytes(each) for each in buffers]


@pytest.mark.parametrize("cut", ["as sent", "otherwise"])
def test_what_one_end_sends_the_other_receives(ends: Ends, cut: str) -> None:
    parts = [random.Random(size).randbytes(size) for size in SIZES]
    total = sum(SIZES)
    with pair(ends) as (client, node), ThreadPoolExecutor(1) as pool:
        for one, other in ((client, node), (node, client)):
            sent = pool.submit(one.send, parts, soon())
            sizes = SIZES if cut == "as sent" else [7, total // 2, total - 7 - total // 2]
            assert b"".join(received(other, *sizes)) == b"".join(parts)
            sent.result()
        assert client.is_quiet()
        assert node.is_quiet()


@pytest.mark.parametrize("how", ["closed", "announced"])
def test_an_end_within_a_message(ends: Ends, how: str) -> None:
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
        with pytest.raises(EndedError):
            client.receive([memoryview(into)], soon())
        assert into == b"12345" + bytes(4)


def test_a_call_that_waits_is_woken_by_a_shutdown(ends: Ends) -> None:
    with pair(ends) as (client, _), ThreadPoolExecutor(1) as pool:
        waits = pool.submit(client.receive, [memoryview(bytearray(1))], soon(30))
        client.shutdown()
        with pytest.raises((EndedError, OSError)):
            waits.result(10)


def test_a_peer_that_takes_nothing_stalls_the_sender(ends: Ends) -> None:
    with pair(ends) as (client, _), pytest.raises(StalledError):
        client.send([bytes(32 * MIB)], soon(0.2))


def test_a_handshake_that_stalls_ends_by_its_deadline(ends: Ends) -> None:
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
def test_an_answer_without_a_handshake(ends: Ends, answer: bytes, says: str) -> None:
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
def test_another_role_is_no_node(ends: Ends, wanted: Wanted, says: str) -> None:
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
