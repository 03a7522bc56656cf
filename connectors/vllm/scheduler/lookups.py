"""Looks up the stored part of each prompt, on its own thread, under a deadline.

    new request ──► wanted ──► sent ───► done: the number of tokens
                                │  ▲
                                ▼  │ missing blocks are being written: sent again
                              waiting ──► done with the stored part, after ``writers_wait``

The scheduler reads results and never calls the store: without a result it checks again in its next
step, and after ``lookup_deadline`` the result is "nothing". A breaker stops lookups while the store
does not answer. The same thread makes the scheduler's other calls to the store.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeVar

from kvstore.client.flows.control_calls import EngineMatchResult
from kvstore.connectors.common.guarded_client import DenialLog
from kvstore.connectors.vllm.groups import Groups
from kvstore.errors import ClosedError, KVStoreError, PermissionDeniedError, UnavailableError
from kvstore.limits import NAMESPACES_MAX
from kvstore.runtime.breaker import Breaker
from kvstore.runtime.tasks import CLOSE_S, join_all, start_thread

log = logging.getLogger("vllm.kvstore")

POLL_S: Final = (0.002, 0.005, 0.01, 0.02)
"""Pauses between two lookups of blocks that are being written."""

STEP_PATIENCE_S: Final = 0.002
"""Time that one scheduler step may wait for replies, for all its requests together. Most take 0.2
ms, and a scheduler without other work would otherwise busy-poll."""

BUSY_PATIENCE_S: Final = 0.000_5
"""The same while other requests run, which also wait. Not 0: a request whose reply is late waits
for one of their steps (a miss of 200 tokens took 15 ms next to one, without patience 19)."""

FRESH_S: Final = 5.0
"""Time for which a reply is used: half of a master's default lease, which protects the blocks."""

ENDS_MAX: Final = 4
"""Ends of a hit that one lookup tries, if blocks of a window before the last one are missing."""

PENDING_MAX: Final = 4_096
"""Lookups, or calls, in progress; beyond this number the result is "nothing"."""

Ask = Callable[[Sequence[bytes], Sequence[str], Sequence[str]], EngineMatchResult]
"""Returns the number of leading keys that all namespaces of the first list hold, and the keys with
an object in all of the second. Raises KVStoreError within its timeout."""


class StoreQuery(NamedTuple):
    """One call to the store."""

    size: int
    """Tokens per key."""
    keys: list[bytes]
    chains: list[str]
    states: list[str]


T = TypeVar("T")


@dataclass(eq=False)
class PendingLookup:
    """One lookup and, once ``done`` is set, its result."""

    hashes: list[bytes]
    expected_tokens: int
    """Number of tokens that the prefiller reports as stored; 0: not reported."""
    sent: float
    done: threading.Event = field(default_factory=threading.Event)
    tokens: int = 0
    in_memory: int = 0
    """Of ``tokens``, those before the first that is on a disk only."""
    failed: bool = False
    waits_for_writers: bool = False
    wanted_since: float = 0.0
    """Time of the scheduler's first need of the result; 0: none yet."""
    on_reply: float = 0.0
    attempts: int = 0
    next_at: float = 0.0
    reaches: list[EngineMatchResult] = field(default_factory=list)
    """Replies of the last attempt, whose leases are not released yet."""


