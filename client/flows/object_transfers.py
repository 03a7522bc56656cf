"""Transfers of complete objects of one segment: tables of rows, with equal outcomes everywhere."""

from __future__ import annotations

import math
from operator import itemgetter

from kvstore.calls import SegmentInfo
from kvstore.client.flows.steps import Transfer
from kvstore.limits import Namespace
from kvstore.native import steps
from kvstore.native.interface import ReadRow, WriteRow
from kvstore.transport.base import Transport
from kvstore.transport.common import batch_ended

Outcome = bytes | int
"""The descriptor of an object that was read, ``STALE`` or ``CORRUPT``."""


class ObjectReads(Transfer):
    """Reads of objects from one segment. Flows set ``rows`` and use ``outcomes`` after success."""

    __slots__ = ("namespace", "outcomes", "rows", "verify")

    def __init__(self, segment: SegmentInfo, namespace: Namespace, *, verify: bool) -> None:
        super().__init__(segment, [], write=False)
        self.namespace = namespace
        self.verify = verify
        self.rows: list[ReadRow] = []
        self.outcomes: list[Outcome] = []

    def size(self) -> int:
        return sum(map(itemgetter(1), self.rows))

    def run(self, transport: Transport, deadline: float) -> None:
        self.outcomes = transport.read_objects(
            self.segment, self.namespace, self.rows, self.verify, deadline
        )


class ObjectWrites(Transfer):
    __slots__ = ("namespace", "rows")

    def __init__(self, segment: SegmentInfo, namespace: Namespace, deadline: float) -> None:
        super().__init__(segment, [], write=True, deadline=deadline)
        self.namespace = namespace
        self.rows: list[WriteRow] = []

    def run(self, transport: Transport, deadline: float) -> None:
        transport.write_objects(self.segment, self.namespace, self.rows, deadline)


def headers(
    memory: memoryview,
    segment: SegmentInfo,
    namespace: Namespace,
    rows: list[ReadRow],
    *,
    verify: bool = False,
) -> list[Outcome]:
    """Return one outcome per row in place. Raises SegmentUnmountedError, InvalidRangeError."""
    done = steps.read_objects(
        memory, segment.generation, segment.seed, namespace, rows, verify, math.inf, 1
    )
    if isinstance(done, int):
        raise batch_ended(done, segment)
    return done
