"""What holds for every carrier, and what strangers cannot do to the server."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, cast

import pytest

from kvstore import calls
from kvstore.errors import (
    BatchTooLargeError,
    BusyError,
    ClosedError,
    DeadlineExceededError,
    InternalError,
    MasterUnreachableError,
    NoSpaceError,
    UsageError,
)
from kvstore.limits import BATCH_KEYS_MAX, FRAME_BYTES_MAX, REQUEST_BYTES_MAX, Key, Namespace
from kvstore.master import lane_server as lane_server_module
from kvstore.master.lane_server import LaneSettings
from kvstore.runtime.cancellation import CancelToken
from kvstore.runtime.clock import uptime
from kvstore.wire.frames import CALL, ERROR, REPLY, TOKEN_BYTES_MAX, frame
from kvstore.wire.messages import encode_request
from kvstore.wire.status import decode_error
from tests.conformance.rpc_peers import (
    KEYS,
    SAMPLES,
    Caller,
    N,
    RawLane,
    ScriptedService,
    Server,
    StoppableCaller,
)
from tests.support.etcd import Relay
from tests.support.processes import free_port
from tests.support.wait import until

CARRIERS = ("lane-unix", "lane-tcp", "grpc")
CALLERS = {"plain": Caller, "stoppable": StoppableCaller}
EXISTS, EXISTING = SAMPLES[calls.Exists]
PUT_START, GRANTS = SAMPLES[calls.PutStart]


def service_for(carrier: str) -> ScriptedService:
    return ScriptedService(lane=carrier != "grpc", unix=carrier == "lane-unix")


@pytest.fixture(params=CARRIERS)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with Server(service_for(request.param)) as server:
        yield server


@pytest.fixture(params=CALLERS)
def caller(request: pytest.FixtureRequest, server: Server) -> Iterator[Caller]:
    with contextlib.closing(CALLERS[request.param](server.address)) as caller:
        yield caller


@pytest.fixture
def lane_server() -> Iterator[Server]:
    with Server(ScriptedService()) as server:
        yield server


# --- every carrier, calls that can be stopped and others ---------------------------------------


def test_calls_are_answered(server: Server, caller: Caller) -> None:
    for request, reply in SAMPLES.values():
        assert caller.call(request) == reply
        assert server.service.asked[-1] == request
    assert server.service.count(calls.Join) == 1
    stats = server.carriers.dispatcher.stats
    assert all(stats[kind.__name__].count == 1 for kind in SAMPLES)
    assert stats["Exists"].us.total > 0


def test_calls_take_the_carrier_that_they_should(server: Server, caller: Caller) -> None:
    caller.call(EXISTS)
    lane = server.service._lane
    assert server.run(lambda: server.carriers.lane.stats.accepted) == (1 if lane else 0)


def test_an_error_arrives_as_it_was_raised(server: Server, caller: Caller) -> None:
    error = NoSpaceError("full", advice="Wait.", missing_bytes=2**40, node="n")
    server.service.answers[calls.PutStart] = error
    with pytest.raises(NoSpaceError) as caught:
        caller.call(PUT_START)
    assert type(caught.value) is NoSpaceError
    assert str(caught.value) == "full. Wait."
    assert caught.value.fields == {"missing_bytes": 2**40, "node": "n"}
    assert caller.call(EXISTS) == EXISTING
    assert server.carriers.dispatcher.stats["PutStart"].errors == 1


def test_a_bug_of_the_master_is_an_internal_error(
    server: Server, caller: Caller, caplog: pytest.LogCaptureFixture
) -> None:
    server.service.answers[calls.Exists] = ZeroDivisionError("a bug")
    with pytest.raises(InternalError):
        caller.call(EXISTS)
    server.service.answers[calls.Exists] = calls.ExistsReply([300])  # cannot be encoded
    with pytest.raises(InternalError):
        caller.call(EXISTS)
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 2
    assert all(record.exc_info for record in errors)
    server.service.answers[calls.Exists] = EXISTING
    assert caller.call(EXISTS) == EXISTING
    caplog.clear()  # the tracebacks hold the server's frames


def test_the_master_learns_which_client_calls(server: Server, caller: Caller) -> None:
    caller.call(EXISTS)
    caller.call(PUT_START)
    joined, *others = server.service.callers
    assert joined == "", "a client that has not joined is not known"
    address = "local" if server.service._unix else "127.0.0.1"
    assert others == [f"test {address}"] * 2


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("prefill-" + "x" * 50 + "-4711", "prefill-" + "x" * 14 + "…" + "x" * 17 + "-4711"),
        ("模" * 80, "模" * 7 + "…" + "模" * 7),
    ],
    ids=["long", "wide"],
)
def test_a_client_is_known_by_its_name_in_a_token(server: Server, name: str, known: str) -> None:
    with contextlib.closing(Caller(server.address, name=name)) as caller:
        caller.call(EXISTS)
        joined = caller.stub.join(uptime() + 10)
    assert server.service.callers[-1].rpartition(" ")[0] == known
    assert len(joined.lane_token) <= TOKEN_BYTES_MAX


def test_what_the_master_refuses_arrives_typed(caller: Caller) -> None:
    with pytest.raises(UsageError):
        caller.call(calls.Exists(Namespace(""), KEYS))


def test_an_error_may_wait(server: Server, caller: Caller) -> None:
    service = server.service
    service.answers[calls.PutStart] = service.wait
    releasing = server.when_waiting(lambda: server.release(NoSpaceError("still full")))
    with pytest.raises(NoSpaceError):
        caller.call(PUT_START)
    releasing.join()


def test_replies_may_come_in_any_order(server: Server, caller: Caller) -> None:
    """Waiting calls hold up no others, and each caller gets its own reply."""
    service = server.service
    service.answers[calls.PutStart] = service.wait
    requests = [PUT_START._replace(wait_ms=i) for i in range(5)]

    def release() -> None:
        service.until(lambda: len(service.waiting) == 5)
        order = [
            request.wait_ms for request in service.asked if isinstance(request, calls.PutStart)
        ]
        while service.waiting:
            server.release(GRANTS._replace(deadline_ms=order.pop()), index=-1)

    releasing = threading.Thread(target=release)
    releasing.start()
    results = caller.all([*requests, EXISTS])
    releasing.join()
    assert [result.deadline_ms for result in results[:5]] == [0, 1, 2, 3, 4]
    assert results[5] == EXISTING


def test_the_largest_batch(server: Server, caller: Caller) -> None:
    """It is sent in pieces, and all of them again if another master has answered some."""
    keys = [Key(i.to_bytes(4, "big") * 64) for i in range(BATCH_KEYS_MAX)]
    asked: list[Key] = []

    def find(request: Any) -> calls.LookupReply:
        epoch = 8 if asked else 7
        start, count = len(asked) % len(keys), len(request.keys)
        asked.extend(request.keys)
        rows = range(start, start + count)
        places = calls.Placements(
            [4096] * count, [7] * count, list(rows), [1] * count, [3] * count, list(rows)
        )
        return calls.LookupReply(epoch, 9 if start else 1, places)

    server.service.answers[calls.Lookup] = find
    found = cast(calls.LookupReply, caller.call(calls.Lookup(N, keys)))
    assert (found.epoch, found.lease_ms) == (8, 1)
    assert found.placements.counters == list(range(len(keys)))
    assert asked == keys * 2


def test_a_reply_that_is_too_large_is_an_error(server: Server, caller: Caller) -> None:
    server.service.answers[calls.Exists] = calls.ExistsReply(bytes(FRAME_BYTES_MAX))
    with pytest.raises(BatchTooLargeError):
        caller.call(EXISTS)
    server.service.answers[calls.Exists] = EXISTING
    assert caller.call(EXISTS) == EXISTING


def test_many_callers_at_once(server: Server, caller: Caller) -> None:
    server.service.answers[calls.Exists] = lambda request: calls.ExistsReply(
        bytes(len(request.keys))
    )
    requests = [calls.Exists(N, [KEYS[0]] * i) for i in range(60)]
    assert [len(result.presence) for result in caller.all(requests)] == list(range(60))


def test_a_call_ends_at_its_deadline(server: Server, caller: Caller) -> None:
    service = server.service
    caller.call(EXISTS)
    service.answers[calls.PutStart] = service.wait
    started = uptime()
    with pytest.raises(DeadlineExceededError):
        caller.call(PUT_START, timeout_s=0.2)
    assert 0.19 < uptime() - started < 2
    service.until(service.waiting[0].done)
    assert service.waiting[0].cancelled(), "the master goes on for nobody"
    assert caller.call(EXISTS) == EXISTING


def test_a_restarted_master_is_joined_anew(server: Server, caller: Caller) -> None:
    assert caller.call(EXISTS) == EXISTING
    assert caller.epoch == 7
    server.restart(epoch=8)
    assert caller.call(EXISTS) == EXISTING
    assert caller.epoch == 8


def test_a_call_under_way_survives_a_restart(server: Server, caller: Caller) -> None:
    """Also one that must not be done twice: the new epoch says that the first time is void."""
    service = server.service
    service.answers[calls.PutStart] = service.wait

    def restart() -> None:
        service.until(lambda: bool(service.waiting))
        service.answers[calls.PutStart] = GRANTS
        server.restart(epoch=8)

    restarting = threading.Thread(target=restart)
    restarting.start()
    assert caller.call(PUT_START) == GRANTS
    restarting.join()
    assert caller.epoch == 8


def test_a_call_that_may_have_been_done_is_not_sent_twice(server: Server, caller: Caller) -> None:
    service = server.service
    service.answers[calls.PutStart] = service.wait

    def restart() -> None:
        service.until(lambda: bool(service.waiting))
        service.answers[calls.PutStart] = GRANTS
        server.restart(epoch=7)  # as if only the connection had broken

    restarting = threading.Thread(target=restart)
    restarting.start()
    with pytest.raises(MasterUnreachableError) as caught:
        caller.call(PUT_START)
    restarting.join()
    assert caught.value.fields["sent"] == 1
    assert caller.call(EXISTS) == EXISTING


def test_a_master_that_is_not_there(caller: Caller, server: Server) -> None:
    server.stop()
    with pytest.raises(MasterUnreachableError) as caught:
        caller.call(EXISTS, timeout_s=0.3)
    assert caught.value.fields["addresses"] == server.address
    assert "kvstore-master --port" in str(caught.value)
    server.start()
    assert caller.call(EXISTS) == EXISTING


def test_a_closed_stub_raises(caller: Caller) -> None:
    caller.call(EXISTS)
    caller.close()
    with pytest.raises(ClosedError):
        caller.call(EXISTS)
    caller.close()


def test_closing_ends_calls_under_way(server: Server) -> None:
    service = server.service
    service.answers[calls.PutStart] = service.wait
    caller = Caller(server.address)
    closing = server.when_waiting(caller.close)
    with pytest.raises(ClosedError):
        caller.call(PUT_START)
    closing.join()


def test_a_stopped_call_ends_and_is_cancelled_at_the_master(server: Server) -> None:
    service = server.service
    service.answers[calls.PutStart] = service.wait
    with contextlib.closing(Caller(server.address)) as caller:
        stop = CancelToken()
        stopping = server.when_waiting(stop.set)
        with stop.here(), pytest.raises(ClosedError):
            caller.call(PUT_START)
        stopping.join()
        service.until(service.waiting[0].done)
        assert service.count(calls.PutStart) == 1, "sent again"
        assert caller.call(EXISTS) == EXISTING


@pytest.mark.parametrize("kind", CALLERS)
def test_a_blocked_lane_costs_one_warning(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    service = ScriptedService(unix=False)
    service.lane_port = free_port()
    with Server(service) as server, contextlib.closing(CALLERS[kind](server.address)) as caller:
        for _ in range(3):
            assert caller.call(EXISTS, timeout_s=1.0) == EXISTING
    warnings = [r.getMessage() for r in caplog.records if r.name == "kvstore.client"]
    assert len(warnings) == 1
    assert f":{service.lane_port}" in warnings[0]


def test_a_silent_lane_is_retried_beside_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    service, threads = ScriptedService(unix=False), list[threading.Thread]()
    with (
        Server(service) as server,
        contextlib.closing(Relay(server.endpoints.lane_port)) as relay,
        contextlib.closing(Caller(server.address)) as caller,
    ):
        service.lane_port = relay.port
        relay.cut()
        stub, connect = caller.stub, caller.stub._connect

        def in_thread(deadline: float) -> Any:
            threads.append(threading.current_thread())
            return connect(deadline)

        monkeypatch.setattr(stub, "_connect", in_thread)
        until(lambda: caller.call(EXISTS) == EXISTING and stub._link._lane_failures >= 2)
        relay.mend()
        until(lambda: caller.call(EXISTS) == EXISTING and bool(stub._idle))
    assert threading.current_thread() not in threads[1:]


# --- a process that stops ----------------------------------------------------------------------

STOPPABLE = """
import sys
from tests.conformance.rpc_peers import ScriptedService, Server
with Server(ScriptedService(lane=sys.argv[1] == "lane")) as server:
    print(server.address, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("carrier", ["lane", "grpc"])
def test_a_stopped_master_costs_no_more_than_the_deadline(carrier: str) -> None:
    command = [sys.executable, "-c", STOPPABLE, carrier]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout is not None
        try:
            caller = Caller(process.stdout.readline().strip())
            with contextlib.closing(caller):
                assert caller.call(EXISTS) == EXISTING
                os.kill(process.pid, signal.SIGSTOP)
                os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
                for _ in range(2):
                    started = uptime()
                    # A new connection may be given up just before the deadline: then no master
                    # was reached, else it did not answer.
                    with pytest.raises((DeadlineExceededError, MasterUnreachableError)):
                        caller.call(EXISTS, timeout_s=0.3)
                    assert 0.29 < uptime() - started < 3.0
                os.kill(process.pid, signal.SIGCONT)
                assert caller.call(EXISTS) == EXISTING
        finally:
            process.kill()


# --- strangers on the lane ---------------------------------------------------------------------


def refused(server: Server) -> int:
    return server.run(lambda: server.carriers.lane.stats.rejected)


def still_serves(server: Server) -> None:
    with contextlib.closing(Caller(server.address)) as caller:
        assert caller.call(EXISTS) == EXISTING


def call_frame(call_id: int, request: Any = EXISTS) -> bytes:
    name = type(request).__name__.encode()
    return frame(call_id, CALL, name, encode_request(request))


@pytest.mark.parametrize(
    ("token", "sent", "code"),
    [
        (None, struct.pack("<I", 2**32 - 1), "protocol"),
        (None, call_frame(1), "protocol"),
        (b"wrong" * 3, b"", "permission_denied"),
        (b"\xff", b"", "protocol"),
        (b"x" * 256, b"", "protocol"),
        (b"", struct.pack("<I", 2**32 - 1), "protocol"),
        (b"", frame(2, REPLY, b"", b""), "protocol"),
    ],
    ids=["4 GiB", "no hello", "wrong token", "no name", "long name", "later 4 GiB", "no call"],
)
def test_who_breaks_the_rules_is_refused_at_once(
    lane_server: Server, token: bytes | None, sent: bytes, code: str
) -> None:
    """``token``: what follows the right one, or a wrong one."""
    if token is not None and token != b"wrong" * 3:
        token = lane_server.endpoints.lane_token + token
    with RawLane(lane_server.endpoints, token=token) as raw:
        raw.sock.sendall(sent)
        answers = list(iter(raw.next, None))
    assert decode_error(answers[-1][3]).code == code
    assert lane_server.service.asked == []
    assert refused(lane_server) == 1
    still_serves(lane_server)


def test_a_silent_connection_is_closed() -> None:
    settings = LaneSettings(hello_timeout_s=0.05)
    with Server(ScriptedService(), settings=settings) as server, RawLane(server.endpoints) as raw:
        answer = raw.next()
        assert answer is not None
        assert decode_error(answer[3]).code == "protocol"
        assert raw.next() is None


@pytest.mark.parametrize(
    ("name", "payload"), [(b"Nonsense", b""), (b"Exists", b"\xff\xff\xff"), (b"\xff" * 255, b"")]
)
def test_a_call_that_cannot_be_read_is_answered_with_an_error(
    lane_server: Server, name: bytes, payload: bytes
) -> None:
    with RawLane(lane_server.endpoints, token=lane_server.endpoints.lane_token) as raw:
        assert raw.next() is not None
        raw.sock.sendall(frame(3, CALL, name, payload) + call_frame(4))
        answer = raw.next()
        assert answer is not None
        assert answer[:2] == (3, ERROR)
        assert decode_error(answer[3]).code == "protocol"
        after = raw.next()
        assert after is not None
        assert after[:2] == (4, REPLY)


def test_one_call_of_a_connection_waits_at_a_time(lane_server: Server) -> None:
    service = lane_server.service
    service.answers[calls.PutStart] = service.wait
    with RawLane(lane_server.endpoints, token=lane_server.endpoints.lane_token) as raw:
        assert raw.next() is not None
        raw.sock.sendall(call_frame(1, PUT_START) + call_frame(2, PUT_START))
        for number in (1, 2):
            service.until(lambda: bool(service.waiting))
            still_serves(lane_server)  # others are served meanwhile; what follows is not looked at
            assert service.count(calls.PutStart) == number
            lane_server.release(GRANTS)
            answer = raw.next()
            assert answer is not None
            assert answer[:2] == (number, REPLY)


def test_a_frame_must_be_complete_in_time() -> None:
    with Server(ScriptedService(), settings=LaneSettings(frame_timeout_s=0.5)) as server:
        with RawLane(server.endpoints, token=server.endpoints.lane_token) as raw:
            assert raw.next() is not None
            for number in range(1, 9):  # there is a part of a frame all the time
                one, half = call_frame(number), len(call_frame(number)) // 2
                raw.sock.sendall(one[half if number > 1 else 0 :] + one[:half])
                time.sleep(0.1)
                answer = raw.next()
                assert answer is not None
                assert answer[1] == REPLY
            answer = raw.next()
            assert answer is not None
            assert decode_error(answer[3]).code == "protocol"
            assert raw.next() is None
        still_serves(server)


def test_frames_that_are_not_complete_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_server_module, "ARRIVING_BYTES_MAX", 3 * REQUEST_BYTES_MAX)
    largest = frame(1, CALL, b"Exists", bytes(REQUEST_BYTES_MAX))
    with Server(ScriptedService()) as server, contextlib.ExitStack() as stack:
        token = server.endpoints.lane_token
        raws = [stack.enter_context(RawLane(server.endpoints, token=token)) for _ in range(5)]
        for count, raw in enumerate(raws):
            assert raw.next() is not None
            raw.sock.sendall(largest[:-1])
            arriving = min(count + 1, 2)
            until(lambda: server.run(lambda: len(server.carriers.lane.arriving)) == arriving)  # noqa: B023
        assert refused(server) == 3
        raws[-1].sock.sendall(largest[-1:])
        answer = raws[-1].next()
        assert answer is not None
        assert answer[:2] == (1, ERROR), "zeros are no Exists"


