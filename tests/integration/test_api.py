"""``/api/v1`` for programs: real masters and nodes, asked over HTTP."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any, NamedTuple

import pytest

from kvstore.console.api.diagnostics import WHY_PATH
from kvstore.console.api.lookups import HINTS_PATH, MATCH_PATH, REMOVE_PATH
from kvstore.limits import PIN_MS_MAX
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


def test_an_envelope_is_answered_action_by_action(store: Store) -> None:
    def action(name: str, **payload: object) -> dict[str, object]:
        return {"action_id": name, "action_type": name, "action_version": "1.0", "payload": payload}

    actions = [
        action("kv.retain", ttl_ms=60_000), action("kv.pin", ttl_ms=10**9, keys=hexes(KEYS[1])),
        action("session_end", keys=hexes(KEYS[1])), action("kv.demote", keys=["00"]),
        action("kv.prefetch"), action("kv.share"), action("kv.retain", block_hashes=[7]),
    ]  # fmt: skip
    envelope = {"protocol_version": "0.1", "message_id": "m", "actions": actions}
    status, reply = post(
        store.port, HINTS_PATH, envelope | {"key": KEYS[2].hex(), "namespaces": ["n", "other"]}
    )
    assert (status, reply["message_id"]) == (200, "m")
    results = [
        (each["action_id"], each["outcome"], each["retained_s"]) for each in reply["actions"]
    ]
    assert results == [
        ("kv.retain", "accepted", 60), ("kv.pin", "clipped", PIN_MS_MAX / 1000),
        ("session_end", "ignored", 0), ("kv.demote", "missing", 0), ("kv.prefetch", "ignored", 0),
        ("kv.share", "ignored", 0), ("kv.retain", "ignored", 0),
    ]  # fmt: skip
    reasons = [each["reason"] for each in reply["actions"]]
    assert [bool(reason) for reason in reasons] == [False, *[True] * 6]
    assert "block_hashes" in reasons[-1]

    wrong = envelope | {"actions": [actions[0], action("kv.pin", ttl_ms=True)]}
    status, text = post(store.port, HINTS_PATH, wrong | {"key": KEYS[2].hex(), "namespaces": ["n"]})
    assert (status, text.startswith("actions.1.payload.ttl_ms: ")) == (400, True)
    assert dict(store.cluster.status().counters)["hints.retain.accepted"] == 1, "all or nothing"
    notes = str(json.loads(get(store.port, WHY_PATH).text)["notes"])
    assert "hints since the master's start: retained chains 1 (" in notes


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
    for path in (MATCH_PATH, REMOVE_PATH):
        status, text = post(store.port, path, body)
        assert (status, why in text) == (400, True), text
        assert len(text) < 500
