"""The class that vLLM calls. It passes each call to the scheduler side, in the engine core, or to
the worker side, in a worker. See ``kvstore.connectors.vllm``."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_transfer_state import get_kv_transfer_group

from kvstore.client.client import Client
from kvstore.config.clients import choose_blocks_per_object
from kvstore.connectors.vllm.call_stack import is_part_of_several
from kvstore.connectors.vllm.config import read_config
from kvstore.connectors.vllm.groups import Groups
from kvstore.connectors.vllm.messages import (
    DraftIdentity,
    TransferCommands,
    TransferReport,
    UnfinishedTransfers,
    WorkerIdentity,
)
from kvstore.connectors.vllm.metrics import StorePromMetrics, StoreStats
from kvstore.connectors.vllm.scheduler.scheduler_logic import SchedulerLogic
from kvstore.connectors.vllm.scheduler.scheduler_side import SchedulerSide
from kvstore.connectors.vllm.weights.fingerprint import speculation
from kvstore.connectors.vllm.weights.weight_monitor import (
    LoraAdapters,
    WeightMonitor,
    draft_layers,
    identify,
)
from kvstore.connectors.vllm.worker.layout import (
    PageSplit,
    bytes_of_block,
    specs_of,
    split_of,
    wanted_layout,
    window_of,
)
from kvstore.connectors.vllm.worker.worker_parts import WorkerParts
from kvstore.connectors.vllm.worker.worker_side import (
    TRANSFER_TIMEOUT_MS,
    WorkerSide,
    client_config,
)
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
    from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log = logging.getLogger("vllm.kvstore")

FAIL_POLICY: Final = (
    "kv_load_failure_policy is 'fail', which is vLLM's default: a request whose blocks cannot be "
    "loaded, for example because a node has just died, ends with an error. With "
    '"kv_load_failure_policy": "recompute" in --kv-transfer-config it only takes longer.'
)


class KVStoreConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Keeps the KV blocks of a fleet of vLLM engines in a kvstore, by the hash of their prefix."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        """
        Raises:
            ConfigError: a wrong setting, or a model that this connector cannot serve.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        _check_name(type(self))
        transfer = vllm_config.kv_transfer_config
        self.options: dict[str, Any] = dict(transfer.kv_connector_extra_config)
        self._config = read_config(self.options)
        _check_executor(vllm_config)
        self._split = split_of(
            self._config.tp_shards, kv_cache_config,
            vllm_config.parallel_config.tensor_parallel_size,
        )  # fmt: skip
        self._groups = _groups_of(
            vllm_config, kv_cache_config, self._split, self._config.blocks_per_object
        )
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._adapters: LoraAdapters | None = None
        self._live: WeightMonitor | None = None
        if role is KVConnectorRole.SCHEDULER:
            if transfer.is_kv_consumer and transfer.kv_load_failure_policy == "fail":
                log.warning(FAIL_POLICY)
            self._scheduler = SchedulerSide(
                vllm_config, kv_cache_config, self._config, self._groups, self._split,
                self.options, _on_worker,
            )  # fmt: skip

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Return the preferred order, which is not required: see ``layout``."""
        return wanted_layout(vllm_config)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a block that is not saved is computed again."""
        return False

    @property
    def _scheduler_side(self) -> SchedulerSide:
        assert self._scheduler is not None, "the worker's connector has no scheduler side"
        return self._scheduler

    @property
    def _decisions(self) -> SchedulerLogic:
        return self._scheduler_side.decisions

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self._scheduler_side.bind_block_pool(gpu_block_pool)

    def on_new_request(self, request: Request) -> None:
        self._scheduler_side.prepare_early(request)
        self._decisions.new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        self._scheduler_side.prepare(request, num_computed_tokens)
        return self._decisions.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self._decisions.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        self._scheduler_side.audit_events()
        if scheduler_output.num_scheduled_tokens:
            self._scheduler_side.prepare()
        return self._decisions.transfer_commands(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        report = connector_output.kv_connector_worker_meta
        failed = report.failed_loads if isinstance(report, TransferReport) else ()
        self._decisions.arrived(connector_output.finished_recving or (), failed)
        if isinstance(report, TransferReport):
            self._scheduler_side.reported(report)

    def has_pending_push_work(self) -> bool:
        return self._decisions.needs_more_steps(TRANSFER_TIMEOUT_MS / 1000)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return False, so that vLLM frees the request's blocks at once (blocks being saved have
        their own reference), and the parameters to return with the request."""
        params = self._decisions.finished(request, block_ids)
        self._scheduler_side.finished(request.request_id)
        return False, params

    def take_events(self) -> Iterable[KVCacheEvent]:
        return self._scheduler_side.events.take()

    def reset_cache(self) -> bool | None:
        """Remove the store's blocks of these weights only. Pausing the engine calls this, too; then
        nothing is removed, because blocks of other weights have other namespaces."""
        return None if self._scheduler is None else self._scheduler.reset()

    @property
    def _worker_side(self) -> WorkerSide:
        assert self._worker is not None, "register_kv_caches comes first"
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        from vllm.distributed import get_pp_group, get_tp_group

        replicas = max(1, self._kv_cache_config.kv_tp_replicas)
        rank, stage = get_tp_group().rank_in_group, get_pp_group().rank_in_group
        is_producer = self._kv_transfer_config.is_kv_producer
        saves = (is_producer or self._config.save_decode) and rank % replicas == 0
        with ExitStack() as failing:
            config = client_config(self._config, TRANSFER_TIMEOUT_MS)
            client = failing.enter_context(Client(config=config))
            parts = WorkerParts(
                kv_caches, self._split.parts(stage, rank // replicas), self._vllm_config,
                self._kv_cache_config, self._split, client.device,
            )  # fmt: skip
            self._parts = parts
            self._worker = WorkerSide(
                self._config, self._groups, client, parts.of_model, saves=saves
            )
            failing.pop_all()

    def worker_identity(self, worker: Any) -> WorkerIdentity:
        """Return the worker's identity now; the scheduler side requests it between two steps.

        Args:
            worker: vLLM's worker.
        """
        parts = self._parts
        if self._adapters is None or self._live is None:
            self._adapters = LoraAdapters(worker)
            self._live = WeightMonitor(
                worker, self._vllm_config, name=self._config.model_id,
                is_split=bool(self._split.shards),
            )  # fmt: skip
            self._divide(draft_layers(self._live))
        pages = next(iter(parts.of_model.values()))
        groups = sorted(pages.block_bytes)
        hello = WorkerIdentity(pages.layout, groups, parts.names, rank=worker.rank)
        if parts.draft_layers is not None:
            layouts = sorted({draft.layout for draft in parts.of_drafts.values()})
            method = speculation(self._vllm_config)
            hello.draft = DraftIdentity(sorted(parts.draft_layers), layouts, method)
        return identify(hello, self._live, self._adapters)

    def _divide(self, layers: Collection[str] | None) -> None:
        """Separate a draft model's layers from this worker's parts, if possible."""
        parts = self._parts
        try:
            if layers is not None:
                parts.divide(layers)
        except KVStoreError as error:
            log.warning("draft_pages_not_apart error=%s", error)
        self._worker_side.divide(parts.of_model, parts.of_drafts)

    def recheck(self, worker: Any) -> tuple[int, int]:
        """Return this rank, and the number of a started check of its weights; 0: they differ."""
        assert self._live is not None, "hello comes first"
        return worker.rank, self._live.start_check()

    def finish_check(self, worker: Any) -> tuple[int, tuple[int, bool]] | None:
        """Wait for the check in progress: return this rank, and ``WeightMonitor.take_verdict``."""
        assert self._live is not None, "hello comes first"
        self._live.finish()
        verdict = self._live.take_verdict()
        return None if verdict is None else (worker.rank, verdict)

    def order_saves(self, worker: Any, orders: TransferCommands) -> None:
        """Start saves between two steps."""
        del worker
        self._worker_side.save(orders)

    def adapters(self, worker: Any) -> dict[int, dict[int, str]]:
        assert self._adapters is not None, "hello comes first"
        return {worker.rank: self._adapters.digests()}

    def unregister_kv_caches(self) -> None:
        """Stop transfers before vLLM unmaps the cache to sleep; weights may be unmapped, too. No
        transfer is in progress when this returns, and none starts before ``restore_kv_caches``."""
        if self._live is not None:
            self._live.stop()
        if self._worker is not None:
            self._worker.suspend()

    def restore_kv_caches(self) -> None:
        if self._worker is not None:
            self._worker.resume()

    def drain(self, worker: Any) -> UnfinishedTransfers:
        del worker
        return self._worker_side.drain()

    def forget_failures(self, worker: Any) -> None:
        del worker
        self._worker_side.forget_failures()

    def _transfer_commands(self) -> TransferCommands:
        orders = self._get_connector_metadata()
        assert isinstance(orders, TransferCommands)
        return orders

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Record the device event that loads wait for, before the step's forward pass is queued, in
        both model runners, with and without asynchronous scheduling. ``start_load_kv`` would be too
        late: for loads that no request of the step needs, vLLM calls it after the pass."""
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            self._worker.begin(self._transfer_commands())

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        self._worker_side.load(self._transfer_commands())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request runs only when all of its blocks are loaded."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        """Do nothing: complete blocks are saved after the step."""

    def wait_for_save(self) -> None:
        """Start saves without waiting for them."""
        self._worker_side.save(self._transfer_commands())

    @property
    def _has_several_groups(self) -> bool:
        """Whether there are several groups: then a block's number does not identify its group, and
        vLLM expects requests instead."""
        return len(self._kv_cache_config.kv_cache_groups) > 1

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        arrived, failed = self._worker_side.take_arrived()
        return KVConnectorTransferResults(
            finished_recving=arrived, failed_recving=failed if self._has_several_groups else set()
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        bad = self._worker_side.take_bad_blocks()
        return set() if self._has_several_groups else bad

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        report = self._worker_side.take_report()
        if self._adapters is not None and self._adapters.have_changed():
            report = report or TransferReport()
            report.adapters = {self._adapters.rank: self._adapters.digests()}
        if self._live is not None and (verdict := self._live.take_verdict()):
            report = report or TransferReport()
            report.verdicts = {self._live.rank: verdict}
        return report

    def get_kv_connector_stats(self) -> StoreStats | None:
        if self._scheduler is not None:
            return self._scheduler.take_stats()
        return None if self._worker is None else self._worker.take_stats()

    def shutdown(self) -> None:
        if self._scheduler is not None:
            self._scheduler.close()
        if self._live is not None:
            self._live.stop()
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


class MooncakeStoreConnector(KVStoreConnector):
    """``KVStoreConnector`` under the name of vLLM's own connector, so that a deployment changes
    only one line."""


def _check_name(kind: type) -> None:
    """Raises ConfigError if vLLM would confuse this connector with its own."""
    if kind.__name__ != "KVStoreConnector" and is_part_of_several():
        raise ConfigError(
            f"MultiConnector finds its parts by name, and {kind.__name__} is the name of vLLM's "
            f"own connector",
            advice='Name it "kv_connector": "KVStoreConnector", without kv_connector_module_path.',
        )


def _check_executor(vllm_config: VllmConfig) -> None:
    """Raises ConfigError for engines with a scheduler in each rank (torchrun). All must decide
    alike, but the replies to their lookups arrive at different times."""
    parallel = vllm_config.parallel_config
    if parallel.distributed_executor_backend == "external_launcher" and parallel.world_size > 1:
        raise ConfigError(
            "distributed_executor_backend is external_launcher: each of its "
            f"{parallel.world_size} ranks has a scheduler of its own, and their batches would "
            "differ",
            advice='Use "mp" or "ray", which have one scheduler, or one rank an engine.',
        )


def _on_worker(worker: Any, options: dict[str, Any], method: str, *arguments: Any) -> Any:
    """Call a method of the worker's connector that has these options. They identify it, because a
    worker may have several connectors."""
    found = get_kv_transfer_group()
    for connector in getattr(found, "sub_connectors", [found]):
        if isinstance(connector, KVStoreConnector) and connector.options == options:
            return getattr(connector, method)(worker, *arguments)
    return None


def _groups_of(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    split: PageSplit,
    blocks_per_object: int,
) -> Groups:
    """Return the groups that are stored.

    Args:
        blocks_per_object: 0: chosen by the size of the pages.

    Raises:
        ConfigError: a model whose blocks cannot be stored by hash.
    """
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
    from vllm.v1.kv_cache_interface import AttentionSpec, CrossAttentionSpec, MambaSpec

    scheduler_block, hashed = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    parallel = vllm_config.parallel_config
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise ConfigError("context parallelism is not supported", advice="Use tensor parallelism.")
    sizes, windows = {}, {}
    recurrent = set()
    for group_id in kv_cache_config.prefix_cacheable_group_ids:
        group = kv_cache_config.kv_cache_groups[group_id]
        for spec in specs_of(group):
            if isinstance(spec, MambaSpec):
                _check_states(spec)
                recurrent.add(group_id)
            elif not isinstance(spec, AttentionSpec) or isinstance(spec, CrossAttentionSpec):
                raise ConfigError(
                    f"layers of kind {type(spec).__name__} are not supported: what they keep does "
                    "not follow from the tokens of a prompt",
                    advice="Serve this model without the connector.",
                )
        sizes[group_id] = group.kv_cache_spec.block_size
        if window := window_of(group):
            windows[group_id] = window
    if not sizes:
        raise ConfigError("this model has no KV cache whose blocks can be shared by hash")
    is_plain = not (recurrent or windows)
    is_plain &= {*sizes.values(), hashed} == {scheduler_block}
    if not blocks_per_object:
        stored = [kv_cache_config.kv_cache_groups[each] for each in sizes]
        block_bytes = max(map(bytes_of_block, stored)) // split.each
        blocks_per_object = choose_blocks_per_object(hashed, block_bytes) if is_plain else 1
    if blocks_per_object > 1 and not is_plain:
        raise ConfigError(
            f"blocks_per_object={blocks_per_object}: objects of several blocks are for models with "
            "full attention and one block size only",
            advice="Leave blocks_per_object out.",
            key="blocks_per_object",
        )
    return Groups(
        hash_block_tokens=hashed,
        scheduler_block_tokens=scheduler_block,
        block_tokens=sizes,
        recurrent=frozenset(recurrent),
        windows=windows,
        blocks_per_object=blocks_per_object,
    )


def _check_states(spec: MambaSpec) -> None:
    """Raises ConfigError for recurrent layers whose states vLLM does not offer."""
    if spec.mamba_cache_mode != "align":
        raise ConfigError(
            f"the states of this model's recurrent layers cannot be shared with mamba_cache_mode "
            f"{spec.mamba_cache_mode!r}",
            advice="Start vLLM with --mamba-cache-mode align, and with prefix caching.",
        )
