"""Drivers for LMCache's ``RemoteBackend`` and ``LocalDiskBackend``, which run as in an engine's
process.

LMCache's ``MooncakestoreConnector`` calls both systems, this store by its ``mooncake.store``, with
the faster of the settings (``save_chunk_meta`` off). LMCache's native interface to this store, the
second level of its daemon, has no counterpart: LMCache's wheel lacks the module for Mooncake Store
there. LMCache passes and receives chunks of its own memory, in the client's process.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
from collections.abc import Sequence
from typing import Any, Final

import torch

import kvstore.connectors.mooncake_shim
from bench import mooncake
from kvstore.bench.kvstore_driver import KVStoreDriver
from kvstore.bench.session import (
    BATCH,
    CHAIN_BLOCK_BYTES,
    EXIST,
    PUT,
    WARM_PIECE,
    StoreDriver,
    Work,
)
from kvstore.bench.timing import Bytes, memory, require
from kvstore.errors import StartupError
from kvstore.memory.disk_file import THREADS

PLUGIN: Final = "mooncakestore"
MODEL: Final = "kvstore/bench"
TOKENS: Final = 256
"""Tokens of a chunk: LMCache's default."""
LAYERS: Final = 4
BATCHES_IN_MEMORY: Final = 4
"""Batches in LMCache's memory: one to put, the last one read, the one being read, a spare."""
MEMORY_BYTES_MIN: Final = 64 << 20
TIMEOUT_SECONDS: Final = 60
DISK_GIB: Final = 10_000


class LMCacheDriver(StoreDriver):
    """A client of one system, behind LMCache. A backend of LMCache has chunks of one size, so there
    is one for each size."""

    def __init__(self, address: str, mode: str, memory_bytes: int, *, on_mooncake: bool) -> None:
        """``mode``: the transport of this store; Mooncake's is always TCP."""
        os.environ |= {"LMCACHE_LOG_LEVEL": "ERROR", "LMCACHE_TRACK_USAGE": "false"}
        if not on_mooncake:
            os.environ["KVSTORE_CLIENT_TRANSPORTS"] = mode
            kvstore.connectors.mooncake_shim.install()
        self.source, self._target = memory(memory_bytes)
        self._settings = _settings(address)
        # This client knows when the memory of removed objects is free.
        self._beside = None if on_mooncake else KVStoreDriver(address, mode, WARM_PIECE)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._backends: dict[int, _Backend] = {}
        self._sizes: dict[str, int] = {}
        """Bytes of each object that was put."""
        self._got: list[Any] = []
        """The chunks of the last get, in LMCache's memory."""

    @property
    def target(self) -> Bytes:  # type: ignore[override]
        """The memory to get into. Reading this property copies the chunks of the last get into it,
        which is not timed."""
        at = 0
        for chunk in self._got:
            data = chunk.raw_tensor.numpy()
            self._target[at : at + len(data)] = data
            at += len(data)
        self._keep([])
        return self._target

    def work(self, op: str, batches: Sequence[Sequence[str]], size: int) -> Work:
        backend = self._backend(size or CHAIN_BLOCK_BYTES)
        keys = [[backend.key(name) for name in batch] for batch in batches]
        count, length = len(keys), len(keys[0])
        if op == EXIST:
            return Work(
                lambda i: backend.contains(keys[i % count]),
                lambda found: require(found == length, "was not there"),
            )
        if op == PUT:
            self._sizes |= {name: size for batch in batches for name in batch}
            chunks = backend.chunks(length)
            # LMCache does not report whether chunks are stored: ``remove`` finds those that are
            # not.
            return Work(lambda i: backend.put(keys[i % count], chunks), lambda _: None)
        return Work(lambda i: backend.get(keys[i % count]), self._keep)

    def remove(self, keys: Sequence[str]) -> None:
        by_size: dict[int, list[str]] = {}
        for name in keys:
            by_size.setdefault(self._sizes.pop(name), []).append(name)
        for size, names in by_size.items():
            require(self._backends[size].remove(names), "was not stored")

    def wait_until_free(self) -> None:
        if self._beside is not None:
            self._beside.wait_until_free()

    def close(self) -> None:
        self._keep([])
        for backend in self._backends.values():
            backend.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        if self._beside is not None:
            self._beside.close()

    def _backend(self, size: int) -> _Backend:
        if size not in self._backends:
            self._backends[size] = self._make_backend(size)
        return self._backends[size]

    def _make_backend(self, size: int) -> _Backend:
        return _Backend(self._settings, size, self.source, self._loop)

    def _keep(self, got: list[Any]) -> None:
        require(None not in got, "was not there")
        for chunk in self._got:
            chunk.ref_count_down()
        self._got = got


