"""A ``MasterState`` with nodes that behave, and a language to tell stories about it.

Keys are letters: ``cluster.put("abc")`` puts the chain a, b, c. Every object is one *block*, and a
node's memory is given in blocks, so that it is easy to see what fits. Time passes only in
``after``, with all that a running master and living nodes do meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvstore import calls
from kvstore.calls import NO_VERSION, CopyOutcome, PutOutcome, Version
from kvstore.calls.tenants import TenantRule
from kvstore.errors import KVStoreError
from kvstore.limits import PROTOCOL_VERSION, Key, Namespace
from kvstore.master.state.effects import (
    CloseSession,
    DeferredReply,
    LogClusterEvent,
    SendReply,
    SendToNode,
)
from kvstore.master.state.eviction import LruPolicy, NewPolicy
from kvstore.master.state.grants import DiskGrant
from kvstore.master.state.inventory import Claim
from kvstore.master.state.master_state import MasterState
from kvstore.master.state.rules import MasterRules
from kvstore.memory.header import HEADER_BYTES, SUPERBLOCK_BYTES

EPOCH = 5
BEFORE = Version(EPOCH - 1, 1)
HIGHEST = EPOCH + 1_000
"""The highest epoch that a node is believed."""
EXTENT = 4096
BLOCK = EXTENT - HEADER_BYTES
"""Payload bytes of a block."""

NO_LIMITS = calls.DiskLimits(0, 0)

NAMESPACE = Namespace("model")
STEP_MS = 250


def keys_of(names: str | Iterable[str]) -> list[Key]:
    return [Key(name.encode()) for name in names]


def told(
    claims: Sequence[Claim], index: int = 0, *, first: bool = True, last: bool = True
) -> calls.NodeClaims:
    """As a node sends it."""
    namespaces = list(dict.fromkeys(claim.name[0] for claim in claims))
    return calls.NodeClaims(
        segment=index,
        first=first,
        last=last,
        namespaces=namespaces,
        namespace_of=[namespaces.index(claim.name[0]) for claim in claims],
        keys=[claim.name[1] for claim in claims],
        parents=[claim.parent for claim in claims],
        sizes=[claim.size for claim in claims],
        epochs=[claim.version.epoch for claim in claims],
        counters=[claim.version.counter for claim in claims],
        offsets=[claim.offset for claim in claims],
    )


def claim_at(name: str, version: Version, offset: int = SUPERBLOCK_BYTES) -> Claim:
    return Claim((NAMESPACE, Key(name.encode())), None, BLOCK, version, offset)


class Cluster:
    """Nodes beat and wipe at once unless they are told not to."""

    def __init__(
        self,
        nodes: Mapping[str, int],
        rules: MasterRules,
        tenants: Sequence[TenantRule] | None = None,
        policy: NewPolicy = LruPolicy,
    ) -> None:
        self.rules = rules
        self.now_ms = 0
        self.state = MasterState(
            epoch=EPOCH, epoch_max=HIGHEST, rules=rules, policy=policy, tenants=tenants
        )
        self.sessions: dict[str, int] = {}
        self.segments: dict[int, str] = {}  # to the name of its node
        self.offers: dict[str, list[calls.SegmentOffer]] = {}
        self.silent: set[str] = set()
        self.wipes_at_once = True
        self.takes_capabilities = False
        """Of nodes that join."""
        self.orders: list[tuple[int, calls.MasterWipe]] = []  # not done yet, with their session
        self.copies_at_once = True
        self.copies: list[tuple[int, calls.MasterCopy]] = []
        """Not done yet, with their session."""
        self.wiped_before: dict[int, list[tuple[int, calls.MasterWipe]]] = {}
        """The wipes that were not done when copies were ordered, by their first token."""
        self.on_disk: dict[tuple[bytes, int], Claim] = {}
        """The headers on disks, by uuid and offset."""
        self.answers: dict[int, calls.Reply | KVStoreError] = {}
        self.hangups: list[int] = []
        self.notices: list[str] = []
        self.noted: list[LogClusterEvent] = []
        """The same, with their fields."""
        for name, blocks in nodes.items():
            self.join(name, blocks)
        if nodes:
            self.remove_later("?")  # so that all know that nothing was removed without them
        self.wipe()
        self.answers.clear()

    # --- nodes --------------------------------------------------------------------------------

    def join(
        self,
        name: str,
        *blocks: int,
        host: str = "",
        again: bool = False,
        resume: bool = False,
        tells: bool = True,
        mark: Version = NO_VERSION,
        disk: int = 0,
        limits: calls.DiskLimits = NO_LIMITS,
    ) -> calls.MasterAccepted:
        """
        Args:
            name: of the node.
            blocks: of each segment.
            host: of the node, where it matters.
            again: with the memory that it had before.
            resume: after a broken stream.
            tells: that this memory holds nothing; else the test tells what it holds.
            mark: that it has kept.
            disk: bytes of a disk; 0: it has none.
            limits: of the disk.
        """
        if not again and not resume:
            self.offers[name] = [
                calls.SegmentOffer(
                    size=SUPERBLOCK_BYTES + count * EXTENT,
                    uuid=f"{name}{index}-{len(self.segments)}".encode().ljust(16),
                    shm_name=f"kv-{name}{index}",
                    address=f"{name}:9",
                    token=bytes(16),
                    seed=index,
                    generation=1,
                    fresh=True,
                    takes_capabilities=self.takes_capabilities,
                )
                for index, count in enumerate(blocks)
            ]
            if disk:
                first, number = self.offers[name][0], len(blocks)
                self.offers[name].append(
                    first._replace(
                        size=SUPERBLOCK_BYTES + disk, shm_name="", address="", disk=limits,
                        uuid=f"{name}{number}-{len(self.segments)}".encode().ljust(16),
                    )
                )  # fmt: skip
        offers = [
            offer._replace(fresh=not again, removal_watermark=mark) for offer in self.offers[name]
        ]
        epoch = EPOCH if resume else 0
        join = calls.NodeJoin(name, host or f"host-{name}", PROTOCOL_VERSION, epoch, offers)
        session = 1 + max(self.sessions.values(), default=0)
        accepted = self.state.nodes.on_node_join(self.now_ms, session, join)
        self.sessions[name] = session
        self.segments.update(dict.fromkeys(accepted.segment_ids, name))
        self.silent.discard(name)
        self._settle()
        if again and tells:
            for index in range(len(offers)):
                self.tell(name, index=index)
        return accepted

    def tell(
        self, name: str, *claims: Claim, index: int = 0, first: bool = True, last: bool = True
    ) -> None:
        """What a node finds in one of its segments."""
        self.say(name, told(claims, index, first=first, last=last))
        self.work()

    def say(self, name: str, message: calls.NodeMessage) -> None:
        self.state.nodes.on_node_message(self.now_ms, self.sessions[name], message)
        self._settle()

    def drain(self, name: str, step: calls.DrainStep = calls.DrainStep.BEGIN) -> calls.DrainReply:
        drained = self.state.nodes.drain(self.now_ms, calls.Drain(name, step))
        self._settle()
        return drained

    def break_stream(self, name: str) -> None:
        self.silent.add(name)
        self.state.nodes.stream_broken(self.sessions[name])
        self._settle()

    def kill(self, name: str) -> None:
        """It goes silent for good, and the master notices."""
        self.silent.add(name)
        self.after(self.rules.liveness.dead_ms + STEP_MS)

    def report(self, name: str, *hosts: str, reason: str = "refused") -> int:
        """Clients on these hosts (two, unless named) cannot reach the node."""
        ids = [segment_id for segment_id, node in self.segments.items() if node == name]
        suspects = 0
        for host in hosts or ("host-a", "host-b"):
            report = calls.ReportFailure(ids, f"client of {host}", host, reason, EPOCH)
            suspects = self.state.nodes.report_failure(self.now_ms, report).suspects
            self._settle()
        return suspects

    def _is_alive(self, session: int) -> bool:
        names = {number: name for name, number in self.sessions.items()}
        return session in names and names[session] not in self.silent

    @property
    def disks(self) -> set[bytes]:
        return {offer.uuid for each in self.offers.values() for offer in each if offer.disk}

    def wipe(self, orders: list[tuple[int, calls.MasterWipe]] | None = None) -> None:
        """The nodes do what they were ordered to, by default all; what is being copied to the same
        extents is copied first."""
        orders = self.orders if orders is None else orders
        self.orders = [order for order in self.orders if order not in orders]
        wiped = {(order.uuid, offset) for _, order in orders for offset in order.offsets}
        if any((c.to_uuid, offset) in wiped for _, c in self.copies for offset in c.to_offsets):
            self.copy()
        for session, order in orders:
            for row in zip(order.offsets, order.epochs, order.counters, strict=True):
                found = self.on_disk.get((order.uuid, row[0]))
                if found is not None and found.version == row[1:] and self._is_alive(session):
                    del self.on_disk[order.uuid, row[0]]
            self.state.nodes.on_node_message(
                self.now_ms, session, calls.NodeWipeDone(order.wipe_seq)
            )
        self._settle()

    def copy(self, outcome: CopyOutcome = CopyOutcome.DONE) -> int:
        """The nodes copy what they were ordered to, or fail to, after the wipes that they were
        ordered before. Returns how many objects."""
        orders, self.copies = self.copies, []
        for session, order in orders:
            if not self._is_alive(session):
                continue
            earlier = self.wiped_before.pop(order.tokens[0], [])
            self.wipe([each for each in earlier if each in self.orders])
            outcomes = [outcome] * len(order.tokens)
            rows = zip(
                order.tokens, order.from_offsets, order.to_offsets, order.sizes,
                map(Version, order.epochs, order.counters), strict=True,
            )  # fmt: skip
            for index, (token, source, target, size, version) in enumerate(rows):
                if outcome is not CopyOutcome.DONE:
                    continue
                if order.from_uuid in self.disks:
                    found = self.on_disk.get((order.from_uuid, source))
                    if found is None or found.version != version:
                        outcomes[index] = CopyOutcome.CHANGED
                    continue
                assert (order.to_uuid, target) not in self.on_disk, "not wiped"
                put = self.state.pending.get(token)
                if isinstance(put, DiskGrant):  # else it was abandoned
                    name, above = (put.record.namespace, put.record.key), put.record.parent
                    parent = None if above is None else above.key
                    claim = Claim(name, parent, size, version, target)
                    self.on_disk[order.to_uuid, target] = claim
            done = calls.NodeCopied(order.tokens, list(map(int, outcomes)))
            self.state.nodes.on_node_message(self.now_ms, session, done)
        self._settle()
        return sum(len(order.tokens) for _, order in orders)

    # --- time ---------------------------------------------------------------------------------

    def after(self, ms: int) -> None:
        until_ms = self.now_ms + ms
        while self.now_ms < until_ms:
            self.now_ms = min(self.now_ms + STEP_MS, until_ms)
            for name, session in self.sessions.items():
                if name not in self.silent:
                    self.state.nodes.on_node_message(self.now_ms, session, calls.NodeHeartbeat(1))
            self.state.tick(self.now_ms)
            self.work()

    def work(self) -> None:
        """All background work there is."""
        for _ in range(10_000):
            self._settle()
            if not self.state.has_work:
                return
            self.state.work(self.now_ms)
        raise AssertionError("the background work does not end")

    # --- clients ------------------------------------------------------------------------------

    def start(self, names: str | Iterable[str], **given: Any) -> calls.Grants:
        """``put_start``, answered at once; ``given``: as of ``start_or_wait``."""
        result = self.start_or_wait(names, **given)
        assert isinstance(result, calls.Grants), "it has to wait"
        return result

    def start_or_wait(
        self, names: str | Iterable[str], *, parent: str | None = None, chain: bool = True,
        size: int = BLOCK, namespace: Namespace = NAMESPACE, **given: Any,
    ) -> calls.Grants | int:  # fmt: skip
        """The grants, or the ticket of the answer; ``given``: further fields of the request."""
        keys = keys_of(names)
        above = None if parent is None else Key(parent.encode())
        sizes = [size] * len(keys)
        request = calls.PutStart(namespace, keys, sizes, above, chain, 1, False, 0, "")
        request = request._replace(**given)
        result = self.state.putting.put_start(self.now_ms, request)
        self._settle()
        if not isinstance(result, DeferredReply):
            self._check_limit(result, namespace)
            return result
        answer = self.answers.get(result.reply_id)
        if isinstance(answer, calls.Grants):  # what it evicted is wiped already
            del self.answers[result.reply_id]
            self._check_limit(answer, namespace)
            return answer
        return result.reply_id

    def _check_limit(self, grants: calls.Grants, namespace: str) -> None:
        """Whatever a tenant held before, a grant leaves it within its limit."""
        tenant = self.state.pool.tenant_of(namespace)
        assert tenant is None or not grants.tokens or tenant.size <= tenant.limit_bytes

    def wait(self, names: str | Iterable[str], *, wait_ms: int = 20_000, **given: Any) -> int:
        """A ``put_start`` that has to wait; its ticket."""
        result = self.start_or_wait(names, wait_ms=wait_ms, **given)
        assert isinstance(result, int), "it need not wait"
        self.work()
        return result

    def end(self, grants: calls.Grants) -> list[PutOutcome]:
        return self.end_tokens(grants.tokens)

    def end_tokens(self, tokens: Iterable[int], epoch: int = EPOCH) -> list[PutOutcome]:
        result = self.state.putting.put_end(self.now_ms, calls.PutEnd(epoch, list(tokens)))
        self._settle()
        reply = self.reply(result)
        assert isinstance(reply, calls.PutEndReply)
        return [PutOutcome(outcome) for outcome in reply.outcomes]

    def put(self, names: str | Iterable[str], **given: Any) -> None:
        """Both phases; whatever is there already stays."""
        assert set(self.end(self.start(names, **given))) <= {PutOutcome.STORED}

    def revoke(
        self, grants: calls.Grants, *, quiesced: bool, connections: Sequence[int] = ()
    ) -> int:
        request = calls.PutRevoke(EPOCH, grants.tokens, quiesced, connections)
        revoked = self.state.putting.put_revoke(self.now_ms, request).revoked
        self._settle()
        return revoked

    def allocate(self, size: int = BLOCK, *, namespace: Namespace = NAMESPACE) -> int:
        """The token."""
        request = calls.Allocate(namespace, size, 0, "")
        result = self.reply(self.state.putting.allocate(self.now_ms, request))
        assert isinstance(result, calls.Grants)
        self._check_limit(result, namespace)
        return result.tokens[0]

    def commit(
        self,
        token: int,
        name: str,
        *,
        size: int = BLOCK,
        parent: str | None = None,
        overwrite: bool = False,
        namespace: Namespace = NAMESPACE,
    ) -> PutOutcome:
        above = None if parent is None else Key(parent.encode())
        request = calls.Commit(EPOCH, token, namespace, Key(name.encode()), above, size, overwrite)
        reply = self.reply(self.state.putting.commit(self.now_ms, request))
        assert isinstance(reply, calls.CommitReply)
        return PutOutcome(reply.outcome)

    def match(
        self,
        names: str | Iterable[str],
        *,
        placements: bool = False,
        namespace: Namespace = NAMESPACE,
    ) -> int:
        """How many are present; those are leased."""
        request = calls.MatchPrefix([namespace], keys_of(names), placements)
        return self.state.asking.match_prefix(self.now_ms, request).matches[0].matched

    def lookup(self, names: str | Iterable[str]) -> list[list[str]]:
        """The nodes that hold each, best first; all of them are leased."""
        reply = self.state.asking.lookup(self.now_ms, calls.Lookup(NAMESPACE, keys_of(names)))
        return self._nodes_of(reply.placements)

    def find(self, names: str | Iterable[str]) -> list[str] | int:
        """``lookup``, which brings what is on a disk only: the keys found; or the reply id."""
        names = list(names)
        request = calls.Lookup(NAMESPACE, keys_of(names))
        result = self.state.asking.find(self.now_ms, request)
        self.work()
        if isinstance(result, DeferredReply):
            if result.reply_id not in self.answers:
                return result.reply_id
            return self.found(names, self.answers.pop(result.reply_id))
        return self.found(names, result)

    @staticmethod
    def found(names: Iterable[str], reply: object) -> list[str]:
        assert isinstance(reply, calls.LookupReply)
        pairs = zip(names, reply.placements.replicas, strict=True)
        return [name for name, replicas in pairs if replicas]

    def present(self, names: str | Iterable[str], *, namespace: Namespace = NAMESPACE) -> str:
        """Those that are complete; nothing is leased."""
        reply = self.state.asking.exists(self.now_ms, calls.Exists(namespace, keys_of(names)))
        pairs = zip(names, reply.presence, strict=True)
        return "".join(name for name, known in pairs if known == calls.Presence.COMPLETE)

    def where(self, name: str) -> list[str]:
        """The nodes that hold it; it is not leased."""
        return self._nodes_of(self.stat(name).placements)[0]

    def stat(self, name: str) -> calls.ObjectDetail:
        request = calls.StatObject(NAMESPACE, Key(name.encode()))
        return self.state.report.stat_object(self.now_ms, request)

    def renew(self, name: str, version: calls.Version, at: tuple[bytes, int] | None = None) -> bool:
        """``at``: the place of the leased memory (``place``); None: that of the first replica."""
        if at is None:
            found = self.stat(name).placements
            node = self.segments[found.segments[0]] if found.segments else ""
            at = self.place(name, node) if node in self.offers else (bytes(16), 0)
        request = calls.Renew(
            NAMESPACE, [Key(name.encode())], [version.epoch], [version.counter], EPOCH, [],
            [at[0]], [at[1]],
        )  # fmt: skip
        return bool(self.state.asking.renew(self.now_ms, request).keys_leased[0])

    def place(self, name: str, node: str) -> tuple[bytes, int]:
        """uuid and offset of the object's replica on this node, where it is not leased."""
        placements = self.stat(name).placements
        rows = zip(placements.segments, placements.offsets, strict=True)
        (offset,) = [offset for segment, offset in rows if self.segments[segment] == node]
        return self.offers[node][0].uuid, offset

    def renew_token(self, token: int, epoch: int = EPOCH) -> bool:
        request = calls.Renew(NAMESPACE, [], [], [], epoch, [token], [], [])
        return bool(self.state.asking.renew(self.now_ms, request).tokens_leased[0])

    def remove(self, names: str | Iterable[str], *, namespace: Namespace = NAMESPACE) -> list[int]:
        reply = self.reply(self.remove_later(names, namespace=namespace))
        assert isinstance(reply, calls.RemoveReply)
        return list(reply.removed)

    def remove_later(
        self, names: str | Iterable[str], *, namespace: Namespace = NAMESPACE
    ) -> calls.RemoveReply | DeferredReply:
        result = self.state.removing.remove(self.now_ms, calls.Remove(namespace, keys_of(names)))
        self._settle()
        return result

    def clear(self, limit: int, namespace: str = NAMESPACE) -> calls.ClearReply:
        reply = self.reply(self.state.removing.clear(self.now_ms, calls.Clear(namespace, limit)))
        assert isinstance(reply, calls.ClearReply)
        return reply

    def status(self) -> calls.ClusterStatus:
        return self.state.report.status(self.now_ms, calls.Status())

    def states(self) -> dict[str, str]:
        return {node.name: node.state for node in self.status().nodes}

    def free_blocks(self) -> int:
        free = sum(s.allocator.free_bytes for s in self.state.pool.segments.values())
        return free // EXTENT

    def reply(self, result: calls.Reply | DeferredReply) -> calls.Reply:
        """The reply, which must be here by now."""
        self._settle()
        if not isinstance(result, DeferredReply):
            return result
        if result.reply_id not in self.answers:  # somebody may still read on a node that died
            self.after(self.rules.lease_ms)
        answer = self.answers.pop(result.reply_id)
        assert not isinstance(answer, KVStoreError)
        return answer

    def _nodes_of(self, placements: calls.Placements) -> list[list[str]]:
        segments = iter(placements.segments)
        return [[self.segments[next(segments)] for _ in range(n)] for n in placements.replicas]

    def _settle(self) -> None:
        while self.state.effects:
            for effect in self.state.take_effects():
                match effect:
                    case SendReply(ticket, result):
                        assert ticket not in self.answers, "answered twice"
                        self.answers[ticket] = result
                    case SendToNode(session, calls.MasterWipe() as order):
                        self.orders.append((session, order))
                    case SendToNode(session, calls.MasterCopy() as copies):
                        self.copies.append((session, copies))
                        self.wiped_before[copies.tokens[0]] = self.orders[:]
                    case CloseSession(session):
                        self.hangups.append(session)
                    case LogClusterEvent(event):
                        self.notices.append(event)
                        self.noted.append(effect)
                    case _:
                        pass
            if self.wipes_at_once:
                self.wipe()
            if self.copies_at_once and self.copies:
                self.copy()
