"""Adds capabilities and header MACs to replies.

A capability permits reads or writes of an extent over TCP (``kvstore.runtime.tcp_protocol``). The
master issues them to authenticated identities (*holders*), and expresses the expiry in the clock of
the extent's node, which reports its time in its join and heartbeats. That value is late by the
delay of the message, so the expiry is early by as much; ``SLACK_MS`` compensates for it.

Capabilities of former objects must not write an extent. Before it is granted again, its node gets a
wipe request; a capability holds the last wipe sequence number at its issue, and the node rejects
older ones than the last for the extent. A leased extent is not granted, so capabilities to read end
with the state's lease. Holders get leases that end ``read_slack_ms`` earlier.

A node with a MAC key accepts only headers with a valid MAC when it scans its memory
(``kvstore.memory.header``). A MAC names the object that may be in an extent. It never expires: no
other put has its version and location.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, repeat
from typing import Any, Final

from kvstore import calls
from kvstore.calls import Placements, SegmentInfo
from kvstore.master.state.master_state import MasterState
from kvstore.master.state.traffic import Caller
from kvstore.native import steps
from kvstore.runtime.tcp_protocol import Op, holder_key
from kvstore.security.descriptor_protocol import map_key
from kvstore.security.permissions import map_rights

SLACK_MS: Final = 1_000
"""Time between the deadline sent to the client and the end of a capability to write."""

STAT_MS: Final = 1_000
"""Time for which a holder may read the header of an object after a query for it."""

MASTER: Final = (1 << 64) - 1
"""The master's own holder number, for connectivity probes; no client gets it."""

_MOUNT: Final = struct.Struct("<16sQQ")
"""See ``pure_python.issue_capabilities``."""


def describe_segment(segment: SegmentInfo, holder: int, rights: int = 0) -> SegmentInfo:
    """Describe the segment to a holder with these ``MapRight`` (``rights``)."""
    if not segment.takes_capabilities:
        return segment
    token, uuid, generation = segment.token, segment.uuid, segment.generation
    key, descriptor_socket, shm_name = (
        holder_key(token, uuid, generation, holder),
        None,
        segment.shm_name,
    )
    if segment.descriptor_socket is not None:
        for_map = map_key(token, uuid, generation, holder, rights)
        descriptor_socket, shm_name = (
            segment.descriptor_socket._replace(rights=rights, key=for_map),
            "",
        )
    return segment._replace(
        token=key, holder=holder, descriptor_socket=descriptor_socket, shm_name=shm_name
    )


