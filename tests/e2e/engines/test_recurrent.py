"""A model whose recurrent layers keep a state instead of blocks: Qwen3-Next, in bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore import Client
from kvstore.fleet import parse
from kvstore.limits import FLEET_NAMESPACE
from tests.e2e.engines.conftest import MakeModel, StartEngine, prompt
from tests.e2e.engines.engine import Engine, Result, transfer_config
from tests.e2e.engines.preloaded import Preloaded
from tests.support.cluster import Cluster
from tests.support.waiting import until

BLOCK = 256
"""Tokens of a block of this model, which vLLM chooses so that a state fills no more than one."""

ALONE = {"no_load": True, "no_store": True}


@pytest.fixture(scope="module")
def recurrent(make_model: MakeModel) -> Path:
    return make_model("--kind", "recurrent", name="recurrent")


@pytest.fixture(scope="module")
def pair(preloaded: Preloaded, recurrent: Path, shared: Cluster) -> Iterator[tuple[Engine, Engine]]:
    """One that cuts prompts into chunks of two blocks, and one with settings of its own."""
    transfer = transfer_config(shared.address)
    with (
        Engine(preloaded, recurrent, transfer, dtype="bfloat16", max_num_batched_tokens=512) as one,
        Engine(preloaded, recurrent, transfer_config(shared.address), dtype="bfloat16") as other,
    ):
        yield one, other


def right(engine: Engine, asked: list[list[int]]) -> list[list[int]]:
    """The tokens that this engine computes itself; its prefix cache is empty afterwards."""
    assert engine.reset()
    found = engine.generate(asked, params=ALONE)
    assert [each.cached for each in found] == [0] * len(asked)
    assert engine.reset()
    return [each.tokens for each in found]


def tokens(results: list[Result]) -> list[list[int]]:
    return [each.tokens for each in results]


def cached(results: list[Result]) -> list[int]:
    return [each.cached for each in results]


def test_an_engine_goes_on_from_the_states_of_another(pair: tuple[Engine, Engine]) -> None:
    one, other = pair
    asked = [prompt(1, 1500), prompt(2, 900)]
    first = one.generate(asked)
    assert cached(first) == [0, 0]
    assert [each.params for each in first] == [{"stored_tokens": 1280}, {"stored_tokens": 768}]
    one.saved()
    found = other.generate(asked)
    assert cached(found) == [1280, 768]
    assert tokens(found) == right(other, asked)
    assert other.metrics()["hit_states"] == 2
    assert one.reset()
    again = one.generate(asked)
    assert cached(again) == [1280, 768]
    assert tokens(again) == right(one, asked)


def test_the_record_of_the_engines_says_which_objects_are_states(
    pair: tuple[Engine, Engine], shared: Cluster
) -> None:
    del pair
    with Client(shared.address) as client:
        [row] = until(lambda: list(client.list_objects(namespace=FLEET_NAMESPACE)))
        record = parse(client.get(row.key, namespace=FLEET_NAMESPACE, kind="bytes"))  # type: ignore[arg-type]
    assert record is not None
    assert 0 < len(record.states) < len(record.namespaces)
    groups = [group["kind"] for group in record.description["groups"]]
    assert [kind for kind in groups if "Mamba" in kind]
    assert len(record.states) == sum("Mamba" in kind for kind in groups)


def test_the_next_turn_goes_on_from_the_end_of_the_one_before(pair: tuple[Engine, Engine]) -> None:
    one, other = pair
    first = prompt(3, 1000)
    second = [*first, *prompt(4, 700)]
    third = [*second, *prompt(5, 300)]
    one.generate([first])
    one.saved()
    found = other.generate([second])
    assert cached(found) == [768]
    other.saved()
    assert one.reset()
    assert cached(one.generate([third])) == [1536]
    assert tokens(found) == right(other, [second])


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


def test_a_prompt_of_whole_blocks_loads_the_state_before_its_last_one(
    pair: tuple[Engine, Engine],
) -> None:
    """vLLM computes at least one token, so a state at the end of the prompt is beyond its limit."""
    one, other = pair
    whole = prompt(9, 4 * BLOCK)
    one.generate([[*whole, *prompt(10, 100)]])  # leaves a state at the end of ``whole``
    one.saved()
    assert cached(other.generate([whole])) == [0]
    other.saved()
    assert one.reset()
    found = one.generate([whole])
    assert cached(found) == [3 * BLOCK]
    assert tokens(found) == right(one, [whole])


def test_a_state_that_is_gone_is_not_found_and_computed_again(
    pair: tuple[Engine, Engine], shared: Cluster
) -> None:
    one, other = pair
    asked = [prompt(11, 1100)]
    one.generate(asked)
    one.saved()
    with Client(shared.address) as client:
        for space in client.status().namespaces:
            if space.name.startswith("vllm/") and "/g0/" in space.name:
                client.clear(space.name)
    found = other.generate(asked)
    assert cached(found) == [0]
    assert tokens(found) == right(other, asked)
    other.generate(asked)
    other.saved()
    assert one.reset()
    assert cached(one.generate(asked)) == [1024], "it was stored again"


@pytest.mark.timeout(400)
def test_engines_of_other_tensor_parallel_sizes_go_on_from_shards_of_states(
    shared: Cluster, recurrent: Path, engine: StartEngine
) -> None:
    """Each chooses the tokens that it chooses alone, which are not the other's."""
    transfer = transfer_config(shared.address, tp_shards=2)
    settings: dict[str, Any] = {"dtype": "bfloat16", "block_size": BLOCK}
    one = engine(recurrent, transfer, **settings)
    two = engine(
        recurrent, transfer, tensor_parallel_size=2,
        environ={"VLLM_CPU_OMP_THREADS_BIND": "0|1"}, **settings,
    )  # fmt: skip
    for number, writer, reader in ((20, one, two), (21, two, one)):
        asked = [prompt(number, 1500)]
        writer.generate(asked)
        writer.saved()
        found = reader.generate(asked)
        assert cached(found) == [1280]
        assert tokens(found) == right(reader, asked)


