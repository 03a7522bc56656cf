"""Driver for SGLang's HiCache: set, get and exists of pages, as its cache controller calls them.

SGLang's own class ``MooncakeStore`` on Mooncake's client is compared with the same class on
kvstore's ``mooncake.store``, and with ``KVStoreHiCache``. The pages are those of one host pool of
latent attention (MLA, ``page_first``): each is one object of the page's size.
"""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

import kvstore.connectors.mooncake_shim
from bench import mooncake
from bench.tables import DROP_IN, NATIVE_SHM
from kvstore.bench.kvstore_driver import KVStoreDriver
from kvstore.bench.rows import KIB
from kvstore.bench.session import EXIST, GET, PUT, StoreDriver, Work
from kvstore.bench.timing import Bytes, fill_randomly, require

TOKEN_BYTES: Final = 4 * KIB
"""Bytes per token of the pool: 16 layers of 128 bfloat16 values."""
LAYERS: Final = 16
LATENT: Final = 64


class HiCacheDriver(StoreDriver):
    """Makes the calls through SGLang's back-ends on one host pool: a back-end per size of pages."""

    def __init__(self, address: str, mode: str, memory_bytes: int, *, on_mooncake: bool) -> None:
        """
        Args:
            address: the address of the system's master.
            mode: ``DROP_IN``, ``NATIVE`` or ``NATIVE_SHM``.
            memory_bytes: size of the pages to put from, and of those to get into.
        """
        self._address = address
        self._is_native = not on_mooncake and mode != DROP_IN
        self._ours: KVStoreDriver | None = None
        if not on_mooncake:
            os.environ["KVSTORE_CLIENT_TRANSPORTS"] = "shm" if mode == NATIVE_SHM else "tcp"
            self._ours = KVStoreDriver(address, "shm", 1)
            if mode == DROP_IN:
                kvstore.connectors.mooncake_shim.install()
        self._tokens = memory_bytes // TOKEN_BYTES
        self._pool = _host_pool(2 * self._tokens)
        whole = self._pool.kv_buffer.view(-1).view(torch.uint8).numpy()
        self.source: Bytes = whole[:memory_bytes]
        self.target: Bytes = whole[memory_bytes : 2 * memory_bytes]
        fill_randomly(self.source)
        self.target[:] = 1
        self._backends: dict[int, Any] = {}

    def work(self, op: str, batches: Sequence[Sequence[str]], size: int) -> Work:
        keys, count = [[_page_hash(key) for key in batch] for batch in batches], len(batches)
        backend = self._backend(size or TOKEN_BYTES)
        pages = len(keys[0])
        if op == EXIST:
            return Work(lambda i: backend.batch_exists(keys[i % count]), _found(pages))
        used = pages * size // TOKEN_BYTES
        if op == PUT:
            sources = torch.arange(used)
            return Work(lambda i: backend.batch_set_v1(keys[i % count], sources), _all_well)
        assert op == GET, op
        targets = torch.arange(self._tokens, self._tokens + used)
        return Work(lambda i: backend.batch_get_v1(keys[i % count], targets), _all_well)

    def remove(self, keys: Sequence[str]) -> None:
        hashes = [_page_hash(key) for key in keys]
        if self._is_native:
            assert self._ours is not None
            for row in self._ours.plain.status().namespaces:
                if row.name.startswith("sglang/"):
                    self._ours.plain.remove_many(hashes, namespace=row.name)
            return
        for backend in self._backends.values():
            names = [f"{hash_}_{backend.mla_suffix}_k" for hash_ in hashes]
            backend.store.batch_remove(names, True)

    def wait_until_free(self) -> None:
        if self._ours is not None:
            self._ours.wait_until_free()

    def close(self) -> None:
        for backend in self._backends.values():
            backend.close()
        if self._ours is not None:
            self._ours.close()

    def _backend(self, size: int) -> Any:
        if size not in self._backends:
            pool = copy.copy(self._pool)  # the same memory, in pages of another size
            pool.page_size = size // TOKEN_BYTES
            backend = self._backends[size] = self._attached(pool)
            backend.register_mem_pool_host(pool)
        return self._backends[size]

    def _attached(self, pool: Any) -> Any:
        """Return a back-end created as by SGLang's cache controller."""
        from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
        from sglang.srt.mem_cache.storage import StorageBackendFactory

        name, extra = "mooncake", {
            "master_server_address": self._address, "metadata_server": mooncake.METADATA,
            "local_hostname": mooncake.HOST, "protocol": "tcp", "global_segment_size": 0,
        }  # fmt: skip
        if self._is_native:
            name, extra = "dynamic", {
                "backend_name": "kvstore", "module_path": "kvstore.connectors.sglang",
                "class_name": "KVStoreHiCache", "interface_v1": 1, "master": self._address,
                "model_id": "bench",
            }  # fmt: skip
        config = HiCacheStorageConfig(
            tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1,
            is_mla_model=True, enable_storage_metrics=False, is_page_first_layout=True,
            model_name=None, extra_config=extra,
        )  # fmt: skip
        return StorageBackendFactory.create_backend(name, config, pool)


def _host_pool(tokens: int) -> Any:
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
    from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    device = MLATokenToKVPool(
        size=1, page_size=1, dtype=torch.bfloat16, kv_lora_rank=LATENT, qk_rope_head_dim=LATENT,
        layer_num=LAYERS, device="cpu", enable_memory_saver=False,
    )  # fmt: skip
    with host_memory_budget_scope(2 * tokens * TOKEN_BYTES):
        pool = MLATokenToKVPoolHost(
            device._mla_buffer_info(), float(tokens), 0, 1, "page_first", pin_memory=False,
            device="cpu", device_capacity_tokens=1, start_layer=0, end_layer=LAYERS,
            target_layer_num=LAYERS,
        )  # fmt: skip
    assert pool.kv_buffer.nbytes >= tokens * TOKEN_BYTES, pool.kv_buffer.shape
    return pool


def _page_hash(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _all_well(result: Sequence[bool]) -> None:
    require(all(result), "was not moved")


def _found(pages: int) -> Callable[[int], None]:
    return lambda found: require(found == pages, "was not there")
