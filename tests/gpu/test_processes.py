"""What one process puts from its GPU, another gets into its own."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
import torch

from kvstore import Client
from tests.gpu.decoder import BLOCKS, NEW_TOKENS
from tests.gpu.machine import GPU
from tests.gpu.test_values import values
from tests.support.cluster import Cluster
from tests.support.processes import run_python


def said(module: str, *arguments: str) -> Any:
    """The JSON that another process prints."""
    done = run_python("-m", module, *arguments, within_s=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_another_process_gets_what_one_has_put(
    gpu: GPU, client: Client, store: Cluster, namespace: str, transport: str
) -> None:
    sent = {f"k{seed}": values(torch.float16, 100, 100 + seed, seed=seed) for seed in range(5)}
    client.put_many([(key, gpu.tensor(value)) for key, value in sent.items()])
    digests = said("tests.gpu.other", store.address, namespace, transport, *sent)
    flat = [value.reshape(-1).view(torch.uint8).numpy().tobytes() for value in sent.values()]
    assert digests == [hashlib.sha256(each).hexdigest() for each in flat]


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
