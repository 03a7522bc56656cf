"""An engine with a draft model beside one without: they share what the model itself computes."""

# mypy: allow-untyped-calls
# transformers annotates its models only in some of its releases.

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file

from examples.tiny import BLOCK_TOKENS
from kvstore import Client
from tests.e2e.engines.conftest import prompt
from tests.e2e.engines.engine import Engine, transfer_config
from tests.e2e.engines.preloaded import ForkServer
from tests.support.cluster import Cluster

WHOLE = 4 * BLOCK_TOKENS


def make_draft(folder: Path, llama: Path) -> Path:
    """An EAGLE head for the model, with random weights."""
    torch.manual_seed(1)
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


@pytest.fixture(scope="module")
def pair(
    preloaded: ForkServer, llama: Path, shared: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Engine, Engine]]:
    """Without a draft model, and with one."""
    model = str(make_draft(tmp_path_factory.mktemp("drafts") / "eagle", llama))
    guessing = {"method": "eagle", "model": model, "num_speculative_tokens": 2}
    transfer = transfer_config(shared.address)
    with (
        Engine(preloaded, llama, transfer) as bare,
        Engine(preloaded, llama, transfer, speculative_config=guessing) as one,
    ):
        yield bare, one


def of_drafts(shared: Cluster) -> dict[str, int]:
    """How many objects the namespaces of draft models have."""
    with Client(shared.address) as client:
        rows = client.status().namespaces
        return {each.name: each.objects for each in rows if ".draft-" in each.name}


def test_a_decode_engine_with_a_draft_model_loads_what_a_prefill_engine_without_has_put(
    pair: tuple[Engine, Engine], shared: Cluster
) -> None:
    bare, one = pair
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
