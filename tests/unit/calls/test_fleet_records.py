"""Fleet records: what engines put into the store, and what a fleet that disagrees is told."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from kvstore.calls import ObjectRow, fleet_records
from kvstore.calls.fleet_records import LIFETIME_S, SERVES_S, FleetRecord
from kvstore.config import ClientConfig
from kvstore.connectors.common import fleet as fleets
from kvstore.connectors.common.fingerprint import fingerprint
from kvstore.connectors.common.fleet import FleetAnnouncer, FleetRecords
from kvstore.errors import UnavailableError
from kvstore.limits import FLEET_NAMESPACE, KEY_BYTES_MAX, Key, of_tenant
from tests.support.wait import until

LOG = logging.getLogger("test")
DESCRIPTION = {"dtype": "torch.float16", "quantization": "None", "tensor_parallel": 1}
OF_VLLM = {
    "hash_block_size": 16, "hash_algorithm": "sha256_cbor", "none_hash": "00",
}  # fmt: skip


class Board:
    """As much of a client as the fleet uses: keys and bytes."""

    def __init__(self, tenant: str = "") -> None:
        self.config = ClientConfig(tenant=tenant)
        self.space = of_tenant(tenant, FLEET_NAMESPACE)
        self.objects: dict[bytes, bytes] = {}
        self.lifetimes_begun = 0
        self.failures = 0
        """Of the next calls."""

    def list_objects(self, *, namespace: str, prefix: bytes) -> list[Any]:
        self.failures -= 1
        if self.failures >= 0:
            raise UnavailableError("away")
        assert namespace == self.space
        objects = self.objects.items()
        return [listed(key, len(value)) for key, value in objects if key.startswith(prefix)]

    def get_many(self, keys: list[bytes], *, namespace: str, kind: str) -> list[bytes | None]:
        assert namespace == self.space
        return [self.objects.get(key) for key in keys]

    def put(self, key: bytes, value: bytes, *, namespace: str, ttl: float, overwrite: bool) -> None:
        assert namespace == self.space
        assert len(key) <= KEY_BYTES_MAX
        assert ttl == LIFETIME_S
        self.lifetimes_begun += overwrite or key not in self.objects
        self.objects[key] = value

    def remove(self, key: bytes, *, namespace: str) -> bool:
        assert namespace == self.space
        return self.objects.pop(key, None) is not None


def announce(board: Board, model: str = "m", engine: str = "vllm", **changes: object) -> list[str]:
    description = {**DESCRIPTION, **changes}
    fleet = FleetRecords(board, LOG)  # type: ignore[arg-type]
    record = FleetRecord(engine, (model,), fingerprint(description), ("n",), description, 16)
    return fleet.announce(record, **OF_VLLM)


def test_the_log_names_what_an_engine_uses(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    board, names = Board(), ("vllm/f/g0/p0t0", "vllm/f/g1/p0t0")
    board.config = ClientConfig(master="10.0.0.7:50001", cluster="prod")
    record = FleetRecord("vllm", ("m",), "f", names, DESCRIPTION, 16)
    fleet = FleetRecords(board, LOG)  # type: ignore[arg-type]
    for _ in range(2):
        fleet.announce(record, role="kv_consumer", **OF_VLLM)
    assert caplog.messages == [
        "fleet_joined fingerprint=f master=10.0.0.7:50001 cluster=prod namespaces=vllm/f/* "
        "role=kv_consumer"
    ]


def test_engines_that_agree_are_told_nothing() -> None:
    board = Board()
    assert announce(board) == []
    assert announce(board) == []
    assert len(board.objects) == 1


def test_nobody_is_warned_of_engines_that_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1_000_000.0
    monkeypatch.setattr("kvstore.connectors.common.fleet.time.time", lambda: now_s)
    board = Board()
    announce(board)
    now_s += SERVES_S
    assert len(announce(board, dtype="torch.bfloat16")) == 1
    now_s += 1
    assert announce(board, dtype="torch.bfloat16") == []
    now_s = 10.0  # a clock that was put back
    assert len(announce(board, dtype="torch.bfloat16")) == 1


def test_the_proxy_understands_what_engines_leave() -> None:
    board = Board()
    announce(board)
    ((key, data),) = board.objects.items()
    record = fleet_records.parse(data)
    assert record is not None
    assert record.fingerprint == key.rpartition(b"/")[2].decode()


def test_engines_that_differ_are_told_in_what() -> None:
    board = Board()
    announce(board)
    (warning,) = announce(board, dtype="torch.bfloat16", tensor_parallel=2)
    assert "dtype: 'torch.bfloat16' here, 'torch.float16' there" in warning
    assert "tensor-parallel size: 2 here, 1 there" in warning
    assert "quantization" not in warning
    assert len(board.objects) == 2


def test_other_models_are_nobodys_business() -> None:
    board = Board()
    announce(board)
    assert announce(board, model="m2", dtype="torch.bfloat16") == []


def test_an_engine_that_becomes_another_one_takes_back_its_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the background, and again until the store answers."""
    monkeypatch.setattr(fleets, "AGAIN_S", 0.01)
    board = Board()
    board.failures = 2
    records = [FleetRecord("vllm", ("m",), each * 32, ("n",), DESCRIPTION) for each in "ab"]
    announcer = FleetAnnouncer(board, LOG)  # type: ignore[arg-type]
    try:
        announcer.announce(records[0])
        until(lambda: board.objects.keys() == {b"m/" + b"a" * 32})
        board.failures = 2
        announcer.announce(records[1], former=records[0].fingerprint)
        until(lambda: board.objects.keys() == {b"m/" + b"b" * 32})
    finally:
        announcer.stop()
        announcer.join()


