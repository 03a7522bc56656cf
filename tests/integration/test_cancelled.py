"""Calls that are cancelled: nothing of ours touches a caller's memory once control is back."""

from __future__ import annotations

import asyncio
import contextlib

import numpy as np
import pytest

from kvstore import AsyncClient
from tests.support.cluster import Cluster

SIZE = 24 << 20


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_cancelled_get_into_writes_no_more(store: Cluster, transport: str) -> None:
    async def cancel_many() -> int:
        cancelled = 0
        async with AsyncClient(store.address, transports=(transport,)) as client:
            await client.put("large", np.ones(SIZE, np.uint8))
            buffer = np.zeros(SIZE, np.uint8)
            for attempt in range(20):
                getting = asyncio.create_task(client.get_into("large", buffer))
                await asyncio.sleep(attempt / 2_000)
                getting.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await getting
                cancelled += getting.cancelled()
                buffer[:] = 0
                await asyncio.sleep(0.02)
                assert not buffer.any(), "written after the end of the call"
            assert "failed_transfers" not in client.stats().counters, "the node is not to blame"
            assert await client.get_into("large", buffer) == [SIZE], "the client goes on"
            assert buffer.all()
        return cancelled

    assert asyncio.run(cancel_many())
