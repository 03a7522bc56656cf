"""``/api/v1`` for programs that write: a real master and node, as curl would ask them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import pytest

from kvstore.console.api.chains import BLOCKS_PATH, CHAINS_PATH, FIND_PATH
from kvstore.console.api.drains import DRAIN_PATH, DRAINS_MAX, NODES_PATH, UNDRAIN_PATH
from kvstore.console.api.lookups import (
    EXISTS_PATH,
    HINTS_PATH,
    MATCH_PATH,
    PIN_PATH,
    REMOVE_PATH,
    STAT_PATH,
    UNPIN_PATH,
)
from kvstore.http.operations import PATH as OPENAPI_PATH
from tests.support.cluster import Cluster, Node
from tests.support.http import Reply, request
from tests.support.processes import free_port
from tests.support.wait import until

MIB = 1 << 20


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


# --- nodes ----------------------------------------------------------------------------------------


def test_a_node_is_drained_and_leaves(tmp_path: Path) -> None:
    settings = {"http_port": free_port()}
    with Cluster(tmp_path, settings=settings) as cluster:
        cluster.start(memory="64MiB")
        store = Store(cluster, settings["http_port"])
        for number in range(10):
            store.put(b"%d" % number, bytes([number]) * MIB)
        first = cluster.nodes[0]
        alone = store.ask("POST", DRAIN_PATH, {"node": first.name})
        assert (alone.status, b"Nothing was moved" in alone.body) == (507, True)
        assert cluster.state_of(first) == "alive"
        alone = store.ask("POST", DRAIN_PATH, {"node": first.name, "evict": True})
        assert (alone.status, alone.json["state"]) == (202, "moving")
        drained(store, first, "kept")
        assert cluster.state_of(first) == "draining"
        told = store.ask("GET", f"{DRAIN_PATH}?node={first.name}").json
        assert (told["remaining"], told["moved"]) == (10, 0)
        assert store.ask("POST", UNDRAIN_PATH, {"node": first.name}).status == 204
        assert cluster.state_of(first) == "alive"

        second = cluster.node(memory="64MiB")
        assert store.ask("POST", DRAIN_PATH, {"node": first.name}).status == 202
        drained(store, first, "left")
        assert first.wait() == 0
        with cluster.client() as client:
            for number in range(10):
                assert client.get(b"%d" % number) == bytes([number]) * MIB
        nodes = store.ask("GET", NODES_PATH).json["nodes"]
        assert [each["name"] for each in nodes if each["state"] == "alive"] == [second.name]
        assert store.ask("GET", f"{DRAIN_PATH}?node=none").status == 404


def test_a_drain_that_is_refused_has_not_begun(tmp_path: Path) -> None:
    """More nodes are asked to drain at once than may be drained at once."""
    settings = {"http_port": free_port()}
    with Cluster(tmp_path, settings=settings) as cluster:
        cluster.start(memory="16MiB")
        nodes = [*cluster.nodes, *(cluster.node(memory="16MiB") for _ in range(DRAINS_MAX + 1))]
        store = Store(cluster, settings["http_port"])
        with cluster.client() as client:  # an allocation on each keeps their drains under way
            held = [client.allocate(15 * MIB, kind="numpy") for _ in nodes]
            answers = [
                (node, store.ask("POST", DRAIN_PATH, {"node": node.name, "discard": True}).status)
                for node in nodes
            ]
            busy = [node for node, status in answers if status == 503]
            assert len(busy) == len(nodes) - DRAINS_MAX
            assert [cluster.state_of(node) for node in busy] == ["alive"] * len(busy)
            for node in nodes:
                assert store.ask("POST", UNDRAIN_PATH, {"node": node.name}).status == 204
            del held


def drained(store: Store, node: Node, state: str) -> None:
    until(
        lambda: store.ask("GET", f"{DRAIN_PATH}?node={node.name}").json["state"] == state,
        within_s=60,
    )


# --- the document ---------------------------------------------------------------------------------


def test_what_is_described_is_what_is_served(store: Store) -> None:
    """Every answer has the shape that the document gives it."""
    document = store.ask("GET", OPENAPI_PATH).json
    store.put(b"a", b"1")
    node = store.cluster.nodes[0].name
    keys = {"keys": [b"a".hex()]}
    retain = {"action_id": "", "action_type": "kv.retain", "action_version": "1", "payload": keys}
    envelope = {"protocol_version": "0.1", "message_id": "", "actions": [retain]}
    requests: dict[tuple[str, str], list[tuple[str, Any]]] = {
        ("post", REMOVE_PATH): [("", {"keys": ["02"]}), ("", {})],
        ("post", PIN_PATH): [("", keys | {"seconds": 1}), ("", {})],
        ("post", UNPIN_PATH): [("", keys), ("", {})],
        ("post", HINTS_PATH): [("", envelope), ("", envelope | {"actions": [{}]})],
        ("post", MATCH_PATH): [("", keys), ("", {})],
        ("post", EXISTS_PATH): [("", keys), ("", {})],
        ("get", STAT_PATH): [(f"?key={b'a'.hex()}", None), ("?key=00", None), ("", None)],
        ("get", CHAINS_PATH): [("", None), (f"?key={b'a'.hex()}&key=00", None), ("?count=x", None)],
        ("get", BLOCKS_PATH): [(f"?key={b'a'.hex()}&key=00&above=3", None), ("?key=x", None)],
        ("post", FIND_PATH): [("", {"text": "a b"}), ("", {"text": "a", "namespaces": ["none"]})],
        ("get", NODES_PATH): [("", None)],
        ("post", DRAIN_PATH): [("", {"node": "none"}), ("", {"node": node})],
        ("get", DRAIN_PATH): [(f"?node={node}", None), ("?node=none", None)],
        ("post", UNDRAIN_PATH): [("", {"node": node}), ("", {"node": "none"})],
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
