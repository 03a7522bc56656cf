"""``KVStoreHiCache`` through SGLang's factory and its host pools."""

from __future__ import annotations

import itertools
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.runtime_context import get_context

from kvstore.connectors.sglang import KVStoreHiCache, fingerprint
from kvstore.connectors.sglang.pools import bytes_of
from kvstore.errors import ConfigError
from tests.engines.sglang.conftest import MakeBackend, make_model
from tests.engines.sglang.hicache import (
    PAGE_TOKENS,
    after,
    attach,
    bytes_at,
    config,
    host_pool,
    indices,
    mamba_pool,
)
from tests.support.cluster import Cluster
from tests.support.processes import ROOT, Server
from tests.support.wait import until

KEYS = [f"{number:064x}" for number in range(8)]
LAYOUTS = ["page_first", "page_first_direct", "layer_first"]
DEADLINE_S = 2.0
"""Of a call that moves a few pages."""
BUSY_S = 1.5
"""That a busy machine may add."""


def saved(backend: Any, pool: Any, keys: list[str] = KEYS) -> None:
    assert backend.batch_set_v1(keys, indices(*range(len(keys)))) == [True] * len(keys)


def read_back(backend: Any, pool: Any, keys: list[str] = KEYS) -> list[bytes]:
    """What the pages of ``keys`` are after they were read into other pages of the pool."""
    at = range(16, 16 + len(keys))
    assert backend.batch_get_v1(keys, indices(*at)) == [True] * len(keys)
    return [bytes_at(pool, page) for page in at]


def namespaces(store: Cluster) -> list[str]:
    return sorted(
        each.name for each in store.status().namespaces if each.name.startswith("sglang/")
    )


@pytest.mark.parametrize("layout", [*LAYOUTS, "page_head"])
def test_another_engine_reads_what_one_has_written(
    store: Cluster, backend: MakeBackend, layout: str
) -> None:
    pool, other_pool = host_pool(layout=layout, filled=1), host_pool(layout=layout)
    one, other = backend(pool), backend(other_pool)

    assert other.batch_exists(KEYS) == 0
    saved(one, pool)
    assert other.batch_exists([*KEYS, "f" * 64]) == len(KEYS)
    assert read_back(other, other_pool) == [bytes_at(pool, page) for page in range(len(KEYS))]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_latent_pages_are_of_all_ranks(store: Cluster, backend: MakeBackend, layout: str) -> None:
    pool, other_pool = host_pool("mla", layout, filled=1), host_pool("mla", layout)
    writer = backend(pool, is_mla=True, rank=0, ranks=2)
    reader = backend(other_pool, is_mla=True, rank=1, ranks=2)

    saved(writer, pool)
    assert reader.batch_exists(KEYS) == len(KEYS)
    assert read_back(reader, other_pool) == [bytes_at(pool, page) for page in range(len(KEYS))]
    assert len(namespaces(store)) == 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_as_tensors(store: Cluster, backend: MakeBackend, layout: str) -> None:
    """SGLang's generic interface, without ``interface_v1``."""
    pool = host_pool(layout=layout, filled=1)
    one = backend(pool, zero_copy=False)
    pages = [pool.get_data_page(page * PAGE_TOKENS) for page in range(len(KEYS))]

    assert one.batch_set(KEYS, pages)
    assert one.batch_exists(KEYS) == len(KEYS)
    assert one.exists(KEYS[0])
    assert not one.exists("f" * 64)
    targets = [pool.get_dummy_flat_data_page() for _ in KEYS]
    found = one.batch_get([*KEYS[:-1], "f" * 64], targets)
    assert found[-1] is None
    assert [bytes(bytes_of(page)) for page in found[:-1]] == [
        bytes(bytes_of(page.contiguous())) for page in pages[:-1]
    ]
    assert one.get(KEYS[0], targets[0]) is targets[0]
    assert one.set("e" * 64, pages[0])