def test_calls_of_a_client_that_is_gone_are_cancelled(lane_server: Server) -> None:
    service = lane_server.service
    service.answers[calls.PutStart] = service.wait
    with RawLane(lane_server.endpoints, token=lane_server.endpoints.lane_token) as raw:
        raw.sock.sendall(call_frame(1, PUT_START))
        service.until(lambda: bool(service.waiting))
    service.until(service.waiting[0].done)
    assert service.waiting[0].cancelled()


def test_a_client_that_does_not_read_is_cut() -> None:
    service = ScriptedService()
    service.answers[calls.Exists] = calls.ExistsReply(bytes(1 << 20))
    with Server(service, settings=LaneSettings(stall_timeout_s=0.1)) as server:
        with RawLane(server.endpoints, token=server.endpoints.lane_token) as raw:
            assert raw.next() is not None
            raw.sock.setblocking(False)
            deadline = uptime() + 10
            with contextlib.suppress(ConnectionError):
                while uptime() < deadline:
                    with contextlib.suppress(BlockingIOError):
                        raw.sock.send(call_frame(1))
        assert server.run(lambda: server.carriers.lane.stats.stalled) == 1
        # Reading stopped long before: the replies that were computed are those that fit.
        assert service.count(calls.Exists) < 100
        still_serves_with(server, service)


