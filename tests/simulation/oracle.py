"""The rules that must hold whatever happens, checked against every process of the cluster.

The oracle sees what no part of a real cluster sees at once: the master's state after each step,
every byte that lands in a segment, every promise that a client believes in, by that client's own
clock. Its rules, each with the place where it is checked:

* ``tests.support.invariants`` hold, and no object vanishes from the master without a reason:
  removed, replaced, evicted (and counted) or on a dead segment (``master_stepped``).
* Nothing is evicted while a lease on it lives (``master_stepped``).
* No extent is granted over bytes that some client still believes to be leased (``_granted``).
* A write lands only in what its own put was granted, or in quarantine (``write``).
* Bytes under a view that is held do not change (``check_views``).
* A get returns exactly what the put of that version wrote, for that key (``read``).
* What a removal or an overwriting put has replaced is not returned by a get that starts after the
  acknowledgement of that, or of a later put of the key (``acknowledged``, ``read``); nor are the
  bytes of an earlier put of that key that was given up, or of a move of it that was under way.
* A put that is acknowledged was complete at the master (``acknowledged``).
* No master has wiped what a master of a later epoch has granted (``wiped``).
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from random import Random
from typing import NamedTuple, Protocol, cast

from xxhash import xxh3_64_intdigest

from kvstore import calls
from kvstore.calls import NO_VERSION, MasterWipe, Presence, PutOutcome, Version
from kvstore.limits import Key, Namespace
from kvstore.master.state.effects import DeferredReply
from kvstore.master.state.master_state import MasterState
from kvstore.master.state.records import MountedSegment
from kvstore.memory.header import HEADER_BYTES, Header, scan, unpack
from tests.simulation import state_access
from tests.simulation.follower import EventFollower
from tests.simulation.memory import Memory
from tests.simulation.scheduler import MS, Scheduler
from tests.simulation.state_access import Name
from tests.support.invariants import check_invariants


class SimulationError(AssertionError):
    """A rule was broken. ``about``: words to search the story for."""

    def __init__(self, rule: str, message: str, about: Iterable[object] = ()) -> None:
        super().__init__(f"[{rule}] {message}")
        self.rule = rule
        self.about = [str(each) for each in about]


class ExpectedBytes(NamedTuple):
    """Bytes that a client believes to be promised at this moment."""

    client: str
    what: str
    uuid: bytes
    offset: int
    length: int
    version: Version


class View(NamedTuple):
    """A view that is held: its bytes, and what they were at the beginning."""

    promise: ExpectedBytes
    data: memoryview
    snapshot: bytes


class ObservedClient(Protocol):
    """What the oracle asks of a client."""

    def believed(self) -> Iterator[ExpectedBytes]: ...
    def views_on(self, uuid: bytes) -> Iterator[View]: ...


@dataclass(slots=True)
class _Call:
    """A request that the master has processed and whose answer is on its way."""

    request: calls.Request
    doomed: list[list[tuple[Version, str]]]
    """Of each key or token: what must not be read any more once it is acknowledged, and the rule
    that is broken if it is."""
    repairs: set[int]
    """Tokens of further replicas, which store no version of their own."""


class Oracle:
    """See the module."""

    def __init__(self, scheduler: Scheduler, memories: Callable[[bytes], Memory | None]) -> None:
        """``memories``: the segment of that uuid."""
        self._memories = memories
        self.clients: dict[str, ObservedClient] = {}
        self.counts: dict[str, int] = {}
        self._scheduler = scheduler
        self._contents: dict[tuple[Namespace, Key, int], bytes] = {}
        self._written: dict[Version, tuple[Name, int]] = {}
        self._attempts: dict[Name, dict[Version, None]] = {}
        """Versions that a client has made a header of."""
        self._history: dict[Name, list[Version]] = {}
        """Versions that were complete, in their order."""
        self._stored: set[Version] = set()
        self._gone: dict[Version, tuple[int, str]] = {}
        """When it was acknowledged that this version is no more, and the rule."""
        self._removals: dict[Name, list[tuple[Version, str]]] = {}
        """What this master has last removed of an object, acknowledged or not."""
        self._asked: dict[Name, list[tuple[Version, str]]] = {}
        """The same of the present step, which may be refused."""
        self._marked: dict[Version, tuple[int, set[bytes]]] = {}
        """The master that acknowledged that end, and the memory that knew so: what it had then, or
        that kept its newest mark."""
        self._kept: dict[bytes, list[tuple[Version, set[bytes]]]] = {}
        """The marks of each memory, and the memory that the master of each has had until then."""
        self._had: dict[int, set[bytes]] = {}
        """The memory that the master of this epoch has had when it ordered marks."""
        self._calls: dict[int, _Call] = {}
        self._now_complete: dict[Name, Version] = {}
        self._places: dict[Version, list[tuple[MountedSegment, int]]] = {}
        self._on_disks: dict[Version, set[bytes]] = {}
        """The disks to which a version was written."""
        self._promised: dict[Version, dict[int, int]] = {}
        """Until when the master has leased a version (its own ms), by the number of the lease."""
        self._ended: set[Version] = set()
        """Versions that were removed, replaced or evicted, by whichever master."""
        self._epoch = 0
        self._epochs: set[int] = set()
        """Of all masters before."""
        self.clock_was_put_back = False
        """Of a single master: it may begin with a lower epoch than the one before it."""
        self._earlier_leases_end_us = 0
        """Those of the master before this one."""
        self._evicted = 0
        self._claimed = 0
        self._repaired = 0
        self._last_token = 0
        self._state: MasterState | None = None
        self._now_ms: Callable[[], int] = lambda: 0
        """The master's clock."""

    def note(self, text: str) -> None:
        self._scheduler.note(text)

    def count(self, what: str, number: int = 1) -> None:
        self.counts[what] = self.counts.get(what, 0) + number

    def broken(self, rule: str, message: str, *about: object) -> None:
        """A rule was broken, which ends the run."""
        self.note(f"BROKEN [{rule}] {message}")
        raise SimulationError(rule, message, about)

    # --- the master ---------------------------------------------------------------------------

    def master_started(self, state: MasterState, now_ms: Callable[[], int]) -> None:
        if state.epoch in self._epochs or (
            state.epoch < self._epoch and not self.clock_was_put_back
        ):
            self.broken("epoch", f"a master starts with {state.epoch} after {self._epoch}")
        self._epoch = state.epoch
        self._epochs.add(state.epoch)
        self._earlier_leases_end_us = self._scheduler.now_us + state.rules.lease_ms * MS
        self._state = state
        self._follower = EventFollower(state)
        self._now_ms = now_ms
        self._now_complete = {}
        self._promised = {}
        self._removals = {}
        self._evicted = self._claimed = self._repaired = self._last_token = 0
        self._calls = {}

    def outrun(self, epoch: int) -> None:
        """A master ends its term, because it was told of this epoch."""
        if epoch not in self._epochs:
            self.broken("believed", f"a term ends for the epoch {epoch}, which no master has had")

    def master_ended(self, state: MasterState) -> None:
        """It is dead, or leads no more."""
        if self._state is state:
            self._state = None

    def processing(
        self, state: MasterState, now_ms: int, call_id: int, request: calls.Request
    ) -> None:
        """Just before the state sees a request."""
        del now_ms
        names: list[Name | None] = []
        copies: set[int] = set()
        match request:
            case calls.Clear(namespace):
                for name, versions in self._history.items():
                    if not namespace or name[0] == namespace:
                        self._ended.update(versions)
            case calls.ReportCorrupt(namespace, keys):
                for key in keys:
                    self._ended.update(self._history.get((namespace, key), ()))
            case calls.Remove(namespace, keys):
                names = [(namespace, key) for key in keys]
                for key in keys:
                    self._ended.update(self._history.get((namespace, key), ()))
            case calls.PutEnd(epoch, tokens) if epoch == state.epoch:
                # Who replaces what it found has asked to: only an overwriting put gets a grant.
                names = [state_access.replaced_by(state, token) for token in tokens]
                copies = {
                    row for row, each in enumerate(tokens) if state_access.is_copy(state, each)
                }
            case calls.Commit():
                names = [(request.namespace, request.key)] if request.overwrite else []
            case _:
                pass
        doomed = [[] if name is None else self._versions_of(name, state) for name in names]
        self._asked = {}
        if isinstance(request, calls.Remove):
            self._asked.update(zip(cast("list[Name]", names), doomed, strict=True))
        if puts := self._put_by(state, request):
            # What was removed before is not read after the put, whoever waits for the removal.
            doomed = doomed or [[] for _ in puts]
            for its, put in zip(doomed, puts, strict=True):
                rows = [] if put is None else self._removals.get(put, [])
                its += [row for row in rows if row[1] != "given_up_read" and row not in its]
        for row, ended in enumerate(names):
            if ended is not None and row not in copies:  # a copy gives no other one up
                for version in state_access.moved_to(state, ended):
                    self.count("copies_given_up")
                    doomed[row].append((version, "given_up_read"))
        repairs: set[int] = set()
        if isinstance(request, calls.PutEnd) and request.epoch == state.epoch:
            repairs = {token for token in request.tokens if state_access.is_repair(state, token)}
        self._calls[call_id] = _Call(request, doomed, repairs)

    def _put_by(self, state: MasterState, request: calls.Request) -> list[Name | None]:
        """The objects that are there once this request is acknowledged."""
        match request:
            case calls.PutStart(namespace, keys):
                return [(namespace, key) for key in keys]
            case calls.PutEnd(epoch, tokens) if epoch == state.epoch:
                return [state_access.put_by(state, token) for token in tokens]
            case calls.Commit():
                return [(request.namespace, request.key)]
            case _:
                return []

    def _versions_of(self, name: Name, state: MasterState) -> list[tuple[Version, str]]:
        # Those before the present one were replaced or removed by somebody else, and their
        # wiping may still be under way. Those on nodes that this master does not know, or not any
        # more, are of the known issue.
        present = self._now_complete.get(name)
        rows = []
        for version in self._history.get(name, ()):
            rule = "removed_read" if version == present else "removed_twice_read"
            places = self._places.get(version, ())
            if not all(state_access.mounted(state, segment.offer.uuid) for segment, _ in places):
                rule = "removed_read_from_dead"
            rows.append((version, rule))
        # Nor may a version be read that a put of before has given up: it may have been stored under
        # another one, which is removed now. Of a put under way nobody knows.
        complete = self._history.get(name, ())
        given_up = (v for v in self._attempts.get(name, ()) if v not in complete)
        ended = (v for v in given_up if not state_access.is_pending(state, v))
        return rows + [(version, "given_up_read") for version in ended]

    def master_stepped(
        self,
        state: MasterState,
        now_ms: int,
        request: calls.Request | None,
        reply: calls.Reply | DeferredReply | None,
    ) -> None:
        """After each step of the state."""
        if state is not self._state:
            self.broken("two_leaders", f"epoch {state.epoch} acts after {self._epoch} has begun")
        try:
            check_invariants(state)
            self._follower.follow()
        except AssertionError as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            self.broken(
                "invariants", f"after {request!r:.200}: {where.line} ({where.name}) {error}"
            )
        if reply is not None:
            self._removals.update(self._asked)
        for number in getattr(request, "released", ()):
            for ends in self._promised.values():
                if ends.pop(number, None) is not None:
                    self.count("released")
        complete = state_access.complete_objects(state)
        if complete != self._now_complete:
            self._compare(state, now_ms, request, complete)
        replicas = state.counters["recovered_objects"] + state.counters["repaired_objects"]
        if replicas != self._claimed:  # further ones may be known
            self._claimed = replicas
            self._places.update(
                (v, state_access.extents_of(state, name)) for name, v in complete.items()
            )
        repaired = state.counters["repaired_objects"]
        if repaired != self._repaired:
            self.count("repaired", repaired - self._repaired)
            self._repaired = repaired
            if isinstance(request, calls.PutEnd):
                for name, version in complete.items():
                    self._is_whole(state, name, version)
        self._evicted = state.counters["evicted_objects"]
        if reply is not None and not isinstance(reply, DeferredReply):
            self._promises(state, now_ms, request, reply)
        self._granted(state)

    def answered(self, result: object) -> None:
        """A reply that had to wait is sent now."""
        if isinstance(result, calls.Grants):
            self.count("waited_grants")

    def _compare(
        self,
        state: MasterState,
        now_ms: int,
        request: calls.Request | None,
        complete: dict[Name, Version],
    ) -> None:
        evicted: list[tuple[Name, Version]] = []
        for name, version in self._now_complete.items():
            new = complete.get(name)
            if new == version:
                continue
            if new is not None:
                # A put that overwrites, or memory that holds a newer version.
                if not isinstance(request, calls.PutEnd | calls.Commit) and new < version:
                    self.broken("vanished", f"{name} {version} became {new}", name[1].decode())
            elif _removes(request, name):
                self.note(f"removed {_show(name)} {_v(version)}")
            elif not any(segment.alive for segment, _ in self._places[version]):
                self.note(f"lost {_show(name)} {_v(version)}")
                self._promised.pop(version, None)  # it may return from a disk
                self.count("lost")
            else:
                evicted.append((name, version))
        for name, version in evicted:
            until_ms = max(self._promised.get(version, {0: 0}).values(), default=0)
            self.note(f"evicted {_show(name)} {_v(version)}")
            if until_ms > now_ms:
                self.broken(
                    "evicted_leased",
                    f"{_show(name)} {_v(version)} is leased for {until_ms - now_ms} ms more",
                    name[1].decode(),
                )
        counted = state.counters["evicted_objects"] - self._evicted
        if counted != len(evicted):
            self.broken("vanished", f"{counted} evictions, but there vanished {evicted}")
        self.count("evicted", len(evicted))
        self._ended.update(version for _, version in evicted)
        for name, version in complete.items():
            if self._now_complete.get(name) != version:
                self._ended.update(v for v in self._history.get(name, ()) if v < version)
                if version in self._stored:
                    self.count("claimed")
                    self._is_whole(state, name, version)
                else:
                    if version.epoch != state.epoch:
                        self.count("claimed_unended")
                    self._history.setdefault(name, []).append(version)
                    self._stored.add(version)
                self._places[version] = state_access.extents_of(state, name)
                self.note(f"complete {_show(name)} {_v(version)}")
        self._now_complete = complete

    def _is_whole(self, state: MasterState, name: Name, version: Version) -> None:
        """What memory is believed to hold again, it holds."""
        for segment, offset in state_access.extents_of(state, name):
            memory = self._memories(segment.offer.uuid)
            if memory is None or not segment.alive:
                continue
            header = unpack(memory.memory[offset : offset + HEADER_BYTES], memory.seed, offset)
            start = offset + HEADER_BYTES
            if (
                header is None
                or Version(header.epoch, header.counter) != version
                or xxh3_64_intdigest(memory.memory[start : start + header.payload_size])
                != header.payload_checksum
            ):
                self.broken(
                    "served_unverified",
                    f"{_show(name)} {_v(version)} at {segment} {offset} is served, and is bad",
                    name[1].decode(), _v(version),
                )  # fmt: skip

    def rot(self, memory: Memory, random: Random) -> None:
        """A byte of some whole object changes while nobody has the memory."""
        found = [
            (offset, header)
            for offset, header in scan(memory.memory, memory.seed)
            if header.payload_size and Version(header.epoch, header.counter) in self._stored
        ]
        views = [
            view.promise.version for c in self.clients.values() for view in c.views_on(memory.uuid)
        ]
        found = [(o, h) for o, h in found if Version(h.epoch, h.counter) not in views]
        if found:
            offset, header = random.choice(found)
            at = offset + HEADER_BYTES + random.randrange(header.payload_size)
            memory.memory[at] ^= 1 << random.randrange(8)
            self.count("rotten")
            self.note(f"FAULT {memory.node} {header.key.decode()} at {offset} rots")

    def _promises(
        self, state: MasterState, now_ms: int, request: calls.Request | None, reply: calls.Reply
    ) -> None:
        """What this reply tells a client to be leased."""
        names: list[Name] = []
        match request, reply:
            case calls.Lookup(namespace, keys), calls.LookupReply():
                found = zip(keys, reply.placements.replicas, strict=True)
                names = [(namespace, key) for key, replicas in found if replicas]
            case calls.MatchPrefix(namespaces, keys), calls.MatchPrefixReply():
                for namespace, match in zip(namespaces, reply.matches, strict=True):
                    in_memory = match.matched - match.on_disk
                    names += [(namespace, key) for key in keys[:in_memory]]
                    self.count("matched", match.matched)
            case calls.Exists(namespace, keys, lease), calls.ExistsReply():
                found = zip(keys, reply.presence, strict=True)
                stored = [(namespace, key) for key, each in found if each == Presence.COMPLETE]
                names = stored if lease else []
            case calls.Renew(namespace, keys), calls.RenewReply():
                held = zip(keys, reply.keys_leased, strict=True)
                names = [(namespace, key) for key, is_held in held if is_held]
            case _:
                return
        for name in names:
            version = self._now_complete.get(name)
            if version is None and state_access.is_on_disk(state, name):
                continue
            if version is None:
                matching = isinstance(request, calls.MatchPrefix)
                self.broken(
                    "match_overcounts" if matching else "promise",
                    f"{_show(name)} is promised and not complete", name[1].decode(),
                )  # fmt: skip
            else:
                ends = self._promised.setdefault(version, {})
                ends[getattr(request, "lease", 0)] = now_ms + state.rules.lease_ms

    def _granted(self, state: MasterState) -> None:
        """New grants must not lie on what somebody believes to be leased."""
        newest = self._last_token
        believed: list[ExpectedBytes] | None = None
        for token, segment, offset, length in state_access.pending_extents(state):
            if token <= self._last_token:
                continue
            newest = max(newest, token)
            if believed is None:
                believed = [each for c in self.clients.values() for each in c.believed()]
            for promise in believed:
                if (
                    promise.uuid == segment.offer.uuid
                    and promise.offset < offset + length
                    and offset < promise.offset + promise.length
                    and promise.version != (state.epoch, token)
                ):
                    self.broken(
                        self._kind_of(promise),
                        f"put {token} gets {segment} [{offset}, {offset + length}), where "
                        f"{promise.client} believes in {_v(promise.version)} "
                        f"[{promise.offset}, {promise.offset + promise.length})",
                        _v(promise.version), str(segment),
                    )  # fmt: skip
        self._last_token = newest

    def _kind_of(self, promise: ExpectedBytes) -> str:
        stored = promise.version in self._stored
        if promise.what == "allocation":
            return "granted_committed" if stored else "granted_allocation"
        if promise.what == "view" and not stored:  # it was not needed, and is kept for a while
            return "granted_allocation"
        if promise.what == "view" and any(
            segment.offer.uuid == promise.uuid and not segment.alive
            for segment, _ in self._places[promise.version]
        ):
            return "granted_lost_replica"
        return f"granted_{promise.what}"

    def nothing_is_forgotten(self, memory: Memory) -> None:
        """At rest: whole objects of a node that nobody ended are complete at the master."""
        for offset, header in memory.scan():
            name, version = (header.namespace, header.key), Version(header.epoch, header.counter)
            start = offset + HEADER_BYTES
            payload = memory.memory[start : start + header.payload_size]
            if (
                version in self._stored
                and version not in self._ended
                and xxh3_64_intdigest(payload) == header.payload_checksum
            ):
                self.count("kept")
                if self._now_complete.get(name) != version:
                    self.broken(
                        "forgotten",
                        f"{memory.node} holds {_show(name)} {_v(version)} at {offset}, and nobody "
                        f"finds it: {self._now_complete.get(name)}",
                        name[1].decode(), _v(version),
                    )  # fmt: skip

    # --- bytes --------------------------------------------------------------------------------

    def putting(self, namespace: Namespace, key: Key, data: bytes) -> None:
        """A client begins to put these bytes under this key."""
        self._contents[namespace, key, xxh3_64_intdigest(data)] = data

    def sealed(self, header: Header) -> None:
        """A client has made this header."""
        name = (header.namespace, header.key)
        version = Version(header.epoch, header.counter)
        self._written[version] = (name, header.payload_checksum)
        self._attempts.setdefault(name, {})[version] = None

    def write(
        self, memory: Memory, offset: int, data: bytes | memoryview, version: Version,
        *, by_hand: bool = False,
    ) -> None:  # fmt: skip
        """Bytes land in a segment. ``by_hand``: a program computes into its allocation."""
        self._check_owner(memory, offset, len(data), version, by_hand)
        memory.memory[offset : offset + len(data)] = data
        self.check_views(memory)

    def bring(self, memory: Memory, offset: int, length: int, version: Version) -> None:
        """A node copies an object from its disk to memory."""
        state = self._state
        segment = None if state is None else state_access.mounted(state, memory.uuid)
        if state is None or segment is None:
            return
        owner = state_access.owner_of(state, segment, offset, length, version)
        if owner not in ("writer", "removed"):  # the wipe of a late one waits for it
            self.broken(
                "late_bring", f"{_v(version)} is brought to {segment} {offset}, which is: {owner}",
                _v(version), owner,
            )  # fmt: skip

    def written_behind(self, disk: Memory, version: Version) -> None:
        """A version is on a disk."""
        self._on_disks.setdefault(version, set()).add(disk.uuid)

    def _check_owner(
        self, memory: Memory, offset: int, length: int, version: Version, by_hand: bool
    ) -> None:
        state = self._state
        segment = None if state is None else state_access.mounted(state, memory.uuid)
        if state is None or segment is None:
            return
        owner = state_access.owner_of(state, segment, offset, length, version)
        if owner == "quarantine":
            self.count("landed_in_quarantine")
        if owner in ("writer", "quarantine"):
            return
        if owner == "free" and by_hand and not segment.usable(self._now_ms()):
            self.count("written_before_usable")  # nobody is harmed, yet
            return
        rule = "late_write"
        if by_hand:
            rule = "allocation_outlived"
        elif version in self._stored:
            rule = "committed_rewritten"
        elif version.epoch != state.epoch:
            rule = "old_epoch_write"
        self.broken(
            rule,
            f"a write of {_v(version)} lands in {segment} "
            f"[{offset}, {offset + length}), which is: {owner}",
            _v(version), owner,
        )  # fmt: skip

    def wiped(self, memory: Memory, order: MasterWipe, epoch: int) -> None:
        """``epoch``: of the master that gave the order, which may have died since."""
        self.note(f"{memory.node} wiped {order.offsets} {order.epochs} {order.counters}")
        if max(order.epochs, default=0) > epoch:
            self.broken("later_wiped", f"{order} of a master of epoch {epoch}")
        if order.removal_watermark != NO_VERSION and epoch == self._epoch:
            had = self._had.setdefault(epoch, set())
            had |= {memory.uuid} | state_access.mounted_uuids(self._state)
            self._kept.setdefault(memory.uuid, []).append((order.removal_watermark, set(had)))
        self.check_views(memory)

    def check_views(self, memory: Memory) -> None:
        for client in self.clients.values():
            for view in client.views_on(memory.uuid):
                self.check_view(view)

    def check_view(self, view: View) -> None:
        if view.data != view.snapshot:
            rule = self._kind_of(view.promise)
            self.broken(
                "view_changed" if rule == "granted_view" else rule,
                f"{view.promise.client}'s view of {_v(view.promise.version)} at "
                f"{view.promise.offset} has other bytes",
                _v(view.promise.version),
            )

    # --- what clients are told ----------------------------------------------------------------

    def acknowledged(self, call_id: int, reply: calls.Reply) -> None:
        """A reply has reached its client."""
        call = self._calls.pop(call_id, None)
        if call is None:
            return
        doomed = call.doomed
        match call.request, reply:
            case calls.PutEnd(epoch, tokens), calls.PutEndReply(outcomes):
                stored = [outcome == PutOutcome.STORED for outcome in outcomes]
                doomed = [each for each, done in zip(doomed, stored, strict=False) if done]
                for token, done in zip(tokens, stored, strict=True):
                    if done and token not in call.repairs:
                        self._was_stored(Version(epoch, token))
            case calls.Commit(epoch, token), calls.CommitReply(PutOutcome.STORED):
                self._was_stored(Version(epoch, token))
            case calls.PutStart(), calls.Grants():
                found = [outcome == PutOutcome.FOUND for outcome in reply.outcomes]
                doomed = [each for each, there in zip(doomed, found, strict=True) if there]
            case calls.Remove(), calls.RemoveReply():
                pass
            case _:
                return
        for versions in doomed:
            for version, rule in versions:
                gone_us = self._scheduler.now_us
                if rule == "removed_read_from_dead":  # not guaranteed before
                    gone_us = max(gone_us, self._earlier_leases_end_us)
                if version not in self._gone:
                    self._gone[version] = gone_us, rule
                    self._marked[version] = self._epoch, self._memory_that_knows()

    def _memory_that_knows(self) -> set[bytes]:
        newest = state_access.newest_mark(self._state)
        kept = {
            uuid
            for uuid, marks in self._kept.items()
            if NO_VERSION < newest <= max(mark for mark, _ in marks)
        }
        return kept | state_access.mounted_uuids(self._state)

    def _was_stored(self, version: Version) -> None:
        if version not in self._stored:
            self.broken("not_stored", f"{_v(version)} was acknowledged and never complete")

    def read(self, client: str, name: Name, version: Version, data: bytes, started_us: int) -> None:
        """A get, or a view, of a key returned these bytes; it began at ``started_us``."""
        self.count("reads")
        written = self._written.get(version)
        if written is None or written[0] != name:
            self.broken("foreign", f"{client} got {_v(version)} for {_show(name)}, not {written}")
            return
        expected = self._contents.get((*name, written[1]))
        if expected is None or data != expected:
            self.broken(
                "wrong_bytes",
                f"{client} got other bytes for {_show(name)} {_v(version)}",
                name[1].decode(),
            )
        gone_us, rule = self._gone.get(version, (started_us, ""))
        if gone_us < started_us and self._has_no_mark(version):
            self.count("read_before_the_mark")
        elif gone_us < started_us:
            dead = not all(segment.alive for segment, _ in self._places.get(version, ()))
            self.broken(
                "removed_read_from_dead" if dead else rule,
                f"{client} got {_show(name)} {_v(version)} at a get that began "
                f"{started_us - gone_us} us after its removal was acknowledged",
                name[1].decode(),
            )

    def _has_no_mark(self, version: Version) -> bool:
        """Whether the version is on memory that was away when its end was acknowledged, and joined
        a later master before all memory that knew so: not guaranteed. For good, if that
        master ordered a mark before it had any of that memory."""
        epoch, knew = self._marked[version]
        places = {segment.offer.uuid for segment, _ in self._places.get(version, ())}
        places |= self._on_disks.get(version, set())
        if epoch == self._epoch or not knew or knew & places:
            return False
        marks = [each for uuid in places for each in self._kept.get(uuid, ())]
        outranked = any(mark.epoch > epoch and not knew & had for mark, had in marks)
        return outranked or not knew & state_access.mounted_uuids(self._state)


def _removes(request: calls.Request | None, name: Name) -> bool:
    match request:
        case calls.Remove(namespace, keys):
            return name[0] == namespace and name[1] in keys
        case calls.Clear(namespace):
            return not namespace or namespace == name[0]
        case calls.ReportCorrupt(namespace, keys):
            return name[0] == namespace and name[1] in keys
        case _:
            return False


def _v(version: Version) -> str:
    return f"v{version[0]}.{version[1]}"


def _show(name: Name) -> str:
    return f"{name[0]}/{name[1].decode()}"
