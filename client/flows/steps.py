"""Steps that flows yield, and the context that they share.

A flow is a pure generator: it yields *steps* (call the master, transfer bytes, pause), receives
their results, and returns the caller's value. It has no clock or socket of its own, so the same
flows run in ``Client`` and in a simulated cluster with virtual time. The error of a step is thrown
into the flow, except those of transfers: their result is a list with an error or None for each.
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
    SegmentUnmountedError,
    UnavailableError,
)
from kvstore.transport.base import Transport
from kvstore.transport.common import RangeCopy

if TYPE_CHECKING:
    from kvstore.client.leases.grants_ahead import GrantsAhead
    from kvstore.device.device import Device

log = logging.getLogger("kvstore.client")


class CallMaster(NamedTuple):
    """Step: call the master. Result: its reply."""

    request: calls.Request


class Transfer:
    """Copies on one segment; a list of them results in a list of errors or None."""

    __slots__ = ("deadline", "moves", "segment", "write")

    def __init__(
        self,
        segment: SegmentInfo,
        moves: list[RangeCopy],
        write: bool,
        deadline: float | None = None,
    ) -> None:
        """Create a transfer to end by ``deadline`` (``uptime()``); None: the call's."""
        self.segment = segment
        self.write = write
        self.deadline = deadline
        self.moves = moves

    def size(self) -> int:
        return sum(len(copy.buffer) for copy in self.moves)

    def run(self, transport: Transport, deadline: float) -> None:
        """Carry the transfer out. Raises as ``Transport.read`` and ``write``."""
        transfer_bytes = transport.write if self.write else transport.read
        transfer_bytes(self.segment, self.moves, deadline)


class SleepFor(NamedTuple):
    seconds: float


class WaitForDevice(NamedTuple):
    """Step: wait for the work queued on a device before the call, which may use its memory."""

    device: Device
    events: Sequence[Event]


Step = CallMaster | Sequence[Transfer] | SleepFor | WaitForDevice
ResultT = TypeVar("ResultT")
NameT = TypeVar("NameT")
Flow = Generator[Step, object, ResultT]


class PoolAccess(Protocol):
    """Mapped segments and devices of this process: see ``TransportSelector``."""

    devices: ClientDevices

    def readonly_memory(self, segment: SegmentInfo) -> memoryview | None: ...
    def memory(self, segment: SegmentInfo) -> memoryview: ...
    def view(self, segment: SegmentInfo, offset: int, length: int) -> memoryview | None: ...
    def watch(self, segment: SegmentInfo) -> Mounted: ...
    def is_on(self, segment: SegmentInfo, device: Device) -> bool: ...


class Leases(Protocol):
    """The leases of views and allocations: see ``ViewManager``."""

    @property
    def allocated(self) -> int: ...
    def allocation(self, data: memoryview) -> Lease | None: ...
    def add_many(self, arrays: Iterable[Watched], mounted: Mounted) -> list[Lease]: ...


@dataclass(slots=True, kw_only=True)
class Context:
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
    verify_views: bool = False
    counters: dict[str, int]
    client: str = ""
    here_only: bool = False
    """Whether no transport of this client reaches another host."""
    failover_s: float = 3.0
    """Time limit of the first replica if there is a second one."""
    ahead: GrantsAhead | None = None
    """None: each put requests its memory."""

    def count(self, name: str, number: int = 1) -> None:
        self.counters[name] = self.counters.get(name, 0) + number


def ask(request: calls.Request, kind: type[ResultT]) -> Flow[ResultT]:
    reply = yield CallMaster(request)
    assert isinstance(reply, kind)
    return reply


def describe(
    context: Context, epoch: int, segment_ids: Sequence[int]
) -> Flow[Mapping[int, SegmentInfo]]:
    """Describe the mounted segments of this epoch; empty if another master replies."""
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
    """Convert each row of ``placements``, once its segments are described; None: a miss."""
    known = yield from describe(context, epoch, placements.segments)
    return context.segments.rows(known, placements, until)


def unreachable(context: Context, segment: SegmentInfo, error: KVStoreError) -> Flow[None]:
    """Avoid and report a failed segment. Raises ``error`` if another node cannot help."""
    if not isinstance(error, UnavailableError | InvalidRangeError | PermissionDeniedError):
        raise copy(error)  # no frame refers to the copy
    epoch = context.segments.forget(segment)
    context.count("failed_transfers")
    if isinstance(error, SegmentUnmountedError | CapabilityRefusedError):
        return  # the node left, rejoined or works: the master knows that
    if not context.segments.avoided(segment):
        log.warning(
            "node_failed node=%s address=%s error=%s", segment.node, segment.address, str(error)
        )
    context.segments.failed(segment, error)
    # Not reported: deadlines, which may have been short (the master detects silent nodes itself);
    # nodes that no transport reaches, since none was tried; segments of another epoch, whose id now
    # names another segment.
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
    """Run the transfers. Returns the errors that ``unreachable`` has handled."""
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
    return "".join(character if character.isprintable() else " " for character in text)[:REASON_MAX]


REASON_MAX = 200
