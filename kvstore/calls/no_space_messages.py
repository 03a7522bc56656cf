"""Messages about puts without space, for the client whose put is refused and for operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from kvstore.calls.tenants import tenant_text
from kvstore.errors import NoSpaceError

if TYPE_CHECKING:
    from kvstore.calls import ClusterStatus

SHOWN_MAX: Final = 3
"""Nodes that one message names."""

LEASED, AVOIDED, RESTARTED, SUSPECT, DRAINING, NOT_HERE, ON_DEVICE, NO_NODE = (
    "leased", "avoided", "restarted", "suspect", "draining", "not_here", "on_device", "no_node",
)  # fmt: skip
QUOTA, GUARANTEES = "quota", "guarantees"
"""Values of ``fields["cause"]``."""

PASSING: Final = frozenset({LEASED, RESTARTED, SUSPECT, DRAINING, QUOTA, GUARANTEES})
"""Causes that may end without a change of the configuration: a partial put reports NO_SPACE."""


class SegmentGroup(NamedTuple):
    """Segments that are unusable for a put for one cause. Sizes are bytes."""

    cause: str
    nodes: Mapping[str, str]
    """Addresses of the segments' nodes, by the nodes' names."""
    capacity: int
    free: int
    largest_free: int
    ready_ms: int
    """Time until the first of them grants memory; 0: its node has not reported its inventory."""
    better_ms: int
    """Time until the cause may end by itself for one of them; 0: unknown."""
    silent_ms: int
    local: str
    """Address on another host than the client's that only that host reaches; may be empty."""


CAUSES: Final = {
    LEASED: (
        "of {capacity} on {count}, {free} are free{pieces}; the rest is leased, being written or "
        "waiting to be wiped",
        "Wait longer (wait_ms), put less, or add a node.",
        "every object is leased, pinned or being written",
    ),
    AVOIDED: (
        "{free} free on {nodes}, which this client failed to reach recently{hint}",
        "Open the nodes' ports for this host; a node that advertises a loopback address needs "
        "--host. kvstore doctor tests the path.",
        "their clients failed to reach the nodes with free space: run kvstore doctor there",
    ),
    RESTARTED: (
        "{free} on {nodes} can be granted {when}: after a (re)start of a master or node, "
        "earlier leases must end first",
        "Wait longer (wait_ms), or try again then.",
        "the master or the nodes had just started, and granted no memory yet",
    ),
    SUSPECT: (
        "{nodes} cannot be used now: no stream to the master, silent (for {silent:.1f} s or more), "
        "or reported by several hosts",
        "kvstore status shows how long each node has been silent.",
        "the nodes that had room were suspect",
    ),
    DRAINING: (
        "{nodes} is being drained",
        "Add a node, or: kvstore drain --undo NODE",
        "the nodes that had room were being drained",
    ),
    NOT_HERE: (
        "the client uses shared memory alone, and {nodes} does not share the memory of its host "
        "({host})",
        "Start a kvstore-node on this host, or allow tcp among the client's transports.",
        "their clients use shared memory alone, and no node of their host had room",
    ),
    ON_DEVICE: (
        "{nodes} has memory of a device, and an allocation is memory of a host",
        "Start a kvstore-node without --device on this host.",
        "they wanted memory of a host, and only devices had room",
    ),
    NO_NODE: (
        "no node has mounted any memory",
        "Start one: kvstore-node --master HOST:PORT --memory 4GiB",
        "no node had joined",
    ),
    QUOTA: (
        "{tenant} holds {held} of at most {bound}, and none of its own objects can be evicted now: "
        "they are leased, pinned or being written",
        "Wait longer (wait_ms), remove or unpin objects of this tenant, or raise its limit.",
        "their tenant had reached its limit",
    ),
    GUARANTEES: (
        "the guarantees of other tenants hold the rest, and what is above them is leased, pinned "
        "or being written",
        "Wait longer (wait_ms), add a node, or raise the guarantee of this tenant.",
        "the guarantees of other tenants held the rest",
    ),
}
"""Per cause: the sentence for the client (``_sentence`` fills it in), the advice, and the sentence
for operators on refused puts. Of several causes, the first here is reported."""

_PINNED_ADVICE = "Unpin objects (kvstore unpin) or let their pins end, put less, or add a node."


