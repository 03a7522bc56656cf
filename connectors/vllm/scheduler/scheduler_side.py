"""Builds the scheduler side, in the engine core, and connects its parts: decisions, client, lookup
thread, events, fleet records and the identity of the workers."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from kvstore.calls.fleet_records import FleetRecord
from kvstore.calls.hint_envelopes import EnvelopeAction
from kvstore.client.client import Client
from kvstore.client.flows.control_calls import EngineMatchResult
from kvstore.config import ConnectorConfig
from kvstore.connectors.vllm.groups import Groups
from kvstore.connectors.vllm.messages import (
    TransferCommands,
    TransferReport,
    draft_part,
    namespace,
    namespace_prefix,
)
from kvstore.connectors.vllm.metrics import StoreStats
from kvstore.connectors.vllm.scheduler.engine_core import EngineCoreAccess, before_reset
from kvstore.connectors.vllm.scheduler.event_listener import NOTHING, EventListener
from kvstore.connectors.vllm.scheduler.events import Block, BlockEvents, audit
from kvstore.connectors.vllm.scheduler.fingerprint_tracker import (
    NO_PREFIX_CACHING,
    FingerprintTracker,
)
from kvstore.connectors.vllm.scheduler.lookups import LookupThread
from kvstore.connectors.vllm.scheduler.scheduler_logic import SchedulerLogic
from kvstore.connectors.vllm.weights import fingerprint
from kvstore.connectors.vllm.worker.layout import PageSplit
from kvstore.connectors.vllm.worker.worker_side import client_config
from kvstore.connectors.vllm_media import are_names_marked
from kvstore.errors import ConfigError, KVStoreError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

log = logging.getLogger("vllm.kvstore")

LOOKUP_TIMEOUT_MS: Final = 200
"""Minimum timeout of one lookup's call to the master. The scheduler does not wait that long; the
breaker counts a call that times out as failed."""

WRITERS_WAIT_S: Final = 0.5
"""Time that a request waits for blocks that another engine is writing, instead of computing them
again; if lookups may take longer, twice their deadline."""

UNALIGNED: Final = (
    "vLLM cuts prompts into multiples of %d tokens, and keeps states of recurrent layers at "
    "multiples of %d: most prompts leave no state, and are not found. Start vLLM with "
    "--block-size %d."
)

RESET_TIMEOUT_S: Final = 30.0

Files = tuple[tuple[str, int, int, int], ...]
"""The files in a folder: name, inode, size and modification time of each."""


class SchedulerSide:
    """The scheduler side of the connector; see the module. For the scheduler's thread."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        config: ConnectorConfig,
        groups: Groups,
        split: PageSplit,
        options: dict[str, Any],
        on_worker: Callable[..., Any],
    ) -> None:
        """
        Args:
            split: split of pages for engines of other tensor-parallel sizes.
            options: this connector's options, which identify its sides on the workers.
            on_worker: called on each worker as ``on_worker(worker, options, method, *arguments)``.
                It must be a function of a module, because it is pickled by name.
        """
        transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
        self._vllm_config = vllm_config
        self._config = config
        self._groups = groups
        self._options = options
        self._on_worker = on_worker
        self._namespaces: dict[int, list[str]] = {}
        self._of_drafts: set[str] = set()
        """The namespaces of a draft model's pages."""
        self._adapters: dict[int, dict[int, str]] = {}
        self._known_adapters: dict[int, bytes] = {}
        self._numbers: dict[tuple[str, str], int] = {}
        """By name and path of an adapter: the id under which vLLM's prefix cache has its blocks."""
        self._before_loading: dict[tuple[int, str], Files] = {}
        """By id and path of an adapter: its files before the workers loaded it. If these change
        before it is loaded, they do not recur."""
        self._of_files: dict[tuple[int, str], tuple[Files, bytes]] = {}
        """By id and path of an adapter: the files that the workers have loaded, and its salt."""
        self._is_misaligned = False
        self._asked_for: set[str] = set()
        """Requests for which adapters have been requested from the workers."""
        self._client = Client(config=client_config(config, 5_000))
        self._lookup_ms = max(LOOKUP_TIMEOUT_MS, config.lookup_deadline_ms)
        self._core = EngineCoreAccess.from_call_stack()
        is_usual = groups.hash_block_tokens == groups.usual_hash_tokens
        described = fingerprint.describe(
            vllm_config, kv_cache_config, split=split,
            hash_tokens=0 if is_usual else groups.hash_block_tokens,
            blocks_per_object=groups.blocks_per_object,
        )  # fmt: skip
        engine = FleetRecord(
            "vllm", fingerprint.models_of(vllm_config), "", (), described, groups.full_tokens
        )
        self._identity = FingerprintTracker(
            self._client, self._core, engine, model_id=config.model_id, what="blocks",
            without_draft=partial(fingerprint.without_draft, described, kv_cache_config, split),
        )  # fmt: skip
        events = vllm_config.kv_events_config
        self.events = BlockEvents(groups, wanted=bool(events and events.enable_kv_cache_events))
        self._lookups = LookupThread(
            self._lookup, groups, release=self._client.release_match,
            deadline_s=config.lookup_deadline_ms / 1000,
            writers_wait_s=max(WRITERS_WAIT_S, 2 * config.lookup_deadline_ms / 1000),
        )  # fmt: skip
        self.decisions = SchedulerLogic(
            config, groups, self._identity, self._lookups, self.events,
            loads=transfer.is_kv_consumer,
            saves=transfer.is_kv_producer or config.save_decode,
            workers=parallel.world_size,
        )  # fmt: skip
        self.decisions.salt = self._salt
        self.decisions.keep = self._keep
        self.decisions.hint = self._hint
        self.decisions.are_names_marked = are_names_marked()
        self._auditing: Future[list[Block]] | None = None
        self._audited: list[Block] = []
        self._listeners: list[EventListener] = []
        """The last one listens to the current namespaces; earlier ones are ending."""
        self._closed = False
        if self._core is None:
            self._identity.switch_off(
                "the connector was not created by vLLM's engine core, and cannot ask the workers"
            )
        elif not vllm_config.cache_config.enable_prefix_caching:
            self._identity.switch_off(NO_PREFIX_CACHING)
        else:
            core = self._core
            self._lookups.is_busy = lambda: core.is_running
            self._core.watch(weights=self._identity.invalidate, adapters=self._outdate_adapters)
            self.prepare()

    def prepare(self, request: Request | None = None, computed: int = 0) -> None:
        """Update an outdated identity of the workers, before a block is looked up or saved.

        Args:
            request: a request that is about to run, for which vLLM has ``computed`` tokens.
        """
        if self._identity.is_doubted:
            self._identity.recheck(self._on_worker, self._options, "recheck")
        has_moved = self._identity.is_outdated and self._identify()
        if request is not None and (self._renumber(request) or has_moved) and computed:
            self.decisions.on_stale_prefix_cache(request)

    def prepare_early(self, request: Request) -> None:
        """As ``prepare``, for a new request, before vLLM looks it up in its own prefix cache. Skips
        a paused engine, which has reset that cache and may not have its weights in memory."""
        if self._core is not None and not self._core.is_paused:
            self.prepare(request)
        self._check_alignment()

    def _check_alignment(self) -> None:
        """Log once if vLLM's scheduler splits prompts where no state is kept. vLLM 0.32 for CPUs
        lengthens the blocks of models with recurrent layers, and then ignores it."""
        cuts, keeps = self._vllm_config.cache_config.block_size, self._groups.scheduler_block_tokens
        if self._groups.recurrent and cuts < keeps and not self._is_misaligned:
            self._is_misaligned = True
            log.warning(UNALIGNED, cuts, keeps, keeps)

    def _identify(self) -> bool:
        """Request the identity of the workers; return whether it has changed."""
        hellos = self._identity.start(self._on_worker, self._options, "worker_identity")
        if self._identity.is_off:
            return False
        self._take_adapters({hello.rank: hello.adapters for hello in hellos})
        record = self._identity.take(hellos)
        last = self._identity.last if record is None else record.fingerprint
        self._of_drafts = {
            self._namespace(last, group, draft_part(part, self._identity.draft))
            for hello in hellos if hello.draft is not None
            for group in hello.groups for part in hello.parts
        }  # fmt: skip
        if record is None:
            return False
        namespaces: dict[int, list[str]] = {}
        for hello in hellos:
            for group in hello.groups:
                names = namespaces.setdefault(group, [])
                for part in hello.parts:
                    name = self._namespace(record.fingerprint, group, part)
                    if name not in names:
                        names.append(name)
        missing = self._groups.block_tokens.keys() - namespaces.keys()
        if missing:
            raise ConfigError(f"no worker holds a layer of cache groups {sorted(missing)}")
        has_moved, self._namespaces = bool(self._identity.last), namespaces
        told = {name: record.description[name] for name in ("hash_algorithm", "none_hash")}
        self._identity.move(
            record._replace(namespaces=tuple(chain.from_iterable(namespaces.values()))),
            hash_block_size=self._groups.hash_block_tokens,
            role=self._vllm_config.kv_transfer_config.kv_role,
            **told,
        )
        if has_moved:
            self.decisions.on_fingerprint_changed()
            self.events.cleared()
            self._lookups.set_namespaces(namespaces)
        else:
            self._lookups.start(namespaces)
        if self.events.wanted:
            self._listen()
        return True

    def _namespace(self, fingerprint: str, group: int, part: str) -> str:
        return namespace(fingerprint, group, part, tenant=self._config.tenant)

    def reported(self, report: TransferReport) -> None:
        if report.adapters:
            self._take_adapters(report.adapters)
        self._identity.take_verdicts(report.verdicts)
        self.decisions.reported(report)

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
            self.decisions.adapters_changed(changed)

    def _renumber(self, request: Request) -> bool:
        """Record the id of a request's adapter. Return whether vLLM's prefix cache may have had
        blocks of another adapter with the same name and path, which are all that vLLM hashes: the
        adapter was loaded again, from files that may have been replaced."""
        if request.lora_request is None:
            return False
        number = request.lora_request.lora_int_id
        adapter = request.lora_request.lora_name, request.lora_request.lora_path
        before, self._numbers[adapter] = self._numbers.get(adapter, number), number
        known = self._known_adapters
        if before == number or (before in known and known[before] == known.get(number)):
            return False
        log.info("adapter_renumbered name=%s id=%d before=%d", adapter[0], number, before)
        self.decisions.adapters_changed({before})
        return True

    def _salt_of(self, number: int) -> bytes | None:
        """Return the salt of an adapter; None: not every worker is known to have loaded it."""
        workers = self._vllm_config.parallel_config.world_size
        loaded = [self._adapters[rank].get(number) for rank in sorted(self._adapters)]
        if len(loaded) < workers or None in loaded:
            return None
        return hashlib.sha256(repr(loaded).encode()).digest()

    def _salt(self, request: Request) -> bytes | None:
        """Return the salt of a request's adapter. If unknown, requests it from the workers, at most
        once per request: they may have loaded the adapter for this request. An adapter that they
        have dropped for lack of space keeps its salt as long as its files are the same."""
        number, path = request.lora_request.lora_int_id, request.lora_request.lora_path
        salt = self._salt_of(number)
        if salt is None and self._core is not None and request.request_id not in self._asked_for:
            self._asked_for.add(request.request_id)
            for loaded in self._core.call(self._on_worker, self._options, "adapters"):
                self._take_adapters(loaded or {})
            salt = self._salt_of(number)
        return self._remembered((number, path), salt)

    def _remembered(self, adapter: tuple[int, str], salt: bytes | None) -> bytes | None:
        """Return the salt of this adapter, if it is loaded or its files are those loaded before."""
        if salt is None:
            files = _files(adapter[1])
            self._before_loading.setdefault(adapter, files)
            loaded, before = self._of_files.get(adapter, ((), None))
            return before if files and files == loaded else None
        if files := self._before_loading.pop(adapter, ()):
            self._of_files[adapter] = files, salt
        return salt

    def _outdate_adapters(self) -> None:
        self._adapters.clear()
        self._asked_for.clear()

    def finished(self, request_id: str) -> None:
        self._asked_for.discard(request_id)

    def bind_block_pool(self, pool: BlockPool) -> None:
        self.decisions.bind_block_pool(pool)
        if self._core is not None:
            before_reset(pool, self._before_reset)

    def _before_reset(self) -> None:
        """Free blocks before vLLM resets its prefix cache, for example because the weights change:
        it does not reset a cache whose blocks are in use."""
        if self._identity.is_off:
            return
        if self._core is not None and not self._core.is_running:
            self._free_blocks(self._core)
        self._identity.require_recheck()

    def _free_blocks(self, core: EngineCoreAccess) -> None:
        """Free the blocks of saves, and of loads that are in progress or have ended. Requests that
        wait for those loads restart."""
        loading = self.decisions.loading
        if self.decisions.has_blocks_being_saved:
            told = core.call(self._on_worker, self._options, "finish_check")
            self._identity.take_verdicts(dict(verdict for verdict in told if verdict))
            orders = TransferCommands(
                self._identity.fingerprint, saves=self.decisions.take_ready_saves(),
                draft=self._identity.draft,
            )  # fmt: skip
            core.call(self._on_worker, self._options, "order_saves", orders)
        if self.decisions.has_pinned or loading:
            drained = [
                outcome for outcome in core.call(self._on_worker, self._options, "drain") if outcome
            ]
            for outcome in drained:
                if outcome.report is not None:
                    self.reported(outcome.report)
            self.decisions.drained(set().union(*(outcome.saves for outcome in drained)))
            if left := set().union(*(outcome.loads for outcome in drained)):
                log.warning("loads_stalled requests=%d", len(left))
                return
        try:
            core.free_waiting(loading)
        except AttributeError:  # another version of vLLM; it reports the failed reset itself
            log.exception("blocks_not_freed")
            return
        if loading:
            core.call(self._on_worker, self._options, "forget_failures")

    def _lookup(
        self, keys: Sequence[bytes], chains: Sequence[str], states: Sequence[str]
    ) -> EngineMatchResult:
        return self._client.match_all(
            keys, namespaces=chains, states=states, bring=self.decisions.load_rule.loads_disks,
            timeout_ms=self._lookup_ms,
        )  # fmt: skip

    def _keep(self, tips: dict[int, Sequence[bytes]], milliseconds: int) -> None:
        """Pin these keys, by group, and their ancestors in the background."""
        places = [(name, keys) for group, keys in tips.items() for name in self._namespaces[group]]

        def pin() -> None:
            for name, keys in places:
                self._client.pin(
                    keys, milliseconds / 1000, namespace=name, timeout_ms=self._lookup_ms
                )

        self._run_in_background(pin, "pins_failed")

    def _hint(self, hints: list[EnvelopeAction], tips: dict[int, Sequence[bytes]]) -> None:
        """Carry out hints in all namespaces of this engine, in the background."""
        targets = {
            name: tips.get(group, ()) for group, names in self._namespaces.items() for name in names
        }
        for draft in self._of_drafts:  # "g0/part.draft-..." has the blocks of "g0/part"
            targets[draft] = targets.get(draft.rpartition(".")[0], ())

        def hint() -> None:
            if not self._lookups.breaker.is_open(time.monotonic()):
                self._client.apply_hints(hints, targets, timeout_ms=self._lookup_ms)

        self._run_in_background(hint, "hints_failed")

    def _run_in_background(self, work: Callable[[], None], counter: str) -> None:
        """Run ``work`` on the lookup thread; count and log its failure."""

        def done(future: Future[None]) -> None:
            if (error := future.exception()) is not None:
                self._lookups.count(counter)
                log.debug("%s reason=%s", counter, error)

        self._lookups.run_on_thread(work).add_done_callback(done)

    def _listen(self) -> None:
        groups = {name: group for group, names in self._namespaces.items() for name in names}
        for listener in self._listeners:
            listener.stop()
        self._listeners = [listener for listener in self._listeners if listener.is_alive]
        under = namespace_prefix(self._identity.last, tenant=self._config.tenant)
        self._listeners.append(EventListener(self._find_events, under, groups, self._config.auth))

    def _find_events(self) -> str:
        http = self._client.http()
        return http.address if http.has_events else ""

    def audit_events(self) -> None:
        """Audit blocks that may have been removed, and report those that are. Called each step;
        never waits."""
        if not self.events.wanted:
            return
        received = self._listeners[-1].take() if self._listeners else NOTHING
        if received.missed:
            self.events.suspect_all()
        self.events.suspect(received.blocks)
        if self._auditing is not None:
            if not self._auditing.done():
                return
            if self._auditing.exception() is None:
                self.events.removed(self._auditing.result())
            else:
                self.events.suspect(self._audited)
            self._auditing = None
        if blocks := self.events.to_audit(time.monotonic(), listening=received.listening):
            namespaces, self._audited = self._namespaces, blocks
            self._auditing = self._lookups.run_on_thread(
                lambda: audit(blocks, namespaces, self._stored)
            )

    def _stored(self, keys: Sequence[bytes], name: str) -> Sequence[bool]:
        return self._client.exists_many(keys, namespace=name, timeout_ms=self._lookup_ms)

    def reset(self) -> bool | None:
        if self._identity.is_off:
            return None
        assert self._core is not None
        self._identity.require_recheck()
        self.decisions.reset()
        if self._core.is_paused:
            return True
        self.prepare()
        names = [*chain.from_iterable(self._namespaces.values()), *self._of_drafts]

        def clear() -> None:
            for name in names:
                self._client.clear(name)

        try:
            self._lookups.run_on_thread(clear).result(RESET_TIMEOUT_S)
        except (KVStoreError, TimeoutError) as error:
            log.warning("reset_failed error=%s", error)
            return False
        self.decisions.reset()
        self.events.cleared()
        return True

    def take_stats(self) -> StoreStats:
        stats = StoreStats()
        for counters in (self.decisions.take_counters(), self._lookups.take_counters()):
            for name, number in counters.items():
                stats.count(name, number)
        times = self._lookups.take_latencies_us()
        stats.count("lookups", len(times))
        for microseconds in times:
            stats.time("lookup_us", microseconds)
        stats.gauge("pinned_blocks", self.decisions.pinned_blocks)
        stats.gauge("breaker_open", int(self._lookups.breaker.is_open(time.monotonic())))
        return stats

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._identity.announcer.stop()
            self._client.close()
            for listener in self._listeners:
                listener.stop()
            self._lookups.close()
            self._identity.announcer.join()
            for listener in self._listeners:
                listener.close()


def _files(path: str) -> Files:
    """Return the files in this folder; empty: it cannot be read here."""
    try:
        with os.scandir(path) as entries:
            found = [(entry.name, entry.stat()) for entry in entries]
    except OSError:
        return ()
    return tuple(sorted((name, it.st_ino, it.st_size, it.st_mtime_ns) for name, it in found))
