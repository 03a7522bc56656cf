"""Leases on memory of the pool, and how they are renewed.

A lease is renewed when a third of its remaining time has passed. If the master confirms it and the
segment is mounted as it was, the lease is extended. Otherwise it ends with the last promise; a
lease of an allocation, or of memory of a device, ends as soon as the segment is mounted again. Once
a lease has ended, its ``is_held`` is False for good.

A renewal names the place of the leased memory as well as the version: the version may have ended
there, and have come back with the memory of another node.

Why the segment must be mounted as it was: the master may not yet know that the node has ended. A
node that comes back *fences* (its generation grows) before it joins, and gets no writers for one
lease after it has joined. So a renewal is valid if it is counted from the request and the client
still sees the old generation when the reply arrives: the lease ends before any writer gets the
memory. No clock of another process is compared.

If the segment was mounted again, its master may still know the object at this place, because the
node has reported it. The client then asks once more, by key. The renewal is valid if the reply
describes the generation that the segment has when the reply arrives: a master that does not know of
the last mount would describe an older one. Until then the earlier lease holds.

The clock is an argument of everything here; ``kvstore.client.leases.views`` adds the arrays, their
finalizers, the thread and the lock.
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
"""The least pause between two attempts to renew one lease; leases due within it are renewed
together."""

RENEW_KEYS_MAX: Final = 4_096
"""Keys per renewal call: well below the bound of a batch, and short work for the master."""

Mounted = Callable[[], bool]
"""Whether a segment is mounted as it was (``Transport.mount_checker``)."""


class LeasedExtent(NamedTuple):
    """The position of leased memory. It stays the same when another master mounts the segment."""

    uuid: bytes
    offset: int
    ends_with_owner: bool = False
    """Whether the memory is a device's: what it holds is undefined once its node has ended."""


class ObjectLease(NamedTuple):
    """The subject of a lease: one version of an object."""

    namespace: Namespace
    key: Key
    epoch: int
    counter: int


class AllocationLease(NamedTuple):
    """The subject of a lease: an allocation that has no name yet."""

    epoch: int
    token: int
    segment: SegmentInfo
    offset: int
    """Of the extent."""
    size: int
    """Payload bytes."""
    capability: bytes = b""
    """To write the extent; empty: the master makes none."""

    @property
    def extent(self) -> Extent | None:
        """The extent, with the capability for it; None: there is none."""
        return extent_of(self.offset, self.size, self.capability)

    @property
    def place(self) -> LeasedExtent:
        return LeasedExtent(self.segment.uuid, self.offset)


class RedundantAllocation(NamedTuple):
    """The subject of a lease: an allocation whose put found its key stored already. Its memory is
    quarantined, and readable until its deadline."""

    epoch: int
    token: int


What = ObjectLease | AllocationLease | RedundantAllocation

Watched = tuple[
    "NDArray[np.generic]", int, ObjectLease | AllocationLease, float, LeasedExtent | None, object
]
"""An array to watch; the address of its first byte; what the lease is on; when the promise ends;
where the object is (with that, it is found again if its segment is mounted anew); and a tensor over
the array, if the program gets that instead of the array."""


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
        """Where the object is; None: an allocation, which cannot be found again."""
        self.what: What = held
        self.size = size
        """Length of the memory in bytes."""
        self._until = until
        self._mounted = mounted
        self._clock = clock
        self._kept = True
        self.holders: set[object] = set()
        """A watch for each array over this memory; empty: the program has dropped all of them."""
        self.header = bytearray()
        """Of an allocation: the header that a commit has written in front of it."""
        self.capability = b""
        """Of an allocation: as it was last renewed; empty: as it was granted."""
        self.unanswered: ObjectLease | None = None
        """Of an allocation: the object that it may have become, by a commit without an answer."""
        self.is_retried = False
        """Whether the last attempt to renew the lease failed."""
        self.plan_renewal()

    @property
    def is_held(self) -> bool:
        """Whether the promise has held without a gap until now. False is final.

        The lease of an allocation also ends when its segment is mounted again, because the next
        master does not know the allocation. The lease of an object goes on, because its node
        reports the object to the next master; but not in memory that ends with the node.
        """
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
        """How much longer it holds if it is not renewed again."""
        return max(0.0, self._until - self._clock()) if self.is_held else 0.0

    def extend(self, until: float) -> None:
        """Called when the master has given the same promise again."""
        if self.is_held and until > self._until:
            self._until = until
            self.plan_renewal()

    def renewed(self, until: float) -> None:
        """Called when the master has answered a renewal; the module says why the segment is checked
        only then."""
        if self._mounted():
            self.extend(until)
        self.plan_renewal()  # also if the new promise ends no later than the old one

    @property
    def moved(self) -> bool:
        """Whether its segment was mounted again. Then the client looks the object up by key."""
        return self.place is not None and self._outlives_mount and not self._mounted()

    def mounted_again(self, mounted: Mounted, until: float) -> None:
        """Called when a lookup has found the object at its place, on the segment that ``mounted``
        watches."""
        if self.is_held and mounted():
            self._mounted = mounted
            self.extend(until)

    def plan_renewal(self) -> None:
        """Plans the next renewal for when a third of the time left has passed."""
        self.is_retried = False
        now = self._clock()
        self.renew_at = now + max((self._until - now) / 3, RENEW_PAUSE_S)

    def plan_retry(self) -> None:
        """Plans the next attempt after a failed one: when a tenth of the time left has passed."""
        self.is_retried = True
        now = self._clock()
        self.renew_at = now + max((self._until - now) / 10, RENEW_PAUSE_S)

    def convert_to_object(self, named: ObjectLease, until: float) -> None:
        """Called when the allocation was put: it is an object now."""
        self._kept = self.is_held  # a lease that has ended stays ended
        if isinstance(self.what, AllocationLease):
            self.place = self.what.place
        self.what = named
        self.unanswered = None
        self._until = until
        self.plan_renewal()

    def mark_redundant(self) -> None:
        """Called when the allocation was put, and its object was stored already."""
        if isinstance(self.what, AllocationLease):
            self.what = RedundantAllocation(self.what.epoch, self.what.token)
            self.renew_at = math.inf

    def end(self) -> None:
        """Ends the lease for good. The segment may be unmapped afterwards."""
        self._kept = False
        self._mounted = _gone

    def __repr__(self) -> str:
        return f"<Lease held={self.is_held} seconds_left={self.remaining_s:.1f} of {self.what}>"


