"""When a call is sent again and when it is given up, without a socket and with its own clock."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import calls
from kvstore.calls import JoinReply
from kvstore.client.rpc.retries import (
    BACKOFF_FIRST_S,
    BACKOFF_MAX_S,
    REFUSALS_MAX,
    SILENCE_S,
    Action,
    Attempts,
    Backoff,
    ConnectionBrokenError,
    FindLeader,
    JoinAt,
    LaneUnreachableError,
    MasterConnectionState,
    ProbePort,
    SendOnGrpc,
    SendOnLane,
    TokenRefusedError,
    attempts,
    deadline_error,
    parse_addresses,
)
from kvstore.errors import (
    BusyError,
    DeadlineExceededError,
    EtcdUnreachableError,
    InvalidArgumentError,
    KVStoreError,
    MasterUnreachableError,
    NoSpaceError,
    NotLeaderError,
    PermissionDeniedError,
)
from kvstore.limits import Key, Namespace
from kvstore.wire import port_probe
from kvstore.wire.messages import CALLS

EXISTS = CALLS[calls.Exists]
PUT_START = CALLS[calls.PutStart]
STATUS = CALLS[calls.Status]
IDEMPOTENT = {
    "Join", "MatchPrefix", "Lookup", "Exists", "Renew", "Remove", "Clear", "DescribeSegments",
    "ReportFailure", "ReportCorrupt", "Status", "ListObjects", "StatObject", "Drain", "Pin",
    "Traffic", "Unpin", "Hint", "Chains", "Blocks", "Release",
}  # fmt: skip


Answer = Callable[[Action], bytes | str | Exception]


class World:
    """A clock, a link, and a master that can be there or not."""

    def __init__(self, address: str = "m:1", *, lane: bool = True) -> None:
        self.now = 100.0
        self.epoch = 1
        self.link = MasterConnectionState(address, lane=lane, rng=random.Random(1))
        self.story: list[str] = []
        self.waits: list[Backoff] = []

    def joined(self) -> JoinReply:
        return JoinReply(self.epoch, 5, "", b"token%d" % self.epoch, 1, 1, "0")

    def run(
        self,
        call: Any,
        answer: Answer,
        *,
        timeout_s: float = 10.0,
        broken: ConnectionBrokenError | NotLeaderError | None = None,
    ) -> bytes:
        """Drives a flow; ``answer`` says what comes of each step."""
        flow: Attempts = attempts(self.link, call, self.now + timeout_s, lambda: self.now, broken)
        try:
            step = next(flow)
            for _ in range(10_000):
                outcome = self._do(step, answer)
                if isinstance(outcome, Exception):
                    step = flow.throw(outcome)
                else:
                    step = flow.send(outcome)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]  # bytes, by the type of Attempts
        raise AssertionError("the flow does not end")

    def _do(self, step: Action, answer: Answer) -> bytes | str | Exception:
        self.now += 0.001
        if isinstance(step, Backoff):
            assert step.seconds > 0
            self.now += step.seconds
            self.waits.append(step)
            return b""
        outcome = answer(step)
        if isinstance(outcome, str):
            self.story.append(type(step).__name__)
            return outcome
        if isinstance(step, FindLeader) and isinstance(outcome, bytes):
            self.story.append("FindLeader")
            return outcome.decode()
        self.story.append(type(step).__name__ + ("!" if isinstance(outcome, Exception) else ""))
        if isinstance(step, JoinAt) and not isinstance(outcome, Exception):
            self.link.accept(self.joined(), step.address)
        return outcome


def script(*outcomes: bytes | str | Exception) -> Answer:
    rest = list(outcomes)
    return lambda step: rest.pop(0)


def gone(*, sent: bool = False) -> ConnectionBrokenError:
    return ConnectionBrokenError("connection refused", sent=sent)


def test_the_first_call_joins_and_takes_the_lane() -> None:
    world = World()
    assert world.run(EXISTS, script(b"", b"reply")) == b"reply"
    assert world.run(EXISTS, script(b"again")) == b"again"
    assert world.story == ["JoinAt", "SendOnLane", "SendOnLane"]


def test_a_call_of_operators_needs_no_join() -> None:
    world = World()
    assert world.run(STATUS, script(b"reply")) == b"reply"
    assert world.story == ["SendOnGrpc"]


def test_a_last_attempt_that_is_late_does_not_hide_that_no_master_was_there() -> None:
    world = World()
    with pytest.raises(MasterUnreachableError) as caught:
        world.run(STATUS, script(gone(), deadline_error(world.link, "Status")))
    assert "m:1: connection refused" in caught.value.message
    with pytest.raises(DeadlineExceededError):
        world.run(STATUS, script(deadline_error(world.link, "Status")))


def test_without_a_call_the_flow_only_joins() -> None:
    world = World()
    world.run(None, script(b""))
    assert world.story == ["JoinAt"]
    assert world.link.current


@pytest.mark.parametrize("row", CALLS.values(), ids=lambda row: row.name)
def test_what_may_be_sent_twice(row: Any) -> None:
    assert row.idempotent == (row.name in IDEMPOTENT)


def test_an_idempotent_call_is_sent_again_after_a_new_join() -> None:
    world = World()
    world.run(EXISTS, script(b"", b"reply"))
    assert world.run(EXISTS, script(gone(sent=True), b"", b"reply")) == b"reply"
    assert world.story[2:] == ["SendOnLane!", "JoinAt", "SendOnLane"]


def test_an_unsent_call_is_sent_again_whatever_it_is() -> None:
    world = World()
    assert world.run(PUT_START, script(b"", gone(sent=False), b"", b"reply")) == b"reply"


def test_a_call_that_the_same_master_may_have_done_is_not_sent_again() -> None:
    world = World()
    with pytest.raises(MasterUnreachableError, match="may have executed the call") as caught:
        world.run(PUT_START, script(b"", gone(sent=True), b""))
    assert caught.value.fields["sent"] == 1
    assert world.story == ["JoinAt", "SendOnLane!", "JoinAt"]


def test_a_call_is_sent_again_when_the_master_that_may_have_done_it_is_gone() -> None:
    world = World()
    world.run(EXISTS, script(b"", b"reply"))

    def answer(step: Action) -> bytes | Exception:
        if world.epoch == 1:
            world.epoch = 2
            return gone(sent=True)
        return b"reply"

    assert world.run(PUT_START, answer) == b"reply"


def test_an_attempt_before_the_flow_counts() -> None:
    world = World()
    world.run(EXISTS, script(b"", b"reply"))
    with pytest.raises(MasterUnreachableError, match="may have executed the call"):
        world.run(PUT_START, script(b""), broken=gone(sent=True))


def test_no_master_until_the_deadline() -> None:
    world = World("a:1,b:2")
    start = world.now
    with pytest.raises(MasterUnreachableError) as caught:
        world.run(EXISTS, lambda step: gone(), timeout_s=5.0)
    assert 4.9 < world.now - start <= 5.01
    fields = caught.value.fields
    assert fields["addresses"] == "a:1,b:2"
    assert fields["waited_ms"] == pytest.approx(5_000, abs=50)
    assert "kvstore-master --host a --port 1" in caught.value.advice
    assert "a:1: connection refused; b:2: connection refused" in caught.value.message


def test_every_master_is_tried_in_turn() -> None:
    world = World("a:1,b:2,c:3")
    tried: list[str] = []

    def answer(step: Action) -> bytes | Exception:
        if isinstance(step, JoinAt):
            tried.append(step.address)
            return gone() if step.address != "c:3" else b""
        return b"reply"

    assert world.run(EXISTS, answer) == b"reply"
    assert tried == ["a:1", "b:2", "c:3"]
    assert world.link.address == "c:3"


def test_a_master_that_stands_by_is_passed_over() -> None:
    world = World("a:1,b:2")
    assert world.run(EXISTS, script(BusyError("standby"), b"", b"reply")) == b"reply"


def test_a_refused_join_is_final() -> None:
    with pytest.raises(PermissionDeniedError):
        World().run(EXISTS, script(PermissionDeniedError("no")))


def test_a_master_that_answers_an_error_is_not_asked_again() -> None:
    world = World()
    with pytest.raises(NoSpaceError):
        world.run(PUT_START, script(b"", NoSpaceError("full")))
    with pytest.raises(BusyError):
        world.run(PUT_START, script(BusyError("busy")))


def test_silence_until_the_deadline_is_that() -> None:
    world = World()
    with pytest.raises(DeadlineExceededError):
        world.run(EXISTS, script(deadline_error(world.link, "Join")))


def test_an_unreachable_lane_is_retried_after_longer_and_longer_pauses() -> None:
    world = World()
    unreachable = LaneUnreachableError("filtered")
    assert world.run(EXISTS, script(b"", unreachable, b"reply")) == b"reply"
    world.run(EXISTS, script(b"reply"))
    assert world.story == ["JoinAt", "SendOnLane!", "SendOnGrpc", "SendOnGrpc"]
    link, now = MasterConnectionState("m:1", lane=True), 0.0
    for pause_s in (1, 2, 4, 8, 16, 30, 30):
        link.on_lane_failed(now, unreachable)
        assert not link.should_retry_lane(now + pause_s - 0.1)
        now += pause_s
        assert [link.should_retry_lane(now) for _ in range(2)] == [True, False], "one thread"
    world.link.on_lane_connected()
    world.run(EXISTS, script(b"reply"))
    assert world.story[-1] == "SendOnLane"


def test_a_lane_with_another_token_is_tried_at_once() -> None:
    world = World()
    world.run(EXISTS, script(b"", LaneUnreachableError("filtered"), b"reply"))
    world.epoch = 2
    world.run(EXISTS, script(gone(), b"", b"reply"))
    assert world.story[3:] == ["SendOnGrpc!", "JoinAt", "SendOnLane"]


def test_a_refused_token_means_a_new_master() -> None:
    world = World()
    assert world.run(EXISTS, script(b"", TokenRefusedError("old"), b"", b"reply")) == b"reply"
    assert world.story == ["JoinAt", "SendOnLane!", "JoinAt", "SendOnLane"]


def test_a_lane_that_refuses_every_token_is_not_our_masters() -> None:
    world = World()

    def answer(step: Action) -> bytes | Exception:
        return TokenRefusedError("old") if isinstance(step, SendOnLane) else b"reply"

    assert world.run(EXISTS, answer) == b"reply"
    assert world.story.count("SendOnLane!") == REFUSALS_MAX + 1
    assert world.story[-1] == "SendOnGrpc"


def test_without_a_lane_everything_goes_over_grpc() -> None:
    world = World(lane=False)
    world.run(EXISTS, script(b"", b"reply"))
    assert world.story == ["JoinAt", "SendOnGrpc"]


def test_an_old_connection_that_breaks_does_not_undo_a_new_join() -> None:
    world = World()
    world.run(EXISTS, script(b"", b"reply"))
    world.link.accept(world.joined(), world.link.address)
    old = gone(sent=True)
    old.generation = world.link.generation - 1
    assert world.run(EXISTS, script(b"reply"), broken=old) == b"reply"
    assert world.story[2:] == ["SendOnLane"]


def stands_by(leader: str = "") -> NotLeaderError:
    return NotLeaderError("stands by", leader=leader)


def joins(world: World, found: Callable[[JoinAt], bytes | Exception]) -> tuple[list[str], Any]:
    """Where it joined, and what answers so."""
    tried: list[str] = []

    def answer(step: Action) -> bytes | Exception:
        if isinstance(step, JoinAt):
            tried.append(step.address)
            return found(step)
        return b"reply"

    return tried, answer


def test_a_master_that_stands_by_says_who_leads() -> None:
    world = World("a:1,b:2")
    tried, answer = joins(world, lambda step: b"" if step.address == "c:3" else stands_by("c:3"))
    start = world.now
    assert world.run(EXISTS, answer) == b"reply"
    assert tried == ["a:1", "c:3"]
    assert world.now - start < 0.01, "there is nothing to wait for"
    assert world.link.address == "c:3"


def test_whom_we_were_sent_to_may_be_gone() -> None:
    world = World("a:1,b:2")
    tried, answer = joins(
        world,
        lambda step: {"a:1": stands_by("c:3"), "c:3": gone()}.get(step.address, b""),
    )
    assert world.run(EXISTS, answer) == b"reply"
    assert tried[:2] == ["a:1", "c:3"]
    assert tried[-1] == "b:2"


def test_two_that_name_each_other_are_not_asked_without_a_pause() -> None:
    world = World("a:1,b:2")
    tried, answer = joins(world, lambda step: stands_by({"a:1": "b:2"}.get(step.address, "a:1")))
    with pytest.raises(MasterUnreachableError, match="stands by"):
        world.run(EXISTS, answer, timeout_s=5.0)
    assert len(tried) < 40


def test_a_leader_that_steps_down_during_a_call_is_left_for_the_next_one() -> None:
    """It may have done the call, but what it knew is gone with it: so any call is sent again."""
    for call in (EXISTS, PUT_START, STATUS):
        world = World("a:1,b:2")
        world.run(EXISTS, script(b"", b"reply"))
        world.story.clear()

        def answer(step: Action, world: World = world) -> bytes | Exception:
            if world.link.address == "a:1":
                return stands_by("b:2")
            world.epoch = 2
            return b"reply"

        assert world.run(call, answer) == b"reply"
        assert world.link.address == "b:2"


def test_a_refusal_before_the_flow_is_followed() -> None:
    world = World("a:1,b:2")
    world.run(EXISTS, script(b"", b"reply"))
    tried, answer = joins(world, lambda step: b"")
    assert world.run(EXISTS, answer, broken=stands_by("c:3")) == b"reply"
    assert tried == ["c:3"]


def test_a_silent_one_of_several_masters_is_left() -> None:
    world = World("a:1,b:2")
    world.run(EXISTS, script(b"", b"reply"))
    silent = ConnectionBrokenError("no answer in time", sent=True, silent=True)
    tried, answer = joins(world, lambda step: b"")
    assert world.run(EXISTS, answer, broken=silent) == b"reply"
    assert tried == ["b:2"]


def test_how_long_silence_is_borne() -> None:
    exists = calls.Exists(Namespace("n"), [Key(b"k")])
    put = calls.Allocate(Namespace("n"), 1, 3_000, "h")
    alone, several = (
        MasterConnectionState("a:1", lane=True),
        MasterConnectionState("a:1,b:2", lane=True),
    )
    in_etcd = MasterConnectionState("etcd://e:1", lane=True)
    assert alone.failover_timeout_s(exists) == alone.failover_timeout_s(put) == math.inf
    for link in (several, in_etcd):
        assert link.failover_timeout_s(exists) == SILENCE_S
        assert link.failover_timeout_s(put) == SILENCE_S + 3.0
        assert link.failover_timeout_s(calls.PutEnd(1, [1])) > SILENCE_S


def test_etcd_says_who_leads() -> None:
    world = World("etcd://e:2379")
    assert world.run(EXISTS, script(b"m:1", b"", b"reply")) == b"reply"
    assert world.story == ["FindLeader", "JoinAt", "SendOnLane"]
    assert world.link.address == "m:1"
    assert world.run(STATUS, script(b"reply")) == b"reply"


def test_etcd_is_asked_again_when_the_leader_is_gone() -> None:
    world = World("etcd://e:2379")
    world.run(EXISTS, script(b"m:1", b"", b"reply"))
    world.story.clear()
    no_etcd = EtcdUnreachableError("no")
    answers = script(gone(), gone(), b"m:1", gone(), b"", no_etcd, b"n:2", b"", b"reply")
    assert world.run(EXISTS, answers) == b"reply"
    assert world.story == [
        "SendOnLane!", "JoinAt!", "FindLeader", "JoinAt!",
        "FindLeader", "FindLeader!", "FindLeader", "JoinAt", "SendOnLane",
    ]  # fmt: skip
    assert world.link.address == "n:2"


def test_a_leader_that_another_call_gives_up_meanwhile_is_joined_by_its_address() -> None:
    """Two threads of one client. What one forgets must not leave the other without an address."""

    class Shared(MasterConnectionState):
        def follow(self, leader: str) -> None:
            super().follow(leader)
            self.next_address(leader)  # by the other thread, which found it dead

    link = Shared("etcd://e:2379", lane=True)
    flow = attempts(link, EXISTS, 10.0, lambda: 0.0)
    assert isinstance(next(flow), FindLeader)
    step = flow.send("m:1")
    assert isinstance(step, JoinAt)
    assert step.address == "m:1"


def test_without_etcd_a_call_ends_at_its_deadline() -> None:
    world = World("etcd://e:2379/p?ca=/f")
    start = world.now
    with pytest.raises(MasterUnreachableError, match="no etcd") as caught:
        world.run(EXISTS, lambda step: EtcdUnreachableError("no etcd"), timeout_s=5.0)
    assert world.now - start <= 5.01
    assert caught.value.fields["addresses"] == "etcd://e:2379/p"


@given(
    events=st.lists(
        st.sampled_from(["ok", "unsent", "sent", "lane", "token", "busy", "late", "stands by"])
    ),
    idempotent=st.booleans(),
    addresses=st.sampled_from(["a:1", "a:1,b:2", "etcd://e"]),
)
def test_every_flow_ends_with_a_reply_or_a_typed_error_in_time(
    events: list[str], idempotent: bool, addresses: str
) -> None:
    world = World(addresses)
    rest = list(events)
    doubtful = False

    def answer(step: Action) -> bytes | Exception:
        nonlocal doubtful
        event = rest.pop(0) if rest else "unsent"
        on_lane = isinstance(step, SendOnLane)
        if not isinstance(step, JoinAt | FindLeader):
            # What may have been done by a master that is still the same is never sent again.
            assert idempotent or not doubtful
            doubtful = event in ("sent", "stands by")
        outcomes: dict[str, bytes | Exception] = {
            "ok": b"reply",
            "unsent": gone(),
            "sent": gone(sent=True),
            "lane": LaneUnreachableError("filtered") if on_lane else gone(),
            "token": TokenRefusedError("old") if on_lane else gone(),
            "busy": BusyError("busy"),
            "late": deadline_error(world.link, "call"),
            "stands by": stands_by("b:2"),
        }
        return outcomes[event]

    start = world.now
    try:
        world.run(EXISTS if idempotent else PUT_START, answer, timeout_s=3.0)
    except KVStoreError:
        pass
    assert world.now - start < 3.1


@given(attempt=st.integers(1, 10_000), seed=st.integers())
def test_backoff_grows_and_stays_bounded(attempt: int, seed: int) -> None:
    link = MasterConnectionState("m:1", lane=True, rng=random.Random(seed))
    longest = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2 ** min(attempt - 1, 16))
    assert longest / 2 <= link.backoff_s(attempt) <= longest


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a", ("a:50001",)),
        ("a:1, [::1]:2", ("a:1", "[::1]:2")),
        ("[::1]", ("[::1]:50001",)),
    ],
)
def test_addresses(text: str, expected: tuple[str, ...]) -> None:
    assert parse_addresses(text) == expected


@pytest.mark.parametrize("text", ["", "a:1,", "a:x", "http://a:1"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError):
        parse_addresses(text)


def test_steps_are_what_drivers_know() -> None:
    assert set(Action.__args__) == {FindLeader, JoinAt, SendOnLane, SendOnGrpc, ProbePort, Backoff}


def test_a_late_failure_does_not_take_the_link_away_from_whom_it_has_joined_since() -> None:
    """Found by the simulation: the next call went to a master that stands by, and was in doubt."""
    world = World()
    link = MasterConnectionState("a:1,b:1", lane=True)
    link.accept(world.joined(), "a:1")
    before = link.generation
    link.on_master_lost(before)
    link.accept(world.joined(), "a:1")
    link.on_master_lost(before)  # another call's, made before
    link.next_address("a:1")
    link.follow("b:1")
    assert link.address == "a:1"


def test_who_has_let_us_in_is_used_although_another_call_has_turned_away_meanwhile() -> None:
    world = World()
    link = MasterConnectionState("a:1,b:1", lane=True)
    link.next_address("a:1")  # while a join is under way there
    link.accept(world.joined(), "a:1")
    assert link.address == "a:1"


def test_what_was_sent_to_a_master_before_is_sent_again_to_the_one_joined_meanwhile() -> None:
    """Found by the simulation: the doubt was put down to the epoch that another call had joined."""
    world = World("a:1,b:1")
    world.link.accept(world.joined(), "a:1")
    tried: list[str] = []

    def answer(step: Action) -> bytes | Exception:
        tried.append(world.link.address)
        if len(tried) == 1:  # and while it is under way, another call finds the new leader
            world.link.on_master_lost(world.link.generation)
            world.epoch = 2
            world.link.accept(world.joined(), "b:1")
            return stands_by("")
        return b"reply"

    assert world.run(PUT_START, answer) == b"reply"
    assert tried == ["a:1", "b:1"]


# --- another port than a master's ----------------------------------------------------------------


def not_grpc() -> ConnectionBrokenError:
    return ConnectionBrokenError("failed parsing http/2", sent=True, strange=True)


def test_another_port_of_ours_is_named_at_once() -> None:
    world = World()
    with pytest.raises(MasterUnreachableError, match=r"m:1: that is the lane") as caught:
        world.run(EXISTS, script(not_grpc(), port_probe.LANE))
    assert "gRPC port" in caught.value.advice
    assert world.now < 101, "no second attempt would help"


def test_it_is_named_too_if_the_first_call_needs_no_join() -> None:
    world = World()
    with pytest.raises(MasterUnreachableError, match="that is a port for TLS") as caught:
        world.run(STATUS, script(not_grpc(), port_probe.TLS))
    assert "KVSTORE_AUTH=FILE" in caught.value.advice
    assert world.story == ["SendOnGrpc!", "ProbePort"]


def test_another_program_may_make_room_for_a_master() -> None:
    world = World()
    assert world.run(EXISTS, script(not_grpc(), "", b"", b"reply")) == b"reply"
    assert world.story == ["JoinAt!", "ProbePort", "JoinAt", "SendOnLane"]


def test_of_several_masters_the_others_are_tried() -> None:
    world = World("m:1,m:2")
    assert world.run(EXISTS, script(not_grpc(), port_probe.HTTP, b"", b"reply")) == b"reply"
    assert world.link.address == "m:2"


def test_a_master_that_ends_meanwhile_is_no_other_port() -> None:
    world = World()
    assert world.run(EXISTS, script(not_grpc(), port_probe.GRPC, b"", b"reply")) == b"reply"


@pytest.mark.parametrize(
    ("address", "advice"),
    [
        ("127.0.0.1:7", "start kvstore-master --port 7,"),
        ("localhost:7", "start kvstore-master --port 7,"),
        ("m:7", "start kvstore-master --host m --port 7,"),
    ],
)
def test_the_advice_starts_a_master_where_nothing_listens(address: str, advice: str) -> None:
    world = World(address)
    with pytest.raises(MasterUnreachableError) as caught:
        world.run(EXISTS, lambda step: gone(), timeout_s=1)
    assert advice in caught.value.advice


def test_a_wait_says_why_once_it_is_long() -> None:
    world = World()
    with pytest.raises(MasterUnreachableError):
        world.run(EXISTS, lambda step: gone(), timeout_s=5)
    assert world.waits[0].reason == ""
    assert world.waits[-1].reason == "connection refused"
