"""``/api/v1`` for programs: real masters and nodes, asked over HTTP."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any, NamedTuple

import pytest

from kvstore.console.api.lookups import EXISTS_PATH, MATCH_PATH, STAT_PATH
from tests.support.cluster import Cluster, Node
from tests.support.http import get
from tests.support.processes import free_port

KEYS = [bytes([number]) * 16 for number in range(1, 6)]


class Store(NamedTuple):
    cluster: Cluster
    port: int
    node: Node


@pytest.fixture
def store(cluster: Cluster) -> Store:
    """Three blocks of a chain in the namespace ``n``."""
    cluster.settings["http_port"] = free_port()
    cluster.master()
    node = cluster.node()
    with cluster.client(namespace="n") as client:
        client.put_chain(KEYS[:3], [b"x", b"yy", b"zzz"])
    return Store(cluster, cluster.settings["http_port"], node)


def post(port: int, path: str, body: Any) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def hexes(*keys: bytes) -> list[str]:
    return [key.hex() for key in keys]


def test_how_far_a_chain_is_there_and_where(store: Store) -> None:
    asked = {"keys": hexes(*KEYS), "namespaces": ["n", "other"]}
    status, answer = post(store.port, MATCH_PATH, asked)
    assert status == 200
    assert answer["matches"] == [
        {"namespace": "n", "matched": 3, "being_written": 0, "nodes": [store.node.name]},
        {"namespace": "other", "matched": 0, "being_written": 0, "nodes": []},
    ]
    assert post(store.port, MATCH_PATH, {"keys": []})[1]["matches"][0]["matched"] == 0


def test_what_exists(store: Store) -> None:
    asked = {"keys": hexes(KEYS[4], KEYS[1]), "namespace": "n"}
    assert post(store.port, EXISTS_PATH, asked) == (200, {"exists": [False, True]})


def test_one_object(store: Store) -> None:
    found = get(store.port, f"{STAT_PATH}?namespace=n&key={KEYS[1].hex()}")
    assert found.status == 200
    told = json.loads(found.text)
    assert (told["size"], told["depth"], told["state"]) == (2, 1, "complete")
    assert (told["key"], told["parent"]) == (KEYS[1].hex(), KEYS[0].hex())
    assert [place["node"] for place in told["locations"]] == [store.node.name]
    assert get(store.port, f"{STAT_PATH}?key={KEYS[1].hex()}").status == 404
    assert get(store.port, f"{STAT_PATH}?key=xyz") == (
        400,
        "key: 'xyz' is no key of 1 to 256 bytes in hexadecimal\n",
    )


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "the body"),
        (b"[" * 100_000, "the body"),
        ({"keys": ["0g"]}, "keys.0"),
        ({"keys": ["00" * 300]}, "key"),
        ({"keys": ["00"], "limit": 1}, "limit"),
        ({"keys": ["00"] * 20_000}, "keys"),
        ({}, "keys"),
    ],
)
def test_a_wrong_question_is_told_what_is_wrong(store: Store, body: Any, why: str) -> None:
    for path in (MATCH_PATH, EXISTS_PATH):
        status, text = post(store.port, path, body)
        assert (status, why in text) == (400, True), text
        assert len(text) < 500
