"""Transfers range by range, for tests that look between two of them."""

from __future__ import annotations

from collections.abc import Iterator

from xxhash import xxh3_64

from kvstore.client.flows.get import PartReads
from kvstore.client.flows.object_transfers import ObjectReads, ObjectWrites
from kvstore.client.flows.steps import Transfer
from kvstore.memory.header import HEADER_BYTES, WIPE
from kvstore.native.object_headers import write_header
from kvstore.transport.base import outcome_of, payload_moves
from kvstore.transport.common import RangeCopy


def moves_of(transfer: Transfer) -> Iterator[RangeCopy]:
    """The moves of a transfer in the order of ``kvstore.native.pure_python``. Who takes one carries
    it out before the next: a header is made of the payload before it, and outcomes of what was
    read."""
    segment = transfer.segment
    yield from transfer.moves
    if isinstance(transfer, ObjectWrites):
        for row in transfer.rows:
            hasher, head = xxh3_64(), bytearray(HEADER_BYTES)
            yield RangeCopy(row[0], memoryview(WIPE))
            yield from payload_moves(row, hasher)
            write_header(head, segment.seed, transfer.namespace, row, hasher.intdigest())
            yield RangeCopy(row[0], memoryview(head))
    if isinstance(transfer, PartReads):
        transfer.check()
    elif isinstance(transfer, ObjectReads):
        transfer.outcomes = []
        for read in transfer.rows:
            head, hashed = bytearray(HEADER_BYTES), xxh3_64() if transfer.verify else None
            yield RangeCopy(read[0], memoryview(head))
            yield from payload_moves(read, hashed)
            outcome = outcome_of(read, head, segment.seed, transfer.namespace, hashed)
            transfer.outcomes.append(outcome)
