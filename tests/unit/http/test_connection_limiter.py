"""Strangers at a port for HTTP: what they may hold, and that health is answered all the same."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from kvstore.http import serving
from kvstore.http.access_control import access_control
from kvstore.http.connection_limiter import BUFFER_BYTES
from kvstore.http.ports import HttpSecurity
from kvstore.http.serving import Route, read_body
from tests.support.identities import ENGINE, MASTER, NODE, authority, credentials
from tests.unit.console import ports
from tests.unit.console.ports import Port

CONNECTIONS = 16


async def _echo(request: web.Request) -> web.Response:
    return web.Response(body=await read_body(request))


async def _bytes(request: web.Request) -> web.Response:
    return web.Response(body=bytes(int(request.query["size"])))


async def _never(request: web.Request) -> web.Response:
    del request
    await asyncio.Event().wait()
    raise AssertionError


ROUTES = (
    Route("POST", "/echo", _echo),
    Route("GET", "/bytes", _bytes),
    Route("GET", "/never", _never),
)
LARGE = 1 << 22
OF_LARGE = b"GET /bytes?size=%d HTTP/1.1\r\nHost: localhost\r\n\r\n" % LARGE
A_BODY = b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{"


@pytest.fixture(autouse=True)
def few_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "connections_max", lambda requests: CONNECTIONS)


def run(test: Callable[[Port], Coroutine[Any, Any, None]]) -> None:
    ports.run(test, ROUTES)


def test_bodies_that_do_not_come_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "BODIES_BYTES", 4 * BUFFER_BYTES)

    async def test(port: Port) -> None:
        for _ in range(3 * CONNECTIONS):
            await port.stranger(A_BODY)
        assert await port.is_healthy()
        assert (await port.ask("/echo", "POST", b"mine"))[2] == b"mine"

    run(test)


def test_a_body_has_its_time_and_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(port: Port) -> None:
        monkeypatch.setattr(serving, "BODY_S", 0.05)
        slow = await port.stranger(A_BODY)
        assert b" 503 " in await asyncio.get_running_loop().sock_recv(slow, 100)
        monkeypatch.setattr(serving, "BODY_S", 5.0)
        most = bytes(serving.BODY_BYTES_MAX)
        assert (await port.ask("/echo", "POST", most))[2] == most
        assert (await port.ask("/echo", "POST", most + b"!"))[0] == 413

    run(test)


def test_an_answer_that_is_not_read_has_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "READ_S", 0.05)
    monkeypatch.setattr(serving, "READ_BYTES_PER_S_MIN", 1 << 40)

    async def test(port: Port) -> None:
        sock = await port.stranger(OF_LARGE)
        await asyncio.sleep(0.2)
        assert await read(sock) < LARGE

    run(test)


async def read(sock: socket.socket) -> int:
    """How many bytes come until it ends."""
    loop, count = asyncio.get_running_loop(), 0
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(10):
            while piece := await loop.sock_recv(sock, 1 << 16):
                count += len(piece)
    return count


def test_requests_beyond_the_limit_are_told_to_come_again_but_not_those_of_health() -> None:
    async def test(port: Port) -> None:
        for _ in range(2 * CONNECTIONS):
            await port.stranger(b"GET /never HTTP/1.1\r\nHost: localhost\r\n\r\n")
        status, headers, _ = await port.ask("/bytes?size=9")
        assert (status, headers["Retry-After"]) == (503, "1")
        assert await port.is_healthy()
        assert (await port.ask("/readyz"))[0] == 200

    run(test)


@pytest.mark.parametrize("path", ["/healthz", "/echo", "/nothing"])
@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "gzip\r\nContent-Encoding: x"])
def test_no_body_is_decompressed(path: str, encoding: str) -> None:
    async def test(port: Port) -> None:
        bomb = gzip.compress(bytes(1 << 20))
        status, _, _ = await port.ask(path, "POST", bomb, f"Content-Encoding: {encoding}")
        assert status == 415
        assert (await port.ask("/echo", "POST", bomb))[2] == bomb
        assert (await port.ask("/echo", "POST", bomb, "Content-Encoding: identity"))[2] == bomb

    run(test)


def test_one_identity_has_half_of_the_requests(tmp_path: Path) -> None:
    signer = authority()
    secured = HttpSecurity(auth=credentials(tmp_path, signer, MASTER).path)
    mine, theirs = (credentials(tmp_path, signer, who).client() for who in (ENGINE, NODE))
    access = access_control(secured, None)

    async def test(port: Port) -> None:
        held = [asyncio.create_task(port.ask("/never", tls=mine)) for _ in range(6)]
        async with asyncio.timeout(10):
            while sum(task.done() for task in held) < 2:
                await asyncio.sleep(0.001)
        refused = [task.result() for task in held if task.done()]
        assert [(status, body) for status, _, body in refused] == [
            (503, b"http: identity e has reached its limit: 4 of 8 slots in use, 4 free\n")
        ] * 2
        assert (await port.ask("/bytes?size=1", tls=theirs))[0] == 200
        for task in held:
            task.cancel()
        await asyncio.wait(held)
        async with asyncio.timeout(10):
            while (await port.ask("/bytes?size=1", tls=mine))[0] != 200:
                await asyncio.sleep(0.001)

    ports.run(test, ROUTES, secured, access)
