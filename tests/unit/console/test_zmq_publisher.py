"""Peers of ZeroMQ that read nothing: what they cost, and that others go on."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any
from unittest import mock

import pytest
import zmq
import zmq.asyncio
from zmq.utils import garbage

from kvstore.console.events import zmq_publisher as publisher_module
from kvstore.console.events.journal import Journal
from kvstore.console.events.zmq_publisher import END, ZmqPublisher
from tests.support.processes import free_port

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\0NULL" + bytes(16) + b"\0" + bytes(31)
SUBSCRIBES = b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03SUB" + b"\0\1\1"
DEALS = b"\x04\x1c\x05READY\x0bSocket-Type\0\0\0\x06DEALER"
ASKS_FOR_ALL = b"\1\0" + b"\0\x08" + bytes(8)

BATCH = 100_000
"""About how many bytes a batch of these tests has."""


class Store:
    """A publisher, its peers, and strangers."""

    def __init__(self) -> None:
        self.ports = free_port(), free_port()
        self.context = zmq.asyncio.Context()
        self.strangers: list[socket.socket] = []
        self.published = 0
        at, replay_at = (f"tcp://127.0.0.1:{port}" for port in self.ports)
        self.at, self.replay_at = at, replay_at
        self.publisher = ZmqPublisher(
            f"{at},{replay_at}", "pool", Journal(), mock.Mock(), mock.Mock()
        )

    async def publish(self, count: int) -> None:
        for _ in range(count):
            self.published += 1
            await self.publisher._send(b"topic", [{"key": "x" * BATCH}])
            await asyncio.sleep(0)

    async def stranger(self, port: int, said: bytes) -> None:
        """Says this, and reads nothing."""
        loop = asyncio.get_running_loop()
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2_048)
        sock.setblocking(False)
        self.strangers.append(sock)
        with contextlib.suppress(ConnectionError):
            await loop.sock_connect(sock, ("127.0.0.1", port))
            await loop.sock_sendall(sock, GREETING)
            await asyncio.sleep(0.01)
            await loop.sock_sendall(sock, said)

    async def subscriber(self) -> zmq.asyncio.Socket:
        made: zmq.asyncio.Socket = self.context.socket(zmq.SUB)
        made.subscribe(b"")
        made.connect(self.at)
        while not await made.poll(50):
            await self.publish(1)
        return made

    async def replayed(self, first: int = 0) -> list[int]:
        """The numbers that an honest peer gets."""
        asking: zmq.asyncio.Socket = self.context.socket(zmq.DEALER)
        asking.connect(self.replay_at)
        await asking.send_multipart([b"", first.to_bytes(8, "big")])
        numbers = []
        async with asyncio.timeout(20):
            while (frames := await asking.recv_multipart())[2] != END:
                numbers.append(int.from_bytes(frames[2], "big"))
        asking.close(0)
        return numbers


def run(test: Callable[[Store], Any]) -> None:
    async def inside() -> None:
        async with _open() as store:
            await test(store)

    asyncio.run(inside())


@contextlib.asynccontextmanager
async def _open() -> AsyncIterator[Store]:
    store = Store()
    try:
        yield store
    finally:
        for each in store.strangers:
            each.close()
        store.context.destroy(0)
        await store.publisher.close()
        garbage.gc.stop()  # pyzmq's thread, which frees what libzmq has sent


def test_a_replay_goes_on_where_it_can_while_batches_come_and_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(publisher_module, "REPLAY_BYTES_MAX", 20 * BATCH)

    async def test(store: Store) -> None:
        await store.publish(30)
        first = store.publisher._sent[0].number
        assert await store.replayed(first + 3) == list(range(first + 3, first + 19))
        assert await store.replayed(first + 19) == []
        publishing = asyncio.create_task(store.publish(100))
        numbers = await store.replayed()
        await publishing
        assert numbers == sorted(set(numbers))
        assert numbers[0] >= first

    run(test)


def test_a_peer_that_reads_nothing_is_cut_and_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher_module, "SILENT_MS", 500)
    monkeypatch.setattr(publisher_module, "SEND_BYTES", 4_096)

    async def test(store: Store) -> None:
        honest = await store.subscriber()
        await store.stranger(store.ports[0], SUBSCRIBES)
        await store.stranger(store.ports[1], DEALS + ASKS_FOR_ALL * 20)
        await store.publish(50)
        async with asyncio.timeout(20):
            for stranger in store.strangers:
                while not is_cut(stranger):
                    await store.publish(1)
                    await asyncio.sleep(0.05)
            last = 0
            while last < store.publisher._sent[-1].number:
                last = int.from_bytes((await honest.recv_multipart())[1], "big")
            assert (await store.replayed())[-1] == last

    run(test)


def is_cut(sock: socket.socket) -> bool:
    """Whether the other end has given the connection up, which it says to who sends something."""
    with contextlib.suppress(OSError):
        sock.send(b"\0\1\1")
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
    return info[0] != 1  # ESTABLISHED
