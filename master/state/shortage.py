"""Explains why a put finds no space: which nodes are usable, which are not, and until when."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvstore.calls import Allocate, PutStart
from kvstore.errors import NoSpaceError
from kvstore.master.state import liveness
from kvstore.master.state.membership import Membership
from kvstore.master.state.pool import Shortage
from kvstore.master.state.records import Segment
from kvstore.memory.header import extent_bytes

SHOWN_MAX = 3
"""Nodes that one message names."""

AVOIDED, NOT_HERE, ON_DEVICE, RESTARTED, SUSPECT, DRAINING, LEASED, NO_NODE = (
    "avoided", "not_here", "on_device", "restarted", "suspect", "draining", "leased", "no_node",
)  # fmt: skip
"""Values of ``fields["cause"]``."""


def explained(
    segments: Iterable[Segment],
    membership: Membership,
    now_ms: int,
    request: PutStart | Allocate,
    found: Shortage,
    writing: int,
    pinned: int,
) -> NoSpaceError:
    """The error of a put for which ``found`` is what is missing.

    Args:
        segments: all that are mounted.
        writing: puts under way.
        pinned: bytes that pins hold.
    """
    wanted = asked_bytes(request)
    segments = list(segments)
    groups: dict[str, list[Segment]] = {}
    for segment in segments:
        groups.setdefault(_cause(segment, membership, now_ms, request), []).append(segment)
    if not groups:
        return NoSpaceError(
            "no node has mounted any memory",
            advice="Start one: kvstore-node --master HOST:PORT --memory 4GiB",
            cause=NO_NODE,
            missing_bytes=found.missing_bytes,
        )
    cause = next(each for each in _ORDER if each in groups)
    said = [_SAID[each](groups[each], now_ms, request) for each in _ORDER if each in groups]
    times = [time for s in groups[cause] if (time := _better_ms(s, cause)) > now_ms]
    again_ms = min(times, default=now_ms) - now_ms
    if cause == LEASED:
        under_way = f"; {writing} puts are under way" if writing else ""
        what = "lease or pin" if pinned else "lease"
        ends = f"; the first {what} ends in {again_ms / 1000:.1f} s" if again_ms else ""
        said[0] += under_way + ends
    if pinned:
        whole = sum(segment.capacity for segment in segments)
        said.append(f"{shown(pinned)} of the pool's {shown(whole)} are pinned")
    return NoSpaceError(
        f"no space for {shown(wanted)}: {'. '.join(said)}",
        advice=_PINNED_ADVICE if pinned and cause == LEASED else _ADVICE[cause],
        cause=cause,
        missing_bytes=found.missing_bytes,
        **({"pinned_bytes": pinned} if pinned else {}),
        **({"retry_after_ms": again_ms} if again_ms else {}),
    )


def _cause(
    segment: Segment, membership: Membership, now_ms: int, request: PutStart | Allocate
) -> str:
    """Why the segment takes no puts; LEASED: it does, but is full."""
    node = segment.node
    if request.here_only and node.host != request.host:
        return NOT_HERE
    if segment.offer.device is not None and isinstance(request, Allocate):
        return ON_DEVICE
    if segment.offer.uuid in request.avoid:
        return AVOIDED
    if node.draining:
        return DRAINING
    if membership.state_of(node, now_ms) != liveness.ALIVE:
        return SUSPECT
    return LEASED if segment.usable(now_ms) else RESTARTED


def _better_ms(segment: Segment, cause: str) -> int:
    """When that may change by itself; 0: unknown."""
    if cause == LEASED:
        return segment.candidates.next_lease_end_ms() or 0
    return segment.usable_at_ms if cause == RESTARTED else 0


def _leased(segments: Sequence[Segment], now_ms: int, request: PutStart | Allocate) -> str:
    del now_ms, request
    whole = sum(segment.capacity for segment in segments)
    free = sum(segment.allocator.free_bytes for segment in segments)
    largest = max(segment.allocator.largest_free for segment in segments)
    in_pieces = f", in pieces of at most {shown(largest)}" if free else ""
    return (
        f"of {shown(whole)} on {_count(segments)}, {shown(free)} are free{in_pieces}; the rest "
        "is leased, being written or waiting to be wiped"
    )


def _restarted(segments: Sequence[Segment], now_ms: int, request: PutStart | Allocate) -> str:
    del request
    ready_ms = max(0, min(segment.usable_at_ms for segment in segments) - now_ms)
    free = sum(segment.allocator.free_bytes for segment in segments)
    when = f"in {ready_ms / 1000:.1f} s" if ready_ms else "once they have reported their objects"
    return (
        f"{shown(free)} on {_names(segments)} are given out {when}: a master that has "
        "(re)started, or a node that has come back, waits for earlier leases to end"
    )


def _suspect(segments: Sequence[Segment], now_ms: int, request: PutStart | Allocate) -> str:
    del request
    silent_ms = min(now_ms - segment.node.heard_ms for segment in segments)
    return (
        f"{_names(segments)} cannot be used now: no stream to the master, silent (for "
        f"{silent_ms / 1000:.1f} s or more), or reported by several hosts"
    )


def _draining(segments: Sequence[Segment], now_ms: int, request: PutStart | Allocate) -> str:
    del now_ms, request
    return f"{_names(segments)} is being drained"


def _avoided(segments: Sequence[Segment], now_ms: int, request: PutStart | Allocate) -> str:
    del now_ms
    free = sum(segment.allocator.free_bytes for segment in segments)
    local = [s for s in segments if s.node.host != request.host and _is_loopback(s.offer.address)]
    hint = ""
    if local:
        hint = f"; {local[0].offer.address} is an address that only its own host reaches"
    return (
        f"{shown(free)} are free on {_names(segments)}, which this client could not reach a "
        f"moment ago{hint}"
    )


def _not_here(segments: Sequence[Segment], now_ms: int, request: PutStart | Allocate) -> str:
    del now_ms
    return (
        f"the client uses shared memory alone, and {_names(segments)} does not share the memory "
        f"of its host ({request.host})"
    )


def _on_device(segments: Sequence[Segment], now_ms: int, request: PutStart | Allocate) -> str:
    del now_ms, request
    return f"{_names(segments)} has memory of a device, and an allocation is memory of a host"


_ORDER = (LEASED, AVOIDED, RESTARTED, SUSPECT, DRAINING, NOT_HERE, ON_DEVICE)
"""The first that applies is the cause."""

_SAID: dict[str, Callable[[Sequence[Segment], int, PutStart | Allocate], str]] = {
    LEASED: _leased,
    AVOIDED: _avoided,
    RESTARTED: _restarted,
    SUSPECT: _suspect,
    DRAINING: _draining,
    NOT_HERE: _not_here,
    ON_DEVICE: _on_device,
}

_ADVICE = {
    LEASED: "Wait longer (wait_ms), put less, or add a node.",
    AVOIDED: "Open the nodes' ports for this host; a node that advertises a loopback address "
    "needs --host. kvstore doctor tests the path.",
    RESTARTED: "Wait longer (wait_ms), or try again then.",
    SUSPECT: "kvstore status shows how long each node has been silent.",
    DRAINING: "Add a node, or: kvstore drain --undo NODE",
    NOT_HERE: "Start a kvstore-node on this host, or allow tcp among the client's transports.",
    ON_DEVICE: "Start a kvstore-node without --device on this host.",
}

_PINNED_ADVICE = "Unpin objects (kvstore unpin) or let their pins end, put less, or add a node."


def _count(segments: Sequence[Segment]) -> str:
    nodes = len({segment.node.name for segment in segments})
    return f"{nodes} node" if nodes == 1 else f"{nodes} nodes"


def _names(segments: Sequence[Segment]) -> str:
    """``node a (10.0.0.8:50003), node b (10.0.0.9:50003) and 7 more``."""
    nodes = {segment.node.name: segment.offer.address for segment in segments}
    named = [
        f"node {name} ({address})" if address else f"node {name}" for name, address in nodes.items()
    ]
    more = len(named) - SHOWN_MAX
    return ", ".join(named[:SHOWN_MAX]) + (f" and {more} more" if more > 0 else "")


def _is_loopback(address: str) -> bool:
    return address.startswith(("127.", "localhost:", "[::1]", "0.0.0.0:", "[::]"))


def asked_bytes(request: PutStart | Allocate) -> int:
    if isinstance(request, Allocate):
        return extent_bytes(request.size)
    return sum(map(extent_bytes, request.sizes)) * request.replicas


def shown(size: int) -> str:
    """A size for messages: ``2 KiB``, ``1.5 GiB``."""
    for shift, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >> shift:
            return f"{size / (1 << shift):.1f}".removesuffix(".0") + f" {unit}"
    return f"{size} bytes"
