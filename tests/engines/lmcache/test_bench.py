"""The benchmark behind LMCache, on real stores: that it works, not how fast they are."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator

import pytest

import kvstore
from bench import mooncake
from bench.tables import LMCACHE_ROWS
from kvstore.bench.client import ClientProcess, Settings
from kvstore.bench.kvstore_driver import own_store
from kvstore.bench.processes import ChildError, Children
from kvstore.bench.rows import SHM, TCP, ComparisonCase
from kvstore.bench.session import EXIST

POOL = 256 << 20
SMALL = [row for row in LMCACHE_ROWS if row.size <= 64 << 10]

roomy = pytest.mark.skipif(
    shutil.disk_usage("/dev/shm").free < 4 * POOL, reason="/dev/shm is small"
)


@contextlib.contextmanager
def measured(
    children: Children, on_mooncake: bool, address: str, rows: list[ComparisonCase]
) -> Iterator[ClientProcess]:
    """Measures each row; the client compares the bytes."""
    mode = rows[0].mode
    options = {"on_mooncake": on_mooncake}
    settings = Settings("bench.lmcache:LMCacheDriver", options, mode, address, POOL // 2, 64 << 16)
    with contextlib.closing(ClientProcess(children, f"{on_mooncake}-{mode}", settings)) as client:
        for row in rows:
            assert len(client.measure(row.op, row.size, row.batch, 0.01)) >= 3, row.id
        yield client


@roomy
def test_every_row_on_both_systems() -> None:
    with own_store(POOL) as store, Children() as children:
        theirs = mooncake.start(children, POOL)
        for on_mooncake, address, mode in (
            (False, store.address(), SHM),
            (False, store.address(), TCP),
            (True, theirs.address(), TCP),
        ):
            with measured(
                children, on_mooncake, address, [row for row in SMALL if row.mode == mode]
            ):
                pass


@roomy
def test_objects_that_are_gone_are_told() -> None:
    with own_store(POOL) as store, Children() as children:
        rows = [row for row in SMALL if row.op == EXIST]
        with measured(children, False, store.address(), rows) as measuring:
            with kvstore.Client(store.address()) as client:
                for namespace in client.status().namespaces:
                    client.clear(namespace.name)
            with pytest.raises(ChildError, match="was not there"):
                measuring.measure(EXIST, 0, 64, 0.01)
