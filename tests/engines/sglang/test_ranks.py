"""``tp_lcm_size``: engines with other numbers of tensor-parallel ranks find each other's pages."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

from kvstore.errors import ConfigError
from tests.engines.sglang import hicache
from tests.engines.sglang.conftest import MakeBackend
from tests.engines.sglang.hicache import after, attach, bytes_at, indices
from tests.support.cluster import Cluster

KEYS = [f"{number:064x}" for number in range(4)]
HEADS = 4
"""KV heads of the model."""
PAGES = range(len(KEYS))


def ranks_pool(rank: int = 0, ranks: int = 1, layout: str = "page_head", *, filled: bool) -> Any:
    """The host pool of one rank: its heads of what one rank alone would have."""
    heads = HEADS // ranks
    pool = hicache.host_pool(layout=layout, of=hicache.device_pool(heads=heads))
    if filled:
        whole = hicache.host_pool(layout=layout, of=hicache.device_pool(heads=HEADS), filled=1)
        own = slice(rank * heads, (rank + 1) * heads)
        pool.kv_buffer[:, : len(KEYS)] = whole.kv_buffer[:, : len(KEYS), own]
    return pool


def engine(backend: MakeBackend, ranks: int, *, filled: bool, **given: Any) -> list[Any]:
    """The back-ends of all ranks, each with its pool as ``pool``."""
    made = []
    for rank in range(ranks):
        pool = ranks_pool(rank, ranks, filled=filled)
        made.append(backend(pool, rank=rank, ranks=ranks, **{"tp_lcm_size": HEADS, **given}))
        made[-1].pool = pool
    return made


def save(rank: Any) -> None:
    assert rank.batch_set_v1(KEYS, indices(*PAGES)) == [True] * len(KEYS)


@pytest.mark.parametrize(("writers", "readers"), [*itertools.permutations((1, 2, 4), 2), (2, 2)])
def test_an_engine_of_another_size_reads_what_one_has_written(
    store: Cluster, backend: MakeBackend, writers: int, readers: int
) -> None:
    others = engine(backend, readers, filled=False)
    for rank in engine(backend, writers, filled=True):
        save(rank)
    there = [16, 17, 18, 19]
    for number, rank in enumerate(others):
        assert rank.batch_exists([*KEYS, "f" * 64]) == len(KEYS)
        assert rank.batch_exists_v2(KEYS, []).kv_hit_pages == len(KEYS)
        assert rank.batch_get_v1(KEYS, indices(*there)) == [True] * len(KEYS)
        own = ranks_pool(number, readers, filled=True)
        assert [bytes_at(rank.pool, at) for at in there] == [bytes_at(own, at) for at in PAGES]
    names = {each.name for each in store.status().namespaces if "sglang/" in each.name}
    assert len(names) == HEADS, "one for each piece, whoever wrote it"


@pytest.mark.parametrize("incomplete", [0, 1])
def test_a_page_is_there_if_all_of_its_pieces_are(
    store: Cluster, backend: MakeBackend, incomplete: int
) -> None:
    ranks = engine(backend, 2, filled=True)
    whole, part = ranks[1 - incomplete], ranks[incomplete]
    [reader] = engine(backend, 1, filled=False)
    save(whole)
    assert reader.batch_exists(KEYS) == 0
    assert part.batch_set_v1(KEYS[:2], indices(0, 1)) == [True] * 2
    assert reader.batch_exists(KEYS) == 2
    assert reader.batch_get_v1(KEYS, indices(*PAGES)) == [True, True, False, False]
    part.clear()
    assert reader.batch_exists(KEYS) == 0
    assert whole.batch_exists(KEYS) == len(KEYS)


def test_pieces_are_chains(store: Cluster, backend: MakeBackend) -> None:
    [one] = engine(backend, 1, filled=True)
    assert one.batch_set_v1(KEYS[:2], indices(0, 1)) == [True] * 2
    assert one.batch_set_v1(KEYS[2:], indices(2, 3), after(*KEYS[:2])) == [True] * 2
    client = store.client()
    for part in one._pools[PoolName.KV].parts:
        rows = client.list_objects(namespace=one._namespace(part))
        depths = {row.key.decode(): row.depth for row in rows}
        assert [depths[key] - depths[KEYS[0]] for key in KEYS] == [0, 1, 2, 3]


def test_a_window_is_split_as_well(store: Cluster, backend: MakeBackend) -> None:
    [one] = engine(backend, 1, filled=True, sides={PoolName.SWA: ranks_pool(filled=True)})
    window = PoolTransfer(
        PoolName.SWA, indices(2, 3), keys=KEYS[2:], hit_policy=PoolHitPolicy.TRAILING_PAGES
    )
    save(one)
    assert one.batch_set_v2([window])["swa"] == [True, True]
    for rank in range(2):
        pool, side = (ranks_pool(rank, 2, filled=False) for _ in range(2))
        other = backend(pool, rank=rank, ranks=2, tp_lcm_size=HEADS, sides={PoolName.SWA: side})
        assert other.batch_exists_v2(KEYS, [window]).restorable_prefix_pages == [4]
        assert other.batch_get_v2([window])["swa"] == [True, True]
        own = ranks_pool(rank, 2, filled=True)
        assert [bytes_at(side, page) for page in (2, 3)] == [bytes_at(own, p) for p in (2, 3)]


def test_latent_pages_are_of_all_ranks_of_any_number(store: Cluster, backend: MakeBackend) -> None:
    pool, other_pool = hicache.host_pool("mla", filled=1), hicache.host_pool("mla")
    save(backend(pool, is_mla=True, ranks=2, tp_lcm_size=HEADS))
    other = backend(other_pool, is_mla=True, rank=3, ranks=4, tp_lcm_size=HEADS)
    assert other.batch_get_v1(KEYS, indices(*PAGES)) == [True] * len(KEYS)
    assert [bytes_at(other_pool, at) for at in PAGES] == [bytes_at(pool, at) for at in PAGES]
    assert backend(other_pool, is_mla=True, ranks=4).batch_exists(KEYS) == 0


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"layout": "page_first"}, "page_first .*page_head"),
        ({"layout": "layer_first", "ranks": 4}, "layer_first .*page_head"),
        ({"zero_copy": False}, "interface_v1"),
        ({"tp_lcm_size": 2 * HEADS}, "into 8 pieces: a rank has 4 KV heads"),
        ({"tp_lcm_size": 12, "ranks": 2}, "into 6 pieces: a rank has 2 KV heads"),
    ],
)
def test_what_cannot_be_split_is_refused_by_name(
    store: Cluster, model: Path, given: dict[str, Any], why: str
) -> None:
    given = {"layout": "page_head", "ranks": 1, "tp_lcm_size": HEADS, **given}
    pool = ranks_pool(0, given["ranks"], given.pop("layout"), filled=False)
    with pytest.raises(ConfigError, match=why):
        attach(pool, store.address, model=model, **given)
