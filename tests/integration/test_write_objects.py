"""``/api/v1`` for programs that write: a real master and node, as curl would ask them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jsonschema
import pytest

from kvstore.console.api.chains import BLOCKS_PATH, CHAINS_PATH
from kvstore.console.api.lookups import (
    HINTS_PATH,
    MATCH_PATH,
    PIN_PATH,
    REMOVE_PATH,
    UNPIN_PATH,
)
from kvstore.http.operations import PATH as OPENAPI_PATH
from tests.support.cluster import Cluster
from tests.support.http import Reply, request
from tests.support.processes import free_port


class Store(NamedTuple):
    cluster: Cluster
    port: int

    def ask(self, method: str, path: str, body: Any = None, **more: Any) -> Reply:
        return request(self.port, method, path, body, **more)

    def put(self, key: bytes, body: bytes) -> None:
        with self.cluster.client() as client:
            client.put(key, body)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    settings: dict[str, Any] = {"http_port": free_port(), "events": "on", "lease_ms": 3_000}
    with Cluster(tmp_path_factory.mktemp("store"), settings=settings) as cluster:
        cluster.start(memory="256MiB")
        yield Store(cluster, settings["http_port"])


@pytest.fixture
def store(running: Store) -> Iterator[Store]:
    """Empty; still serving when the test is over."""
    yield running
    running.cluster.check()
    running.cluster.close_clients()
    running.cluster.clear()


# --- the document ---------------------------------------------------------------------------------


def test_what_is_described_is_what_is_served(store: Store) -> None:
    """Every answer has the shape that the document gives it."""
    document = store.ask("GET", OPENAPI_PATH).json
    store.put(b"a", b"1")
    keys = {"keys": [b"a".hex()]}
    retain = {"action_id": "", "action_type": "kv.retain", "action_version": "1", "payload": keys}
    envelope = {"protocol_version": "0.1", "message_id": "", "actions": [retain]}
    requests: dict[tuple[str, str], list[tuple[str, Any]]] = {
        ("post", REMOVE_PATH): [("", {"keys": ["02"]}), ("", {})],
        ("post", PIN_PATH): [("", keys | {"seconds": 1}), ("", {})],
        ("post", UNPIN_PATH): [("", keys), ("", {})],
        ("post", HINTS_PATH): [("", envelope), ("", envelope | {"actions": [{}]})],
        ("post", MATCH_PATH): [("", keys), ("", {})],
        ("get", CHAINS_PATH): [("", None), (f"?key={b'a'.hex()}&key=00", None), ("?count=x", None)],
        ("get", BLOCKS_PATH): [(f"?key={b'a'.hex()}&key=00&above=3", None), ("?key=x", None)],
        ("get", "/api/v1/status"): [("", None)],
        ("get", "/api/v1/history"): [("", None)],
        ("get", "/api/v1/cluster-events"): [("", None), ("?after=x", None)],
        ("get", "/api/v1/fleet"): [("", None)],
        ("get", "/api/v1/why"): [("", None), ("?namespace=none", None)],
        ("get", "/api/v1/traffic"): [("", None)],
        ("get", OPENAPI_PATH): [("", None)],
    }
    described = {
        (method, path) for path, methods in document["paths"].items() for method in methods
    }
    assert described == {*requests, ("get", "/api/v1/events")}  # which does not end
    for (method, path), several in requests.items():
        for more, body in several:
            reply = store.ask(method.upper(), path + more, body)
            assert_described(document, method, path, reply)


def assert_described(document: dict[str, Any], method: str, path: str, reply: Reply) -> None:
    responses = document["paths"][path][method]["responses"]
    assert str(reply.status) in responses, (method, path, reply)
    content = responses[str(reply.status)].get("content")
    if content is None:
        assert reply.body == b""
        return
    kind = reply.headers.get_content_type()
    assert kind in content, (method, path, reply)
    if "$ref" in content[kind]["schema"]:
        schema = content[kind]["schema"] | {"components": document["components"]}
        jsonschema.Draft202012Validator(schema).validate(reply.json)
