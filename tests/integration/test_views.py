"""Memory of the pool in a program's hands: zero-copy views, allocations, contributed segments."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvstore import PutOutcome
from kvstore.errors import (
    KVStoreError,
)
from tests.integration.conftest import either_client
from tests.support.cluster import SHORT, Cluster, entry
from tests.support.processes import children_of, is_running

STORED = PutOutcome.STORED
LEASE_S = SHORT["lease_ms"] / 1000


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """With promises that end within seconds."""
    with Cluster(tmp_path_factory.mktemp("store"), settings=SHORT) as cluster:
        cluster.start()
        yield cluster


@pytest.fixture(params=["sync", "async"])
def verbs(request: pytest.FixtureRequest, store: Cluster) -> Iterator[Any]:
    with either_client(request.param, store.address) as client:
        yield client


def held_for(lease: Any, seconds: float) -> bool:
    """Whether it is held for all of this time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not lease.is_held:
            return False
        time.sleep(0.02)
    return True


# --- views -------------------------------------------------------------------------------------


def test_a_view_is_the_pools_own_memory_and_cannot_be_written(verbs: Any) -> None:
    array = np.arange(1000, dtype=np.float32)
    verbs.put_many([("array", array), ("bytes", b"abc")])
    views = [verbs.get("array", copy=False) for _ in range(3)]
    assert len({view.ctypes.data for view in views}) == 1
    assert (views[0] == array).all()
    assert not views[0].flags.writeable
    assert verbs.get("array").ctypes.data != views[0].ctypes.data
    bytes_view = verbs.get("bytes", copy=False)
    assert isinstance(bytes_view, memoryview)
    assert bytes_view.readonly
    assert bytes(bytes_view) == b"abc"
    assert verbs.stats().views == 2
    assert verbs.get_many(["array", "none"], copy=False)[1] is None


# --- allocations -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_what_is_computed_into_the_pool_is_put_without_moving_a_byte(
    verbs: Any, store: Cluster, kind: Any
) -> None:
    if kind == "torch":
        pytest.importorskip("torch")
    array = verbs.allocate((100, 10), "float32", kind=kind)
    array[:] = 7
    assert not verbs.exists("k")
    assert verbs.put("k", array) is STORED
    other = store.client()
    assert (other.get("k") == array).all()
    seen = other.get("k", copy=False)
    array[0, 0] = 8  # forbidden; done here to see that it is one and the same memory
    assert seen is not None
    assert float(seen[0, 0]) == 8  # type: ignore[call-overload]


def test_an_allocation_outlives_the_put_deadline(verbs: Any, store: Cluster) -> None:
    array = verbs.allocate(1000, kind="numpy")
    lease = verbs.lease(array)
    array[:] = 5
    assert held_for(lease, 1.5 * SHORT["put_deadline_ms"] / 1000)
    assert verbs.put("k", array) is STORED
    assert held_for(lease, 1.1 * LEASE_S)  # now as a view of the object
    assert (store.client().get("k") == array).all()


# --- contributing memory -----------------------------------------------------------------------


def test_a_client_contributes_a_segment(cluster: Cluster) -> None:
    cluster.master()
    client = cluster.client(memory="64MiB")
    (node,) = cluster.status().nodes
    assert node.segments[0].size == 64 << 20
    client.put("k", b"x" * 1000)
    assert cluster.client(transports=("tcp",)).get("k") == b"x" * 1000
    child = client._state.children[0].pid
    client.close()
    assert not is_running(child)
    assert not entry(node.name).exists()
    assert not cluster.status().nodes


def test_an_embedded_store() -> None:
    import asyncio

    from kvstore import AsyncClient, Client

    with Client.embedded("32MiB") as client:
        client.put("k", b"x")
        with Client(client.config.master) as other:
            assert other.get("k") == b"x"
        children = [child.pid for child in client._state.children]
        below = [pid for child in children for pid in children_of(child)]
        assert len(below) == 1
    assert not any(map(is_running, children + below))

    async def main() -> None:
        async with await AsyncClient.embedded("32MiB") as client:
            await client.put("k", b"x")
            assert await client.get("k") == b"x"

    asyncio.run(main())
    with pytest.raises(KVStoreError) as caught:
        Client.embedded("60TiB")
    assert caught.value.code == "shared_memory_too_small"
    assert caught.value.advice
