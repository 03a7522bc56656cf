"""``KVStoreConnector``: this store as the remote storage of LMCache inside an engine's process.

    remote_storage_plugins: ["kvstore"]
    extra_config:
      remote_storage_plugin.kvstore.module_path: kvstore.connectors.lmcache
      remote_storage_plugin.kvstore.class_name: KVStoreConnectorAdapter
      remote_storage_plugin.kvstore.master: 10.0.0.7:50001

The class is a remote connector, and not a storage plug-in, because LMCache's ``RemoteBackend`` then
calls it: that counts, serializes, knows the ranks of MLA, keeps track of puts and handles errors.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, TypeVar

from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.protocol import RemoteMetadata
from lmcache.v1.storage_backend.connector import (
    ConnectorAdapter,
    ConnectorContext,
    extract_plugin_type,
)
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

from kvstore.connectors.engine import mooncake_keys
from kvstore.connectors.engine.guard import Guard, client_of_an_engine
from kvstore.connectors.lmcache.chunks import Chunks, log
from kvstore.connectors.lmcache.memory import release

PLUGIN: Final = "kvstore"
"""The plug-in's type. LMCache's ``remote_storage_plugins`` names it, or ``kvstore.NAME``."""

_WHERE_IT_IS: Final = ("module_path", "class_name")

WORKERS: Final = 2
"""Threads that call the store. Few are enough: a single call saturates a memory bus."""

ResultT = TypeVar("ResultT")
Keys = list[CacheEngineKey]
Memories = list[MemoryObj]
Found = list[MemoryObj | None]
Texts = list[str]


class KVStoreConnectorAdapter(ConnectorAdapter):  # type: ignore[misc]  # LMCache is untyped here
    """The class to name in LMCache's configuration; it creates the ``KVStoreConnector``. (LMCache
    0.5.6 gives no metadata to a ``RemoteConnector`` that is named there directly.)"""

    def __init__(self) -> None:
        super().__init__(f"plugin://{PLUGIN}")

    def can_parse(self, url: str) -> bool:
        kind, _, plugin = url.partition("://")
        return kind == "plugin" and extract_plugin_type(plugin) == PLUGIN

    def create_connector(self, context: ConnectorContext) -> KVStoreConnector:
        """Raises ConfigError for an unknown or wrong setting."""
        settings = _settings(context.config, context.plugin_name or PLUGIN)
        return KVStoreConnector(
            context.local_cpu_backend, context.config, context.metadata, settings=settings
        )


class KVStoreConnector(RemoteConnector):  # type: ignore[misc]
    """See the module. Threads: any. Coroutines run in LMCache's event loop, which never waits for
    the store. On an error a get is a miss, and a put is left undone."""

    def __init__(
        self,
        memory: LocalCPUBackend,
        config: LMCacheEngineConfig,
        metadata: LMCacheMetadata,
        *,
        settings: dict[str, Any],
    ) -> None:
        """
        Args:
            memory: the memory in which gets allocate.
            settings: those of a client, and ``model_id`` (see ``KVStoreL2Adapter``).

        Raises:
            ConfigError: an unknown or wrong setting.
        """
        super().__init__(config, metadata)
        given = mooncake_keys.in_own_words(settings, log)
        model_id = given.pop("model_id", None)
        self._chunks = Chunks(
            Guard(client_of_an_engine(**given), log),
            memory,
            metadata.model_name,
            RemoteMetadata(
                self.full_chunk_size_bytes, self.meta_shapes, self.meta_dtypes, self.meta_fmt
            ),
            model_id=model_id,
            more={
                "door": "in-process",
                "memory format": str(self.meta_fmt),
                "serializer": config.remote_serde,
                "hashes": config.pre_caching_hash_algorithm,
            },
        )
        self._pool = ThreadPoolExecutor(WORKERS, "kvstore-lmcache")

    # --- asking -------------------------------------------------------------------------------

    async def exists(self, key: CacheEngineKey) -> bool:
        return await self._in_thread(lambda: self.exists_sync(key))

    def exists_sync(self, key: CacheEngineKey) -> bool:
        """Whether the object is stored. If so, it is leased, so that a get finds it."""
        return self.batched_contains([key]) == 1

    def support_batched_contains(self) -> bool:
        return True

    def batched_contains(self, keys: Keys) -> int:
        """How many leading keys have an object. Objects that are found are leased."""
        sizes = self._chunks.sizes(keys)
        return sizes.index(None) if None in sizes else len(sizes)

    async def batched_async_contains(self, lookup_id: str, keys: Keys, pin: bool = False) -> int:
        del lookup_id, pin  # what is found is leased
        return await self._in_thread(lambda: self.batched_contains(keys))

    async def list(self) -> Texts:
        return await self._in_thread(self._chunks.keys)

    # --- putting ------------------------------------------------------------------------------

    async def put(self, key: CacheEngineKey, memory_obj: MemoryObj) -> None:
        await self.batched_put([key], [memory_obj])

    def support_batched_put(self) -> bool:
        return True

    async def batched_put(self, keys: Keys, memory_objs: Memories) -> None:
        """Holds a reference to the memory until the thread has read it, because LMCache may cancel
        this call and would then use the memory again."""
        for memory in memory_objs:
            memory.ref_count_up()
        await self._in_thread(
            lambda: self._chunks.put(keys, memory_objs), ended=lambda _: release(memory_objs)
        )

    # --- getting ------------------------------------------------------------------------------

    async def get(self, key: CacheEngineKey) -> MemoryObj | None:
        return (await self.batched_get([key]))[0]

    def support_batched_get(self) -> bool:
        return True

    async def batched_get(self, keys: Keys) -> Found:
        return await self._in_thread(
            lambda: self._chunks.get(keys), dropped=lambda done: release(_present(done.result()))
        )

    async def batched_get_non_blocking(self, lookup_id: str, keys: Keys) -> Memories:
        """The objects before the first miss."""
        del lookup_id
        found = await self.batched_get(keys)
        hits = found.index(None) if None in found else len(found)
        release(_present(found[hits:]))
        return _present(found[:hits])

    # --- removing, and the end ----------------------------------------------------------------

    def remove_sync(self, key: CacheEngineKey) -> bool:
        return self._chunks.remove(key)

    async def close(self) -> None:
        """Calls under way fail. Returns when no thread touches LMCache's memory any more."""
        with ThreadPoolExecutor(1, "kvstore-lmcache-close") as closing:
            await asyncio.get_running_loop().run_in_executor(closing, self._end)

    def _end(self) -> None:
        self._chunks.close()
        self._pool.shutdown()

    async def _in_thread(
        self,
        call: Callable[[], ResultT],
        *,
        ended: Callable[[Future[ResultT]], object] | None = None,
        dropped: Callable[[Future[ResultT]], object] | None = None,
    ) -> ResultT:
        """The result of ``call``, which a thread runs to its end even if this is cancelled.

        Args:
            ended: called when the call has ended, or could not begin.
            dropped: called with the future of a call that ends after the cancellation.

        Raises:
            RuntimeError: after ``close``.
        """
        try:
            future = self._pool.submit(call)
        except RuntimeError:
            if ended is not None:
                ended(Future())
            raise
        if ended is not None:
            future.add_done_callback(ended)
        try:
            return await asyncio.shield(asyncio.wrap_future(future))
        except asyncio.CancelledError:
            if dropped is not None:
                future.add_done_callback(dropped)
            raise


def _present(found: Sequence[MemoryObj | None]) -> Memories:
    return [memory for memory in found if memory is not None]


def _settings(config: LMCacheEngineConfig, plugin: str) -> dict[str, Any]:
    """This plug-in's settings in LMCache's configuration, without those that locate its class."""
    given = {}
    for name, value in (config.extra_config or {}).items():
        owner, _, setting = name.rpartition(".")
        if owner == f"remote_storage_plugin.{plugin}" and setting not in _WHERE_IT_IS:
            given[setting] = value
    return given
