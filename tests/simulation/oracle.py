"""The rules that must hold whatever happens, checked against every process of the cluster.

The oracle sees what no part of a real cluster sees at once: the master's state after each step,
every byte that lands in a segment, every promise that a client believes in, by that client's own
clock. Its rules, each with the place where it is checked:

* ``MasterState.check_invariants`` holds, and no object vanishes from the master without a reason:
  removed, replaced, evicted (and counted) or on a dead segment (``master_stepped``).
* Nothing is evicted while a lease on it lives, or while it is pinned (``master_stepped``).
* An object whose time to live is over is in no answer of a master that knows that time
  (``_promises``), a get that begins one lease later does not return it (``read``), and it does not
  come back (``_compare``).
* After a grant the tenant of the namespace that was asked for is within its bound, allocations
  included (``_within_bound``).
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
from kvstore.calls import NO_VERSION, STAMP_BYTES, MasterWipe, Presence, PutOutcome, Version
from kvstore.limits import Key, Namespace
from kvstore.master.state.effects import Later
from kvstore.master.state.ends import STEP_MS
from kvstore.master.state.master_state import MasterState
from kvstore.master.state.records import MountedSegment
from kvstore.memory.header import HEADER_BYTES, Header, scan, unpack
from kvstore.tenants import UNBOUNDED
from tests.simulation import inside
from tests.simulation.follower import Follower
from tests.simulation.inside import Name
from tests.simulation.memory import Memory
from tests.simulation.scheduler import MS, Scheduler


class SimulationError(AssertionError):
    """A rule was broken. ``about``: words to search the story for."""

    def __init__(self, rule: str, message: str, about: Iterable[object] = ()) -> None:
        super().__init__(f"[{rule}] {message}")
        self.rule = rule
        self.about = [str(each) for each in about]


class Believed(NamedTuple):
    """Bytes that a client believes to be promised at this moment."""

    client: str
    what: str
    uuid: bytes
    offset: int
    length: int
    version: Version


class View(NamedTuple):
    """A view that is held: its bytes, and what they were at the beginning."""

    promise: Believed
    data: memoryview
    snapshot: bytes


class Watched(Protocol):
    """What the oracle asks of a client."""

    def believed(self) -> Iterator[Believed]: ...
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
    """See the module. ``waived``: rules whose violations are counted instead of raised."""

    def __init__(
        self,
        scheduler: Scheduler,
        memories: Callable[[bytes], Memory | None],
        *,
        waived: frozenset[str] = frozenset(),
    ) -> None:
        """``memories``: the segment of that uuid."""
        self._memories = memories
        self.clients: dict[str, Watched] = {}
        self.waived = waived
        self.waivers: dict[str, int] = {}
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
        self._pinned: dict[Name, int] = {}
        """Until when this master has promised to keep an object from eviction (its own ms)."""
        self._ttls: dict[int, int | None] = {}
        """Of the puts that the present step ends, by token (``inside.ttl_of``)."""
        self._may_end: dict[Version, int] = {}
        """When the time to live is over that this master was told (its own ms)."""
        self._must_end: dict[Version, tuple[int, int]] = {}
        """The same, and by when no get returns the version (true us). Not of versions that were
        lost with a node and came back: those may stay."""
        self._over: set[Version] = set()
        """Versions that this master has taken back after their time to live."""
        self._expired = 0
        self._allocated: dict[Version, Namespace] = {}
        """The namespaces that allocations were asked for."""
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
        """A rule was broken, which ends the run, unless that is a known issue."""
        self.note(f"BROKEN [{rule}] {message}")
        if rule not in self.waived:
            raise SimulationError(rule, message, about)
        self.waivers[rule] = self.waivers.get(rule, 0) + 1

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
        self._follower = Follower(state)
        self._now_ms = now_ms
        self._now_complete = {}
        self._promised = {}
        self._pinned, self._ttls, self._may_end, self._must_end = {}, {}, {}, {}
        self._over = set()
        self._removals = {}
        self._expired = 0
        self._evicted = self._claimed = self._repaired = self._last_token = 0
        self._calls = {}

    @property
    def newest_epoch(self) -> int:
        """Of the last master."""
        return self._epoch

    def may_end(self, version: Version) -> bool:
        """Whether it has a time to live, which this master knows."""
        return version in self._may_end

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
        self._ttls = {}
        match request:
            case calls.Unpin(namespace, keys):
                for key in keys:
                    self._pinned.pop((namespace, key), None)
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
                names = [inside.replaced_by(state, token) for token in tokens]
                copies = {row for row, each in enumerate(tokens) if inside.is_copy(state, each)}
                self._ttls = {token: inside.ttl_of(state, token) for token in tokens}
            case calls.Commit():
                names = [(request.namespace, request.key)] if request.overwrite else []
                self._ttls = {request.token: request.ttl_ms}
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
                for version in inside.moved_to(state, ended):
                    self.count("copies_given_up")
                    doomed[row].append((version, "given_up_read"))
        repairs: set[int] = set()
        if isinstance(request, calls.PutEnd) and request.epoch == state.epoch:
            repairs = {token for token in request.tokens if inside.is_repair(state, token)}
        self._calls[call_id] = _Call(request, doomed, repairs)

    def _put_by(self, state: MasterState, request: calls.Request) -> list[Name | None]:
        """The objects that are there once this request is acknowledged."""
        match request:
            case calls.PutStart(namespace, keys):
                return [(namespace, key) for key in keys]
            case calls.PutEnd(epoch, tokens) if epoch == state.epoch:
                return [inside.put_by(state, token) for token in tokens]
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
            if not all(inside.mounted(state, segment.offer.uuid) for segment, _ in places):
                rule = "removed_read_from_dead"
            rows.append((version, rule))
        # Nor may a version be read that a put of before has given up: it may have been stored under
        # another one, which is removed now. Of a put under way nobody knows.
        complete = self._history.get(name, ())
        given_up = (v for v in self._attempts.get(name, ()) if v not in complete)
        ended = (v for v in given_up if not inside.is_pending(state, v))
        return rows + [(version, "given_up_read") for version in ended]

    def master_stepped(
        self,
        state: MasterState,
        now_ms: int,
        request: calls.Request | None,
        reply: calls.Reply | Later | None,
    ) -> None:
        """After each step of the state."""
        if state is not self._state:
            self.broken("two_leaders", f"epoch {state.epoch} acts after {self._epoch} has begun")
        try:
            state.check_invariants()
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
        complete = inside.complete_objects(state)
        if complete != self._now_complete:
            self._compare(state, now_ms, request, complete)
        replicas = state.counters["claimed_objects"] + state.counters["repaired_objects"]
        if replicas != self._claimed:  # further ones may be known
            self._claimed = replicas
            self._places.update((v, inside.extents_of(state, name)) for name, v in complete.items())
        repaired = state.counters["repaired_objects"]
        if repaired != self._repaired:
            self.count("repaired", repaired - self._repaired)
            self._repaired = repaired
            if isinstance(request, calls.PutEnd):
                for name, version in complete.items():
                    self._is_whole(state, name, version)
        self._evicted = state.counters["evicted_objects"]
        self._expired = state.counters["expired_objects"]
        if isinstance(request, calls.PutStart | calls.Allocate) and isinstance(reply, calls.Grants):
            self._within_bound(state, request, reply)
        if reply is not None and not isinstance(reply, Later):
            self._promises(state, now_ms, request, reply)
            self._grants_nothing_of_others(state, reply)
        self._granted(state)

    def answered(self, state: MasterState, now_ms: int, result: object) -> None:
        """A reply that had to wait is sent now."""
        del now_ms
        self._grants_nothing_of_others(state, result)
        if isinstance(result, calls.Grants):
            self.count("waited_grants")

    def _grants_nothing_of_others(self, state: MasterState, reply: object) -> None:
        """Where nodes take capabilities, memory is zero when its writer hears of it."""
        grants = reply.grants if isinstance(reply, calls.MovesStarted) else reply
        if not isinstance(grants, calls.Grants):
            return
        for uuid, offset, length in inside.zeroed(state, grants.tokens):
            memory = self._memories(uuid)
            if memory is not None and any(memory.memory[offset : offset + length]):
                self.broken("not_zeroed", f"granted with bytes of before: {memory.node} {offset}")

    def _compare(
        self,
        state: MasterState,
        now_ms: int,
        request: calls.Request | None,
        complete: dict[Name, Version],
    ) -> None:
        evicted: list[tuple[Name, Version]] = []
        over_and_replaced = 0
        for name, version in self._now_complete.items():
            new = complete.get(name)
            if new == version:
                continue
            if new is not None:
                over_and_replaced += self._may_end.get(version, now_ms + 1) <= now_ms
                # A put that overwrites, or memory that holds a newer version.
                if not isinstance(request, calls.PutEnd | calls.Commit) and new < version:
                    self.broken("vanished", f"{name} {version} became {new}", name[1].decode())
            elif _removes(request, name):
                self._pinned.pop(name, None)
                self.note(f"removed {_show(name)} {_v(version)}")
            elif not any(segment.alive for segment, _ in self._places[version]):
                self._pinned.pop(name, None)
                self.note(f"lost {_show(name)} {_v(version)}")
                self.count("lost")
            else:
                evicted.append((name, version))
        expired = [
            (name, version)
            for name, version in evicted
            if self._may_end.get(version, now_ms + 1) <= now_ms
        ]
        for name, version in expired:
            self.note(f"over {_show(name)} {_v(version)}")
            evicted.remove((name, version))
            self._pinned.pop(name, None)
        for name, version in evicted:
            pinned_until_ms = self._pinned.pop(name, 0)
            if pinned_until_ms > now_ms:
                self.broken(
                    "evicted_pinned",
                    f"{_show(name)} {_v(version)} is pinned for {pinned_until_ms - now_ms} ms more",
                    name[1].decode(),
                )
            until_ms = max(self._promised.get(version, {0: 0}).values(), default=0)
            self.note(f"evicted {_show(name)} {_v(version)}")
            if until_ms > now_ms:
                self.broken(
                    "evicted_leased",
                    f"{_show(name)} {_v(version)} is leased for {until_ms - now_ms} ms more",
                    name[1].decode(),
                )
        counted = state.counters["evicted_objects"] - self._evicted
        over = state.counters["expired_objects"] - self._expired
        gone = len(evicted) + len(expired)
        if counted < len(evicted) or not gone <= counted + over <= gone + over_and_replaced:
            self.broken(
                "vanished",
                f"{counted} evictions, and {over} are over; but there vanished {evicted}, and of "
                f"those that may be over {expired}",
            )
        if counted == len(evicted):
            self._over.update(version for _, version in expired)
        self.count("evicted", len(evicted))
        self.count("expired", len(expired))
        self._ended.update(version for _, version in (*evicted, *expired))
        for name, version in complete.items():
            if self._now_complete.get(name) != version:
                if version in self._over:
                    self.broken(
                        "over_again",
                        f"{_show(name)} {_v(version)} was over, and is complete again",
                        name[1].decode(), _v(version),
                    )  # fmt: skip
                if version in self._stored:  # it was lost, and is back without its end
                    self._must_end.pop(version, None)
                else:
                    self._lives(state, now_ms, version, self._now_complete.get(name))
                self._ended.update(v for v in self._history.get(name, ()) if v < version)
                if version in self._stored:
                    self.count("claimed")
                    self._is_whole(state, name, version)
                else:
                    if version.epoch != state.epoch:
                        self.count("claimed_unended")
                    self._history.setdefault(name, []).append(version)
                    self._stored.add(version)
                self._places[version] = inside.extents_of(state, name)
                self.note(f"complete {_show(name)} {_v(version)}")
        self._now_complete = complete

    def _lives(
        self, state: MasterState, now_ms: int, version: Version, before: Version | None
    ) -> None:
        """Notes the end of a version that is complete now; ``before``: the one that it replaces."""
        ttl_ms: int | None = 0
        if version.epoch == state.epoch:
            ttl_ms = self._ttls.get(version.counter, 0)
        if ttl_ms is None:  # moved
            if before is not None and before in self._may_end:
                self._may_end[version] = self._may_end[before]
            if before is not None and before in self._must_end:
                self._must_end[version] = self._must_end[before]
        elif ttl_ms:
            end_ms = -(-(now_ms + ttl_ms) // STEP_MS) * STEP_MS
            last_ms = (end_ms - now_ms + state.rules.lease_ms) * 1.02  # clocks differ
            self._may_end[version] = end_ms
            self._must_end[version] = end_ms, self._scheduler.now_us + int(last_ms * MS)

    def _is_whole(self, state: MasterState, name: Name, version: Version) -> None:
        """What memory is believed to hold again, it holds."""
        for segment, offset in inside.extents_of(state, name):
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
            case calls.Lookup(namespace, keys), calls.Found():
                found = zip(keys, reply.placements.replicas, strict=True)
                names = [(namespace, key) for key, replicas in found if replicas]
            case calls.MatchPrefix(namespaces, keys), calls.Matched():
                for namespace, match in zip(namespaces, reply.matches, strict=True):
                    names += [(namespace, key) for key in keys[: match.matched]]
                    self.count("matched", match.matched)
            case calls.Pin(namespace, keys, hold_ms), calls.Pinned():
                until_ms = -(-(now_ms + hold_ms) // STEP_MS) * STEP_MS
                for key, is_pinned in zip(keys, reply.pinned, strict=True):
                    if is_pinned:
                        name = namespace, key
                        self._pinned[name] = max(self._pinned.get(name, 0), until_ms)
                return
            case calls.Exists(namespace, keys, lease), calls.Existing():
                found = zip(keys, reply.presence, strict=True)
                stored = [(namespace, key) for key, each in found if each == Presence.COMPLETE]
                for name in stored:
                    self._is_not_over(name, now_ms)
                names = stored if lease else []
            case calls.Renew(namespace, keys), calls.Renewed():
                held = zip(keys, reply.keys_held, strict=True)
                names = [(namespace, key) for key, is_held in held if is_held]
            case _:
                return
        for name in names:
            version = self._now_complete.get(name)
            if version is None:
                matching = isinstance(request, calls.MatchPrefix)
                self.broken(
                    "match_overcounts" if matching else "promise",
                    f"{_show(name)} is promised and not complete", name[1].decode(),
                )  # fmt: skip
            else:
                self._is_not_over(name, now_ms)
                ends = self._promised.setdefault(version, {})
                ends[getattr(request, "lease", 0)] = now_ms + state.rules.lease_ms

    def _is_not_over(self, name: Name, now_ms: int) -> None:
        version = self._now_complete.get(name)
        if (
            version is not None
            and version in self._must_end
            and self._must_end[version][0] <= now_ms
        ):
            late_ms = now_ms - self._must_end[version][0]
            self.broken(
                "answered_over",
                f"{_show(name)} {_v(version)} is in an answer {late_ms} ms after its time to live",
                name[1].decode(),
            )

    def _within_bound(
        self, state: MasterState, request: calls.PutStart | calls.Allocate, grants: calls.Grants
    ) -> None:
        """Counts what is under way by the namespaces that clients have asked for, as far as they
        did not have to wait."""
        name, bound = inside.bound_of(state, Namespace(request.namespace))
        if isinstance(request, calls.Allocate):
            version = Version(grants.epoch, grants.tokens[0])
            self._allocated[version] = Namespace(request.namespace)
        if bound == UNBOUNDED or not grants.tokens:
            return
        size = sum(
            length
            for token, namespace, length in inside.held(state)
            if inside.bound_of(
                state, self._allocated.get(Version(state.epoch, token), namespace)
            )[0] == name
        )  # fmt: skip
        if size > bound:
            self.broken("quota", f"tenant {name} holds {size} bytes of {bound} after {request!r}")

    def _granted(self, state: MasterState) -> None:
        """New grants must not lie on what somebody believes to be leased."""
        newest = self._last_token
        believed: list[Believed] | None = None
        for token, segment, offset, length in inside.pending_extents(state):
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

    def _kind_of(self, promise: Believed) -> str:
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
        if self._may_land(memory, offset, len(data), version, by_hand):
            memory.memory[offset : offset + len(data)] = data
            self.check_views(memory)

    def _may_land(
        self, memory: Memory, offset: int, length: int, version: Version, by_hand: bool
    ) -> bool:
        """Where the violation is waived the bytes are left out, so that nothing follows from it."""
        state = self._state
        segment = None if state is None else inside.mounted(state, memory.uuid)
        if state is None or segment is None:
            return True
        owner = inside.owner_of(state, segment, offset, length, version)
        if owner == "quarantine":
            self.count("landed_in_quarantine")
        if owner in ("writer", "quarantine"):
            return True
        if owner == "free" and by_hand and not segment.usable(self._now_ms()):
            self.count("written_before_usable")  # nobody is harmed, yet
            return True
        is_its = owner == "removed" or owner.endswith(f" {version.epoch}.{version.counter}")
        if is_its and length == STAMP_BYTES and version in self._stored:
            # The answer to a commit brings the stamp. Until the deadline of the allocation the
            # object is leased, and its memory is no other's if it is removed.
            self.count("stamped_commits")
            return True
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
        return False

    def wiped(self, memory: Memory, order: MasterWipe, epoch: int) -> None:
        """``epoch``: of the master that gave the order, which may have died since."""
        self.note(f"{memory.node} wiped {order.offsets} {order.epochs} {order.counters}")
        if max(order.epochs, default=0) > epoch:
            self.broken("later_wiped", f"{order} of a master of epoch {epoch}")
        if order.mark != NO_VERSION and epoch == self._epoch:
            had = self._had.setdefault(epoch, set())
            had |= {memory.uuid} | inside.mounted_uuids(self._state)
            self._kept.setdefault(memory.uuid, []).append((order.mark, set(had)))
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
            case calls.PutEnd(epoch, tokens), calls.PutEnded(outcomes):
                stored = [outcome == PutOutcome.STORED for outcome in outcomes]
                doomed = [each for each, done in zip(doomed, stored, strict=False) if done]
                for token, done in zip(tokens, stored, strict=True):
                    if done and token not in call.repairs:
                        self._was_stored(Version(epoch, token))
            case calls.Commit(epoch, token), calls.Committed(PutOutcome.STORED):
                self._was_stored(Version(epoch, token))
            case calls.PutStart(), calls.Grants():
                found = [outcome == PutOutcome.FOUND for outcome in reply.outcomes]
                doomed = [each for each, there in zip(doomed, found, strict=True) if there]
            case calls.Remove(), calls.Removed():
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
        newest = inside.newest_mark(self._state)
        kept = {
            uuid
            for uuid, marks in self._kept.items()
            if NO_VERSION < newest <= max(mark for mark, _ in marks)
        }
        return kept | inside.mounted_uuids(self._state)

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
        _, last_us = self._must_end.get(version, (0, started_us))
        if last_us < started_us:
            self.broken(
                "over_read",
                f"{client} got {_show(name)} {_v(version)} at a get that began "
                f"{started_us - last_us} us after the last lease on it",
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
        if epoch == self._epoch or not knew or knew & places:
            return False
        marks = [each for uuid in places for each in self._kept.get(uuid, ())]
        outranked = any(mark.epoch > epoch and not knew & had for mark, had in marks)
        return outranked or not knew & inside.mounted_uuids(self._state)


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
