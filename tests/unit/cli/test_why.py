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
from kvstore.errors import NodeUnreachableError
from kvstore.limits import FLEET_NAMESPACE, Key
from kvstore.texts import shown_text
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
def test_one_screen_says_who_and_why(why: KV) -> None:
    result = why()
    assert result.code == 1
    assert "writes  prefill-1 (10.0.0.8), 2.0 s ago: 8 of 8 keys stored" in result.out
    assert "asks    decode-1 (10.0.0.9), 1.0 s ago: 0 of 8 keys found" in result.out
    assert "key 1 of 8, asked by decode-1 1.0 s ago" in result.out
    assert "dtype: bfloat16 writes, float16 asks" in result.out
    assert len(result.out.splitlines()) < 24
    assert max(map(len, result.out.splitlines())) <= 100


@pytest.mark.usefixtures("two_engines")
def test_a_program_gets_the_same(why: KV) -> None:
    result = why("--json", "--model", "m")
    found = json.loads(result.out)
    assert result.code == 1
    assert [cause["code"] for cause in found["causes"]] == ["other_fingerprint"]
    assert found["causes"][0]["fields"] == ["dtype: bfloat16 writes, float16 asks"]
    assert {party["fingerprint"] for party in found["parties"]} == {"a" * 8, "b" * 8}
    assert {party["missed"] and party["missed"]["key"] for party in found["parties"]} == {
        None, "01" * 32,
    }  # fmt: skip


def test_states_of_recurrent_layers_are_counted_apart(why: KV, store: FakeClient) -> None:
    names = [f"vllm/aa/g{group}/p0t0" for group in range(2)]
    value = json.loads(record("a", groups=[{"kind": "FullAttentionSpec"}, {"state": []}]))
    store.records = {b"m/a": json.dumps({**value, "namespaces": names}).encode()}
    store.spaces = [space(names[0], 8, [writer()]), space(names[1], 3, [writer()])]
    told = "holds   3 states of recurrent layers, 3.00 MiB; 8 blocks of attention, 8.00 MiB"
    assert told in why().out
    (party,) = json.loads(why("--json").out)["parties"]
    assert party["objects"] == 11
    assert (party["state_objects"], party["state_size"]) == (3, 3 << 20)


@pytest.mark.usefixtures("two_engines")
def test_the_setting_for_another_cut_is_on_the_screen(why: KV, store: FakeClient) -> None:
    assert "states" not in why().out
    groups = [[{"block_tokens": size}] for size in (16, 32)]
    store.records = {
        b"m/a": record("a", groups=groups[0]), b"m/b": record("b", groups=groups[1])
    }  # fmt: skip
    shown = why().out
    assert 'only another cut: block size: 16 writes, 32 asks ("block_tokens": 16' in shown
    assert max(map(len, shown.splitlines())) <= 100
    (cause,) = json.loads(why("--json", "--model", "m").out)["causes"]
    assert (cause["fields"], len(cause["cuts"])) == ([], 1)


def test_what_works_is_no_failure(why: KV, store: FakeClient) -> None:
    store.spaces = [space("n", 8, [writer()], [reader(found=8)])]
    result = why("n")
    assert result.code == 0
    assert "100 % of 8 keys asked in n were found" in result.out


@pytest.mark.usefixtures("two_engines")
@pytest.mark.parametrize("asked", [["nope"], ["--model", "nope"]])
def test_a_name_that_is_not_there_is_said_with_those_that_are(why: KV, asked: list[str]) -> None:
    result = why(*asked)
    assert result.code == 3
    assert "nope" in result.err
    assert "m" in result.err
    assert json.loads(why("--json", *asked).out)["causes"] == []


def test_a_namespace_and_a_model_exclude_each_other(why: KV) -> None:
    assert why("n", "--model", "m").code == 2


def test_records_that_cannot_be_read_are_a_note(why: KV, two_engines: FakeClient) -> None:
    two_engines.error = NodeUnreachableError("node \x1b[2J does not answer")
    result = why()
    assert "note: the records of engines could not be read: node \\x1b[2J" in result.out
    assert "prefill-1" in result.out, "the rest is shown"


def test_records_of_strangers_are_passed_over(why: KV, two_engines: FakeClient) -> None:
    for number, value in enumerate(
        (b"", b"{", b"[]", b"7", b"\xff", b'{"description": 7}', b"[" * 10_000, b'{"a":' * 50_000)
    ):
        two_engines.records[b"x/%d" % number] = value
    two_engines.records[b"y"] = bytes(2 << 20)
    deep: Any = 1
    for _ in range(300):
        deep = {"a": deep}
    two_engines.records[b"m/b"] = record("b", deep=deep)
    two_engines.records[b"m/a"] = record("a", deep={"a": {"a": {"a": {"a": 1}}}})
    result = why()
    assert result.code == 1
    assert "deep.a.a.a: " in result.out


def test_a_missed_key_is_looked_for_in_other_namespaces(why: KV, store: FakeClient) -> None:
    store.spaces = [space("x", 4, [writer()]), space("y", 0, [], [reader()], [missed()])]
    store.held = {("x", b"\x01" * 32)}
    result = why("y")
    assert "a key that decode-1 asked for in y is stored in x" in result.out


def test_objects_without_ancestors_are_looked_for(why: KV, store: FakeClient) -> None:
    store.spaces = [space("x", 4, [writer()], [reader()], [missed()])]
    store.rows = {"x": ["detached"] * 3 + ["complete"]}
    assert "3 of 4 objects in x have a missing ancestor" in why().out


def test_objects_from_before_the_masters_start_are_shown(why: KV, store: FakeClient) -> None:
    store.status_rows = [calls.NamespaceStatus("old", 5, 4096)]
    result = why()
    assert result.code == 0
    assert "old: 5 objects" in result.out


def test_many_namespaces_stay_on_one_screen(why: KV, store: FakeClient) -> None:
    store.spaces = [
        space(f"n{number}", 8, [writer(f"w{each}") for each in range(32)]) for number in range(500)
    ]
    assert len(why().out.splitlines()) < 80
    found = json.loads(why("--json").out)
    assert (len(found["parties"]), found["others"]) == (32, 468)


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


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("模 é", "模 é"),
        ("\x1b[31m", "\\x1b[31m"),
        ("a\nb\t\x7f\x9b", "a\\nb\\t\\x7f\\x9b"),
        ("\u202e\ud800", "\\u202e\\ud800"),
        ("x" * 90, "x" * 79 + "…"),
    ],
)
def test_text_of_strangers(text: str, shown: str) -> None:
    assert shown_text(text) == shown
