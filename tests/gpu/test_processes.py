"""What one process puts from its GPU, another gets into its own."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.gpu.decoder import BLOCKS, NEW_TOKENS
from tests.support.cluster import Cluster
from tests.support.processes import run_python


def said(module: str, *arguments: str) -> Any:
    """The JSON that another process prints."""
    done = run_python("-m", module, *arguments, within_s=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("reads", ["shm", "tcp"])
def test_a_decoder_goes_on_with_the_cache_of_another(
    store: Cluster, namespace: str, reads: str
) -> None:
    first = said("tests.gpu.decoder", store.address, namespace, "shm", "put")
    second = said("tests.gpu.decoder", store.address, namespace, reads, "get")
    assert first["found"] == 0
    assert second["found"] == BLOCKS
    assert len(first["tokens"]) == NEW_TOKENS
    assert len(set(first["tokens"])) > NEW_TOKENS // 3  # tokens that depend on the cache
    assert second["tokens"] == first["tokens"]
