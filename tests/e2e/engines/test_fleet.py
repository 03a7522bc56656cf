"""Prefillers, decoders and the proxy: ``vllm serve`` and HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from examples.tiny import BLOCK_TOKENS
from tests.e2e.engines.conftest import prompt
from tests.e2e.engines.engine import Engine
from tests.e2e.engines.fleet import Fleet
from tests.e2e.engines.preloaded import ForkServer
from tests.support.cluster import Cluster
from tests.support.wait import until

TOKENS = 8
AT_ONCE = 8
WHOLE = 4 * BLOCK_TOKENS


@pytest.fixture
def fleet(preloaded: ForkServer, store: Cluster, llama: Path, tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(preloaded, llama, store.address, tmp_path)
    yield fleet
    fleet.close()


@pytest.mark.timeout(900)
def test_one_prefiller_and_one_decoder_die_under_load_and_come_back(
    fleet: Fleet, plain: Engine
) -> None:
    """Every request is answered, and every answer is right."""
    prompts = [prompt(seed) for seed in range(48)]
    producers = [fleet.engine("kv_producer") for _ in range(2)]
    consumers = [fleet.engine("kv_consumer") for _ in range(2)]
    fleet.start_proxy(producers, consumers)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        under_way = [pool.submit(fleet.complete, ids, TOKENS) for ids in prompts[:32]]
        under_way[6].result()
        producers[0].kill()
        under_way[14].result()
        consumers[0].kill()
        for each in (producers[0], consumers[0]):
            each.start()
        answers = [each.result() for each in under_way]
        for each in (producers[0], consumers[0]):
            each.ready()
        until(fleet.proxy_uses_all, within_s=60)
        # Back again: they get requests, too.
        more = [pool.submit(fleet.complete, ids, TOKENS) for ids in prompts[32:]]
        answers += [each.result() for each in more]

    until(lambda: all(each.counters()["save_blocks"] for each in producers))
    until(lambda: all(each.counters()["loaded_requests"] for each in consumers))
    fleet.close()
    assert answers == [each.tokens for each in plain.generate(prompts, tokens=TOKENS)]
