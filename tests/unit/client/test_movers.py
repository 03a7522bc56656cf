"""Which transport moves what, several nodes at once, and what becomes of errors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from kvstore.calls import SegmentInfo
from kvstore.client.movers import Movers
from kvstore.client.steps import Transfer
from kvstore.errors import (
    ClosedError,
    KVStoreError,
    NodeUnreachableError,
    SegmentGoneError,
)
from kvstore.native.kinds import ReadRow, WriteRow
from kvstore.transport.base import Move
from tests.unit.client.world import segment


class FakeTransport:
    """Reaches the segments that it is told to, and fails where it is told to."""

    def __init__(self, name: str, reached: set[int]) -> None:
        self.name = name
        self.reached = reached
        self.maps = name == "shm"
        self.errors: dict[int, KVStoreError] = {}
        self.calls: list[tuple[str, int, float]] = []
        self.forgotten: list[int] = []
        self.meeting: threading.Barrier | None = None
        self.closed = False

    def reaches(self, segment: SegmentInfo) -> bool:
        return segment.segment_id in self.reached

    def register(self, buffer: memoryview) -> None:
        pass

    def read(self, segment: SegmentInfo, moves: Sequence[Move], deadline: float) -> None:
        self._move("read", segment, deadline)

    def write(self, segment: SegmentInfo, moves: Sequence[Move], deadline: float) -> None:
        self._move("write", segment, deadline)

    def read_objects(
        self,
        segment: SegmentInfo,
        namespace: str,
        rows: list[ReadRow],
        verify: bool,
        deadline: float,
    ) -> list[bytes | int] | None:
        raise AssertionError("nobody asks for objects here")

    def write_objects(
        self, segment: SegmentInfo, namespace: str, rows: list[WriteRow], deadline: float
    ) -> bool:
        raise AssertionError("nobody asks for objects here")

    def memory(self, segment: SegmentInfo) -> memoryview:
        if segment.segment_id in self.errors:
            raise self.errors[segment.segment_id]
        return memoryview(b"mapped")

    def view(self, segment: SegmentInfo, offset: int, length: int) -> memoryview | None:
        if segment.segment_id in self.errors:
            raise self.errors[segment.segment_id]
        return memoryview(b"mapped") if self.name == "shm" else None

    def watch(self, segment: SegmentInfo) -> Callable[[], bool] | None:
        return (lambda: True) if self.name == "shm" else None

    def forget(self, segment: SegmentInfo) -> None:
        self.forgotten.append(segment.segment_id)

    def close(self) -> None:
        self.closed = True

    def _move(self, verb: str, segment: SegmentInfo, deadline: float) -> None:
        self.calls.append((verb, segment.segment_id, deadline))
        if self.meeting is not None:
            self.meeting.wait(10)
        if segment.segment_id in self.errors:
            raise self.errors[segment.segment_id]


@pytest.fixture
def shm() -> FakeTransport:
    return FakeTransport("shm", {1})


@pytest.fixture
def tcp() -> FakeTransport:
    return FakeTransport("tcp", {1, 2, 3})


@pytest.fixture
def movers(shm: FakeTransport, tcp: FakeTransport) -> Iterator[Movers]:
    movers = Movers(())
    movers._transports = [shm, tcp]
    yield movers
    movers.close()


def transfer(number: int, *, write: bool = False, deadline: float | None = None) -> Transfer:
    return Transfer(segment(number), [], write, deadline)


def test_the_first_transport_that_reaches_a_segment_moves_it(
    movers: Movers, shm: FakeTransport, tcp: FakeTransport
) -> None:
    assert movers.move([transfer(1)], 5.0) == [None]
    assert movers.move([transfer(2, write=True)], 5.0) == [None]
    assert shm.calls == [("read", 1, 5.0)]
    assert tcp.calls == [("write", 2, 5.0)]


def test_the_earlier_deadline_counts(movers: Movers, shm: FakeTransport) -> None:
    movers.move([transfer(1, deadline=3.0)], 5.0)
    movers.move([transfer(1, deadline=7.0)], 5.0)
    assert [deadline for _, _, deadline in shm.calls] == [3.0, 5.0]


def test_several_nodes_are_moved_at_the_same_time(movers: Movers, tcp: FakeTransport) -> None:
    tcp.meeting = threading.Barrier(2)
    assert movers.move([transfer(2), transfer(3)], time.monotonic() + 5) == [None, None]


def test_an_error_is_the_result_of_its_transfer_alone(
    movers: Movers, shm: FakeTransport, tcp: FakeTransport
) -> None:
    error = tcp.errors[2] = NodeUnreachableError("refused")
    assert movers.move([transfer(1), transfer(2), transfer(3)], 5.0) == [None, error, None]
    assert shm.forgotten == tcp.forgotten == [2]


def test_a_segment_that_nobody_reaches(movers: Movers) -> None:
    (error,) = movers.move([transfer(9, write=True)], 5.0)
    assert isinstance(error, NodeUnreachableError)
    assert error.fields == {"node": "node-9", "settled": 1}
    assert "shm, tcp" in str(error)


def test_views_are_of_mapped_memory_only(movers: Movers, shm: FakeTransport) -> None:
    mapped = movers.view(segment(1), 0, 6)
    assert mapped is not None
    assert bytes(mapped) == b"mapped"
    assert movers.view(segment(2), 0, 6) is None
    shm.errors[1] = SegmentGoneError("mounted anew")
    with pytest.raises(SegmentGoneError):
        movers.view(segment(1), 0, 6)
    assert shm.forgotten == [1]


def test_after_closing(movers: Movers, shm: FakeTransport, tcp: FakeTransport) -> None:
    movers.move([transfer(1), transfer(2)], 5.0)
    movers.close()
    assert shm.closed
    assert tcp.closed
    with pytest.raises(ClosedError):
        movers.move([transfer(1), transfer(2)], 5.0)
