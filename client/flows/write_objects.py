"""Writes of objects: the flow under ``put`` and its siblings.

Each replica is wiped, then gets its payload, then its header. A failed grant is revoked, and
another one requested.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

from kvstore import calls
from kvstore.calls import PutOutcome, SegmentInfo
from kvstore.calls.no_space_messages import AVOIDED, PASSING
from kvstore.client.flows.device_io import DeviceWrites
from kvstore.client.flows.location_cache import is_silent, writable_of_each
from kvstore.client.flows.object_transfers import ObjectWrites
from kvstore.client.flows.steps import Context, Flow, SleepFor, ask, describe, unreachable
from kvstore.client.values import Payload
from kvstore.errors import (
    DeadlineExceededError,
    DeviceError,
    KVStoreError,
    NoSpaceError,
    PutRefusedError,
    UnavailableError,
    without_frames,
)
from kvstore.limits import AVOID_MAX, PUT_KEYS_MAX, Key, Namespace
from kvstore.native.interface import WriteRow

if TYPE_CHECKING:
    from kvstore.device.device import Device

log = logging.getLogger("kvstore.client")

ATTEMPTS = 4

NAMED_MAX = 3

OUTCOMES = {int(outcome): outcome for outcome in PutOutcome}
"""By number: 20 times as fast as calling the enum."""


class Items(NamedTuple):
    """Objects to write, in columns: a Python object each would cost more than the work."""

    keys: Sequence[Key]
    sizes: Sequence[int]
    parts: Sequence[Payload]
    descriptors: Sequence[bytes]
    device: Device | None = None
    """None: the payloads are in host memory."""

    def select(self, rows: Sequence[int]) -> Items:
        keys, sizes, parts, descriptors, device = self
        return Items(
            [keys[row] for row in rows],
            [sizes[row] for row in rows],
            [parts[row] for row in rows],
            [descriptors[row] for row in rows],
            device,
        )


class _Failure(NamedTuple):
    segment: SegmentInfo
    error: KVStoreError


class PutOptions(NamedTuple):
    namespace: Namespace
    parent: Key | None = None
    chain: bool = False
    replicas: int = 1
    overwrite: bool = False
    partial: bool = False
    """Store what fits; the outcome of the rest is NO_SPACE."""
    ttl_ms: int = 0
    wait_ms: int = 0
    """Maximum wait of the master for leases to end if there is no space."""
    hint: int = 0
    """A ``HintAction`` for the chain that ends with the last item."""
    retain_ms: int = 0


def write(context: Context, items: Items, options: PutOptions) -> Flow[list[PutOutcome]]:
    """Store every missing item; one outcome each: STORED, FOUND, BEING_WRITTEN or NO_SPACE.

    Without ``partial``, space is granted for all of a chunk of ``PUT_KEYS_MAX`` items or for none;
    earlier chunks may be stored when an error is raised.

    Raises:
        PutRefusedError: ATTEMPTS grants failed, or all possible nodes did; names them.
        NoSpaceError, ValueTooLargeError, BusyError, MasterUnreachableError, DeadlineExceededError
    """
    keys = items.keys
    if not keys:
        return []
    outcomes = [PutOutcome.REFUSED] * len(keys)
    failures: list[_Failure] = []
    fast_failures: set[bytes] = set()  # segments that failed fast, and may soon work again
    attempts = 0
    error: KVStoreError | None = None
    try:
        while attempts < ATTEMPTS:
            attempts += 1
            before = len(failures)
            avoid = (*context.segments.avoid(), *fast_failures)[:AVOID_MAX]
            try:
                for run in _runs(outcomes, options.chain):
                    for started in (
                        yield from _start(context, items, run, options, options.wait_ms, avoid)
                    ):
                        its_options = options
                        if options.hint and started.run[-1] + 1 < len(keys):
                            its_options = options._replace(hint=0)
                        ended = yield from _finish(context, started, its_options, failures)
                        for index, outcome in zip(started.run, ended, strict=True):
                            outcomes[index] = outcome
            except NoSpaceError as full:
                if full.fields.get("cause") != AVOIDED:
                    raise
                if len(failures) == before:
                    attempts -= 1
                if not fast_failures:
                    error = without_frames(full)
                    break
                fast_failures.clear()
            if PutOutcome.REFUSED not in outcomes:
                return outcomes
            new = failures[before:]
            fast_failures.update(item.segment.uuid for item in new if not is_silent(item.error))
            if not any(is_silent(item.error) for item in new):
                yield SleepFor(0.02 * 4 ** max(0, attempts - 1))  # a silent one has taken a second
    except DeadlineExceededError as late:
        if not failures:
            raise
        error = without_frames(late)
    if not failures:
        known = context.segments.failures()
        failures = [_Failure(item.segment, item.error) for item in known if item.is_silent]
    kind = DeadlineExceededError if isinstance(error, DeadlineExceededError) else PutRefusedError
    raise _put_error(context, kind, outcomes, failures, attempts) from error


def _put_error(
    context: Context,
    kind: type[KVStoreError],
    outcomes: Sequence[PutOutcome],
    failures: Sequence[_Failure],
    attempts: int,
) -> KVStoreError:
    """Build the error of a put: the failed nodes, and the time of the next attempt."""
    refused = outcomes.count(PutOutcome.REFUSED)
    what = f"put: {refused} of {len(outcomes)} objects not stored"
    last = {segment.node: error for segment, error in failures}
    if not last:
        return kind(
            f"{what}: nodes or masters joined or left during {attempts} attempts",
            advice="Try again, or look at: kvstore status",
            refused=refused,
            attempts=attempts,
        )
    messages = "; ".join(item.message for item in [*last.values()][:NAMED_MAX])
    more = len(last) - NAMED_MAX
    other_nodes = f"; and {more} more nodes" if more > 0 else ""
    avoided = [item.until for item in context.segments.failures()]
    again = max(0.0, min(avoided) - context.clock()) if avoided else 0.0
    tries = f", {attempts} attempts" if attempts else f"; tried again in {again:.1f} s"
    return kind(
        f"{what}: {messages}{other_nodes}{tries}",
        advice=next((item.advice for item in last.values() if item.advice), "")
        or "kvstore status lists the nodes; kvstore doctor tests the path to them.",
        refused=refused,
        attempts=attempts,
        nodes=",".join(last),
    )


def _runs(outcomes: Sequence[PutOutcome], chain: bool) -> list[list[int]]:
    """Group refused items into requests; in a chain, of contiguous items."""
    if len(outcomes) <= PUT_KEYS_MAX and outcomes.count(PutOutcome.REFUSED) == len(outcomes):
        return [list(range(len(outcomes)))]
    runs: list[list[int]] = []
    for index, outcome in enumerate(outcomes):
        if outcome is PutOutcome.REFUSED:
            last = runs[-1] if runs else []
            if 0 < len(last) < PUT_KEYS_MAX and (not chain or last[-1] == index - 1):
                last.append(index)
            else:
                runs.append([index])
    return runs


class _GrantedItems(NamedTuple):
    """Items of a put that were granted or refused together."""

    run: Sequence[int]
    items: Items
    parent: Key | None
    grants: calls.Grants | None
    """None: there is no space for them."""
    at: float


def _start(
    context: Context,
    items: Items,
    run: Sequence[int],
    options: PutOptions,
    wait_ms: int,
    avoid: Sequence[bytes],
) -> Flow[list[_GrantedItems]]:
    """Request space for ``run``. A partial put bisects: 2 log2(n) requests. Nothing is written
    before all is granted, because stored objects could be evicted for the next ones."""
    keys, first = items.keys, run[0]
    parent = keys[first - 1] if options.chain and first else options.parent
    some = items if len(run) == len(keys) else items.select(run)
    at = context.clock()
    request = calls.PutStart(
        options.namespace,
        some.keys,
        some.sizes,
        parent,
        options.chain,
        options.replicas,
        options.overwrite,
        wait_ms,
        context.host,
        avoid,
        context.here_only,
        context.client_number,
        options.ttl_ms,
        context.leases.take(),
    )
    try:
        grants = yield from ask(request, calls.Grants)
        return [_GrantedItems(run, some, parent, grants, at)]
    except NoSpaceError as full:
        if not options.partial or full.fields.get("cause") not in PASSING:
            raise
    none = _GrantedItems(run, some, parent, None, at)
    if len(run) == 1:
        return [none]
    middle = len(run) // 2
    started = yield from _start(context, items, run[:middle], options, 0, avoid)
    too_large = [size for item in started if item.grants is None for size in item.items.sizes]
    if too_large and (options.chain or min(some.sizes[middle:]) >= min(too_large)):
        return [*started, none._replace(run=run[middle:], items=items.select(run[middle:]))]
    try:
        return started + (yield from _start(context, items, run[middle:], options, 0, avoid))
    except KVStoreError:
        for item in started:
            if item.grants is not None and item.grants.tokens:
                yield from revoke(item.grants.epoch, item.grants.tokens)
        raise


def _finish(
    context: Context, started: _GrantedItems, options: PutOptions, failures: list[_Failure]
) -> Flow[list[PutOutcome]]:
    """Run the transfers of a grant and end it; returns the outcomes and adds to ``failures``."""
    _, items, parent, grants, at = started
    if grants is None:
        return [PutOutcome.NO_SPACE] * len(items.keys)
    outcomes = [OUTCOMES[outcome] for outcome in grants.outcomes]
    granted: Sequence[int] = range(len(outcomes))
    if outcomes.count(PutOutcome.WRITE) < len(outcomes):
        granted = [index for index, item in enumerate(outcomes) if item is PutOutcome.WRITE]
    if not granted:
        return outcomes
    segments = yield from describe(context, grants.epoch, grants.segments)
    deadline = at + grants.deadline_ms / 1000 - context.lease_margin_s
    replicas, segment_ids = grants.replicas, grants.segments
    distinct_ids = dict.fromkeys(segment_ids)
    kind = ObjectWrites if items.device is None else DeviceWrites
    writes = {
        segment_id: kind(segment, options.namespace, deadline)
        for segment_id in distinct_ids
        if (segment := segments.get(segment_id)) is not None
    }
    rows = _rows(items, granted, parent, options.chain, grants)
    if len(distinct_ids) == 1:
        for transfer in writes.values():
            transfer.rows = rows
    else:
        for segment_id, row in zip(segment_ids, rows, strict=True):
            if segment_id in writes:
                writes[segment_id].rows.append(row)
    errors = (yield list(writes.values())) if writes else []
    assert isinstance(errors, list)
    lost: dict[int, KVStoreError] = {}  # segments that failed
    for (segment_id, transfer), error in zip(writes.items(), errors, strict=True):
        if error is not None:
            lost[segment_id] = error
            failures.append(_Failure(transfer.segment, error))
            if isinstance(error, DeadlineExceededError) and context.clock() >= deadline:
                context.count("put_deadlines_passed")
            try:
                yield from unreachable(context, transfer.segment, error)
            except KVStoreError as raised:  # these keys would be blocked until the deadline
                if isinstance(raised, DeviceError):  # its copies have ended, unless it says else
                    error.fields.setdefault("quiesced", 1)
                yield from revoke(grants.epoch, grants.tokens, [item for item in errors if item])
                raise
    complete = not lost and len(writes) == len(distinct_ids)
    written = list(range(len(granted))) if complete else []
    for number in () if complete else range(len(granted)):
        its_segments = set(segment_ids[number * replicas : (number + 1) * replicas])
        failed = [item for item in its_segments if item in lost or item not in writes]
        if failed:
            outcomes[granted[number]] = PutOutcome.REFUSED
            errors_of_node = [lost[segment_id] for segment_id in failed if segment_id in lost]
            yield from revoke(grants.epoch, [grants.tokens[number]], errors_of_node)
        else:
            written.append(number)
    if not written:
        return outcomes
    tokens = [grants.tokens[number] for number in written]
    is_last = granted[written[-1]] + 1 == len(outcomes)
    end = calls.PutEnd(grants.epoch, tokens, options.hint if is_last else 0, options.retain_ms)
    ended = calls.PutEndReply([PutOutcome.REFUSED] * len(tokens))
    for _ in range(2):
        try:
            ended = yield from ask(end, calls.PutEndReply)
            break
        except UnavailableError as error:
            # The put may or may not be complete. If not, another put_end completes it. Otherwise,
            # or after a change of master, the put_end is rejected, and a new put_start finds the
            # object, or the flow writes it again.
            log.debug("put_end_unanswered tokens=%d error=%s", len(tokens), str(error))
    for number, outcome in zip(written, ended.outcomes, strict=True):
        outcomes[granted[number]] = OUTCOMES[outcome]
    if len(context.placements):
        for index in granted:
            context.placements.forget(options.namespace, items.keys[index])
    return outcomes


def _rows(
    items: Items,
    granted: Sequence[int],
    parent: Key | None,
    chain: bool,
    grants: calls.Grants,
) -> list[WriteRow]:
    """Build one row per extent of the granted items."""
    root, replicas, tokens = parent or b"", grants.replicas, grants.tokens
    count = len(items.keys)
    parents = [root, *items.keys[:-1]] if chain else [root] * count
    if replicas > 1 or len(granted) < count:
        per_extent = [index for index in granted for _ in range(replicas)]
        items, parents = items.select(per_extent), [parents[index] for index in per_extent]
        tokens = [token for token in tokens for _ in range(replicas)]
    keys, sizes, parts, descriptors, _ = items
    epochs = [grants.epoch] * len(keys)
    capabilities = writable_of_each(grants)
    columns = (
        grants.offsets, sizes, epochs, tokens, keys, parts, parents, descriptors, capabilities,
    )  # fmt: skip
    return cast("list[WriteRow]", list(zip(*columns, strict=True)))  # see ``DeviceWrites``


def revoke(epoch: int, tokens: Sequence[int], why: Sequence[KVStoreError] = ()) -> Flow[None]:
    """Revoke grants; a lost reply is harmless. ``why``: transfer errors, which name connections."""
    unquiesced = [error for error in why if not error.fields.get("quiesced")]
    connections = tuple(int(error.fields.get("connection", 0)) for error in unquiesced)
    if 0 in connections:
        connections = ()  # any connection of this client
    request = calls.PutRevoke(epoch, tokens, not unquiesced, connections)
    try:
        yield from ask(request, calls.PutRevokeReply)
    except KVStoreError as error:
        log.debug("revoke_failed tokens=%d error=%s", len(tokens), str(error))
