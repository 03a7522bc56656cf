"""``KVStoreL2Adapter``: this store as the second level of LMCache's daemon, behind its memory.

    lmcache server --l1-size-gb 20 --eviction-policy LRU --l2-adapter '{"type": "plugin",
      "module_path": "kvstore.connectors.lmcache", "class_name": "KVStoreL2Adapter",
      "adapter_params": {"master": "10.0.0.7:50001"}}'

The daemon's controllers submit tasks (stores, lookups, loads), and wait for the event descriptor of
each kind. Every task ends by the deadline of its calls, even if kvstore is down: then a store task
fails, and a lookup or a load misses. kvstore evicts by itself, so LMCache evicts from this level
only to enforce quotas of ``cache_salt`` (``IsolatedLRU``).
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Generic, TypeVar

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import KeyEntry, KeyListPage, MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L1MemoryDesc, L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.platform import create_event_notifier

from kvstore.calls import ObjectRow, PutOutcome
from kvstore.connectors.common import mooncake_config
from kvstore.connectors.common.guarded_client import (
    GuardedCall,
    GuardedClient,
    client_of_an_engine,
    slices,
)
from kvstore.connectors.lmcache.conversions import (
    Layout,
    layout_of,
    layout_of_object,
    memory_of,
    name_of,
    text_of,
)
from kvstore.connectors.lmcache.namespaces import ChunkNamespaces
from kvstore.errors import KVStoreError

log = logging.getLogger("kvstore.lmcache")

WORKERS: Final = 2
"""Threads for stores, and as many for lookups and loads: a single call saturates a memory bus."""

ResultT = TypeVar("ResultT")


class KVStoreL2Adapter(L2AdapterInterface):  # type: ignore[misc]  # LMCache is untyped here
    """See the module. Threads: any. LMCache keeps the memory of a task until it has the task's
    result, or until ``close`` has returned."""

    def __init__(
        self, params: Mapping[str, Any], l1_memory_desc: L1MemoryDesc | None = None
    ) -> None:
        """
        Args:
            params: settings of a client (``master``, ``cluster``, ``replicas``, ``transports``,
                ``timeout_ms`` ...), and ``model_id``: the user's name for the weights, needed if
                this host does not have their files, or if they are replaced in place. Keys of
                LMCache's adapter for Mooncake count as these settings.
            l1_memory_desc: LMCache's memory, which is registered with a transfer engine, if any.

        Raises:
            ConfigError: an unknown or wrong setting.
        """
        super().__init__()  # no capacity, so that LMCache does not evict by usage
        settings = mooncake_config.translate_config(params, log)
        model_id = settings.pop("model_id", None)
        self._guard = GuardedClient(client_of_an_engine(**settings), log)
        self._client = self._guard.client
        self._namespaces = ChunkNamespaces(self._client, log, model_id=model_id)
        self._layouts: dict[tuple[str, int], Layout] = {}
        """The last layout stored, or described by a lookup, by model and object group."""
        self._sizes: dict[str, int] = {}
        """Size of the last object stored, by namespace."""
        self._listings: dict[tuple[str | None, int], Iterator[tuple[str, ObjectRow]]] = {}
        """The unfinished listing of the last batch, by model and number of rows so far."""
        self._stores: _CompletionQueue[L2StoreResult] = _CompletionQueue()
        self._lookups: _CompletionQueue[Bitmap] = _CompletionQueue()
        self._loads: _CompletionQueue[Bitmap] = _CompletionQueue()
        self._writers = ThreadPoolExecutor(WORKERS, "kvstore-lmcache-put")
        self._readers = ThreadPoolExecutor(WORKERS, "kvstore-lmcache-get")
        self._numbers = itertools.count()
        self._is_closed = False
        if l1_memory_desc is not None and self._client.config.protocol:
            self._wrap_buffers(l1_memory_desc)

    def get_store_event_fd(self) -> int:
        return self._stores.descriptor

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._lookups.descriptor

    def get_load_event_fd(self) -> int:
        return self._loads.descriptor

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Succeed if the store has all objects afterwards; a full pool takes only the first."""
        return self._submit(
            self._writers,
            self._stores,
            lambda: self._store(keys, objects),
            L2StoreResult(False, 0),
        )

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        return self._stores.take_all()

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: Mapping[int, MemoryLayoutDesc]
    ) -> int:
        """Lease the objects found, for the master's ``--lease-ms``."""
        return self._submit(
            self._readers,
            self._lookups,
            lambda: self._lookup(keys, group_layout_descs),
            Bitmap(len(keys)),
        )

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        return self._lookups.take(task_id)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Do nothing: a load releases the leases of its objects, and the others end."""

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Load each stored object with the same shapes, dtypes and size. The memory of the others
        is undefined afterwards."""
        return self._submit(
            self._readers, self._loads, lambda: self._load(keys, objects), Bitmap(len(keys))
        )

    def query_load_result(self, task_id: int) -> Bitmap | None:
        return self._loads.take(task_id)

    def delete(self, keys: list[ObjectKey]) -> None:
        """Remove the objects. LMCache's listeners are notified for all of them, including those
        that the store had evicted before."""
        layouts = [self._layouts.get((key.model_name, key.object_group_id)) for key in keys]
        for namespace, indices in self._grouped(keys, layouts).items():
            for some in slices([keys[index] for index in indices]):
                names = [_name(key) for key in some]
                try:
                    self._guard.run(
                        lambda ms, names=names, space=namespace: self._client.remove_many(  # type: ignore[misc]
                            names, namespace=space, timeout_ms=ms
                        )
                    )
                except KVStoreError as error:
                    log.warning("%d objects not deleted: %s", len(names), error)
                    return
                size = self._sizes.get(namespace, 0)
                self._notify_keys_deleted(list(some), [size] * len(some))

    def list_l2_keys(
        self, model_name: str | None = None, page_size: int = 500, cursor: str | None = None
    ) -> KeyListPage:
        """List the objects of the models that this daemon has stored or looked up. Objects that are
        stored or removed meanwhile may be missed or listed twice.

        A batch continues the listing of the previous one. With another cursor, it starts a new
        listing and skips as many rows.

        Raises:
            ValueError: a wrong size or cursor, as specified by LMCache's interface.
            KVStoreError: the store did not answer.
        """
        if page_size <= 0:
            raise ValueError(f"page_size must be positive, not {page_size}")
        told = int(cursor or 0)
        if told < 0:
            raise ValueError(f"not a cursor of this adapter: {cursor!r}")
        rows = self._listings.pop((model_name, told), None)
        if rows is None:
            rows = itertools.islice(self._rows(model_name), told, None)
        entries: list[KeyEntry] = []
        for model, row in rows:
            told += 1
            if (key := _key(row.key, model)) is not None:
                entries.append(KeyEntry(key.to_encoded_object_key(), row.size))
            if len(entries) == page_size:
                self._listings.clear()
                self._listings[model_name, told] = rows
                return KeyListPage(tuple(entries), str(told))
        return KeyListPage(tuple(entries), None)

    def report_status(self) -> dict[str, Any]:
        """Return the status of this process. ``is_healthy`` stays true while the store is down:
        LMCache is only slower then, and a restart by a supervisor would lose the daemon's
        memory."""
        return {
            "is_healthy": not self._is_closed,
            "type": type(self).__name__,
            "master": self._client.config.master,
            "namespaces": sorted(self._sizes),
            "bytes_stored": self.get_usage().total_bytes_used,
        }

    def close(self) -> None:
        """Fail the tasks in progress; return when none accesses its memory. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._namespaces.stop()
        self._client.close()
        self._namespaces.join()
        self._writers.shutdown()
        self._readers.shutdown()
        for finished in (self._stores, self._lookups, self._loads):
            finished.close()

    def _submit(
        self,
        pool: ThreadPoolExecutor,
        finished: _CompletionQueue[ResultT],
        work: Callable[[], ResultT],
        failed: ResultT,
    ) -> int:
        task = next(self._numbers)

        def run() -> None:
            result = failed
            try:
                result = work()
            except KVStoreError as error:
                log.debug("%s", error)
            except Exception:  # without a result, a controller would wait forever
                log.exception("a task failed")
            finally:
                finished.add(task, result)

        try:
            pool.submit(run)
        except RuntimeError:  # closed
            finished.add(task, failed)
        return task

    def _store(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> L2StoreResult:
        layouts = list(map(layout_of_object, objects))
        for key, layout in zip(keys, layouts, strict=True):
            self._layouts[key.model_name, key.object_group_id] = layout
        deadline = GuardedCall(self._guard)
        moved = there = 0
        for namespace, indices in self._grouped(keys, layouts).items():
            for some in slices(indices):
                named, of = [keys[index] for index in some], [objects[index] for index in some]
                outcomes = self._put(deadline, namespace, named, of)
                sizes = {
                    key: memory.get_size()
                    for key, memory, outcome in zip(named, of, outcomes, strict=True)
                    if outcome is PutOutcome.STORED
                }
                if sizes:
                    *_, self._sizes[namespace] = sizes.values()
                    self._notify_keys_stored(list(sizes), list(sizes.values()))
                moved += sum(sizes.values())
                found = sum(outcome in _THERE for outcome in outcomes)
                there += found
                if found < len(some):
                    break  # the pool is full: it has the first objects
        return L2StoreResult(there == len(keys), moved)

    def _put(
        self,
        deadline: GuardedCall,
        namespace: str,
        keys: Sequence[ObjectKey],
        objects: Sequence[MemoryObj],
    ) -> list[PutOutcome]:
        """Put as many objects as one call may have. Raises KVStoreError."""
        names = list(map(_name, keys))
        values = {name: memory_of(memory) for name, memory in zip(names, objects, strict=True)}
        outcomes = deadline.run(
            lambda ms: self._client.put_many(
                list(values.items()), namespace=namespace, partial=True, timeout_ms=ms
            ),
            size=sum(value.nbytes for value in values.values()),
        )
        named = dict(zip(values, outcomes, strict=True))
        return [named[name] for name in names]

    def _lookup(
        self, keys: list[ObjectKey], descriptions: Mapping[int, MemoryLayoutDesc]
    ) -> Bitmap:
        layouts = []
        for key in keys:
            place = key.model_name, key.object_group_id
            layout = self._layouts.get(place)
            if layout is None:
                described = descriptions.get(key.object_group_id)
                if described is not None and described.shapes:
                    layout = layout_of(tuple(described.shapes), tuple(described.dtypes))
                    self._layouts[place] = layout
            layouts.append(layout)
        found: list[int] = []
        deadline = GuardedCall(self._guard)
        for namespace, indices in self._grouped(keys, layouts).items():
            names = [_name(keys[index]) for index in indices]
            pairs = zip(indices, deadline.lookup(names, namespace), strict=True)
            found += (index for index, size in pairs if size is not None)
        hits = Bitmap(len(keys))
        for index in found:
            hits.set(index)
        if found:
            self._notify_keys_accessed([keys[index] for index in found])
        return hits

    def _load(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> Bitmap:
        loaded = Bitmap(len(keys))
        deadline = GuardedCall(self._guard)
        for namespace, indices in self._grouped(keys, list(map(layout_of_object, objects))).items():
            for some in slices(indices):
                names = [_name(keys[index]) for index in some]
                buffers = [memory_of(objects[index]) for index in some]
                try:
                    read = deadline.run(
                        lambda ms, names=names, buffers=buffers, space=namespace: (  # type: ignore[misc]
                            self._client.get_into(names, buffers, namespace=space, timeout_ms=ms)
                        ),
                        size=sum(buffer.nbytes for buffer in buffers),
                    )
                except KVStoreError as error:
                    log.debug("%s", error)
                    continue
                for index, buffer, size in zip(some, buffers, read, strict=True):
                    if size == buffer.nbytes:
                        loaded.set(index)
        return loaded

    def _grouped(
        self, keys: Sequence[ObjectKey], layouts: Sequence[Layout | None]
    ) -> dict[str, list[int]]:
        """Return the indices of keys by namespace, without keys of unknown namespaces."""
        kinds: dict[tuple[str, int, Layout], list[int]] = {}
        for index, (key, layout) in enumerate(zip(keys, layouts, strict=True)):
            if layout is not None:
                kinds.setdefault((key.model_name, key.object_group_id, layout), []).append(index)
        grouped: dict[str, list[int]] = {}
        for (model, group, layout), indices in kinds.items():
            # Each group has its own namespace; the fleet record of one group identifies the model.
            namespace = self._namespaces.of(model, layout, announce=group == 0)
            if namespace is not None:
                grouped.setdefault(namespace, []).extend(indices)
        return grouped

    def _rows(self, model_name: str | None) -> Iterator[tuple[str, ObjectRow]]:
        """Yield pairs of a model and a stored object, for one model or for all (None)."""
        places = sorted(
            (model, namespace)
            for (model, _), layout in list(self._layouts.items())
            if model_name in (None, model)
            and (namespace := self._namespaces.of(model, layout)) is not None
        )
        for model, namespace in places:
            for row in self._client.list_objects(namespace=namespace):
                yield model, row

    def _wrap_buffers(self, memory: L1MemoryDesc) -> None:
        size = memory.stable_registration_size or memory.size
        try:
            self._client.register(memory.ptr, size)
        except KVStoreError as error:
            log.warning("LMCache's memory passes through a buffer: %s", error)


class _CompletionQueue(Generic[ResultT]):
    """The results of one kind of task, and the event descriptor that signals new ones."""

    def __init__(self) -> None:
        self._notifier = create_event_notifier()
        self._changing = threading.Lock()
        self._results: dict[int, ResultT] = {}

    @property
    def descriptor(self) -> int:
        return int(self._notifier.fileno())

    def add(self, task: int, result: ResultT) -> None:
        with self._changing:
            self._results[task] = result
            if self._notifier is not None:
                self._notifier.notify()

    def take(self, task: int) -> ResultT | None:
        with self._changing:
            return self._results.pop(task, None)

    def take_all(self) -> dict[int, ResultT]:
        with self._changing:
            results, self._results = self._results, {}
        return results

    def close(self) -> None:
        with self._changing:
            self._notifier.close()
            self._notifier = None


_THERE: Final = (PutOutcome.STORED, PutOutcome.FOUND, PutOutcome.BEING_WRITTEN)


def _name(key: ObjectKey) -> bytes:
    """Return the store's key of an object. It omits the model, which the namespace implies. Only
    the last field could contain an ``@``, and LMCache forbids it there."""
    text = f"{key.chunk_hash.hex()}@{key.kv_rank:x}@{key.object_group_id}@{key.cache_salt}"
    return name_of(text)


def _key(name: bytes, model: str) -> ObjectKey | None:
    """Invert ``_name``; None: the name is a digest."""
    text = text_of(name)
    if text is None:
        return None
    chunk, rank, group, salt = text.split("@")
    return ObjectKey(bytes.fromhex(chunk), model, int(rank, 16), int(group), salt)
