"""Engines of other tensor-parallel sizes, which find each other's blocks by shards of heads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from examples.tiny import BLOCK_TOKENS
from kvstore import Client
from tests.e2e.engines.conftest import StartEngine, prompt
from tests.e2e.engines.engine import Engine, transfer_config
from tests.e2e.engines.preloaded import Preloaded
from tests.support.cluster import Cluster

WHOLE = 4 * BLOCK_TOKENS
THREADS = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
LAYERS = 4


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


def shards(client: Client) -> list[set[bytes]]:
    """The keys of each shard's objects."""
    return [{row.key for row in client.list_objects(namespace=name)} for name in spaces(client)]


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


def test_an_engine_that_dies_between_two_shards_leaves_no_block(
    pair: tuple[Engine, Engine], shared: Cluster, llama: Path, engine: StartEngine
) -> None:
    """And the blocks are complete as soon as another engine has computed them."""
    one, two = pair
    dies = engine(llama, transfer_config(shared.address, tp_shards=2))
    dies.run("""
        import os
        from kvstore import Client

        put_chain = Client.put_chain

        def put_one(*given, **named):
            put_chain(*given, **named)
            os.kill(os.getpid(), 9)

        Client.put_chain = put_one
    """)

    with Client(shared.address) as client:
        before = shards(client)[0]

    def ask() -> None:
        dies.generate([prompt(7)])
        dies.saved()

    with pytest.raises(AssertionError, match="has died"):
        ask()
    with Client(shared.address) as client:
        first, second = shards(client)
        half = first - second - before
        assert len(half) == WHOLE // BLOCK_TOKENS
        assert [each.cached for each in two.generate([prompt(7)])] == [0]
        two.saved()
        [found] = one.generate([prompt(7)])
        assert found.cached == WHOLE
        assert all(half <= keys for keys in shards(client))


@pytest.mark.timeout(400)
def test_the_bytes_of_a_shard_are_those_that_the_other_engine_computes(
    pair: tuple[Engine, Engine], shared: Cluster, llama: Path, engine: StartEngine, store: Cluster
) -> None:
    """Up to the order of sums: the first layer has none before it."""
    one, _ = pair
    two = engine(
        llama, transfer_config(store.address, tp_shards=2), tensor_parallel_size=2,
        environ=THREADS,
    )  # fmt: skip
    for each in (one, two):
        each.generate([prompt(4)])
        each.saved()
    with Client(shared.address) as ours, Client(store.address) as theirs:
        assert spaces(ours) == spaces(theirs)
        for space in spaces(theirs):
            rows = list(theirs.list_objects(namespace=space))
            assert len(rows) == WHOLE // BLOCK_TOKENS
            for row in rows:
                left, right = (
                    np.frombuffer(client.get(row.key, namespace=space, kind="bytes"), np.float32)  # type: ignore[arg-type]
                    for client in (ours, theirs)
                )
                assert left.size == right.size == LAYERS * 2 * BLOCK_TOKENS * 64
                layer = left.size // LAYERS
                assert np.array_equal(left[:layer], right[:layer])
                assert np.allclose(left, right, rtol=1e-3, atol=1e-3)


@pytest.mark.timeout(400)
def test_blocks_are_cut_and_split_at_once(
    pair: tuple[Engine, Engine], shared: Cluster, llama: Path, engine: StartEngine
) -> None:
    """One rank with larger blocks, and two ranks."""
    _, two = pair
    transfer = transfer_config(shared.address, tp_shards=2, block_tokens=BLOCK_TOKENS)
    large = engine(llama, transfer, block_size=2 * BLOCK_TOKENS)
    asked = [prompt(5, 1_000), prompt(6, 1_000)]
    for writer, reader, cached in ((two, large, 6), (large, two, 7)):
        first = writer.generate([asked[0]])
        writer.saved()
        [found] = reader.generate([asked.pop(0)], params=first[0].params)
        assert found.cached == cached * BLOCK_TOKENS
        assert found.tokens == first[0].tokens


def test_shards_that_do_not_fit_are_refused_by_name(
    store: Cluster, llama: Path, engine: StartEngine
) -> None:
    with pytest.raises(AssertionError, match=r"2 heads of layer .* cannot be split into 3 shards"):
        engine(llama, transfer_config(store.address, tp_shards=3))
