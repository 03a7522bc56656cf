"""What flows are made of: the steps they yield and the context they share.

A flow is a pure generator: it decides what a client does, step by step, and does none of it. It
yields *steps* (ask the master this, move these bytes, pause) and is sent their results; its return
value is the caller's. It reads the time from the clock that it was given and touches no socket, so
the same flows (``getting``, ``putting``, ``asking``) run in ``Client``, which has checked their
arguments, and in a simulated cluster with virtual time. The error of a step is thrown into the flow
where it waits. Errors of transfers are not thrown: the step's result is a list, with an error or
None for each transfer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from kvstore import calls
from kvstore.calls import Placements, SegmentInfo
from kvstore.client.devices import ClientDevices
from kvstore.client.flows.location_cache import LeasedLocation, PlacementCache, SegmentTable
from kvstore.client.leases.lease_table import Lease, Mounted, Watched
from kvstore.client.leases.read_leases import ReadLeases
from kvstore.device.driver import Event
from kvstore.errors import (
    CapabilityRefusedError,
    DeadlineExceededError,
    InvalidRangeError,
    KVStoreError,
    PermissionDeniedError,
    SegmentGoneError,
    UnavailableError,
)
from kvstore.transport.base import Transport
from kvstore.transport.common import RangeCopy

if TYPE_CHECKING:
    from kvstore.device.device import Device

log = logging.getLogger("kvstore.client")


class CallMaster(NamedTuple):
    """Step: call the master; the result is its reply."""

    request: calls.Request


class Transfer:
    """Bytes to move on one segment; the result of a list of these is a list of errors or None.

    The subclasses in ``kvstore.client.flows.object_transfers`` move whole objects.
    """

    __slots__ = ("deadline", "moves", "segment", "write")

    def __init__(
        self,
        segment: SegmentInfo,
        moves: list[RangeCopy],
        write: bool,
        deadline: float | None = None,
    ) -> None:
        """``deadline``: ``uptime()`` by which it must have stopped; None: the call's."""
        self.segment = segment
        self.write = write
        self.deadline = deadline
        self.moves = moves

    def size(self) -> int:
        return sum(len(move.buffer) for move in self.moves)

    def run(self, transport: Transport, deadline: float) -> None:
        """Have ``transport`` carry it out.

        Raises:
            As ``Transport.read`` and ``write``.
        """
        move = transport.write if self.write else transport.read
        move(self.segment, self.moves, deadline)


class SleepFor(NamedTuple):
    seconds: float


class WaitForDevice(NamedTuple):
    """Step: wait until the work that was queued on a device before the call has ended, so that its
    memory can be read or filled."""

    device: Device
    events: Sequence[Event]


Step = CallMaster | Sequence[Transfer] | SleepFor | WaitForDevice
ResultT = TypeVar("ResultT")
NameT = TypeVar("NameT")
Flow = Generator[Step, object, ResultT]


class PoolAccess(Protocol):
    """Segments that are mapped in this process, and its devices: see ``TransportSelector``."""

    devices: ClientDevices

    def readonly_memory(self, segment: SegmentInfo) -> memoryview | None: ...
    def memory(self, segment: SegmentInfo) -> memoryview: ...
    def view(self, segment: SegmentInfo, offset: int, length: int) -> memoryview | None: ...
    def watch(self, segment: SegmentInfo) -> Mounted: ...
    def is_on(self, segment: SegmentInfo, device: Device) -> bool: ...


class Leases(Protocol):
    """The leases of views and allocations: see ``Views``."""

    @property
    def allocated(self) -> int: ...
    def allocation(self, data: memoryview) -> Lease | None: ...
    def add_many(self, arrays: Iterable[Watched], mounted: Mounted) -> list[Lease]: ...


