"""Flows without payloads: matches, existence, removals, pins, status, traffic, stat."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import NamedTuple

import numpy as np

from kvstore import calls
from kvstore.client.flows.steps import (
    Context,
    Flow,
    ResultT,
    SleepFor,
    Transfer,
    ask,
    resolve_placements,
)
from kvstore.client.hints import HintResult, HintRow
from kvstore.client.leases.read_leases import ReadLease
from kvstore.errors import UnavailableError
from kvstore.limits import PIN_KEYS_MAX, Key, Namespace
from kvstore.memory.header import HEADER_BYTES, Header, unpack
from kvstore.native.packed_keys import keys_per_request
from kvstore.transport.common import RangeCopy, extent_of


class PrefixMatchResult(NamedTuple):
    """Match of a chain in one namespace."""

    matched: int
    """Leading keys that are present, and leased."""
    being_written: int
    """Keys after those that are being written, as far as the last request looked."""
    on_disk: int = 0
    """Matched keys from the first one on that is on a disk only."""


class EngineMatchResult(NamedTuple):
    """Match of a chain in every namespace of an engine."""

    matched: int
    """Leading keys that all of its chains have, leased; all keys, if it has no chains."""
    being_written: bool
    """Whether keys after those are being written."""
    state: int
    """Leading matched keys up to the last with an object in all state namespaces; 0: none."""
    lease: ReadLease
    """The lease on all of it, for ``Client.release_match``."""
    on_disk: int = 0
    """Matched keys from the first one on that is on a disk only in some chain."""


def match_all(
    context: Context,
    namespaces: Sequence[Namespace],
    states: Sequence[Namespace],
    keys: Sequence[Key],
    *,
    bring: bool = True,
) -> Flow[EngineMatchResult]:
    lease = context.leases.new()
    state: int | None = None
    matches: list[PrefixMatchResult] = []
    if states and namespaces and len(keys) <= keys_per_request(keys):
        request = calls.MatchPrefix(
            namespaces, keys, False, states, lease.number, context.leases.take(), bring=bring
        )
        reply = yield from ask(request, calls.MatchPrefixReply)
        matches = [
            PrefixMatchResult(match.matched, match.being_written, match.on_disk)
            for match in reply.matches
        ]
        state = reply.state
    elif namespaces:
        matches = yield from _match(context, namespaces, keys, lease, bring=bring)
    matched = min((match.matched for match in matches), default=len(keys))
    if state is None or state > matched:
        state = (yield from _last_state(states, keys[:matched], lease)) if states else 0
    is_being_written = any(match.being_written for match in matches)
    in_memory = min((match.matched - match.on_disk for match in matches), default=matched)
    return EngineMatchResult(matched, is_being_written, state, lease, max(0, matched - in_memory))


def _last_state(states: Sequence[Namespace], keys: Sequence[Key], lease: ReadLease) -> Flow[int]:
    """As ``calls.MatchPrefixReply.state``, for any number of keys; searches from the end."""
    end, keys_max = len(keys), keys_per_request(keys)
    while end > 0:
        start = max(0, end - keys_max)
        request = calls.MatchPrefix([], keys[start:end], False, states, lease.number)
        reply = yield from ask(request, calls.MatchPrefixReply)
        if reply.state:
            return start + reply.state
        end = start
    return 0


def match_prefix(
    context: Context, namespaces: Sequence[Namespace], keys: Sequence[Key], hint: int = 0,
    retain_ms: int = 0,
) -> Flow[list[PrefixMatchResult]]:  # fmt: skip
    """Match a chain in each namespace; leased until the last blocks found are read."""
    lease = context.leases.new()
    matches = yield from _match(context, namespaces, keys, lease, hint, retain_ms)
    tips = {
        (namespace, keys[match.matched - 1]): None
        for namespace, match in zip(namespaces, matches, strict=True)
        if match.matched
    }
    lease.unread = len(tips)
    context.leases.expect(lease, tips)
    return matches


def _match(
    context: Context, namespaces: Sequence[Namespace], keys: Sequence[Key], lease: ReadLease,
    hint: int = 0, retain_ms: int = 0, *, bring: bool = False,
) -> Flow[list[PrefixMatchResult]]:  # fmt: skip
    """Match from the front in requests of the maximum size, while any namespace has all keys of
    one. Matched keys are leased, so the prefix stays complete during the next call."""
    found = [PrefixMatchResult(0, 0)] * len(namespaces)
    complete = list(range(len(namespaces)))
    keys_max = keys_per_request(keys)
    for start in range(0, len(keys), keys_max):
        chunk = keys[start : start + keys_max] if len(keys) > keys_max else keys
        requested = [namespaces[index] for index in complete]
        released = context.leases.take()
        request = calls.MatchPrefix(
            requested, chunk, False, (), lease.number, released, hint, retain_ms, bring
        )
        reply = yield from ask(request, calls.MatchPrefixReply)
        for index, match in zip(complete, reply.matches, strict=True):
            on_disk = found[index].on_disk
            on_disk += match.matched if on_disk else match.on_disk
            found[index] = PrefixMatchResult(start + match.matched, match.being_written, on_disk)
        complete = [index for index in complete if found[index].matched == start + len(chunk)]
        if not complete:
            break
    return found


def exists(
    context: Context, namespace: Namespace, keys: Sequence[Key], leases: bool
) -> Flow[list[bool]]:
    if not keys:
        return []
    lease = context.leases.new() if leases else None
    request = calls.Exists(namespace, keys, lease.number if lease else 0, context.leases.take())
    existing = yield from ask(request, calls.ExistsReply)
    presences = np.frombuffer(bytes(existing.presence), np.uint8)
    stored: list[bool] = (presences == calls.Presence.COMPLETE).tolist()
    if lease is not None:
        found = {(namespace, Key(key)): None for key in compress(keys, stored)}
        lease.unread = len(found)
        context.leases.expect(lease, found)
    return stored


def remove(context: Context, namespace: Namespace, keys: Sequence[Key]) -> Flow[list[bool]]:
    if not keys:
        return []
    for key in keys:
        context.placements.forget(namespace, key)
    removed = yield from _removing(calls.Remove(namespace, keys), calls.RemoveReply)
    for key in keys:
        context.placements.forget(namespace, key)
    return [bool(is_removed) for is_removed in removed.removed]


def pin(namespace: Namespace, keys: Sequence[Key], hold_ms: int) -> Flow[list[bool]]:
    """Protect objects from eviction; per key, whether it is stored and now pinned."""
    pinned: list[bool] = []
    for start in range(0, len(keys), PIN_KEYS_MAX):
        request = calls.Pin(namespace, keys[start : start + PIN_KEYS_MAX], hold_ms)
        pinned += map(bool, (yield from ask(request, calls.PinReply)).pinned)
    return pinned


def unpin(namespace: Namespace, keys: Sequence[Key]) -> Flow[list[bool]]:
    unpinned: list[bool] = []
    for start in range(0, len(keys), PIN_KEYS_MAX):
        request = calls.Unpin(namespace, keys[start : start + PIN_KEYS_MAX])
        unpinned += map(bool, (yield from ask(request, calls.UnpinReply)).unpinned)
    return unpinned


def hint(namespace: Namespace, rows: Sequence[HintRow]) -> Flow[list[HintResult]]:
    """As ``Client.hint``."""
    results: list[HintResult] = []
    for start in range(0, len(rows), PIN_KEYS_MAX):
        actions, keys, retain_ms = zip(*rows[start : start + PIN_KEYS_MAX], strict=True)
        reply = yield from ask(calls.Hint(namespace, keys, actions, retain_ms), calls.HintReply)
        for outcome, ms in zip(reply.outcomes, reply.retained_ms, strict=True):
            results.append(HintResult(calls.HintOutcome(outcome), ms / 1000))
    return results


CLEAR_STEP = 1_024
"""Objects removed per call: a few milliseconds of the master, one wipe request per node."""


def clear_page(context: Context, namespace: str) -> Flow[calls.ClearReply]:
    """Remove some objects of a namespace ("": all); repeat until none is removed."""
    cleared = yield from _removing(calls.Clear(namespace, CLEAR_STEP), calls.ClearReply)
    context.placements.clear()
    return cleared


def _removing(request: calls.Request, expected: type[ResultT]) -> Flow[ResultT]:
    """Repeat the call for up to a second: a new master has no node yet to record the removal."""
    for pause_s in (0.05, 0.15, 0.3, 0.5):
        try:
            return (yield from ask(request, expected))
        except UnavailableError as error:
            if error.code != UnavailableError.code:
                raise
        yield SleepFor(pause_s)
    return (yield from ask(request, expected))


def status() -> Flow[calls.ClusterStatus]:
    status = yield from ask(calls.Status(), calls.ClusterStatus)
    while status.next_cursor:
        page = yield from ask(calls.Status(status.next_cursor), calls.ClusterStatus)
        status = status.with_page(page)
    return status


def traffic(namespace: str) -> Flow[calls.TrafficReport]:
    report = yield from ask(calls.Traffic(namespace), calls.TrafficReport)
    while report.next_cursor:
        request = calls.Traffic(namespace, report.next_cursor)
        report = report.with_page((yield from ask(request, calls.TrafficReport)))
    return report


def ping_leader() -> Flow[None]:
    """Call the leader without a namespace, so that any identity of an engine may do so."""
    yield from ask(calls.DescribeSegments(()), calls.DescribeSegmentsReply)


class ObjectStat(NamedTuple):
    detail: calls.ObjectDetail
    header: Header | None
    """The header of the first replica; None: it is being written, or is unreadable."""


def stat(context: Context, namespace: Namespace, key: Key) -> Flow[ObjectStat | None]:
    requested_at = context.clock()
    detail = yield from ask(calls.StatObject(namespace, key), calls.ObjectDetail)
    if detail.row is None:
        return None
    epoch = detail.epoch or detail.version.epoch  # the object's own is wrong after a restart
    placed = yield from resolve_placements(context, epoch, detail.placements, requested_at + 1.0)
    if not placed or placed[0] is None:
        return ObjectStat(detail, None)
    segment, offset, capability = placed[0].replicas[0]
    head = bytearray(HEADER_BYTES)
    extent = extent_of(offset, placed[0].size, capability)
    errors = yield [Transfer(segment, [RangeCopy(offset, memoryview(head), extent=extent)], False)]
    assert isinstance(errors, list)
    header = None if errors[0] is not None else unpack(head, segment.seed, offset)
    return ObjectStat(detail, header)
