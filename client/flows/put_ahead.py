"""Puts in one exchange with the master: each end of a put brings the memory of the next one.

    put   put_start, write, put_end       the first two of a size, and all others that are not here
    put   allocate, write, commit ──► memory for the next     the third one of that size
    put   write, commit ──► memory for the next               the following ones

A client that puts small objects of one size, one after the other, holds one allocation for each
thread that does, and gives it back a second after the last put; the master would take it back at
its deadline (30 s). That the key exists already is known after the write, so only small objects are
put like this, and one that exists ends the series.
"""

from __future__ import annotations

import logging
from typing import Final

from kvstore import calls
from kvstore.calls import PutOutcome
from kvstore.client.flows.object_transfers import ObjectWrites
from kvstore.client.flows.steps import Context, Flow, ask, describe, unreachable
from kvstore.client.flows.write_objects import OUTCOMES, Items, PutOptions, revoke
from kvstore.client.leases.grants_ahead import HELD_MIN_S, AllocationAhead
from kvstore.errors import KVStoreError, NoSpaceError, UnavailableError

log = logging.getLogger("kvstore.client")

SIZE_MAX: Final = 256 << 10
"""Payload bytes."""

NO_SPACE_S: Final = 1.0
"""Time without such puts after the master has refused an allocation."""


def put(context: Context, item: Items, options: PutOptions) -> Flow[PutOutcome | None]:
    """Put one item. None: it is to be put in the usual way, nothing is stored.

    Raises:
        KVStoreError: as ``write_objects.write``.
    """
    ahead, (size,) = context.ahead, item.sizes
    if (
        ahead is None
        or size > SIZE_MAX
        or item.device is not None
        or options.parent is not None
        or options.replicas != 1
        or options.overwrite
        or context.segments.failing
    ):
        return None
    name = options.namespace, size
    now = context.clock()
    granted = ahead.take(name, now)
    if granted is None:
        if not ahead.is_expected(name, now):
            return None
        granted = yield from _allocate(context, options, size)
        if granted is None:
            ahead.paused_until = now + NO_SPACE_S
            return None
    (key,), _, (parts,), (descriptor,), _ = item
    write = ObjectWrites(granted.segment, options.namespace, granted.until)
    row = granted.offset, size, granted.epoch, granted.token, key, parts, b"", descriptor, b""
    write.rows = [row]  # type: ignore[list-item]  # host memory
    errors = yield [write]
    assert isinstance(errors, list)
    if (error := errors[0]) is not None:
        yield from revoke(granted.epoch, [granted.token], errors)
        yield from unreachable(context, granted.segment, error)
        return None
    request = calls.Commit(
        granted.epoch, granted.token, options.namespace, key, None, size, False, options.ttl_ms,
        True, size, context.host, context.here_only,
    )  # fmt: skip
    at = context.clock()
    for _ in range(2):
        try:
            done = yield from ask(request, calls.CommitReply)
            break
        except UnavailableError as failed:
            log.debug("commit_unanswered token=%d error=%s", granted.token, str(failed))
    else:
        return None
    context.placements.forget(options.namespace, key)
    if done.next_token:
        try:
            segments = yield from describe(context, granted.epoch, [done.next_segment])
        except KVStoreError as failed:  # the object is stored
            log.debug("grant_not_kept token=%d error=%s", done.next_token, str(failed))
            segments = {}
        if (segment := segments.get(done.next_segment)) is not None:
            following = granted._replace(
                token=done.next_token, segment=segment, offset=done.next_offset,
                until=at + granted.held_s,
            )  # fmt: skip
            for unused in ahead.keep(name, following):
                yield from revoke(unused.epoch, unused.tokens)
    return None if done.outcome == PutOutcome.REFUSED else OUTCOMES[done.outcome]


def _allocate(context: Context, options: PutOptions, size: int) -> Flow[AllocationAhead | None]:
    """Request the first allocation; None: there is no space that is not waited for."""
    at = context.clock()
    request = calls.Allocate(
        options.namespace, size, 0, context.host, (), context.here_only, context.client_number
    )
    try:
        grants = yield from ask(request, calls.Grants)
    except NoSpaceError:
        return None
    segments = yield from describe(context, grants.epoch, grants.segments)
    segment = segments.get(grants.segments[0])
    held_s = grants.deadline_ms / 1000 - context.lease_margin_s
    is_possible = held_s >= HELD_MIN_S and not grants.capabilities  # its MAC needs another write
    if segment is None or not is_possible:
        if not is_possible:
            context.ahead = None
        yield from revoke(grants.epoch, grants.tokens)
        return None
    return AllocationAhead(
        grants.epoch, grants.tokens[0], segment, grants.offsets[0], held_s, at + held_s
    )
