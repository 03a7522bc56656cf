"""Which transport moves what, several nodes at once, and what becomes of errors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from kvstore.calls import SegmentInfo
from kvstore.client.flows.steps import Transfer
from kvstore.client.transport_selector import TransportSelector
from kvstore.errors import (
    ClosedError,
    InvalidRangeError,
    NodeUnreachableError,
    SegmentUnmountedError,
)
from kvstore.runtime.cancellation import CancelToken, current
from kvstore.runtime.clock import uptime
from kvstore.transport.base import Transport
from kvstore.transport.common import RangeCopy
from tests.unit.client.world import segment


class FakeTransport(Transport):
    """Reaches the segments that it is told to, and fails where it is told to."""

    def __init__(self, name: str, reached: set[int]) -> None:
        self.name = name
        self.reached = reached
        self.maps = name == "shm"
        self.errors: dict[int, Exception] = {}
        self.stuck: set[int] = set()
        """Whose moves go on until they are stopped."""
        self.begun = threading.Event()
        self.ended = threading.Event()
        self.swept = 0
        self.swept_twice = threading.Event()
        self.calls: list[tuple[str, int, float]] = []
        self.forgotten: list[int] = []
        self.meeting: threading.Barrier | None = None
        self.closed = False

    def can_reach(self, segment: SegmentInfo) -> bool:
        return segment.segment_id in self.reached

    def read(self, segment: SegmentInfo, moves: Sequence[RangeCopy], deadline: float) -> None:
        self._move("read", segment, deadline)

    def write(self, segment: SegmentInfo, moves: Sequence[RangeCopy], deadline: float) -> None:
        self._move("write", segment, deadline)

    def memory(self, segment: SegmentInfo) -> memoryview:
        if segment.segment_id in self.errors:
            raise self.errors[segment.segment_id]
        return memoryview(b"mapped")

    def mount_checker(self, segment: SegmentInfo) -> Callable[[], bool] | None:
        return (lambda: True) if self.name == "shm" else None

    def forget(self, segment: SegmentInfo) -> None:
        self.forgotten.append(segment.segment_id)

    def sweep(self) -> None:
        self.swept += 1
        if self.swept == 1:
            raise ValueError("a bug")
        self.swept_twice.set()

    def close_after_fork(self) -> None:
        raise AssertionError("nobody forks here")

    def close(self) -> None:
        self.closed = True

    def _move(self, verb: str, segment: SegmentInfo, deadline: float) -> None:
        self.calls.append((verb, segment.segment_id, deadline))
        if self.meeting is not None:
            self.meeting.wait(10)
        if segment.segment_id in self.errors:
            raise self.errors[segment.segment_id]
        if segment.segment_id in self.stuck:
            stop = current()
            assert stop is not None
            stopped = threading.Event()
            with stop.on_cancel(stopped.set):
                self.begun.set()
                assert stopped.wait(10)
            time.sleep(0.05)  # still in somebody's memory
            self.ended.set()
            stop.check()


@pytest.fixture
def shm() -> FakeTransport:
    return FakeTransport("shm", {1})


@pytest.fixture
def tcp() -> FakeTransport:
    return FakeTransport("tcp", {1, 2, 3})


@pytest.fixture
def movers(shm: FakeTransport, tcp: FakeTransport) -> Iterator[TransportSelector]:
    movers = TransportSelector(())
    movers._transports = [shm, tcp]
    yield movers
    movers.close()


def transfer(number: int, *, write: bool = False, deadline: float | None = None) -> Transfer:
    return Transfer(segment(number), [], write, deadline)


def test_the_first_transport_that_reaches_a_segment_moves_it(
    movers: TransportSelector, shm: FakeTransport, tcp: FakeTransport
) -> None:
    assert movers.move([transfer(1)], 5.0) == [None]
    assert movers.move([transfer(2, write=True)], 5.0) == [None]
    assert shm.calls == [("read", 1, 5.0)]
    assert tcp.calls == [("write", 2, 5.0)]


def test_several_nodes_are_moved_at_the_same_time(
    movers: TransportSelector, tcp: FakeTransport
) -> None:
    tcp.meeting = threading.Barrier(2)
    assert movers.move([transfer(2), transfer(3)], uptime() + 5) == [None, None]


def test_an_error_is_the_result_of_its_transfer_alone(
    movers: TransportSelector, shm: FakeTransport, tcp: FakeTransport
) -> None:
    error = tcp.errors[2] = NodeUnreachableError("refused")
    assert movers.move([transfer(1), transfer(2), transfer(3)], 5.0) == [None, error, None]
    assert shm.forgotten == tcp.forgotten == [2]


def test_nothing_is_moved_any_more_once_a_call_has_raised(
    movers: TransportSelector, tcp: FakeTransport
) -> None:
    tcp.errors[2] = ValueError("a bug")
    tcp.stuck = {3}
    with pytest.raises(ValueError, match="a bug"):
        movers.move([transfer(2), transfer(3)], 5.0)
    assert tcp.ended.is_set() or not tcp.begun.is_set()


@pytest.mark.parametrize("numbers", [[2], [2, 3]])
def test_a_call_is_cut_short(
    movers: TransportSelector, tcp: FakeTransport, numbers: list[int]
) -> None:
    tcp.stuck = {2}
    stop = CancelToken()

    def cut() -> None:
        tcp.begun.wait(10)
        stop.set()

    cutting = threading.Thread(target=cut)
    cutting.start()
    with stop.here():
        errors = movers.move([transfer(number) for number in numbers], 5.0)
    cutting.join()
    assert isinstance(errors[0], ClosedError)
    assert tcp.ended.is_set()
    assert movers.move([transfer(3)], 5.0) == [None]


def test_views_are_of_mapped_memory_only(movers: TransportSelector, shm: FakeTransport) -> None:
    mapped = movers.view(segment(1), 0, 6)
    assert mapped is not None
    assert bytes(mapped) == b"mapped"
    with pytest.raises(InvalidRangeError):
        movers.view(segment(1), 1, 6)
    assert movers.view(segment(2), 0, 6) is None
    shm.errors[1] = SegmentUnmountedError("mounted anew")
    with pytest.raises(SegmentUnmountedError):
        movers.view(segment(1), 0, 6)
    assert shm.forgotten == [1]
