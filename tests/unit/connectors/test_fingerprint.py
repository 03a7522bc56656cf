"""Who may share blocks with whom, and what a fleet that disagrees is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from vllm.config import LoadConfig
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from kvstore.connectors.common.fingerprint import LOADED, LoadedFiles
from kvstore.connectors.vllm.messages import DraftIdentity, WorkerIdentity
from kvstore.connectors.vllm.weights.fingerprint import (
    describe,
    draft_of,
    fingerprint,
    identified,
    is_random,
    none_hash,
    weights_id,
    without_draft,
)
from kvstore.connectors.vllm.worker.layout import NOT_SPLIT, PageSplit
from kvstore.connectors.vllm_plugin import _note_files
from kvstore.errors import ConfigError

HELLO = WorkerIdentity("layout", [0], ["p0t0"], weights="w")


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


def mark(vllm_config: Any, *hellos: WorkerIdentity, name: str = "", **cache: int) -> str:
    hellos = hellos or (HELLO,)
    description = describe(vllm_config, cache_config(**cache))
    return fingerprint(identified(description, hellos, name=name), hellos)


# --- weights --------------------------------------------------------------------------------------


class Loader(DefaultModelLoader):  # type: ignore[misc]
    """vLLM's, which notes the files that it chooses."""


_note_files(Loader)


def load(vllm_config: Any, model: nn.Module) -> None:
    loader = Loader(LoadConfig())
    loader.get_all_weights(vllm_config.model_config, model)
    loader._prepare_weights(vllm_config.model_config.model, None, None, True, None)


def loaded() -> dict[str, nn.Module]:
    """A model that was loaded by a name of the hub."""
    model = nn.Module()
    setattr(model, LOADED, [LoadedFiles([])])
    return {"model": model}


def test_weights_are_told_by_the_files_that_were_loaded(tmp_path: Path) -> None:
    """Whatever lies there afterwards, until a loader reads that."""
    file, models = tmp_path / "model.safetensors", {"model": nn.Module()}
    save_file({"a": torch.zeros(1)}, file)
    engine = config(str(tmp_path))
    load(engine, models["model"])
    first = weights_id(engine, models)
    save_file({"a": torch.ones(1)}, file)
    assert weights_id(engine, models) == first
    load(engine, models["model"])
    assert weights_id(engine, models) != first
    save_file({"a": torch.zeros(1)}, file)
    other = {"model": nn.Module()}
    load(engine, other["model"])
    assert weights_id(engine, other) == first

    load(engine, other["model"])
    save_file({"a": torch.zeros(1)}, file)  # before it is read for a digest
    with pytest.raises(ConfigError, match=r"model\.safetensors has changed.*model_id"):
        weights_id(engine, other)
    assert weights_id(engine, other, name="ours") == "named ours"


def test_weights_that_no_known_loader_has_loaded_are_refused(tmp_path: Path) -> None:
    streamed, models = config(str(tmp_path)), {"model": nn.Module()}
    streamed.load_config.load_format = "tensorizer"
    with pytest.raises(ConfigError, match=r"load_format is tensorizer.*model_id"):
        weights_id(streamed, models)
    setattr(models["model"], LOADED, [LoadedFiles(["s3://b/m/model.safetensors"])])
    with pytest.raises(ConfigError, match=r"s3://b/m/model.*not on this host.*model_id"):
        weights_id(streamed, models)


def test_weights_that_are_not_here_are_named_with_the_commit_that_was_loaded() -> None:
    assert weights_id(config("org/name"), loaded()) == "org/name@main"
    revised = config("org/name")
    revised.model_config.revision = "v1"
    assert weights_id(revised, loaded()) == "org/name@v1"
    revised.model_config.hf_config._commit_hash = "0123abc"
    assert weights_id(revised, loaded()) == "org/name@0123abc"
    dummy = config("/some/where/name/")
    dummy.load_config.load_format = "dummy"
    assert weights_id(dummy, loaded()) == "dummy seed=0 of name"


def test_a_draft_model_s_weights_count_beside_the_model_s() -> None:
    guessing, model, draft = config("org/name"), loaded(), {"draft": loaded()["model"]}
    guessing.speculative_config = SimpleNamespace(draft_model_config=config("org/d").model_config)
    assert weights_id(guessing, model | draft) == "org/name@main; org/d@main"
    assert weights_id(guessing, model) == "org/name@main"
    assert weights_id(guessing, draft) == "org/d@main"
    guessing.speculative_config.draft_model_config = guessing.model_config  # a layer of its own
    assert weights_id(guessing, model | draft) == "org/name@main"
    assert weights_id(guessing, draft) == "org/name@main"


# --- a draft model --------------------------------------------------------------------------------


def test_an_engine_whose_draft_model_is_apart_is_described_like_one_without() -> None:
    guessing, pages = config(), cache_config()
    guessing.speculative_config = SimpleNamespace(method="eagle")
    plain = describe(config(), pages)
    pages.kv_cache_groups[0].layer_names.append("draft")
    described = describe(guessing, pages)
    assert described != plain
    assert without_draft(described, pages, NOT_SPLIT, {"draft"}) == plain


def test_a_draft_model_is_told_by_all_on_which_its_pages_depend() -> None:
    def of(*drafts: DraftIdentity | None) -> str:
        return draft_of([replace(HELLO, rank=rank, draft=each) for rank, each in enumerate(drafts)])

    draft = DraftIdentity(["d"], ["layout"], "eagle", "w", "f", [["a"]])
    changes: dict[str, Any] = {
        "layouts": ["other"], "method": "mtp", "weights": "v", "files": "", "attention": [],
    }  # fmt: skip
    others = [replace(draft, **{name: value}) for name, value in changes.items()]
    assert len({of(draft), of(), *map(of, others)}) == 2 + len(changes)
    assert of(replace(draft)) == of(draft)
    assert of(None, draft) == of(draft), "of the last stage of a pipeline"
    assert of(draft, draft) == of(draft), "told by its files: one rank has the shards of two"
    assert of(draft, others[2]) not in (of(draft), of(others[2]))


