"""Replays a trace on the master's own state, in virtual time.

Each request matches its chain and puts the missing blocks, as an engine does, without leases that
outlast it and with equal sizes. Nothing is copied: only the state decides.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence

from kvstore import calls
from kvstore.calls import CopyOutcome, HintAction
from kvstore.calls.tenants import TenantRule
from kvstore.errors import KVStoreError
from kvstore.limits import PROTOCOL_VERSION, PUT_KEYS_MAX, Key, Namespace
from kvstore.master.state.effects import DeferredReply, SendReply, SendToNode
from kvstore.master.state.eviction import NewPolicy
from kvstore.master.state.hints import RETAINED_TURNOVERS
from kvstore.master.state.master_state import MasterState
from kvstore.master.state.rules import MasterRules
from kvstore.memory.header import DISK_ALIGN, HEADER_BYTES, SUPERBLOCK_BYTES, extent_bytes
from kvstore.planner.hint_model import HintModel
from kvstore.planner.traces import Trace

PAYLOAD_BYTES = 2 * DISK_ALIGN - HEADER_BYTES
"""Of each block in the replay; only their number counts."""

EXTENT_BYTES = extent_bytes(PAYLOAD_BYTES)

HEARTBEAT_MS = 400
START_MS = 20_000
"""When the first request comes: the promises of earlier masters have ended."""
PUT_WAIT_MS = 50
BRING_WAIT_MS = 3_000
LEASE_MS = 1
RETAIN_MS = 3_600_000


class Replay:
    """A master with one node, and the client that replays requests on it."""

    def __init__(
        self,
        trace: Trace,
        blocks: int,
        policy: NewPolicy,
        hints: HintModel | None = None,
        tenants: Sequence[TenantRule] | None = None,
        next_uses: list[list[int]] | None = None,
        disk_blocks: int = 0,
        writes_per_day: float = 0.0,
    ) -> None:
        """
        Args:
            next_uses: for hints that are made from what the trace does next.
            disk_blocks: of a disk of the node, whose copies take no time; 0: none.
            writes_per_day: how often the disk may be overwritten, on average; 0: no limit.
        """
        self.hits = 0
        self.written_blocks = 0
        """To the disk."""
        self._trace = trace
        self._hints = hints or HintModel()
        self._random = random.Random(self._hints.seed)  # noqa: S311
        self._next_uses = next_uses or []
        self._keys = [Key(block.to_bytes(8, "little")) for block in range(trace.blocks)]
        self._state = MasterState(
            epoch=1, rules=MasterRules(lease_ms=LEASE_MS), policy=policy, tenants=tenants
        )
        self._now_ms = self._heartbeat_ms = 0
        self._replies: dict[int, object] = {}
        offer = calls.SegmentOffer(
            size=SUPERBLOCK_BYTES + blocks * EXTENT_BYTES, uuid=bytes(16), shm_name="kv-plan",
            address="plan:1", token=bytes(16), seed=1, generation=1, fresh=True,
        )  # fmt: skip
        offers = [offer]
        if disk_blocks:
            size = SUPERBLOCK_BYTES + disk_blocks * EXTENT_BYTES
            disk = offer._replace(
                size=size, uuid=bytes([1] * 16), shm_name="",
                disk=calls.DiskLimits(0, int(size * writes_per_day)),
            )  # fmt: skip
            offers.append(disk)
        join = calls.NodeJoin("plan", "host", PROTOCOL_VERSION, 0, offers)
        self._state.nodes.on_node_join(0, 1, join)
        self._advance(START_MS)

    def run(self) -> int:
        """Replay the trace. Return the number of blocks found."""
        for index, time_ms in enumerate(self._trace.times_ms):
            self._advance(max(self._now_ms + 2, self._time_ms(time_ms)))
            self._request(index)
        return self.hits

    def _time_ms(self, time_ms: int) -> int:
        return START_MS + time_ms - self._trace.times_ms[0]

    def _request(self, index: int) -> None:
        chain = self._trace.chains[index]
        namespace = Namespace(self._trace.namespaces[index] or "plan")
        keys = [self._keys[block] for block in chain]
        match = calls.MatchPrefix([namespace], keys, placements=False)
        reply = self._state.asking.match_prefix(self._now_ms, match)
        found = reply.matches[0]
        matched = found.matched
        if found.on_disk:
            matched -= found.on_disk - self._bring(
                namespace, keys[matched - found.on_disk : matched]
            )
        self.hits += matched
        for start in range(matched, len(keys), PUT_KEYS_MAX):
            part = keys[start : start + PUT_KEYS_MAX]
            if not self._put(namespace, part, keys[start - 1] if start else None):
                break
        self._give_hint(index, namespace, keys)

    def _bring(self, namespace: Namespace, keys: list[Key]) -> int:
        """Look up blocks on the disk. Return the number of those that are brought."""
        request = calls.Lookup(namespace, keys)
        reply: object = self._state.asking.find(self._now_ms, request)
        if isinstance(reply, DeferredReply):
            self._work()
            reply = self._wait_for(reply, BRING_WAIT_MS)
        assert isinstance(reply, calls.LookupReply), reply
        found = reply.placements.replicas
        return found.index(0) if 0 in found else len(found)

    def _wait_for(self, deferred: DeferredReply, wait_ms: int) -> object:
        until_ms = self._now_ms + wait_ms
        while deferred.reply_id not in self._replies and self._now_ms < until_ms:
            self._advance(self._now_ms + 1)
        return self._replies.pop(deferred.reply_id, None)

    def _put(self, namespace: Namespace, keys: list[Key], parent: Key | None) -> bool:
        sizes = [PAYLOAD_BYTES] * len(keys)
        request = calls.PutStart(
            namespace, keys, sizes, parent, chain=True, replicas=1, overwrite=False,
            wait_ms=PUT_WAIT_MS, host="host",
        )  # fmt: skip
        try:
            reply: object = self._state.putting.put_start(self._now_ms, request)
        except KVStoreError:
            return False
        self._work()
        if isinstance(reply, DeferredReply):
            deferred, reply = reply, self._wait_for(reply, PUT_WAIT_MS)
            if reply is None:
                self._state.cancel(deferred.reply_id)
        if not isinstance(reply, calls.Grants):
            self._work()
            return False
        self._state.putting.put_end(self._now_ms, calls.PutEnd(reply.epoch, reply.tokens))
        self._work()
        return True

    def _give_hint(self, index: int, namespace: Namespace, keys: list[Key]) -> None:
        knowledge = self._hints.knowledge
        if knowledge == "recorded":
            for time_ms, space, block, action, retain_ms in self._trace.hints.get(index, ()):
                self._advance(max(self._now_ms, self._time_ms(time_ms)))
                recorded = calls.Hint(
                    Namespace(space or "plan"), [self._keys[block]], [action], [retain_ms]
                )
                self._state.hints.hint(self._now_ms, recorded)
        if knowledge in ("", "recorded"):
            return
        tip = self._trace.tips[index]
        following = self._next_uses[index][tip]
        times_ms = self._trace.times_ms
        next_ms = times_ms[following] - times_ms[index] if following < len(times_ms) else None
        if knowledge == "soon":
            turnover_ms = self._state.pool.turnover_ms(namespace, self._now_ms)
            soon_ms = RETAIN_MS if turnover_ms is None else RETAINED_TURNOVERS * turnover_ms
            deserved = next_ms is not None and next_ms <= soon_ms
        else:
            deserved = (next_ms is None) == (knowledge == "over")
        given = self._random.random() < (self._hints.right if deserved else self._hints.wrong)
        if not given and knowledge != "all":
            return
        if knowledge == "over":
            hint = calls.Hint(namespace, [keys[-1]], [int(HintAction.RELEASE)], [0])
        else:
            hint = calls.Hint(namespace, [keys[tip]], [int(HintAction.RETAIN)], [RETAIN_MS])
        self._state.hints.hint(self._now_ms, hint)

    def _advance(self, now_ms: int) -> None:
        while now_ms - self._heartbeat_ms >= HEARTBEAT_MS:
            self._heartbeat_ms += HEARTBEAT_MS
            self._state.nodes.on_node_message(self._heartbeat_ms, 1, calls.NodeHeartbeat(1))
            self._state.tick(self._heartbeat_ms)
        self._now_ms = now_ms
        self._state.tick(now_ms)
        self._work()

    def _work(self) -> None:
        """Carry out all effects and background work."""
        while True:
            for effect in self._state.take_effects():
                if isinstance(effect, SendReply):
                    self._replies[effect.reply_id] = effect.result
                elif isinstance(effect, SendToNode):
                    self._on_order(effect.message)
            if not self._state.has_work:
                return
            self._state.work(self._now_ms)

    def _on_order(self, order: calls.MasterMessage) -> None:
        """Carry out an order at once, as the node."""
        done: calls.NodeMessage
        if isinstance(order, calls.MasterWipe):
            done = calls.NodeWipeDone(order.wipe_seq)
        elif isinstance(order, calls.MasterCopy):
            done = calls.NodeCopied(order.tokens, [int(CopyOutcome.DONE)] * len(order.tokens))
            self.written_blocks += len(order.tokens) * (order.from_uuid == bytes(16))
        else:
            return
        self._state.nodes.on_node_message(self._now_ms, 1, done)


def next_uses_of(trace: Trace) -> list[list[int]]:
    """Return, per request and block, the next request that uses it, or the number of requests."""
    following: dict[int, int] = {}
    next_uses: list[list[int]] = []
    for index in range(len(trace.chains) - 1, -1, -1):
        chain = trace.chains[index]
        next_uses.append([following.get(block, len(trace.chains)) for block in chain])
        following.update(dict.fromkeys(chain, index))
    next_uses.reverse()
    return next_uses


def best_hits(trace: Trace, next_uses: list[list[int]], blocks: int) -> int:
    """Return the hits of Belady's rule, which evicts what is used latest: no policy finds more."""
    stored: dict[int, int] = {}
    by_use: dict[int, set[int]] = {}
    hits = 0
    latest: list[int] = []
    """Negated requests that use a stored block, the latest first."""
    for chain, uses in zip(trace.chains, next_uses, strict=True):
        for block, use in zip(chain, uses, strict=True):
            if (previous := stored.pop(block, None)) is not None:
                hits += 1
                by_use[previous].discard(block)
            if use == len(trace.chains):
                continue
            stored[block] = use
            by_use.setdefault(use, set()).add(block)
            heapq.heappush(latest, -use)
            while len(stored) > blocks:
                if victims := by_use[-latest[0]]:
                    del stored[victims.pop()]
                else:
                    heapq.heappop(latest)
    return hits