class _Backend:
    """A backend of LMCache for one model, whose chunks have ``size`` bytes."""

    def __init__(
        self,
        settings: dict[str, Any],
        size: int,
        source: Bytes,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.metadata import LMCacheMetadata
        from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

        self._size = size
        self._source = source
        self._dtype = torch.bfloat16
        memory_bytes = max(BATCHES_IN_MEMORY * BATCH * size, MEMORY_BYTES_MIN)
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=TOKENS,
            local_cpu=False,  # no cache of its own
            max_local_cpu_size=memory_bytes / (1 << 30),
            blocking_timeout_secs=TIMEOUT_SECONDS,
            **settings,
        )
        elements = size // TOKENS // 2 // LAYERS // self._dtype.itemsize
        self._metadata = LMCacheMetadata(
            model_name=f"{MODEL}-{size}",
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=self._dtype,
            kv_shape=(LAYERS, 2, TOKENS, 1, elements),
            chunk_size=TOKENS,
        )
        self._memory = LocalCPUBackend(config, self._metadata, dst_device="cpu")
        self._store = self._open(config, loop)
        self._chunks: list[Any] = []

    def _open(self, config: Any, loop: asyncio.AbstractEventLoop) -> Any:
        from lmcache.v1.storage_backend.remote_backend import RemoteBackend

        store = RemoteBackend(config, self._metadata, loop, self._memory, "cpu", plugin_name=PLUGIN)
        if store.connection is None:
            raise StartupError(f"LMCache has made no connector for {PLUGIN}")
        return store

    def key(self, name: str) -> Any:
        from lmcache.utils import CacheEngineKey

        number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) >> 1
        return CacheEngineKey(self._metadata.model_name, 1, 0, number, self._dtype)

    def chunks(self, count: int) -> list[Any]:
        """Return chunks of LMCache's memory with the first parts of the source."""
        for number in range(len(self._chunks), count):
            metadata = self._metadata
            chunk = self._memory.allocate(metadata.get_shapes(), metadata.get_dtypes())
            data = chunk.raw_tensor.numpy()
            data[:] = self._source[number * self._size : (number + 1) * self._size]
            self._chunks.append(chunk)
        return self._chunks[:count]

    def put(self, keys: list[Any], chunks: list[Any]) -> None:
        done = threading.Semaphore(0)
        self._store.batched_submit_put_task(
            keys, chunks, on_complete_callback=lambda _: done.release()
        )
        for _ in keys:
            require(done.acquire(timeout=TIMEOUT_SECONDS), "was not stored in time")

    def contains(self, keys: list[Any]) -> int:
        return int(self._store.batched_contains(keys))

    def get(self, keys: list[Any]) -> list[Any]:
        found: list[Any] = self._store.batched_get_blocking(keys)
        return found

    def remove(self, names: Sequence[str]) -> bool:
        """Remove objects; return whether all of them were stored."""
        connector = self._store.connection.getWrappedConnector()
        keys = [self.key(name).to_string() for name in names]
        return all(code == 0 for code in connector.store.batch_remove(keys, True))

    def close(self) -> None:
        for chunk in self._chunks:
            chunk.ref_count_down()
        self._store.close()
        self._memory.close()


class LocalDiskDriver(LMCacheDriver):
    """LMCache's ``LocalDiskBackend``, without a cache in memory above it."""

    def __init__(self, address: str, mode: str, memory_bytes: int) -> None:
        """``address``: a directory."""
        super().__init__(address, mode, memory_bytes, on_mooncake=True)
        # It never subtracts what is removed from its size: the limit is out of reach.
        self._settings = {
            "local_disk": address, "max_local_disk_size": DISK_GIB,
            "extra_config": {"use_odirect": True, "disk_io_threads": THREADS},
        }  # fmt: skip

    def work(self, op: str, batches: Sequence[Sequence[str]], size: int) -> Work:
        work = super().work(op, batches, size)
        if op == PUT:
            return work

        def get(i: int) -> list[bool]:
            self._keep([])
            got = work.call(i)
            self._got = [chunk for chunk in got if chunk is not None]
            return [chunk is not None for chunk in got]

        return Work(get, lambda _: None)

    def _make_backend(self, size: int) -> _Backend:
        return _DiskBackend(self._settings, size, self.source, self._loop)


class _DiskBackend(_Backend):
    def _open(self, config: Any, loop: asyncio.AbstractEventLoop) -> Any:
        from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend

        return LocalDiskBackend(config, loop, self._memory, "cpu", metadata=self._metadata)

    def remove(self, names: Sequence[str]) -> bool:
        for name in names:
            self._store.remove(self.key(name))
        return True


def _settings(address: str) -> dict[str, Any]:
    extra = {
        "metadata_server": mooncake.METADATA,
        "master_server_address": address,
        "mooncake_master_server_addr": address,  # Mooncake 0.3.13's name
        "local_hostname": mooncake.HOST,
        "protocol": "tcp",
        "global_segment_size": 0,
        "local_buffer_size": mooncake.BUFFER_BYTES,
        "transfer_timeout": TIMEOUT_SECONDS,
        "save_chunk_meta": False,
    }
    return {"remote_storage_plugins": [PLUGIN], "extra_config": extra}
