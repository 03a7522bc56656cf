"""The worker side, in each vLLM worker: copies blocks between the paged cache and the store.

    commands ─► queue of loads ─► a thread: store ─► blocks ─► loaded, or the bad blocks
             └► queue of saves ─► a thread: blocks ─► store ─► ended

The thread that computes only puts commands into queues and takes reports out. The scheduler's limit
of blocks being saved bounds the queue of saves, the number of waiting requests that of loads. Each
load and save has one timeout in total, so each is reported in the end.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar

from kvstore.calls import PutOutcome
from kvstore.client.client import Client
from kvstore.config import ClientConfig, ConnectorConfig
from kvstore.config.clients import StoreSettings
from kvstore.connectors.common.guarded_client import GuardedClient
from kvstore.connectors.vllm.groups import NULL_BLOCK, Groups
from kvstore.connectors.vllm.messages import (
    LoadCommand,
    Run,
    SaveCommand,
    SaveResult,
    TransferCommands,
    TransferReport,
    UnfinishedTransfers,
    draft_part,
    namespace,
)
from kvstore.connectors.vllm.metrics import StoreStats
from kvstore.connectors.vllm.worker.pages import Mark, Pages
from kvstore.errors import (
    ClosedError,
    DeviceError,
    KVStoreError,
    PermissionDeniedError,
    UnavailableError,
)
from kvstore.limits import Namespace
from kvstore.runtime.tasks import start_thread

log = logging.getLogger("vllm.kvstore")

RUN_BLOCKS_MAX = 256
"""Maximum blocks of one call to the store, and so of the loss by one failure."""

LOAD_THREADS = 4
"""Requests loaded in parallel, so that one slow node does not delay blocks on other nodes."""

DRAIN_S = 1.0
"""Time after which ``drain`` drops transfers that have not started."""

ZERO_S = 1.0
"""Time after its timeout in which a load fills a draft model's pages with zeros."""

CONTRIBUTE_PAUSE_S = 2.0
"""Pause between two attempts to contribute memory while there is no master."""

TRANSFER_TIMEOUT_MS = 5_000
"""Maximum time of loading the blocks of one request, waiting included, or of saving those of one
step: several times what the largest prompt needs. The engine computes blocks not loaded by then."""


ResultT = TypeVar("ResultT")


class _QueuedTransfer(NamedTuple):
    what: LoadCommand | SaveCommand
    fingerprint: str
    after: Mark
    at: float
    draft: str


