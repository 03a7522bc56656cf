"""Whom to ask next."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvstore.proxy import instances as module
from kvstore.proxy.affinity import BLOCK_TOKENS, fingerprints
from kvstore.proxy.instances import InFlightRequest, Instance, Instances

PRINTS = fingerprints(range(2 * BLOCK_TOKENS), blocks_max=9)


def healthy(*addresses: str, prefix_affinity: bool = False) -> Instances:
    instances = Instances(prefix_affinity=prefix_affinity)
    for address in addresses:
        instances.add("decode", address)[0].checked("well")
    return instances


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> Iterator[Instances]:
    monkeypatch.setattr(module, "BREAKER_FAILURES", 2)
    monkeypatch.setattr(module, "BREAKER_OPEN_MS", 100)
    instances = healthy("a", "b", "c")
    yield instances
    check(instances)


def check(instances: Instances) -> None:
    for each in instances:
        assert instances.at(each.address, each.role) == [each]
        assert each.in_flight >= 0
        assert not each.draining or each.in_flight > 0, "a drained instance stays"


def choose(instances: Instances, now_ms: int = 0, **more: object) -> InFlightRequest:
    turn = instances.choose("decode", now_ms, **more)  # type: ignore[arg-type]
    assert turn is not None
    return turn


def at(instances: Instances, address: str) -> Instance:
    return instances.at(address)[0]


def test_the_least_busy_and_of_equals_the_one_chosen_longest_ago(three: Instances) -> None:
    turns = [choose(three) for _ in range(4)]
    assert [turn.instance.address for turn in turns] == ["a", "b", "c", "a"]
    turns[1].__exit__(None, None, None)
    assert choose(three).instance.address == "b"
    assert [each.in_flight for each in three] == [2, 1, 1]


def test_two_failed_checks_make_it_unhealthy_and_one_answer_well(three: Instances) -> None:
    a = at(three, "a")
    a.checked("ill")
    assert a.usable(0)
    a.checked("well")
    a.checked("refused")
    assert a.usable(0)
    a.checked("ill")
    assert not a.usable(0)
    a.checked("well")
    assert a.usable(0)


def late(instance: Instance, *times_ms: int) -> None:
    """Its health checks of these times found no answer."""
    for now_ms in times_ms:
        instance.on_request(now_ms)
        instance.checked("timeout")


def test_a_late_answer_does_not_count_while_requests_are_answered(three: Instances) -> None:
    a = at(three, "a")
    for now_ms in range(1_000, 60_000, 1_000):
        a.on_response(now_ms - 500)
        late(a, now_ms)
    assert a.usable(0)
    late(a, 60_000)
    assert a.usable(0)
    late(a, 61_000)  # the second since its last answer
    assert not a.usable(0)


def test_an_answered_request_is_a_health_check(three: Instances) -> None:
    a = at(three, "a")
    late(a, 1_000, 2_000)
    a.on_response(2_500)
    assert a.usable(0)


def test_who_says_himself_that_he_is_ill_is_not_well_by_answering(three: Instances) -> None:
    a = at(three, "a")
    for _ in range(2):
        a.checked("ill")
        a.on_response(1_000)
    assert not a.usable(0)
    a.checked("well")
    assert a.usable(0)


def test_several_in_a_row_do(three: Instances) -> None:
    a, b = at(three, "a"), at(three, "b")
    for now_ms in (0, 1, 2):
        a.on_connect_failed(now_ms, refused=True)
    for now_ms in (0, 4_999, 5_000):  # the first is too long ago to count
        b.on_connect_failed(now_ms, refused=True)
    assert {choose(three).instance.address for _ in range(4)} == {"b", "c"}


def test_when_no_decoder_is_healthy_all_are_asked(three: Instances) -> None:
    for each in three:
        late(each, 1_000, 2_000)
    turns = [choose(three) for _ in range(3)]
    assert [turn.instance.address for turn in turns] == ["a", "b", "c"]
    assert all(turn.forced for turn in turns)
    at(three, "b").on_response(3_000)
    turn = choose(three)
    assert (turn.instance.address, turn.forced) == ("b", False)
    # b is healthy: when it fails, the others are no better.
    assert three.choose("decode", 0, without=["b"]) is None


def test_the_last_resort_has_its_breakers_and_drains(three: Instances) -> None:
    for each in three:
        late(each, 1_000, 2_000)
    for _ in range(2):
        at(three, "a").breaker.failed(0)
    turn = choose(three, without=["a", "c"])
    three.drain(turn.instance)
    assert choose(three).instance.address == "c"
    assert three.choose("decode", 0, without=["c"]) is None


def test_a_prefiller_is_no_last_resort() -> None:
    instances = Instances()
    instances.add("prefill", "p")
    assert instances.choose("prefill", 0) is None


def test_who_keeps_failing_is_left_alone_and_then_tried_by_one(three: Instances) -> None:
    for _ in range(2):
        with choose(three, without=["b", "c"]) as turn:
            turn.failed(0)
    assert three.choose("decode", 99, without=["b", "c"]) is None
    probe = choose(three, 100, without=["b", "c"])
    assert probe.is_probe
    assert three.choose("decode", 100, without=["b", "c"]) is None
    probe.__exit__(None, None, None)  # its client left
    with choose(three, 100, without=["b", "c"]) as probe:
        probe.succeeded()
        assert not probe.is_probe
    assert not choose(three, 100, without=["b", "c"]).is_probe


def test_a_drained_one_goes_with_its_last_request(three: Instances) -> None:
    first, second = choose(three, without=["b", "c"]), choose(three, without=["b", "c"])
    three.drain(first.instance)
    assert three.choose("decode", 0, without=["b", "c"]) is None
    first.__exit__(None, None, None)
    assert three.at("a")
    second.__exit__(None, None, None)
    assert not three.at("a")


def test_affinity_prefers_who_had_the_prefix_within_its_slack(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "AFFINITY_SLACK", 1)
    instances = healthy("a", "b", prefix_affinity=True)
    turns = [choose(instances, prints=PRINTS) for _ in range(4)]
    # a has it; at two more than b it is too many, and then b has had it last.
    assert [turn.instance.address for turn in turns] == ["a", "a", "b", "b"]
    assert choose(instances).instance.address == "a"  # another prompt: nobody's
    check(instances)
