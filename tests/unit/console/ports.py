"""A port for HTTP as servers have it, in this process, and strangers at it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from typing import Any

from kvstore.http import serving
from kvstore.http.access_control import AccessControl
from kvstore.http.ports import NOT_SECURED, HttpSecurity
from kvstore.http.serving import ProcessStatus, Readiness, Route
from kvstore.security.credentials import MASTER_NAME


class Port:
    def __init__(self, port: int) -> None:
        self.port = port
        self.strangers: list[socket.socket] = []

    async def stranger(self, said: bytes) -> socket.socket:
        """A connection that sends this, and reads nothing."""
        loop = asyncio.get_running_loop()
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2_048)
        sock.setblocking(False)
        self.strangers.append(sock)
        await loop.sock_connect(sock, ("127.0.0.1", self.port))
        with contextlib.suppress(OSError):  # shown out already
            await loop.sock_sendall(sock, said)
        await asyncio.sleep(0.001)
        return sock

    async def ask(
        self,
        path: str,
        method: str = "GET",
        body: bytes = b"",
        more: str = "",
        tls: ssl.SSLContext | None = None,
    ) -> tuple[int, dict[str, str], bytes]:
        """``tls``: what we show, and whom we trust, as a client of the masters."""
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self.port, ssl=tls, server_hostname=tls and MASTER_NAME
        )
        try:
            async with asyncio.timeout(20):
                lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Connection: close"]
                lines += [f"Content-Length: {len(body)}", *filter(None, [more]), "", ""]
                writer.write("\r\n".join(lines).encode() + body)
                head, _, rest = (await reader.read()).partition(b"\r\n\r\n")
        finally:
            writer.close()
        status, *fields = head.decode().split("\r\n")
        headers = dict(field.split(": ", 1) for field in fields)
        return int(status.split()[1]), headers, rest

    async def ask_json(self, path: str, body: Any) -> tuple[int, dict[str, str], bytes]:
        kind = "Content-Type: application/json"
        return await self.ask(path, "POST", json.dumps(body).encode(), kind)

    async def is_healthy(self, times: int = 5) -> bool:
        return all([(await self.ask("/healthz"))[0] == 200 for _ in range(times)])


def run(
    test: Callable[[Port], Coroutine[Any, Any, None]],
    routes: Iterable[Route],
    secured: HttpSecurity = NOT_SECURED,
    access: AccessControl | None = None,
) -> None:
    """Serves these routes, and health, while ``test`` runs."""

    async def inside() -> None:
        async with _served(routes, secured, access or AccessControl(None)) as port:
            await test(port)

    asyncio.run(inside())


async def _ready() -> Readiness:
    return Readiness(True, "leads")


async def _page() -> bytes:
    return b""


@contextlib.asynccontextmanager
async def _served(
    routes: Iterable[Route],
    secured: HttpSecurity,
    access: AccessControl,
) -> AsyncIterator[Port]:
    listener = socket.create_server(("127.0.0.1", 0))
    # What a stranger does not read stays in this process, and not in the kernel.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 << 10)
    port = Port(listener.getsockname()[1])
    try:
        answers = ProcessStatus(_ready, _page)
        async with serving.serving(listener, answers, routes, access=access, secured=secured):
            yield port
    finally:
        for each in port.strangers:
            each.close()
