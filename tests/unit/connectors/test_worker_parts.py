"""Which pages of a worker are a draft model's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvstore.connectors.vllm.worker import worker_parts as module
from kvstore.connectors.vllm.worker.layout import NOT_SPLIT, PageSplit
from kvstore.connectors.vllm.worker.pages import inspect_caches
from kvstore.connectors.vllm.worker.worker_parts import Caches, WorkerParts
from kvstore.errors import ConfigError
from tests.unit.connectors.test_pages import BLOCKS, PAGE, Config, Group, config, layer_by_layer

VLLM: Any = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={}))


def parts(caches: Caches, *groups: list[str]) -> WorkerParts:
    cached = config(*groups, blocks=BLOCKS)
    device_of: Any = None
    return WorkerParts(caches, ["p0t0"], VLLM, cached, NOT_SPLIT, device_of)


def sizes(of: Any) -> dict[int, int]:
    return dict(of["p0t0"].block_bytes) if of else {}


def test_the_pages_of_a_draft_model_are_apart() -> None:
    made = parts(layer_by_layer(4), ["l0", "l1", "l3"], ["l2"])
    assert sizes(made.of_model) == {0: 3 * PAGE, 1: PAGE}
    assert (made.draft_layers, made.of_drafts) == (None, {})
    before = made.of_model["p0t0"].layout
    made.divide({"l3"})
    assert sizes(made.of_model) == {0: 2 * PAGE, 1: PAGE}
    assert sizes(made.of_drafts) == {0: PAGE}
    assert made.draft_layers == frozenset({"l3"})
    bare = parts(layer_by_layer(3), ["l0", "l1"], ["l2"])
    assert made.of_model["p0t0"].layout == bare.of_model["p0t0"].layout != before


def test_a_group_of_a_draft_model_alone_stays_a_part_of_each_block() -> None:
    made = parts(layer_by_layer(3), ["l0", "l1"], ["l2"])
    made.divide({"l2"})
    assert made.draft_layers is None
    assert sizes(made.of_model) == {0: 2 * PAGE, 1: PAGE}


@pytest.mark.parametrize("is_listed", [True, False])
def test_pages_of_the_model_that_a_draft_model_reads_are_not_the_draft_models(
    is_listed: bool,
) -> None:
    """They would be filled with zeros."""
    caches = layer_by_layer(2)
    caches["d"] = caches["l1"]
    made = parts(caches, ["l0", "l1", "d"] if is_listed else ["l0", "l1"])
    made.divide({"d"})
    assert sizes(made.of_model) == {0: 2 * PAGE}
    assert made.of_drafts == {}


def test_what_cannot_be_taken_apart_stays_together(monkeypatch: pytest.MonkeyPatch) -> None:
    made = parts(layer_by_layer(3), ["l0", "l1", "l2"])

    def refused(caches: Caches, *given: Any, **named: Any) -> Any:
        if set(caches) == {"l2"}:
            raise ConfigError("no such layout")
        return inspect_caches(caches, *given, **named)

    monkeypatch.setattr(module, "inspect_caches", refused)
    with pytest.raises(ConfigError, match="no such layout"):
        made.divide({"l2"})
    assert sizes(made.of_model) == {0: 3 * PAGE}
    assert (made.draft_layers, made.of_drafts) == (None, {})


@pytest.mark.parametrize("shards", [1, 2])
def test_states_that_lie_otherwise_are_refused_on_every_rank_with_shards(shards: int) -> None:
    state = SimpleNamespace(mamba_cache_mode="align", shapes=((3, 8), (2, 2)), dtypes=())
    caches = {"s": torch.zeros((BLOCKS, 1, 1, 64), dtype=torch.int8)}
    made: Any = Config([Group(["s"], state)], BLOCKS)
    nothing: Any = None
    with pytest.raises(ConfigError, match="states of layer s"):
        WorkerParts(caches, ["p0s0", "p0s1"][:shards], VLLM, made, PageSplit(2, shards), nothing)
    assert WorkerParts(caches, ["p0t0"], VLLM, made, NOT_SPLIT, nothing).of_model
