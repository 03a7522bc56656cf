"""Keys in requests over HTTP: what is accepted as a key."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, cast

import pytest

from kvstore.client.async_client import AsyncClient
from kvstore.console.api.lookups import PIN_PATH, REMOVE_PATH, LookupsAPI
from kvstore.http.operations import endpoints_of
from kvstore.http.serving import Route
from tests.unit.console import ports
from tests.unit.console.ports import Port


class Store:
    """A client that keeps the keys of its calls."""

    def __init__(self) -> None:
        self.keys: list[list[bytes]] = []

    async def remove_many(self, keys: list[bytes], **more: Any) -> list[bool]:
        del more
        self.keys.append(keys)
        return [True] * len(keys)


def run(test: Callable[[Port, Store], Coroutine[Any, Any, None]]) -> None:
    store = Store()
    api = LookupsAPI(cast("AsyncClient", store), cast("Any", None))
    routes = [Route(each.method, each.path, each.handle) for each in endpoints_of(api)]
    ports.run(lambda port: test(port, store), routes)


@pytest.mark.parametrize(
    "keys",
    ["aa", [12], [1.5], [None], [""], ["a"], ["a a"], [" aa"], ["aa\n"], ["0xaa"], ["aa" * 257],
     ["\u0660\u0661"], [["aa"]]],
)  # fmt: skip
def test_what_is_no_key(keys: Any) -> None:
    async def test(port: Port, store: Store) -> None:
        for path, more in ((REMOVE_PATH, {}), (PIN_PATH, {"seconds": 5})):
            status, _, said = await port.ask_json(path, {"keys": keys, **more})
            assert (status, said[:4]) == (400, b"keys")
        assert not store.keys

    run(test)


def test_as_many_keys_as_the_document_allows() -> None:
    async def test(port: Port, store: Store) -> None:
        keys = [f"{number:0512x}" for number in range(16_384)]
        assert (await port.ask_json(REMOVE_PATH, {"keys": keys}))[0] == 200
        assert [key.hex() for key in store.keys[0]] == keys
        assert (await port.ask_json(REMOVE_PATH, {"keys": [*keys, "aa"]}))[0] == 400

    run(test)
