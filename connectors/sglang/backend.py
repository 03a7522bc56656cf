"""``KVStoreHiCache``, the class that SGLang's cache controller calls.

The controller's threads call its methods and wait: one looks up pages (``batch_exists``), one reads
them (``batch_get``), one writes them (``batch_set``). A deadline bounds each call. A call is a miss
if the store is down, slow or full, or if an argument is wrong. Only the constructor, the
registration of pools and ``clear`` raise.

``batch_exists`` leases the pages found, so that the read after it finds them.

An object is one page of one pool. Its key is the page's hash, its parent is the page before it.
Keys of side pools (SWA, recurrent states, indexers) end with the pool's name. If a prefix
needs only the last pages of a side pool, the parent of the first is a page of the full attention.
With ``tp_lcm_size`` a page is split by heads into chunks. Each chunk is an object in its own
namespace, with the page's key, and a page is stored if all of its chunks are.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

from kvstore.calls import PutOutcome
from kvstore.calls.fleet_records import FleetRecord
from kvstore.config import ClientConfig
from kvstore.connectors.common import mooncake_config
from kvstore.connectors.common.fingerprint import fingerprint
from kvstore.connectors.common.fleet import FleetAnnouncer
from kvstore.connectors.common.guarded_client import GuardedCall, GuardedClient, client_of_an_engine
from kvstore.connectors.sglang import fingerprint as sglang_fingerprint
from kvstore.connectors.sglang.pools import Buffers, PoolPages, bytes_of
from kvstore.errors import ConfigError, KVStoreError, UsageError
from kvstore.limits import of_tenant

if TYPE_CHECKING:
    from sglang.srt.observability.metrics_collector import StorageMetrics

log = logging.getLogger("kvstore.sglang")

_OF_SGLANG: Final = frozenset((
    "backend_name", "module_path", "class_name", "interface_v1", "prefetch_threshold",
    "prefetch_timeout_base", "prefetch_timeout_per_ki_token", "hicache_storage_pass_prefix_keys",
    "tp_lcm_size", "allocator",
))  # fmt: skip
"""Keys of the extra configuration that SGLang itself reads."""

_OURS: Final = ("model_id", "job_name", "shares_versions")

_FLAT: Final = ".flat"
"""Suffix of the key of a page that SGLang passes as one tensor (without ``interface_v1``)."""

_THERE: Final = (PutOutcome.STORED, PutOutcome.FOUND, PutOutcome.BEING_WRITTEN)

ResultT = TypeVar("ResultT")


class HostPool(NamedTuple):
    """A host pool, and the names of its pages in the store."""

    pages: PoolPages
    parts: tuple[str, ...]
    """The last parts of the namespaces, one for each chunk of a page."""
    suffix: str
    """The end of each key."""

    def names(self, keys: Sequence[str]) -> list[str]:
        return [key + self.suffix for key in keys] if self.suffix else list(keys)


class KVStoreHiCache(HiCacheStorage):  # type: ignore[misc]
    """The back-end of one rank. Threads: any."""

    def __init__(
        self, storage_config: HiCacheStorageConfig, kwargs: Mapping[str, object] | None = None
    ) -> None:
        """
        Args:
            storage_config: ``extra_config`` holds settings of a client (``master``, ``cluster``,
                ``replicas``, ``transports``, ``timeout_ms`` ...) or Mooncake's keys for them
                (``mooncake_config``), and ``model_id``: the operator's name for the weights, which
                replaces the digest of their files. Weights that a trainer pushes are shared by
                engines with the same ``job_name``, or, with ``shares_versions``, by all. SGLang and
                its parts read the same dictionary: an unknown name in it is logged.
            kwargs: more arguments of SGLang's factory, which passes none at present.

        Raises:
            ConfigError: a wrong setting.
            StartupError, MasterUnreachableError: only with ``memory``.
        """
        del kwargs
        given = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in (storage_config.extra_config or {}).items()
        }
        self._config = storage_config
        self._model_id = str(given.pop("model_id", ""))
        job = str(given.pop("job_name", "")) or sglang_fingerprint.job_name()
        self._job = "" if given.pop("shares_versions", False) else job
        self._zero_copy = bool(given.get("interface_v1"))
        self._guard = GuardedClient(client_of_an_engine(**_settings(given)), log)
        self._announcer = FleetAnnouncer(self._guard.client, log)
        self._pools: dict[str, HostPool] = {}
        """By name. Besides SGLang's names, ``_FLAT`` is the main pool as SGLang's copies of it."""
        self._fingerprints: dict[sglang_fingerprint.ServedWeights, str] = {}
        self._describing = threading.Lock()
        self._of_thread = threading.local()
        self._metrics: StorageMetrics | None = None
        if storage_config.enable_storage_metrics:
            from sglang.srt.observability.metrics_collector import StorageMetrics  # slow: exporters

            self._metrics = StorageMetrics()

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Register the pool of the full attention. The first rank announces the engine.

        SGLang's start waits until the weight files are hashed: 2.3 s for 16 GB in the page cache,
        0.2 ms if this host has the digests (``kvstore.connectors.common.weight_digests``).

        Raises:
            ConfigError: pages of this layout cannot be stored, or not be split for ``tp_lcm_size``;
                or the weights cannot be identified on this host.
            InvalidArgumentError: memory that the processor cannot read.
            OSError: the model's files cannot be read.
        """
        super().register_mem_pool_host(mem_pool_host)
        config, replicated = self._config, self._config.is_mla_model
        pieces = 0 if replicated else sglang_fingerprint.pieces(config, mem_pool_host)
        if config.tp_lcm_size and not replicated and not (pieces and self._zero_copy):
            raise ConfigError(
                f"tp_lcm_size={config.tp_lcm_size}: pages of {type(mem_pool_host).__name__} in the "
                f"layout {mem_pool_host.layout} cannot be split by heads",
                advice='Choose --hicache-mem-layout page_head and "interface_v1": 1.',
                key="tp_lcm_size",
            )
        pages = PoolPages(mem_pool_host, self._guard.client, pieces=pieces or 1)
        parts = sglang_fingerprint.parts(config, pages, replicated=replicated, pieces=pieces)
        self._pools[PoolName.KV] = HostPool(pages, parts, "")
        whole = sglang_fingerprint.parts(config, pages, replicated=replicated)
        self._pools[_FLAT] = HostPool(pages, whole, _FLAT)
        log.info(
            "registered pool=kv layout=%s page_bytes=%d pieces=%d namespace=%s",
            pages.layout.get("layout"), pages.size, len(parts), self._namespace(parts[0]),
        )  # fmt: skip

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        """Register a side pool, after the pool of the full attention. Raises the same errors."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if host_pool_name == PoolName.KV:
            return
        pieces = sglang_fingerprint.pieces(self._config, host_pool)
        pages = PoolPages(host_pool, self._guard.client, pieces=pieces or 1)
        # Recurrent states, and K and V by heads, differ between ranks, even if all ranks have the
        # same pages of the full attention. SGLang's controller decides in the same way.
        replicated = (
            self._config.is_mla_model
            and host_pool_name != PoolName.MAMBA
            and not isinstance(host_pool, MHATokenToKVPoolHost)
        )
        full = self._pools[PoolName.KV].pages
        parts = sglang_fingerprint.parts(self._config, full, replicated=replicated, pieces=pieces)
        self._pools[host_pool_name] = HostPool(pages, parts, f".{host_pool_name}-{pages.geometry}")
        log.info("registered pool=%s page_bytes=%d", host_pool_name, pages.size)

    def batch_exists(
        self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        """Return the number of leading pages that are stored. They are leased."""
        del extra_info  # its prefix keys: a page counts whether or not its ancestors are stored
        return self._bounded(lambda: self._leading(GuardedCall(self._guard), keys), 0)

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Return the prefixes that all pools can serve. Pages found are leased."""
        del extra_info
        return self._bounded(
            lambda: self._restorable(GuardedCall(self._guard), keys, pool_transfers or []),
            PoolTransferResult(0, {}, []),
        )

    def exists(self, key: str) -> bool:
        """Return whether a page put by ``set`` is stored."""
        return self._bounded(
            lambda: self._found_of(GuardedCall(self._guard), [key], [_FLAT])[_FLAT][0], False
        )

    def _leading(self, deadline: GuardedCall, keys: Sequence[str]) -> int:
        if not self._pools[PoolName.KV].pages.size:
            return len(keys)  # the pool only counts pages: side pools hold the bytes
        pool = self._pools[PoolName.KV if self._zero_copy else _FLAT]
        leading = len(keys)
        for part in pool.parts:
            names = pool.names(keys[:leading])
            if not names:
                break
            # A chain is matched in O(log n). The rest may be stored without its ancestors.
            leading = deadline.run(partial(self._match, self._namespace(part), names))
            leading += _run(self._found(deadline, part, names[leading:]))
        return leading

    def _match(self, namespace: str, names: Sequence[str], timeout_ms: int) -> int:
        client = self._guard.client
        return client.match_prefix(names, namespace=namespace, timeout_ms=timeout_ms)

    def _restorable(
        self, deadline: GuardedCall, keys: Sequence[str], transfers: Sequence[PoolTransfer]
    ) -> PoolTransferResult:
        leading = self._leading(deadline, keys)
        hits = {PoolName.KV: leading} if leading else {}
        ends = set(range(1, leading + 1))
        there = self._found_of(deadline, keys[:leading], [transfer.name for transfer in transfers])
        for transfer in transfers:
            found = there[transfer.name]
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                able = set(range(1, _run(found) + 1))
            elif transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                able = _windows(found, max(1, len(transfer.keys or ())))
            else:
                continue  # BLOCK_GROUPS: the full pages in another form, which limit nothing
            if able:
                hits[transfer.name] = max(able)
            ends &= able
        return PoolTransferResult(max(ends, default=0), hits, sorted(ends))

    def _found_of(
        self, deadline: GuardedCall, keys: Sequence[str], names: Sequence[str]
    ) -> dict[str, list[bool]]:
        """Return per pool which of its pages are stored, with one call per namespace."""
        pools: dict[str, list[str]] = {}
        for name in names:
            for part in self._pools[name].parts:
                pools.setdefault(part, []).append(name)
        there = {name: [True] * len(keys) for name in names}
        for part, of_part in pools.items():
            wanted = [each for name in of_part for each in self._pools[name].names(keys)]
            found = iter(self._found(deadline, part, wanted))
            for name in of_part:
                there[name] = [so_far & next(found) for so_far in there[name]]
        return there

    def _found(self, deadline: GuardedCall, part: str, names: Sequence[str]) -> list[bool]:
        return [size is not None for size in deadline.lookup(names, self._namespace(part))]

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Read pages into the host pool. Return per page whether it was read; a page that was not
        read has undefined bytes."""
        transfer = PoolTransfer(PoolName.KV, host_indices, keys=keys)
        return self.batch_get_v2([transfer], extra_info)[PoolName.KV]

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        del extra_info
        deadline = GuardedCall(self._guard)
        return {
            transfer.name: self._bounded(
                partial(self._read, deadline, transfer), [False] * len(transfer.keys or ())
            )
            for transfer in transfers
        }

    def batch_get(
        self,
        keys: list[str],
        target_locations: Sequence[torch.Tensor] | None = None,
        target_sizes: object = None,
    ) -> list[torch.Tensor | None]:
        """Read pages put by ``batch_set``, each into its tensor. None is a miss."""
        del target_sizes
        targets = list(target_locations or ())
        if len(targets) != len(keys):
            return [None] * len(keys)

        def read() -> list[bool]:
            buffers = [[bytes_of(target)] for target in targets]
            return self._get(GuardedCall(self._guard), self._pools[_FLAT], keys, buffers)

        there = self._bounded(read, [False] * len(keys))
        return [target if is_there else None for target, is_there in zip(targets, there)]

    def get(
        self, key: str, target_location: Any = None, target_sizes: object = None
    ) -> torch.Tensor | None:
        del target_sizes
        return self.batch_get([key], [target_location])[0]

    def _read(self, deadline: GuardedCall, transfer: PoolTransfer) -> list[bool]:
        pool, keys = self._pools[transfer.name], transfer.keys or []
        if not pool.pages.size or not keys:
            return [True] * len(keys)
        targets = pool.pages.targets(transfer.host_indices, len(keys))
        there = self._get(deadline, pool, keys, targets.buffers)
        for page, is_there in enumerate(there):
            if is_there:
                targets.arrived(page)
        return there

    def _get(
        self, deadline: GuardedCall, pool: HostPool, keys: Sequence[str], buffers: Buffers
    ) -> list[bool]:
        start, client = time.monotonic(), self._guard.client
        there, names = [True] * len(keys), pool.names(keys)
        for part, pieces in zip(pool.parts, _pieces(buffers, len(pool.parts))):
            get = partial(client.get_into, names, pieces, namespace=self._namespace(part))
            sizes = list(map(_size, pieces))
            found = deadline.run(lambda ms, get=get: get(timeout_ms=ms), size=sum(sizes))  # type: ignore[misc]
            there = [
                so_far and read == size
                for so_far, read, size in zip(there, found, sizes, strict=True)
            ]
        if (metrics := self._metrics) is not None:
            moved = sum(_size(page) for page, is_there in zip(buffers, there) if is_there)
            metrics.prefetch_pgs.append(sum(there))
            metrics.prefetch_bandwidth.append(_gib_per_s(moved, start))
        return there

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Put pages. Return per page whether the store has it. A full store takes the first
        pages."""
        transfer = PoolTransfer(PoolName.KV, host_indices, keys=keys)
        return self.batch_set_v2([transfer], extra_info)[PoolName.KV]

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        deadline = GuardedCall(self._guard)
        return {
            transfer.name: self._bounded(
                partial(self._write, deadline, transfer, extra_info),
                [False] * len(transfer.keys or ()),
            )
            for transfer in transfers
        }

    def batch_set(
        self,
        keys: list[str],
        values: Sequence[torch.Tensor] | None = None,
        target_locations: object = None,
        target_sizes: object = None,
    ) -> bool:
        """Put pages, one tensor each. Return whether the store has all of them."""
        del target_locations, target_sizes
        tensors = list(values or ())
        if len(tensors) != len(keys):
            return False

        def write() -> list[bool]:
            copies = [[bytes_of(tensor.contiguous())] for tensor in tensors]
            return self._put(GuardedCall(self._guard), self._pools[_FLAT], keys, copies, None)

        return all(self._bounded(write, [False]))

    def set(
        self,
        key: str,
        value: Any = None,
        target_location: object = None,
        target_sizes: object = None,
    ) -> bool:
        return self.batch_set([key], [value], target_location, target_sizes)

    def _write(
        self,
        deadline: GuardedCall,
        transfer: PoolTransfer,
        extra_info: HiCacheStorageExtraInfo | None,
    ) -> list[bool]:
        pool, full = self._pools[transfer.name], self._pools[PoolName.KV]
        keys = transfer.keys or []
        if not pool.pages.size or not keys:
            return [True] * len(keys)
        parent: str | None = None
        if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:  # no parent page in this pool
            if full.pages.size and pool.parts == full.parts and self._zero_copy:
                parent = keys[0] + full.suffix
        # SGLang passes the ancestors only with hicache_storage_pass_prefix_keys.
        elif extra_info is not None and extra_info.prefix_keys:
            parent = extra_info.prefix_keys[-1] + pool.suffix
        sources = pool.pages.sources(transfer.host_indices, len(keys))
        return self._put(deadline, pool, keys, sources, parent)

    def _put(
        self,
        deadline: GuardedCall,
        pool: HostPool,
        keys: Sequence[str],
        values: Buffers,
        parent: str | None,
    ) -> list[bool]:
        start, client = time.monotonic(), self._guard.client
        there, written, names = [True] * len(keys), [False] * len(keys), pool.names(keys)
        for part, pieces in zip(pool.parts, _pieces(values, len(pool.parts))):
            put = partial(
                client.put_chain, names, pieces, namespace=self._namespace(part), parent=parent,
                partial=True,
            )  # fmt: skip
            size = sum(map(_size, pieces))
            outcomes = deadline.run(lambda ms, put=put: put(timeout_ms=ms), size=size)  # type: ignore[misc]
            for page, outcome in enumerate(outcomes):
                there[page] &= outcome in _THERE
                written[page] |= outcome is PutOutcome.STORED
        if (metrics := self._metrics) is not None and any(written):
            moved = sum(map(_size, values)) * sum(written) // len(keys)
            metrics.backup_pgs.append(sum(written))
            metrics.backup_bandwidth.append(_gib_per_s(moved, start))
        return there

    def get_stats(self) -> StorageMetrics | None:
        """Return pages and GiB/s since the last call; None without ``--enable-metrics``."""
        taken = self._metrics
        if taken is not None:
            self._metrics = type(taken)()
        return taken

    def clear(self) -> None:
        """Remove this rank's pages of this model from the store, for all engines. SGLang's
        scheduler calls it, and reports an exception as a failure.

        Raises:
            KVStoreError: the store did not answer; some pages may remain.
        """
        self._described(sglang_fingerprint.live(self._config.model_name))
        for found in list(self._fingerprints.values()):  # including weights that were served before
            for part in sorted({part for pool in self._pools.values() for part in pool.parts}):
                self._guard.client.clear(self._namespace_of(found, part))

    def close(self) -> None:
        """Close the client; later calls are misses. Idempotent."""
        self._announcer.stop()
        self._guard.client.close()
        self._announcer.join()

    def _namespace(self, part: str) -> str:
        """Return the namespace of the calling thread's pages, by the weights that computed them.

        SGLang can replace its weights while this back-end is attached. It then flushes its caches,
        which ends the controller's threads and starts new ones. A thread that has seen the change
        may still hold pages of the old weights, so its calls are misses.

        Raises:
            KVStoreError: the weights have changed.
        """
        now = sglang_fingerprint.live(self._config.model_name)
        seen = getattr(self._of_thread, "weights", None)
        if seen is None:
            self._of_thread.weights = seen = now
        if seen != now:
            raise KVStoreError("the weights have changed")
        return self._namespace_of(self._fingerprints.get(now) or self._described(now), part)

    def _namespace_of(self, found: str, part: str) -> str:
        """``found``: the fingerprint of the engine that has the pages."""
        return of_tenant(self._guard.client.config.tenant, f"sglang/{found}/{part}")

    def _described(self, weights: sglang_fingerprint.ServedWeights) -> str:
        """Return the fingerprint of these weights, which the first rank announces. Hashes their
        files: calls of SGLang's threads wait as in ``register_mem_pool_host``, once after an update
        of the weights."""
        config, full = self._config, self._pools[PoolName.KV]
        with self._describing:
            if weights not in self._fingerprints:
                described = sglang_fingerprint.describe(
                    config, full.pages, weights, model_id=self._model_id, job=self._job,
                    zero_copy=self._zero_copy,
                )  # fmt: skip
                found = fingerprint(described)
                ranks = (config.tp_rank, config.pp_rank, config.attn_cp_rank, config.dp_rank)
                if not any(ranks):
                    models = (weights.path or self._model_id or "unknown",)
                    places = (self._namespace_of(found, full.parts[0]),)
                    self._announcer.announce(
                        FleetRecord("sglang", models, found, places, described)
                    )
                self._fingerprints[weights] = found
            return self._fingerprints[weights]

    def _bounded(self, call: Callable[[], ResultT], miss: ResultT) -> ResultT:
        """Return the result of a call, or a miss: SGLang then computes the pages."""
        try:
            return call()
        except UsageError as error:
            log.warning("call_refused reason=%s", error)
        except KVStoreError as error:
            log.debug("miss reason=%s", error)
        except Exception:  # it would end SGLang's operation, and in older releases its thread
            log.exception("call_failed")
        return miss


