"""SGLang's own classes on CPUs, against a real store. Left out where SGLang is not installed."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import Cluster

if importlib.util.find_spec("sglang") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    # Once for all tests, and before warnings are errors: it complains of kernels it does not have.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import kvstore.connectors.sglang  # noqa: F401

MakeBackend = Callable[..., Any]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """No processes yet."""
    with Cluster(tmp_path) as cluster:
        yield cluster


@pytest.fixture
def store(cluster: Cluster) -> Cluster:
    """A master and a node."""
    cluster.start()
    return cluster


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory with weights."""
    return make_model(tmp_path / "model", 1)


@pytest.fixture
def backend(cluster: Cluster, model: Path) -> Iterator[MakeBackend]:
    """Makes back-ends as SGLang's controller does, and closes them at the end."""
    from tests.engines.sglang import hicache

    made: list[Any] = []

    def make(pool: Any, **given: Any) -> Any:
        given.setdefault("model", model)
        made.append(hicache.attach(pool, cluster.address, **given))
        return made[-1]

    yield make
    for each in made:
        each.close()


def make_model(directory: Path, seed: int) -> Path:
    """Weights that depend on ``seed``, as a checkpoint of Hugging Face."""
    import json

    import torch
    from safetensors.torch import save_file

    directory.mkdir(exist_ok=True)
    weights = torch.randn(64, 64, generator=torch.Generator().manual_seed(seed))
    save_file({"layer.weight": weights}, str(directory / "model.safetensors"))
    (directory / "config.json").write_text(json.dumps({"rope_theta": 10_000.0}))
    return directory
