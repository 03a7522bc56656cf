"""A model whose recurrent layers keep a state instead of blocks: Qwen3-Next, in bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.engines.conftest import MakeModel, StartEngine, prompt
from tests.e2e.engines.engine import Engine, transfer_config
from tests.e2e.engines.preloaded import ForkServer
from tests.e2e.engines.test_engine import cached, tokens
from tests.support.cluster import Cluster

BLOCK = 256
"""Tokens of a block. vLLM would choose 256 or 128, by the processor, so that a state fills no more
than one."""

SETTINGS: dict[str, Any] = {"dtype": "bfloat16", "block_size": BLOCK}
ALONE = {"no_load": True, "no_store": True}


@pytest.fixture(scope="module")
def recurrent(make_model: MakeModel) -> Path:
    return make_model("--kind", "recurrent", name="recurrent")


@pytest.fixture(scope="module")
def pair(
    preloaded: ForkServer, recurrent: Path, shared: Cluster
) -> Iterator[tuple[Engine, Engine]]:
    """One that cuts prompts into chunks of two blocks, and one with settings of its own."""
    transfer = transfer_config(shared.address)
    with (
        Engine(preloaded, recurrent, transfer, **SETTINGS, max_num_batched_tokens=512) as one,
        Engine(preloaded, recurrent, transfer_config(shared.address), **SETTINGS) as other,
    ):
        yield one, other


def right(engine: Engine, asked: list[list[int]]) -> list[list[int]]:
    """The tokens that this engine computes itself; its prefix cache is empty afterwards."""
    assert engine.reset()
    found = engine.generate(asked, params=ALONE)
    assert [each.cached for each in found] == [0] * len(asked)
    assert engine.reset()
    return [each.tokens for each in found]


def test_an_engine_goes_on_from_the_states_of_another(pair: tuple[Engine, Engine]) -> None:
    one, other = pair
    asked = [prompt(1, 1500), prompt(2, 900)]
    first = one.generate(asked)
    assert cached(first) == [0, 0]
    assert [each.stored_tokens for each in first] == [1280, 768]
    one.saved()
    found = other.generate(asked)
    assert cached(found) == [1280, 768]
    assert tokens(found) == right(other, asked)
    assert other.metrics()["hit_states"] == 2
    assert one.reset()
    again = one.generate(asked)
    assert cached(again) == [1280, 768]
    assert tokens(again) == right(one, asked)


def test_of_a_shared_beginning_as_much_is_found_as_there_is_a_state_for(
    pair: tuple[Engine, Engine],
) -> None:
    """The blocks of attention reach further than the only state."""
    one, other = pair
    common = prompt(6, 1100)
    short, long = common[:600], [*common, *prompt(7, 300)]
    one.generate([long])
    one.saved()
    assert cached(other.generate([short])) == [0], "the state at 1,280 is no use at 512"
    other.saved()
    assert one.reset()
    found = one.generate([[*common[:700], *prompt(8, 500)]])
    assert cached(found) == [512]
    assert tokens(found) == right(one, [[*common[:700], *prompt(8, 500)]])


@pytest.mark.timeout(400)
def test_engines_of_other_tensor_parallel_sizes_go_on_from_shards_of_states(
    shared: Cluster, recurrent: Path, engine: StartEngine
) -> None:
    """Each chooses the tokens that it chooses alone, which are not the other's."""
    transfer = transfer_config(shared.address, tp_shards=2)
    one = engine(recurrent, transfer, **SETTINGS)
    two = engine(
        recurrent, transfer, tensor_parallel_size=2,
        environ={"VLLM_CPU_OMP_THREADS_BIND": "0|1"}, **SETTINGS,
    )  # fmt: skip
    for number, writer, reader in ((20, one, two), (21, two, one)):
        asked = [prompt(number, 1500)]
        writer.generate(asked)
        writer.saved()
        found = reader.generate(asked)
        assert cached(found) == [1280]
        assert tokens(found) == right(reader, asked)


@pytest.mark.timeout(400)
def test_requests_that_are_preempted_save_and_load_what_is_right(
    store: Cluster, recurrent: Path, engine: StartEngine
) -> None:
    """Twelve requests have room for two or three."""
    small = {"num_gpu_blocks_override": 40, "max_num_seqs": 12, **SETTINGS}
    one = engine(recurrent, transfer_config(store.address, save_decode=True), **small)
    asked = [prompt(100 + number, 700 + 50 * number) for number in range(12)]
    first = one.generate(asked, tokens=300)
    one.saved()
    assert one.reset()
    again = one.generate(asked, tokens=300)
    assert sum(cached(again)) > 0
    other = engine(recurrent, transfer_config(store.address), **SETTINGS)
    found = other.generate(asked, tokens=8)
    assert cached(found) == [tokens - tokens % BLOCK for tokens in map(len, asked)]
    # Computed in batches of another size, bfloat16 may round a token to another one.
    assert tokens(found) == [each.tokens[:8] for each in first]
    assert [each.reason for each in (*first, *again)] == ["length"] * 24
