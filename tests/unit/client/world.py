"""A master that answers what it is told to and memory that fails when it is told to, for flows.

``World.run`` drives a flow without a thread or a socket: it answers each question from a script,
carries transfers out on plain bytearrays, and lets pauses pass on its own clock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from xxhash import xxh3_64_intdigest

from kvstore import calls
from kvstore.calls import Placements, PutOutcome, SegmentInfo
from kvstore.client.flows.location_cache import PlacementCache, SegmentTable
from kvstore.client.flows.steps import CallMaster, Context, Flow, SleepFor, Transfer
from kvstore.client.flows.write_objects import Items
from kvstore.client.leases.read_leases import ReadLeases
from kvstore.client.values import encode, encode_all
from kvstore.errors import KVStoreError
from kvstore.limits import DEFAULT_NAMESPACE, Key, Namespace
from kvstore.memory.header import HEADER_BYTES, Header, pack_into
from kvstore.transport.common import RangeCopy
from tests.support.range_copies import moves_of

ResultT = TypeVar("ResultT")

N: Namespace = DEFAULT_NAMESPACE
A, B, C, D = (Key(letter) for letter in (b"a", b"b", b"c", b"d"))
EPOCH = 7
SIZE = 1 << 16


def segment(number: int, *, node: str = "", generation: int = 1) -> SegmentInfo:
    return SegmentInfo(
        number, node or f"node-{number}", "host", SIZE, bytes([number]) * 16, f"kvstore.{number}",
        "127.0.0.1:1", b"t" * 16, number, generation,
    )  # fmt: skip


def items(*pairs: tuple[Key, bytes]) -> Items:
    return Items([key for key, _ in pairs], *encode_all([value for _, value in pairs]))


def found(
    *rows: tuple[int, int, list[tuple[int, int]]] | None, lease_ms: int = 10_000, epoch: int = EPOCH
) -> calls.LookupReply:
    """An answer to a lookup: per key (payload bytes, counter, [(segment, offset)]), or a miss."""
    filled = [row or (0, 0, []) for row in rows]
    extents = [extent for _, _, of_row in filled for extent in of_row]
    placements = Placements(
        sizes=[size for size, _, _ in filled],
        epochs=[epoch if row else 0 for row in rows],
        counters=[counter for _, counter, _ in filled],
        replicas=[len(of_row) for _, _, of_row in filled],
        segments=[number for number, _ in extents],
        offsets=[offset for _, offset in extents],
    )
    return calls.LookupReply(epoch, lease_ms, placements)


def grants(
    outcomes: list[PutOutcome],
    tokens: list[int],
    places: list[tuple[int, int]],
    *,
    replicas: int = 1,
    deadline_ms: int = 30_000,
    epoch: int = EPOCH,
) -> calls.Grants:
    return calls.Grants(
        epoch, deadline_ms, bytes(outcomes), replicas, tokens,
        [number for number, _ in places], [offset for _, offset in places],
    )  # fmt: skip


class World:
    """Answers by the type of the request: a value, an error, a function of the request; or a list
    of those, one for each time it is asked. ``DescribeSegments`` and reports are
    answered without being told."""

    def __init__(self, segments: int = 3, *, verify_payload: bool = True) -> None:
        self.now = 1_000.0
        self.epoch = EPOCH
        """Of the master that describes segments."""
        self.segments = {number: segment(number) for number in range(1, segments + 1)}
        self.memory = {number: bytearray(SIZE) for number in self.segments}
        self.failing: dict[int, list[KVStoreError | None]] = {}
        """By segment: what its next transfers end with."""
        self.before_piece: Callable[[RangeCopy], None] = lambda _: None
        self.after_moves: Callable[[], None] = lambda: None
        self.answers: dict[type, Any] = {
            calls.DescribeSegments: lambda request: calls.DescribeSegmentsReply(
                self.epoch,
                [self.segments[each] for each in request.segment_ids if each in self.segments],
            ),
            calls.ReportFailure: calls.ReportFailureReply(1),
            calls.ReportCorrupt: calls.ReportCorruptReply(1),
            calls.PutRevoke: calls.PutRevokeReply(1),
        }
        self.asked: list[Any] = []
        self.moved: list[Transfer] = []
        self.paused: list[float] = []
        self.context = Context(
            clock=lambda: self.now,
            host="host",
            segments=SegmentTable(lambda: self.now),
            placements=PlacementCache(100, lambda: self.now),
            leases=ReadLeases(100, lambda: self.now, 1),
            pool=cast(Any, None),
            views=cast(Any, None),
            lease_margin_s=0.2,
            verify_payload=verify_payload,
            counters={},
            client="me",
        )

    def store(
        self,
        number: int,
        offset: int,
        key: Key,
        payload: bytes,
        counter: int,
        *,
        epoch: int = EPOCH,
        namespace: Namespace = N,
    ) -> None:
        """What a finished put leaves in memory."""
        head = bytearray(HEADER_BYTES)
        checksum = xxh3_64_intdigest(payload)
        descriptor = encode(payload).descriptor
        header = Header(namespace, key, None, len(payload), epoch, counter, checksum, descriptor)
        pack_into(head, header, self.segments[number].seed, offset)
        whole = bytes(head) + payload
        self.memory[number][offset : offset + len(whole)] = whole

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
        return [request for request in self.asked if type(request) is kind]

    def _do(self, step: object) -> object:
        if isinstance(step, CallMaster):
            self.asked.append(step.request)
            return self._answer(step.request)
        if isinstance(step, SleepFor):
            self.paused.append(step.seconds)
            self.now += step.seconds
            return None
        assert isinstance(step, list)
        errors = [self._move(transfer) for transfer in step]
        self.after_moves()
        return errors

    def _answer(self, request: Any) -> object:
        answer = self.answers[type(request)]
        if isinstance(answer, list):
            assert answer, f"one {type(request).__name__} more than expected"
            answer = answer.pop(0)
        if isinstance(answer, KVStoreError):
            raise answer
        return answer(request) if callable(answer) else answer

    def _move(self, transfer: Transfer) -> KVStoreError | None:
        self.moved.append(transfer)
        failing = self.failing.get(transfer.segment.segment_id)
        if failing and (error := failing.pop(0)) is not None:
            return error
        memory = self.memory[transfer.segment.segment_id]
        for move in moves_of(transfer):
            self.before_piece(move)
            stop = move.offset + len(move.buffer)
            if transfer.write:
                memory[move.offset : stop] = move.buffer
            else:
                move.buffer[:] = memory[move.offset : stop]
            if move.hasher is not None:
                move.hasher.update(move.buffer)
        return None
