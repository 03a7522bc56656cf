"""``/api/v1`` for programs that write: a real master and node, as curl would ask them."""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import jsonschema
import numpy as np
import pytest

from kvstore.client import values
from kvstore.web.api.chains import BLOCKS_PATH, CHAINS_PATH, FIND_PATH
from kvstore.web.api.drains import DRAIN_PATH, DRAINS_MAX, NODES_PATH, UNDRAIN_PATH
from kvstore.web.api.objects import LIST_PATH, PATH, PIN_PATH, REMOVE_PATH, ROOM_BYTES, UNPIN_PATH
from kvstore.web.api.questions import EXISTS_PATH, MATCH_PATH, STAT_PATH
from kvstore.web.server.endpoints import PATH as OPENAPI_PATH
from tests.support.cluster import Cluster, Node
from tests.support.http import Reply, request
from tests.support.processes import free_port
from tests.support.waiting import until

EVERY_BYTE = bytes(range(256))
MIB = 1 << 20


class Store(NamedTuple):
    cluster: Cluster
    port: int

    def ask(self, method: str, path: str, body: Any = None, **more: Any) -> Reply:
        return request(self.port, method, path, body, **more)

    def put(self, key: bytes, body: bytes, more: str = "", **given: Any) -> Reply:
        return self.ask("PUT", f"{PATH}?key={key.hex()}{more}", body, **given)

    def get(self, key: bytes, more: str = "", **given: Any) -> Reply:
        return self.ask("GET", f"{PATH}?key={key.hex()}{more}", **given)


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


def put_when_free(store: Store, key: bytes, body: bytes) -> Reply:
    """The reply of a put that has space. The pool may still hold removed objects of another test
    for one lease."""
    while (reply := store.put(key, body)).status == 507:
        time.sleep(0.02)
    return reply


# --- bytes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 4_097, MIB, 64 * MIB])
def test_what_is_put_is_what_is_got(store: Store, size: int) -> None:
    body = np.random.default_rng(size).bytes(size)
    put = put_when_free(store, b"k", body)
    assert (put.status, put.json) == (201, {"outcome": "stored", "size": size})
    got = store.get(b"k")
    assert got.status == 200
    assert hashlib.sha256(got.body).digest() == hashlib.sha256(body).digest()
    assert got.headers["Content-Type"] == "application/octet-stream"
    assert got.headers["X-Content-Type-Options"] == "nosniff"
    assert json.loads(got.headers["Kvstore-Descriptor"])["kind"] == "bytes"
    head = store.ask("HEAD", f"{PATH}?key={b'k'.hex()}")
    assert (head.status, head.headers["Content-Length"], head.body) == (200, str(size), b"")
    with store.cluster.client() as client:
        assert client.get("k") == body


def test_keys_and_namespaces_of_every_byte(store: Store) -> None:
    space = "of\n\x1b\u202e a } test&key=00"
    more = f"&namespace={quote(space, safe='')}"
    assert store.put(EVERY_BYTE, b"x", more).status == 201
    assert store.get(EVERY_BYTE, more).body == b"x"
    assert store.get(EVERY_BYTE).status == 404
    with store.cluster.client() as client:
        assert client.get(EVERY_BYTE, namespace=space) == b"x"
    rows = store.ask("GET", f"{LIST_PATH}?namespace={quote(space, safe='')}").json["objects"]
    assert [(row["namespace"], row["key"]) for row in rows] == [(space, EVERY_BYTE.hex())]
    assert store.ask("DELETE", f"{PATH}?key={EVERY_BYTE.hex()}{more}").status == 204
    assert store.ask("DELETE", f"{PATH}?key={EVERY_BYTE.hex()}{more}").status == 404


def test_what_other_clients_put_is_described(store: Store) -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    with store.cluster.client() as client:
        client.put("k", array)
        found = client.stat("k")
    got = store.get(b"k")
    assert got.body == array.tobytes()
    described = json.loads(got.headers["Kvstore-Descriptor"])
    assert described == {"kind": "numpy", "dtype": "float32", "shape": [2, 3]}
    assert found is not None
    version = found.detail.version
    assert got.headers["Kvstore-Version"] == f"{version.epoch}.{version.counter}"


