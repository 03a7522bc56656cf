"""The class that vLLM calls; it passes calls to this process's side. See
``kvstore.connectors.vllm``."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final

from torch.nn import Module
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_transfer_state import get_kv_transfer_group

from kvstore.client.flows.asking import Match
from kvstore.client.sync import Client
from kvstore.config import ConnectorConfig
from kvstore.connectors.vllm import fingerprint
from kvstore.connectors.vllm.config import read_config
from kvstore.connectors.vllm.core import Core, before_reset, callers
from kvstore.connectors.vllm.events import Events, audit
from kvstore.connectors.vllm.groups import Groups
from kvstore.connectors.vllm.identity import Adapters, attention_of, weights_of
from kvstore.connectors.vllm.lookups import Lookups
from kvstore.connectors.vllm.messages import Drained, Hello, Orders, Report, namespace
from kvstore.connectors.vllm.metrics import StorePromMetrics, StoreStats
from kvstore.connectors.vllm.pages import pages_of, survey
from kvstore.connectors.vllm.scheduler import SchedulerSide
from kvstore.connectors.vllm.worker import WorkerSide, client_config
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
"""The least time-out of one call to the master. The scheduler does not wait for it; the breaker
counts it."""

ANNOUNCE_PAUSE_S: Final = 5.0
RESET_TIMEOUT_S: Final = 30.0
ANNOUNCE_EVERY_S: Final = 30.0
"""The announcement is repeated, because a master may restart and the store may evict it."""

NO_PREFIX_CACHING: Final = (
    "prefix caching is off. vLLM turns it off by itself if a model or its attention backend cannot "
    "continue from a cached prefix; loaded blocks would then give wrong tokens. The connector "
    "cannot tell whether vLLM or --no-enable-prefix-caching turned it off."
)
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
        self._groups = _groups_of(vllm_config, kv_cache_config)
        self._scheduler: _SchedulerRole | None = None
        self._worker: WorkerSide | None = None
        self._adapters: Adapters | None = None
        if role is KVConnectorRole.SCHEDULER:
            if transfer.is_kv_consumer and transfer.kv_load_failure_policy == "fail":
                log.warning(FAIL_POLICY)
            self._scheduler = _SchedulerRole(
                vllm_config, kv_cache_config, self._config, self._groups, self.options
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a block that is not saved is computed again."""
        return False

    # --- scheduler ----------------------------------------------------------------------------

    @property
    def _scheduler_side(self) -> SchedulerSide:
        assert self._scheduler is not None, "the worker's connector has no scheduler side"
        return self._scheduler.side

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        assert self._scheduler is not None
        self._scheduler.bind_block_pool(gpu_block_pool)

    def on_new_request(self, request: Request) -> None:
        assert self._scheduler is not None
        self._scheduler.prepare_early()
        self._scheduler_side.new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        assert self._scheduler is not None
        self._scheduler.prepare(request, num_computed_tokens)
        return self._scheduler_side.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self._scheduler_side.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        assert self._scheduler is not None
        self._scheduler.audit_events()
        if scheduler_output.num_scheduled_tokens:
            self._scheduler.prepare()
        return self._scheduler_side.orders(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._scheduler_side.arrived(connector_output.finished_recving or ())
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, Report):
            assert self._scheduler is not None
            self._scheduler.reported(report)

    def has_pending_push_work(self) -> bool:
        return self._scheduler_side.wants_steps(self._config.transfer_timeout_ms / 1000)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Returns that the request's blocks may be freed: blocks being saved have a reference of
        their own."""
        assert self._scheduler is not None
        self._scheduler.finished(request.request_id)
        return False, self._scheduler_side.finished(request)

    def take_events(self) -> Iterable[KVCacheEvent]:
        assert self._scheduler is not None
        return self._scheduler.events.take()

    def reset_cache(self) -> bool | None:
        """Removes the store's blocks of these weights, and of no other. While the engine is paused
        (pausing itself calls this) nothing is removed: blocks of other weights have other
        namespaces."""
        return None if self._scheduler is None else self._scheduler.reset()

    # --- worker -------------------------------------------------------------------------------

    @property
    def _worker_side(self) -> WorkerSide:
        assert self._worker is not None, "register_kv_caches comes first"
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        from vllm.distributed import get_pp_group, get_tp_group

        geometry = survey(kv_caches, self._kv_cache_config)
        pages = pages_of(geometry)
        replicas = max(1, self._kv_cache_config.kv_tp_replicas)
        rank, stage = get_tp_group().rank_in_group, get_pp_group().rank_in_group
        part = f"p{stage}t{rank // replicas}"
        self._layout = (pages.layout, sorted(geometry.pages), part)
        is_producer = self._kv_transfer_config.is_kv_producer
        saves = (is_producer or self._config.save_decode) and rank % replicas == 0
        self._worker = WorkerSide(self._config, self._groups, pages, part, saves=saves)

    def hello(self, worker: Any) -> Hello:
        """The worker's identity now; the scheduler side asks for it between two steps.

        Args:
            worker: vLLM's worker.
        """
        layout, groups, part = self._layout
        try:
            return self._identified(Hello(layout, groups, part, rank=worker.rank), worker)
        except Exception as error:  # raised by model code: the engine goes on without the store
            log.exception("weights_not_identified")
            return Hello(layout, groups, part, rank=worker.rank, error=repr(error))

    def _identified(self, hello: Hello, worker: Any) -> Hello:
        parallel = self._vllm_config.parallel_config
        # In a mixture of experts, engines of a data-parallel group may have different experts.
        experts = parallel.data_parallel_size == 1 and not parallel.enable_eplb
        draft = getattr(worker.model_runner, "get_draft_model", lambda: None)()
        models = {"model": worker.get_model(), "draft": draft}
        weights = weights_of(
            {name: model for name, model in models.items() if isinstance(model, Module)},
            experts=experts,
        )
        hello.weights = weights.digest
        if weights.unseen:
            log.info("weights_unseen count=%s first=%s", len(weights.unseen), weights.unseen[0])
            hello.files = fingerprint.weights_id(self._vllm_config)
        layers = self._vllm_config.compilation_config.static_forward_context
        hello.attention = attention_of(layers)
        hello.prefix_caching = bool(self._vllm_config.cache_config.enable_prefix_caching)
        if self._adapters is None:
            self._adapters = Adapters(worker)
        hello.adapters = self._adapters.digests()
        return hello

    def adapters(self, worker: Any) -> dict[int, dict[int, str]]:
        """By rank: digests of the loaded adapters."""
        assert self._adapters is not None, "hello comes first"
        return {worker.rank: self._adapters.digests()}

    def drain(self, worker: Any) -> Drained:
        """Lets transfers end; see ``WorkerSide.drain``."""
        del worker
        return self._worker_side.drain()

    def forget_failures(self, worker: Any) -> None:
        """See ``WorkerSide.forget_failures``."""
        del worker
        self._worker_side.forget_failures()

    def _orders(self) -> Orders:
        orders = self._get_connector_metadata()
        assert isinstance(orders, Orders)
        return orders

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        self._worker_side.load(self._orders())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: a request runs only when all of its blocks have arrived."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        """Does nothing: blocks are saved whole, after the step."""

    def wait_for_save(self) -> None:
        """Orders saves; does not wait for them."""
        self._worker_side.save(self._orders())

    @property
    def _has_several_groups(self) -> bool:
        """Whether there are several groups: then a block's number does not tell its group, and vLLM
        expects requests instead."""
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
            report = report or Report()
            report.adapters = {self._adapters.rank: self._adapters.digests()}
        return report

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


class MooncakeStoreConnector(KVStoreConnector):
    """``KVStoreConnector`` under the name of vLLM's own connector: a deployment changes one
    line."""


def _check_name(kind: type) -> None:
    """Raises ConfigError if vLLM would take this connector for its own."""
    if kind.__name__ == "KVStoreConnector":
        return
    if any(type(caller).__name__ == "MultiConnector" for caller in callers()):
        raise ConfigError(
            f"MultiConnector finds its parts by name, and {kind.__name__} is the name of vLLM's "
            f"own connector",
            advice='Name it "kv_connector": "KVStoreConnector", without kv_connector_module_path.',
        )


def _on_worker(worker: Any, options: dict[str, Any], method: str) -> Any:
    """Calls a method of the worker's connector that has these options: a worker may have several
    connectors."""
    found = get_kv_transfer_group()
    for each in getattr(found, "sub_connectors", [found]):
        if isinstance(each, KVStoreConnector) and each.options == options:
            return getattr(each, method)(worker)
    return None


class _SchedulerRole:
    """The scheduler side, and what it needs from outside: clients, the lookup thread, the fleet,
    and the identity of its workers."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        config: ConnectorConfig,
        groups: Groups,
        options: dict[str, Any],
    ) -> None:
        transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
        self._vllm_config = vllm_config
        self._config = config
        self._groups = groups
        self._options = options
        self._description = fingerprint.describe(vllm_config, kv_cache_config)
        self._identified: dict[str, Any] = {}
        self._first_weights = ""
        self._mark = ""
        self._left: list[str] = []
        """Former fingerprints of this engine that are still announced."""
        self._namespaces: dict[int, list[str]] = {}
        self._is_outdated = True
        """Whether the workers have to be asked for their identity."""
        self._off = ""
        """Why no block is loaded or saved; empty: blocks are."""
        self._adapters: dict[int, dict[int, str]] = {}
        self._known_adapters: dict[int, bytes] = {}
        self._asked_for: set[str] = set()
        """Requests for which the workers have been asked for adapters."""
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
        self.side = SchedulerSide(
            config, groups, self._lookups, self.events,
            loads=transfer.is_kv_consumer,
            saves=transfer.is_kv_producer or config.save_decode,
            workers=parallel.world_size,
        )  # fmt: skip
        self.side.salt = self._salt
        self._auditing: Future[list[tuple[int, bytes]]] | None = None
        self._told: set[str] = set()
        self._closed = False
        for warning in fingerprint.hash_warnings(self._description):
            log.warning("FLEET: %s", warning)
        self._core = Core.above()
        if self._core is None:
            self._switch_off(
                "the connector was not created by vLLM's engine core, and cannot ask the workers"
            )
        elif not vllm_config.cache_config.enable_prefix_caching:
            self._switch_off(NO_PREFIX_CACHING)
        else:
            self._core.watch(weights=self._outdate, adapters=self._outdate_adapters)
            self.prepare()

    # --- identity of the workers --------------------------------------------------------------

    def _switch_off(self, reason: str) -> None:
        if not self._off:
            log.warning("this engine neither loads nor saves blocks: %s", reason)
        self._off = reason
        self.side.fingerprint = ""

    def _outdate(self) -> None:
        """The weights may have changed. No block is loaded or saved until they are known again."""
        self._is_outdated = True
        self.side.fingerprint = ""

    def prepare(self, request: Request | None = None, computed: int = 0) -> None:
        """Learns the workers' identity, before any block is looked up or saved.

        Args:
            request: a request that is about to run, for which vLLM has ``computed`` tokens.
        """
        if self._is_outdated and not self._off:
            has_moved = self._identify()
            if request is not None and has_moved and computed:
                self.side.outdated(request)

    def prepare_early(self) -> None:
        """Called for a new request, before vLLM looks it up in its own prefix cache. A paused
        engine has reset that cache, and its weights may not even be in memory."""
        if self._core is not None and not self._core.is_paused:
            self.prepare()

    def _identify(self) -> bool:
        """Asks the workers for their identity; returns whether it has changed."""
        assert self._core is not None
        hellos = [each for each in self._core.ask(_on_worker, self._options, "hello") if each]
        self._is_outdated = False
        errors = [hello.error for hello in hellos if hello.error]
        if errors or not hellos:
            self._switch_off(f"its weights could not be identified: {errors[:1]}")
            return False
        if not all(hello.prefix_caching for hello in hellos):
            self._switch_off(NO_PREFIX_CACHING)
            return False
        self._take_adapters({hello.rank: hello.adapters for hello in hellos})
        weights = fingerprint.identified(self._description, hellos)["weights"]
        self._first_weights = self._first_weights or weights
        name = self._config.model_id
        if name and weights != self._first_weights:  # the name is that of the first weights
            name = f"{name}, then {weights}"
        self._identified = fingerprint.identified(self._description, hellos, name=name)
        mark = fingerprint.fingerprint(self._identified, hellos)
        if mark == self._mark:
            self.side.fingerprint = mark
            return False
        self._move(mark, hellos)
        return True

    def _move(self, mark: str, hellos: Sequence[Hello]) -> None:
        namespaces: dict[int, list[str]] = {}
        for hello in hellos:
            for group in hello.groups:
                names = namespaces.setdefault(group, [])
                name = namespace(mark, group, hello.part)
                if name not in names:
                    names.append(name)
        missing = self._groups.block_tokens.keys() - namespaces.keys()
        if missing:
            raise ConfigError(f"no worker holds a layer of cache groups {sorted(missing)}")
        before, self._mark, self._namespaces = self._mark, mark, namespaces
        if not before:
            self.side.fingerprint = mark
            self._lookups.start(namespaces, self._announce)
            return
        self._left.append(before)
        log.info("weights_changed fingerprint=%s before=%s", mark, before)
        self.side.moved(mark)
        self.events.cleared()
        self._lookups.move(namespaces)

    # --- adapters -----------------------------------------------------------------------------

    def reported(self, report: Report) -> None:
        if report.adapters:
            self._take_adapters(report.adapters)
        self.side.reported(report)

    def _take_adapters(self, by_rank: Mapping[int, dict[int, str]]) -> None:
        self._adapters.update(by_rank)
        changed = set()
        for number in {number for loaded in by_rank.values() for number in loaded}:
            salt = self._salt_of(number)
            if salt is not None:
                before = self._known_adapters.setdefault(number, salt)
                if before != salt:
                    self._known_adapters[number] = salt
                    changed.add(number)
        if changed:
            log.info("adapters_changed ids=%s", sorted(changed))
            self.side.adapters_changed(changed)

    def _salt_of(self, number: int) -> bytes | None:
        """The salt of an adapter that every worker has loaded; None: not every worker has."""
        workers = self._vllm_config.parallel_config.world_size
        loaded = [self._adapters[rank].get(number) for rank in sorted(self._adapters)]
        if len(loaded) < workers or None in loaded:
            return None
        return hashlib.sha256(repr(loaded).encode()).digest()

    def _salt(self, request: Request) -> bytes | None:
        """The salt of a request's adapter. Asks the workers at most once per request, which may be
        the first with an adapter that they have loaded."""
        number = request.lora_request.lora_int_id
        salt = self._salt_of(number)
        if salt is None and self._core is not None and request.request_id not in self._asked_for:
            self._asked_for.add(request.request_id)
            for loaded in self._core.ask(_on_worker, self._options, "adapters"):
                self._take_adapters(loaded or {})
            salt = self._salt_of(number)
        return salt

    def _outdate_adapters(self) -> None:
        self._adapters.clear()
        self._asked_for.clear()

    def finished(self, request_id: str) -> None:
        self._asked_for.discard(request_id)

    # --- the store ----------------------------------------------------------------------------

    def bind_block_pool(self, pool: BlockPool) -> None:
        self.side.bind_block_pool(pool)
        if self._core is not None:
            before_reset(pool, self._before_reset)

    def _before_reset(self) -> None:
        """Frees blocks before vLLM resets its prefix cache, for example because the weights change:
        vLLM does not reset a cache whose blocks are in use."""
        if self._off:
            return
        if self._core is not None and not self._core.is_running:
            self._free_blocks(self._core)
        self._outdate()

    def _free_blocks(self, core: Core) -> None:
        """Frees blocks of saves, and of loads under way or arrived: requests that wait for those
        loads begin anew."""
        loading = self.side.loading
        if self.side.has_pinned or loading:
            drained = [each for each in core.ask(_on_worker, self._options, "drain") if each]
            for each in drained:
                if each.report is not None:
                    self.reported(each.report)
            self.side.drained(set().union(*(each.saves for each in drained)))
            if left := set().union(*(each.loads for each in drained)):
                log.warning("loads_hang requests=%d", len(left))
                return
        try:
            core.free_waiting(loading)
        except AttributeError:  # another version of vLLM, which reports the failed reset itself
            log.exception("blocks_not_freed")
            return
        if loading:
            core.ask(_on_worker, self._options, "forget_failures")

    def _ask(self, keys: Sequence[bytes], namespaces: Sequence[str]) -> Sequence[Match]:
        return self._client.matches(keys, namespaces=namespaces)

    def _announce(self) -> float:
        """Puts this engine's description into the store, and warns of different ones; returns when
        to do so again. Runs on the lookups' thread."""
        mark = self._mark
        model = self._vllm_config.model_config
        served = model.served_model_name
        models = list(served) if isinstance(served, list | tuple) else [served or model.model]
        names = [name for names in self._namespaces.values() for name in names]
        try:
            fleet = fingerprint.Fleet(self._patient)
            while self._left:
                fleet.leave(models, self._left[0])
                self._left.pop(0)
            warnings = fleet.announce(
                models, mark, self._identified, names,
                self._groups.align_tokens, self._groups.hash_block_tokens,
            )  # fmt: skip
            self._client.exists(mark)  # connects, so that the first lookup need not
        except KVStoreError as error:
            log.warning("fleet_not_announced reason=%s", error)
            return ANNOUNCE_PAUSE_S
        if mark not in self._told:
            log.info("fleet_joined fingerprint=%s", mark)
        for warning in warnings:
            if warning not in self._told:
                log.warning("FLEET: %s", warning)
        self._told.update((mark, *warnings))
        return ANNOUNCE_EVERY_S

    def audit_events(self) -> None:
        """Asks now and then which blocks the store has lost. Called in every step; never waits."""
        now = time.monotonic()
        if self._auditing is not None:
            if not self._auditing.done():
                return
            if self._auditing.exception() is None:
                self.events.gone(self._auditing.result())
            self._auditing = None
        if blocks := self.events.to_audit(now):
            namespaces = self._namespaces
            self._auditing = self._lookups.errand(lambda: audit(blocks, namespaces, self._there))

    def _there(self, keys: Sequence[bytes], name: str) -> Sequence[bool]:
        return self._client.exists_many(keys, namespace=name)

    def reset(self) -> bool | None:
        if self._off:
            return None
        assert self._core is not None
        self._outdate()
        self.side.reset()
        if self._core.is_paused:
            return True
        self.prepare()
        names = [name for names in self._namespaces.values() for name in names]

        def clear() -> None:
            for name in names:
                self._patient.clear(name)

        try:
            self._lookups.errand(clear).result(RESET_TIMEOUT_S)
        except (KVStoreError, TimeoutError) as error:
            log.warning("reset_failed error=%s", error)
            return False
        self.side.reset()
        self.events.cleared()
        return True

    def take_stats(self) -> StoreStats:
        stats = StoreStats()
        for counters in (self.side.take_counters(), self._lookups.take_counters()):
            for name, number in counters.items():
                stats.count(name, number)
        times = self._lookups.take_latencies_us()
        stats.count("lookups", len(times))
        for microseconds in times:
            stats.time("lookup_us", microseconds)
        stats.gauge("pinned_blocks", self.side.pinned_blocks)
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
                    f"layers of kind {type(each).__name__} are not supported: their state is not a "
                    "block of tokens",
                    advice="Serve this model without the connector.",
                )
        sizes[group_id] = spec.block_size
    if not sizes:
        raise ConfigError("this model has no KV cache whose blocks can be shared by hash")
    return Groups(hash_block_tokens=hashed, align_tokens=align, block_tokens=sizes)
