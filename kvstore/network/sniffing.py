"""A port for peers with and without TLS: looks at the first byte of each connection.

A greeting of TLS begins with a byte that begins nothing else that clients and nodes send, and no
request of HTTP. Peers that say nothing are bounded: the one that has been silent longest makes
room.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from typing import Final

from kvstore.process.background import start_task

SILENT_S: Final = 5.0
"""How long a peer may say nothing."""

SILENT_MAX: Final = 256
"""Peers that have not said anything yet."""

BACKLOG: Final = 100
PAUSE_S: Final = 0.2
"""Pause after a connection that could not be accepted."""

PIECE_BYTES: Final = 256 << 10

_TLS: Final = b"\x16"

Serve = Callable[[socket.socket, bool], Awaitable[None]]
"""Takes over a connection, and closes it; the second argument: whether it speaks TLS."""


class Sniffing:
    """Accepts connections of one listening socket between ``start`` and ``stop``. Use it in one
    event loop."""

    def __init__(self, listener: socket.socket, serve: Serve) -> None:
        """Takes over ``listener``. ``serve`` returns when it is done with a connection."""
        self._listener = listener
        self._listener.setblocking(False)
        self._serve = serve
        self._silent: dict[socket.socket, asyncio.Future[None]] = {}
        """Oldest first."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._accepting: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._listener.listen(BACKLOG)
        self._accepting = start_task("accept", self._accept())

    async def stop(self) -> None:
        """Ends all connections. Idempotent."""
        tasks = [*self._tasks, *([self._accepting] if self._accepting else [])]
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listener.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(self._listener)
            except OSError:  # most likely no descriptors are left
                await asyncio.sleep(PAUSE_S)
                continue
            if len(self._silent) >= SILENT_MAX:
                self._silent.pop(next(iter(self._silent))).cancel()
            came = self._silent[sock] = loop.create_future()
            task = loop.create_task(self._sniff(sock, came))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            await asyncio.sleep(0)  # accepting does not wait while there is a queue

    async def _sniff(self, sock: socket.socket, came: asyncio.Future[None]) -> None:
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            try:
                first = await self._first_byte(sock, came)
                if first:
                    moved = socket.socket(fileno=sock.detach())
                    moved.setblocking(False)
                    await self._serve(moved, first == _TLS)
            finally:
                self._silent.pop(sock, None)
                sock.close()

    async def _first_byte(self, sock: socket.socket, came: asyncio.Future[None]) -> bytes:
        """Empty: the peer has left, was silent for too long, or had to make room."""
        loop = asyncio.get_running_loop()

        def readable() -> None:
            if not came.done():
                came.set_result(None)

        loop.add_reader(sock, readable)
        try:
            async with asyncio.timeout(SILENT_S):
                await came
        except asyncio.CancelledError:
            if not came.cancelled():
                raise
            return b""
        finally:
            loop.remove_reader(sock)
            self._silent.pop(sock, None)
        return sock.recv(1, socket.MSG_PEEK)


async def splice(sock: socket.socket, inner: str) -> None:
    """Connects ``sock`` to the abstract Unix socket ``inner`` until one of both ends."""
    with contextlib.suppress(OSError):
        ours = await asyncio.open_connection(sock=sock, limit=PIECE_BYTES)
        try:
            theirs = await asyncio.open_unix_connection("\0" + inner, limit=PIECE_BYTES)
        except OSError:
            ours[1].transport.abort()
            raise
        ways = [
            asyncio.ensure_future(_pump(ours[0], theirs[1])),
            asyncio.ensure_future(_pump(theirs[0], ours[1])),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in ways:
                each.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            for _, writer in (ours, theirs):
                writer.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(PIECE_BYTES):
        writer.write(data)
        await writer.drain()
