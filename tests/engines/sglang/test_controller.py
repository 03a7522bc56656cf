"""SGLang's cache controllers with their real threads: back up, and prefetch in another engine.

What an engine does besides is left out: it copies between a GPU and the host pool, which here is
filled by the test, and its scheduler gives pages of the host pool to what a query has hit
(``transferred``).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.pool_host.group import HostPoolGroup, PoolEntry
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.runtime_context import get_parallel

from tests.engines.sglang import hicache
from tests.engines.sglang.hicache import PAGE_TOKENS, TOKENS
from tests.support.cluster import Cluster

TOKEN_IDS = list(range(PAGE_TOKENS * 10))
PAGES = len(TOKEN_IDS) // PAGE_TOKENS
ANSWER_S = 30.0

pytestmark = pytest.mark.timeout(300)  # the first hash compiles SGLang's extension


@pytest.fixture(scope="module")
def alone() -> Iterator[Any]:
    """A group of one process, as a server with one rank has it."""
    import torch.distributed as dist

    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    places = {
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_dcp_rank": 0,
        "attn_dcp_size": 1, "launch_world_size": 1, "nnodes": 1,
    }  # fmt: skip
    with get_parallel().override(**places):
        yield dist.group.WORLD
    dist.destroy_process_group()


class Engine:
    """A controller on its pools, attached as an engine attaches it."""

    def __init__(
        self,
        group: Any,
        address: str,
        model: Path,
        *,
        states: Any = None,
        layout: str = "page_first",
        filled: int | None,
        **settings: Any,
    ) -> None:
        typed = hicache.config(address, model=model, **settings).extra_config or {}
        if "tp_lcm_size" in settings:
            typed["tp_lcm_size"] = settings["tp_lcm_size"]
        device = hicache.device_pool()
        allocator = PagedTokenToKVPoolAllocator(
            TOKENS, PAGE_TOKENS, torch.bfloat16, "cpu", device, False
        )
        self.host = hicache.host_pool(of=device, layout=layout, filled=filled)
        self.states = states
        common: dict[str, Any] = {
            "page_size": PAGE_TOKENS, "tp_group": group, "load_cache_event": threading.Event(),
            "write_policy": "write_through", "io_backend": "direct",
        }  # fmt: skip
        attach: dict[str, Any] = {
            "storage_backend": "dynamic", "prefetch_threshold": PAGE_TOKENS,
            "model_name": str(model),
            "storage_backend_extra_config": typed,
        }  # fmt: skip
        if states is None:
            self.controller = HiCacheController(allocator, self.host, **common)
        else:
            entries = [
                PoolEntry(PoolName.KV, self.host, device, lambda layer: layer, True),
                PoolEntry(PoolName.MAMBA, states, None, lambda layer: layer),
            ]
            self.controller = HybridCacheController(allocator, HostPoolGroup(entries), **common)
            attach["host_pools"] = entries
        self.controller.attach_storage_backend(**attach)

    def back_up(self, **more: Any) -> tuple[torch.Tensor, list[str]]:
        """All pages of the prompt; waits until the backup thread says that they are stored."""
        host_indices = self.controller.mem_pool_host.alloc(len(TOKEN_IDS))
        hashes = get_storage_hash_str(TOKEN_IDS, None, page_size=PAGE_TOKENS)
        self.controller.write_storage(host_indices, TOKEN_IDS, hashes, prefix_keys=[], **more)
        done = self.controller.ack_backup_queue.get(timeout=ANSWER_S)
        assert done.completed_tokens == len(TOKEN_IDS)
        return host_indices, hashes

    def prefetch(self, request: Any, **more: Any) -> Any:
        """What the prefetch thread has found: an operation with a number of tokens."""
        self.controller.prefetch(request, TOKEN_IDS, prefix_keys=[], **more)
        return self.controller.prefetch_hit_queue.get(timeout=ANSWER_S)

    def transferred(self, operation: Any) -> list[Any]:
        """The scheduler's part: pages for the hit; then what the threads say until the end."""
        pages = self.controller.mem_pool_host.alloc(operation.storage_hit_count)
        operation.host_indices = pages
        self.controller.prefetch_buffer.put(operation)
        said: list[Any] = []
        while not said or not said[-1].completed_req:
            said.append(self.controller.ack_prefetch_queue.get(timeout=ANSWER_S))
        return said

    def pages(self, indices: torch.Tensor) -> list[bytes]:
        starts = indices[::PAGE_TOKENS].tolist()
        return [hicache.bytes_at(self.host, start // PAGE_TOKENS) for start in starts]

    def detach(self) -> None:
        if self.controller.enable_storage:
            self.controller.detach_storage_backend()


@pytest.fixture
def engines(alone: Any, store: Cluster, model: Path) -> Iterator[Any]:
    with ExitStack() as stack:

        def make(**given: Any) -> Engine:
            engine = Engine(alone, store.address, model, **given)
            stack.callback(engine.detach)
            return engine

        yield make


def test_a_round_trip_through_the_threads(engines: Any) -> None:
    one, other = engines(filled=1), engines(filled=None)
    assert other.prefetch("cold").storage_hit_count == 0
    written, _ = one.back_up()
    found = other.prefetch("warm")
    assert found.storage_hit_count == len(TOKEN_IDS)
    said = other.transferred(found)
    assert [ack.completed_tokens for ack in said[:-1]] == [len(TOKEN_IDS)]
    assert other.pages(found.host_indices) == one.pages(written)


def test_states_of_mamba_layers_through_the_threads(engines: Any) -> None:
    one = engines(states=hicache.mamba_pool(filled=2), filled=1)
    other = engines(states=hicache.mamba_pool(), filled=None)
    hashes = get_storage_hash_str(TOKEN_IDS, None, page_size=PAGE_TOKENS)

    def at_the_end(slot: int) -> list[PoolTransfer]:
        return [
            PoolTransfer(
                PoolName.MAMBA, torch.tensor([slot]), keys=hashes[-1:],
                hit_policy=PoolHitPolicy.TRAILING_PAGES,
            )
        ]  # fmt: skip

    written, _ = one.back_up(extra_pools=at_the_end(3))
    found = other.prefetch(CacheRequestHandle("warm", 0), extra_pools=at_the_end(5))
    assert found.storage_hit_count == len(TOKEN_IDS)
    said = other.transferred(found)
    assert [ack.pool_hits["mamba"] for ack in said if ack.pool_hits is not None] == [1]
    assert other.pages(found.host_indices) == one.pages(written)
    assert hicache.bytes_at(other.states, 5, tokens=1) == hicache.bytes_at(one.states, 3, tokens=1)
