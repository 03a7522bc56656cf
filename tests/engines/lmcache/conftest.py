"""LMCache's own classes against a real store. Left out where LMCache is not installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import SHORT, Cluster

if importlib.util.find_spec("lmcache") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    from tests.engines.lmcache.tasks import Adapter

StartAdapter = Callable[..., "Adapter"]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Cluster]:
    """A master with short promises, and a node of 64 MiB."""
    # Density may keep an object that was used often while twice the pool is put.
    with Cluster(tmp_path, settings=SHORT | {"eviction": "lru"}) as cluster:
        cluster.start(memory="64MiB")
        yield cluster


@pytest.fixture
def adapter(store: Cluster) -> Iterator[StartAdapter]:
    """Makes adapters of the store, which are closed with the test."""
    started: list[Adapter] = []

    def start(**settings: Any) -> Adapter:
        started.append(Adapter({"master": store.address, **settings}))
        return started[-1]

    yield start
    for each in started:
        each.close()
