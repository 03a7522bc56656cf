"""``KVStoreL2Adapter`` as the controllers of LMCache's daemon use it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lmcache.v1.distributed.api import (
    FULL_ATTENTION_WINDOW_CHUNKS,
    GroupedObjectKeys,
    ObjectKey,
    PrefetchTaskSpec,
)
from lmcache.v1.distributed.config import (
    EvictionConfig,
    L1ManagerConfig,
    L1MemoryManagerConfig,
    StorageManagerConfig,
)
from lmcache.v1.distributed.l2_adapters.config import L2AdaptersConfig
from lmcache.v1.distributed.storage_manager import StorageManager

from kvstore.errors import ConfigError
from kvstore.limits import BATCH_KEYS_MAX
from tests.engines.lmcache.tasks import (
    DTYPE,
    MODEL,
    SHAPE,
    Adapter,
    chunk,
    config,
    key,
    layouts,
    same,
    timed,
)
from tests.support.cluster import Cluster
from tests.support.processes import ROOT, free_port
from tests.support.wait import until

StartAdapter = Callable[..., Adapter]

CHUNK_BYTES = chunk(None).get_size()


# --- what it is for ------------------------------------------------------------------------------


def test_a_chunk_comes_back_byte_for_byte_also_in_another_daemon(adapter: StartAdapter) -> None:
    first, second = adapter(), adapter()
    keys = [key(number) for number in range(8)]
    chunks = [chunk(number) for number in range(8)]
    stored = first.store(keys, chunks)
    assert stored.is_successful()
    assert stored.bytes_transferred() == 8 * CHUNK_BYTES
    for each in (first, second):
        loaded = [chunk(None) for _ in range(9)]
        assert each.look_up([*keys, key(99)]) == list(range(8))
        assert each.load([*keys, key(99)], loaded) == list(range(8))
        assert all(map(same, chunks, loaded))
        assert same(loaded[8], chunk(None)), "a miss leaves its memory as it is"
        each.it.submit_unlock(keys)


def test_a_task_of_more_objects_than_a_call_may_have(adapter: StartAdapter) -> None:
    first = adapter()
    shape = (2, 1, 1, 8)
    keys = [key(number) for number in range(BATCH_KEYS_MAX + 3)]
    some = [0, BATCH_KEYS_MAX - 1, BATCH_KEYS_MAX, BATCH_KEYS_MAX + 2]
    chunks = [chunk(number if number in some else None, shape) for number in range(len(keys))]
    stored = first.store(keys, chunks)
    assert stored.is_successful()
    assert stored.bytes_transferred() == len(keys) * chunks[0].get_size()
    assert len(first.look_up(keys, layouts(shape))) == len(keys)
    loaded = [chunk(None, shape) for _ in keys]
    assert len(first.load(keys, loaded)) == len(keys)
    assert all(same(loaded[number], chunks[number]) for number in some)


def test_ranks_groups_and_salts_are_apart(adapter: StartAdapter) -> None:
    first = adapter()
    keys = [
        key(1),
        key(1, kv_rank=0x01010101),
        key(1, object_group_id=1),
        key(1, cache_salt="tenant"),
        key(1, cache_salt="b" * 128),
        key(1, cache_salt="\N{SNOWMAN}" * 128),
        key(1, cache_salt="\N{SNOWMAN}" * 127 + "!"),
    ]
    for number, each in enumerate(keys):
        assert first.store([each], [chunk(number)]).is_successful()
    loaded = [chunk(None) for _ in keys]
    described = layouts() | {1: layouts()[0]}
    assert first.look_up(keys, described) == list(range(len(keys)))
    assert first.load(keys, loaded) == list(range(len(keys)))
    assert all(same(memory, chunk(number)) for number, memory in enumerate(loaded))


@pytest.mark.parametrize("other", ["model", "model of named weights", "weights", "dtype", "shape"])
def test_what_means_something_else_is_a_miss(adapter: StartAdapter, other: str) -> None:
    named = {"model_id": "ours"} if "named" in other else {}
    first = adapter(**named)
    assert first.store([key(1)], [chunk(1)]).is_successful()
    second = adapter(**({"model_id": "others"} if other == "weights" else named))
    wanted = key(1, model_name="tests/other") if "model" in other else key(1)
    shape = (2, 4, 128, 16) if other == "shape" else SHAPE
    dtype = torch.float16 if other == "dtype" else DTYPE
    memory = chunk(None, shape, dtype)
    assert second.look_up([wanted], layouts(shape, dtype)) == []
    assert second.load([wanted], [memory]) == []
    assert second.store([wanted], [chunk(2, shape, dtype)]).bytes_transferred() == CHUNK_BYTES
    assert second.load([wanted], [memory]) == [0]
    assert same(memory, chunk(2, shape, dtype))
    untouched = chunk(None)
    assert first.load([key(1)], [untouched]) == [0]
    assert same(untouched, chunk(1))


@pytest.mark.parametrize("changed", ["weights.npz", "config.json"])
def test_another_model_under_the_same_path_is_a_miss(
    adapter: StartAdapter, tmp_path: Path, changed: str
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "weights.npz").write_bytes(b"one")
    (model / "config.json").write_text('{"rope_theta": 10000}')
    wanted = key(1, model_name=str(model))
    assert adapter().store([wanted], [chunk(1)]).is_successful()
    assert adapter().look_up([wanted]) == [0]
    (model / changed).write_text('{"rope_theta": 20000}')
    assert adapter().look_up([wanted]) == []


@pytest.mark.parametrize("unreadable", ["weights.npz/", "config.json"])
def test_a_model_that_cannot_be_read_is_never_shared(
    adapter: StartAdapter, tmp_path: Path, caplog: pytest.LogCaptureFixture, unreadable: str
) -> None:
    place = tmp_path / unreadable
    place.mkdir() if unreadable.endswith("/") else place.write_text("[]")
    wanted = key(1, model_name=str(tmp_path))
    first = adapter()
    assert not first.store([wanted], [chunk(1)]).is_successful()
    assert first.look_up([wanted]) == []
    assert "weights cannot be read" in caplog.text


def test_two_daemons_that_differ_are_told(
    adapter: StartAdapter, store: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    adapter().store([key(1)], [chunk(1)])
    until(store.fleet_records)
    adapter(model_id="others").store([key(1)], [chunk(1)])
    until(lambda: "shares no block with this one" in caplog.text)
    assert f"weights: 'others of {MODEL}' here" in caplog.text


# --- the rest of the interface -------------------------------------------------------------------


def test_delete_and_usage_by_salt(adapter: StartAdapter) -> None:
    first = adapter()
    keys = [key(number, cache_salt=salt) for number in range(3) for salt in ("", "tenant")]
    first.store(keys, [chunk(1)] * 6)
    told: list[ObjectKey] = []

    class Listener:
        def on_l2_keys_stored(self, keys: list[ObjectKey], sizes: list[int]) -> None: ...
        def on_l2_keys_accessed(self, keys: list[ObjectKey]) -> None: ...
        def on_l2_keys_deleted(self, keys: list[ObjectKey]) -> None:
            told.extend(keys)

    first.it.register_listener(Listener())
    usage = first.it.get_usage()
    assert dict(usage.bytes_by_cache_salt) == {"": 3 * CHUNK_BYTES, "tenant": 3 * CHUNK_BYTES}
    assert usage.usage_fraction == -1.0, "the store evicts, LMCache does not"
    first.it.delete([*keys[:2], key(50, model_name="never seen")])
    assert told == keys[:2]
    assert first.look_up(keys) == [2, 3, 4, 5]
    assert first.it.get_usage().total_bytes_used == 4 * CHUNK_BYTES


def test_keys_are_listed_page_by_page(adapter: StartAdapter) -> None:
    first = adapter()
    keys = [key(number, cache_salt="s" * (number % 3)) for number in range(7)]
    first.store(keys, [chunk(1)] * 7)
    other = key(8, model_name="tests/other")
    first.store([other], [chunk(1)])
    first.store([key(9, cache_salt="\N{SNOWMAN}" * 128)], [chunk(1)])  # only its digest is there

    def listed(model: str | None) -> set[ObjectKey]:
        found: list[ObjectKey] = []
        cursor = None
        while True:
            page = first.it.list_l2_keys(model, page_size=3, cursor=cursor)
            assert len(page.entries) <= 3
            assert all(entry.size_bytes == CHUNK_BYTES for entry in page.entries)
            found += [entry.key.to_object_key() for entry in page.entries]
            cursor = page.next_page_token
            if cursor is None:
                assert len(set(found)) == len(found)
                return set(found)

    assert listed(MODEL) == set(keys)
    assert listed(None) == {*keys, other}
    assert listed("unknown") == set()
    for wrong in ({"page_size": 0}, {"cursor": "x"}, {"cursor": "-1"}):
        with pytest.raises(ValueError, match=r"page_size|int|cursor"):
            first.it.list_l2_keys(**wrong)


@pytest.mark.parametrize("settings", [{"no_such": 1}, {"timeout_ms": "soon"}])
def test_wrong_settings_are_refused_at_the_start(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Adapter(settings)


def test_keys_of_the_adapter_for_mooncake_count(store: Cluster) -> None:
    adapter = Adapter({"master_server_addr": store.address, "rdma_devices": "mlx5_0"})
    assert adapter.store([key(1)], [chunk(1)]).is_successful()
    adapter.close()


# --- a store that is full, dead or hangs ---------------------------------------------------------


def test_a_full_pool_takes_the_first_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.client.client.PUT_WAIT_MS", 0)
    cluster = Cluster(tmp_path, settings={"lease_ms": 60_000})
    adapter: Adapter | None = None
    try:
        cluster.start(memory="8MiB")
        adapter = Adapter({"master": cluster.address})
        keys = [key(number) for number in range(384)]
        assert adapter.store(keys[:128], [chunk(1)] * 128).is_successful()
        assert len(adapter.look_up(keys[:128])) == 128, "and leased: they stay"
        assert not adapter.store(keys[128:], [chunk(2)] * 256).is_successful()
        found = adapter.look_up(keys)
        assert found == list(range(len(found))), "the first ones"
        assert 128 < len(found) < 384
        memory = chunk(None)
        assert adapter.load(keys[128:129], [memory]) == [0]
        assert same(memory, chunk(2))
    finally:
        if adapter is not None:
            adapter.close()
        cluster.close()


@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_a_master_that_is_gone_makes_misses_in_time_and_comes_back(
    adapter: StartAdapter, store: Cluster, how: str
) -> None:
    first = adapter()
    first.store([key(1)], [chunk(1)])
    master = store.master_server
    master.kill() if how == "killed" else master.freeze()
    for _ in range(4):
        assert timed(lambda: first.look_up([key(2)])) == []
        assert not timed(lambda: first.store([key(3)], [chunk(3)])).is_successful()
        assert timed(lambda: first.load([key(4)], [chunk(None)])) == []
    began = time.monotonic()
    assert first.look_up([key(1)]) == [], "the store is not asked for a while"
    assert time.monotonic() - began < 1.0
    assert first.it.report_status()["is_healthy"]
    store.master() if how == "killed" else master.resume()
    until(lambda: first.store([key(5)], [chunk(5)]).is_successful(), within_s=40)
    memory = chunk(None)
    until(lambda: first.load([key(1)], [memory]) == [0], within_s=40)
    assert same(memory, chunk(1))


def test_close_ends_tasks_under_way_before_their_memory_is_given_back(
    adapter: StartAdapter, store: Cluster
) -> None:
    first = adapter()
    first.store([key(1)], [chunk(1)])
    master = store.master_server
    master.freeze()
    try:
        tasks = [first.it.submit_load_task([key(n)], [chunk(None)]) for n in range(2, 12)]
        tasks += [first.it.submit_lookup_and_lock_task([key(20)], layouts())]
        first.it.submit_store_task([key(30)], [chunk(30)])
        timed(first.close)
        results = [first.it.query_load_result(task) for task in tasks[:-1]]
        assert [None if each is None else each.popcount() for each in results] == [0] * 10
        task = first.it.submit_load_task([key(1)], [chunk(None)])
        assert first.it.query_load_result(task).popcount() == 0, "and a task after it ends"
    finally:
        master.resume()


# --- LMCache's own programs on it ----------------------------------------------------------------


LMCACHE = str(Path(sys.executable).with_name("lmcache"))


def spec(**settings: object) -> str:
    return json.dumps(
        {
            "type": "plugin",
            "module_path": "kvstore.connectors.lmcache",
            "class_name": "KVStoreL2Adapter",
            "adapter_params": settings,
        }
    )


def daemon(tmp_path: Path, port: int, settings: str) -> subprocess.Popen[bytes]:
    """``lmcache server``, whose HTTP interface is on that port."""
    with (tmp_path / "daemon.log").open("wb") as log:
        return subprocess.Popen(
            [
                LMCACHE, "server", "--port", str(free_port()), "--http-host", "127.0.0.1",
                "--http-port", str(port), "--prometheus-port", str(free_port()),
                "--l1-size-gb", "0.1", "--no-l1-use-lazy", "--eviction-policy", "LRU",
                "--l2-adapter", settings,
            ],
            cwd=ROOT, env=os.environ | {"LMCACHE_TRACK_USAGE": "false"}, stdout=log, stderr=log,
        )  # fmt: skip


def test_lmcaches_daemon_starts_with_it_and_ends(store: Cluster, tmp_path: Path) -> None:
    port = free_port()

    def ask(path: str) -> Any:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
                return json.load(answer)
        except OSError:
            return None

    process = daemon(tmp_path, port, spec(master=store.address))
    try:
        status = until(lambda: ask("/status"), within_s=60)
        [adapter] = status["storage_manager"]["l2_adapters"]
        assert adapter["type"] == "KVStoreL2Adapter"
        assert adapter["is_healthy"]
        assert adapter["master"] == store.address
        assert ask("/cache/objects")["entries"] == []
        process.terminate()
        process.wait(30)
    finally:
        process.kill()
        process.wait()
    assert "Application shutdown complete" in (tmp_path / "daemon.log").read_text()


def test_lmcaches_storage_manager_stores_and_prefetches_through_it(store: Cluster) -> None:
    """Its memory, controllers and threads are real; only the engine's kernels are not there."""
    described = layouts()[0]
    keys = [key(number) for number in range(6)]

    def manager() -> StorageManager:
        memory = L1MemoryManagerConfig(64 << 20, use_lazy=False, shm_name="")
        return StorageManager(
            StorageManagerConfig(
                L1ManagerConfig(memory),
                EvictionConfig("LRU"),
                L2AdaptersConfig([config({"master": store.address})]),
            )
        )

    first = manager()
    try:
        for number, memory in enumerate(first.reserve_write(keys, described).values()):
            memory.raw_tensor[: memory.get_size()] = chunk(number).raw_tensor
        first.finish_write(keys)
        [(_, adapter)] = first.l2_adapters()
        until(lambda: adapter.get_usage().total_bytes_used == 6 * CHUNK_BYTES)
        assert first.report_status()["is_healthy"]
    finally:
        first.close()
    second = manager()
    try:
        rows = GroupedObjectKeys([*keys, key(99)], 0, described, FULL_ATTENTION_WINDOW_CHUNKS)
        handle = second.submit_prefetch_task(PrefetchTaskSpec([rows]))
        assert second.wait_prefetch_status(handle, 30)
        result = second.query_prefetch_status(handle)
        assert result is not None
        assert result.l2_hit_count == 6
        with second.read_prefetched_results(keys) as memories:
            assert memories is not None
            assert all(same(memory, chunk(number)) for number, memory in enumerate(memories))
        second.finish_read_prefetched(keys)
    finally:
        second.close()