def test_engines_of_another_kind_do_not_differ_but_keep_other_bytes() -> None:
    board = Board()
    announce(board)
    assert announce(board, engine="sglang", dtype="torch.bfloat16") == []
    assert announce(board, engine="sglang", dtype="torch.float32") != []


def told(namespace: str, **changes: object) -> bytes:
    """A record of an engine with one namespace."""
    raw = {"models": ["m"], "fingerprint": "ab", "namespaces": [namespace], "description": changes}
    return json.dumps(raw).encode()


def test_engines_of_a_tenant_meet_in_a_fleet_of_their_own() -> None:
    board = Board("acme")
    board.objects[b"m/" + b"b" * 32] = told("acme/vllm/b/g0/p0t0", dtype="float16")
    board.objects[b"m/" + b"c" * 32] = told("globex/vllm/c/g0/p0t0", dtype="float32")
    engine = FleetRecords(board, LOG)  # type: ignore[arg-type]
    record = FleetRecord("vllm", ("m",), "a" * 32, ("acme/vllm/a/g0/p0t0",), {"dtype": "bfloat16"})
    (warning,) = engine.announce(record)
    assert "'float16' there" in warning
    engine.withdraw(("m",), "a" * 32)
    assert len(board.objects) == 2


@pytest.mark.parametrize(
    ("tenant", "namespace", "is_one"),
    [
        ("acme", "acme/vllm/a/g0/p0t0", True), ("", "vllm/a/g0/p0t0", True), ("", "n", True),
        ("acme", "vllm/a/g0/p0t0", False), ("acme", "globex/sglang/a/p0", False),
        ("", "acme/vllm/a/g0/p0t0", False), ("acme", "n", False),
    ],
)  # fmt: skip
def test_a_record_speaks_of_its_own_tenant_only(tenant: str, namespace: str, is_one: bool) -> None:
    """Who may write in one fleet says nothing of the engines of another one."""
    record = fleet_records.parse(told(namespace), tenant=tenant)
    assert (record is not None) == is_one
    assert record is None or record.tenant == tenant


def test_states_of_recurrent_layers_are_known_for_every_tenant() -> None:
    groups = [{"kind": "FullAttentionSpec"}, {"state": []}]
    for tenant in ("", "acme"):
        names = tuple(of_tenant(tenant, f"vllm/a/g{group}/p0t0") for group in (0, 1))
        record = FleetRecord("vllm", ("m",), "a", names, {"groups": groups})
        assert record.states == {names[1]}


@pytest.mark.parametrize(
    "wrong",
    [
        {"models": []}, {"models": [1]}, {"namespaces": 7}, {"namespaces": [7]},
        {"fingerprint": None}, {"description": 7}, {"block_size": "x"},
        {"models": ["\ud800"]}, {"namespaces": ["n\udfff"]}, {"engine": "\ud800"},  # no UTF-8
        {"block_size": -1}, {"block_size": 1 << 64},  # no MessagePack
    ],
)  # fmt: skip
def test_a_record_with_a_wrong_field_is_none(wrong: dict[str, object]) -> None:
    right = {"models": ["m"], "fingerprint": "a", "namespaces": [], "description": {}}
    assert fleet_records.parse(json.dumps(right).encode()) is not None
    data = json.dumps({**right, **wrong}).encode()
    assert fleet_records.parse(data) is None


ENGINE: dict[str, Any] = {
    "dtype": "torch.float16", "weights": "1a", "files": [], "tensor_parallel": 1,
    "hash_algorithm": "sha256", "none_hash": "00",
    "attention": [["backend=FLASH_ATTN", "num_kv_heads=8"]],
    "groups": [{"kind": "FullAttentionSpec", "block_tokens": 16, "page_bytes": 4_096}],
}  # fmt: skip
"""A description of an engine, as the connector for vLLM makes it."""


def of_blocks(*sizes: int) -> dict[str, Any]:
    groups = [
        {"kind": "FullAttentionSpec", "block_tokens": size, "page_bytes": 256 * size}
        for size in sizes
    ]
    return {**ENGINE, "groups": groups}


