"""Leases on memory of the pool, and their renewal.

A lease is renewed when a third of its remaining time has passed. If the master confirms it and the
mount of the segment is unchanged, it is extended. Otherwise it ends with the last promise; a lease
of an allocation, or of device memory, ends at once when the segment is mounted again. After its end
``is_held`` stays False.

A renewal names the location as well as the version, because the version may have ended there and
returned with the memory of another node.

The mount must be unchanged because the master may not know yet that the node has ended. A returning
node *fences* (increments its generation) before it joins, and gets no writers for one lease after
that. So a renewal is valid if it is counted from the request and the old generation is still
current when the reply arrives. No clock of another process is compared.

After a new mount, the master may still know the object, because the node has reported it. The
client then looks it up by key; the renewal is valid if the reply describes the segment's generation
at its arrival. Until then the earlier lease holds.

All functions take the time as an argument; ``kvstore.client.leases.views`` adds arrays, finalizers,
thread and lock.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

from kvstore import calls
from kvstore.calls import CAPABILITY_BYTES, SegmentInfo
from kvstore.limits import DEFAULT_NAMESPACE, Key, Namespace
from kvstore.runtime.clock import uptime
from kvstore.runtime.tcp_protocol import Extent
from kvstore.transport.common import extent_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

log = logging.getLogger("kvstore.client")

RENEW_PAUSE_S: Final = 0.01
"""Minimum pause between attempts to renew one lease; leases due within it are renewed together."""

RENEW_KEYS_MAX: Final = 4_096
"""Keys per renewal call: short work for the master."""

Mounted = Callable[[], bool]
"""Whether the mount of a segment is unchanged (``Transport.mount_checker``)."""


class LeasedExtent(NamedTuple):
    """The position of leased memory, independent of the master that mounts the segment."""

    uuid: bytes
    offset: int
    ends_with_owner: bool = False
    """Whether it is device memory, which is undefined after its node has ended."""


class ObjectLease(NamedTuple):
    """The subject of a lease: one version of an object."""

    namespace: Namespace
    key: Key
    epoch: int
    counter: int


class AllocationLease(NamedTuple):
    epoch: int
    token: int
    segment: SegmentInfo
    offset: int
    size: int
    """Payload bytes."""
    capability: bytes = b""
    """For writes to the extent; empty: the master issues none."""

    @property
    def extent(self) -> Extent | None:
        """The extent with its capability; None: there is none."""
        return extent_of(self.offset, self.size, self.capability)

    @property
    def place(self) -> LeasedExtent:
        return LeasedExtent(self.segment.uuid, self.offset)


class RedundantAllocation(NamedTuple):
    """The subject of a lease: an allocation whose key was stored already, now quarantined."""

    epoch: int
    token: int


What = ObjectLease | AllocationLease | RedundantAllocation

Watched = tuple[
    "NDArray[np.generic]", int, ObjectLease | AllocationLease, float, LeasedExtent | None, object
]
"""Array; address of its first byte; subject; end of the promise; location, by which it is found
after a new mount; and a tensor, if the program gets that instead of the array."""


class Lease:
    """The promise that some memory of the pool keeps its bytes. Any thread may read it."""

    __slots__ = (
        "_clock",
        "_kept",
        "_mounted",
        "_until",
        "capability",
        "header",
        "holders",
        "is_retried",
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
        clock: Callable[[], float] = uptime,
        place: LeasedExtent | None = None,
    ) -> None:
        self.place = place
        """Location of the object; None: an allocation, which cannot be looked up."""
        self.what: What = held
        self.size = size
        self._until = until
        self._mounted = mounted
        self._clock = clock
        self._kept = True
        self.holders: set[object] = set()
        """A watch per array over this memory; empty: the program has dropped all of them."""
        self.header = bytearray()
        self.capability = b""
        """Of an allocation: as last renewed; empty: as granted."""
        self.unanswered: ObjectLease | None = None
        """Of an allocation: the object that it may have become, by a commit without a reply."""
        self.is_retried = False
        self.plan_renewal()

    @property
    def is_held(self) -> bool:
        """Whether the promise has held until now. False is final. An allocation's lease also ends
        with its mount; an object's continues, except in device memory."""
        if self._kept:
            over = self._clock() >= self._until
            if over or not (self._outlives_mount or self._mounted()):
                self.end()
        return self._kept

    @property
    def _outlives_mount(self) -> bool:
        if not isinstance(self.what, ObjectLease):
            return False
        return self.place is None or not self.place.ends_with_owner

    @property
    def remaining_s(self) -> float:
        return max(0.0, self._until - self._clock()) if self.is_held else 0.0

    def extend(self, until: float) -> None:
        """Extend the lease after a repeated grant of the same promise."""
        if self.is_held and until > self._until:
            self._until = until
            self.plan_renewal()

    def renewed(self, until: float) -> None:
        """Process a confirmed renewal; the segment is checked only then (see the module)."""
        if self._mounted():
            self.extend(until)
        self.plan_renewal()  # also if the new promise ends no later than the old one

    @property
    def moved(self) -> bool:
        """Whether its segment was mounted again. Then the client looks the object up by key."""
        return self.place is not None and self._outlives_mount and not self._mounted()

    def mounted_again(self, mounted: Mounted, until: float) -> None:
        """Rebind the lease to the mount on which a lookup has found the object."""
        if self.is_held and mounted():
            self._mounted = mounted
            self.extend(until)

    def plan_renewal(self) -> None:
        """Plan the next renewal for when a third of the remaining time has passed."""
        self.is_retried = False
        now = self._clock()
        self.renew_at = now + max((self._until - now) / 3, RENEW_PAUSE_S)

    def plan_retry(self) -> None:
        """Plan a retry for when a tenth of the remaining time has passed."""
        self.is_retried = True
        now = self._clock()
        self.renew_at = now + max((self._until - now) / 10, RENEW_PAUSE_S)

    def convert_to_object(self, named: ObjectLease, until: float) -> None:
        """Convert the lease to one on the object that was put."""
        self._kept = self.is_held  # a lease that has ended stays ended
        if isinstance(self.what, AllocationLease):
            self.place = self.what.place
        self.what = named
        self.unanswered = None
        self._until = until
        self.plan_renewal()

    def mark_redundant(self) -> None:
        """Mark an allocation whose key was stored already."""
        if isinstance(self.what, AllocationLease):
            self.what = RedundantAllocation(self.what.epoch, self.what.token)
            self.renew_at = math.inf

    def end(self) -> None:
        """End the lease permanently. The segment may be unmapped afterwards."""
        self._kept = False
        self._mounted = _never_departed

    def __repr__(self) -> str:
        return f"<Lease held={self.is_held} seconds_left={self.remaining_s:.1f} of {self.what}>"