@dataclass(slots=True, kw_only=True)
class Context:
    """State that the flows of one client share. Threads: any."""

    clock: Callable[[], float]
    host: str
    client_number: int = 0
    """Identifies this client's connections to data servers and to the master."""
    segments: SegmentTable
    placements: PlacementCache
    leases: ReadLeases
    pool: PoolAccess
    views: Leases
    lease_margin_s: float
    verify_payload: bool
    """Whether copied payloads are compared with their checksum."""
    verify_views: bool = False
    """Whether views are compared with their checksum, before they are returned."""
    counters: dict[str, int]
    """Events by name; see ``count``."""
    client: str = ""
    """The name of the client, for reports."""
    here_only: bool = False
    """Whether none of this client's transports reaches another host."""
    failover_s: float = 3.0
    """How long the first replica may take where there is a second one."""

    def count(self, name: str, number: int = 1) -> None:
        self.counters[name] = self.counters.get(name, 0) + number


def ask(request: calls.Request, kind: type[ResultT]) -> Flow[ResultT]:
    reply = yield CallMaster(request)
    assert isinstance(reply, kind)
    return reply


def describe(
    context: Context, epoch: int, segment_ids: Sequence[int]
) -> Flow[Mapping[int, SegmentInfo]]:
    """How to reach these segments of this epoch; without those that are not mounted any more.

    If another master answers, the result is empty: its numbers name other segments.
    """
    known = context.segments.of(epoch)
    unknown = set(segment_ids).difference(known)
    if unknown:
        described = yield from ask(
            calls.DescribeSegments(sorted(unknown)), calls.DescribeSegmentsReply
        )
        if described.epoch != epoch:
            context.count("changed_epochs")
            return {}
        known.update((segment.segment_id, segment) for segment in described.segments)
        if context.segments.failing:
            for segment in described.segments:
                context.segments.met(segment)
    return known


def resolve_placements(
    context: Context, epoch: int, placements: Placements, until: float
) -> Flow[list[LeasedLocation | None]]:
    """Each row of ``placements`` as a ``LeasedLocation``, once its segments are described; None: a
    miss."""
    known = yield from describe(context, epoch, placements.segments)
    return list(context.segments.rows(known, placements, until))


def unreachable(context: Context, segment: SegmentInfo, error: KVStoreError) -> Flow[None]:
    """Called when moves on a segment failed: avoids the segment, and reports the failure if the
    master may not know it.

    Raises:
        KVStoreError: as ``error``, when going elsewhere cannot help.
    """
    if not isinstance(error, UnavailableError | InvalidRangeError | PermissionDeniedError):
        raise copy(error)  # no frame refers to the copy
    epoch = context.segments.forget(segment)
    context.count("failed_transfers")
    if isinstance(error, SegmentGoneError | CapabilityRefusedError):
        return  # the node has left or joined anew, or works: the master knows that already
    if not context.segments.avoided(segment):
        log.warning(
            "node_failed node=%s address=%s error=%s", segment.node, segment.address, str(error)
        )
    context.segments.failed(segment, error)
    # Not reported: a passed deadline, which may have been short (the master notices a silent node
    # by itself); a node that no transport reaches, since it was not tried; and a segment of another
    # epoch, whose number now names another segment.
    tried = error.fields.get("tried", 1)
    if isinstance(error, DeadlineExceededError) or not tried or not epoch:
        return
    report = calls.ReportFailure(
        [segment.segment_id], context.client, context.host, _one_line(error.message), epoch
    )
    try:
        yield from ask(report, calls.ReportFailureReply)
    except KVStoreError as unreported:
        log.debug("failure_not_reported node=%s error=%s", segment.node, unreported)


def carry_out(
    context: Context, transfers: Mapping[NameT, Transfer]
) -> Flow[dict[NameT, KVStoreError]]:
    """Moves the bytes. Returns the errors of the transfers that failed, once ``unreachable`` has
    handled each of them.

    Raises:
        As ``unreachable``.
    """
    if not transfers:
        return {}
    errors = yield list(transfers.values())
    assert isinstance(errors, list)
    failed: dict[NameT, KVStoreError] = {}
    for (name, transfer), error in zip(transfers.items(), errors, strict=True):
        if error is not None:
            failed[name] = error
            yield from unreachable(context, transfer.segment, error)
    return failed


def _one_line(text: str) -> str:
    return "".join(each if each.isprintable() else " " for each in text)[:REASON_MAX]


REASON_MAX = 200
"""Characters of the reason that the master is told."""
