"""The namespace of an engine's chunks, in which equal keys mean equal bytes.

A chunk's key covers only its tokens. The namespace covers the rest, with
``kvstore.connectors.vllm``: the live weights on all workers, configuration, dtypes, hash algorithm
and seed; and vLLM's layout of a chunk.
"""

from __future__ import annotations

import logging
from typing import Any, Final

from vllm.v1.kv_offload.base import OffloadingSpec

from kvstore.calls.fleet_records import FleetRecord
from kvstore.client.client import Client
from kvstore.connectors.common.fingerprint import digest
from kvstore.connectors.vllm.call_stack import callers
from kvstore.connectors.vllm.messages import WorkerIdentity
from kvstore.connectors.vllm.scheduler import fingerprint_tracker
from kvstore.connectors.vllm.scheduler.engine_core import EngineCoreAccess
from kvstore.connectors.vllm.weights import fingerprint
from kvstore.connectors.vllm.weights.weight_monitor import WeightMonitor, identify
from kvstore.limits import of_tenant
from kvstore.runtime.host import host_id

log = logging.getLogger("vllm.kvstore")

ENGINE: Final = "vllm-offloading"
FORMAT: Final = 1
"""Version of keys, namespaces and descriptions. Each change increments it."""

NO_CORE: Final = (
    "the tier was not created by vLLM's engine core, and cannot ask the workers for their weights. "
    '"model_id" names them instead: give equal names only to equal weights'
)
ADAPTERS: Final = (
    "LoRA adapters are enabled: a chunk's key has the name of an adapter, and not its weights. "
    "KVStoreConnector supports adapters"
)
HOSTS: Final = (
    "its workers are on several hosts, or in containers with a /dev/shm of their own: the pool of "
    "this process does not hold their blocks"
)
NOT_RESET: Final = (
    "the weights have changed since the caches were reset, which may hold blocks of other weights. "
    "No chunk is loaded or saved until reset_prefix_cache(reset_connector=True)"
)


def hello(worker: Any, model_id: str) -> WorkerIdentity:
    """Return a worker's identity. vLLM calls this on each worker, and pickles it by name."""
    hello = WorkerIdentity("", [], [""], rank=worker.rank, host=host_id())
    return identify(hello, WeightMonitor(worker, worker.vllm_config, name=model_id))


class TierNamespace(fingerprint_tracker.FingerprintTracker):
    """See the module. For the scheduler's thread; any thread may read ``namespace``."""

    def __init__(
        self, client: Client, spec: OffloadingSpec, chunk_bytes: int, *, model_id: str
    ) -> None:
        """
        Args:
            chunk_bytes: bytes of a chunk, which is a row in vLLM's pool.
            model_id: the operator's name for the weights; "": use their digest.
        """
        config = spec.config
        self._tenant = client.config.tenant
        self.is_used = False
        """Whether vLLM's caches may hold blocks of the current weights, since their last reset."""
        self._is_mixed = False
        """Whether vLLM's caches may hold blocks of several weights, since their last reset."""
        models: tuple[str, ...] = (config.model.name,)
        description = _chunks(spec, chunk_bytes)
        chained = {group.group_id for group in config.groups}
        connector: Any = next(
            (caller for caller in callers() if hasattr(caller, "_vllm_config")), None
        )
        vllm_config: Any = getattr(connector, "_vllm_config", None)
        if connector is not None:
            caches = connector._kv_cache_config
            models = fingerprint.models_of(vllm_config)
            description |= fingerprint.describe(vllm_config, caches)
            kinds = [type(group.kv_cache_spec).__mro__ for group in caches.kv_cache_groups]
            full = [any(each.__name__ == "FullAttentionSpec" for each in kind) for kind in kinds]
            chained = {group for group in chained if full[group]}
        self.chunk_tokens = {
            group.group_id: group.tokens_per_block * config.cache.blocks_per_chunk
            for group in config.groups
            if group.group_id in chained
        }
        """Tokens per chunk of cache groups that attend to all tokens: their chunks are chains."""
        core = EngineCoreAccess.from_call_stack()
        engine = FleetRecord(ENGINE, models, "", (), description)
        super().__init__(client, core, engine, model_id=model_id, what="chunks")
        if not model_id if core is None else connector is None:
            self.switch_off(NO_CORE)
        elif vllm_config is not None and not vllm_config.cache_config.enable_prefix_caching:
            self.switch_off(fingerprint_tracker.NO_PREFIX_CACHING)
        elif vllm_config is not None and vllm_config.lora_config is not None:
            self.switch_off(ADAPTERS)
        if core is not None:
            core.watch(weights=self.invalidate, adapters=lambda: None)
        self.learn()

    @property
    def namespace(self) -> str:
        """The namespace of the chunks; "": no chunk is loaded or saved now."""
        return self._namespace(self.fingerprint)

    def reset(self) -> None:
        """Handle a reset of vLLM's caches: from now on they hold only blocks of the weights that
        the engine has when it computes again."""
        self.invalidate()
        self.is_used = self._is_mixed = False

    def learn(self) -> None:
        """Request the workers' weights, between two steps, if these may have changed."""
        if not self.is_outdated or (self._core is not None and self._core.is_paused):
            return
        self.is_outdated = False
        if self._is_mixed:
            return
        hellos = [] if self._core is None else self.start(hello, self._model_id)
        if {each.host for each in hellos} - {host_id()}:
            self.switch_off(HOSTS)
        record = None if self.is_off else self.take(hellos)
        if record is None:
            return
        if self.last and self.is_used:
            self._is_mixed = True
            log.warning("weights_changed: %s", NOT_RESET)
        else:
            self.move(record._replace(namespaces=(self._namespace(record.fingerprint),)))

    def _namespace(self, fingerprint: str) -> str:
        """Return the namespace; ``all``, because a row of vLLM's pool holds the parts of all
        ranks."""
        return of_tenant(self._tenant, f"{ENGINE}/{fingerprint}/all") if fingerprint else ""


def _chunks(spec: OffloadingSpec, chunk_bytes: int) -> dict[str, Any]:
    """Return vLLM's layout of a chunk, as plain JSON values."""
    config = spec.config
    parallel = config.parallel
    layers = [
        [group.group_id, group.tokens_per_block, *group.layer_names] for group in config.groups
    ]
    return {
        "tier_format": FORMAT,
        "vllm": fingerprint.RELEASE,
        "chunk_bytes": chunk_bytes,
        "chunk_blocks": config.cache.blocks_per_chunk,
        "chunk_dtype": config.model.dtype,
        "chunk_layers": digest(layers)[:16],
        "chunk_layout": str(config.kv_cache_layout),
        "hash_tokens": config.cache.tokens_per_hash,
        "worker_block_bytes": config.worker_kv_bytes_per_block,
        "workers": [
            parallel.world_size, parallel.tp_size, parallel.pp_size, parallel.pcp_size,
            parallel.dcp_size,
        ],
        "is_canonical": config.canonical_layout,
        "is_replicated": config.replicated_layout,
    }  # fmt: skip
