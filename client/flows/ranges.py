"""Reading parts of objects: the flow of ``get_ranges``.

Header and parts are read in one go. A checksum covers a whole payload, so for a part only the
header is checked: it says that this version of the object is there, and was complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

from kvstore.client.flows.placements import Placed, Replica
from kvstore.client.flows.reading import (
    ATTEMPTS,
    Bad,
    confirmed,
    in_order,
    locate,
    report_bad,
)
from kvstore.client.flows.steps import Context, Flow, Transfer, carry_out
from kvstore.errors import BufferMismatchError
from kvstore.limits import Key, Namespace
from kvstore.memory.header import HEADER_BYTES
from kvstore.native.rows import header_of
from kvstore.transport.base import Move


class ObjectParts:
    """Parts of one object to read, and the caller's memory for them."""

    __slots__ = ("bad", "head", "key", "placed", "ranges")

    def __init__(self, key: Key, ranges: Sequence[tuple[int, memoryview]]) -> None:
        self.key = key
        self.ranges = ranges
        """Where each begins in the payload, and its memory; none is empty."""
        self.head = bytearray(HEADER_BYTES)
        self.placed: Placed | None = None
        """Where they were read; None: a miss."""
        self.bad: Sequence[Bad] = ()
        """Reads under a valid lease that found another header."""

    def moves(self, placed: Placed, offset: int) -> list[Move]:
        """Raises BufferMismatchError: a range is not within the payload."""
        moves = [Move(offset, memoryview(self.head))]
        for start, view in self.ranges:
            if start + len(view) > placed.size:
                raise BufferMismatchError(
                    f"the object has {placed.size} bytes, a range ends at {start + len(view)}",
                    advice="Ask lookup(keys) for the sizes first.",
                    size_bytes=placed.size,
                    key=self.key.hex(),
                )
            moves.append(Move(offset + HEADER_BYTES + start, view))
        return moves


def get_ranges(
    context: Context,
    namespace: Namespace,
    wanted: Sequence[ObjectParts],
    timeout_ms: int | None = None,
) -> Flow[list[int | None]]:
    """As ``Client.get_ranges``.

    Args:
        timeout_ms: as for ``get``.

    Raises:
        BufferMismatchError: a range is not within its object; nothing of that batch was read.
        MasterUnreachableError, DeadlineExceededError
    """
    todo = list(wanted)
    for attempt in range(ATTEMPTS):
        keys = [parts.key for parts in todo]
        placed = yield from locate(context, namespace, keys, fresh=attempt > 0)
        deadline = None if attempt else context.failover_at(timeout_ms)
        transfers: dict[int, Transfer] = {}
        reads: list[tuple[ObjectParts, Placed, Replica]] = []
        for parts, known in zip(todo, placed, strict=True):
            if known is None:
                continue
            parts.bad = confirmed(parts.bad, known)
            replicas = context.segments.reachable(in_order(known, parts.bad))
            if not replicas:
                continue
            segment, offset = replicas[0]
            transfer = transfers.get(id(segment))
            if transfer is None:
                transfer = transfers[id(segment)] = Transfer(segment, [], False, deadline)
            if len(known.replicas) == 1:
                transfer.deadline = None
            transfer.moves.extend(parts.moves(known, offset))
            reads.append((parts, known, replicas[0]))
        failed = yield from carry_out(context, transfers)
        for error in failed.values():
            if error.fields.get("final"):
                raise copy(error)  # which no frame refers to
        now = context.clock()
        todo = []
        for parts, known, replica in reads:
            if id(replica.segment) not in failed:
                if now >= known.until:
                    context.count("late_reads")
                elif _is_there(parts, known, replica, namespace):
                    parts.placed = known
                    continue
                else:
                    context.count("stale_reads")
                    parts.bad = [*parts.bad, Bad(parts.key, known, replica)]
            context.placements.forget(namespace, parts.key)
            todo.append(parts)
        if not todo:
            break
    yield from report_bad(context, namespace, todo, wanted)
    return [None if parts.placed is None else parts.placed.size for parts in wanted]


def _is_there(parts: ObjectParts, placed: Placed, replica: Replica, namespace: Namespace) -> bool:
    row = (replica.offset, placed.size, placed.epoch, placed.counter, parts.key, None)
    return header_of(parts.head, replica.segment.seed, namespace, row) is not None
