"""An engine loads from a disk only where that is faster than computing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.engines.conftest import StartEngine, prompt
from tests.e2e.engines.engine import Engine, transfer_config
from tests.support.cluster import Cluster
from tests.support.faulty_disk import FaultyDisk
from tests.support.wait import until

TOKENS = 1_500
PROMPTS = 16
"""Of 11 blocks of 1 MiB each, in a pool of 64 MiB."""
SLOW = 50_000_000 // 32
"""Bytes a second: 50 MB/s for a model whose tokens have 32 times as many bytes."""
LOADS_MAX = 3
"""Loads after which the rate of the disk is known."""


@pytest.fixture
def faulty(tmp_path: Path) -> Iterator[FaultyDisk]:
    disk = FaultyDisk(tmp_path)
    yield disk
    disk.close()


def seconds_of(engine: Engine, number: int) -> tuple[float, list[int]]:
    engine.reset()
    start = time.monotonic()
    (found,) = engine.generate([prompt(number, TOKENS)], tokens=1)
    return time.monotonic() - start, found.tokens


@pytest.mark.timeout(400)
def test_a_slow_disk_costs_no_request_more_than_computing(
    tmp_path: Path, llama: Path, engine: StartEngine, faulty: FaultyDisk
) -> None:
    with Cluster(tmp_path) as cluster:
        cluster.start(0)
        cluster.prefix = faulty.prefix
        cluster.node(memory="64MiB", disk=faulty.files, disk_size="512MiB")
        cluster.prefix = []
        one = engine(llama, transfer_config(cluster.address))
        computed = []
        for number in range(PROMPTS):
            computed.append(seconds_of(one, number))
            one.saved()
        faulty.set(bytes_per_s=SLOW)
        before = one.metrics()
        found = [seconds_of(one, number) for number in range(PROMPTS - 6)]
        after = one.metrics()
        assert [tokens for _, tokens in found] == [tokens for _, tokens in computed[: len(found)]]
        assert after["computed_stored_tokens"] > before["computed_stored_tokens"]
        loads = after["loaded_requests"] - before["loaded_requests"]
        assert loads <= LOADS_MAX + len(found) / 2, "what is in memory may be loaded"
        slowest = sorted(took_s for took_s, _ in found)[: len(found) - LOADS_MAX][-1]
        assert slowest < 2 * max(took_s for took_s, _ in computed)

        faulty.set(bytes_per_s=0)

        def loads_again() -> bool:
            tokens = one.metrics()["hit_tokens"]
            for number in range(4):
                seconds_of(one, number)
            return one.metrics()["hit_tokens"] - tokens >= 4 * (TOKENS - 128)

        until(loads_again, within_s=200)