class TestSideCaches:
    """Pools of hybrid models."""

    def test_states_of_mamba_layers(self, store: Cluster, backend: MakeBackend) -> None:
        for side_states in (False, True):  # with zero-copy, and as copies of whole pages
            store.clear()
            pool, states = host_pool(filled=1), mamba_pool(side_states=side_states, filled=2)
            one = backend(pool, sides={PoolName.MAMBA: states})
            saved(one, pool)
            kept = PoolTransfer(
                PoolName.MAMBA, torch.tensor([0, 1]), keys=[KEYS[3], KEYS[5]],
                hit_policy=PoolHitPolicy.TRAILING_PAGES,
            )  # fmt: skip
            assert one.batch_set_v2([kept], after()) == {"mamba": [True, True]}

            asked = PoolTransfer(
                PoolName.MAMBA, keys=KEYS[-1:], hit_policy=PoolHitPolicy.TRAILING_PAGES
            )
            found = one.batch_exists_v2(KEYS, [asked])
            assert found.kv_hit_pages == 6
            assert found.restorable_prefix_pages == [4, 6]
            assert found.extra_pool_hit_pages == {"kv": len(KEYS), "mamba": 6}

            wanted = PoolTransfer(PoolName.MAMBA, torch.tensor([7, 6]), keys=[KEYS[3], KEYS[4]])
            assert one.batch_get_v2([wanted]) == {"mamba": [True, False]}
            assert bytes_at(states, 7, tokens=1) == bytes_at(states, 0, tokens=1)

    def test_what_every_page_needs(self, store: Cluster, backend: MakeBackend) -> None:
        pool, index = host_pool("mla", filled=1), host_pool("mla", filled=2)
        one = backend(pool, is_mla=True, sides={PoolName.INDEXER: index})
        saved(one, pool)
        some = PoolTransfer(PoolName.INDEXER, indices(0, 1, 2), keys=KEYS[:3])
        assert one.batch_set_v2([some], after())["indexer"] == [True] * 3
        found = one.batch_exists_v2(KEYS, [some])
        assert (found.kv_hit_pages, found.restorable_prefix_pages) == (3, [1, 2, 3])

    def test_states_are_of_one_rank_also_beside_latent_pages(
        self, store: Cluster, backend: MakeBackend
    ) -> None:
        pool, states = host_pool("mla", filled=1), [mamba_pool(filled=rank) for rank in range(2)]
        ranks = [
            backend(pool, is_mla=True, rank=rank, ranks=2, sides={PoolName.MAMBA: states[rank]})
            for rank in range(2)
        ]
        state = PoolTransfer(
            PoolName.MAMBA, torch.tensor([0]), keys=KEYS[:1],
            hit_policy=PoolHitPolicy.TRAILING_PAGES,
        )  # fmt: skip
        saved(ranks[0], pool)
        assert ranks[0].batch_set_v2([state])["mamba"] == [True]
        assert ranks[1].batch_exists_v2(KEYS, [state]).kv_hit_pages == 0
        assert ranks[1].batch_get_v2([state])["mamba"] == [False]

    def test_an_anchor_without_bytes(self, store: Cluster, backend: MakeBackend) -> None:
        from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool

        anchor, side = LogicalHostPool(512, PAGE_TOKENS), host_pool("mla", filled=2)
        one = backend(anchor, is_mla=True, sides={PoolName.DEEPSEEK_V4_C4: side})
        some = PoolTransfer(PoolName.DEEPSEEK_V4_C4, indices(0, 1), keys=KEYS[:2])
        assert one.batch_set_v1(KEYS, indices(*range(8))) == [True] * 8
        assert one.batch_set_v2([some], after())["deepseek_v4_c4"] == [True, True]
        assert one.batch_exists_v2(KEYS, [some]).kv_hit_pages == 2
        assert one.batch_get_v1(KEYS, indices(*range(8))) == [True] * 8


