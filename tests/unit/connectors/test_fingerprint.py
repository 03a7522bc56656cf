"""Who may share blocks with whom, and what a fleet that disagrees is told."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.connectors.vllm.fingerprint import (
    SAMPLE_BYTES,
    Fleet,
    describe,
    directory_digest,
    fingerprint,
    hash_warnings,
    none_hash,
    weights_id,
)
from kvstore.connectors.vllm.messages import Hello
from kvstore.limits import FLEET_NAMESPACE, KEY_BYTES_MAX

HELLO = {(0, 0): Hello("layout", [0], "p0t0")}


class HFConfig:
    def __init__(self, **values: object) -> None:
        self.values = values

    def to_dict(self) -> dict[str, object]:
        return self.values


def config(model: str = "org/name", **hf: object) -> Any:
    """As much of ``VllmConfig`` as is described."""
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=model, revision=None, seed=0, dtype="torch.float16", quantization=None,
            hf_config=HFConfig(hidden_size=8, **hf),
        ),
        cache_config=SimpleNamespace(cache_dtype="auto", prefix_caching_hash_algo="sha256"),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1, pipeline_parallel_size=1,
            prefill_context_parallel_size=1, decode_context_parallel_size=1,
        ),
        device_config=SimpleNamespace(device_type="cpu"),
        load_config=SimpleNamespace(load_format="auto"),
        speculative_config=None,
    )  # fmt: skip


def cache_config(block_size: int = 16) -> Any:
    spec = SimpleNamespace(block_size=block_size, page_size_bytes=1024)
    group = SimpleNamespace(kv_cache_spec=spec, layer_names=["a", "b"])
    return SimpleNamespace(kv_cache_groups=[group])


def mark(vllm_config: Any, hellos: dict[Any, Hello] = HELLO, **cache: int) -> str:
    return fingerprint(describe(vllm_config, cache_config(**cache), ""), hellos)


# --- weights --------------------------------------------------------------------------------------


def model_directory(path: Path, weights: bytes = bytes(3 * SAMPLE_BYTES), **more: bytes) -> Path:
    path.mkdir(parents=True)
    (path / "model.safetensors").write_bytes(weights)
    for name, data in more.items():
        (path / name.replace("_", ".")).write_bytes(data)
    return path


def test_the_same_files_elsewhere_are_the_same_weights(tmp_path: Path) -> None:
    here = model_directory(tmp_path / "here" / "model")
    there = model_directory(tmp_path / "there" / "other", README_md=b"text", tokenizer_json=b"{}")
    assert directory_digest(here) == directory_digest(there)
    assert weights_id(config(str(here))) == weights_id(config(str(there) + "/"))


@pytest.mark.parametrize("at", [0, SAMPLE_BYTES - 1, 3 * SAMPLE_BYTES // 2, 3 * SAMPLE_BYTES - 1])
def test_one_changed_byte_in_a_sample_is_other_weights(tmp_path: Path, at: int) -> None:
    changed = bytearray(3 * SAMPLE_BYTES)
    changed[at] = 1
    first = model_directory(tmp_path / "first")
    second = model_directory(tmp_path / "second", bytes(changed))
    assert directory_digest(first) != directory_digest(second)


def test_sizes_and_names_of_files_count(tmp_path: Path) -> None:
    directories = [
        model_directory(tmp_path / "a"),
        model_directory(tmp_path / "b", bytes(3 * SAMPLE_BYTES + 1)),
        model_directory(tmp_path / "c", more_bin=b""),
        model_directory(tmp_path / "d", most_bin=b""),
        model_directory(tmp_path / "e", b""),
    ]
    assert len({directory_digest(each) for each in directories}) == len(directories)


def test_weights_that_are_not_here_are_named() -> None:
    assert weights_id(config("org/name")) == "org/name@main"
    revised = config("org/name")
    revised.model_config.revision = "abc"
    assert weights_id(revised) == "org/name@abc"
    dummy = config("/some/where/name/")
    dummy.load_config.load_format = "dummy"
    assert weights_id(dummy) == "dummy seed=0 of name"


# --- fingerprints ---------------------------------------------------------------------------------


def test_engines_that_are_equal_have_one_fingerprint() -> None:
    assert mark(config()) == mark(config())
    assert len(mark(config())) == 32


def test_where_a_model_lies_and_what_wrote_it_does_not_count() -> None:
    plain = mark(config(text_config={"layers": 2}))
    placed = config(
        _name_or_path="/somewhere", transformers_version="5", _commit_hash="abc",
        text_config={"layers": 2, "_name_or_path": "/else", "transformers_version": "4"},
    )  # fmt: skip
    assert mark(placed) == plain
    assert mark(config(text_config={"layers": 3})) != plain


def test_all_that_bytes_and_hashes_depend_on_counts() -> None:
    different = [config() for _ in range(9)]
    different[1].model_config.dtype = "torch.bfloat16"
    different[2].model_config.quantization = "fp8"
    different[3].cache_config.cache_dtype = "fp8"
    different[4].cache_config.prefix_caching_hash_algo = "sha256_cbor"
    different[5].parallel_config.tensor_parallel_size = 2
    different[6].device_config.device_type = "cuda"
    different[7].speculative_config = SimpleNamespace(method="eagle", model="draft")
    different[8].model_config.hf_config = HFConfig(hidden_size=9)
    marks = [mark(each) for each in different]
    marks.append(mark(config(), block_size=32))
    marks.append(mark(config(), {(0, 0): Hello("other", [0], "p0t0")}))
    marks.append(mark(config(), {(0, 0): Hello("layout", [0], "p0t1")}))
    marks.append(mark(config("org/other")))
    assert len(set(marks)) == len(marks)


def test_a_name_of_the_weights_may_be_given() -> None:
    first, second = (
        describe(config(model), cache_config(), "same") for model in ("org/a", "org/b")
    )
    assert first == second
    assert first["weights"] == "same"


def test_ranks_that_hold_the_same_count_once_and_in_any_order() -> None:
    one, two = Hello("layout", [0], "p0t0"), Hello("layout", [0], "p0t1")
    assert mark(config(), {(0, 0): one, (0, 1): two}) == mark(config(), {(0, 1): two, (0, 0): one})
    assert mark(config(), {(0, 0): one, (0, 1): one}) == mark(config(), {(0, 0): one})


def test_a_description_is_plain_json() -> None:
    description = describe(config(), cache_config(), "")
    assert json.loads(json.dumps(description)) == description


# --- hashes ---------------------------------------------------------------------------------------


@pytest.fixture
def no_seed(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    return monkeypatch


def test_a_random_seed_is_warned_of(no_seed: pytest.MonkeyPatch) -> None:
    random = {"hash_algorithm": "xxhash_cbor"}
    (warning,) = hash_warnings(random)
    assert "PYTHONHASHSEED" in warning
    assert none_hash("xxhash_cbor") != none_hash("xxhash_cbor")
    assert hash_warnings({"hash_algorithm": "sha256"}) == []
    no_seed.setenv("PYTHONHASHSEED", "0")
    assert hash_warnings(random) == []


def test_the_first_hash_is_vllms_own(no_seed: pytest.MonkeyPatch) -> None:
    from vllm.utils.hashing import sha256_cbor
    from vllm.v1.core import kv_cache_utils

    no_seed.setattr(kv_cache_utils, "NONE_HASH", b"", raising=False)
    no_seed.setattr(kv_cache_utils, "_NONE_HASH_SEED", None, raising=False)
    kv_cache_utils.init_none_hash(sha256_cbor)
    assert none_hash("sha256_cbor") == bytes(kv_cache_utils.NONE_HASH).hex()
    before = none_hash("sha256_cbor")
    no_seed.setenv("PYTHONHASHSEED", "7")
    assert none_hash("sha256_cbor") != before


# --- the fleet ------------------------------------------------------------------------------------


class Board:
    """As much of a client as the fleet uses: keys and bytes."""

    def __init__(self) -> None:
        self.objects: dict[bytes, bytes] = {}

    def list_objects(self, *, namespace: str, prefix: bytes) -> list[Any]:
        assert namespace == FLEET_NAMESPACE
        return [SimpleNamespace(key=key) for key in self.objects if key.startswith(prefix)]

    def get(self, key: bytes, *, namespace: str, kind: str) -> bytes | None:
        return self.objects.get(key)

    def put(self, key: bytes, value: bytes, *, namespace: str) -> None:
        assert len(key) <= KEY_BYTES_MAX
        self.objects[key] = value


def announce(board: Board, name: str = "org/name", model: str = "m", **changes: Any) -> list[str]:
    description = {**describe(config(name), cache_config(), ""), **changes}
    fleet = Fleet(board)  # type: ignore[arg-type]
    return fleet.announce(
        [model], fingerprint(description, HELLO), description, ["n"], 16, 16
    )  # fmt: skip


def test_engines_that_agree_are_told_nothing() -> None:
    board = Board()
    assert announce(board) == []
    assert announce(board) == []
    assert len(board.objects) == 1


def test_engines_that_differ_are_told_in_what() -> None:
    board = Board()
    announce(board)
    (warning,) = announce(board, dtype="torch.bfloat16", tensor_parallel=2)
    assert "dtype: 'torch.bfloat16' here, 'torch.float16' there" in warning
    assert "tensor_parallel: 2 here, 1 there" in warning
    assert "quantization" not in warning
    assert len(board.objects) == 2


def test_what_only_one_of_them_has_is_told() -> None:
    board = Board()
    announce(board)
    (warning,) = announce(board, newer="yes")
    assert "newer: 'yes' here, None there" in warning


def test_other_models_are_nobodys_business() -> None:
    board = Board()
    announce(board)
    assert announce(board, model="m2", dtype="torch.bfloat16") == []


def test_engines_that_differ_only_in_layout_are_told() -> None:
    board = Board()
    description = describe(config(), cache_config(), "")
    fleet = Fleet(board)  # type: ignore[arg-type]
    fleet.announce(["m"], "one", description, [], 16, 16)
    (warning,) = fleet.announce(["m"], "two", description, [], 16, 16)
    assert "only the layout of the cache" in warning


def test_what_strangers_left_is_no_error() -> None:
    board = Board()
    for index, data in enumerate(
        (b"", b"{", b"[]", b"7", b"{}", b'{"description": 7}', b'{"description": []}', b"\xff")
    ):
        board.objects[b"m/%d" % index] = data
    assert announce(board) == []


def test_long_names_of_models_fit_into_keys() -> None:
    board = Board()
    for model in ("x" * 500, "模" * 500):
        assert announce(board, model=model) == []
    assert len(board.objects) == 2