def _gone() -> bool:
    return False


class LeaseTable:
    """All leases of a client. Any thread may read it; one at a time may change it.

    An address identifies memory only until its lease ends. After that, the client may get a new
    lease on the same bytes while the program still holds the old array. The table then has both
    leases. So a lease is found by the array with which it was handed out (``ArrayTracker``), and by
    its address only if that array is not known."""

    def __init__(self, clock: Callable[[], float] = uptime) -> None:
        self.clock = clock
        self._leases: dict[int, list[Lease]] = {}
        """By address of the first payload byte, the newest last; no list is empty."""

    def lease_for(
        self,
        address: int,
        size: int,
        held: ObjectLease | AllocationLease,
        until: float,
        mounted: Mounted,
        place: LeasedExtent | None = None,
    ) -> Lease:
        """The lease of the memory at ``address``, for one more holder. A new lease is in the table
        only after ``enter``."""
        there = self._leases.get(address)
        if there is not None and there[-1].what == held and there[-1].is_held:
            there[-1].extend(until)
            return there[-1]
        return Lease(held, until, size, mounted, self.clock, place)

    def enter(self, address: int, lease: Lease, holder: object) -> None:
        """Called once it is certain that ``release`` will be called for ``holder``."""
        lease.holders.add(holder)
        there = self._leases.get(address)
        if there is None:
            self._leases[address] = [lease]
        elif there[-1] is not lease:
            there.append(lease)

    def release(self, address: int, lease: Lease, holder: object) -> AllocationLease | None:
        """Removes one holder; returns the allocation if it can no longer be put. Idempotent."""
        lease.holders.discard(holder)
        if lease.holders:
            return None
        is_ours = lease.is_held
        lease.end()
        there = [each for each in self._leases.get(address, ()) if each is not lease]
        if there:
            self._leases[address] = there
        else:
            self._leases.pop(address, None)
        return lease.what if is_ours and isinstance(lease.what, AllocationLease) else None

    def starts_at(self, address: int) -> bool:
        """Whether leased memory starts at this address."""
        return address in self._leases

    def containing(self, address: int) -> list[tuple[int, Lease]]:
        """Every lease whose memory contains this byte, with the address of that memory."""
        return [
            (start, lease)
            for start, there in list(self._leases.items())
            for lease in reversed(there)
            if start <= address < start + lease.size
        ]

    def __iter__(self) -> Iterator[Lease]:
        return iter([lease for there in list(self._leases.values()) for lease in there])

    def __len__(self) -> int:
        return sum(map(len, list(self._leases.values())))

    def wake_at(self) -> float:
        """When the next renewal is due; infinity: none is."""
        return min((lease.renew_at for lease in self if lease.is_held), default=math.inf)

    def due(self) -> list[LeaseRenewal]:
        """The calls that renew the leases that are due now, or within ``RENEW_PAUSE_S``."""
        return list(_renewals(lease for lease in self._due() if not lease.moved))

    def moved(self) -> list[Lease]:
        """The due leases whose segments were mounted again."""
        return [lease for lease in self._due() if lease.moved]

    def _due(self) -> Iterator[Lease]:
        soon = self.clock() + RENEW_PAUSE_S
        return (lease for lease in self if lease.renew_at <= soon and lease.is_held)


def found_at(
    lease: Lease, found: calls.LookupReply, described: calls.DescribeSegmentsReply
) -> SegmentInfo | None:
    """The segment that holds the leased object at its place, according to these answers about its
    key; None: none does."""
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
    """One renewal call, and the leases that it renews."""

    def __init__(self, request: calls.Renew, leases: list[Lease]) -> None:
        self.request = request
        self._leases = leases

    @property
    def patience_s(self) -> float:
        """The time-out of the call. A first attempt takes half of the time left, so that a second
        one, which may have to connect anew, can take most of the rest."""
        left = min(lease.remaining_s for lease in self._leases)
        is_retried = any(lease.is_retried for lease in self._leases)
        return max(0.05, left * (0.8 if is_retried else 0.5))

    def failed(self, error: Exception) -> None:
        log.warning("lease_renewal_failed leases=%d error=%s", len(self._leases), str(error))
        for lease in self._leases:
            lease.plan_retry()

    def on_reply(self, renewed: calls.RenewReply, asked: float, margin_s: float) -> None:
        """
        Args:
            asked: on the leases' clock, before the question was sent.
            margin_s: what is taken off each promise.
        """
        held = (*renewed.keys_leased, *renewed.tokens_leased)
        extended = renewed.capabilities
        promised_ms = renewed.lease_ms if self.request.keys else renewed.deadline_ms
        for index, (lease, still) in enumerate(zip(self._leases, held, strict=True)):
            if still:
                if extended:
                    at = CAPABILITY_BYTES * index
                    lease.capability = extended[at : at + CAPABILITY_BYTES]
                lease.renewed(asked + promised_ms / 1000 - margin_s)
            else:
                # The object was removed, or a new master does not know it: the bytes stay until
                # the last promise ends, and ``is_held`` turns False then.
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
