"""``KVStoreTier``, the class that vLLM's ``TieringOffloadingManager`` calls.

vLLM calls all methods from the scheduler's thread (0.33: or from one of its own, under one lock),
so only ``drain_jobs`` and ``shutdown`` wait for the store. A thread of vLLM's
``AsyncLookupManager`` looks up keys. Threads of this class copy chunks between the store and rows
of vLLM's pool; vLLM keeps a row in place until its job is reported. A lookup leases the objects
found, so that a load soon after finds them, too.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial, wraps
from typing import Any, ClassVar, Final

from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingSpec,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import Request

from kvstore.calls import PutOutcome
from kvstore.connectors.common.guarded_client import GuardedClient, client_of_an_engine
from kvstore.connectors.vllm_media import are_names_marked, is_shared
from kvstore.connectors.vllm_tier.chunk_order import ChunkRun, runs_of
from kvstore.connectors.vllm_tier.namespace import TierNamespace
from kvstore.errors import ConfigError, KVStoreError, NoSpaceError

log = logging.getLogger("vllm.kvstore")

LOAD_THREADS: Final = 4
STORE_THREADS: Final = 2

PIECE_BYTES: Final = 64 << 20
"""Bytes per call to the store: bounds the loss by one failure, and the wait of ``drain_jobs``."""

LOOKUP_TIMEOUT_MS: Final = 500
"""Maximum wait of a request for one lookup. Beyond that, computing is faster."""


class KVStoreTier(SecondaryTierManager):  # type: ignore[misc]  # vLLM is untyped here
    """Keeps chunks of vLLM's pool in a kvstore; see the module."""

    medium: ClassVar[Medium] = Medium.STORAGE
    cache_hit_source: ClassVar[CacheHitSource] = CacheHitSource.EXTERNAL_UNSPECIFIED

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        *,
        model_id: str = "",
        enable_kv_events: bool = False,
        locality: str = "REMOTE",
        **settings: object,
    ) -> None:
        """
        Args:
            primary_kv_view: vLLM's pool, of shape (chunks, bytes of a chunk), contiguous and
                writable; vLLM keeps it until ``shutdown`` has returned.
            model_id: the operator's name for the weights; "": use their digest.
            enable_kv_events: whether to report stored chunks, if vLLM publishes events at all.
            locality: LOCAL or REMOTE, for vLLM's filter of tiers and for its events.
            settings: those of a client (``master``, ``replicas``, ``timeout_ms`` ...).

        Raises:
            ConfigError: an unknown or wrong setting.
        """
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        if locality not in Locality.__members__:
            raise ConfigError(f"locality is {locality!r}, not LOCAL or REMOTE", key="locality")
        self.locality = Locality(locality)
        wanted = enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events
        self._events: list[OffloadingEvent] | None = [] if wanted else None
        self._pieces_chunks = max(1, PIECE_BYTES // self.block_size_bytes)
        self._guard = GuardedClient(client_of_an_engine(**settings), log)
        self._pool = primary_kv_view.cast("B")
        self._identity = TierNamespace(
            self._guard.client, offloading_spec, self.block_size_bytes, model_id=model_id
        )
        _note_unshared()
        self._lookups = StepLookups(tier_type, self._found)
        self._loads = ThreadPoolExecutor(LOAD_THREADS, "kvstore-load")
        self._stores = ThreadPoolExecutor(STORE_THREADS, "kvstore-store")
        self._jobs: dict[int, tuple[TransferJob, Future[JobResult]]] = {}
        self._gives_up = threading.Event()
        """Set while jobs make no further calls to the store: they end after the current one."""

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Request new chunks only: chunks of other requests were stored before."""
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Return RETRY until the workers and the store have replied. A chunk found is leased."""
        if self._identity.is_outdated:
            return LookupResult.RETRY
        if not self._identity.namespace or req_context.get_state(UnsharedRequest):
            return LookupResult.MISS
        self._identity.is_used = True
        found = self._lookups.lookup(key, req_context)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def _found(self, keys: list[OffloadKey]) -> list[bool]:
        """Return whether each of these chunks is stored. Runs on the thread of the lookups."""
        name = self._identity.namespace
        client = self._guard.client

        def ask(timeout_ms: int) -> list[int | None]:
            within = min(timeout_ms, LOOKUP_TIMEOUT_MS)
            return client.lookup(keys, namespace=name, timeout_ms=within)

        if not name:
            return [False] * len(keys)
        try:
            return [size == self.block_size_bytes for size in self._guard.run(ask)]
        except KVStoreError as error:
            log.debug("lookup_failed error=%s", error)  # the guard warns if this continues
            return [False] * len(keys)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._identity.learn()
        if context.new_req_ids:
            self._identity.is_used = True
        self._lookups.flush()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._lookups.cleanup(req_context.req_id)

    def submit_store(self, job_metadata: TransferJob) -> None:
        job = job_metadata
        runs = runs_of(job.keys, job.chunk_ids, job.req_context, self._identity.chunk_tokens)
        self._submit(self._stores, job, partial(self._store, job, runs))

    def submit_load(self, job_metadata: TransferJob) -> None:
        job = job_metadata
        run = ChunkRun(list(job.keys), [int(each) for each in job.chunk_ids], None, is_chain=False)
        self._submit(self._loads, job, partial(self._load, job, run))

    def _submit(
        self, pool: ThreadPoolExecutor, job: TransferJob, move: Callable[[str], JobResult]
    ) -> None:
        """Start a job, whose chunks are in the current namespace even if that changes later."""
        name = "" if job.req_context.get_state(UnsharedRequest) else self._identity.namespace
        self._jobs[job.job_id] = (job, pool.submit(move, name))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        results = []
        for number, (job, future) in list(self._jobs.items()):
            if not future.done():
                continue
            del self._jobs[number]
            result = JobResult(number, success=False)
            if not future.cancelled():
                result = future.result()
            if job.is_promotion and not result.success:
                # Otherwise vLLM would request the same chunks again and again.
                loaded = set(result.successful_keys or ())
                self._lookups.mark_miss([key for key in job.keys if key not in loaded])
            if self._events is not None and not job.is_promotion and result.success:
                event = OffloadingEvent(
                    list(job.keys), self.medium, removed=False, locality=self.locality
                )
                self._events.append(event)
            results.append(result)
        return results

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return events of stored chunks only: evictions by the store are not reported."""
        if self._events:
            events, self._events = self._events, []
            return events
        return ()

    def drain_jobs(self) -> None:
        """Fail jobs that have not started, and wait for calls in progress, at most until their
        deadlines. vLLM calls this before it resets its caches."""
        self._gives_up.set()
        futures = [future for _, future in self._jobs.values()]
        for future in futures:
            future.cancel()
        wait(futures)
        self._gives_up.clear()
        self._identity.reset()

    def shutdown(self) -> None:
        """Close the client, so that calls in progress fail, and wait for them. Idempotent."""
        self._gives_up.set()
        self._identity.announcer.stop()
        self._guard.client.close()
        self._identity.announcer.join()
        self._loads.shutdown(cancel_futures=True)
        self._stores.shutdown(cancel_futures=True)
        self._lookups.shutdown()
        self._jobs.clear()
        self._pool.release()
        gc.collect()  # puts leave cycles that hold rows, which vLLM unmaps next

    def _store(self, job: TransferJob, runs: list[ChunkRun], name: str) -> JobResult:
        client = self._guard.client

        def put(run: ChunkRun, timeout_ms: int) -> list[PutOutcome]:
            rows = [self._row(chunk) for chunk in run.chunks]
            if run.is_chain:
                return client.put_chain(
                    run.keys, rows, namespace=name, parent=run.parent, partial=True,
                    timeout_ms=timeout_ms,
                )  # fmt: skip
            return client.put_many(
                zip(run.keys, rows, strict=True), namespace=name, partial=True,
                timeout_ms=timeout_ms,
            )  # fmt: skip

        outcomes: list[PutOutcome] = []
        started = time.monotonic()
        for piece in (each for run in runs for each in run.pieces(self._pieces_chunks)):
            more = self._moved(name, piece, put)
            outcomes += more
            if not more or PutOutcome.NO_SPACE in more:
                break
        lost = len(job.keys) - len(outcomes) + outcomes.count(PutOutcome.NO_SPACE)
        return JobResult(
            job.job_id,
            success=not lost,
            transfer_time=time.monotonic() - started,
            transfer_bytes=outcomes.count(PutOutcome.STORED) * self.block_size_bytes,
        )

    def _load(self, job: TransferJob, run: ChunkRun, name: str) -> JobResult:
        client = self._guard.client

        def get(run: ChunkRun, timeout_ms: int) -> list[int | None]:
            rows = [self._row(chunk) for chunk in run.chunks]
            return client.get_into(run.keys, rows, namespace=name, timeout_ms=timeout_ms)

        loaded: list[OffloadKey] = []
        started = time.monotonic()
        for piece in run.pieces(self._pieces_chunks):
            sizes = self._moved(name, piece, get)
            if not sizes:
                break
            pairs = zip(piece.keys, sizes, strict=True)
            loaded += [key for key, size in pairs if size == self.block_size_bytes]
        return JobResult(
            job.job_id,
            success=len(loaded) == len(job.keys),
            successful_keys=tuple(loaded) or None,
            transfer_time=time.monotonic() - started,
            transfer_bytes=len(loaded) * self.block_size_bytes,
        )

    def _moved(
        self, name: str, piece: ChunkRun, move: Callable[[ChunkRun, int], list[Any]]
    ) -> list[Any]:
        """Return the outcome of ``move`` for each chunk; empty: not tried, or failed as a whole."""
        if not name or self._gives_up.is_set():
            return []
        try:
            size = len(piece.chunks) * self.block_size_bytes
            return self._guard.run(partial(move, piece), size=size)
        except NoSpaceError as error:  # logged as text, or a log record would keep the rows
            log.info("chunks_not_stored reason=%s", str(error))
        except KVStoreError as error:
            log.debug("transfer_failed error=%s", str(error))
        except Exception:  # a bug in this class must not fail the engine's requests
            log.exception("transfer_failed")
        return []

    def _row(self, chunk: int) -> memoryview:
        start = chunk * self.block_size_bytes
        return self._pool[start : start + self.block_size_bytes]


class UnsharedRequest:
    """State of a request whose chunks are neither loaded nor saved; see ``is_shared``."""


def _note_unshared() -> None:
    """Patch vLLM to record unshared requests: it does not pass requests to a tier."""
    create = scheduler._create_req_context
    if hasattr(create, "__wrapped__"):
        return

    @wraps(create)
    def create_and_note(request: Request) -> ReqContext:
        context = create(request)
        if not is_shared(request, are_names_marked=are_names_marked()):
            context.set_state(UnsharedRequest())
        return context

    scheduler._create_req_context = create_and_note


class StepLookups(AsyncLookupManager):  # type: ignore[misc]
    """The lookups of one scheduler step: one call to the store per request, on vLLM's thread."""

    def __init__(self, tier_type: str, found: Callable[[list[OffloadKey]], list[bool]]) -> None:
        self._found = found  # set before the base class starts its thread
        super().__init__(tier_type)

    def batch_lookup(self, keys: Collection[OffloadKey], req_context: ReqContext) -> list[bool]:
        return self._found(list(keys))
