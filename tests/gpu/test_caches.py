"""Blocks of paged caches through a real store: every byte comes back, and no other changes."""

from __future__ import annotations

import random

import pytest

from kvstore import Client
from kvstore.calls import PutOutcome
from tests.gpu.caches import BLOCK, CASES, LAYER, SPLIT, Cache, Case
from tests.gpu.machine import GPU, NAME

OLD, SAVED, OTHER = 9, 1, 5
"""Salts of what is in a cache before a load, of what was saved, and of other kernels' writes."""


def keys_of(group: int, count: int) -> list[bytes]:
    return [b"%d/%d" % (group, index) for index in range(count)]


def distinct(cache: Cache, runs: int, count: int) -> list[list[int]]:
    """Lists of block numbers, all different."""
    chance = random.Random(7)
    numbers = chance.sample(range(cache.blocks), runs * count)
    return [numbers[at : at + count] for at in range(0, runs * count, count)]


def put(client: Client, cache: Cache, group: int, blocks: list[int], *after: object) -> None:
    device = client.device(NAME)
    values = [cache.memory(device, block, after) for block in blocks]
    outcomes = client.put_chain(keys_of(group, len(blocks)), values)
    assert outcomes == [PutOutcome.STORED] * len(blocks)


def get(client: Client, cache: Cache, group: int, blocks: list[int], *after: object) -> None:
    device = client.device(NAME)
    keys = keys_of(group, len(blocks))
    assert client.match_prefix(keys) == len(blocks)
    rooms = [cache.memory(device, block, after) for block in blocks]
    assert client.get_into(keys, rooms) == [cache.block_bytes] * len(blocks)


def blocks_come_back_into_others(gpu: GPU, client: Client, cache: Cache, count: int) -> None:
    """Saves blocks, clears the cache, and loads them into others; all others stay as they were."""
    every = list(range(cache.blocks))
    source, target = distinct(cache, 2, count)
    cache.fill(every, SAVED)
    put(client, cache, 0, source)
    cache.fill(every, OLD)
    get(client, cache, 0, target)
    gpu.finish()
    assert cache.holds(target, source, SAVED)
    others = sorted(set(every) - set(target))
    assert cache.holds(others, others, OLD)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_blocks_come_back_into_others(gpu: GPU, client: Client, transport: str, case: Case) -> None:
    cache = Cache(gpu, case)
    every = list(range(cache.blocks))
    count = cache.saved // case.groups
    lists = distinct(cache, 2 * case.groups, count)
    sources, targets = lists[: case.groups], lists[case.groups :]
    cache.fill(every, SAVED)
    for group, blocks in enumerate(sources):
        put(client, cache, group, blocks)
    cache.fill(every, OLD)
    for group, blocks in enumerate(targets):
        get(client, cache, group, blocks)
    gpu.finish()
    for source, target in zip(sources, targets, strict=True):
        assert cache.holds(target, source, SAVED)
    filled = {block for target in targets for block in target}
    others = [block for block in every if block not in filled]
    assert cache.holds(others, others, OLD)
    assert client.stats().transports[transport] >= 2


@pytest.mark.parametrize("layout", [SPLIT, BLOCK])
def test_kernels_beside_a_call_touch_none_of_its_bytes(
    gpu: GPU, client: Client, layout: str
) -> None:
    """Kernels of one stream write the blocks before the save's mark, and into the blocks to load
    before the load's mark. Kernels of another stream write to the neighbours all the while."""
    cache = Cache(gpu, Case("llama-8b-tp8-bf16", 32, 8192, layout))
    count = min(cache.saved, 100)
    sources, targets, neighbours = distinct(cache, 3, count)
    device = client.device(NAME)
    writing, beside = gpu.stream(), gpu.stream()
    handle = writing if isinstance(writing, int) else writing.cuda_stream

    gpu.launch(cache.filling(sources, SAVED), writing)
    saved = device.driver.record_event(handle)
    gpu.launch(cache.filling(neighbours, OTHER), beside)
    put(client, cache, 0, sources, saved)

    gpu.launch(cache.filling(targets, OLD), writing)
    loaded = device.driver.record_event(handle)
    gpu.launch(cache.filling(neighbours, OLD), beside)
    get(client, cache, 0, targets, loaded)
    gpu.finish()
    assert cache.holds(targets, sources, SAVED)
    assert cache.holds(neighbours, neighbours, OLD)


def test_a_call_waits_for_the_stream_on_which_its_thread_computes(gpu: GPU, client: Client) -> None:
    cache = Cache(gpu, Case("llama-8b-tp8-bf16", 32, 8192, LAYER))
    sources, targets = distinct(cache, 2, min(cache.saved, 100))
    gpu.launch(cache.filling(sources, SAVED))
    put(client, cache, 0, sources)
    gpu.launch(cache.filling(targets, OLD))
    get(client, cache, 0, targets)
    gpu.finish()
    assert cache.holds(targets, sources, SAVED)
