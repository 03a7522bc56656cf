"""What vLLM calls, handed to the half that this process has. See ``kvstore.connectors.vllm``."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from kvstore.client.asking import Match
from kvstore.client.sync import Client
from kvstore.config import ConnectorConfig
from kvstore.connectors.vllm import fingerprint
from kvstore.connectors.vllm.config import read_config
from kvstore.connectors.vllm.events import Events, audit
from kvstore.connectors.vllm.groups import Groups
from kvstore.connectors.vllm.lookups import Lookups
from kvstore.connectors.vllm.messages import Hello, Orders, Report, namespace
from kvstore.connectors.vllm.metrics import StorePromMetrics, StoreStats
from kvstore.connectors.vllm.pages import pages_of, survey
from kvstore.connectors.vllm.scheduler import SchedulerHalf
from kvstore.connectors.vllm.worker import WorkerHalf, client_config
from kvstore.errors import ConfigError, KVStoreError

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log = logging.getLogger("vllm.kvstore")

LOOKUP_TIMEOUT_MS: Final = 200
"""Of one question to the master, at least. The scheduler does not wait; a breaker counts it."""

ANNOUNCE_PAUSE_S: Final = 5.0
RESET_TIMEOUT_S: Final = 30.0
ANNOUNCE_EVERY_S: Final = 30.0
"""Masters restart and caches evict; who looks for us should find us."""

FAIL_POLICY: Final = (
    "kv_load_failure_policy is 'fail', which is vLLM's default: a request whose blocks cannot be "
    "loaded, because a node has just died, say, ends with an error. Put "
    '"kv_load_failure_policy": "recompute" into --kv-transfer-config, and it only takes longer.'
)


class MooncakeStoreConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Keeps the KV blocks of a fleet of vLLM engines in a kvstore, by the hash of their prefix."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        """
        Raises:
            ConfigError: a wrong setting, or a model that this connector cannot serve.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._config = read_config(transfer.kv_connector_extra_config)
        self._groups = _groups_of(vllm_config, kv_cache_config)
        self._scheduler: _SchedulerRole | None = None
        self._worker: WorkerHalf | None = None
        self._hello: Hello | None = None
        if role is KVConnectorRole.SCHEDULER:
            if transfer.is_kv_consumer and transfer.kv_load_failure_policy == "fail":
                log.warning(FAIL_POLICY)
            self._scheduler = _SchedulerRole(
                vllm_config, kv_cache_config, self._config, self._groups
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a block that is not saved is computed again."""
        return False

    # --- scheduler ----------------------------------------------------------------------------

    @property
    def _half(self) -> SchedulerHalf:
        assert self._scheduler is not None, "this is the worker's"
        return self._scheduler.half

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        assert self._scheduler is not None
        self._scheduler.workers_are(metadata)

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self._half.bind_block_pool(gpu_block_pool)

    def on_new_request(self, request: Request) -> None:
        self._half.new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._half.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self._half.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        assert self._scheduler is not None
        self._scheduler.audit_events()
        return self._half.orders(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, Report):
            self._half.reported(report)

    def has_pending_push_work(self) -> bool:
        return self._half.has_pinned

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Blocks that are being saved have a reference of their own: the request's can go."""
        return False, self._half.finished(request)

    def take_events(self) -> Iterable[KVCacheEvent]:
        assert self._scheduler is not None
        return self._scheduler.events.take()

    def reset_cache(self) -> bool | None:
        """Remove what the store has of this model, and of no other."""
        return None if self._scheduler is None else self._scheduler.reset()

    # --- worker -------------------------------------------------------------------------------

    @property
    def _mover(self) -> WorkerHalf:
        assert self._worker is not None, "register_kv_caches comes first"
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        from vllm.distributed import get_pp_group, get_tp_group

        geometry = survey(kv_caches, self._kv_cache_config)
        pages = pages_of(geometry)
        replicas = max(1, self._kv_cache_config.kv_tp_replicas)
        rank, stage = get_tp_group().rank_in_group, get_pp_group().rank_in_group
        part = f"p{stage}t{rank // replicas}"
        self._hello = Hello(pages.layout, sorted(geometry.pages), part)
        is_producer = self._kv_transfer_config.is_kv_producer
        saves = (is_producer or self._config.save_decode) and rank % replicas == 0
        self._worker = WorkerHalf(self._config, self._groups, pages, part, saves=saves)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self._hello

    def _orders(self) -> Orders:
        orders = self._get_connector_metadata()
        assert isinstance(orders, Orders)
        return orders

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        self._mover.load(self._orders())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request runs when all of its blocks have arrived."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        """Nothing: blocks are saved whole, after the step."""

    def wait_for_save(self) -> None:
        """Orders saves; waits for none."""
        self._mover.save(self._orders())

    @property
    def _has_several_groups(self) -> bool:
        """Then a block's number says not which group's it is, and vLLM wants requests instead."""
        return len(self._kv_cache_config.kv_cache_groups) > 1

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        arrived, failed = self._mover.take_arrived()
        return KVConnectorTransferResults(
            finished_recving=arrived, failed_recving=failed if self._has_several_groups else set()
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        bad = self._mover.take_bad_blocks()
        return set() if self._has_several_groups else bad

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._mover.take_report()

    # --- both ---------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> StoreStats | None:
        if self._scheduler is not None:
            return self._scheduler.take_stats()
        return None if self._worker is None else self._worker.take_stats()

    def shutdown(self) -> None:
        if self._scheduler is not None:
            self._scheduler.close()
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> StoreStats | None:
        return StoreStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: VllmConfig, metric_types: dict[Any, Any], labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> StorePromMetrics:  # fmt: skip
        return StorePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


class _SchedulerRole:
    """The scheduler's half, and what it needs outside: clients, the lookup thread, the fleet."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        config: ConnectorConfig,
        groups: Groups,
    ) -> None:
        transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
        self._vllm_config = vllm_config
        self._config = config
        self._groups = groups
        self._description = fingerprint.describe(vllm_config, kv_cache_config, config.model_id)
        self._namespaces: dict[int, list[str]] = {}
        self._client = Client(
            config=client_config(config, max(LOOKUP_TIMEOUT_MS, config.lookup_deadline_ms))
        )
        self._patient = Client(config=client_config(config, 5_000))
        events = vllm_config.kv_events_config
        self.events = Events(groups, wanted=bool(events and events.enable_kv_cache_events))
        self._lookups = Lookups(
            self._ask, groups,
            deadline_s=config.lookup_deadline_ms / 1000,
            writers_wait_s=config.writers_wait_ms / 1000,
        )  # fmt: skip
        self.half = SchedulerHalf(
            config, groups, self._lookups, self.events,
            loads=transfer.is_kv_consumer,
            saves=transfer.is_kv_producer or config.save_decode,
            workers=parallel.world_size,
        )  # fmt: skip
        self._auditing: Future[list[tuple[int, bytes]]] | None = None
        self._told: set[str] = set()
        self._closed = False
        for warning in fingerprint.hash_warnings(self._description):
            log.warning("FLEET: %s", warning)

    def workers_are(self, hellos: Mapping[tuple[int, int], Any]) -> None:
        mark = fingerprint.fingerprint(self._description, hellos)
        for hello in hellos.values():
            for group in hello.groups:
                names = self._namespaces.setdefault(group, [])
                name = namespace(mark, group, hello.part)
                if name not in names:
                    names.append(name)
        missing = self._groups.block_tokens.keys() - self._namespaces.keys()
        if missing:
            raise ConfigError(f"no worker holds a layer of cache groups {sorted(missing)}")
        self.half.fingerprint = mark
        self._lookups.start(self._namespaces, self._announce)

    def _ask(self, keys: Sequence[bytes], namespaces: Sequence[str]) -> Sequence[Match]:
        return self._client.matches(keys, namespaces=namespaces)

    def _announce(self) -> float:
        """Leave our description in the store, and warn of others; returns when to do it again. On
        the lookups' thread."""
        mark = self.half.fingerprint
        model = self._vllm_config.model_config
        served = model.served_model_name
        models = list(served) if isinstance(served, list | tuple) else [served or model.model]
        names = [name for names in self._namespaces.values() for name in names]
        try:
            warnings = fingerprint.Fleet(self._patient).announce(
                models, mark, self._description, names,
                self._groups.align_tokens, self._groups.hash_block_tokens,
            )  # fmt: skip
            self._client.exists(mark)  # connects, so that the first lookup need not
        except KVStoreError as error:
            log.warning("fleet_not_announced reason=%s", error)
            return ANNOUNCE_PAUSE_S
        if not self._told:
            log.info("fleet_joined fingerprint=%s", mark)
        for warning in warnings:
            if warning not in self._told:
                log.warning("FLEET: %s", warning)
        self._told.update(("joined", *warnings))
        return ANNOUNCE_EVERY_S

    def audit_events(self) -> None:
        """Ask now and then what the store has lost; called in every step, waits for nothing."""
        now = time.monotonic()
        if self._auditing is not None:
            if not self._auditing.done():
                return
            if self._auditing.exception() is None:
                self.events.gone(self._auditing.result())
            self._auditing = None
        if blocks := self.events.to_audit(now):
            self._auditing = self._lookups.errand(
                lambda: audit(blocks, self._namespaces, self._there)
            )

    def _there(self, keys: Sequence[bytes], name: str) -> Sequence[bool]:
        return self._client.exists_many(keys, namespace=name)

    def reset(self) -> bool:
        def clear() -> None:
            for names in self._namespaces.values():
                for name in names:
                    self._patient.clear(name)

        self.half.reset()
        try:
            self._lookups.errand(clear).result(RESET_TIMEOUT_S)
        except (KVStoreError, TimeoutError) as error:
            log.warning("reset_failed error=%s", error)
            return False
        self.half.reset()
        self.events.cleared()
        return True

    def take_stats(self) -> StoreStats:
        stats = StoreStats()
        for counters in (self.half.take_counters(), self._lookups.take_counters()):
            for name, number in counters.items():
                stats.count(name, number)
        times = self._lookups.take_latencies_us()
        stats.count("lookups", len(times))
        for microseconds in times:
            stats.time("lookup_us", microseconds)
        stats.gauge("pinned_blocks", self.half.pinned_blocks)
        stats.gauge("breaker_open", int(self._lookups.breaker.is_open(time.monotonic())))
        return stats

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._client.close()
            self._patient.close()
            self._lookups.close()


def _groups_of(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Groups:
    """Raises ConfigError for models whose blocks cannot be kept by hash."""
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
    from vllm.v1.kv_cache_interface import AttentionSpec, UniformTypeKVCacheSpecs

    align, hashed = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    parallel = vllm_config.parallel_config
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise ConfigError("context parallelism is not supported", advice="Use tensor parallelism.")
    sizes = {}
    for group_id in kv_cache_config.prefix_cacheable_group_ids:
        spec = kv_cache_config.kv_cache_groups[group_id].kv_cache_spec
        inner = [spec]
        if isinstance(spec, UniformTypeKVCacheSpecs):
            inner = list(spec.kv_cache_specs.values())
        for each in inner:
            if not isinstance(each, AttentionSpec):
                raise ConfigError(
                    f"layers of kind {type(each).__name__} are not supported: their state is no "
                    "block of tokens",
                    advice="Serve this model without the connector.",
                )
        sizes[group_id] = spec.block_size
    if not sizes:
        raise ConfigError("this model has no cache that can be shared by hash")
    return Groups(hash_block_tokens=hashed, align_tokens=align, block_tokens=sizes)