def test_what_says_nothing_true_of_itself_is_bytes(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    lies = [
        '{"kind":"numpy","dtype":"O","shape":[1]}', '{"kind":"numpy","dtype":"u1","shape":[1e999]}',
        "[" * 300, '{"kind":"torch","dtype":"\\r\\nX-A: b","shape":[1]}',
    ]  # fmt: skip
    with store.cluster.client() as client:
        for at, lie in enumerate(lies):
            monkeypatch.setattr(values, "_describe", lambda *_, said=lie: said.encode())
            client.put(f"lie-{at}", b"content")
    for at, _ in enumerate(lies):
        got = store.get(f"lie-{at}".encode())
        assert (got.status, got.body) == (200, b"content")
        assert json.loads(got.headers["Kvstore-Descriptor"])["kind"] in ("numpy", "bytes")
        assert "X-A" not in got.headers


@pytest.mark.parametrize(
    ("asked", "status", "body", "range_"),
    [
        ("bytes=0-0", 206, b"a", "bytes 0-0/5"),
        ("bytes=1-", 206, b"bcde", "bytes 1-4/5"),
        ("bytes=-2", 206, b"de", "bytes 3-4/5"),
        ("bytes=3-99", 206, b"de", "bytes 3-4/5"),
        ("bytes=5-", 416, b"no such range\n", "bytes */5"),
        ("bytes=0-0,2-2", 200, b"abcde", None),
        ("bytes=4-1", 200, b"abcde", None),
        ("lines=1-2", 200, b"abcde", None),
    ],
)
def test_a_range_of_the_bytes(
    store: Store, asked: str, status: int, body: bytes, range_: str | None
) -> None:
    store.put(b"k", b"abcde")
    got = store.get(b"k", headers={"Range": asked})
    assert (got.status, got.body, got.headers["Content-Range"]) == (status, body, range_)


def test_a_range_of_another_version_is_the_whole(store: Store) -> None:
    store.put(b"k", b"abcde")
    headers = {"Range": "bytes=1-2", "If-Range": '"1.1"'}
    assert store.get(b"k", headers=headers).body == b"abcde"
    headers["If-Range"] = store.get(b"k").headers["ETag"]
    assert store.get(b"k", headers=headers).body == b"bc"


def test_how_an_object_is_kept(store: Store) -> None:
    assert store.put(b"a", b"1").status == 201
    assert store.put(b"b", b"2", f"&parent={b'a'.hex()}").status == 201
    assert store.put(b"a", b"1").json["outcome"] == "found"
    assert store.put(b"a", b"other", "&overwrite=true").status == 201
    assert store.get(b"a").body == b"other"
    match = {"keys": [b"a".hex(), b"b".hex()]}
    assert store.ask("POST", MATCH_PATH, match).json["matches"][0]["matched"] == 2
    assert store.put(b"c", b"3", "&ttl_ms=200").status == 201
    until(lambda: store.get(b"c").status == 404)


def test_pins(store: Store) -> None:
    store.put(b"a", b"1")
    asked = {"keys": [b"a".hex(), b"none".hex()]}
    assert store.ask("POST", PIN_PATH, asked | {"seconds": 60}).json == {"pinned": [True, False]}
    assert sum(each.pinned_objects for each in store.cluster.status().namespaces) == 1
    assert store.ask("POST", UNPIN_PATH, asked).json == {"unpinned": [True, False]}


def test_a_list_comes_in_pages(store: Store) -> None:
    keys = [b"%05d" % number for number in range(2_500)]
    with store.cluster.client() as client:
        client.put_many([(key, b"x") for key in keys], namespace="n")
        client.put("other", b"x", namespace="m")
    found, cursor = [], 0
    while True:
        page = store.ask("GET", f"{LIST_PATH}?namespace=n&cursor={cursor}").json
        found += [bytes.fromhex(row["key"]) for row in page["objects"]]
        assert len(page["objects"]) <= 1_000
        cursor = page["cursor"]
        if not cursor:
            break
    assert sorted(found) == keys
    some = store.ask("GET", f"{LIST_PATH}?prefix={b'0001'.hex()}").json["objects"]
    assert sorted(row["text"] for row in some) == [f"0001{digit}" for digit in range(10)]
    everything = {"keys": [key.hex() for key in keys[:2_000]] + ["ff"], "namespace": "n"}
    assert sum(store.ask("POST", REMOVE_PATH, everything).json["removed"]) == 2_000


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "body", "why"),
    [
        ("PUT", f"{PATH}", b"x", "key"),
        ("PUT", f"{PATH}?key=", b"x", "key"),
        ("PUT", f"{PATH}?key=0", b"x", "key"),
        ("PUT", f"{PATH}?key={'00' * 257}", b"x", "key"),
        ("PUT", f"{PATH}?key=00&key=01", b"x", "twice"),
        ("PUT", f"{PATH}?key=00&ttl_ms=0", b"x", "ttl_ms"),
        ("PUT", f"{PATH}?key=00&ttl_ms=soon", b"x", "ttl_ms"),
        ("PUT", f"{PATH}?key=00&replicas=99", b"x", "replicas"),
        ("PUT", f"{PATH}?key=00&unknown=1", b"x", "unknown"),
        ("PUT", f"{PATH}?key=00&namespace={'n' * 200}", b"x", "namespace"),
        ("GET", f"{LIST_PATH}?cursor=-1", None, "cursor"),
        ("GET", f"{LIST_PATH}?cursor={1 << 70}", None, "cursor"),
        ("GET", f"{LIST_PATH}?prefix=x", None, "prefix"),
        ("POST", REMOVE_PATH, {"keys": ["xy"]}, "keys.0"),
        ("POST", REMOVE_PATH, {"keys": []} | {"more": 1}, "more"),
        ("POST", PIN_PATH, {"keys": ["00"], "seconds": -1}, "seconds"),
        ("POST", DRAIN_PATH, {"node": "none"}, "node"),
        ("POST", UNDRAIN_PATH, {"node": "none"}, "node"),
    ],
)
def test_a_wrong_request_is_told_what_is_wrong(
    store: Store, method: str, path: str, body: Any, why: str
) -> None:
    reply = store.ask(method, path, body)
    assert (reply.status, why in reply.text) == (400, True), reply
    assert len(reply.text) < 500


