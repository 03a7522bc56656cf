"""Engines with a draft model beside engines without one, or with another: they share all that the
model itself computes."""

# mypy: allow-untyped-calls
# transformers annotates its models only in some of its releases.

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import transformers
from safetensors.torch import save_file

from examples.tiny import BLOCK_TOKENS
from kvstore import Client
from tests.e2e.engines.conftest import StartEngine, prompt
from tests.e2e.engines.engine import Engine, transfer_config
from tests.e2e.engines.preloaded import Preloaded
from tests.support.cluster import Cluster

WHOLE = 4 * BLOCK_TOKENS
ALONE = {"no_load": True, "no_store": True}


def make_draft(folder: Path, llama: Path, seed: int) -> Path:
    """An EAGLE head for the model, with random weights."""
    torch.manual_seed(seed)
    config = transformers.AutoConfig.from_pretrained(llama)
    config.num_hidden_layers = 1
    config.architectures = ["LlamaForCausalLM"]
    weights = {
        name.removeprefix("model."): each
        for name, each in transformers.LlamaForCausalLM(config).state_dict().items()
        if name.startswith("model.layers.") and ".input_layernorm." not in name
    }
    size = config.hidden_size
    weights["fc.weight"] = torch.randn(size, 2 * size) / size**0.5
    config.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


class Fleet(NamedTuple):
    bare: Engine
    """Without a draft model."""
    one: Engine
    other: Engine
    """With another one than ``one``."""


def speculative(folder: Path, llama: Path, seed: int = 1) -> dict[str, object]:
    model = str(make_draft(folder / f"eagle-{seed}", llama, seed))
    return {"method": "eagle", "model": model, "num_speculative_tokens": 2}


@pytest.fixture(scope="module")
def fleet(
    preloaded: Preloaded, llama: Path, shared: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("drafts")
    transfer = transfer_config(shared.address)

    def drafted(seed: int) -> Engine:
        guessing = speculative(folder, llama, seed)
        return Engine(preloaded, llama, transfer, speculative_config=guessing)

    with Engine(preloaded, llama, transfer) as bare, drafted(1) as one, drafted(2) as other:
        yield Fleet(bare, one, other)


def of_drafts(shared: Cluster) -> dict[str, int]:
    """How many objects the namespaces of draft models have."""
    with Client(shared.address) as client:
        rows = client.status().namespaces
        return {each.name: each.objects for each in rows if ".draft-" in each.name}


def test_a_decode_engine_with_a_draft_model_loads_what_a_prefill_engine_without_has_put(
    fleet: Fleet, shared: Cluster
) -> None:
    bare, one, _ = fleet
    (right,) = bare.generate([prompt(1)])
    bare.saved()
    assert not of_drafts(shared)
    (found,) = one.generate([prompt(1)])
    assert found.cached == WHOLE
    assert found.tokens == right.tokens
    one.saved()
    assert not of_drafts(shared), "of these blocks the draft model has computed nothing"
    (longer,) = one.generate([prompt(1) + prompt(2)])
    one.saved()
    assert set(of_drafts(shared).values()) == {(1_200 - WHOLE) // BLOCK_TOKENS}
    assert one.reset()
    (again,) = one.generate([prompt(1) + prompt(2)])
    assert again.cached >= WHOLE + 4 * BLOCK_TOKENS
    assert again.tokens == longer.tokens


def test_engines_share_the_pages_of_equal_draft_models_alone(fleet: Fleet, shared: Cluster) -> None:
    bare, one, other = fleet
    before = of_drafts(shared)
    (written,) = one.generate([prompt(3)])
    one.saved()
    mine = of_drafts(shared)
    (name,) = mine
    assert mine[name] == before.get(name, 0) + WHOLE // BLOCK_TOKENS

    for reader in (bare, other):
        (found,) = reader.generate([prompt(3)])
        assert (found.cached, found.tokens) == (WHOLE, written.tokens)
        reader.saved()
    assert of_drafts(shared) == mine, "the other one's would be zeros"

    (own,) = other.generate([prompt(4)])
    other.saved()
    assert len(of_drafts(shared)) == 2
    assert one.reset()
    (found,) = one.generate([prompt(4)])
    assert (found.cached, found.tokens) == (WHOLE, own.tokens)

    assert one.reset(store=True)
    left = of_drafts(shared)
    assert name not in left
    assert len(left) == 1, "the other's are not its to remove"


@pytest.mark.timeout(400)
def test_ranks_share_a_draft_models_pages_by_shards(
    store: Cluster, llama: Path, engine: StartEngine, tmp_path: Path
) -> None:
    settings = {"speculative_config": speculative(tmp_path, llama)}
    transfer = transfer_config(store.address, tp_shards=2)
    one = engine(llama, transfer, **settings)
    two = engine(
        llama, transfer, tensor_parallel_size=2,
        environ={"VLLM_CPU_OMP_THREADS_BIND": "0|1"}, **settings,
    )  # fmt: skip
    for seed, writer, reader in ((1, one, two), (2, two, one)):
        writer.generate([prompt(seed)])
        writer.saved()
        (found,) = reader.generate([prompt(seed)])
        assert found.cached == WHOLE
        reader.saved()
        assert reader.reset()
        (right,) = reader.generate([prompt(seed)], params=ALONE)
        assert found.tokens == right.tokens
    assert list(of_drafts(store).values()) == [2 * WHOLE // BLOCK_TOKENS] * 2


@pytest.mark.timeout(400)
def test_blocks_with_a_draft_models_pages_are_cut(
    store: Cluster, llama: Path, engine: StartEngine, tmp_path: Path
) -> None:
    settings = {"speculative_config": speculative(tmp_path, llama)}
    small = engine(llama, transfer_config(store.address), **settings)
    transfer = transfer_config(store.address, block_tokens=BLOCK_TOKENS)
    large = engine(llama, transfer, block_size=2 * BLOCK_TOKENS, **settings)
    for seed, writer, reader, blocks in ((1, small, large, 6), (2, large, small, 7)):
        (first,) = writer.generate([prompt(seed, 1_000)])
        writer.saved()
        (found,) = reader.generate([prompt(seed, 1_000)], params=first.params)
        assert (found.cached, found.tokens) == (blocks * BLOCK_TOKENS, first.tokens)
    assert len(of_drafts(store)) == 1


@pytest.mark.timeout(400)
def test_requests_that_are_preempted_have_the_tokens_of_an_engine_without_a_draft_model(
    store: Cluster, llama: Path, engine: StartEngine, tmp_path: Path
) -> None:
    """Of half of the prompts the store has blocks without a draft model's pages."""
    transfer = transfer_config(store.address)
    bare = engine(llama, transfer)
    one = engine(
        llama, transfer, speculative_config=speculative(tmp_path, llama),
        num_gpu_blocks_override=40, max_num_seqs=12,
    )  # fmt: skip
    asked = [prompt(100 + number, 700 + 50 * number) for number in range(12)]
    right = [each.tokens for each in bare.generate(asked, tokens=60, params=ALONE)]
    assert bare.reset()
    bare.generate(asked[::2], tokens=1)
    bare.saved()
    for least in (0, WHOLE):
        found = one.generate(asked, tokens=60)
        one.saved()
        assert [each.tokens for each in found] == right
        assert all(each.cached >= least for each in found)
        assert one.reset()