def _gib_per_s(size: int, start: float) -> float:
    """Return the speed of a transfer that began at ``start``."""
    return size / (1 << 30) / max(time.monotonic() - start, 1e-9)


def _settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the client settings in SGLang's extra configuration. Unknown names are logged."""
    others = {name: value for name, value in given.items() if name not in _OF_SGLANG}
    settings = mooncake_config.translate_config(others, log)
    known = ClientConfig.model_fields
    unknown = [name for name in settings if name not in known]
    mooncake_config.tell_unknown(unknown, [*known, *_OURS, *mooncake_config.MEANT], log)
    return {name: value for name, value in settings.items() if name in known}


def _run(found: Sequence[bool]) -> int:
    """Return the number of leading values that are true."""
    return next((at for at, is_there in enumerate(found) if not is_there), len(found))


def _pieces(pages: Buffers, count: int) -> list[Buffers]:
    """Return per chunk its buffers of each page."""
    size = len(pages[0]) // count if pages else 0
    return [[page[at * size : (at + 1) * size] for page in pages] for at in range(count)]


def _windows(found: Sequence[bool], window: int) -> set[int]:
    """Return the lengths of prefixes whose last ``window`` pages, or all of them, are stored."""
    ends, run = set(), 0
    for length, is_there in enumerate(found, 1):
        run = run + 1 if is_there else 0
        if run >= min(window, length):
            ends.add(length)
    return ends


def _size(buffers: Any) -> int:
    return sum(buffer.nbytes for buffer in buffers)
