"""Allocations: the flows of ``allocate`` and of the put of an allocation.

The put writes the header, commits the allocation under its key, and renews the lease.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from copy import copy
from typing import cast

import numpy as np
from xxhash import xxh3_64

from kvstore import calls
from kvstore.calls import PutOutcome
from kvstore.client.flows.steps import Context, Flow, Transfer, ask, describe
from kvstore.client.flows.write_objects import Items, PutOptions, revoke
from kvstore.client.leases.lease_table import AllocationLease, Lease, LeasedExtent, ObjectLease
from kvstore.client.values import Value, decode
from kvstore.errors import (
    NodeUnreachableError,
    PutRefusedError,
    ReservationLostError,
    SegmentUnmountedError,
    UnavailableError,
)
from kvstore.limits import Namespace
from kvstore.memory.header import HEADER_BYTES, WIPE, Header, pack_into
from kvstore.transport.common import RangeCopy

log = logging.getLogger("kvstore.client")


def allocate(
    context: Context, namespace: Namespace, descriptor: bytes, size: int, wait_ms: int
) -> Flow[Value]:
    """Allocate and lease space for ``size`` payload bytes on this host.

    The tenant of ``namespace`` is charged for it until it is put.

    Raises:
        NodeUnreachableError: this host has no segment that is writable in place. Otherwise as
            ``write``.
    """
    granted, until = yield from grant(context, namespace, size, wait_ms)
    segment = granted.segment
    memory = context.pool.view(segment, granted.offset + HEADER_BYTES, size)
    if memory is None:
        yield from revoke(granted.epoch, [granted.token])
        if segment.host == context.host:
            raise NodeUnreachableError(
                f"the memory of node {segment.node!r} is not mapped here to write, and an "
                "allocation is written in place",
                advice="client.stats().not_mapped has the reason; puts need no mapping.",
                node=segment.node,
            )
        raise NodeUnreachableError(
            "no node on this host has free space, and an allocation must be on this host",
            advice="Start a kvstore-node here, or pass memory= to the client.",
            node=segment.node,
        )
    # ``np.frombuffer`` rejects empty memory.
    array = np.frombuffer(memory, np.uint8) if memory.nbytes else np.empty(0, np.uint8)
    value = decode(descriptor, array)
    watched = array, array.ctypes.data, granted, until, None, value
    context.views.add_many([watched], context.pool.watch(segment))
    return value


def grant(
    context: Context, namespace: Namespace, size: int, wait_ms: int
) -> Flow[tuple[AllocationLease, float]]:
    """Request space and wipe its header; returns the grant and its end. Raises as ``write``."""
    started = context.clock()
    request = calls.Allocate(
        namespace, size, wait_ms, context.host, context.segments.avoid(), context.here_only,
        context.client_number,
    )  # fmt: skip
    grants = yield from ask(request, calls.Grants)
    segments = yield from describe(context, grants.epoch, grants.segments)
    segment = segments.get(grants.segments[0])
    if segment is None:
        yield from revoke(grants.epoch, grants.tokens)
        raise PutRefusedError("the segment was unmounted during the request")
    until = started + grants.deadline_ms / 1000 - context.lease_margin_s
    granted = AllocationLease(
        grants.epoch, grants.tokens[0], segment, grants.offsets[0], size, grants.capabilities
    )
    wipe = RangeCopy(granted.offset, memoryview(WIPE), extent=granted.extent)
    errors = yield [Transfer(segment, [wipe], True, until)]
    assert isinstance(errors, list)
    if errors[0] is not None:
        yield from revoke(grants.epoch, grants.tokens, errors)
        raise copy(errors[0])  # no frame refers to the copy
    return granted, until


def refuse_lost(context: Context, items: Items) -> None:
    """Raise ReservationLostError if an item is an allocation that this client has lost."""
    if not context.views.allocated:
        return
    parts = cast("Sequence[list[memoryview]]", items.parts)  # host memory
    for part in itertools.chain.from_iterable(parts):
        lease = context.views.allocation(part)
        if lease is not None and not lease.is_held:
            raise _lost()


def put(
    context: Context, lease: Lease, item: Items, options: PutOptions
) -> Flow[PutOutcome | None]:
    """Put an allocation. Returns None if it became another object; copy the payload then.

    Raises:
        ReservationLostError: the client does not hold the allocation any more.
    """
    named, until = yield from _complete_commit(context, lease)
    if named is not None:
        same = (named.namespace, named.key) == (options.namespace, item.keys[0])
        return PutOutcome.STORED if same else None
    granted = lease.what
    assert isinstance(granted, AllocationLease)
    if not lease.is_held:
        raise _lost()
    if lease.capability:
        granted = granted._replace(capability=lease.capability)
    named = ObjectLease(options.namespace, item.keys[0], granted.epoch, granted.token)
    try:
        outcome = yield from commit(context, granted, item, options, until, lease.header)
    except SegmentUnmountedError:  # its node has joined another master, or left
        raise _lost() from None
    except UnavailableError:
        lease.unanswered = named
        raise
    if outcome is PutOutcome.REFUSED:
        raise _lost()
    if outcome is not PutOutcome.STORED:  # quarantined: it is readable until its deadline
        lease.mark_redundant()
        return outcome
    requested_at = context.clock()
    renewed = yield from ask(_renewal(named, granted.place), calls.RenewReply)
    held_s = renewed.lease_ms / 1000 if renewed.keys_leased[0] else 0.0
    lease.convert_to_object(named, requested_at + held_s - context.lease_margin_s)
    return outcome


def _complete_commit(context: Context, lease: Lease) -> Flow[tuple[ObjectLease | None, float]]:
    """Resolve a commit without a reply: return the object, or None for an allocation, and its end.

    The commit may still arrive, so its object is leased until then, too.

    Raises:
        ReservationLostError: it is neither.
    """
    named = lease.unanswered
    if named is None:
        return None, context.clock() + lease.remaining_s
    requested_at = context.clock()
    assert isinstance(lease.what, AllocationLease)
    renew = _renewal(named, lease.what.place, [named.counter])
    renewed = yield from ask(renew, calls.RenewReply)
    until = requested_at + renewed.lease_ms / 1000 - context.lease_margin_s
    lease.capability = renewed.capabilities
    if renewed.keys_leased[0] and lease.is_held:
        lease.convert_to_object(named, until)
        return named, until
    if not renewed.tokens_leased[0]:
        raise _lost()
    return None, min(until, context.clock() + lease.remaining_s)


def commit(
    context: Context,
    granted: AllocationLease,
    item: Items,
    options: PutOptions,
    deadline: float,
    written: bytearray,
) -> Flow[PutOutcome]:
    """Give an allocation its key. Its payload is in place, so none is copied.

    Args:
        item: a single item, whose payload is in one part.
        deadline: end of the client's hold on the allocation.
        written: the header of an earlier commit, or empty; set to the new one. An equal header is
            not written again: that commit may have been executed, and its object removed and wiped.
    """
    epoch, token, segment, offset, _, _ = granted
    (key,), (size,), (parts,), (descriptor,), _ = item
    (data,) = cast("list[memoryview]", parts)
    head = bytearray(HEADER_BYTES)
    header = Header(
        options.namespace, key, options.parent, size, epoch, token,
        xxh3_64(data).intdigest(), descriptor,
    )  # fmt: skip
    end = pack_into(head, header, segment.seed, offset)
    if head != written:
        written.clear()  # until the new header is complete
        # ``allocate`` has wiped the old header, and a half-written one is not valid.
        header_copy = RangeCopy(offset, memoryview(head), extent=granted.extent)
        errors = yield [Transfer(segment, [header_copy], True, deadline)]
        assert isinstance(errors, list)
        if errors[0] is not None:
            raise copy(errors[0])  # no frame refers to the copy
        written[:] = head
    committed = yield from ask(
        calls.Commit(
            epoch, token, options.namespace, key, options.parent, size, options.overwrite,
            options.ttl_ms,
        ),
        calls.CommitReply,
    )  # fmt: skip
    context.placements.forget(options.namespace, key)
    if committed.header_mac and end + len(committed.header_mac) <= HEADER_BYTES:
        # The object is leased until ``deadline``. Without a header MAC it is stored, but not
        # recovered after a restart of the master or its node.
        header_copy = RangeCopy(
            offset + end, memoryview(committed.header_mac), extent=granted.extent
        )
        errors = yield [Transfer(segment, [header_copy], True, deadline)]
        assert isinstance(errors, list)
        if errors[0] is not None:
            log.debug("header_not_signed key=%s error=%s", key.hex(), errors[0])
    return PutOutcome(committed.outcome)


def _renewal(named: ObjectLease, location: LeasedExtent, tokens: Sequence[int] = ()) -> calls.Renew:
    """Return the call that checks whether an allocation has become this object."""
    return calls.Renew(
        named.namespace, [named.key], [named.epoch], [named.counter], named.epoch, tokens,
        [location.uuid], [location.offset],
    )  # fmt: skip


def _lost() -> ReservationLostError:
    return ReservationLostError(
        "this allocation is lost: its deadline passed before it could be renewed",
        advice="Stop writing to it and allocate again; check the master with kvstore status.",
    )
