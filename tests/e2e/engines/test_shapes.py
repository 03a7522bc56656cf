"""Engines of other tensor-parallel sizes, which find each other's blocks by shards of heads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore import Client
from kvstore.demo_vllm.tiny import BLOCK_TOKENS
from tests.e2e.engines.conftest import StartEngine, prompt
from tests.e2e.engines.engine import Engine, transfer_config
from tests.e2e.engines.preloaded import Preloaded
from tests.support.cluster import Cluster

WHOLE = 4 * BLOCK_TOKENS
THREADS = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}


@pytest.fixture(scope="module")
def pair(preloaded: Preloaded, llama: Path, shared: Cluster) -> Iterator[tuple[Engine, Engine]]:
    """Of one rank, and of two."""
    transfer = transfer_config(shared.address, tp_shards=2)
    with (
        Engine(preloaded, llama, transfer) as one,
        Engine(preloaded, llama, transfer, tensor_parallel_size=2, environ=THREADS) as two,
    ):
        yield one, two


def spaces(client: Client) -> list[str]:
    """The namespaces of blocks in a store."""
    return sorted(each.name for each in client.status().namespaces if each.name.startswith("vllm/"))


def test_blocks_of_one_rank_are_found_by_two_and_the_other_way_round(
    pair: tuple[Engine, Engine], shared: Cluster
) -> None:
    one, two = pair
    one.generate([prompt(1)])
    one.saved()
    with Client(shared.address) as client:
        assert [each.rpartition("/")[2] for each in spaces(client)] == ["p0s0", "p0s1"]
    (found,) = two.generate([prompt(1)])
    assert found.cached == WHOLE
    two.generate([prompt(2)])
    two.saved()
    (back,) = one.generate([prompt(2)])
    assert back.cached == WHOLE
    assert one.reset()
    (right,) = one.generate([prompt(2)], params={"no_load": True, "no_store": True})
    assert back.tokens == right.tokens


def test_a_block_without_one_of_its_shards_is_none(
    pair: tuple[Engine, Engine], shared: Cluster
) -> None:
    one, two = pair
    one.generate([prompt(3)])
    one.saved()
    with Client(shared.address) as client:
        client.clear(spaces(client)[1])
    assert [each.cached for each in two.generate([prompt(3)])] == [0]
    two.saved()
    assert one.reset()
    assert [each.cached for each in one.generate([prompt(3)])] == [WHOLE], "stored again"


def test_shards_that_do_not_fit_are_refused_by_name(
    store: Cluster, llama: Path, engine: StartEngine
) -> None:
    with pytest.raises(AssertionError, match=r"2 heads of layer .* cannot be split into 3 shards"):
        engine(llama, transfer_config(store.address, tp_shards=3))
