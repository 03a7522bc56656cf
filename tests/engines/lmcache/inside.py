"""LMCache inside an engine, with its ``MooncakestoreConnector``."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Sequence
from typing import Any, Final

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.remote_backend import RemoteBackend

PLUGIN: Final = "mooncakestore"
MODEL: Final = "tests/tiny-model"
DTYPE: Final = torch.bfloat16
TOKENS: Final = 64
"""Of a full chunk."""

PATIENCE_S: Final = 30.0


class Inside:
    """A worker of an engine of one model."""

    def __init__(
        self,
        extra: dict[str, Any],
    ) -> None:
        """
        Args:
            extra: LMCache's ``extra_config``.
        """
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=TOKENS,
            local_cpu=False,
            max_local_cpu_size=0.1,
            remote_storage_plugins=[PLUGIN],
            extra_config=extra,
        )
        self.metadata = LMCacheMetadata(
            model_name=MODEL,
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=DTYPE,
            kv_shape=(4, 2, TOKENS, 2, 32),
            chunk_size=TOKENS,
        )
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="lmcache-loop")
        self._thread.start()
        self.memory = LocalCPUBackend(config, self.metadata, dst_device="cpu")
        self.backend = RemoteBackend(
            config, self.metadata, self.loop, self.memory, "cpu", plugin_name=PLUGIN
        )
        if self.backend.connection is None:
            self.close()
            raise AssertionError("LMCache has not made the connector")

    def key(self, number: int) -> CacheEngineKey:
        return CacheEngineKey(MODEL, 1, 0, (1 << 62) + number, DTYPE)

    def chunk(self, seed: int, tokens: int = TOKENS) -> MemoryObj:
        """Random bytes of a seed, in LMCache's memory."""
        memory = self.memory.allocate(
            self.metadata.get_shapes(tokens), self.metadata.get_dtypes(), busy_loop=False
        )
        assert memory is not None
        memory.byte_array.cast("B")[:] = random.Random(seed).randbytes(memory.get_size())
        return memory

    def put(self, keys: Sequence[CacheEngineKey], chunks: Sequence[MemoryObj]) -> None:
        """Returns when LMCache has been told that each is done."""
        done = threading.Semaphore(0)
        self.backend.batched_submit_put_task(
            list(keys), list(chunks), on_complete_callback=lambda _: done.release()
        )
        for _ in keys:
            assert done.acquire(timeout=PATIENCE_S), "the put did not end"

    def get(self, keys: Sequence[CacheEngineKey]) -> list[MemoryObj | None]:
        found: list[MemoryObj | None] = self.backend.batched_get_blocking(list(keys))
        return found

    def close(self) -> None:
        """Idempotent."""
        if self.loop.is_closed():
            return
        self.backend.close()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()
        self.memory.close()