# --- fingerprints ---------------------------------------------------------------------------------


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
    different[7].speculative_config = SimpleNamespace(method="eagle")
    different[8].model_config.hf_config = HFConfig(hidden_size=9)
    marks = [mark(each) for each in different]
    marks.append(mark(config(), block_size=32))
    hello = vars(HELLO)
    changes: list[dict[str, Any]] = [
        {"layout": "other"}, {"parts": ["p0t1"]}, {"weights": "v"}, {"files": "a"},
        {"attention": [["backend=A"]]},
    ]  # fmt: skip
    marks += [mark(config(), WorkerIdentity(**(hello | change))) for change in changes]
    assert len(set(marks)) == len(marks)


def test_what_changes_no_byte_does_not_count() -> None:
    plain = mark(config())
    guessing, named = config(), config()
    guessing.speculative_config = SimpleNamespace(method="ngram")
    named.cache_config.cache_dtype = "float16"  # which is what "auto" means for this model
    assert mark(guessing) == mark(named) == plain


class Processor:
    """As much of a loaded processor as is described."""

    def __init__(self, **values: object) -> None:
        self.image_processor = object()
        self.values = values

    def to_dict(self) -> dict[str, object]:
        return self.values


def seeing(processor: Processor, **settings: object) -> Any:
    """A model that sees images, with this processor."""
    found = config()
    found.model_config.multimodal_config = SimpleNamespace(**settings)
    found.model_config.processor = processor
    return found


def test_what_prepares_images_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(
        "vllm.transformers_utils.processor.cached_processor_from_config",
        lambda model: model.processor,
    )
    plain = mark(seeing(Processor(mean=0.5)))
    assert mark(seeing(Processor(mean=0.5, transformers_version="9"))) == plain
    broken, given = seeing(Processor()), tmp_path / "preprocessor_config.json"
    broken.model_config.processor = None  # cannot be loaded here: then its files count
    broken.model_config.model = str(tmp_path)
    given.write_text("{}")
    others = [mark(broken)]
    given.write_text('{"do_normalize": false}')
    others.append(mark(broken))
    others.append(mark(seeing(Processor(mean=0.4))))
    others.append(mark(seeing(Processor(mean=0.5), mm_processor_kwargs={"do_normalize": False})))
    others.append(mark(seeing(Processor(mean=0.5), media_io_kwargs={"video": {"num_frames": 4}})))
    assert len({plain, mark(config()), *others}) == 7


def test_what_reorders_a_page_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    marks = [mark(config())]
    monkeypatch.setenv("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", "1")
    marks.append(mark(config()))
    monkeypatch.setattr("kvstore.connectors.vllm.weights.fingerprint.RELEASE", "0.99")
    assert len({*marks, mark(config())}) == 3


def test_a_name_of_the_weights_may_be_given() -> None:
    one, two = (WorkerIdentity("layout", [0], ["p0t0"], weights=each, files=each) for each in "ab")
    assert mark(config(), one, name="same") == mark(config(), two, name="same")
    assert mark(config(), one) != mark(config(), two)
    assert identified({}, [one], name="same")["weights"] == "same"


def test_ranks_count_in_their_order() -> None:
    """Each has its part of the weights; two ranks may have the same part of the blocks."""
    one = WorkerIdentity("layout", [0], ["p0t0"], weights="a")
    two = WorkerIdentity("layout", [0], ["p0t0"], rank=1, weights="b")
    assert len({mark(config(), one), mark(config(), one, two), mark(config(), two, one)}) == 3


def test_with_shards_the_number_of_ranks_does_not_count() -> None:
    def sharded(ranks: int, shards: int, layout: str = "shard", files: str = "f") -> str:
        engine, each = config(), shards // ranks
        engine.parallel_config.tensor_parallel_size = ranks
        spec = SimpleNamespace(block_size=16, page_size_bytes=4_096 // ranks)
        caches = SimpleNamespace(
            kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec, layer_names=["a", "b"])]
        )
        split = PageSplit(shards, each)
        hellos = [
            WorkerIdentity(
                layout, [0], split.parts(0, rank), rank=rank, weights="as loaded", files=files
            )
            for rank in range(ranks)
        ]
        description = describe(engine, caches, split=split)
        return fingerprint(identified(description, hellos), hellos)

    assert sharded(1, 4) == sharded(2, 4) == sharded(4, 4)
    others = [sharded(2, 2), sharded(2, 4, layout="other"), sharded(2, 4, files="g")]
    assert len({sharded(2, 4), *others}) == 4


def test_hashes_of_a_size_of_their_own_are_described() -> None:
    assert "hash_tokens" not in describe(config(), cache_config())
    assert describe(config(), cache_config(), hash_tokens=8)["hash_tokens"] == 8


# --- hashes ---------------------------------------------------------------------------------------


@pytest.fixture
def no_seed(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    return monkeypatch


def test_a_random_seed_is_noticed(no_seed: pytest.MonkeyPatch) -> None:
    assert is_random("xxhash_cbor")
    assert none_hash("xxhash_cbor") != none_hash("xxhash_cbor")
    assert not is_random("sha256")
    no_seed.setenv("PYTHONHASHSEED", "0")
    assert not is_random("xxhash_cbor")


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