def test_of_the_clients_that_do_not_read_the_first_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_server_module, "UNREAD_BYTES_MAX", 20 << 20)
    service = ScriptedService()
    service.answers[calls.Exists] = calls.ExistsReply(bytes(15 << 20))
    with Server(service) as server, contextlib.ExitStack() as stack:
        for count in range(3):
            raw = stack.enter_context(RawLane(server.endpoints, token=server.endpoints.lane_token))
            assert raw.next() is not None
            raw.sock.sendall(call_frame(1))
            until(lambda: server.run(lambda: server.carriers.lane.stats.stalled) == count)  # noqa: B023
        still_serves_with(server, service)


def still_serves_with(server: Server, service: ScriptedService) -> None:
    service.answers[calls.Exists] = EXISTING
    still_serves(server)


def test_a_client_that_reads_late_gets_everything() -> None:
    service = ScriptedService()
    service.answers[calls.Exists] = calls.ExistsReply(bytes(1 << 20))
    with Server(service) as server:
        token = server.endpoints.lane_token
        with RawLane(server.endpoints, token=token) as raw:
            assert raw.next() is not None
            raw.sock.sendall(b"".join(call_frame(i) for i in range(1, 41)))
            answers = [raw.next() for _ in range(40)]
            assert [answer[0] for answer in answers if answer is not None] == list(range(1, 41))


