"""Which pages of a worker are a draft model's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.connectors.vllm.groups import Groups
from kvstore.connectors.vllm.layout import NOT_SPLIT
from kvstore.connectors.vllm.parts import Caches, Parts
from tests.unit.connectors.test_pages import BLOCKS, PAGE, config, layer_by_layer

GROUPS = Groups(hash_block_tokens=4, scheduler_block_tokens=4, block_tokens={0: 4, 1: 4})


def parts(caches: Caches, *groups: list[str]) -> Parts:
    vllm_config: Any = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context={})
    )
    device_of: Any = None
    return Parts(
        caches, ["p0t0"], vllm_config, config(*groups, blocks=BLOCKS), GROUPS, NOT_SPLIT, device_of
    )


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


def test_equal_places_in_other_groups_are_other_blocks() -> None:
    """Groups share memory, of which each block is one group's."""
    caches = layer_by_layer(2)
    caches["d"] = caches["l0"]
    made = parts(caches, ["l0"], ["l1", "d"])
    made.divide({"d"})
    assert sizes(made.of_drafts) == {1: PAGE}


def test_a_draft_model_without_layers_of_its_own_has_no_pages() -> None:
    made = parts(layer_by_layer(2), ["l0", "l1"])
    made.divide(set())
    assert (made.draft_layers, made.of_drafts) == (frozenset(), {})