@pytest.mark.timeout(400)
def test_an_engine_that_hashes_smaller_parts_shares_nothing_and_says_so(
    pair: tuple[Engine, Engine], shared: Cluster, recurrent: Path, engine: StartEngine
) -> None:
    one, _ = pair
    one.generate([prompt(9, 900)])
    one.saved()
    other: Engine = engine(
        recurrent, transfer_config(shared.address), dtype="bfloat16", prefix_match_unit=BLOCK // 2
    )
    assert cached(other.generate([prompt(9, 900)])) == [0]
    told = f"must be equal: hash_tokens: {BLOCK // 2} here, None there"
    until(lambda: any("FLEET" in line and told in line for line in other.log))


def test_an_engine_that_keeps_few_states_says_what_to_type(pair: tuple[Engine, Engine]) -> None:
    """As vLLM for CPUs does in processes of its own: it forgets that it has lengthened blocks."""
    one, _ = pair
    forget = "cache = core.vllm_config.cache_config; cache.block_size = {}"
    one.run(forget.format(BLOCK // 2))
    for seed in (12, 13):
        one.generate([prompt(seed, 700)])
    one.saved()
    one.run(forget.format(BLOCK))
    told = [line for line in one.log if f"Start vLLM with --block-size {BLOCK}" in line]
    assert len(told) == 1


def test_a_node_that_dies_between_lookup_and_load(
    store: Cluster, recurrent: Path, engine: StartEngine
) -> None:
    settings: dict[str, Any] = {"transports": ["tcp"]}
    one = engine(recurrent, transfer_config(store.address, **settings), dtype="bfloat16")
    asked = [prompt(1, 1500)]
    first = one.generate(asked)
    one.saved()
    assert one.reset()
    one.kill_before_load(store.nodes[0].pid)
    again = one.generate(asked)
    store.nodes[0].process.wait()
    assert again[0].reason == "length"
    assert tokens(again) == tokens(first)
    metrics = one.metrics()
    assert metrics["load_failures"] == metrics["loaded_requests"] == 1


@pytest.mark.timeout(400)
def test_requests_that_are_preempted_save_and_load_what_is_right(
    store: Cluster, recurrent: Path, engine: StartEngine
) -> None:
    """Twelve requests have room for two or three."""
    small = {"num_gpu_blocks_override": 40, "dtype": "bfloat16", "max_num_seqs": 12}
    one = engine(recurrent, transfer_config(store.address, save_decode=True), **small)
    asked = [prompt(100 + number, 700 + 50 * number) for number in range(12)]
    first = one.generate(asked, tokens=300)
    one.saved()
    assert one.reset()
    again = one.generate(asked, tokens=300)
    assert sum(cached(again)) > 0
    other = engine(recurrent, transfer_config(store.address), dtype="bfloat16")
    found = other.generate(asked, tokens=8)
    assert cached(found) == [tokens - tokens % BLOCK for tokens in map(len, asked)]
    assert tokens(found) == right(other, asked)
    assert [each.reason for each in (*first, *again)] == ["length"] * 24


@pytest.mark.timeout(400)
def test_ranks_that_each_hold_a_part_of_every_state(
    store: Cluster, recurrent: Path, engine: StartEngine
) -> None:
    transfer = transfer_config(store.address)
    one = engine(recurrent, transfer, dtype="bfloat16", tensor_parallel_size=2)
    asked = [prompt(1, 1500), prompt(2, 900)]
    first = one.generate(asked)
    assert cached(first) == [0, 0]
    one.saved()
    assert one.reset()
    again = one.generate(asked)
    assert cached(again) == [1280, 768]
    assert tokens(again) == tokens(first)