def raw(store: Store, head: str) -> socket.socket:
    """A connection on which this was sent."""
    connection = socket.create_connection(("127.0.0.1", store.port), timeout=30)
    connection.sendall(f"{head}\r\nHost: 127.0.0.1\r\n\r\n".encode())
    return connection


def test_a_body_that_is_not_taken_is_not_asked_for(store: Store) -> None:
    for more, status in (
        (f"Content-Length: {ROOM_BYTES + 1}", b"413"),
        ("Transfer-Encoding: chunked", b"411"),
        ("Content-Length: 5\r\nContent-Encoding: gzip", b"415"),
    ):
        head = f"PUT {PATH}?key=00 HTTP/1.1\r\n{more}\r\nExpect: 100-continue"
        with raw(store, head) as connection:
            assert connection.recv(1_000).startswith(b"HTTP/1.1 " + status), more
    with raw(
        store, f"PUT {PATH}?key=00 HTTP/1.1\r\nContent-Length: 5\r\nExpect: 100-continue"
    ) as connection:
        assert connection.recv(1_000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(b"hello")
        assert connection.recv(1_000).startswith(b"HTTP/1.1 201 ")
    assert store.get(b"\0").body == b"hello"


def test_a_pool_that_is_full_is_told_apart(store: Store) -> None:
    assert put_when_free(store, b"pinned", b"x" * (100 * MIB)).status == 201
    asked = {"keys": [b"pinned".hex()], "seconds": 60}
    assert store.ask("POST", PIN_PATH, asked).json == {"pinned": [True]}
    full = store.put(b"k", b"x" * (200 * MIB))
    assert full.status == 507, full
    assert store.get(b"k").status == 404


# --- clients that leave, or are slow --------------------------------------------------------------


def test_a_client_that_leaves_in_a_put_leaves_nothing(store: Store) -> None:
    for key in ("61", "62", "63"):
        head = f"PUT {PATH}?key={key} HTTP/1.1\r\nContent-Length: {200 * MIB}"
        with raw(store, head) as connection:
            connection.sendall(b"x" * MIB)
    # The memory that was set aside for them is free again: this one needs most of it.
    assert put_when_free(store, b"k", b"y" * (150 * MIB)).status == 201
    asked = {"keys": ["61", "62", "63", b"k".hex()]}
    assert store.ask("POST", EXISTS_PATH, asked).json["exists"] == [False, False, False, True]


def test_a_body_that_does_not_come_is_given_up(store: Store) -> None:
    with raw(store, f"PUT {PATH}?key=00 HTTP/1.1\r\nContent-Length: 5") as slow:
        slow.sendall(b"hell")
        assert store.put(b"other", b"x").status == 201
        assert slow.recv(1_000).startswith(b"HTTP/1.1 408 ")
    assert store.get(b"\0").status == 404


def test_many_at_once(store: Store) -> None:
    """More than there is memory for: all are answered, the bytes are right."""

    def work(number: int) -> None:
        body = bytes([number]) * (30 * MIB)
        key = b"many %d" % number
        while (put := store.put(key, body, timeout_s=120)).status in (503, 507):
            pass
        assert put.status == 201, put
        while (got := store.get(key, timeout_s=120)).status == 503:
            pass
        if got.status != 404:  # it may have been evicted
            assert (got.status, got.body == body) == (200, True)

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        for _ in pool.map(work, range(16)):  # raises what failed
            pass


def test_a_node_that_is_killed_in_a_get(tmp_path: Path) -> None:
    """What was begun is sent to its end, because it had been read and verified as a whole."""
    settings = {"http_port": free_port()}
    body = os.urandom(64 * MIB)
    with Cluster(tmp_path, settings=settings) as cluster:
        cluster.start(memory="128MiB")
        store = Store(cluster, settings["http_port"])
        assert store.put(b"k", body).status == 201
        with raw(store, f"GET {PATH}?key={b'k'.hex()} HTTP/1.1\r\nConnection: close") as reading:
            got = reading.recv(1_000)
            cluster.nodes[0].kill()
            while data := reading.recv(1 << 20):
                got += data
        head, _, rest = got.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        assert rest == body
        after = store.get(b"k")  # a mapping of its memory may last as long as the lease
        assert after.status in (404, 503) or after.body == body


# --- nodes ----------------------------------------------------------------------------------------


def test_a_node_is_drained_and_leaves(tmp_path: Path) -> None:
    settings = {"http_port": free_port()}
    with Cluster(tmp_path, settings=settings) as cluster:
        cluster.start(memory="64MiB")
        store = Store(cluster, settings["http_port"])
        for number in range(10):
            assert store.put(b"%d" % number, bytes([number]) * MIB).status == 201
        first = cluster.nodes[0]
        alone = store.ask("POST", DRAIN_PATH, {"node": first.name})
        assert (alone.status, b"nothing was moved" in alone.body) == (507, True)
        assert cluster.state_of(first) == "alive"
        alone = store.ask("POST", DRAIN_PATH, {"node": first.name, "evict": True})
        assert (alone.status, alone.json["state"]) == (202, "moving")
        drained(store, first, "kept")
        assert cluster.state_of(first) == "draining"
        told = store.ask("GET", f"{DRAIN_PATH}?node={first.name}").json
        assert (told["kept"], told["moved"]) == (10, 0)
        assert store.ask("POST", UNDRAIN_PATH, {"node": first.name}).status == 204
        assert cluster.state_of(first) == "alive"

        second = cluster.node(memory="64MiB")
        assert store.ask("POST", DRAIN_PATH, {"node": first.name}).status == 202
        drained(store, first, "left")
        assert first.wait() == 0
        for number in range(10):
            assert store.get(b"%d" % number).body == bytes([number]) * MIB
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
    requests: dict[tuple[str, str], list[tuple[str, Any]]] = {
        ("get", PATH): [(f"?key={b'a'.hex()}", None), ("?key=00", None), ("?key=x", None)],
        ("put", PATH): [("?key=01", b"x"), ("?key=01", b"x"), ("?key=", b"x")],
        ("delete", PATH): [("?key=01", None), ("?key=01", None), ("", None)],
        ("get", LIST_PATH): [("", None), ("?cursor=x", None)],
        ("post", REMOVE_PATH): [("", {"keys": ["02"]}), ("", {})],
        ("post", PIN_PATH): [("", keys | {"seconds": 1}), ("", {})],
        ("post", UNPIN_PATH): [("", keys), ("", {})],
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
        ("get", "/api/v1/notices"): [("", None), ("?after=x", None)],
        ("get", "/api/v1/fleet"): [("", None)],
        ("get", "/api/v1/why"): [("", None), ("?namespace=none", None)],
        ("get", "/api/v1/traffic"): [("", None)],
        ("get", "/api/v1/events/snapshot"): [("", None)],
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
    for body, query in (("requestBody", "parameters"),):
        operation = document["paths"][PATH]["put"]
        assert operation[body]["required"]
        assert {each["name"] for each in operation[query]} > {"key", "parent", "ttl_ms"}


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


def test_there_is_no_other_way_in(store: Store) -> None:
    for path in ("/api/v1", f"{PATH}/", "/api/v1//objects?key=00", "/api/v2/objects?key=00"):
        assert store.ask("PUT", path, b"x").status in (404, 405)
    asked = {"Origin": "http://evil.example", "Access-Control-Request-Method": "PUT"}
    reply = store.ask("OPTIONS", f"{PATH}?key=00", headers=asked)
    assert reply.status == 405
    assert not [name for name in reply.headers if name.lower().startswith("access-control")]
