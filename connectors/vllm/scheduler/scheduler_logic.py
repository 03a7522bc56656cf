"""The scheduler side, in vLLM's engine core: decides on loads and saves.

    new request ─► lookup ─► number of stored tokens ─► blocks allocated ─► Load ─► blocks loaded
    each step ─► blocks that are full now ─► kept ─► Save ─► every worker has reported ─► freed

This module runs on the scheduler's thread, for which every running request waits: no call blocks,
and no failure of the store raises. vLLM's objects are only read, except for the reference counts of
blocks being saved and the hashes of stale requests.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvstore.calls import HintAction
from kvstore.calls.hint_envelopes import EnvelopeAction, parse_envelope
from kvstore.config import ConnectorConfig
from kvstore.connectors.vllm.groups import NULL_BLOCK, Groups
from kvstore.connectors.vllm.messages import (
    LoadCommand,
    Run,
    SaveCommand,
    TransferCommands,
    TransferReport,
)
from kvstore.connectors.vllm.scheduler.events import BlockEvents
from kvstore.connectors.vllm.scheduler.fingerprint_tracker import FingerprintTracker
from kvstore.connectors.vllm.scheduler.load_rule import LoadRule
from kvstore.connectors.vllm.scheduler.lookups import LookupThread
from kvstore.connectors.vllm_media import is_shared
from kvstore.errors import InvalidArgumentError
from kvstore.limits import TTL_MS_MAX

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

log = logging.getLogger("vllm.kvstore")

PINNED_MAX: Final = 0.5
"""Maximum share of the engine's blocks that wait to be saved; further blocks wait for a later step.
The engine computes with the other half."""

EVICT_FIRST: Final = EnvelopeAction("replaced", HintAction.RELEASE)
"""Of single blocks which a full object replaces; those that another chain shares stay."""

REQUEST_PIN_MS_MAX: Final = 600_000
"""Maximum pin of a request (``pin_ms`` in kv_transfer_params): most agents return from a tool
within ten minutes."""

LOADS_MAX = 2
"""Failed loads of a request after which all its tokens are computed."""

Tips = dict[int, Sequence[bytes]]
"""The last keys of a request, by group."""

SAVES_MAX = 2
"""Failed saves of a request after which no more of its blocks are saved."""


@dataclass
class HashCache:
    """Hashes derived from those of vLLM."""

    made: list[bytes] = field(default_factory=list)
    source: list[bytes] = field(default_factory=list)

    def keep(self, hashes: Sequence[bytes]) -> None:
        """Drop hashes derived from others than these, or beyond them. A session's next input
        replaces its last tokens; each hash covers the tokens before it."""
        source = self.source
        while source and (len(source) > len(hashes) or source[-1] != hashes[len(source) - 1]):
            source.pop()
        del self.made[len(source) :]


class StartedLoad(NamedTuple):
    tokens: int
    on_disk: int
    """Of ``tokens``, those that were on disks only when they were looked up."""
    at: float
    failed_loads: int
    """Of the request, before this one."""


class StartedPrefill(NamedTuple):
    request: Request
    first: int
    """Tokens before those that are computed."""
    at: float


@dataclass
class TrackedRequest:
    """One request, from its arrival until it is finished."""

    request: Request
    saved: dict[int, int] = field(default_factory=dict)
    """By group with chains: full objects before this token are in the store, or being saved."""
    tail_tokens: int = 0
    """If objects have several blocks: tokens before the end of the single blocks after the last
    full object that are in the store, or being saved."""
    replaced: bytes = b""
    """The last key of the single blocks that the full object being saved replaces."""
    found_tokens: int = 0
    """Tokens that the store had at the last lookup."""
    state_tokens: int = 0
    """Last position at which the store has, or will have, a state of each recurrent group."""
    external_tokens: int = 0
    """Tokens that the last lookup has reported to vLLM as stored."""
    in_memory: int = 0
    """Of them, those before the first on a disk only."""
    choice: tuple[int, int] = (0, 0)
    """Stored tokens, and those of them to load by the rule, which decides once."""
    load: StartedLoad | None = None
    missed: int | None = None
    """Tokens that the lookup did not find; None: not looked up, or counted already."""
    limit: int | None = None
    """Maximum of external tokens after a failed load."""
    failed_loads: int = 0
    failed_saves: int = 0
    is_stale: bool = False
    """Whether some of its blocks were computed with weights that have been replaced."""
    salt: bytes = b""
    salted: HashCache = field(default_factory=HashCache)
    """The keys of its hash blocks, salted, if the request uses an adapter."""
    hints: list[EnvelopeAction] = field(default_factory=list)
    """The actions of its hint envelope that have not been sent to the store."""


@dataclass
class BlocksBeingSaved:
    """The blocks of one save, which vLLM may not reuse until it has ended."""

    request_id: str
    block_ids: list[int]
    workers_remaining: int
    runs: list[Run]
    stored: bool = True
    tokens: dict[int, list[int]] = field(default_factory=dict)
    """Token ids by index of the run, for events."""
    lora: str | None = None
    plain: dict[bytes, Sequence[bytes]] = field(default_factory=dict)
    """vLLM's hashes of the blocks of each object, by its key, where they differ; for events."""
    fingerprint: str = ""
    keep_ms: int = 0
    """Duration of the pin in the store; 0: none."""
    send_hints: Callable[[], object] | None = None
    """Sends the hints of the finished request, whose last save this is."""
    replaced: bytes = b""
    """As in ``TrackedRequest``."""