def no_space(
    groups: Sequence[SegmentGroup], host: str, wanted: int, missing: int, writing: int, pinned: int
) -> NoSpaceError:
    """Return the error of a put of ``wanted`` bytes by a client of ``host``, of which ``missing``
    bytes found no space, with ``writing`` puts in progress and ``pinned`` bytes in pinned objects.

    ``groups``: all mounted segments, in the order of ``CAUSES``.
    """
    if not groups:
        message, advice, _ = CAUSES[NO_NODE]
        return NoSpaceError(message, advice=advice, cause=NO_NODE, missing_bytes=missing)
    cause, again_ms = groups[0].cause, groups[0].better_ms
    said = [_sentence(group, host) for group in groups]
    if cause == LEASED:
        under_way = f"; {writing} puts are under way" if writing else ""
        what = "lease or pin" if pinned else "lease"
        ends = f"; the first {what} ends in {again_ms / 1000:.1f} s" if again_ms else ""
        said[0] += under_way + ends
    if pinned:
        whole = sum(group.capacity for group in groups)
        said.append(
            f"{format_size_short(pinned)} of the pool's {format_size_short(whole)} are pinned"
        )
    return NoSpaceError(
        f"no space for {format_size_short(wanted)}: {'. '.join(said)}",
        advice=_PINNED_ADVICE if pinned and cause == LEASED else CAUSES[cause][1],
        cause=cause,
        missing_bytes=missing,
        **({"pinned_bytes": pinned} if pinned else {}),
        **({"retry_after_ms": again_ms} if again_ms else {}),
    )


def over_bound(
    tenant: str, wanted: int, held: int, bound: int, missing: int, pinned: int
) -> NoSpaceError:
    """Return the error of a request for ``wanted`` bytes by a tenant that holds ``held`` and would
    exceed its limit by ``missing`` bytes."""
    said, advice, _ = CAUSES[QUOTA]
    who = tenant_text(tenant)
    if wanted > bound:
        said = "{tenant} may hold at most {bound}"
        advice = "Put less at a time, or raise the limit of this tenant."
    told = said.format(tenant=who, held=format_size_short(held), bound=format_size_short(bound))
    if pinned:
        told += f". {format_size_short(pinned)} of them are pinned" if wanted <= bound else ""
    return NoSpaceError(
        f"no space for {format_size_short(wanted)}: {told}",
        advice=advice,
        cause=QUOTA,
        missing_bytes=missing,
        tenant=tenant,
        quota="limit",
        tenant_bytes=held,
        tenant_bytes_max=bound,
    )


def guarantee_error(tenant: str, wanted: int, missing: int) -> NoSpaceError:
    """Return the error of a tenant's request for ``wanted`` bytes if nothing may be evicted for
    it."""
    said, advice, _ = CAUSES[GUARANTEES]
    return NoSpaceError(
        f"no space for {format_size_short(wanted)} of {tenant_text(tenant)}: {said}",
        advice=advice,
        cause=GUARANTEES,
        missing_bytes=missing,
        tenant=tenant,
        quota="guarantee",
    )


def guarantee_warning(status: ClusterStatus) -> str:
    """Return a warning if the pool is smaller than the guarantees of its tenants; otherwise ""."""
    guaranteed = sum(tenant.guarantee_bytes for tenant in status.tenants)
    size = status.size
    if not size or guaranteed <= size:
        return ""
    return (
        f"Tenants are guaranteed {format_size_short(guaranteed)} of a pool of "
        f"{format_size_short(size)}: not all of them can have their guarantee at once. Add a node, "
        "or guarantee less."
    )


def _sentence(group: SegmentGroup, host: str) -> str:
    count = len(group.nodes)
    ready_s = group.ready_ms / 1000
    return CAUSES[group.cause][0].format(
        nodes=_names(group.nodes),
        count=f"{count} node" if count == 1 else f"{count} nodes",
        capacity=format_size_short(group.capacity),
        free=format_size_short(group.free),
        pieces=f", in pieces of at most {format_size_short(group.largest_free)}"
        if group.free
        else "",
        when=f"in {ready_s:.1f} s" if ready_s else "once they have reported their objects",
        silent=group.silent_ms / 1000,
        hint=f"; {group.local} is an address that only its own host reaches" if group.local else "",
        host=host,
    )


def _names(nodes: Mapping[str, str]) -> str:
    """Return ``node a (10.0.0.8:50003), node b (10.0.0.9:50003) and 7 more``."""
    named = [
        f"node {name} ({address})" if address else f"node {name}" for name, address in nodes.items()
    ]
    more = len(named) - SHOWN_MAX
    return ", ".join(named[:SHOWN_MAX]) + (f" and {more} more" if more > 0 else "")


def format_size_short(size: int) -> str:
    """Format a size for messages: ``2 KiB``, ``1.5 GiB``."""
    for shift, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >> shift:
            return f"{size / (1 << shift):.1f}".removesuffix(".0") + f" {unit}"
    return f"{size} bytes"
