"""Promises that some memory of the pool keeps its bytes, and how they are renewed.

    held ──► a third of what is left is over ──► asked ──► held on, if the master says so and the
      ▲                                                    segment is mounted as it was
      └──────────────────────────────────────────────────┘
    otherwise the promise runs out, and ``held`` turns false for good

Why the segment must be mounted as it was: the master knows an object by its version, and goes on
promising it while one replica is left. This memory may be another replica's, whose node counts as
dead. A node that comes back *fences* (its generation grows) before it joins, and gets no writers
for one lease after it has joined. So whoever asks, is promised a lease counted from the question,
and still sees the old generation when the answer is there, has that promise: it ends before anybody
may write. No clock of another process is compared.

When it was mounted anew, that master may know the object at this very place all the same: its node
has told what it holds. Then it is asked for once more, by key, and the promise counts if what it
describes is the segment's generation, before the question was asked and when the answer is there:
any other master would describe an older one. Until then the earlier promise has held.

Everything here takes its time from a clock it is given; ``kvstore.client.views`` adds the thread,
the lock and the finalizers.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple

from kvstore import calls
from kvstore.calls import SegmentInfo
from kvstore.limits import DEFAULT_NAMESPACE, Key, Namespace

log = logging.getLogger("kvstore.client")

RENEW_PAUSE_S: Final = 0.01
"""Between two attempts to renew one lease, at least; those due so soon are renewed together."""

RENEW_KEYS_MAX: Final = 4_096
"""In one call: well below the bound of a batch, and no long one for the master."""

Mounted = Callable[[], bool]
"""Whether a segment is mounted as it was (``Transport.watch``)."""


class Place(NamedTuple):
    """Where leased memory is, whoever has it mounted."""

    uuid: bytes
    """Of the segment."""
    offset: int
    """Of the extent."""


class Named(NamedTuple):
    """What is held: one version of an object."""

    namespace: Namespace
    key: Key
    epoch: int
    counter: int


class Granted(NamedTuple):
    """What is held: an allocation that has no name yet."""

    epoch: int
    token: int
    segment: SegmentInfo
    offset: int
    """Of the extent."""
    size: int
    """Payload bytes."""


class Unneeded(NamedTuple):
    """What is held: an allocation that was put and not stored, since its key was there already. Its
    memory is quarantined, readable until its deadline."""

    epoch: int
    token: int


What = Named | Granted | Unneeded


class Lease:
    """The promise that some memory of the pool keeps its bytes. Any thread may look at it."""

    __slots__ = (
        "_clock",
        "_kept",
        "_mounted",
        "_until",
        "header",
        "holders",
        "place",
        "renew_at",
        "size",
        "unanswered",
        "what",
    )

    def __init__(
        self,
        held: What,
        until: float,
        size: int,
        mounted: Mounted,
        clock: Callable[[], float] = time.monotonic,
        place: Place | None = None,
    ) -> None:
        self.place = place
        self.what: What = held
        self.size = size
        """Bytes of memory, from the address that it is known by."""
        self._until = until
        self._mounted = mounted
        self._clock = clock
        self._kept = True
        self.holders = 1
        """Arrays over this memory; 0: let go."""
        self.header = bytearray()
        """Of an allocation: what a commit of it has written in front of it."""
        self.unanswered: Named | None = None
        """Of an allocation: what a commit that had no answer may have made of it."""
        now = clock()
        self.renew_at = now + max((until - now) / 3, RENEW_PAUSE_S)

    @property
    def held(self) -> bool:
        """Whether the promise has held without a gap until now. False is final.

        Of an allocation it also ends when its segment is mounted anew: the next master does not
        know it. Of an object it does not: what was promised is waited for.
        """
        if self._kept and self.holders:
            over = self._clock() >= self._until
            if over or not (isinstance(self.what, Named) or self._mounted()):
                self._kept = False
        return self._kept

    @property
    def seconds_left(self) -> float:
        """For how much longer it holds if it is never renewed again."""
        return max(0.0, self._until - self._clock()) if self.held else 0.0

    def extend(self, until: float) -> None:
        """The same was promised again."""
        if self.held and until > self._until:
            self._until = until
            self.plan_renewal()

    def renewed(self, until: float) -> None:
        """The master promises its version on. To be called when the answer is there: see above."""
        if self._mounted():
            self.extend(until)
        else:
            self.plan_renewal()

    @property
    def moved(self) -> bool:
        """Whether its segment was mounted anew, and it can be asked for by its place there."""
        return self.place is not None and isinstance(self.what, Named) and not self._mounted()

    def mounted_again(self, mounted: Mounted, until: float) -> None:
        """The master knows it at its place, on the segment that ``mounted`` watches."""
        if mounted():
            self._mounted = mounted
            self.extend(until)

    def plan_renewal(self) -> None:
        """When a third of what is left is over: so a renewal that fails is tried again, sooner
        each time, and several times before the end."""
        now = self._clock()
        self.renew_at = now + max((self._until - now) / 3, RENEW_PAUSE_S)

    def become(self, named: Named, until: float) -> None:
        """The allocation was put: it is an object now."""
        self._kept = self.held  # for good
        self.what = named
        self.unanswered = None
        self._until = until
        self.plan_renewal()

    def unneeded(self) -> None:
        """The allocation was put, and its object was there already."""
        if isinstance(self.what, Granted):
            self.what = Unneeded(self.what.epoch, self.what.token)
            self.renew_at = math.inf

    def __repr__(self) -> str:
        return f"<Lease held={self.held} seconds_left={self.seconds_left:.1f} of {self.what}>"


class LeaseTable:
    """Leases by the address of their memory. Reads from any thread, one at a time changes it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._leases: dict[int, Lease] = {}  # by address of the first payload byte

    def add(
        self,
        address: int,
        size: int,
        held: Named | Granted,
        until: float,
        mounted: Mounted,
        place: Place | None = None,
    ) -> Lease:
        """One more holder of the memory at ``address``."""
        lease = self._leases.get(address)
        if lease is not None and lease.what == held and lease.held:
            lease.holders += 1
            lease.extend(until)
        else:
            lease = self._leases[address] = Lease(held, until, size, mounted, self.clock, place)
        return lease

    def let_go(self, address: int, lease: Lease) -> Granted | None:
        """One holder less; returns the allocation that nobody can put any more."""
        lease.holders -= 1
        if lease.holders:
            return None
        if self._leases.get(address) is lease:
            del self._leases[address]
        return lease.what if isinstance(lease.what, Granted) else None

    def at(self, address: int) -> Lease | None:
        """Of the memory that starts there."""
        return self._leases.get(address)

    def around(self, address: int) -> Lease | None:
        """Of the memory that this byte is in."""
        lease = self._leases.get(address)
        if lease is None:
            for start, other in list(self._leases.items()):
                if start <= address < start + other.size:
                    return other
        return lease

    def __iter__(self) -> Iterator[Lease]:
        return iter(list(self._leases.values()))

    def __len__(self) -> int:
        return len(self._leases)

    def wake_at(self) -> float:
        """When the next renewal is due; infinity: none is."""
        return min((lease.renew_at for lease in self if lease.held), default=math.inf)

    def due(self) -> list[Renewal]:
        """The calls that renew what is due now, or so soon that it goes along."""
        return list(_renewals(lease for lease in self._due() if not lease.moved))

    def moved(self) -> list[Lease]:
        """Those due whose segments were mounted anew."""
        return [lease for lease in self._due() if lease.moved]

    def _due(self) -> Iterator[Lease]:
        soon = self.clock() + RENEW_PAUSE_S
        return (lease for lease in self if lease.renew_at <= soon and lease.held)


