"""Calls that are cut short from outside."""

from __future__ import annotations

import socket
import threading
from contextlib import closing

import pytest

from kvstore.errors import ClosedError, KVStoreError, NodeUnreachableError
from kvstore.runtime.cancellation import CallCancelledError, CancelToken, current
from kvstore.runtime.clock import uptime
from kvstore.transport.common import RangeCopy
from kvstore.transport.tcp import TcpTransport
from tests.unit.client.world import segment


def test_a_stop_is_that_of_one_thread_and_one_block() -> None:
    outer, inner = CancelToken(), CancelToken()
    with outer.here():
        with inner.here():
            assert current() is inner
        assert current() is outer
        seen: list[CancelToken | None] = []
        thread = threading.Thread(target=lambda: seen.append(current()))
        thread.start()
        thread.join()
        assert seen == [None]
    assert current() is None


def test_what_wakes_is_called_within_its_block_only() -> None:
    stop = CancelToken()
    called: list[int] = []
    with stop.on_cancel(lambda: called.append(1)):
        pass
    with stop.on_cancel(lambda: called.append(2)):
        stop.set()
        stop.set()
    assert set(called) == {2}
    with pytest.raises(ClosedError), stop.on_cancel(lambda: called.append(3)):
        pytest.fail("it was set before")


def test_who_stops_a_call_that_waits_has_the_memory_back_at_once() -> None:
    stop = CancelToken()

    def wait() -> None:
        with stop.cancellable_wait():
            assert stop.set()
            raise KVStoreError("an answer of which nothing may be made")

    with pytest.raises(CallCancelledError):
        wait()
    assert stop.set(), "it does not begin again"
    with pytest.raises(CallCancelledError), stop.cancellable_wait():
        pytest.fail("it was set before")


def test_who_stops_a_call_that_works_has_to_wait() -> None:
    stop = CancelToken()
    with stop.cancellable_wait():
        pass
    assert not stop.set()
    with pytest.raises(CallCancelledError), stop.cancellable_wait():
        pytest.fail("it was set before")
    assert not stop.set()


@pytest.mark.parametrize("connections_max", [1, 8])
def test_reads_over_tcp_end_when_they_are_stopped(connections_max: int) -> None:
    """Also those that wait for a connection."""
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        closing(TcpTransport(connections_max=connections_max)) as transport,
    ):
        place = segment(1)._replace(address=f"127.0.0.1:{silent.getsockname()[1]}")
        stop = CancelToken()
        errors: list[KVStoreError] = []

        def read() -> None:
            with stop.here():
                try:
                    transport.read(place, [RangeCopy(4096, memoryview(bytearray(10)))], deadline)
                except KVStoreError as error:
                    errors.append(error)

        started = uptime()
        deadline = started + 30
        threads = [threading.Thread(target=read) for _ in range(3)]
        for thread in threads:
            thread.start()
        connection, _ = silent.accept()
        stop.set()
        for thread in threads:
            thread.join(10)
        connection.close()
        assert len(errors) == 3
        assert all(isinstance(error, ClosedError | NodeUnreachableError) for error in errors)
        assert uptime() - started < 5
