"""Clients that a program drops without closing them: they give back all that they have."""

from __future__ import annotations

import asyncio
import gc
import weakref

import numpy as np
import pytest

from kvstore import AsyncClient, Client
from tests.support.cluster import Cluster
from tests.support.leaks import leaked, snapshot
from tests.support.wait import until


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("lane", [True, False], ids=["lane", "grpc"])
def test_a_dropped_client_gives_all_back(store: Cluster, transport: str, lane: bool) -> None:
    """Threads, connections, mappings; although threads of its own are running."""
    before = snapshot()
    client = Client(store.address, transports=(transport,), lane=lane)
    client.put("dropped", b"x" * 1000, overwrite=True)
    view = client.get("dropped", copy=False)  # the thread that renews leases
    del view
    gone = weakref.ref(client)
    del client
    gc.collect()
    assert gone() is None, "a thread keeps it"
    assert not leaked(before)


def test_a_dropped_async_client_gives_all_back(store: Cluster) -> None:
    before = snapshot()

    async def use() -> weakref.ref[AsyncClient]:
        client = AsyncClient(store.address)
        await client.put("dropped", b"x" * 1000, overwrite=True)
        await asyncio.gather(*(client.get("dropped") for _ in range(8)))
        return weakref.ref(client)

    gone = asyncio.run(use())
    gc.collect()
    assert gone() is None
    assert not leaked(before)


def test_a_view_outlives_its_dropped_client(store: Cluster) -> None:
    """Its lease is renewed for as long as the view is there; only then is the client closed."""
    before = snapshot()

    def read() -> object:
        client = Client(store.address)
        client.put("kept", np.full(1_000, 7, np.uint8), overwrite=True)
        return client.get("kept", copy=False)

    view = read()
    gc.collect()
    other = store.client()

    def leased_ms() -> int:
        return next(row.leased_ms for row in other.list_objects(prefix=b"kept"))

    highest = leased_ms()
    until(lambda: leased_ms() < highest - 100)
    until(lambda: leased_ms() >= highest - 100)  # renewed
    assert np.array_equal(view, np.full(1_000, 7, np.uint8))  # type: ignore[arg-type]
    del view
    other.close()
    assert not leaked(before)