class CapabilityIssuer:
    """Issues capabilities and header MACs for one master. Use it in the thread of the state."""

    def __init__(self, state: MasterState) -> None:
        self._common = state.common
        self._read_slack_ms = min(SLACK_MS, state.rules.lease_ms // 5)
        """Time by which a holder's lease ends before the lease of the state."""
        self._handlers: dict[type, Callable[[int, Any, Any, int], calls.Reply]] = {
            calls.LookupReply: self._found,
            calls.MatchPrefixReply: self._matched,
            calls.Grants: self._granted,
            calls.CommitReply: self._committed,
            calls.RenewReply: self._renewed,
            calls.StartMovesReply: self._moves,
            calls.ObjectDetail: self._detail,
        }

    def add_capabilities(
        self, now_ms: int, request: calls.Request, reply: calls.Reply, caller: Caller
    ) -> calls.Reply:
        """Add the holder's capabilities and MACs to a reply. ``now_ms``: the state's clock."""
        handler = self._handlers.get(type(reply))
        if handler is not None:
            return handler(now_ms, request, reply, caller.holder)
        if isinstance(reply, calls.DescribeSegmentsReply):
            rights = map_rights(caller.identity)
            capabilities = [
                describe_segment(segment, caller.holder, rights) for segment in reply.segments
            ]
            return reply._replace(segments=capabilities)
        return reply

    def _found(
        self, now_ms: int, request: calls.Lookup, reply: calls.LookupReply, holder: int
    ) -> calls.LookupReply:
        until_ms = now_ms + reply.lease_ms
        return reply._replace(
            lease_ms=reply.lease_ms - self._read_slack_ms,
            placements=self._readable(reply.placements, until_ms, holder),
        )

    def _matched(
        self, now_ms: int, request: calls.MatchPrefix, reply: calls.MatchPrefixReply, holder: int
    ) -> calls.MatchPrefixReply:
        until_ms = now_ms + reply.lease_ms
        return reply._replace(
            lease_ms=reply.lease_ms - self._read_slack_ms,
            matches=[
                match._replace(placements=self._readable(match.placements, until_ms, holder))
                for match in reply.matches
            ],
        )

    def _granted(
        self,
        now_ms: int,
        request: calls.PutStart | calls.Allocate,
        reply: calls.Grants,
        holder: int,
    ) -> calls.Grants:
        if isinstance(request, calls.Allocate):  # its MAC comes with its commit
            return self._writable(now_ms, reply, [request.size], holder)
        keys, sizes = request.keys, request.sizes
        if len(reply.tokens) < len(keys):
            outcomes = enumerate(reply.outcomes)
            granted = [row for row, outcome in outcomes if outcome == calls.PutOutcome.WRITE]
            keys, sizes = [keys[row] for row in granted], [sizes[row] for row in granted]
        epochs, namespaces = [reply.epoch] * len(keys), [request.namespace] * len(keys)
        of_keys = epochs, reply.tokens, namespaces, keys
        return self._writable(now_ms, reply, sizes, holder, *of_keys)

    def _committed(
        self, now_ms: int, request: calls.Commit, reply: calls.CommitReply, holder: int
    ) -> calls.CommitReply:
        epoch, token, namespace, key, *_ = request
        record = self._common.forest.get(namespace, key)
        if (
            reply.outcome != calls.PutOutcome.STORED
            or record is None
            or (record.epoch, record.counter) != (epoch, token)
        ):
            return reply  # not stored, or already replaced or removed
        extents = record.extents()
        if not extents or not extents[0][0].offer.header_mac_key:
            return reply  # without an extent: removed, but a parent of others
        segment, offset = extents[0]
        mounts = {0: segment.offer.header_mac_key}
        columns = [offset], [record.size], [epoch], [token], [namespace], [key]
        return reply._replace(header_mac=steps.compute_header_macs(mounts, [0], *columns))

    def _moves(
        self, now_ms: int, request: calls.StartMoves, reply: calls.StartMovesReply, holder: int
    ) -> calls.StartMovesReply:
        sources, grants = reply.sources, reply.grants
        until_ms = now_ms + grants.deadline_ms + SLACK_MS
        epochs, counters = sources.epochs, sources.counters
        if not reply.keeps_version:
            epochs, counters = [grants.epoch] * len(grants.tokens), grants.tokens
        of_keys = epochs, counters, reply.namespaces, reply.keys
        return reply._replace(
            sources=self._readable(sources, until_ms, holder),
            grants=self._writable(now_ms, grants, sources.sizes, holder, *of_keys),
        )

    def _renewed(
        self, now_ms: int, request: calls.Renew, reply: calls.RenewReply, holder: int
    ) -> calls.RenewReply:
        reply = reply._replace(lease_ms=reply.lease_ms - self._read_slack_ms)
        if not reply.tokens_leased:
            return reply
        segments, offsets, sizes = [], [], []
        for token, is_held in zip(request.tokens, reply.tokens_leased, strict=True):
            put = self._common.pending.get(token) if is_held else None
            extents = [(0, 0)] if put is None else [(s.segment_id, at) for s, at in put.extents[:1]]
            segments.append(extents[0][0])
            offsets.append(extents[0][1])
            sizes.append(0 if put is None else put.size)
        until_ms = now_ms + reply.deadline_ms + SLACK_MS
        capabilities = self._issue(segments, offsets, sizes, until_ms, holder, Op.WRITE)
        return reply._replace(capabilities=capabilities)

    def _detail(
        self, now_ms: int, request: calls.StatObject, reply: calls.ObjectDetail, holder: int
    ) -> calls.ObjectDetail:
        until_ms = now_ms + STAT_MS
        self._common.lease(request.namespace, request.key, until_ms)
        return reply._replace(placements=self._readable(reply.placements, until_ms, holder))

    def _readable(self, placements: Placements, until_ms: int, holder: int) -> Placements:
        sizes, replicas, segments = placements.sizes, placements.replicas, placements.segments
        if not segments:
            return placements
        if len(segments) != len(sizes) or max(replicas, default=1) > 1:
            sizes = _flatten(map(repeat, sizes, replicas))
        offsets = placements.offsets
        capabilities = self._issue(segments, offsets, sizes, until_ms, holder, Op.READ)
        return placements._replace(capabilities=capabilities)

    def _writable(
        self,
        now_ms: int,
        grants: calls.Grants,
        sizes: Sequence[int],
        holder: int,
        *of_keys: Sequence[Any],
    ) -> calls.Grants:
        """Add a capability per extent, and a MAC where a node requires one. ``sizes`` and
        ``of_keys`` (epochs, counters, namespaces, keys) have a row per granted key."""
        columns: list[Sequence[Any]] = [sizes, *of_keys]
        if grants.replicas != 1:
            columns = [
                _flatten(repeat(row, grants.replicas) for row in column) for column in columns
            ]
        until_ms = now_ms + grants.deadline_ms + SLACK_MS
        segments, offsets = grants.segments, grants.offsets
        capabilities = self._issue(segments, offsets, columns[0], until_ms, holder, Op.WRITE)
        known = self._common.pool.segments
        offers = {number: known[number].offer for number in set(segments) if number in known}
        mounts = {
            number: offer.header_mac_key for number, offer in offers.items() if offer.header_mac_key
        }
        header_macs = (
            steps.compute_header_macs(mounts, segments, offsets, *columns)
            if of_keys and mounts
            else b""
        )
        return grants._replace(capabilities=capabilities, header_macs=header_macs)

    def _issue(
        self,
        segments: Sequence[int],
        offsets: Sequence[int],
        sizes: Sequence[int],
        until_ms: int,
        holder: int,
        op: Op,
    ) -> bytes:
        """Return a capability per extent, or zeros if its node needs none."""
        mounts: dict[int, bytes] = {}
        known = self._common.pool.segments
        for segment_id in set(segments):
            segment = known.get(segment_id)
            if segment is not None and segment.offer.takes_capabilities:
                offer = segment.offer
                expires_ms = max(0, until_ms + segment.node.ahead_ms)
                mounts[segment_id] = _MOUNT.pack(offer.token, offer.generation, expires_ms)
        wipe_seq = self._common.reclaim.last_order
        return steps.issue_capabilities(mounts, segments, offsets, sizes, holder, wipe_seq, op)


def _flatten(rows: Iterable[Iterable[Any]]) -> list[Any]:
    return list(chain.from_iterable(rows))
