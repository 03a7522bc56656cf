"""Dynamo's own index, fed from a real store. Left out where Dynamo's runtime is not installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import Cluster

if importlib.util.find_spec("dynamo") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """No processes yet."""
    with Cluster(tmp_path) as cluster:
        yield cluster
