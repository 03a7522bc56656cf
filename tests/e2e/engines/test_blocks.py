"""Engines of other block sizes, which find each other's blocks by objects of the smaller size.

vLLM's attention for CPUs has blocks of 32 tokens and their multiples.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore import Client
from tests.e2e.engines.conftest import prompt
from tests.e2e.engines.engine import Engine, transfer_config
from tests.e2e.engines.preloaded import Preloaded
from tests.e2e.engines.test_shapes import spaces
from tests.support.cluster import Cluster

SMALL, LARGE = 32, 64
TOKENS = 9 * LARGE + SMALL + 5
"""Of a prompt that ends in the middle of a large block, after a whole small one."""

LAYERS, HEADS, CONTENT = 4, 2, 2 * 64
WHOLE, ENDS = 9 * LARGE, 9 * LARGE + SMALL


@pytest.fixture(scope="module")
def pair(preloaded: Preloaded, llama: Path, shared: Cluster) -> Iterator[tuple[Engine, Engine]]:
    """Of small blocks, without a setting, and of large ones that are cut."""
    cut = transfer_config(shared.address, block_tokens=SMALL)
    with (
        Engine(preloaded, llama, transfer_config(shared.address), block_size=SMALL) as small,
        Engine(preloaded, llama, cut, block_size=LARGE) as large,
    ):
        yield small, large


def computed(engine: Engine, seed: int) -> list[int]:
    """The answer of this engine without any cache."""
    assert engine.reset()
    [right] = engine.generate([prompt(seed, TOKENS)], params={"no_load": True, "no_store": True})
    assert not right.cached
    return right.tokens


def test_small_blocks_are_found_by_the_engine_with_large_ones(pair: tuple[Engine, Engine]) -> None:
    small, large = pair
    [told] = small.generate([prompt(1, TOKENS)])
    small.saved()
    assert told.params == {"stored_tokens": ENDS}
    [found] = large.generate([prompt(1, TOKENS)], params=told.params)
    assert found.cached == WHOLE
    assert found.tokens == computed(large, 1)
    assert large.metrics()["load_failures"] == 0


def test_large_blocks_are_found_by_the_engine_with_small_ones_up_to_half_of_the_last(
    pair: tuple[Engine, Engine],
) -> None:
    small, large = pair
    [told] = large.generate([prompt(2, TOKENS)])
    large.saved()
    assert told.params == {"stored_tokens": ENDS}
    [found] = small.generate([prompt(2, TOKENS)], params=told.params)
    assert found.cached == ENDS
    assert found.tokens == computed(small, 2)


def objects(client: Client) -> dict[bytes, np.ndarray]:
    """Those of the only namespace, in the order of their tokens."""
    [space] = spaces(client)
    rows = sorted(client.list_objects(namespace=space), key=lambda row: row.depth)
    return {
        row.key: np.frombuffer(client.get(row.key, namespace=space, kind="bytes"), np.float32)  # type: ignore[arg-type]
        for row in rows
    }


def stored(engine: Engine, seed: int, client: Client) -> dict[bytes, np.ndarray]:
    """What this engine computes and stores of a prompt, in a store without blocks."""
    for space in spaces(client):
        client.clear(space)
    assert engine.reset()
    [result] = engine.generate([prompt(seed, TOKENS)])
    assert not result.cached
    engine.saved()
    return objects(client)


def test_half_a_block_is_none_for_large_blocks_and_is_stored_again(
    pair: tuple[Engine, Engine], shared: Cluster
) -> None:
    """As when an engine dies between the two halves of its fifth block."""
    small, large = pair
    with Client(shared.address) as client:
        missing = list(stored(large, 4, client))[9]
        [space] = spaces(client)
        assert client.remove(missing, namespace=space)
        assert small.reset()
        [half] = small.generate([prompt(4, TOKENS)], params={"no_store": True})
        assert large.reset()
        [found] = large.generate([prompt(4, TOKENS)])
        large.saved()
        assert missing in objects(client)
    assert (half.cached, found.cached) == (9 * SMALL, 4 * LARGE)
    assert half.tokens == found.tokens == computed(large, 4)
    assert small.reset()
    [again] = small.generate([prompt(4, TOKENS)])
    assert again.cached == ENDS
