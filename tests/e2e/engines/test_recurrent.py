"""A model whose recurrent layers keep a state instead of blocks: Qwen3-Next, in bfloat16."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.engines.conftest import MakeModel, StartEngine, prompt
from tests.e2e.engines.engine import transfer_config
from tests.support.cluster import Cluster

BLOCK = 256
"""Tokens of a block of this model, which vLLM chooses so that a state fills no more than one."""

ALONE = {"no_load": True, "no_store": True}


@pytest.fixture(scope="session")
def recurrent(make_model: MakeModel) -> Path:
    return make_model("--kind", "recurrent", name="recurrent")


def test_a_second_engine_goes_on_from_the_state_of_the_first(
    store: Cluster, recurrent: Path, engine: StartEngine
) -> None:
    one = engine(recurrent, transfer_config(store.address), dtype="bfloat16")
    asked = [prompt(1, 1500), prompt(2, 900)]
    first = one.generate(asked)
    assert [each.cached for each in first] == [0, 0]
    assert [each.params for each in first] == [{"stored_tokens": 1280}, {"stored_tokens": 768}]
    one.saved()
    assert one.metrics()["saved_states"] == 2
    assert one.reset()
    again = one.generate(asked)
    assert [each.cached for each in again] == [1280, 768]
    other = engine(recurrent, transfer_config(store.address), dtype="bfloat16")
    found = other.generate(asked)
    assert [each.cached for each in found] == [1280, 768]
    assert other.metrics()["hit_states"] == 2
    other.reset()
    right = other.generate(asked, params=ALONE)
    assert [each.tokens for each in found] == [each.tokens for each in right]
    assert [each.tokens for each in again] == [each.tokens for each in first]