def found_at(lease: Lease, found: calls.Found, described: calls.Segments) -> SegmentInfo | None:
    """The segment that holds what is leased at its place, by these answers about its key."""
    what, placements = lease.what, found.placements
    version = placements.epochs[0], placements.counters[0]
    if (
        not isinstance(what, Named)
        or found.epoch != described.epoch
        or version != (what.epoch, what.counter)
    ):
        return None
    by_id = {segment.segment_id: segment for segment in described.segments}
    for segment_id, offset in zip(placements.segments, placements.offsets, strict=True):
        segment = by_id.get(segment_id)
        if segment is not None and lease.place == (segment.uuid, offset):
            return segment
    return None


class Renewal:
    """One call, and the leases that it renews."""

    def __init__(self, request: calls.Renew, leases: list[Lease]) -> None:
        self.request = request
        self._leases = leases

    @property
    def patience_s(self) -> float:
        """How long it may take: so that there is time for another attempt."""
        return max(0.05, min(lease.seconds_left for lease in self._leases) / 2)

    def failed(self, error: Exception) -> None:
        log.warning("lease_renewal_failed leases=%d error=%s", len(self._leases), str(error))
        for lease in self._leases:
            lease.plan_renewal()

    def answered(self, renewed: calls.Renewed, asked: float, margin_s: float) -> None:
        """
        Args:
            asked: on the leases' clock, before the question was sent.
            margin_s: what is taken off each promise.
        """
        held = (*renewed.keys_held, *renewed.tokens_held)
        promised_ms = renewed.lease_ms if self.request.keys else renewed.deadline_ms
        for lease, still in zip(self._leases, held, strict=True):
            if still:
                lease.renewed(asked + promised_ms / 1000 - margin_s)
            else:
                # Removed, or a new master that does not know it: the bytes stay until the last
                # promise ends, and ``held`` turns false then.
                lease.plan_renewal()


def _renewals(due: Iterable[Lease]) -> Iterator[Renewal]:
    named: dict[Namespace, list[tuple[Lease, Named]]] = {}
    granted: dict[int, list[tuple[Lease, Granted]]] = {}
    for lease in due:
        what = lease.what
        if isinstance(what, Named):
            named.setdefault(what.namespace, []).append((lease, what))
        elif isinstance(what, Granted):
            granted.setdefault(what.epoch, []).append((lease, what))
    for namespace, all_objects in named.items():
        for start in range(0, len(all_objects), RENEW_KEYS_MAX):
            objects = all_objects[start : start + RENEW_KEYS_MAX]
            request = calls.Renew(
                namespace,
                [what.key for _, what in objects],
                [what.epoch for _, what in objects],
                [what.counter for _, what in objects],
                0,
                (),
            )
            yield Renewal(request, [lease for lease, _ in objects])
    for epoch, all_granted in granted.items():
        for start in range(0, len(all_granted), RENEW_KEYS_MAX):
            allocations = all_granted[start : start + RENEW_KEYS_MAX]
            tokens = [what.token for _, what in allocations]
            request = calls.Renew(DEFAULT_NAMESPACE, (), (), (), epoch, tokens)
            yield Renewal(request, [lease for lease, _ in allocations])
