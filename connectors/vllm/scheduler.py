"""The half of the connector in vLLM's engine core: decides what is loaded and what is saved.

    new request ─► lookup ─► so many tokens are there ─► blocks allocated ─► Load ─► it has arrived
    each step ─► blocks that are full now ─► pinned ─► Save ─► every worker has reported ─► unpinned

Everything here runs on the scheduler's thread, which every running request waits for: nothing
blocks, nothing raises because of the store. vLLM's objects are read, never changed, but for the
reference counts of pinned blocks.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvstore.config import ConnectorConfig
from kvstore.connectors.vllm.events import Events
from kvstore.connectors.vllm.groups import NULL_BLOCK, Groups
from kvstore.connectors.vllm.lookups import Lookups
from kvstore.connectors.vllm.messages import Load, Orders, Report, Run, Save

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

log = logging.getLogger("vllm.kvstore")

LOADS_MAX = 2
"""Of one request: after so many that failed, everything is computed."""

SAVES_MAX = 2
"""Of one request: after so many that failed, nothing more of it is saved."""


@dataclass
class Tracked:
    """One request, from its arrival until it is finished."""

    request: Request
    saved: dict[int, int] = field(default_factory=dict)
    """By group: blocks before this one are in the store, or on their way."""
    offered: int = 0
    """Tokens that the last lookup has offered."""
    missed: int | None = None
    """Tokens that could have been there and were not; None: not looked up, or counted already."""
    limit: int | None = None
    """Tokens that may be offered after a load has failed."""
    failed_loads: int = 0
    failed_saves: int = 0


@dataclass
class Pinned:
    """Blocks of one save, kept from other use."""

    request_id: str
    block_ids: list[int]
    workers_left: int
    runs: list[Run]
    stored: bool = True
    tokens: dict[int, list[int]] = field(default_factory=dict)
    """Of each run, for events."""
    lora: str | None = None


class SchedulerHalf:
    """See the module. The scheduler's thread only."""

    def __init__(
        self,
        config: ConnectorConfig,
        groups: Groups,
        lookups: Lookups,
        events: Events,
        *,
        loads: bool,
        saves: bool,
        workers: int,
    ) -> None:
        """
        Args:
            loads, saves: what the role says (``kv_consumer``, ``kv_producer``).
            workers: how many report each save.
        """
        self.fingerprint = ""
        """Set once the workers have said what they have."""
        self.counters: dict[str, int] = {}
        self._config = config
        self._groups = groups
        self._lookups = lookups
        self._events = events
        self._does_load = loads
        self._does_save = saves
        self._workers = workers
        self._pool: BlockPool | None = None
        self._tracked: dict[str, Tracked] = {}
        self._loads: list[Load] = []
        self._pinned: dict[int, Pinned] = {}
        self._pinned_blocks = 0
        self._next_save = 0

    # --- looking up ---------------------------------------------------------------------------

    def new_request(self, request: Request) -> None:
        """Its lookup starts now, so that the answer is there when the scheduler comes to it."""
        self._tracked[request.request_id] = Tracked(request)
        if self._may_load(request) and len(request.block_hashes):
            self._want(request)

    def matched_tokens(self, request: Request, computed: int) -> tuple[int | None, bool]:
        """As ``get_num_new_matched_tokens``: tokens beyond those ``computed`` here that can be
        loaded, in the background; None: not known yet."""
        tracked = self._tracked.setdefault(request.request_id, Tracked(request))
        tracked.offered = 0
        if not self._may_load(request):
            return 0, False
        limit = self._limit(tracked)
        useful = limit > computed
        there = self._lookups.tokens(self._want(request), patient=useful)
        if there is None:
            return (None if useful else 0), False
        tracked.saved = {
            group: there // tokens for group, tokens in self._groups.block_tokens.items()
        }
        if not useful:  # but now we know what need not be saved
            return 0, False
        tokens = self._groups.aligned(min(there, limit))
        tracked.missed = limit - max(tokens, computed)
        if tokens <= computed:
            return 0, False
        tracked.offered = tokens
        return tokens - computed, True

    def _may_load(self, request: Request) -> bool:
        return self._does_load and not _params(request).get("no_load")

    def _limit(self, tracked: Tracked) -> int:
        """The most tokens that may be loaded: one must be left to compute."""
        request = tracked.request
        limit = self._groups.aligned(max(request.num_tokens - 1, 0))
        wanted = _params(request).get("max_load_tokens")
        if isinstance(wanted, int):
            limit = min(limit, self._groups.aligned(max(wanted, 0)))
        return limit if tracked.limit is None else min(limit, tracked.limit)

    def _want(self, request: Request) -> Any:
        expected = _params(request).get("stored_tokens")
        return self._lookups.want(
            request.request_id,
            request.block_hashes,
            expected if isinstance(expected, int) else 0,
        )

    def allocated(self, request: Request, blocks: KVCacheBlocks, tokens: int) -> None:
        """As ``update_state_after_alloc``: ``tokens`` are to be loaded into these blocks."""
        tracked = self._tracked.setdefault(request.request_id, Tracked(request))
        if tracked.missed:
            self._count("missed_tokens", tracked.missed)
            tracked.missed = None
        if tokens <= 0 or not tracked.offered:
            return
        first = {
            group: (tracked.offered - tokens) // size
            for group, size in self._groups.block_tokens.items()
        }
        runs = list(
            self._groups.runs(request.block_hashes, blocks.get_block_ids(), first, tracked.offered)
        )
        self._loads.append(Load(request.request_id, runs))
        self._count("loaded_requests")
        self._count("hit_tokens", tokens)
        tracked.offered = 0

    # --- every step ---------------------------------------------------------------------------

    def orders(self, output: SchedulerOutput) -> Orders:
        """As ``build_connector_meta``."""
        self._lookups.new_step()
        orders = Orders(self.fingerprint, self._loads)
        self._loads = []
        if self._does_save:
            orders.saves = list(self._saves(output))
        for request_id in output.finished_req_ids:
            self._tracked.pop(request_id, None)
            self._lookups.forget(request_id)
        return orders

    def _saves(self, output: SchedulerOutput) -> Iterator[Save]:
        state = output.kv_connector_block_state
        if state is None:
            return
        for request_id, scheduled in output.num_scheduled_tokens.items():
            tracked = self._tracked.get(request_id)
            if (
                tracked is None
                or tracked.failed_saves >= SAVES_MAX
                or _params(tracked.request).get("no_store")
            ):
                continue
            savable = self._savable(tracked.request, scheduled)
            if not self._is_news(tracked, savable):
                continue
            tokens = self._fitting(tracked, savable)
            if tokens < savable:
                self._count("saves_refused")
                if not self._is_news(tracked, tokens):
                    continue
            table = state.get_block_ids(request_id)
            if table is None:
                continue
            hashes = tracked.request.block_hashes
            runs = list(self._groups.runs(hashes, table, tracked.saved, tokens))
            if runs:
                for group, size in self._groups.block_tokens.items():
                    tracked.saved[group] = max(tracked.saved.get(group, 0), tokens // size)
                yield self._pin(tracked.request, runs)

    def _is_news(self, tracked: Tracked, tokens: int) -> bool:
        """Whether some group has a block of these tokens that is not saved; of most requests in
        most steps none has."""
        sizes = self._groups.block_tokens.items()
        return any(tokens // size > tracked.saved.get(group, 0) for group, size in sizes)

    def _savable(self, request: Request, scheduled: int) -> int:
        """Tokens whose blocks are whole after this step. Only what is confirmed has a hash: tokens
        that are guessed ahead have none."""
        tokens: int = min(
            request.num_computed_tokens + scheduled,
            len(request.block_hashes) * self._groups.hash_block_tokens,
        )
        if not self._config.save_decode:
            tokens = min(tokens, request.num_prompt_tokens)
        return tokens

    def _fitting(self, tracked: Tracked, tokens: int) -> int:
        """As many of these tokens as may be pinned now: the rest is saved in a later step."""
        assert self._pool is not None, "bind_block_pool comes first"
        room = int(self._pool.num_gpu_blocks * self._config.pinned_max) - self._pinned_blocks

        def blocks(tokens: int) -> int:
            return sum(
                max(0, tokens // size - tracked.saved.get(group, 0))
                for group, size in self._groups.block_tokens.items()
            )

        if blocks(tokens) <= room:
            return tokens
        align = self._groups.align_tokens
        return (
            bisect_right(range(tokens // align + 1), room, key=lambda each: blocks(each * align))
            - 1
        ) * align

    def _pin(self, request: Request, runs: list[Run]) -> Save:
        """A reference for each block, so that it is not reused before it is saved."""
        pool = self._pool
        assert pool is not None, "bind_block_pool comes first"
        block_ids = list(dict.fromkeys(each for run in runs for each in run.block_ids))
        assert NULL_BLOCK not in block_ids
        pool.touch([pool.blocks[block_id] for block_id in block_ids])
        self._pinned_blocks += len(block_ids)
        self._next_save += 1
        pinned = Pinned(request.request_id, block_ids, self._workers, runs)
        if self._events.wanted:
            pinned.tokens = self._events.tokens_of(request, runs)
            pinned.lora = request.lora_request.lora_name if request.lora_request else None
        self._pinned[self._next_save] = pinned
        return Save(self._next_save, runs)

    def reported(self, report: Report) -> None:
        """What the workers say has ended."""
        for number, end in report.saves.items():
            pinned = self._pinned.get(number)
            if pinned is None:
                continue
            pinned.workers_left -= end.workers
            pinned.stored &= end.stored == end.workers
            if pinned.workers_left > 0:
                continue
            del self._pinned[number]
            self._unpin(pinned)
            if pinned.stored:
                self._events.stored(pinned.runs, pinned.tokens, pinned.lora)
            else:
                self._save_failed(pinned)
        for request_id, tokens in report.failed_loads.items():
            self._load_failed(request_id, tokens)

    def _unpin(self, pinned: Pinned) -> None:
        pool = self._pool
        assert pool is not None
        self._pinned_blocks -= len(pinned.block_ids)
        # The tail first, so that the shared beginning is evicted last.
        pool.free_blocks(pool.blocks[block_id] for block_id in reversed(pinned.block_ids))

    def _save_failed(self, pinned: Pinned) -> None:
        """It is saved again with what comes next: a chain with a hole is found by nobody."""
        self._count("saves_failed")
        tracked = self._tracked.get(pinned.request_id)
        if tracked is not None:
            tracked.failed_saves += 1
            for run in pinned.runs:
                tracked.saved[run.group] = min(tracked.saved.get(run.group, 0), run.first)

    def _load_failed(self, request_id: str, good_tokens: int) -> None:
        """What could not be loaded is not offered to this request again."""
        self._count("loads_failed")
        tracked = self._tracked.get(request_id)
        if tracked is None:
            return
        tracked.failed_loads += 1
        again = self._groups.aligned(good_tokens) if tracked.failed_loads < LOADS_MAX else 0
        tracked.limit = again if tracked.limit is None else min(again, tracked.limit)
        for group, size in self._groups.block_tokens.items():  # whatever is gone is stored anew
            tracked.saved[group] = min(tracked.saved.get(group, 0), tracked.limit // size)
        self._lookups.forget(request_id)

    # --- and else -----------------------------------------------------------------------------

    def bind_block_pool(self, pool: BlockPool) -> None:
        self._pool = pool

    @property
    def has_pinned(self) -> bool:
        """Whether steps must go on, so that workers can report."""
        return bool(self._pinned)

    @property
    def pinned_blocks(self) -> int:
        return self._pinned_blocks

    def finished(self, request: Request) -> dict[str, Any] | None:
        """What is returned to whoever sent the request: how much of it the store has, or will."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or not self._does_save:
            return None
        sizes = self._groups.block_tokens
        tokens = min(tracked.saved.get(group, 0) * size for group, size in sizes.items())
        return {"stored_tokens": self._groups.aligned(tokens)} if tokens else None

    def reset(self) -> None:
        """The store was cleared: what is known of it is forgotten."""
        self._lookups.clear()
        for tracked in self._tracked.values():
            tracked.saved = {}
            tracked.offered = 0

    def take_counters(self) -> dict[str, int]:
        counters, self.counters = self.counters, {}
        return counters

    def check_invariants(self) -> None:
        assert self._pinned_blocks == sum(len(each.block_ids) for each in self._pinned.values())
        assert all(each.workers_left > 0 for each in self._pinned.values())

    def _count(self, what: str, number: int = 1) -> None:
        self.counters[what] = self.counters.get(what, 0) + number


def _params(request: Request) -> dict[str, Any]:
    return request.kv_transfer_params or {}