class LookupThread:
    """The lookups of one engine. The scheduler's thread calls the public methods; the lookup thread
    queries the store."""

    def __init__(
        self,
        ask: Ask,
        groups: Groups,
        *,
        release: Callable[[EngineMatchResult], object] = lambda _: None,
        deadline_s: float,
        writers_wait_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``release``: releases the lease of a reply, without waiting for the store."""
        self._release = release
        self.breaker = Breaker.of_a_store()
        self._refusals = DenialLog(log)
        self.is_busy: Callable[[], bool] = lambda: False
        """Whether requests run, which wait while the scheduler does."""
        self._counters: Counter[str] = Counter()
        self._latencies_us: list[int] = []
        self._ask = ask
        self._groups = groups
        self._deadline_s = deadline_s
        self._writers_wait_s = writers_wait_s
        self._clock = clock
        self._namespaces: dict[int, list[str]] = {}
        self._lookups: dict[str, PendingLookup] = {}
        self._waited_s = 0.0
        """In this step."""
        self._changed = threading.Condition()
        self._active: list[PendingLookup] = []
        self._errands: list[tuple[Future[Any], Callable[[], Any]]] = []
        self._closing = False
        self._thread: threading.Thread | None = None

    def start(self, namespaces: dict[int, list[str]]) -> None:
        """
        Args:
            namespaces: by cache group: the namespaces of all workers that hold layers of it.
        """
        self._namespaces = namespaces
        self._thread = start_thread("kvstore-lookups", self._run, died=self._died)

    def set_namespaces(self, namespaces: dict[int, list[str]]) -> None:
        """Look up in these namespaces from now on. Drops results for the former ones."""
        self._namespaces = namespaces
        self.clear()

    def request(
        self, request_id: str, hashes: Sequence[bytes], expected_tokens: int = 0
    ) -> PendingLookup:
        """Start the request's lookup; again, if the request has grown or the result is old."""
        now = self._clock()
        known = self._lookups.get(request_id)
        if (
            known is not None
            and len(known.hashes) == len(hashes)
            and (not known.done.is_set() or now - known.on_reply < FRESH_S)
        ):
            return known
        lookup = PendingLookup([bytes(hash_) for hash_ in hashes], expected_tokens, now)
        self._lookups[request_id] = lookup
        with self._changed:
            if self._closing or len(self._active) >= PENDING_MAX or self.breaker.is_open(now):
                self._complete(lookup, failed=True)
            else:
                self._active.append(lookup)
                self._changed.notify()
        return lookup

    def tokens(self, lookup: PendingLookup, *, patient: bool = True) -> int | None:
        """Return the number of stored leading tokens; None: not known yet, call again in the next
        step. Waits for the reply, within the patience of this step, only with ``patient``."""
        if patient and not lookup.done.is_set():
            left_s = (BUSY_PATIENCE_S if self.is_busy() else STEP_PATIENCE_S) - self._waited_s
            if left_s > 0:
                before = time.monotonic()
                lookup.done.wait(left_s)
                self._waited_s += time.monotonic() - before
        if lookup.done.is_set():
            return lookup.tokens
        if not patient:
            return None
        now = self._clock()
        lookup.wanted_since = lookup.wanted_since or now
        # With a report of the prefiller, waiting is useful before the first reply, too.
        is_worth_it = lookup.waits_for_writers or lookup.expected_tokens > 0
        patience = self._deadline_s + (self._writers_wait_s if is_worth_it else 0)
        if now - lookup.wanted_since < patience:
            return None
        with self._changed:
            if not lookup.done.is_set():
                self._counters["lookups_late"] += 1
                self._complete(lookup, tokens=lookup.tokens)
        return lookup.tokens

    def new_step(self) -> None:
        self._waited_s = 0.0

    def forget(self, request_id: str) -> None:
        """Drop the result, and release its blocks: they were loaded, or will not be."""
        lookup = self._lookups.pop(request_id, None)
        if lookup is not None:
            with self._changed:
                if not lookup.done.is_set():
                    self._complete(lookup, failed=True)
                self._hold(lookup, [])

    def _hold(self, lookup: PendingLookup, reaches: list[EngineMatchResult]) -> None:
        """Keep these leases for the lookup in place of earlier ones."""
        earlier, lookup.reaches = lookup.reaches, reaches
        for reach in earlier:
            self._release(reach)

    def clear(self) -> None:
        for request_id in list(self._lookups):
            self.forget(request_id)

    def run_on_thread(self, work: Callable[[], T]) -> Future[T]:
        """Run ``work`` on the lookup thread, between two lookups. If too many calls wait already,
        the future has a KVStoreError."""
        future: Future[T] = Future()
        with self._changed:
            if self._closing:
                future.set_exception(ClosedError("closed"))
            elif len(self._errands) >= PENDING_MAX:
                future.set_exception(UnavailableError("the store answers too slowly"))
            else:
                self._errands.append((future, work))
                self._changed.notify()
        return future

    def count(self, what: str) -> None:
        """Add 1 to a counter. Threads: any."""
        with self._changed:
            self._counters[what] += 1

    def take_counters(self) -> dict[str, int]:
        with self._changed:
            counters, self._counters = self._counters, Counter()
        return counters

    def take_latencies_us(self) -> list[int]:
        with self._changed:
            times, self._latencies_us = self._latencies_us, []
        return times

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not None:
            join_all([self._thread], CLOSE_S)
        errands, self._errands = self._errands, []
        for future, _ in errands:  # no caller may wait for these forever
            future.set_exception(ClosedError("closed"))

    def _died(self, error: BaseException) -> None:
        """Continue without the store after a bug has ended the thread."""
        log.error(
            "lookup_thread_failed: this engine finds no more blocks in the store; restart it: %r",
            error,
        )
        with self._changed:
            self._closing = True
            for lookup in self._active:
                self._complete(lookup, failed=True)
            errands, self._errands = self._errands, []
        for future, _ in errands:
            future.set_exception(ClosedError("the lookup thread has died"))

    def _run(self) -> None:
        while True:
            with self._changed:
                due: list[PendingLookup] = []
                while not self._closing and not self._errands:
                    now = self._clock()
                    self._active = [each for each in self._active if not each.done.is_set()]
                    due = [each for each in self._active if each.next_at <= now]
                    if due:
                        break
                    wake = min((each.next_at - now for each in self._active), default=None)
                    self._changed.wait(wake)
                if self._closing:
                    for lookup in self._active:
                        self._complete(lookup, failed=True)
                    return
                errands, self._errands = self._errands, []
                if errands:
                    due = []
            for future, work in errands:
                try:
                    future.set_result(work())
                except Exception as error:  # noqa: BLE001  # the waiting caller gets it
                    future.set_exception(error)
            for lookup in due:
                if not lookup.done.is_set():
                    self._run_queries(lookup)

    def _run_queries(self, lookup: PendingLookup) -> None:
        started = self._clock()
        if self.breaker.is_open(started):
            with self._changed:
                self._complete(lookup, failed=True)
            return
        try:
            reaches: list[EngineMatchResult] = []
            tokens, being_written, in_memory = self._match(lookup.hashes, reaches)
        except KVStoreError as error:
            with self._changed:
                self._counters["lookups_failed"] += 1
                self._complete(lookup, failed=True)
                opened = self.breaker.failed(self._clock())
                if opened:
                    self._counters["breaker_opened"] += 1
            if isinstance(error, PermissionDeniedError):
                self._refusals.log_once(error)
            elif opened:
                log.warning(
                    "store_unavailable, this engine computes without it for a while: %s", error
                )
            return
        except Exception:  # a bug in the connector must not end the thread
            log.exception("lookup_failed")
            with self._changed:
                self._counters["lookups_failed"] += 1
                self._complete(lookup, failed=True)
            return
        self.breaker.succeeded()
        now = self._clock()
        lookup.attempts += 1
        whole = self._groups.aligned(len(lookup.hashes) * self._groups.hash_block_tokens)
        missing = tokens < min(whole, self._groups.aligned(max(lookup.expected_tokens, 0)))
        with self._changed:
            self._hold(lookup, reaches)
            if lookup.done.is_set():  # forgotten, or too late
                self._hold(lookup, [])
                return
            self._latencies_us.append(int((now - started) * 1e6))
            lookup.tokens, lookup.in_memory = tokens, in_memory
            waited = now - lookup.sent
            if (being_written or missing) and tokens < whole and waited < self._writers_wait_s:
                lookup.waits_for_writers = True
                lookup.next_at = now + POLL_S[min(lookup.attempts, len(POLL_S)) - 1]
                return
            if lookup.waits_for_writers:
                self._counters["lookups_waited_for_writers"] += 1
            self._complete(lookup, tokens=tokens)

    def _match(
        self, hashes: list[bytes], reaches: list[EngineMatchResult]
    ) -> tuple[int, bool, int]:
        """Return the tokens that the store has of every group of every worker, whether more are
        being written, and the number of those tokens before the first on a disk only. Adds the
        replies, which are leased, to ``reaches``."""
        being_written = False
        for _ in range(ENDS_MAX):
            tokens, more, in_memory = self._match_end(hashes, reaches)
            end, missing, window = self._match_windows(hashes, tokens, reaches)
            being_written |= more | missing
            if end == tokens:
                return tokens, being_written, min(in_memory, window)
            hashes = hashes[: end // self._groups.hash_block_tokens]
        return 0, being_written, 0

    def _match_windows(
        self, hashes: list[bytes], tokens: int, reaches: list[EngineMatchResult]
    ) -> tuple[int, bool, int]:
        """Return ``tokens`` if the store has the window before them of every window group;
        otherwise the tokens before a missing block. Also whether such a block is being written,
        and the tokens before the first block of a window on a disk only."""
        groups, end, being_written = self._groups, tokens, False
        in_memory = tokens
        alike: dict[tuple[int, int], list[int]] = {}
        for group, window in groups.windows.items() if tokens else ():
            alike.setdefault((groups.tokens_of(group), window), []).append(group)
        for (size, _), ids in alike.items():
            keys = groups.keys(ids[0], hashes[: tokens // groups.hash_block_tokens])
            last = groups.last_keys(ids[0], keys)
            names = [name for group in ids for name in self._namespaces[group]]
            for start in range(0, len(names), NAMESPACES_MAX):
                reach = self._ask(last, names[start : start + NAMESPACES_MAX], [])
                reaches.append(reach)
                if reach.matched < len(last):
                    found = (len(keys) - len(last) + reach.matched) * size
                    end = min(end, groups.aligned(found))
                    being_written |= reach.being_written
                elif reach.on_disk:
                    found = (len(keys) - reach.on_disk) * size
                    in_memory = min(in_memory, groups.aligned(found))
        return end, being_written, in_memory

    def _match_end(
        self, hashes: list[bytes], reaches: list[EngineMatchResult]
    ) -> tuple[int, bool, int]:
        """As ``_match``, but of a window group only the last block counts. After full objects of
        several blocks, single blocks are looked for."""
        groups, being_written = self._groups, False
        tokens = in_memory = len(hashes) * groups.hash_block_tokens
        for size, keys, chains, states in self._queries(hashes):
            keys = keys[: tokens // size]
            if not keys:
                return 0, False, 0
            reach = self._ask(keys, chains, states)
            reaches.append(reach)
            tokens = min(tokens, (reach.state if states else reach.matched) * size)
            in_memory = min(in_memory, (reach.matched - reach.on_disk) * size)
            being_written |= reach.being_written
        tokens, in_memory = groups.aligned(tokens), groups.aligned(in_memory)
        size, first = groups.scheduler_block_tokens, tokens // groups.scheduler_block_tokens
        single = hashes[first : first + groups.blocks_per_object - 1]
        names = [name for group in groups.chains for name in self._namespaces[group]]
        end = tokens + len(single) * size
        in_memory = end if in_memory == tokens else in_memory
        for start in range(0, len(names), NAMESPACES_MAX) if single else ():
            reach = self._ask(single, names[start : start + NAMESPACES_MAX], [])
            reaches.append(reach)
            end = min(end, tokens + reach.matched * size)
            in_memory = min(in_memory, tokens + (reach.matched - reach.on_disk) * size)
            being_written |= reach.being_written
        return end, being_written, in_memory

    def _queries(self, hashes: list[bytes]) -> Iterator[StoreQuery]:
        """Yield the queries: one for most models. The last one is for states and windows, where a
        hit must end."""
        groups, size = self._groups, self._groups.scheduler_block_tokens
        flat = [*groups.recurrent, *groups.windows]
        states = [name for group in flat for name in self._namespaces[group]][:NAMESPACES_MAX]
        last = StoreQuery(size, groups.state_keys(hashes), [], states)
        by_size: dict[int, list[int]] = {}
        for group, tokens in groups.chains.items():
            if group in groups.windows:
                continue
            by_size.setdefault(tokens, []).append(group)
        for block_tokens, ids in by_size.items():
            names = [name for group in ids for name in self._namespaces[group]]
            for start in range(0, len(names), NAMESPACES_MAX):
                some = names[start : start + NAMESPACES_MAX]
                fits = len(some) + len(states) <= NAMESPACES_MAX and not last.chains
                if block_tokens == size and fits:
                    last = last._replace(chains=some)
                else:
                    yield StoreQuery(block_tokens, groups.keys(ids[0], hashes), some, [])
        if last.chains or last.states:
            yield last

    def _complete(self, lookup: PendingLookup, *, tokens: int = 0, failed: bool = False) -> None:
        lookup.tokens, lookup.failed, lookup.on_reply = tokens, failed, self._clock()
        lookup.done.set()