class WorkerSide:
    """See the module. The thread that computes calls the public methods."""

    def __init__(
        self, config: ConnectorConfig, groups: Groups, client: Client, parts: Mapping[str, Pages],
        *, saves: bool,
    ) -> None:  # fmt: skip
        """
        Args:
            client: the client that transfers blocks; ``close`` closes it.
            parts: this worker's parts of each block, by name: one, or one for each shard.
            saves: whether this worker saves its parts; False if another rank saves equal bytes.
        """
        self._config = config
        self._groups = groups
        self._parts = parts
        self._pages = next(iter(parts.values()))
        self._drafts: Mapping[str, Pages] = {}
        self._does_save = saves
        self._lock = threading.Lock()
        self._report = TransferReport()
        self._stats = StoreStats()
        self._read_bytes: Mapping[str, int] = {}
        """Of the client, by transport, at the last report."""
        self._arrived: set[str] = set()
        self._failed: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._closing = threading.Event()
        self._ended = threading.Condition(self._lock)
        self._saves_left: set[int] = set()
        self._loads_left: set[str] = set()
        self._give_up = False
        """Whether queued transfers are dropped instead of started."""
        self._is_suspended = False
        self._loads: queue.SimpleQueue[_QueuedTransfer | None] = queue.SimpleQueue()
        self._saves: queue.SimpleQueue[_QueuedTransfer | None] = queue.SimpleQueue()
        self._client = client
        self._begun: Mark = None
        self._runaway: DeviceError | None = None
        """Set if copies did not end: they may still write to blocks that vLLM considers free."""
        self._guards = {doing: GuardedClient(client, log) for doing in ("load", "save")}
        self._openings = 0
        """Of the guards' breakers, at the last report."""
        self._threads = [
            start_thread(name, partial(self._serve, waiting, work))
            for name, waiting, work, count in (
                ("kvstore-load", self._loads, self._load, LOAD_THREADS),
                ("kvstore-save", self._saves, self._save, 1),
            )
            for _ in range(count)
        ]
        if config.memory:
            self._threads.append(start_thread("kvstore-contribute", self._contribute))

    def divide(self, parts: Mapping[str, Pages], drafts: Mapping[str, Pages]) -> None:
        """Separate the pages of a draft model. Called before the first command.

        A block is loaded and saved regardless of those pages: they are filled with zeros if the
        store does not have them, which makes drafts worse.

        Args:
            drafts: by the name of a part, the draft model's pages of it; a part may have none.
        """
        self._parts, self._drafts = parts, drafts
        self._pages = next(iter(parts.values()))

    def begin(self, orders: TransferCommands) -> None:
        """Record the event for the step's transfers, before its forward pass is queued. Loads of
        the step wait for the work queued now, which may still read or write their blocks for
        requests that had them before, zero them, or copy them. They do not wait for the step, which
        touches no block that is being loaded. If the pass blocks, as on a CPU, they start now.

        Raises:
            DeviceError: copies of an earlier step did not end.
        """
        self._check()
        if orders.loads:
            self._begun = self._pages.record_event()
            if self._begun is None:
                self._queue_loads(orders)

    def load(self, orders: TransferCommands) -> None:
        """Start the loads of a step. vLLM calls this after it has queued the pass, so that the pass
        does not wait for it."""
        if orders.loads and self._begun is not None:
            self._queue_loads(orders)

    def _queue_loads(self, orders: TransferCommands) -> None:
        with self._lock:
            self._loads_left.update(load.request_id for load in orders.loads)
        for load in orders.loads:
            self._loads.put(self._queue(load, orders, self._begun))

    def _queue(
        self, what: LoadCommand | SaveCommand, orders: TransferCommands, after: Mark
    ) -> _QueuedTransfer:
        return _QueuedTransfer(what, orders.fingerprint, after, time.monotonic(), orders.draft)

    def save(self, orders: TransferCommands) -> None:
        """Start the saves of a step whose forward pass, and that of a draft model, has been queued.
        Saves wait for the pass, which computes their last tokens. Later steps do not write to these
        objects: all their tokens are computed, and the scheduler side keeps their blocks until the
        save has been reported."""
        if not orders.saves:
            return
        if not self._does_save:
            with self._lock:
                for each in orders.saves:
                    self._report.saves[each.number] = SaveResult(1, 1)
            return
        after = self._pages.record_event()
        with self._lock:
            self._saves_left.update(each.number for each in orders.saves)
        for save in orders.saves:
            self._saves.put(self._queue(save, orders, after))

    def take_arrived(self) -> tuple[set[str], set[str]]:
        """Return requests whose load has ended, and those among them with missing blocks. Raises
        DeviceError as ``begin``."""
        self._check()
        with self._lock:
            arrived, self._arrived = self._arrived, set()
            failed, self._failed = self._failed, set()
        return arrived, failed

    def take_bad_blocks(self) -> set[int]:
        with self._lock:
            bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def take_report(self) -> TransferReport | None:
        with self._lock:
            report, self._report = self._report, TransferReport()
        return report if report.saves or report.failed_loads else None

    def drain(self) -> UnfinishedTransfers:
        """Wait until no transfer accesses blocks, and return the report of saves. Drops transfers
        that have not started after ``DRAIN_S``. Waits at most a transfer's timeout and some
        seconds. Loads that have ended are reported with the next step, as always."""
        with self._lock:
            self._wait_for_transfers()
            saves, loads = set(self._saves_left), set(self._loads_left)
        return UnfinishedTransfers(self.take_report(), saves, loads)

    def suspend(self) -> None:
        """As ``drain``, but keep the report for the next step. Transfers before ``resume`` fail.
        Idempotent."""
        with self._lock:
            self._wait_for_transfers()
            self._is_suspended = True

    def resume(self) -> None:
        """Allow transfers again. Idempotent."""
        self._is_suspended = False

    def _check(self) -> None:
        """Raise, which ends the engine, rather than let a block change under a request."""
        if self._runaway is not None:
            raise self._runaway

    def _wait_for_transfers(self) -> None:
        """Wait for all transfers. The caller holds the lock."""

        def idle() -> bool:
            return not self._saves_left and not self._loads_left

        if not self._ended.wait_for(idle, DRAIN_S):
            self._give_up = True
            self._ended.wait_for(idle, 2 * DRAIN_S + TRANSFER_TIMEOUT_MS / 1000)
            self._give_up = False

    def forget_failures(self) -> None:
        """Forget failed loads. Called when the blocks of all ended loads have been freed."""
        with self._lock:
            self._failed.clear()
            self._bad_blocks.clear()

    def take_stats(self) -> StoreStats | None:
        with self._lock:
            stats, self._stats = self._stats, StoreStats()
        if stats.is_empty():
            return None
        before, self._read_bytes = self._read_bytes, self._client.stats().read_bytes
        for name, size in self._read_bytes.items():
            stats.count(f"load_bytes_{name}", size - before.get(name, 0))
        opened = sum(guard.openings for guard in self._guards.values())
        stats.count("breaker_opened", opened - self._openings)
        self._openings = opened
        return stats

    def close(self) -> None:
        """Drop queued transfers, and wait until those in progress have ended."""
        self._closing.set()
        self._client.close()
        for waiting in (*(self._loads,) * LOAD_THREADS, self._saves):
            waiting.put(None)
        for thread in self._threads:
            thread.join()

    def _serve(
        self,
        waiting: queue.SimpleQueue[_QueuedTransfer | None],
        work: Callable[[Any, _QueuedTransfer], None],
    ) -> None:
        while (order := waiting.get()) is not None and not self._closing.is_set():
            try:
                work(order.what, order)
            except Exception:  # a bug in the connector: report the transfer as failed
                log.exception("transfer_command_failed")
                self._fail(order.what)

    def _fail(self, what: LoadCommand | SaveCommand) -> None:
        with self._lock:
            if isinstance(what, SaveCommand):
                self._save_ended(what, stored=False)
            else:
                self._load_ended(what)
                self._failed.add(what.request_id)
                self._report.failed_loads[what.request_id] = 0
                self._bad_blocks.update(block_id for run in what.runs for block_id in run.block_ids)

    def _save_ended(self, save: SaveCommand, *, stored: bool) -> None:
        """The caller holds the lock."""
        self._report.saves[save.number] = SaveResult(1, int(stored))
        self._saves_left.discard(save.number)
        self._ended.notify_all()

    def _load_ended(self, load: LoadCommand) -> None:
        """The caller holds the lock."""
        self._arrived.add(load.request_id)
        self._loads_left.discard(load.request_id)
        self._ended.notify_all()

    def _guarded(self, doing: str, transfer: Callable[[], ResultT], left_ms: int) -> ResultT | None:
        """Return the result of ``transfer``; None: it failed.

        Args:
            left_ms: remaining time. If it is less than half of the configured timeout, a timeout
                does not count as a failure of the store.
        """
        is_short = left_ms < TRANSFER_TIMEOUT_MS / 2
        try:
            return self._guards[doing].run(lambda _: transfer(), is_short=is_short)
        except KVStoreError as error:
            if isinstance(error, DeviceError) and not error.fields.get("quiesced", 1):
                self._runaway = error
            if not isinstance(error, UnavailableError | ClosedError | PermissionDeniedError):
                # The store answers, but is full, for example.
                log.warning("%s_failed error=%s", doing, error)
        except Exception:  # a bug in the connector must not fail the engine's request
            log.exception("%s_failed", doing)
        return None

    def _load(self, load: LoadCommand, order: _QueuedTransfer) -> None:
        # The timeout covers the complete load, including its wait for other loads.
        deadline = order.at + TRANSFER_TIMEOUT_MS / 1000
        bad: set[int] = set()
        good_tokens: int | None = None
        blocks = size = 0
        for run in self._ours(load.runs):
            for piece in _pieces(run):
                first = self._get(piece, order, deadline)
                if first == len(piece.keys):
                    blocks += len(piece.keys) * piece.each
                    size += len(piece.keys) * piece.each * self._block_bytes(piece.group)
                    continue
                bad.update(run.block_ids[(piece.first - run.first + first) * run.each :])
                bad.discard(NULL_BLOCK)
                tokens = (piece.first + first) * self._groups.tokens_each(run)
                good_tokens = tokens if good_tokens is None else min(tokens, good_tokens)
                break
        with self._lock:
            self._load_ended(load)
            if good_tokens is not None:
                self._report.failed_loads[load.request_id] = good_tokens
                self._failed.add(load.request_id)
                self._bad_blocks |= bad
            self._stats.add(
                "load", time.monotonic() - order.at, blocks=blocks, size=size,
                failed=int(good_tokens is not None),
            )  # fmt: skip

    def _get(self, piece: Run, order: _QueuedTransfer, deadline: float) -> int:
        """Return the number of leading blocks that were loaded with all of their parts."""
        arrived = len(piece.keys)
        for part, pages in self._parts.items():
            sizes = self._fetch(piece, part, pages, order, deadline)
            if sizes is None:
                return 0
            arrived = min(arrived, sizes.index(None) if None in sizes else arrived)
        if arrived:
            self._get_drafts(_slice(piece, 0, arrived), order, deadline)
        return arrived

    def _get_drafts(self, piece: Run, order: _QueuedTransfer, deadline: float) -> None:
        each = piece.each
        for part, pages in self._drafts_of(piece, order):
            sizes = self._fetch(piece, part, pages, order, deadline) or [None] * len(piece.keys)
            missing = [index for index, size in enumerate(sizes) if size is None]
            where = [place for index in missing for place in piece.block_ids[index * each :][:each]]
            if each > 1:
                where = [place for place in where if place != NULL_BLOCK]
            if not where:
                continue
            try:
                pages.zero(piece.group, where, order.after, time.monotonic() + ZERO_S)
            except Exception:  # the model's pages are loaded, whatever happens to these
                log.exception("draft_pages_not_zeroed")

    def _fetch(
        self, piece: Run, part: str, pages: Pages, order: _QueuedTransfer, deadline: float
    ) -> list[int | None] | None:
        """Return the bytes loaded of each of these parts, None for a missing one; None for all on a
        failure."""
        left_ms = _remaining_ms(deadline)

        def get() -> list[int | None]:
            return self._client.get_into(
                piece.keys,
                pages.blocks(piece.group, piece.block_ids, order.after, piece.each),
                namespace=self._namespace(order, piece, part),
                timeout_ms=left_ms,
            )

        return None if self._drops or not left_ms else self._guarded("load", get, left_ms)

    def _namespace(self, order: _QueuedTransfer, piece: Run, part: str) -> Namespace:
        return namespace(order.fingerprint, piece.group, part, tenant=self._config.tenant)

    def _drafts_of(self, piece: Run, order: _QueuedTransfer) -> list[tuple[str, Pages]]:
        """Return the draft model's pages of this run's group, by the names of their parts."""
        return [
            (draft_part(part, order.draft), pages)
            for part, pages in self._drafts.items()
            if piece.group in pages.block_bytes
        ]

    def _block_bytes(self, group: int) -> int:
        return sum(pages.block_bytes[group] for pages in self._parts.values())

    def _save(self, save: SaveCommand, order: _QueuedTransfer) -> None:
        started = time.monotonic()
        late = started - order.at > self._config.pin_timeout_ms / 1000
        stored = not late and not self._drops
        deadline = started + TRANSFER_TIMEOUT_MS / 1000
        blocks = size = 0
        for run in self._ours(save.runs) if stored else ():
            for piece in _pieces(run):
                has_all = self._put(piece, order, deadline)
                stored &= bool(has_all)
                if has_all is None:
                    break
                blocks += len(piece.keys) * piece.each
                size += len(piece.keys) * piece.each * self._block_bytes(piece.group)
            if not stored:
                break
        with self._lock:
            self._save_ended(save, stored=stored)
            self._stats.add(
                "save", time.monotonic() - started, blocks=blocks, size=size,
                failed=int(not stored),
            )  # fmt: skip

    def _put(self, piece: Run, order: _QueuedTransfer, deadline: float) -> bool | None:
        """Return whether the store has all parts of these blocks now; False: some are still being
        written; None: on a failure."""
        stored = True
        for part, pages in self._parts.items():
            outcomes = self._store(piece, part, pages, order, deadline)
            if outcomes is None:
                return None
            stored &= PutOutcome.BEING_WRITTEN not in outcomes
        for part, pages in self._drafts_of(piece, order):
            self._store(piece, part, pages, order, deadline)
        return stored

    def _store(
        self, piece: Run, part: str, pages: Pages, order: _QueuedTransfer, deadline: float
    ) -> list[PutOutcome] | None:
        """Return the outcome for each of these parts; None: the store does not take them."""
        assert isinstance(order.what, SaveCommand)
        ttl = order.what.ttl_ms / 1000 or None
        left_ms = _remaining_ms(deadline)

        def put() -> list[PutOutcome]:
            blocks = pages.blocks(piece.group, piece.block_ids, order.after, piece.each)
            name = self._namespace(order, piece, part)
            if piece.group in self._groups.windows:
                return self._client.put_many(
                    list(zip(piece.keys, blocks)), namespace=name, ttl=ttl, timeout_ms=left_ms
                )
            return self._client.put_chain(
                piece.keys, blocks, namespace=name, parent=piece.parent, ttl=ttl, timeout_ms=left_ms
            )

        return self._guarded("save", put, left_ms) if left_ms else None

    @property
    def _drops(self) -> bool:
        return self._give_up or self._is_suspended

    def _ours(self, runs: list[Run]) -> list[Run]:
        """Return the runs of groups of which this worker holds layers. In a pipeline these are not
        all."""
        return [run for run in runs if run.group in self._pages.block_bytes]

    def _contribute(self) -> None:
        """Contribute memory of this host to the pool, as soon as there is a master."""
        config = client_config(self._config, 5_000, memory=self._config.memory)
        while not self._closing.is_set():
            try:
                with Client(config=config):
                    self._closing.wait()
            except KVStoreError as error:
                log.warning("memory_not_contributed_yet reason=%s", error)
                self._closing.wait(CONTRIBUTE_PAUSE_S)


def _remaining_ms(deadline: float) -> int:
    """Return the milliseconds until ``deadline``; 0: it has passed."""
    return max(0, int((deadline - time.monotonic()) * 1000))


def _pieces(run: Run) -> list[Run]:
    """Split the run into runs of at most ``RUN_BLOCKS_MAX`` blocks."""
    count = max(1, RUN_BLOCKS_MAX // run.each)
    return [_slice(run, start, start + count) for start in range(0, len(run.keys), count)]


def _slice(run: Run, start: int, stop: int) -> Run:
    parent = run.keys[start - 1] if start else run.parent
    keys, blocks = run.keys[start:stop], run.block_ids[start * run.each : stop * run.each]
    return Run(run.group, keys, blocks, run.first + start, parent, run.each)


def client_config(config: ConnectorConfig, timeout_ms: int, *, memory: int = 0) -> ClientConfig:
    shared = {name: getattr(config, name) for name in StoreSettings.model_fields}
    return ClientConfig(
        **shared | {"timeout_ms": timeout_ms, "placements_max": 0, "memory": memory}
    )