def test_too_many_connections_are_told_so() -> None:
    settings = LaneSettings(connections_max=2, limited_by="open files")
    with Server(ScriptedService(), settings=settings) as server:
        with contextlib.ExitStack() as stack:
            for _ in range(2):
                raw = stack.enter_context(
                    RawLane(server.endpoints, token=server.endpoints.lane_token)
                )
                assert raw.next() is not None
            third = stack.enter_context(RawLane(server.endpoints))
            answer = third.next()
            assert answer is not None
            refusal = decode_error(answer[3])
            assert type(refusal) is BusyError
            assert "follows from the master's open files" in refusal.advice
            assert third.next() is None
        still_serves(server)


def test_connections_that_say_nothing_make_room() -> None:
    """A stranger that opens a connection has no right to it until it has said who it is."""
    with Server(ScriptedService(), settings=LaneSettings(connections_max=2)) as server:
        with contextlib.ExitStack() as stack:
            silent = [stack.enter_context(RawLane(server.endpoints)) for _ in range(5)]
            honest = stack.enter_context(
                RawLane(server.endpoints, token=server.endpoints.lane_token)
            )
            assert honest.next() is not None
            more = [stack.enter_context(RawLane(server.endpoints)) for _ in range(5)]
            honest.sock.sendall(call_frame(1))
            answer = honest.next()
            assert answer is not None
            assert answer[0] == 1
            for each in (*silent, *more[:-1]):
                each.sock.settimeout(5)
                with contextlib.suppress(ConnectionResetError):
                    assert each.sock.recv(1) == b""
            assert server.run(lambda: server.carriers.lane.stats.rejected) == 9
        still_serves(server)
