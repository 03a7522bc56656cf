"""Nodes that pool memory of the GPU: values of the host and of the same GPU, and ends of processes
while others have that memory open.

Without a GPU the nodes' one is another fake, which real processes share.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvstore import Client, PutOutcome
from tests.gpu.caches import BLOCK, LAYER, SPLIT, Cache, Case
from tests.gpu.machine import GIB, GPU, IS_REAL, MIB, NAME, tensor
from tests.gpu.test_caches import blocks_come_back_into_others
from tests.gpu.test_values import same, values
from tests.support.cluster import SHORT, Cluster, Node
from tests.support.wait import until

POOLED = NAME if IS_REAL else "fake:0"
POOL_BYTES = 8 * GIB if IS_REAL else 64 * MIB
STORED = PutOutcome.STORED
KEYS = [f"key-{number}" for number in range(20)]


def node_on(cluster: Cluster, **settings: str) -> Node:
    return cluster.node(device=POOLED, memory=str(POOL_BYTES), **settings)


@pytest.fixture
def cluster(gpu: GPU, tmp_path: Path) -> Iterator[Cluster]:
    """A master and a node whose memory is the GPU's."""
    with Cluster(tmp_path, settings=SHORT) as cluster:
        cluster.master()
        node_on(cluster)
        yield cluster


@pytest.fixture
def client(cluster: Cluster, transport: str) -> Client:
    return cluster.client(transports=(transport,), timeout_ms=30_000)


def used(client: Client) -> set[str]:
    return set(client.stats().transports)


def test_values_of_the_host_and_of_the_gpu(gpu: GPU, client: Client, transport: str) -> None:
    value = values()
    assert client.put("gpu", gpu.tensor(value)) is STORED
    assert client.put("host", value) is STORED
    for key in ("gpu", "host"):
        assert same(gpu.read(tensor(client.get(key, device=NAME))), value)
        assert same(tensor(client.get(key)), value)
    assert used(client) == {"device" if transport == "shm" else "tcp"}


@pytest.mark.parametrize("verify", ["payload", "header"])
@pytest.mark.parametrize("layout", [SPLIT, LAYER, BLOCK])
def test_blocks_come_back_into_others(
    gpu: GPU, cluster: Cluster, transport: str, layout: str, verify: str
) -> None:
    client = cluster.client(transports=(transport,), timeout_ms=30_000, verify=verify)
    cache = Cache(gpu, Case("llama-8b-tp8-bf16", 32, 8192, layout))
    blocks_come_back_into_others(gpu, client, cache, min(cache.saved, 500))


def test_a_node_is_killed_while_its_memory_is_open(
    gpu: GPU, cluster: Cluster, client: Client
) -> None:
    """Its objects are misses, and the GPU serves this process as before."""
    [node] = cluster.nodes
    value = values()
    for key in KEYS:
        assert client.put(key, gpu.tensor(value)) is STORED
    assert client.get(KEYS[0], device=NAME) is not None
    node.kill()
    assert client.get_many(KEYS, device=NAME) == [None] * len(KEYS)
    assert client.get_many(KEYS) == [None] * len(KEYS)
    room = gpu.tensor(torch.zeros_like(value))
    assert same(gpu.read(room), torch.zeros_like(value))
    node_on(cluster, name=node.name)
    assert until(lambda: client.put("new", gpu.tensor(value)) is STORED)
    assert same(gpu.read(tensor(client.get("new", device=NAME))), value)


def test_a_node_stops_in_order_while_a_client_has_its_memory_open(
    cluster: Cluster, client: Client
) -> None:
    [node] = cluster.nodes
    with cluster.client() as passing:
        assert passing.put("k", b"value") is STORED
    assert client.get("k") == b"value"
    node.process.terminate()
    assert node.wait() == 0, node.errors
    assert client.get("k") is None
