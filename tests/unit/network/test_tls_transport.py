"""TLS between asyncio's transport and a protocol: what either says arrives, and bounds hold."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvstore.auth.certificates import Wanted
from kvstore.auth.credentials import MASTER_NAME
from kvstore.network.tls_memory import TlsEnd, TlsError
from kvstore.network.tls_transport import RECEIVED_BYTES, TlsTransport
from tests.support.encryption import Ends, shared_ends
from tests.support.identities import ENGINE, MASTER, write

SIZES = [1, 5, (16 << 10) - 1, 16 << 10, (16 << 10) + 1, 100_000]


@pytest.fixture(scope="module")
def ends() -> Ends:
    return shared_ends()


class Hearing(asyncio.BufferedProtocol):
    """Remembers what it was told, and pauses when that is as much as ``pause_at``."""

    def __init__(self) -> None:
        self.heard = bytearray()
        self.pause_at = 1 << 30
        self.transport: TlsTransport
        self.is_writable = True
        self.changed = asyncio.Event()
        self.lost: list[Exception | None] = []
        self._space = memoryview(bytearray(1_000))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, TlsTransport)
        self.transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._space

    def buffer_updated(self, nbytes: int) -> None:
        assert len(self.heard) < self.pause_at, "it has paused"
        self.heard += self._space[:nbytes]
        if len(self.heard) >= self.pause_at:
            self.transport.pause_reading()
        self.changed.set()

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self.is_writable = False
        self.changed.set()

    def resume_writing(self) -> None:
        self.is_writable = True
        self.changed.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.append(exc)
        self.changed.set()


class Peer:
    """The client's end, byte by byte if need be."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.tls = TlsEnd(context, MASTER_NAME)
        self.loop = asyncio.get_running_loop()

    async def begin(self) -> None:
        while not self.tls.shake():
            await self.flush()
            await self.take()
        await self.flush()

    async def flush(self, piece: int = 1 << 20) -> None:
        encrypted = self.tls.take()
        for at in range(0, len(encrypted), piece):
            await self.loop.sock_sendall(self.sock, encrypted[at : at + piece])
            if piece < 100:
                await asyncio.sleep(0)

    async def take(self) -> None:
        came = await self.loop.sock_recv(self.sock, 1 << 16)
        if not came:
            raise EOFError
        self.tls.feed(came)

    async def say(self, data: bytes, piece: int = 1 << 20) -> None:
        self.tls.write(data)
        await self.flush(piece)

    async def hear(self, size: int) -> bytes:
        whole, at = memoryview(bytearray(size)), 0
        while at < size:
            count = self.tls.read(whole[at:])
            if count is None:
                await self.take()
            else:
                assert count, "the other end announces its end"
                at += count
        return bytes(whole)


@contextlib.asynccontextmanager
async def connected(
    ends: Ends, wanted: Wanted = ENGINE
) -> AsyncIterator[tuple[TlsTransport, Hearing, Peer]]:
    """Both ends, before their handshake."""
    ours, theirs = socket.socketpair()
    hearing = Hearing()
    received = memoryview(bytearray(RECEIVED_BYTES))
    server = TlsTransport(ends.credentials(MASTER).server(), lambda: hearing, received)
    peer = Peer(theirs, ends.credentials(wanted).client())
    with theirs:
        async with asyncio.timeout(10):
            await asyncio.get_running_loop().connect_accepted_socket(lambda: server, ours)
            try:
                yield server, hearing, peer
            finally:
                server.abort()
                await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def greeted(ends: Ends) -> AsyncIterator[tuple[TlsTransport, Hearing, Peer]]:
    async with connected(ends) as (server, hearing, peer):
        await peer.begin()
        assert await server.begun == ""
        yield server, hearing, peer


async def until_heard(hearing: Hearing, size: int) -> bytes:
    while len(hearing.heard) < size:
        hearing.changed.clear()
        await hearing.changed.wait()
    return bytes(hearing.heard)


@pytest.mark.parametrize("piece", [1 << 20, 7])
def test_what_either_end_says_arrives(ends: Ends, piece: int) -> None:
    async def talk() -> None:
        async with greeted(ends) as (server, hearing, peer):
            said = b""
            for size in SIZES if piece > 7 else SIZES[:3]:
                data = random.Random(size).randbytes(size)
                said += data
                await peer.say(data, piece)
                assert await until_heard(hearing, len(said)) == said
                server.write(data)
                assert await peer.hear(size) == data
            assert isinstance(server.get_extra_info("ssl_object"), ssl.SSLObject)
            assert server.get_extra_info("socket").family == socket.AF_UNIX

    asyncio.run(talk())


def test_a_protocol_that_pauses_is_told_the_rest_later(ends: Ends) -> None:
    async def talk() -> None:
        async with greeted(ends) as (_, hearing, peer):
            hearing.pause_at = 2_000
            data = random.Random(1).randbytes(200_000)
            saying = asyncio.create_task(peer.say(data))
            heard = await until_heard(hearing, 2_000)
            await asyncio.sleep(0.01)
            assert bytes(hearing.heard) == heard, "it is told nothing while it pauses"
            while len(heard) < len(data):
                hearing.pause_at = len(heard) + 5_000
                hearing.transport.resume_reading()
                heard = await until_heard(hearing, min(hearing.pause_at, len(data)))
            assert heard == data
            await saying

    asyncio.run(talk())


