"""The benchmark of HiCache on this store: that it works, not how fast it is."""

from __future__ import annotations

import pytest

from bench.tables import DROP_IN, NATIVE
from kvstore.bench.client import ClientProcess, Settings
from kvstore.bench.kvstore_driver import own_store
from kvstore.bench.processes import Children
from kvstore.bench.session import EXIST, GET, PUT

POOL = 256 << 20
PAGES = 64
SIZE = 64 << 10


@pytest.mark.parametrize("mode", [DROP_IN, NATIVE])
def test_pages_are_set_got_and_found(mode: str) -> None:
    with own_store(POOL) as store, Children() as children:
        settings = Settings(
            "bench.hicache:HiCacheDriver",
            {"on_mooncake": False},
            mode,
            store.address(),
            POOL,
            SIZE * PAGES,
        )
        client = ClientProcess(children, mode, settings)
        for op in (PUT, GET, EXIST):  # compares what it got with what it has put
            assert len(client.measure(op, 0 if op == EXIST else SIZE, PAGES, 0.01)) >= 3, op
        client.close()
