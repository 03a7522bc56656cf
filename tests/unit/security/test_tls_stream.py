"""A stream within TLS: what it says arrives whole, or not at all."""

from __future__ import annotations

import contextlib
import random
import socket
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvstore.runtime.clock import uptime
from kvstore.runtime.stream import ConnectionEndedError, StalledError
from kvstore.security.tls_stream import TlsStream
from tests.support.encryption import TlsEndpoints

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