class SchedulerLogic:
    """The decisions about all requests of one engine. For the scheduler's thread only."""

    def __init__(
        self,
        config: ConnectorConfig,
        groups: Groups,
        identity: FingerprintTracker,
        lookups: LookupThread,
        events: BlockEvents,
        *,
        loads: bool,
        saves: bool,
        workers: int,
    ) -> None:
        """
        Args:
            identity: while it has no fingerprint, no block is loaded or saved.
            loads, saves: whether this engine loads (``kv_consumer``) and saves (``kv_producer``).
            workers: number of workers that report each save.
        """
        self.salt: Callable[[Request], bytes | None] = lambda _: b""
        """The salt that a request's keys contain besides vLLM's hash; None: not known."""
        self.keep: Callable[[Tips, int], object] = lambda tips, time_ms: None
        """Pins the objects of these keys, by group, and their ancestors in the store."""
        self.hint: Callable[[list[EnvelopeAction], Tips], object] = lambda hints, tips: None
        """Carries out hints in the store; the tips are those of the request."""
        self.are_names_marked = True
        """Whether the plug-in prefixes client names of images, sounds and videos."""
        self.counters: Counter[str] = Counter()
        self.load_rule = LoadRule(
            is_on=config.load_if_faster, all_or_none=bool(groups.recurrent or groups.windows)
        )
        self._starting: list[Request] = []
        """Requests that vLLM has just given blocks to compute."""
        self._prefills: dict[str, StartedPrefill] = {}
        self._config = config
        self._groups = groups
        self._identity = identity
        self._lookups = lookups
        self._events = events
        self._does_load = loads
        self._does_save = saves
        self._workers = workers
        self._pool: BlockPool | None = None
        self._tracked: dict[str, TrackedRequest] = {}
        self._loads: list[LoadCommand] = []
        self._held: list[SaveCommand] = []
        """Saves that wait until the weights of their blocks are verified."""
        self._pinned: dict[int, BlocksBeingSaved] = {}
        self.pinned_blocks = 0
        self._loading: set[str] = set()
        self._next_save = 0
        self._last_pinned = 0.0

    def new_request(self, request: Request) -> None:
        """Start the request's lookup, so that the result is ready when the scheduler needs it."""
        tracked = self._tracked[request.request_id] = TrackedRequest(request)
        tracked.hints = self._hints_of(request)
        if self._may_load(request) and len(request.block_hashes):
            hashes = self._hashes(tracked)
            if hashes is not None:
                self._request_lookup(request, hashes, self._limit(tracked))

    def matched_tokens(self, request: Request, computed: int) -> tuple[int | None, bool]:
        """Implement ``get_num_new_matched_tokens``: return the number of tokens beyond the
        ``computed`` ones that can be loaded (None: not known yet), and whether in the
        background."""
        tracked = self._tracked.setdefault(request.request_id, TrackedRequest(request))
        tracked.external_tokens = 0
        if not self._may_load(request):
            return 0, False
        hashes = self._hashes(tracked)
        if hashes is None:
            return 0, False
        limit = self._limit(tracked)
        useful = limit > computed
        lookup = self._request_lookup(request, hashes, limit)
        there = self._lookups.tokens(lookup, patient=useful)
        if there is None:
            return (None if useful else 0), False
        tracked.saved = self._full(there)
        tracked.tail_tokens = tracked.found_tokens = there
        if self._events.wanted and there != tracked.state_tokens:
            self._report_found(tracked, hashes, there)
        tracked.state_tokens = there
        if prefetched := self._take_hints(tracked, at_arrival=True):
            self.hint(prefetched, self._tips(tracked, there))
        if not useful:  # the lookup still shows which blocks need not be saved
            return 0, False
        tokens = self._groups.aligned(min(there, limit))
        tracked.missed = limit - max(tokens, computed)
        if tokens <= computed:
            return 0, False
        tracked.in_memory = min(lookup.in_memory, tokens)
        if tracked.choice[0] != tokens:
            loaded = self.load_rule.choose(computed, tracked.in_memory, tokens)
            if loaded < tokens:
                self.counters["computed_stored_tokens"] += tokens - loaded
            tracked.choice = tokens, loaded
        loaded = tracked.choice[1]
        if loaded <= computed:
            return 0, False
        tracked.external_tokens = loaded
        return loaded - computed, True

    def _report_found(self, tracked: TrackedRequest, hashes: Sequence[bytes], tokens: int) -> None:
        """Report the blocks of the first ``tokens`` tokens, which the store has, unless they are
        reported. Of windows it may have only the last one, so they are left out."""
        request, runs = tracked.request, list[Run]()
        for run in self._groups.objects(hashes, None, 0, tokens, tokens):
            if run.group in self._groups.windows:
                continue
            known = (self._events.is_reported((run.group, key)) for key in run.keys)
            first = next((index for index, is_known in enumerate(known) if not is_known), None)
            if first is not None:
                parent = run.keys[first - 1] if first else run.parent
                runs.append(
                    Run(run.group, run.keys[first:], [], run.first + first, parent, run.each)
                )
        if runs:
            lora = request.lora_request.lora_name if request.lora_request else None
            tokens_of, plain = self._events.tokens_of(request, runs), self._plain(tracked, runs)
            self._events.stored(runs, tokens_of, lora, plain)

    def _plain(self, tracked: TrackedRequest, runs: Sequence[Run]) -> dict[bytes, Sequence[bytes]]:
        """Return vLLM's hashes of the blocks of each object, by its key, where they differ."""
        salted = tracked.salted
        hashes = salted.source if tracked.request.lora_request else tracked.request.block_hashes
        plain: dict[bytes, Sequence[bytes]] = {
            key: (hash_,) for key, hash_ in zip(salted.made, salted.source)
        }
        for run in runs:
            if run.each > 1:
                for number, key in enumerate(run.keys, run.first):
                    plain[key] = hashes[number * run.each : (number + 1) * run.each]
        return plain

    def _hints_of(self, request: Request) -> list[EnvelopeAction]:
        """Return the actions of a request's hint envelope; a malformed one is counted."""
        envelope = getattr(request, "kv_hints", None) or _params(request).get("kv_hint")
        if envelope is None:
            return []
        try:
            actions = parse_envelope(envelope)
        except InvalidArgumentError as error:
            self.counters["hints_failed"] += 1
            log.debug("hints_malformed request=%s reason=%s", request.request_id, error)
            return []
        shortened = [
            each._replace(duration_ms=min(each.duration_ms, REQUEST_PIN_MS_MAX))
            for each in actions
            if each.is_pin
        ]
        return shortened + [each for each in actions if each.action]

    def _take_hints(self, tracked: TrackedRequest, *, at_arrival: bool) -> list[EnvelopeAction]:
        """Return the hints to send at a request's arrival (prefetches), or at its end."""
        if not tracked.hints:
            return []
        early = [each for each in tracked.hints if each.action is HintAction.PREFETCH]
        late = [each for each in tracked.hints if each.action is not HintAction.PREFETCH]
        tracked.hints = late if at_arrival else []
        return early if at_arrival else late

    def _tips(self, tracked: TrackedRequest, tokens: int) -> Tips:
        """Return the last keys of the first ``tokens`` tokens; empty: they are not known."""
        if not tokens or tracked.is_stale or (hashes := self._hashes(tracked)) is None:
            return {}
        return self._groups.tips(hashes, tokens)

    def _may_load(self, request: Request) -> bool:
        is_wanted = self._does_load and not _params(request).get("no_load")
        return bool(self._identity.fingerprint and is_wanted and self._is_shared(request))

    def _is_shared(self, request: Request) -> bool:
        return is_shared(
            request, trusts_names=self._config.shares_named_media,
            are_names_marked=self.are_names_marked,
        )  # fmt: skip

    def _hashes(self, tracked: TrackedRequest) -> Sequence[bytes] | None:
        """Return the hash of each hash block, from which keys are made; None: not known."""
        request = tracked.request
        hashes: Sequence[bytes] = request.block_hashes
        if request.lora_request is None:
            return hashes
        salt = self.salt(request)
        if salt is None or (tracked.salt and tracked.salt != salt):
            return None
        tracked.salt = salt
        salted = tracked.salted
        salted.keep(hashes)
        news = hashes[len(salted.source) :]
        salted.made += (hashlib.sha256(salt + new).digest() for new in news)
        salted.source += news
        return salted.made

    def _limit(self, tracked: TrackedRequest) -> int:
        """Return the maximum of tokens to load: vLLM must compute at least one."""
        request = tracked.request
        limit = self._groups.aligned(max(request.num_tokens - 1, 0))
        wanted = _params(request).get("max_load_tokens")
        if isinstance(wanted, int):
            limit = min(limit, self._groups.aligned(max(wanted, 0)))
        return limit if tracked.limit is None else min(limit, tracked.limit)

    def _request_lookup(self, request: Request, hashes: Sequence[bytes], limit: int) -> Any:
        """``limit``: the maximum of tokens to load."""
        if self._groups.recurrent or self._groups.windows:
            # A state or window beyond them is useless, and hides an earlier one.
            hashes = hashes[: limit // self._groups.hash_block_tokens]
        expected = _params(request).get("stored_tokens")
        return self._lookups.request(
            request.request_id,
            hashes,
            expected if isinstance(expected, int) else 0,
        )

    def allocated(self, request: Request, blocks: KVCacheBlocks, tokens: int) -> None:
        """Implement ``update_state_after_alloc``: ``tokens`` are to be loaded into these blocks."""
        tracked = self._tracked.setdefault(request.request_id, TrackedRequest(request))
        if tracked.missed:
            self.counters["missed_tokens"] += tracked.missed
            tracked.missed = None
        if tokens <= 0 or not tracked.external_tokens:
            self._lookups.forget(request.request_id)
            self._starting.append(request)
            return
        on_disk = max(0, tracked.external_tokens - tracked.in_memory)
        tracked.load = StartedLoad(
            tokens, min(tokens, on_disk), time.monotonic(), tracked.failed_loads
        )
        hashes = self._hashes(tracked)
        assert hashes is not None, "external tokens have keys"
        table, end = blocks.get_block_ids(), tracked.external_tokens
        found = self._groups.objects(hashes, table, end - tokens, end, tracked.found_tokens)
        runs = [*found, *self._groups.states(hashes, table, end)]
        self._loads.append(LoadCommand(request.request_id, runs))
        self._loading.add(request.request_id)
        self.counters["loaded_requests"] += 1
        self.counters["hit_tokens"] += tokens
        if self._groups.recurrent:
            self.counters["hit_states"] += 1
        tracked.external_tokens = 0

    def transfer_commands(self, output: SchedulerOutput) -> TransferCommands:
        """Implement ``build_connector_meta``: return the commands of this step."""
        self._lookups.new_step()
        orders = TransferCommands(
            self._identity.fingerprint, self._loads, draft=self._identity.draft
        )
        self._loads = []
        self._measure_prefills()
        if self._does_save and self._identity.fingerprint:
            self._held += self._saves(output)
        orders.saves = self.take_ready_saves()
        for request_id in output.finished_req_ids:
            self._tracked.pop(request_id, None)
            self._prefills.pop(request_id, None)
            self._lookups.forget(request_id)
        return orders

    def _measure_prefills(self) -> None:
        """Record prefills that have ended, and begin to measure those that start with this step."""
        for prefill in list(self._prefills.values()):
            self._measure_prefill(prefill.request)
        now = time.monotonic()
        for request in self._starting:
            first, started = request.num_computed_tokens, self._prefills.get(request.request_id)
            is_prompt = request.num_tokens == request.num_prompt_tokens
            if is_prompt and (started is None or first <= started.first):  # again, if preempted
                self._prefills[request.request_id] = StartedPrefill(request, first, now)
        self._starting.clear()

    def _measure_prefill(self, request: Request) -> None:
        """Record this prefill if it has ended, which its first output token shows."""
        prompt = request.num_prompt_tokens
        if request.num_tokens > prompt and (
            started := self._prefills.pop(request.request_id, None)
        ):
            self.load_rule.prefilled(started.first, prompt, time.monotonic() - started.at)

    def take_ready_saves(self) -> list[SaveCommand]:
        """Return the saves to start now. Drops those of blocks that may have other weights."""
        fingerprint = self._identity.fingerprint
        for save in list(self._held):
            if self._pinned[save.number].fingerprint != fingerprint:
                self._drop(save)
        if not self._identity.is_verified:
            return []
        released, self._held = self._held, []
        return released

    def _drop(self, save: SaveCommand) -> None:
        """Drop a deferred save."""
        self._held.remove(save)
        pinned = self._pinned.pop(save.number)
        self._unpin(pinned)
        self._save_failed(pinned)

    def _saves(self, output: SchedulerOutput) -> Iterator[SaveCommand]:
        state = output.kv_connector_block_state
        if state is None:
            return
        for request_id, scheduled in output.num_scheduled_tokens.items():
            tracked = self._tracked.get(request_id)
            if tracked is None or not self._may_save(tracked):
                continue
            to_save = self._tokens_to_save(tracked.request, scheduled)
            offers = state.boundary_state_offloads.get(request_id, ())
            is_news = self._is_news(tracked, to_save) or bool(offers)
            if not is_news or not self._is_shared(tracked.request):
                continue
            table = state.get_block_ids(request_id)
            hashes = self._hashes(tracked)
            if table is None or hashes is None:
                continue
            runs = self._chains_to_save(tracked, hashes, table, to_save)
            room = self._remaining_blocks() - sum(len(run.block_ids) for run in runs)
            runs += self._states_to_save(tracked, hashes, offers, to_save, room)
            if runs:
                yield self._pin(tracked.request, runs)

    def _may_save(self, tracked: TrackedRequest) -> bool:
        is_wanted = not _params(tracked.request).get("no_store")
        return is_wanted and not tracked.is_stale and tracked.failed_saves < SAVES_MAX

    def _chains_to_save(
        self,
        tracked: TrackedRequest,
        hashes: Sequence[bytes],
        table: Sequence[Sequence[int]],
        to_save: int,
    ) -> list[Run]:
        """Return the chain objects that are full now and fit, and record them as being saved. The
        single blocks at the end of the prompt are saved when it is computed, those of the answer
        with ``_save_end``."""
        if not self._is_news(tracked, to_save):
            return []
        tokens = self._fitting(tracked, to_save)
        if tokens < to_save:
            self.counters["saves_refused"] += 1
            if not self._is_news(tracked, tokens):
                return []
        runs = list(self._groups.runs(hashes, table, tracked.saved, tokens, tokens))
        size, single = self._groups.full_tokens, tracked.tail_tokens
        end = tokens - tokens % size
        if runs:
            if single % size and self._saved(tracked) < single < end:
                tracked.replaced = bytes(hashes[single // self._groups.hash_block_tokens - 1])
            for group, full in self._full(tokens).items():
                tracked.saved[group] = max(tracked.saved.get(group, 0), full)
        if tail := self._tail(tracked, tokens):
            runs += self._single_blocks(tracked, hashes, table, tail, end)
        return runs

    def _full(self, tokens: int) -> dict[int, int]:
        """Return the end of the last full object of each chain within ``tokens``."""
        return {group: tokens - tokens % size for group, size in self._groups.chains.items()}

    def _saved(self, tracked: TrackedRequest) -> int:
        """Return the tokens of which every chain has full objects."""
        return min([tracked.saved.get(group, 0) for group in self._groups.chains], default=0)

    def _single_blocks(
        self, tracked: TrackedRequest, hashes: Sequence[bytes], table: Sequence[Sequence[int]],
        tail: int, end: int,
    ) -> list[Run]:  # fmt: skip
        """Return the blocks of the tokens before ``tail`` that are not saved. The full objects
        reach to ``end``."""
        start = dict.fromkeys(self._groups.chains, max(end, tracked.tail_tokens))
        tracked.tail_tokens = tail
        return list(self._groups.runs(hashes, table, start, tail, tail, each=1))

    def _save_end(self, tracked: TrackedRequest, table: Sequence[Sequence[int]]) -> None:
        """Save the single blocks at the end of a finished request."""
        if not (self._does_save and self._identity.fingerprint and self._may_save(tracked)):
            return
        size, end = self._groups.full_tokens, self._saved(tracked)
        tail = self._groups.aligned(self._tokens_to_save(tracked.request, 0))
        count = (tail - max(end, tracked.tail_tokens)) // self._groups.scheduler_block_tokens
        if not 0 < count <= self._remaining_blocks() or tail - end >= size:
            return
        if self._is_shared(tracked.request) and (hashes := self._hashes(tracked)) is not None:
            runs = self._single_blocks(tracked, hashes, table, tail, end)
            self._held.append(self._pin(tracked.request, runs))

    def _tail(self, tracked: TrackedRequest, tokens: int) -> int:
        """Return the tokens before the end of the single blocks to save now; 0: none. ``tokens``:
        those whose blocks may be saved."""
        size = self._groups.full_tokens
        tail = self._groups.aligned(min(tokens, tracked.request.num_prompt_tokens))
        is_computed = tokens >= self._groups.aligned(tracked.request.num_prompt_tokens)
        is_new = tail > max(tokens - tokens % size, tracked.tail_tokens)
        return tail if is_computed and is_new else 0

    def _states_to_save(
        self, tracked: TrackedRequest, hashes: Sequence[bytes],
        offers: Iterable[tuple[int, int, int]], to_save: int, room: int,
    ) -> list[Run]:  # fmt: skip
        """Return the states that vLLM offers now, where a hit may end: vLLM keeps them only while
        it needs them. Their contents are final after this step.

        Args:
            offers: of the request: group, block, and tokens before the state.
            room: number of blocks that may still be kept for saves.
        """
        places: dict[int, dict[int, int]] = {}
        for group, block_id, tokens in offers:
            is_new = tracked.state_tokens < tokens <= to_save
            if is_new and tokens == self._groups.aligned(tokens) and block_id != NULL_BLOCK:
                places.setdefault(tokens, {})[group] = block_id
        runs: list[Run] = []
        for tokens, blocks in sorted(places.items()):
            if blocks.keys() != self._groups.recurrent:
                continue  # useless without the others
            if len(runs) + len(blocks) > room:
                self.counters["saves_refused"] += 1
                break
            runs += [
                self._groups.state(hashes, group, block_id, tokens)
                for group, block_id in sorted(blocks.items())
            ]
            tracked.state_tokens = tokens
            self.counters["saved_states"] += 1
        return runs

    def _is_news(self, tracked: TrackedRequest, tokens: int) -> bool:
        """Return whether a block of these tokens is not saved in some group. In most steps this is
        false for most requests."""
        sizes = self._groups.chains.items()
        is_news = any(tokens - size >= tracked.saved.get(group, 0) for group, size in sizes)
        return is_news or self._tail(tracked, tokens) > 0

    def _tokens_to_save(self, request: Request, scheduled: int) -> int:
        """Return the tokens whose blocks are full after this step. Only confirmed tokens have a
        hash; speculative ones have none."""
        hashed = len(request.block_hashes) * self._groups.hash_block_tokens
        tokens: int = min(request.num_computed_tokens + scheduled, hashed)
        if not self._config.save_decode:
            tokens = min(tokens, request.num_prompt_tokens)
        return tokens

    def _fitting(self, tracked: TrackedRequest, tokens: int) -> int:
        """Return the number of these tokens that may be saved now; the rest waits for a later
        step."""
        room = self._remaining_blocks()

        def blocks(tokens: int) -> int:
            count = 0
            for group, size in self._groups.chains.items():
                each = self._groups.blocks_per_object
                count += max(0, tokens // size - tracked.saved.get(group, 0) // size) * each
                count += each - 1
            return count

        if blocks(tokens) <= room:
            return tokens
        scheduler_block = self._groups.scheduler_block_tokens
        return (
            bisect_right(
                range(tokens // scheduler_block + 1),
                room,
                key=lambda each: blocks(each * scheduler_block),
            )
            - 1
        ) * scheduler_block

    def _remaining_blocks(self) -> int:
        """Return the number of blocks that may still be kept for saves."""
        assert self._pool is not None, "bind_block_pool comes first"
        return int(self._pool.num_gpu_blocks * PINNED_MAX) - self.pinned_blocks

    def _pin(self, request: Request, runs: list[Run]) -> SaveCommand:
        """Take a reference to each block, so that vLLM does not reuse it before it is saved."""
        pool = self._pool
        assert pool is not None, "bind_block_pool comes first"
        block_ids = list(dict.fromkeys(block_id for run in runs for block_id in run.block_ids))
        assert NULL_BLOCK not in block_ids
        pool.touch([pool.blocks[block_id] for block_id in block_ids])
        self.pinned_blocks += len(block_ids)
        self._next_save += 1
        self._last_pinned = time.monotonic()
        pinned = BlocksBeingSaved(request.request_id, block_ids, self._workers, runs)
        pinned.fingerprint = self._identity.fingerprint
        pinned.keep_ms = self._keep_ms(request)
        tracked = self._tracked[request.request_id]
        pinned.replaced, tracked.replaced = tracked.replaced, b""
        if self._events.wanted:
            pinned.tokens = self._events.tokens_of(request, runs)
            pinned.plain = self._plain(tracked, runs)
            pinned.lora = request.lora_request.lora_name if request.lora_request else None
        self._pinned[self._next_save] = pinned
        return SaveCommand(self._next_save, runs, _milliseconds(request, "ttl_ms", TTL_MS_MAX))

    def _keep_ms(self, request: Request) -> int:
        return _milliseconds(request, "pin_ms", REQUEST_PIN_MS_MAX)

    def reported(self, report: TransferReport) -> None:
        """Handle the transfers that workers report as ended."""
        for number, end in report.saves.items():
            pinned = self._pinned.get(number)
            if pinned is None:
                continue
            pinned.workers_remaining -= end.workers
            pinned.stored &= end.stored == end.workers
            if pinned.workers_remaining > 0:
                continue
            del self._pinned[number]
            self._unpin(pinned)
            if pinned.stored and pinned.fingerprint == self._identity.fingerprint:
                if pinned.keep_ms:
                    last_keys = self._groups.last_keys
                    tips = {run.group: last_keys(run.group, run.keys) for run in pinned.runs}
                    self.keep(tips, pinned.keep_ms)
                if pinned.replaced:
                    tips = {group: [pinned.replaced] for group in self._groups.chains}
                    self.hint([EVICT_FIRST], tips)
                if pinned.send_hints is not None:
                    pinned.send_hints()
                chains = [run for run in pinned.runs if run.group in self._groups.chains]
                self._events.stored(chains, pinned.tokens, pinned.lora, pinned.plain)
            elif not pinned.stored:
                self._save_failed(pinned)
        for request_id, tokens in report.failed_loads.items():
            self._load_failed(request_id, tokens)

    def arrived(self, request_ids: Iterable[str], failed: Collection[str] = ()) -> None:
        """Handle loads that all workers have reported; ``failed``: those of this step's report."""
        for request_id in request_ids:
            self._loading.discard(request_id)
            tracked = self._tracked.get(request_id)
            if tracked is not None and (load := tracked.load) is not None:
                is_complete = tracked.failed_loads == load.failed_loads and request_id not in failed
                took_s = time.monotonic() - load.at
                self.load_rule.loaded(load.tokens, load.on_disk, took_s, is_complete=is_complete)
                tracked.load = None
            self._lookups.forget(request_id)

    def drained(self, left: set[int]) -> None:
        """Free the blocks of saves that workers no longer read, except for the saves in ``left``. A
        report may still come, in a step that vLLM has not processed yet. Deferred saves are
        dropped."""
        for save in list(self._held):
            self._drop(save)
        for number, pinned in self._pinned.items():
            if number not in left:
                self._unpin(pinned)

    def _unpin(self, pinned: BlocksBeingSaved) -> None:
        pool = self._pool
        assert pool is not None
        block_ids, pinned.block_ids = pinned.block_ids, []
        self.pinned_blocks -= len(block_ids)
        # Tail first, so that the shared prefix is evicted last.
        pool.free_blocks(pool.blocks[block_id] for block_id in reversed(block_ids))

    def _save_failed(self, pinned: BlocksBeingSaved) -> None:
        """Let the next save include these blocks again, because a lookup stops at a hole."""
        self.counters["saves_failed"] += 1
        tracked = self._tracked.get(pinned.request_id)
        if tracked is not None:
            tracked.failed_saves += 1
            tracked.state_tokens = 0
            for run in pinned.runs:
                if run.each < self._groups.blocks_per_object:
                    tracked.tail_tokens = 0
                elif run.group in self._groups.chains:
                    first = run.first * self._groups.chains[run.group]
                    tracked.saved[run.group] = min(tracked.saved.get(run.group, 0), first)

    def _load_failed(self, request_id: str, good_tokens: int) -> None:
        """Limit later results for this request to the tokens that were loaded."""
        self.counters["loads_failed"] += 1
        tracked = self._tracked.get(request_id)
        if tracked is None:
            return
        tracked.failed_loads += 1
        again = self._groups.aligned(good_tokens) if tracked.failed_loads < LOADS_MAX else 0
        tracked.limit = again if tracked.limit is None else min(again, tracked.limit)
        for group, end in self._full(tracked.limit).items():  # missing blocks are saved again
            tracked.saved[group] = min(tracked.saved.get(group, 0), end)
        tracked.state_tokens = min(tracked.state_tokens, tracked.limit)
        tracked.tail_tokens = min(tracked.tail_tokens, tracked.limit)
        self._lookups.forget(request_id)

    def bind_block_pool(self, pool: BlockPool) -> None:
        self._pool = pool
        self._events.bind_block_pool(pool)

    @property
    def has_blocks_being_saved(self) -> bool:
        """Whether saves wait until the weights are verified."""
        return bool(self._held)

    @property
    def has_pinned(self) -> bool:
        return bool(self._pinned)

    @property
    def loading(self) -> frozenset[str]:
        """Requests whose loads have started and are not reported yet."""
        return frozenset(self._loading)

    def needs_more_steps(self, within_s: float) -> bool:
        """Return whether vLLM must run further steps, so that workers can report. Bounded: a save
        that hangs keeps its blocks, but an engine without requests, and engines that step along
        with it, become idle.

        Args:
            within_s: the bound, after the start of the last save.
        """
        return bool(self._pinned) and time.monotonic() - self._last_pinned < within_s

    def finished(self, request: Request, table: Sequence[Sequence[int]]) -> dict[str, Any] | None:
        """Save the end of a finished request, if objects have several blocks. Return its
        parameters, with the number of its tokens that the store has, or will have, and the last key
        of their chain; None: no tokens. Pins those blocks if the request asks for that, and sends
        its hints; both wait for blocks being saved."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return None
        self._measure_prefill(request)
        if self._groups.blocks_per_object > 1:
            self._save_end(tracked, table)
        tokens = self._stored_tokens(tracked)
        keep_ms = self._keep_ms(request)
        hints = self._take_hints(tracked, at_arrival=False)
        tips = self._tips(tracked, tokens) if hints or keep_ms else {}
        if tips and keep_ms and self._identity.fingerprint:
            self.keep(tips, keep_ms)
        if hints:
            self._hint_when_saved(request, hints, tips)
        if not tokens or not self._does_save:
            return None
        if tracked.is_stale or (hashes := self._hashes(tracked)) is None:
            return {"stored_tokens": tokens}
        tip = bytes(hashes[tokens // self._groups.hash_block_tokens - 1])
        return {"stored_tokens": tokens, "tip": tip.hex()}

    def _hint_when_saved(self, request: Request, hints: list[EnvelopeAction], tips: Tips) -> None:
        """Send hints at once, or when the last save of this request has ended."""
        if not self._identity.fingerprint:
            return
        send = partial(self.hint, hints, tips)
        saves = [save for save in self._pinned.values() if save.request_id == request.request_id]
        if saves:
            saves[-1].send_hints = send
        else:
            send()

    def _stored_tokens(self, tracked: TrackedRequest) -> int:
        """Return the number of leading tokens that the store has or will have, according to this
        engine."""
        tokens = self._saved(tracked) if self._groups.chains else tracked.state_tokens
        if self._groups.recurrent:
            tokens = min(tokens, tracked.state_tokens)
        if tracked.tail_tokens - tracked.tail_tokens % self._groups.full_tokens == tokens:
            tokens = tracked.tail_tokens
        return self._groups.aligned(tokens)

    def on_fingerprint_changed(self) -> None:
        """Handle a new fingerprint of the engine: earlier blocks are neither saved nor found again,
        not even in vLLM's own cache."""
        self.reset()
        self._outdate(list(self._tracked.values()))

    def adapters_changed(self, ids: set[int]) -> None:
        """Handle adapter ids that now stand for different adapters."""
        self._outdate(
            [
                tracked
                for tracked in self._tracked.values()
                if tracked.request.lora_request and tracked.request.lora_request.lora_int_id in ids
            ]
        )

    def on_stale_prefix_cache(self, request: Request) -> None:
        """Handle a request that starts with blocks of vLLM's prefix cache computed with earlier
        weights."""
        tracked = self._tracked.get(request.request_id)
        if tracked is not None:
            self._make_stale(tracked)

    def _outdate(self, requests: list[TrackedRequest]) -> None:
        for tracked in requests:
            if tracked.request.num_computed_tokens:
                self._make_stale(tracked)
        if self._pool is not None:
            self._pool.evict_blocks(set(range(self._pool.num_gpu_blocks)))

    def _make_stale(self, tracked: TrackedRequest) -> None:
        """Save no more blocks of this request, and keep other requests from finding its next blocks
        in vLLM's prefix cache: give it its own cache salt."""
        tracked.is_stale = True
        request = tracked.request
        request.cache_salt = f"stale {request.request_id}"
        request.block_hashes.clear()
        request.update_block_hashes()

    def reset(self) -> None:
        """Forget the stored blocks, after the store was cleared."""
        self._lookups.clear()
        for tracked in self._tracked.values():
            tracked.saved = {}
            tracked.state_tokens = tracked.external_tokens = tracked.tail_tokens = 0

    def take_counters(self) -> dict[str, int]:
        counters, self.counters = self.counters, Counter()
        return counters


def _params(request: Request) -> dict[str, Any]:
    return request.kv_transfer_params or {}


def _milliseconds(request: Request, name: str, most: int) -> int:
    """Return a time requested in the parameters, at most ``most``; 0: none."""
    wanted = _params(request).get(name, 0)
    is_valid = type(wanted) in (int, float) and wanted > 0
    return math.ceil(min(wanted, most)) if is_valid else 0