RANKS: dict[str, Any] = {
    **ENGINE, "tensor_parallel": 2, "weights": "2b",
    "attention": [["backend=FLASH_ATTN", "num_kv_heads=4"]],
    "groups": [{"kind": "FullAttentionSpec", "block_tokens": 16, "page_bytes": 2_048}],
}  # fmt: skip
"""The same model on two ranks: each has other weights and heads."""


def shards(number: int, **changes: object) -> dict[str, Any]:
    left = {name: value for name, value in ENGINE.items() if name != "tensor_parallel"}
    return {
        **left,
        "shards": number,
        "weights": "of files",
        "attention": [["backend=FLASH_ATTN"]],
        **changes,
    }


def test_another_cut_is_told_from_what_must_be_equal() -> None:
    contrast = fleet_records.compare_descriptions(
        "vllm", ENGINE, {**RANKS, "dtype": "torch.bfloat16"}
    )
    assert contrast.text() == (
        "must be equal: dtype: 'torch.float16' here, 'torch.bfloat16' there; can be reconciled: "
        'tensor-parallel size: 1 here, 2 there ("tp_shards": 2 in both would let them share, if '
        "their weights are the same)"
    )


@pytest.mark.parametrize(
    ("ours", "theirs", "setting"),
    [
        ({**ENGINE, "blocks_per_object": 4}, RANKS, '"tp_shards": 2 in both would let them share'),
        (ENGINE, RANKS, '"tp_shards": 2 in both would let them share, if their weights'),
        (shards(2), {**RANKS, "tensor_parallel": 4}, '"tp_shards": 4 in both would let them sha'),
        (shards(4), shards(6), '"tp_shards": 12 in both would let them share)'),
    ],
)  # fmt: skip
def test_what_follows_from_a_cut_need_not_be_equal(
    ours: dict[str, Any], theirs: dict[str, Any], setting: str
) -> None:
    contrast = fleet_records.compare_descriptions("vllm", ours, theirs)
    assert not contrast.must
    assert setting in contrast.text()


def test_weights_of_files_are_compared_whatever_the_shards_are() -> None:
    contrast = fleet_records.compare_descriptions(
        "vllm", shards(2), shards(4, weights="of other files")
    )
    assert [each.field for each in contrast.must] == ["weights"]
    assert contrast.split is not None


@pytest.mark.parametrize(
    ("theirs", "field"),
    [
        (of_blocks(32), "groups.0.block_tokens"),
        (of_blocks(16, 32), "groups"),
        ({**ENGINE, "blocks_per_object": 4}, "blocks_per_object"),
        ({**ENGINE, "tensor_parallel": "2"}, "tensor_parallel"),
        ({**ENGINE, "tensor_parallel": 1_025}, "tensor_parallel"),
        ({**ENGINE, "groups": [7]}, "groups.0"),
        ({**ENGINE, "pipeline_parallel": 2}, "pipeline_parallel"),
        ({**ENGINE, "hash_algorithm": "xxhash"}, "hash_algorithm"),
        ({**ENGINE, "none_hash": "01"}, "none_hash"),
        ({**ENGINE, "hash_tokens": 8}, "hash_tokens"),
    ],
)
def test_where_no_setting_helps_it_must_be_equal(theirs: dict[str, Any], field: str) -> None:
    contrast = fleet_records.compare_descriptions("vllm", ENGINE, theirs)
    assert contrast.split is None
    assert field in [each.field for each in contrast.must]


def test_namespaces_of_states_are_told_from_those_of_blocks() -> None:
    names = ("vllm/f/g0/p0t0", "vllm/f/g1/p0t0", "vllm/f/g1/p0t1", "vllm/f/g7/p0t0", "other/g1/x")
    groups: list[Any] = [{"kind": "FullAttentionSpec"}, {"kind": "MambaSpec", "state": []}]
    record = FleetRecord("vllm", ("m",), "f", names, {"groups": groups})
    assert record.states == record.ends == {"vllm/f/g1/p0t0", "vllm/f/g1/p0t1"}
    groups[0]["window"] = 128
    assert record.ends - record.states == {"vllm/f/g0/p0t0"}
    for strange in ({}, {"groups": 7}, {"groups": [7, {"state": 1}]}):
        assert record._replace(description=strange).states == frozenset()


def listed(key: bytes, size: int, state: str = "complete") -> ObjectRow:
    return ObjectRow(FLEET_NAMESPACE, Key(key), size, 1, 1, 0, state)


def test_what_is_no_record_is_not_read() -> None:
    honest = [listed(b"model/%d" % number, 500) for number in range(3)]
    large = listed(b"model/large", fleet_records.RECORD_BYTES_MAX + 1)
    late = listed(b"model/late", 500, "being_written")
    found = fleet_records.record_keys([large, late, *honest])
    assert found == [each.key for each in honest]
    assert fleet_records.record_keys(honest, 2) == found[:2]