def _never_departed() -> bool:
    return False


class LeaseTable:
    """All leases of a client. Any thread may read it; one at a time may change it.

    An address identifies memory only until its lease ends. The client may then get a new lease on
    the same bytes while the program still uses the old array. So a lease is found by its array
    (``ArrayTracker``), and by address only if the array is unknown.
    """

    def __init__(self, clock: Callable[[], float] = uptime) -> None:
        self.clock = clock
        self._leases: dict[int, list[Lease]] = {}
        """By address of the first payload byte, newest last; no list is empty."""

    def lease_for(
        self,
        address: int,
        size: int,
        held: ObjectLease | AllocationLease,
        until: float,
        mounted: Mounted,
        place: LeasedExtent | None = None,
    ) -> Lease:
        """Return the lease of the memory, for one more holder. ``enter`` adds it to the table."""
        leases = self._leases.get(address)
        if leases is not None and leases[-1].what == held and leases[-1].is_held:
            leases[-1].extend(until)
            return leases[-1]
        return Lease(held, until, size, mounted, self.clock, place)

    def enter(self, address: int, lease: Lease, holder: object) -> None:
        """Enter the lease, once ``release`` is certain to be called for ``holder``."""
        lease.holders.add(holder)
        leases = self._leases.get(address)
        if leases is None:
            self._leases[address] = [lease]
        elif leases[-1] is not lease:
            leases.append(lease)

    def release(self, address: int, lease: Lease, holder: object) -> AllocationLease | None:
        """Remove one holder; returns the allocation if it can no longer be put. Idempotent."""
        lease.holders.discard(holder)
        if lease.holders:
            return None
        is_ours = lease.is_held
        lease.end()
        others = [other for other in self._leases.get(address, ()) if other is not lease]
        if others:
            self._leases[address] = others
        else:
            self._leases.pop(address, None)
        return lease.what if is_ours and isinstance(lease.what, AllocationLease) else None

    def starts_at(self, address: int) -> bool:
        return address in self._leases

    def containing(self, address: int) -> list[tuple[int, Lease]]:
        """Return every lease whose memory contains this byte, with its address."""
        return [
            (start, lease)
            for start, leases in list(self._leases.items())
            for lease in reversed(leases)
            if start <= address < start + lease.size
        ]

    def __iter__(self) -> Iterator[Lease]:
        return iter([lease for there in list(self._leases.values()) for lease in there])

    def __len__(self) -> int:
        return sum(map(len, list(self._leases.values())))

    def wake_at(self) -> float:
        """Return the time of the next renewal, or infinity."""
        return min((lease.renew_at for lease in self if lease.is_held), default=math.inf)

    def due(self) -> list[LeaseRenewal]:
        """Return the calls for leases that are due within ``RENEW_PAUSE_S``."""
        return list(_renewals(lease for lease in self._due() if not lease.moved))

    def moved(self) -> list[Lease]:
        return [lease for lease in self._due() if lease.moved]

    def _due(self) -> Iterator[Lease]:
        horizon = self.clock() + RENEW_PAUSE_S
        return (lease for lease in self if lease.renew_at <= horizon and lease.is_held)


