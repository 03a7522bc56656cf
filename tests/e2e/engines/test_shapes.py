"""Engines of other tensor-parallel sizes, which find each other's blocks by objects that both have:
shards of heads.

vLLM's attention for CPUs has blocks of 32 tokens and their multiples.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvstore import Client
from tests.e2e.engines.conftest import StartEngine, prompt
from tests.e2e.engines.engine import Engine, transfer_config
from tests.e2e.engines.preloaded import ForkServer
from tests.support.cluster import Cluster

BLOCK = 32
TOKENS = 19 * BLOCK + 5
"""Of a prompt that ends after a single block, which is no whole object."""

ENDS = 19 * BLOCK
PARTS = ["p0s0", "p0s1"]
"""Of each block's objects."""

THREADS = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}


class Pair(NamedTuple):
    one: Engine
    other: Engine


@pytest.fixture(scope="module")
def pair(preloaded: ForkServer, llama: Path, shared: Cluster) -> Iterator[Pair]:
    """Of one rank and of two, with two blocks in an object."""
    settings = transfer_config(shared.address, tp_shards=2)
    ranks: dict[str, Any] = {"tensor_parallel_size": 2, "environ": THREADS}
    with (
        Engine(preloaded, llama, settings, block_size=BLOCK) as one,
        Engine(preloaded, llama, settings, block_size=BLOCK, **ranks) as other,
    ):
        yield Pair(one, other)


@pytest.fixture
def client(shared: Cluster) -> Iterator[Client]:
    """Of a store without blocks."""
    with Client(shared.address) as client:
        for space in spaces(client):
            client.clear(space)
        yield client


def spaces(client: Client) -> list[str]:
    """The namespaces of blocks in a store."""
    return sorted(
        each.name
        for each in client.status().namespaces
        if each.name.startswith("vllm/") and each.objects
    )


def computed(engine: Engine, seed: int) -> list[int]:
    """The answer of this engine without any cache."""
    assert engine.reset()
    [right] = engine.generate([prompt(seed, TOKENS)], params={"no_load": True, "no_store": True})
    assert not right.cached
    assert engine.reset()
    return right.tokens


def test_each_finds_what_the_other_has_stored(pair: Pair, client: Client) -> None:
    for seed, writer, reader in ((1, pair.one, pair.other), (2, pair.other, pair.one)):
        [told] = writer.generate([prompt(seed, TOKENS)])
        writer.saved()
        assert told.stored_tokens == ENDS
        assert [each.rpartition("/")[2] for each in spaces(client)] == PARTS
        [found] = reader.generate([prompt(seed, TOKENS)], params=told.params)
        assert found.cached == ENDS
        assert found.tokens == computed(reader, seed)
        assert reader.metrics()["load_failures"] == 0


def test_a_block_without_one_of_its_objects_is_none_and_is_stored_again(
    pair: Pair, client: Client
) -> None:
    """As when an engine dies between the shards of its fifth object."""
    assert pair.other.reset()
    pair.other.generate([prompt(4, TOKENS)])
    pair.other.saved()
    space = spaces(client)[-1]
    rows = sorted(client.list_objects(namespace=space), key=lambda row: row.depth)
    row, before = rows[4], 4 * 2 * BLOCK
    assert client.remove(row.key, namespace=space)
    assert pair.one.reset()
    [half] = pair.one.generate([prompt(4, TOKENS)], params={"no_store": True})
    assert pair.other.reset()
    [found] = pair.other.generate([prompt(4, TOKENS)])
    pair.other.saved()
    assert client.exists(row.key, namespace=space)
    assert half.cached == found.cached == before
    assert half.tokens == found.tokens == computed(pair.other, 4)
    assert pair.one.reset()
    [again] = pair.one.generate([prompt(4, TOKENS)])
    assert again.cached == ENDS


def test_shards_that_do_not_fit_are_refused_by_name(
    store: Cluster, llama: Path, engine: StartEngine
) -> None:
    with pytest.raises(AssertionError, match=r"2 heads of layer .* cannot be split into 3 shards"):
        engine(llama, transfer_config(store.address, tp_shards=3))


def test_several_blocks_are_one_object(shared: Cluster, llama: Path, engine: StartEngine) -> None:
    settings = transfer_config(shared.address, blocks_per_object=4)
    writer, reader = (engine(llama, settings, block_size=BLOCK) for _ in range(2))
    whole = prompt(5, TOKENS)
    [told] = writer.generate([whole])
    writer.saved()
    assert told.stored_tokens == ENDS
    with Client(shared.address) as client:
        stored = [len(list(client.list_objects(namespace=each))) for each in spaces(client)]
    assert 4 + 3 in stored
    right = computed(reader, 5)
    [found] = reader.generate([whole], params=told.params)
    assert (found.cached, found.tokens) == (ENDS, right)
    # A part of the first object is here already, and of the last one needed.
    assert reader.reset()
    reader.generate([whole[: 2 * BLOCK + 5]], params={"no_load": True, "no_store": True})
    [found] = reader.generate([whole])
    assert (found.cached, found.tokens) == (ENDS, right)
    assert reader.reset()
    shorter = whole[: 8 * BLOCK]
    [found] = reader.generate([shorter])
    assert found.cached == 7 * BLOCK
    assert reader.metrics()["load_failures"] == 0