def test_pages_are_chains(store: Cluster, backend: MakeBackend) -> None:
    """Also over several calls, and with side caches: the forest has one root, and no loose end."""
    pool, states = host_pool(filled=1), mamba_pool(filled=2)
    one = backend(pool, sides={PoolName.MAMBA: states})
    state = PoolTransfer(
        PoolName.MAMBA, torch.tensor([0]), keys=KEYS[7:], hit_policy=PoolHitPolicy.TRAILING_PAGES
    )
    assert all(one.batch_set_v2([state], after(*KEYS[:7]))["mamba"])
    assert all(one.batch_set_v1(KEYS[:3], indices(0, 1, 2), after()))
    assert all(one.batch_set_v1(KEYS[3:], indices(3, 4, 5, 6, 7), after(*KEYS[:3])))

    [namespace] = namespaces(store)
    client = store.client(namespace=namespace)
    assert client.match_prefix(KEYS) == len(KEYS)
    found = client.stat(KEYS[3])
    assert found is not None
    assert found.detail.parent == KEYS[2].encode()
    rows = client.list_objects(namespace=namespace, prefix=KEYS[7].encode())
    [beside] = [row.key for row in rows if row.key != KEYS[7].encode()]
    assert client.match_prefix([*KEYS, beside]) == len(KEYS) + 1


def test_pages_behind_a_hole_do_not_count(store: Cluster, backend: MakeBackend) -> None:
    pool = host_pool(filled=1)
    one = backend(pool)
    saved(one, pool, [*KEYS[:2], *KEYS[3:]])
    assert one.batch_exists(KEYS) == 2


def test_what_exists_is_leased(cluster: Cluster, backend: MakeBackend) -> None:
    """A pool so full that the next pages evict: not what exists has just named."""
    cluster.start(memory="1MiB")
    pool = host_pool(filled=1)
    one, other = backend(pool), backend(host_pool(filled=3))
    saved(one, pool)
    assert one.batch_exists(KEYS) == len(KEYS)
    more = [f"{number:064x}" for number in range(1_000, 1_400)]
    for at in range(0, len(more), 8):
        other.batch_set_v1(more[at : at + 8], indices(*range(8)))
    assert other.batch_exists(more[:8]) == 0  # they were evicted, or found no room
    assert read_back(one, pool) == [bytes_at(pool, page) for page in range(len(KEYS))]


