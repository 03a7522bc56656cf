"""vLLM's offloading with this store as its secondary tier: vLLM's scheduler, connector, tiering
manager, factory and pool; only the worker with a GPU is replaced (``offloading``)."""

from __future__ import annotations

import itertools
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler
from vllm.v1.kv_offload.base import (
    LookupResult,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

from kvstore.connectors.common.guarded_client import BYTES_PER_MS, DEADLINE_MS
from kvstore.connectors.vllm.weights import weight_monitor as live
from kvstore.connectors.vllm_plugin import register
from kvstore.connectors.vllm_tier import KVStoreTier, namespace
from kvstore.connectors.vllm_tier.namespace import ENGINE
from kvstore.connectors.vllm_tier.tier import LOOKUP_TIMEOUT_MS
from kvstore.errors import ConfigError
from tests.e2e.engines.conftest import prompt
from tests.e2e.engines.offloading import BLOCK_TOKENS, TIER, Engine
from tests.support.cluster import Cluster
from tests.support.wait import until

BREAKER_S = 12.0
"""The longest that a breaker stays open, and a little more."""

Start = Callable[..., Engine]


@pytest.fixture
def start(store: Cluster, llama: Path) -> Iterator[Start]:
    """Starts engines of one model on the store; they end with the test."""
    started: list[Engine] = []

    def begin(*, more: dict[str, object] | None = None, **given: Any) -> Engine:
        settings = {"master": store.address} | (more or {})
        started.append(Engine(llama, settings, **given))
        return started[-1]

    yield begin
    for each in started:
        each.close()


def stored(store: Cluster) -> list[str]:
    """Namespaces with chunks."""
    return [each.name for each in store.status().namespaces if each.name.startswith(ENGINE)]


class TierHarness:
    """The tier of an engine, called as vLLM's manager calls it, with jobs of our choice."""

    def __init__(self, engine: Engine) -> None:
        self.tier: Any = engine.tier
        self.rows = engine.rows
        self.request = ReqContext("direct")
        self._numbers = 1_000

    def key(self, index: int, group: int = 0) -> Any:
        key = make_offload_key(b"%032d" % index, group)
        self.request.set_offload_key_position(key, (index + 1) * BLOCK_TOKENS)
        return key

    def submit(self, keys: list[Any], rows: list[int], *, load: bool) -> int:
        self._numbers += 1
        job = TransferJob(self._numbers, keys, np.array(rows), load, self.request)
        (self.tier.submit_load if load else self.tier.submit_store)(job)
        return self._numbers

    def is_running(self, number: int) -> bool:
        """Whether the job has no result yet, even one that nobody has asked for."""
        _job, future = self.tier._jobs[number]
        return not future.done()

    def results(self, *numbers: int, within_s: float = 30.0) -> dict[int, JobResult]:
        found: dict[int, JobResult] = {}

        def finished() -> bool:
            found.update((each.job_id, each) for each in self.tier.get_finished_jobs())
            return found.keys() >= set(numbers)

        until(finished, within_s=within_s, every_s=0.005)
        return found

    def result(self, number: int, *, within_s: float = 30.0) -> JobResult:
        return self.results(number, within_s=within_s)[number]

    def store(self, keys: list[Any], rows: list[int], **more: float) -> JobResult:
        return self.result(self.submit(keys, rows, load=False), **more)

    def load(self, keys: list[Any], rows: list[int], **more: float) -> JobResult:
        return self.result(self.submit(keys, rows, load=True), **more)

    def lookup(self, *keys: Any, within_s: float = 30.0) -> list[LookupResult]:
        """Of all keys, after as many steps as it takes."""

        def answers() -> list[LookupResult]:
            found = [self.tier.lookup(key, self.request) for key in keys]
            self.tier.on_schedule_end(ScheduleEndContext([], []))
            return [] if LookupResult.RETRY in found else found

        return until(answers, within_s=within_s, every_s=0.005)

    def forget(self) -> None:
        """The request ends, and with it what vLLM remembers of its lookups."""
        self.tier.on_request_finished(self.request)


# --- whole engines -------------------------------------------------------------------------------


def test_a_second_engine_loads_what_the_first_has_computed(start: Start, store: Cluster) -> None:
    tokens = prompt(1)
    full = len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS
    first = start()
    assert first.run(tokens) == 0
    assert start().run(tokens) == full  # and checks every byte
    assert first.run(tokens) == 0, "vLLM has the blocks itself"
    assert len(stored(store)) == 1


def test_a_chain_has_parents(start: Start, store: Cluster) -> None:
    tokens = prompt(4)
    engine = start()
    request = engine.request(tokens)
    keys = [make_offload_key(each, 0) for each in request.block_hashes]
    engine.run(tokens[: 20 * BLOCK_TOKENS])  # in two parts, of which the second knows the first
    engine.run(tokens)
    (name,) = stored(store)
    client = store.client()
    assert client.match_prefix(keys, namespace=name) == len(keys)
    for above, below in itertools.pairwise(keys):
        found = client.stat(below, namespace=name)
        assert found is not None
        assert found.detail.parent == above


def test_groups_with_a_window_have_no_parents(start: Start, store: Cluster) -> None:
    tokens = prompt(5)
    start(window=64).run(tokens)
    (name,) = stored(store)
    rows = list(store.client().list_objects(namespace=name))
    groups = {group: [row for row in rows if row.key.endswith(bytes([group]))] for group in (0, 1)}
    assert groups[0]
    assert groups[1]
    client = store.client()
    parents = [client.stat(row.key, namespace=name) for row in groups[1]]
    assert all(each is not None and each.detail.parent == b"" for each in parents)
    assert start(window=64).run(tokens) > 0


def test_chunks_of_several_blocks(start: Start) -> None:
    tokens = prompt(6)
    engine = start(blocks_per_chunk=1)
    engine.run(tokens)
    assert start(blocks_per_chunk=4).run(tokens) == 0, "other chunks are other bytes"
    chunk = 4 * BLOCK_TOKENS
    assert start(blocks_per_chunk=4).run(tokens) == len(tokens) // chunk * chunk


# --- which engines share -------------------------------------------------------------------------


def test_other_weights_miss_and_both_are_told(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = prompt(20)
    start().run(tokens)
    with caplog.at_level(logging.WARNING, "vllm.kvstore"):
        assert start(seed=1).run(tokens) == 0
        until(lambda: "FLEET: another engine" in caplog.text)
    assert "weights" in caplog.text


def test_weights_replaced_without_a_reset_are_not_mixed(
    start: Start, store: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start()
    engine.run(prompt(23))
    engine.reload(seed=1)
    with caplog.at_level(logging.WARNING, "vllm.kvstore"):
        engine.run(prompt(24))
    assert "weights have changed since the caches were reset" in caplog.text
    engine.reload(seed=0)  # as before, but the caches hold blocks of both
    engine.run(prompt(25))
    assert len(stored(store)) == 1
    other = start()
    assert other.run(prompt(24)) == other.run(prompt(25)) == 0
    assert engine.reset()
    engine.run(prompt(26))
    assert start().run(prompt(26)) > 0


@pytest.mark.parametrize(
    ("what", "told"),
    [("error", "could not be identified: RuntimeError"), ("host", "several hosts")],
)
def test_workers_that_cannot_be_identified_or_reached_share_nothing(
    start: Start, store: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    what: str, told: str,
) -> None:  # fmt: skip
    def unknown(*_: object, **__: object) -> None:
        raise RuntimeError("no weights")

    if what == "error":
        monkeypatch.setattr(live, "weights_of", unknown)
    else:
        hosts = map(str, itertools.count())
        monkeypatch.setattr(namespace, "host_id", lambda: next(hosts))
    tokens = prompt(30)
    with caplog.at_level(logging.WARNING, "vllm.kvstore"):
        assert [start().run(tokens), start().run(tokens)] == [0, 0]
    assert told in caplog.text
    assert stored(store) == []


# --- jobs ----------------------------------------------------------------------------------------


def test_a_load_that_finds_some(start: Start, store: Cluster) -> None:
    direct = TierHarness(start())
    keys = [direct.key(index) for index in range(6)]
    direct.rows[:6] = np.arange(6, dtype=np.uint8)[:, None]
    assert direct.store(keys, list(range(6))).success
    assert direct.lookup(*keys) == [LookupResult.HIT] * 6
    (name,) = stored(store)
    store.client().remove_many(keys[2:4], namespace=name)
    direct.rows[:] = 99
    result = direct.load(keys, [10, 11, 12, 13, 14, 15])
    assert not result.success
    assert list(result.successful_keys or ()) == [*keys[:2], *keys[4:]]
    assert [int(direct.rows[row, 0]) for row in (10, 11, 14, 15)] == [0, 1, 4, 5]
    assert (direct.rows[:10] == 99).all()
    assert (direct.rows[16:] == 99).all()
    # Not asked for again by the same request, so that it does not wait for ever.
    assert direct.lookup(*keys[2:4]) == [LookupResult.MISS] * 2


def test_chunks_of_a_request_with_an_item_that_its_client_names_are_not_shared(
    start: Start,
) -> None:
    engine = start()
    direct, request = TierHarness(engine), engine.request(prompt(1))
    keys = [direct.key(0), direct.key(1)]
    assert direct.store(keys[:1], [0]).success
    request.mm_features = [Mock(mm_hash="0f" * 32, identifier="0x" + "0f" * 32)]
    direct.request = scheduler._create_req_context(request)
    assert direct.lookup(*keys[:1]) == [LookupResult.MISS]
    assert not direct.store(keys[1:], [1]).success


def test_a_chunk_of_another_size_is_a_miss(start: Start, store: Cluster) -> None:
    direct = TierHarness(start())
    keys = [direct.key(index) for index in range(3)]
    assert direct.store(keys[:2], [0, 1]).success
    (name,) = stored(store)
    store.client().put(keys[2], b"short", namespace=name)
    assert direct.lookup(*keys) == [LookupResult.HIT, LookupResult.HIT, LookupResult.MISS]


def test_a_store_and_a_load_under_way_while_caches_are_reset(start: Start) -> None:
    direct = TierHarness(start(pool=64))
    keys = [direct.key(index) for index in range(40)]
    assert direct.store(keys[:20], list(range(20))).success
    numbers = [direct.submit(keys[:20], list(range(40, 60)), load=True)]
    numbers += [direct.submit(keys[20 + i : 21 + i], [20 + i], load=False) for i in range(20)]
    direct.tier.drain_jobs()
    direct.rows[:] = 7
    results = list(direct.tier.get_finished_jobs())
    assert sorted(each.job_id for each in results) == sorted(numbers)
    assert (direct.rows == 7).all(), "nothing is written after the jobs were drained"


def test_events_tell_what_was_stored(start: Start, store: Cluster) -> None:
    engine = start(more={"enable_kv_events": True})
    assert engine.tier._events is None, "vLLM publishes no events in this configuration"
    engine.tier._events = []
    direct = TierHarness(engine)
    keys = [direct.key(index) for index in range(3)]
    direct.store(keys, [0, 1, 2])
    (event,) = engine.tier.take_events()
    assert (event.keys, event.removed, event.medium.name) == (keys, False, "STORAGE")
    assert list(engine.tier.take_events()) == []
    store.master_server.kill()
    assert not direct.store([direct.key(3)], [3]).success
    assert list(engine.tier.take_events()) == []
    store.master()


# --- a store that fails --------------------------------------------------------------------------


def test_the_store_is_killed_in_the_middle_and_comes_back(start: Start, store: Cluster) -> None:
    tokens = prompt(41)
    engine = start()
    engine.run(tokens)
    other = start()
    assert other.run(tokens[:160]) == 160
    store.master_server.kill()
    store.nodes[0].kill()
    for seed in (42, 43, 44, 45):
        began = time.monotonic()
        assert other.run(tokens[:80] + prompt(seed)) == 0
        assert time.monotonic() - began < 3 * DEADLINE_MS / 1000
    store.master()
    store.node(memory="256MiB")

    def again() -> int:
        fresh = prompt(random.randrange(1 << 30))
        engine.run(fresh)
        other = start()
        return other.run(fresh)

    assert until(again, within_s=60.0) > 0


@pytest.mark.parametrize("who", ["master", "node"])
def test_a_store_that_hangs(start: Start, store: Cluster, who: str) -> None:
    engine = start(more={"transports": ["tcp"]})
    direct = TierHarness(engine)
    keys = [direct.key(index) for index in range(8)]
    assert direct.store(keys, list(range(8))).success
    assert direct.lookup(*keys) == [LookupResult.HIT] * 8
    server = store.master_server if who == "master" else store.nodes[0]
    assert server is not None
    server.freeze()
    try:
        limit_s = (DEADLINE_MS + 8 * direct.tier.block_size_bytes / BYTES_PER_MS) / 1000 + 1
        fresh = [direct.key(index) for index in range(100, 104)]
        storing = direct.submit(fresh, [10, 11, 12, 13], load=False)
        loading = direct.submit(keys, list(range(20, 28)), load=True)
        assert direct.is_running(storing), "the scheduler waits for nobody"
        assert who == "master" or direct.is_running(loading), "the scheduler waits for nobody"
        results = direct.results(storing, loading, within_s=limit_s)
        assert not results[storing].success
        assert who == "master" or not results[loading].success
        direct.forget()
        if who == "master":
            assert direct.lookup(direct.key(200), within_s=limit_s) == [LookupResult.MISS]
        assert engine.run(prompt(50)) == 0
    finally:
        server.resume()
    # Not the same chunks: the master may have begun the put that was given up, and keeps their keys
    # for that writer until its deadline.
    later = [direct.key(index) for index in range(300, 304)]
    until(lambda: direct.store(later, [10, 11, 12, 13]).success, within_s=BREAKER_S + 5)

    def found() -> bool:
        direct.forget()
        return direct.lookup(*later) == [LookupResult.HIT] * 4

    until(found)


def test_a_lookup_is_given_up_before_other_calls(start: Start, store: Cluster) -> None:
    direct = TierHarness(start())
    assert direct.lookup(direct.key(0)) == [LookupResult.MISS]
    store.master_server.freeze()
    try:
        began = time.monotonic()
        assert direct.lookup(direct.key(1)) == [LookupResult.MISS]
        assert time.monotonic() - began < LOOKUP_TIMEOUT_MS / 1000 + 1 < DEADLINE_MS / 1000
    finally:
        store.master_server.resume()


def test_reset_and_end_while_the_store_hangs(start: Start, store: Cluster) -> None:
    engine = start(more={"transports": ["tcp"]})
    direct = TierHarness(engine)
    store.nodes[0].freeze()
    try:
        numbers = [direct.submit([direct.key(index)], [index], load=False) for index in range(12)]
        began = time.monotonic()
        direct.tier.drain_jobs()
        assert time.monotonic() - began < 3 * DEADLINE_MS / 1000
        assert {each.job_id for each in direct.tier.get_finished_jobs()} == set(numbers)
        direct.tier.on_schedule_end(ScheduleEndContext([], []))
        for index in range(12):
            direct.submit([direct.key(index)], [index], load=False)
        began = time.monotonic()
        ending = threading.Thread(target=direct.tier.shutdown)
        ending.start()
        ending.join(2 * DEADLINE_MS / 1000)
        assert not ending.is_alive(), f"still there after {time.monotonic() - began:.1f} s"
    finally:
        store.nodes[0].resume()


# --- names, settings, and what a CPU cannot do ----------------------------------------------------


def test_the_plug_in_makes_the_module_path_unnecessary(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SecondaryTierFactory, "_registry", dict(SecondaryTierFactory._registry))
    register()
    register()
    monkeypatch.delitem(TIER, "module_path")
    assert SecondaryTierFactory.get_tier_class({"type": "KVStoreTier"}) is KVStoreTier
    engine = start()
    assert engine.tier.tier_type == "KVStoreTier"
    engine.run(prompt(60))
    assert start().run(prompt(60)) > 0


@pytest.mark.parametrize(
    ("wrong", "told"),
    [({"mastre": "x"}, "mastre"), ({"locality": "NEAR"}, "LOCAL"), ({"replicas": 0}, "replicas")],
)
def test_wrong_settings_are_refused_by_name(
    start: Start, wrong: dict[str, object], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        start(more=wrong)