def test_a_peer_that_does_not_read_is_seen(ends: Ends) -> None:
    async def talk() -> None:
        async with greeted(ends) as (server, hearing, peer):
            server.set_write_buffer_limits(high=1 << 18)
            sent = 0
            while hearing.is_writable:
                server.write(b"x" * 50_000)
                sent += 50_000
                assert sent < 10 << 20, "it is never told to stop"
            assert 1 << 18 < server.get_write_buffer_size() < (1 << 18) + 60_000
            assert await peer.hear(sent) == b"x" * sent
            assert hearing.is_writable

    asyncio.run(talk())


@pytest.mark.parametrize("said", ["noise", "nothing", "another authority"])
def test_a_handshake_that_fails_says_why(ends: Ends, said: str, tmp_path: Path) -> None:
    async def talk() -> tuple[str, str]:
        theirs = Ends(tmp_path) if said == "another authority" else ends
        async with connected(ends) as (server, hearing, peer):
            told = ""
            if said == "noise":
                peer.sock.send(b"\x16\x03\x01\x00\x05noise")
            elif said == "nothing":
                peer.sock.shutdown(socket.SHUT_WR)
            else:
                own = theirs.credentials(ENGINE)
                context = own.client()
                context.load_verify_locations(
                    cadata=ends.credentials(ENGINE).pems().authorities.decode("ascii")
                )
                peer.tls = TlsEnd(context, MASTER_NAME)
                await peer.begin()
                with pytest.raises(TlsError) as caught:
                    await peer.hear(1)
                told = caught.value.strerror or ""
            why = await server.begun
            assert not hasattr(hearing, "transport"), "the protocol never hears of it"
            with contextlib.suppress(ConnectionError, EOFError):
                while True:
                    await peer.take()
            return why, told

    why, told = asyncio.run(talk())
    assert {"noise": "unexpected message", "nothing": "the peer has left"}.get(said, "") in why
    if said == "another authority":
        assert "certificate" in why
        assert "unknown ca" in told


def test_a_handshake_that_is_given_up_is_cut(ends: Ends) -> None:
    async def talk() -> None:
        async with connected(ends) as (server, hearing, peer):
            peer.tls.shake()
            await peer.flush(50)
            server.give_up("too slow")
            server.give_up("again")
            assert await server.begun == "too slow"
            with contextlib.suppress(EOFError, ConnectionError):
                while True:  # until the end, or the test's time is over
                    await peer.take()
            assert hearing.lost == []

    asyncio.run(talk())


@pytest.mark.parametrize("end", ["announced", "silent", "other bytes"])
def test_the_end_of_the_peer_is_the_end(ends: Ends, end: str) -> None:
    async def talk() -> None:
        async with greeted(ends) as (server, hearing, peer):
            await peer.say(b"last")
            await until_heard(hearing, 4)
            if end == "announced":
                with contextlib.suppress(ssl.SSLWantReadError):
                    peer.tls.connection.unwrap()
                await peer.flush()
            elif end == "silent":
                peer.sock.shutdown(socket.SHUT_WR)
            else:
                peer.sock.send(b"\x17\x03\x03\x00\x20" + b"x" * 32)
            while not hearing.lost:
                hearing.changed.clear()
                await hearing.changed.wait()
            assert bytes(hearing.heard) == b"last"
            assert server.is_closing()
            server.write(b"into nothing")

    asyncio.run(talk())


def test_a_peer_that_changes_its_keys_goes_on(ends: Ends, tmp_path: Path) -> None:
    """Python's ``ssl`` cannot ask for it. ``K`` has openssl change its keys, and ask for ours."""
    pems = ends.credentials(ENGINE).pems()
    for name, pem in (("key", pems.key), ("chain", pems.chain), ("ca", pems.authorities)):
        write(tmp_path / name, pem)

    async def talk() -> None:
        hearing = Hearing()
        received = memoryview(bytearray(RECEIVED_BYTES))
        context = ends.credentials(MASTER).server()
        server = await asyncio.get_running_loop().create_server(
            lambda: TlsTransport(context, lambda: hearing, received), "127.0.0.1", 0
        )
        port = server.sockets[0].getsockname()[1]
        peer = await asyncio.create_subprocess_exec(
            "openssl", "s_client", "-connect", f"127.0.0.1:{port}", "-tls1_3",
            "-key", tmp_path / "key", "-cert", tmp_path / "chain", "-CAfile", tmp_path / "ca",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        assert peer.stdin is not None
        assert peer.stdout is not None
        async with asyncio.timeout(20):
            peer.stdin.write(b"before\n")
            await until_heard(hearing, len(b"before\n"))
            peer.stdin.write(b"K\n")
            while (
                b"after\n" not in hearing.heard
            ):  # openssl takes what it reads with K for one line
                peer.stdin.write(b"after\n")
                await asyncio.sleep(0.02)
            hearing.transport.write(b"our answer")
            await peer.stdout.readuntil(b"our answer")
            peer.stdin.close()
            await peer.wait()
        server.close()
        await server.wait_closed()

    asyncio.run(talk())
