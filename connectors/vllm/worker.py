"""The half of the connector in each vLLM worker: moves blocks between paged cache and store.

    Orders ─► queue of loads ─► a thread: store ─► blocks ─► arrived, or which blocks are bad
           └► queue of saves ─► a thread: blocks ─► store ─► ended

The thread that computes only puts orders into queues and takes reports out. Both queues are
bounded, by the scheduler's limit of pinned blocks and by how many requests wait; each transfer has
a time-out, so everything is reported in the end, whatever the store does.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from kvstore.calls import PutOutcome
from kvstore.client.sync import Client
from kvstore.config import ClientConfig, ConnectorConfig
from kvstore.connectors.vllm.breaker import Breaker
from kvstore.connectors.vllm.groups import Groups
from kvstore.connectors.vllm.messages import Load, Orders, Report, Run, Save, SaveEnd, namespace
from kvstore.connectors.vllm.metrics import StoreStats
from kvstore.connectors.vllm.pages import Pages
from kvstore.errors import ClosedError, KVStoreError, UnavailableError

log = logging.getLogger("vllm.kvstore")

RUN_BLOCKS_MAX = 256
"""Blocks of one exchange with the store: bounds page-locked memory and what one failure costs."""

LOAD_THREADS = 4
"""Requests that are loaded at once: so that one slow node does not hold up what lies elsewhere."""

CONTRIBUTE_PAUSE_S = 2.0
"""Between two attempts to contribute memory while there is no master."""


class _Order(NamedTuple):
    what: Load | Save
    fingerprint: str
    after: Any
    """``Pages.mark`` of the step that it came with."""
    at: float


class WorkerHalf:
    """See the module. Methods are for the thread that computes."""

    def __init__(
        self, config: ConnectorConfig, groups: Groups, pages: Pages, part: str, *, saves: bool
    ) -> None:
        """
        Args:
            part: which part of each block is ours.
            saves: whether ours is to be saved by us, and not by another rank with equal bytes.
        """
        self._config = config
        self._groups = groups
        self._pages = pages
        self._part = part
        self._does_save = saves
        self._lock = threading.Lock()
        self._report = Report()
        self._stats = StoreStats()
        self._arrived: set[str] = set()
        self._failed: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._closing = threading.Event()
        self._loads: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        self._saves: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        client = client_config(config, config.transfer_timeout_ms)
        self._client = Client(config=client)
        self._breakers = {"load": Breaker(), "save": Breaker()}
        self._threads = [
            threading.Thread(target=self._serve, args=(waiting, work), name=name, daemon=True)
            for name, waiting, work, count in (
                ("kvstore-load", self._loads, self._load, LOAD_THREADS),
                ("kvstore-save", self._saves, self._save, 1),
            )
            for _ in range(count)
        ]
        if config.memory:
            self._threads.append(
                threading.Thread(target=self._contribute, name="kvstore-contribute", daemon=True)
            )
        for thread in self._threads:
            thread.start()

    # --- the thread that computes -------------------------------------------------------------

    def load(self, orders: Orders) -> None:
        if orders.loads:
            after = self._pages.mark()
            for each in orders.loads:
                self._loads.put(_Order(each, orders.fingerprint, after, time.monotonic()))

    def save(self, orders: Orders) -> None:
        if not orders.saves:
            return
        if not self._does_save:
            with self._lock:
                for each in orders.saves:
                    self._report.saves[each.number] = SaveEnd(1, 1)
            return
        after = self._pages.mark()
        for save in orders.saves:
            self._saves.put(_Order(save, orders.fingerprint, after, time.monotonic()))

    def take_arrived(self) -> tuple[set[str], set[str]]:
        """Requests whose load has ended, and those among them of which not all is there."""
        with self._lock:
            arrived, self._arrived = self._arrived, set()
            failed, self._failed = self._failed, set()
        return arrived, failed

    def take_bad_blocks(self) -> set[int]:
        with self._lock:
            bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def take_report(self) -> Report | None:
        with self._lock:
            report, self._report = self._report, Report()
        return report if report.saves or report.failed_loads else None

    def take_stats(self) -> StoreStats | None:
        with self._lock:
            stats, self._stats = self._stats, StoreStats()
        return None if stats.is_empty() else stats

    def close(self) -> None:
        """Blocks until transfers under way have ended; those that wait are given up."""
        self._closing.set()
        self._client.close()
        for waiting in (*(self._loads,) * LOAD_THREADS, self._saves):
            waiting.put(None)
        for thread in self._threads:
            thread.join()

    # --- the threads --------------------------------------------------------------------------

    def _serve(
        self,
        waiting: queue.SimpleQueue[_Order | None],
        work: Callable[[Any, _Order], None],
    ) -> None:
        while (order := waiting.get()) is not None and not self._closing.is_set():
            work(order.what, order)

    def _guarded(self, doing: str, transfer: Callable[[], None]) -> bool:
        """Whether the store has done it."""
        breaker = self._breakers[doing]
        with self._lock:
            if breaker.is_open(time.monotonic()):
                return False
        try:
            transfer()
        except ClosedError:
            return False
        except KVStoreError as error:
            if not isinstance(error, UnavailableError):  # it answers, and has no room, say
                log.warning("%s_failed error=%s", doing, error)
                return False
            with self._lock:
                opened = breaker.failed(time.monotonic())
                self._stats.count("breaker_opened", int(opened))
            if opened:
                log.warning("store_not_answering, %s stops for a while: %s", doing, error)
            return False
        except Exception:  # a bug of ours must not take the engine's request along
            log.exception("%s_failed", doing)
            return False
        with self._lock:
            breaker.succeeded()
        return True

    def _load(self, load: Load, order: _Order) -> None:
        # Behind others that a dead node has held up: the request has waited long enough.
        late = time.monotonic() - order.at > self._config.transfer_timeout_ms / 1000
        bad: set[int] = set()
        good_tokens: int | None = None
        blocks = size = 0
        for run in self._ours(load.runs):
            for piece in _pieces(run):
                there = [False] * len(piece.keys)

                def get(piece: Run = piece, there: list[bool] = there) -> None:
                    with self._pages.writing(piece.group, piece.block_ids, order.after) as buffers:
                        there[:] = self._client.get_into(
                            piece.keys, buffers,
                            namespace=namespace(order.fingerprint, piece.group, self._part),
                        )  # fmt: skip

                done = not late and self._guarded("load", get)
                if done and all(there):
                    blocks += len(piece.keys)
                    size += len(piece.keys) * self._pages.block_bytes[piece.group]
                    continue
                first = there.index(False) if done else 0
                bad.update(run.block_ids[piece.first - run.first + first :])
                tokens = (piece.first + first) * self._groups.block_tokens[run.group]
                good_tokens = tokens if good_tokens is None else min(tokens, good_tokens)
                break
        with self._lock:
            self._arrived.add(load.request_id)
            if good_tokens is not None:
                self._report.failed_loads[load.request_id] = good_tokens
                self._failed.add(load.request_id)
                self._bad_blocks |= bad
            self._stats.add(
                "load", time.monotonic() - order.at, blocks=blocks, size=size,
                failed=int(good_tokens is not None),
            )  # fmt: skip

    def _save(self, save: Save, order: _Order) -> None:
        started = time.monotonic()
        late = started - order.at > self._config.pin_timeout_ms / 1000
        stored = not late
        blocks = size = 0
        for run in self._ours(save.runs) if stored else ():
            for piece in _pieces(run):

                def put(piece: Run = piece) -> None:
                    nonlocal stored
                    with self._pages.reading(piece.group, piece.block_ids, order.after) as buffers:
                        outcomes = self._client.put_chain(
                            piece.keys, buffers,
                            namespace=namespace(order.fingerprint, piece.group, self._part),
                            parent=piece.parent,
                        )  # fmt: skip
                    stored &= PutOutcome.BEING_WRITTEN not in outcomes

                if not self._guarded("save", put):
                    stored = False
                    break
                blocks += len(piece.keys)
                size += len(piece.keys) * self._pages.block_bytes[piece.group]
            if not stored:
                break
        with self._lock:
            self._report.saves[save.number] = SaveEnd(1, int(stored))
            self._stats.add(
                "save", time.monotonic() - started, blocks=blocks, size=size,
                failed=int(not stored),
            )  # fmt: skip

    def _ours(self, runs: list[Run]) -> list[Run]:
        """Those of groups that this worker holds layers of: in a pipeline, not each has all."""
        return [run for run in runs if run.group in self._pages.block_bytes]

    def _contribute(self) -> None:
        """Pool memory of this host, as soon as there is a master."""
        config = client_config(self._config, 5_000, memory=self._config.memory)
        while not self._closing.is_set():
            try:
                with Client(config=config):
                    self._closing.wait()
            except KVStoreError as error:
                log.warning("memory_not_contributed_yet reason=%s", error)
                self._closing.wait(CONTRIBUTE_PAUSE_S)


def _pieces(run: Run) -> list[Run]:
    """The run in exchanges of at most ``RUN_BLOCKS_MAX`` blocks."""
    pieces = []
    for start in range(0, len(run.keys), RUN_BLOCKS_MAX):
        stop = start + RUN_BLOCKS_MAX
        parent = run.keys[start - 1] if start else run.parent
        pieces.append(
            Run(
                run.group, run.keys[start:stop], run.block_ids[start:stop],
                run.first + start, parent,
            )
        )  # fmt: skip
    return pieces


def client_config(config: ConnectorConfig, timeout_ms: int, *, memory: int = 0) -> ClientConfig:
    """Of a client as the connector wants it."""
    return ClientConfig(
        master=config.master,
        transports=config.transports,
        protocol=config.protocol,
        device_name=config.device_name,
        metadata_server=config.metadata_server,
        engine_buffer=config.engine_buffer,
        verify=config.verify,
        replicas=config.replicas,
        timeout_ms=timeout_ms,
        put_wait_ms=min(1_000, timeout_ms // 2),
        placements_max=0,
        memory=memory,
    )
