"""``kvstore why`` against a client that knows what the test says, hostile names included."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Self

import pytest

import kvstore
from kvstore import calls
from kvstore.calls import ClientTraffic, MissedKey, NamespaceTraffic
from kvstore.config import ClientConfig
from kvstore.limits import FLEET_NAMESPACE, Key
from tests.unit.cli.conftest import KV

HOSTILE = "".join(map(chr, range(256))) + "\u202e\u200b\u2028\U000e0001模é"
"""Every control character, and what turns or hides text."""


class FakeClient:
    """What ``kvstore why`` uses of a ``Client``."""

    def __init__(self) -> None:
        self.config = ClientConfig()
        self.spaces: list[NamespaceTraffic] = []
        self.records: dict[bytes, Any] = {}
        self.rows: dict[str, list[str]] = {}
        """States of the objects of a namespace."""
        self.held: set[tuple[str, bytes]] = set()
        self.error: Exception | None = None
        self.status_rows: list[calls.NamespaceStatus] = []

    def __call__(self, *, config: ClientConfig) -> Self:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def status(self) -> calls.ClusterStatus:
        node = calls.NodeStatus("n", "h", "alive", "", 0, [])
        return calls.ClusterStatus(7, "1", 60_000, [node], self.status_rows, [])

    def traffic(self) -> calls.TrafficReport:
        return calls.TrafficReport(7, 60_000, self.spaces, 0)

    def list_objects(self, *, namespace: str) -> Iterator[calls.ObjectRow]:
        if namespace == FLEET_NAMESPACE:
            for key, value in self.records.items():
                yield calls.ObjectRow(namespace, Key(key), len(value), 1, 0, 0, "complete")
        for number, state in enumerate(self.rows.get(namespace, ())):
            yield calls.ObjectRow(namespace, Key(b"%d" % number), 1, 1, 0, 0, state)

    def get_many(self, keys: Sequence[bytes], *, namespace: str, kind: str) -> list[Any]:
        if self.error is not None:
            raise self.error
        return [self.records[key] for key in keys]

    def stat(self, key: bytes, *, namespace: str) -> object:
        return object() if (namespace, key) in self.held else None


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    fake = FakeClient()
    monkeypatch.setattr(kvstore, "Client", fake)
    return fake


@pytest.fixture
def why(kv: KV) -> KV:
    return partial(kv, "why")


def writer(name: str = "prefill-1", keys: int = 8) -> ClientTraffic:
    return ClientTraffic(name, "10.0.0.8", 9_000, 2_000, keys, 0, keys, b"k" * 32)


def reader(name: str = "decode-1", found: int = 0) -> ClientTraffic:
    return ClientTraffic(name, "10.0.0.9", 9_000, 1_000, 8, found, 0, b"")


def space(
    name: str, objects: int, putters: Sequence[Any] = (), askers: Sequence[Any] = (),
    misses: Sequence[MissedKey] = (),
) -> NamespaceTraffic:  # fmt: skip
    none = len(misses)
    return NamespaceTraffic(
        name, objects, objects << 20, putters, askers, misses, none, none, 0, 0, 0, 0
    )


def missed(key: bytes = b"\x01" * 32, name: str = "decode-1") -> MissedKey:
    return MissedKey(Key(key), name, "10.0.0.9", 1_000, 0, 8, False)


def record(mark: str, **changes: Any) -> bytes:
    value = {
        "format": 1, "engine": "vllm", "models": ["/models/m"], "fingerprint": mark * 8,
        "namespaces": [f"vllm/{mark}"], "description": {"dtype": "bfloat16", **changes},
    }  # fmt: skip
    return json.dumps(value).encode()


@pytest.fixture
def two_engines(store: FakeClient) -> FakeClient:
    store.spaces = [
        space("vllm/a", 8, [writer()]),
        space("vllm/b", 0, [], [reader()], [missed()]),
    ]
    store.records = {b"m/a": record("a"), b"m/b": record("b", dtype="float16")}
    return store


@pytest.mark.usefixtures("two_engines")
def test_one_screen_says_who_and_why(why: KV, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    reasons = why().out.partition("\n1. ")[2]
    assert max(map(len, reasons.splitlines())) < 60
    monkeypatch.setenv("COLUMNS", "100")
    result = why()
    assert result.code == 1
    assert "writes  prefill-1 (10.0.0.8), 2.0 s ago: 8 of 8 keys stored" in result.out
    assert "asks    decode-1 (10.0.0.9), 1.0 s ago: 0 of 8 keys found" in result.out
    assert "key 1 of 8, asked by decode-1 1.0 s ago" in result.out
    assert "dtype: bfloat16 writes, float16 reads" in result.out
    assert len(result.out.splitlines()) < 24
    assert max(map(len, result.out.splitlines())) <= 100


@pytest.mark.usefixtures("two_engines")
def test_a_program_gets_the_same(why: KV) -> None:
    result = why("--json", "--model", "m")
    found = json.loads(result.out)
    assert result.code == 1
    assert [cause["code"] for cause in found["causes"]] == ["other_fingerprint"]
    assert found["causes"][0]["fields"] == ["dtype: bfloat16 writes, float16 reads"]
    assert {party["fingerprint"] for party in found["groups"]} == {"a" * 8, "b" * 8}
    assert {party["missed"] and party["missed"]["key"] for party in found["groups"]} == {
        None, "01" * 32,
    }  # fmt: skip


@pytest.mark.usefixtures("two_engines")
@pytest.mark.parametrize("asked", [["nope"], ["--model", "nope"]])
def test_a_name_that_is_not_there_is_said_with_those_that_are(why: KV, asked: list[str]) -> None:
    result = why(*asked)
    assert result.code == 3
    assert "nope" in result.err
    assert "m" in result.err
    assert json.loads(why("--json", *asked).out)["causes"] == []


def test_a_missed_key_is_looked_for_in_other_namespaces(why: KV, store: FakeClient) -> None:
    store.spaces = [space("x", 4, [writer()]), space("y", 0, [], [reader()], [missed()])]
    store.held = {("x", b"\x01" * 32)}
    result = why("y")
    assert "a key that decode-1 looked up in y is stored in x" in result.out


def test_no_name_reaches_the_terminal_as_it_is(why: KV, store: FakeClient) -> None:
    """Of a namespace, a client, a key, a model, a field and its value, an error."""
    store.spaces = [
        space(
            HOSTILE, 4, [writer(HOSTILE)], [reader(HOSTILE)], [missed(bytes(range(256)), HOSTILE)]
        ),
        space("vllm/a", 8, [writer(HOSTILE)]),
        space("vllm/b", 0, [], [reader(HOSTILE)], [missed(HOSTILE.encode()[:256], HOSTILE)]),
    ]
    store.records = {
        b"m/a": record("a", models=[HOSTILE], **{HOSTILE: HOSTILE}),
        b"m/b": record("b", **{HOSTILE: "\x1b[2J\ud800"}),
    }
    store.held = {("vllm/a", bytes(range(256)))}
    for arguments in (
        [],
        ["--model", "\x1b[2Jx"],
        ["\x1b]0;x\x07"],
        ["--json"],
        ["--json", "\x9b"],
    ):
        result = why(*arguments)
        shown = (result.out + result.err).replace("\n", "")
        assert shown.isprintable(), [char for char in shown if not char.isprintable()]