class TestIdentity:
    @pytest.fixture
    def pool(self) -> Any:
        return host_pool(filled=1)

    @pytest.mark.parametrize(
        "other",
        ["weights", "configuration", "ranks", "dtype", "page_first_direct", "layer_first"],
    )
    def test_what_means_something_else_misses(
        self, store: Cluster, backend: MakeBackend, pool: Any, model: Path, other: str
    ) -> None:
        from tests.engines.sglang.hicache import device_pool

        saved(backend(pool), pool)
        match other:
            case "weights":
                make_model(model, 2)
            case "configuration":
                (model / "config.json").write_text('{"rope_theta": 500000.0}')
            case "dtype":
                pool = host_pool(of=device_pool(dtype=torch.float16))
            case layout if layout != "ranks":
                pool = host_pool(layout=layout)
        one = backend(pool, ranks=2 if other == "ranks" else 1)
        assert one.batch_exists(KEYS) == 0
        assert one.batch_get_v1(KEYS, indices(*range(8))) == [False] * 8

    def test_the_same_weights_at_another_path_hit(
        self, store: Cluster, backend: MakeBackend, pool: Any, model: Path
    ) -> None:
        saved(backend(pool), pool)
        copied = shutil.copytree(model, model.with_name("copied"))
        assert backend(pool, model=copied).batch_exists(KEYS) == len(KEYS)

    def test_another_draft_model_misses(
        self, store: Cluster, backend: MakeBackend, pool: Any, tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:  # fmt: skip
        live, draft = fingerprint.live, make_model(tmp_path / "draft", 3)
        monkeypatch.setattr(
            fingerprint, "live", lambda model: live(model)._replace(draft=str(draft))
        )
        saved(backend(pool), pool)
        assert backend(pool).batch_exists(KEYS) == len(KEYS)
        make_model(draft, 4)
        assert backend(pool).batch_exists(KEYS) == 0

    def test_each_rank_has_a_place_of_its_own(
        self, store: Cluster, backend: MakeBackend, pool: Any
    ) -> None:
        pages = backend(pool)._pools[PoolName.KV].pages
        of_all = replace(config(store.address, model="m"), tp_size=2, pp_size=2, attn_cp_size=2)
        ranks = [
            replace(of_all, tp_rank=t, pp_rank=p, attn_cp_rank=c)
            for t, p, c in itertools.product(range(2), repeat=3)
        ]
        own = {fingerprint.parts(rank, pages, replicated=False) for rank in ranks}
        shared = {fingerprint.parts(rank, pages, replicated=True) for rank in ranks}
        assert (len(own), len(shared)) == (8, 4)

        latent = replace(
            config(store.address, model="m", is_mla=True), tp_size=2, dcp_size=2,
            logical_page_size=2 * PAGE_TOKENS,
        )  # fmt: skip
        shards = [replace(latent, tp_rank=rank, dcp_rank=rank) for rank in range(2)]
        assert len({fingerprint.parts(shard, pages, replicated=True) for shard in shards}) == 2

    def test_a_name_for_the_weights(
        self, store: Cluster, backend: MakeBackend, pool: Any, tmp_path: Path
    ) -> None:
        saved(backend(pool, model_id="ours"), pool)
        other = make_model(tmp_path / "other", 2)
        assert backend(pool, model=other, model_id="ours").batch_exists(KEYS) == len(KEYS)

    def test_weights_that_are_replaced_while_it_runs(
        self,
        store: Cluster,
        backend: MakeBackend,
        pool: Any,
        model: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """The controller's threads of before have pages of before: they get misses."""
        one = backend(pool)
        saved(one, pool)
        live = fingerprint.live
        monkeypatch.setattr(
            fingerprint, "live", lambda model: live(model)._replace(version="of today")
        )
        assert one.batch_exists(KEYS) == 0
        assert one.batch_set_v1(KEYS, indices(*range(8))) == [False] * 8

        seen: list[int] = []

        def flushed() -> None:
            seen.append(one.batch_exists(KEYS))
            saved(one, pool)
            seen.append(one.batch_exists(KEYS))

        thread = threading.Thread(target=flushed)  # as the controller after a flush
        thread.start()
        thread.join()
        assert seen == [0, len(KEYS)]
        one.clear()
        assert namespaces(store) == []

    def test_pushed_weights_are_of_one_job(
        self, store: Cluster, backend: MakeBackend, pool: Any, model: Path
    ) -> None:
        """Every trainer counts its versions from 1. Weights from disk are told by their files."""
        context = get_context()

        def found(**setting: object) -> int:
            """How many pages an engine finds that another one has saved."""
            writer, reader = backend(pool, **setting), backend(pool, **setting)
            saved(writer, pool)
            return int(reader.batch_exists(KEYS))

        with context.override_server_args(model_path=str(model)):
            assert found() == len(KEYS)
            context.override("scheduler.weight_version", weight_version="1")
            assert found() == 0
            assert found(job_name="ours") == found(shares_versions=True) == len(KEYS)
            assert backend(pool, job_name="theirs").batch_exists(KEYS) == 0
            assert backend(pool).batch_exists(KEYS) == 0
            context.override("model_runner.update_model_fields", model_path=str(model))
            assert found() == len(KEYS)
            context.override("scheduler.weight_version", weight_version="2")
            assert found() == len(KEYS)
            context.override("scheduler.weight_version", weight_version="3")
            assert found() == 0

    @pytest.mark.parametrize("missing", ["files", "format"])
    def test_weights_that_nothing_tells_are_refused(
        self, store: Cluster, backend: MakeBackend, pool: Any, model: Path, missing: str
    ) -> None:
        load_format = "auto"
        if missing == "files":
            (model / "model.safetensors").unlink()
        else:
            load_format = "remote_instance"
        with get_context().override_server_args(model_path=str(model), load_format=load_format):
            with pytest.raises(ConfigError, match=f"{model}.*model_id"):
                backend(pool)
            backend(pool, model_id="ours")


class TestFailures:
    @pytest.mark.parametrize("transport", ["shm", "tcp"])
    def test_the_store_is_killed_during_reads(
        self, store: Cluster, backend: MakeBackend, transport: str
    ) -> None:
        """A page that was read has its own bytes, whatever becomes of the call."""
        pool = host_pool(filled=1)
        one = backend(pool, transports=[transport])
        saved(one, pool)
        before = [bytes_at(pool, page) for page in range(len(KEYS))]
        servers = [store.master_server, store.nodes[0]]

        def kill() -> None:
            for server in servers:
                server.kill()

        killing = threading.Timer(0.3, kill)
        killing.start()
        reads, missed_at = 0, 0.0
        while not missed_at or time.monotonic() < missed_at + 1:
            pool.kv_buffer[:, indices(*range(16, 24))] = 0
            start = time.monotonic()
            one.batch_exists(KEYS)
            there = one.batch_get_v1(KEYS, indices(*range(16, 24)))
            assert time.monotonic() < start + 2 * DEADLINE_S + BUSY_S
            for page, is_there in enumerate(there):
                assert not is_there or bytes_at(pool, 16 + page) == before[page]
            reads += all(there)
            missed_at = missed_at or (0.0 if all(there) else time.monotonic())
        killing.join()
        assert reads
        store.master()
        store.node()
        until(lambda: one.batch_set_v1(KEYS, indices(*range(8))) == [True] * 8, within_s=60)
        assert read_back(one, pool) == before

    @pytest.mark.parametrize("which", ["master", "node", "both"])
    def test_processes_that_hang(self, store: Cluster, backend: MakeBackend, which: str) -> None:
        pool = host_pool(filled=1)
        one = backend(pool, transports=["tcp"])
        saved(one, pool)
        before = [bytes_at(pool, page) for page in range(len(KEYS))]
        hanging: list[Server] = []
        if which != "node":
            hanging.append(store.master_server)
        if which != "master":
            hanging.append(store.nodes[0])
        for server in hanging:
            server.freeze()
        other = [f"{number:064x}" for number in range(100, 108)]
        self._are_misses(one, other)
        for server in hanging:
            server.resume()
        # Puts that the frozen master had not read yet may hold the keys for a while.
        until(
            lambda: (
                one.batch_set_v1(other, indices(*range(8))) == [True] * 8
                and one.batch_exists(other) == 8
            ),
            within_s=60,
        )
        assert read_back(one, pool, other) == before

    def _are_misses(self, one: Any, keys: list[str] = KEYS) -> None:
        calls: list[tuple[Callable[[], Any], Any]] = [
            (lambda: one.batch_set_v1(keys, indices(*range(8))), [False] * 8),
            (lambda: one.batch_exists(keys), 0),
            (lambda: one.batch_get_v1(keys, indices(*range(8, 16))), [False] * 8),
            (lambda: one.batch_exists_v2(keys, []).kv_hit_pages, 0),
            (lambda: one.batch_get_v2([PoolTransfer(PoolName.KV, indices(0), keys=keys[:1])]),
             {"kv": [False]}),
        ]  # fmt: skip
        for call, miss in calls:
            start = time.monotonic()
            assert call() == miss
            assert time.monotonic() - start < DEADLINE_S + BUSY_S

    def test_a_full_pool_takes_the_first_pages(
        self, cluster: Cluster, backend: MakeBackend, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("kvstore.client.client.PUT_WAIT_MS", 0)
        cluster.start(memory="1MiB")
        pool = host_pool(filled=1)
        one = backend(pool)
        keys = [f"{number:064x}" for number in range(512)]
        stored: list[bool] = []
        for at in range(0, len(keys), 32):
            some = keys[at : at + 32]
            stored += one.batch_set_v1(some, indices(*range(32)), after(*keys[:at]))
            one.batch_exists(keys[: at + 32])  # leased: nothing can be evicted
        there = one.batch_exists(keys)
        assert 0 < there < len(keys)
        assert stored[:there] == [True] * there
        assert stored[there] is False

    def test_bad_arguments_are_misses(self, store: Cluster, backend: MakeBackend) -> None:
        one = backend(host_pool())
        none: Any = None
        assert one.batch_set_v1(KEYS, indices(0)) == [False] * 8
        assert one.batch_get_v1(KEYS, none) == [False] * 8
        assert one.batch_get_v1(KEYS[:1], torch.tensor([10**9] * PAGE_TOKENS)) == [False]
        assert one.batch_set_v1([KEYS[0], KEYS[0]], indices(0, 1)) == [False, False]
        assert one.batch_set_v1(["", "k" * 300], indices(0, 1)) == [False, False]
        assert one.batch_exists([none]) == 0
        assert one.batch_exists([]) == 0
        assert one.batch_get_v2([PoolTransfer(PoolName.SWA, indices(0), keys=KEYS[:1])]) == {
            "swa": [False]
        }
        assert one.batch_set_v2([PoolTransfer(PoolName.KV, None, keys=KEYS[:1])]) == {"kv": [False]}
        assert one.batch_get(KEYS, [none] * 8) == [None] * 8
        assert one.set(KEYS[0]) is False


def test_clear_is_of_this_model(store: Cluster, backend: MakeBackend, tmp_path: Path) -> None:
    pool = host_pool(filled=1)
    one, other = backend(pool), backend(pool, model=make_model(tmp_path / "other", 2))
    saved(one, pool)
    saved(other, pool)
    one.clear()
    assert one.batch_exists(KEYS) == 0
    assert other.batch_exists(KEYS) == len(KEYS)


def test_metrics(store: Cluster, backend: MakeBackend) -> None:
    pool = host_pool(filled=1)
    one = backend(pool, metrics=True)
    saved(one, pool)
    saved(one, pool)  # is there: nothing is written
    read_back(one, pool)
    stats = one.get_stats()
    assert (stats.backup_pgs, stats.prefetch_pgs) == ([8], [8])
    assert all(0 < each < 1000 for each in stats.backup_bandwidth + stats.prefetch_bandwidth)
    assert one.get_stats().backup_pgs == []


class TestSettings:
    def test_the_line_of_the_manual(self, store: Cluster, backend: MakeBackend) -> None:
        """SGLang reads its own settings in it, and hands over the others."""
        page = (ROOT / "docs/engines/sglang.md").read_text()
        line = page.partition("extra-config '")[2].partition("'")[0]
        extra, *_, passes_prefix_keys = HybridCacheController.parse_storage_backend_extra_config(
            line
        )
        assert passes_prefix_keys is True
        pool = host_pool(filled=1)
        saved(backend(pool, **extra | {"master": store.address}), pool)

    def test_mooncakes_keys_are_understood(
        self, store: Cluster, model: Path, backend: MakeBackend
    ) -> None:
        theirs = {"master_server_address": store.address, "local_hostname": "h", "replica_num": 2}
        one: KVStoreHiCache = backend(host_pool(), master=None, **theirs)
        settings = one._guard.client.config
        assert (settings.master, settings.replicas) == (store.address, 2)

    def test_a_layout_that_cannot_be_stored_is_refused(self, store: Cluster, model: Path) -> None:
        pool = host_pool()
        pool.layout = "page_unified"
        with pytest.raises(ConfigError, match="page_unified"):
            attach(pool, store.address, model=model)
