"""Adds stamps to replies: without one, a node with an identity does not find the object again.

A node that gives a key for stamps believes, when it looks through its memory, no header without one
(``kvstore.memory.header``). A stamp says which object may be in an extent. It never ends: it is
good for one version at one place, and no other put has this version.

The state decides who gets which extent, and knows nothing of this.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, repeat
from typing import Any

from kvstore import calls
from kvstore.calls import PutOutcome
from kvstore.master.state.common import Common
from kvstore.native import steps


class Stamping:
    """Makes the stamps of one master. Use it in the thread of the state."""

    def __init__(self, common: Common) -> None:
        self._common = common

    def stamp(self, request: calls.Request, reply: calls.Reply) -> calls.Reply:
        """The reply with its stamps. Allocations get theirs with their commit, which names their
        object."""
        match request, reply:
            case calls.PutStart(), calls.Grants():
                return self._put(request, reply)
            case calls.StartMoves(), calls.MovesStarted():
                return self._moves(reply)
            case calls.Commit(), calls.Committed(PutOutcome.STORED):
                return self._committed(request, reply)
        return reply

    def _put(self, request: calls.PutStart, grants: calls.Grants) -> calls.Grants:
        keys, sizes = request.keys, request.sizes
        if len(grants.tokens) < len(keys):
            outcomes = enumerate(grants.outcomes)
            granted = [row for row, outcome in outcomes if outcome == PutOutcome.WRITE]
            keys, sizes = [keys[row] for row in granted], [sizes[row] for row in granted]
        epochs, namespaces = [grants.epoch] * len(keys), [request.namespace] * len(keys)
        return self._stamped(grants, sizes, epochs, grants.tokens, namespaces, keys)

    def _moves(self, reply: calls.MovesStarted) -> calls.MovesStarted:
        sources, grants = reply.sources, reply.grants
        epochs, counters = sources.epochs, sources.counters
        if not reply.keeps_version:
            epochs, counters = [grants.epoch] * len(grants.tokens), grants.tokens
        of_keys = epochs, counters, reply.namespaces, reply.keys
        return reply._replace(grants=self._stamped(grants, sources.sizes, *of_keys))

    def _committed(self, request: calls.Commit, reply: calls.Committed) -> calls.Committed:
        epoch, token, namespace, key, *_ = request
        record = self._common.forest.get(namespace, key)
        if record is None or (record.epoch, record.counter) != (epoch, token):
            return reply  # it is replaced or removed already
        extents = record.extents()
        if not extents or not extents[0][0].offer.stamp_key:
            return reply  # without an extent: it is removed, and a parent of others
        segment, offset = extents[0]
        mounts = {0: segment.offer.stamp_key}
        columns = [offset], [record.size], [epoch], [token], [namespace], [key]
        return reply._replace(stamp=steps.stamp(mounts, [0], *columns))

    def _stamped(
        self, grants: calls.Grants, sizes: Sequence[int], *of_keys: Sequence[Any]
    ) -> calls.Grants:
        """The grants with a stamp for each extent, if a node wants them. ``sizes`` and ``of_keys``
        (epochs, counters, namespaces, keys) have a row for each granted key."""
        known = self._common.pool.segments
        mounts: dict[int, bytes] = {}
        for segment_id in set(grants.segments):
            segment = known.get(segment_id)
            if segment is not None and segment.offer.stamp_key:
                mounts[segment_id] = segment.offer.stamp_key
        if not mounts:
            return grants
        columns: list[Sequence[Any]] = [sizes, *of_keys]
        if grants.replicas != 1:
            columns = [
                [*chain.from_iterable(repeat(row, grants.replicas) for row in column)]
                for column in columns
            ]
        sizes, epochs, counters, namespaces, keys = columns
        return grants._replace(
            stamps=steps.stamp(
                mounts, grants.segments, grants.offsets, sizes, epochs, counters, namespaces, keys
            )
        )
