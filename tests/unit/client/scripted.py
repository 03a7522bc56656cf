"""Flows driven by hand: a test is the master, the node's memory and the clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from xxhash import xxh3_64_intdigest

from kvstore import calls
from kvstore.calls import Placements, SegmentInfo
from kvstore.client.placements import PlacementCache, SegmentTable
from kvstore.client.steps import Ask, Context, Flow, Pause, Transfer
from kvstore.errors import KVStoreError
from kvstore.limits import Key, Namespace
from kvstore.memory.header import SUPERBLOCK_BYTES, Header, pack_into

ResultT = TypeVar("ResultT")
EPOCH = 7
LEASE_MS = 10_000


def segment(segment_id: int = 1, size: int = 1 << 20) -> SegmentInfo:
    return SegmentInfo(
        segment_id=segment_id,
        node=f"node-{segment_id}",
        host="here",
        size=size,
        uuid=bytes([segment_id]) * 16,
        shm_name="",
        address="",
        token=b"t" * 16,
        seed=segment_id * 1_000_003,
        generation=1,
    )


class World:
    """Segments of real bytes, a clock that stands still, and answers that the test gives.

    ``answers`` maps a request's class to its reply, an error, or a function of the request; what
    is asked is kept in ``asked``, what is paused in ``paused``.
    """

    def __init__(self, *segments: SegmentInfo) -> None:
        self.now = 1000.0
        self.segments = {each.segment_id: each for each in segments or (segment(),)}
        self.memory = {key: bytearray(each.size) for key, each in self.segments.items()}
        self.broken: dict[int, KVStoreError] = {}
        """Segments whose transfers fail, and with what."""
        self.on_transfer: Callable[[Transfer], None] = lambda transfer: None
        """Called before the bytes of each transfer move."""
        self.asked: list[calls.Request] = []
        self.paused: list[float] = []
        self.answers: dict[type, Any] = {
            calls.DescribeSegments: lambda request: calls.Segments(
                [self.segments[i] for i in request.segment_ids if i in self.segments]
            ),
            calls.ReportFailure: calls.Reported(0),
            calls.PutRevoke: calls.Revoked(1),
        }
        self.context = Context(
            clock=lambda: self.now,
            host="here",
            segments=SegmentTable(lambda: self.now),
            placements=PlacementCache(100, lambda: self.now),
            lease_margin_s=0.2,
            verify_payload=True,
            failover_s=1.0,
            counters={},
        )

    def run(self, flow: Flow[ResultT]) -> ResultT:
        try:
            step = next(flow)
            while True:
                try:
                    outcome = self._do(step)
                except KVStoreError as error:
                    step = flow.throw(error)
                else:
                    step = flow.send(outcome)
        except StopIteration as done:
            result: ResultT = done.value
            return result

    def requests(self, kind: type) -> list[Any]:
        return [request for request in self.asked if isinstance(request, kind)]

    def place(
        self,
        key: bytes,
        payload: bytes,
        *,
        segment_id: int = 1,
        offset: int = SUPERBLOCK_BYTES,
        counter: int = 1,
        namespace: str = "default",
        checksum: int | None = None,
    ) -> None:
        """Write an object, header and all, straight into a segment."""
        memory = memoryview(self.memory[segment_id])
        stated = xxh3_64_intdigest(payload) if checksum is None else checksum
        header = Header(
            Namespace(namespace),
            Key(key),
            None,
            len(payload),
            EPOCH,
            counter,
            stated,
            b'{"kind":"bytes"}',
        )
        pack_into(memory[offset:], header, self.segments[segment_id].seed, offset)
        memory[offset + 1024 : offset + 1024 + len(payload)] = payload

    def _do(self, step: object) -> object:
        if isinstance(step, Ask):
            self.asked.append(step.request)
            answer = self.answers[type(step.request)]
            if callable(answer) and not isinstance(answer, tuple):
                answer = answer(step.request)
            if isinstance(answer, KVStoreError):
                raise answer
            return answer
        if isinstance(step, Pause):
            self.paused.append(step.seconds)
            return None
        assert isinstance(step, list)
        return [self._move(transfer) for transfer in step]

    def _move(self, transfer: Transfer) -> KVStoreError | None:
        error = self.broken.get(transfer.segment.segment_id)
        if error is not None:
            return error
        self.on_transfer(transfer)
        memory = memoryview(self.memory[transfer.segment.segment_id])
        for move in transfer.moves:
            if move.prepare is not None:
                move.prepare()
            there = memory[move.offset : move.offset + len(move.buffer)]
            if transfer.write:
                there[:] = move.buffer
            else:
                move.buffer[:] = there
            if move.hasher is not None:
                move.hasher.update(move.buffer)
        return None


def found(*rows: tuple[int, list[tuple[int, int]]] | None, counter: int = 1) -> calls.Found:
    """A reply to a lookup: per row the payload size and the replicas, or None for a miss."""
    present = [row or (0, []) for row in rows]
    return calls.Found(
        EPOCH,
        LEASE_MS,
        Placements(
            [size for size, _ in present],
            [EPOCH] * len(present),
            [counter] * len(present),
            [len(replicas) for _, replicas in present],
            [segment_id for _, replicas in present for segment_id, _ in replicas],
            [offset for _, replicas in present for _, offset in replicas],
        ),
    )


def grants(
    outcomes: list[int],
    extents: list[tuple[int, int]],
    *,
    replicas: int = 1,
    first_token: int = 1,
) -> calls.Grants:
    """A reply to put_start: one extent per granted key and replica."""
    granted = len(extents) // replicas
    return calls.Grants(
        EPOCH,
        30_000,
        outcomes,
        replicas,
        list(range(first_token, first_token + granted)),
        [segment_id for segment_id, _ in extents],
        [offset for _, offset in extents],
    )