def found_at(
    lease: Lease, found: calls.LookupReply, described: calls.DescribeSegmentsReply
) -> SegmentInfo | None:
    """Return the segment that holds the leased object at its location; None: none does."""
    what, placements = lease.what, found.placements
    version = placements.epochs[0], placements.counters[0]
    if (
        not isinstance(what, ObjectLease)
        or found.epoch != described.epoch
        or version != (what.epoch, what.counter)
    ):
        return None
    by_id = {segment.segment_id: segment for segment in described.segments}
    for segment_id, offset in zip(placements.segments, placements.offsets, strict=True):
        segment = by_id.get(segment_id)
        if segment is not None and lease.place == LeasedExtent(segment.uuid, offset):
            return segment
    return None


class LeaseRenewal:
    def __init__(self, request: calls.Renew, leases: list[Lease]) -> None:
        self.request = request
        self._leases = leases

    @property
    def patience_s(self) -> float:
        """Timeout of the call. A first attempt takes half of the remaining time, so that a second
        one, which may have to reconnect, fits into the rest."""
        remaining = min(lease.remaining_s for lease in self._leases)
        is_retried = any(lease.is_retried for lease in self._leases)
        return max(0.05, remaining * (0.8 if is_retried else 0.5))

    def failed(self, error: Exception) -> None:
        log.warning("lease_renewal_failed leases=%d error=%s", len(self._leases), str(error))
        for lease in self._leases:
            lease.plan_retry()

    def on_reply(self, renewed: calls.RenewReply, requested_at: float, margin_s: float) -> None:
        """Apply the reply. ``margin_s`` is subtracted from each promise."""
        held = (*renewed.keys_leased, *renewed.tokens_leased)
        extended = renewed.capabilities
        promised_ms = renewed.lease_ms if self.request.keys else renewed.deadline_ms
        for index, (lease, still) in enumerate(zip(self._leases, held, strict=True)):
            if still:
                if extended:
                    at = CAPABILITY_BYTES * index
                    lease.capability = extended[at : at + CAPABILITY_BYTES]
                lease.renewed(requested_at + promised_ms / 1000 - margin_s)
            else:
                # The object was removed, or a new master does not know it: the bytes stay until the
                # last promise ends; then ``is_held`` turns False.
                lease.plan_renewal()


def _renewals(due: Iterable[Lease]) -> Iterator[LeaseRenewal]:
    named: dict[Namespace, list[tuple[Lease, ObjectLease, LeasedExtent]]] = {}
    granted: dict[int, list[tuple[Lease, AllocationLease]]] = {}
    for lease in due:
        what = lease.what
        if isinstance(what, ObjectLease):
            assert lease.place is not None
            named.setdefault(what.namespace, []).append((lease, what, lease.place))
        elif isinstance(what, AllocationLease):
            granted.setdefault(what.epoch, []).append((lease, what))
    for namespace, all_objects in named.items():
        for start in range(0, len(all_objects), RENEW_KEYS_MAX):
            objects = all_objects[start : start + RENEW_KEYS_MAX]
            request = calls.Renew(
                namespace,
                [what.key for _, what, _ in objects],
                [what.epoch for _, what, _ in objects],
                [what.counter for _, what, _ in objects],
                0,
                (),
                [place.uuid for _, _, place in objects],
                [place.offset for _, _, place in objects],
            )
            yield LeaseRenewal(request, [lease for lease, _, _ in objects])
    for epoch, all_granted in granted.items():
        for start in range(0, len(all_granted), RENEW_KEYS_MAX):
            allocations = all_granted[start : start + RENEW_KEYS_MAX]
            tokens = [what.token for _, what in allocations]
            request = calls.Renew(DEFAULT_NAMESPACE, (), (), (), epoch, tokens, (), ())
            yield LeaseRenewal(request, [lease for lease, _ in allocations])
