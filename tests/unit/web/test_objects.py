"""Bytes of objects over HTTP: what the store is asked for, and what clients get."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, cast

import pytest

from kvstore.calls import PutOutcome, Version
from kvstore.client.aio import AsyncClient
from kvstore.client.flows.getting import Raw
from kvstore.client.values import Described
from kvstore.web.api import objects as objects_module
from kvstore.web.api.objects import PATH, PIN_PATH, REMOVE_PATH, ROOM_BYTES, ObjectsAPI
from kvstore.web.server.endpoints import endpoints_of
from kvstore.web.server.serving import Route
from tests.support.waiting import until_async
from tests.unit.web import ports
from tests.unit.web.ports import Port

PAYLOAD = bytes(range(100, 110))
VERSION = '"7.3"'


class Store:
    """A client of a store that has one object, and keeps what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.puts: list[bytes] = []
        self.keys: list[list[bytes]] = []

    async def lookup(self, keys: list[bytes], **more: Any) -> list[int | None]:
        del keys, more
        return [len(PAYLOAD)]

    async def get_raw(self, key: bytes, **more: Any) -> Raw:
        del key, more
        return Raw(memoryview(PAYLOAD), Described("bytes", "", ()), Version(7, 3))

    async def put(self, key: bytes, body: bytearray, **more: Any) -> PutOutcome:
        del key
        self.puts.append(bytes(body))
        self.asked.append(more)
        return PutOutcome.STORED

    async def remove_many(self, keys: list[bytes], **more: Any) -> list[bool]:
        del more
        self.keys.append(keys)
        return [True] * len(keys)


def run(test: Callable[[Port, Store, ObjectsAPI], Coroutine[Any, Any, None]]) -> None:
    store = Store()
    objects = ObjectsAPI(cast("AsyncClient", store))
    routes = [Route(each.method, each.path, each.handle) for each in endpoints_of(objects)]
    ports.run(lambda port: test(port, store, objects), routes)


async def get(port: Port, *more: str) -> tuple[int, str | None, bytes]:
    status, headers, body = await port.ask(f"{PATH}?key=aa", more="\r\n".join(more))
    return status, headers.get("Content-Range"), body


@pytest.mark.parametrize(
    ("asked", "start", "stop"),
    [
        ("0-", 0, 10), ("0-0", 0, 1), ("9-9", 9, 10), ("2-4", 2, 5), ("2-99", 2, 10), ("-3", 7, 10),
        ("-99", 0, 10), ("9-", 9, 10), ("0-9", 0, 10), ("-1", 9, 10),
    ],
)  # fmt: skip
def test_a_range_is_the_bytes_that_it_says(asked: str, start: int, stop: int) -> None:
    async def test(port: Port, store: Store, objects: ObjectsAPI) -> None:
        del store, objects
        status, shown, body = await get(port, f"Range: bytes={asked}")
        assert (status, body) == (206, PAYLOAD[start:stop])
        assert shown == f"bytes {start}-{stop - 1}/10"

    run(test)


@pytest.mark.parametrize("asked", ["10-", "99-", "-0", "-00"])
def test_a_range_that_the_object_does_not_have(asked: str) -> None:
    async def test(port: Port, store: Store, objects: ObjectsAPI) -> None:
        del store, objects
        for unit in ("bytes", "BYTES"):
            status, shown, _ = await get(port, f"Range: {unit}={asked}")
            assert (status, shown) == (416, "bytes */10")

    run(test)


@pytest.mark.parametrize(
    "asked", ["", "bytes=", "bytes=-", "bytes=4-2", "items=0-1", "bytes=0-1,3-4", "bytes=0x1-"]
)
def test_what_is_no_range_is_ignored(asked: str) -> None:
    async def test(port: Port, store: Store, objects: ObjectsAPI) -> None:
        del store, objects
        assert await get(port, f"Range: {asked}") == (200, None, PAYLOAD)

    run(test)


def test_a_range_of_another_version_is_the_whole_object() -> None:
    async def test(port: Port, store: Store, objects: ObjectsAPI) -> None:
        del store, objects
        some = "Range: bytes=1-2"
        assert await get(port, some, f"If-Range: {VERSION}") == (206, "bytes 1-2/10", b"ef")
        for other in ('"7.2"', f"W/{VERSION}", "Wed, 21 Oct 2015 07:28:00 GMT", "7.3"):
            assert await get(port, some, f"If-Range: {other}") == (200, None, PAYLOAD)

    run(test)


def test_a_lifetime_is_in_milliseconds() -> None:
    async def test(port: Port, store: Store, objects: ObjectsAPI) -> None:
        del objects
        for asked, ttl_s in (("&ttl_ms=1500", 1.5), ("&ttl_ms=1", 0.001), ("", None)):
            status, _, _ = await port.ask(f"{PATH}?key=aa{asked}", "PUT", b"x")
            assert (status, store.asked[-1]["ttl"]) == (201, ttl_s)

    run(test)


def test_an_upload_that_ends_early_gives_its_room_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(port: Port, store: Store, objects: ObjectsAPI) -> None:
        size = 1 << 20
        head = f"PUT {PATH}?key=aa HTTP/1.1\r\nHost: localhost\r\nContent-Length: {size}\r\n\r\n"
        sock = await port.stranger(head.encode() + bytes(1_000))
        await until_async(lambda: objects._room.free == ROOM_BYTES - size)
        sock.close()
        await until_async(lambda: objects._room.free == ROOM_BYTES)
        monkeypatch.setattr(objects_module, "TRANSFER_S", 0.05)
        monkeypatch.setattr(objects_module, "BYTES_PER_S_MIN", 1 << 40)
        slow = await port.stranger(head.encode() + bytes(1_000))
        assert b" 408 " in await asyncio.get_running_loop().sock_recv(slow, 100)
        await until_async(lambda: objects._room.free == ROOM_BYTES)
        assert not store.puts
        status, _, _ = await port.ask(f"{PATH}?key=aa", "PUT", bytes(size))
        assert (status, len(store.puts[0])) == (201, size)

    run(test)


@pytest.mark.parametrize(
    "keys",
    ["aa", [12], [1.5], [None], [""], ["a"], ["a a"], [" aa"], ["aa\n"], ["0xaa"], ["aa" * 257],
     ["\u0660\u0661"], [["aa"]]],
)  # fmt: skip
def test_what_is_no_key(keys: Any) -> None:
    async def test(port: Port, store: Store, objects: ObjectsAPI) -> None:
        del objects
        for path, more in ((REMOVE_PATH, {}), (PIN_PATH, {"seconds": 5})):
            status, _, said = await port.ask_json(path, {"keys": keys, **more})
            assert (status, said[:4]) == (400, b"keys")
        assert not store.keys

    run(test)


def test_as_many_keys_as_the_document_allows() -> None:
    async def test(port: Port, store: Store, objects: ObjectsAPI) -> None:
        del objects
        keys = [f"{number:0512x}" for number in range(16_384)]
        assert (await port.ask_json(REMOVE_PATH, {"keys": keys}))[0] == 200
        assert [key.hex() for key in store.keys[0]] == keys
        assert (await port.ask_json(REMOVE_PATH, {"keys": [*keys, "aa"]}))[0] == 400

    run(test)
