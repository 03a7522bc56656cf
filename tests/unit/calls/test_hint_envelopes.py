"""Which envelopes are taken, and what their actions mean."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.calls import HintAction
from kvstore.calls.hint_envelopes import ACTIONS_MAX, parse_envelope
from kvstore.errors import InvalidArgumentError
from kvstore.limits import PIN_KEYS_MAX, PIN_MS_MAX, RETAIN_MS_MAX


def action(kind: str = "kv.retain", version: str = "1.0", **payload: Any) -> dict[str, Any]:
    return {"action_id": "a", "action_type": kind, "action_version": version, "payload": payload}


def envelope(*actions: object) -> dict[str, Any]:
    return {"protocol_version": "0.1", "message_id": "m", "actions": [*actions]}


@pytest.mark.parametrize(
    ("given", "expected", "duration_ms"),
    [
        (action("kv.retain", ttl_ms=5_000), HintAction.RETAIN, 5_000),
        (action("kv.retain"), HintAction.RETAIN, RETAIN_MS_MAX),
        (action("kv.retain", ttl_ms=10**400), HintAction.RETAIN, RETAIN_MS_MAX),
        (action("tool_wait", resume_ms=100_000), HintAction.RETAIN, 200_000),
        (action("tool_wait", resume_ms=1), HintAction.RETAIN, 60_000),
        (action("tool_wait"), HintAction.RETAIN, 180_000),
        (action("kv.pin", ttl_ms=10**12), HintAction.NONE, PIN_MS_MAX),
        (action("kv.release"), HintAction.RELEASE, 0),
        (action("session_end", "1"), HintAction.RELEASE, 0),
        (action("branch_over", "1.7"), HintAction.RELEASE, 0),
        (action("kv.demote"), HintAction.DEMOTE, 0),
        (action("kv.prefetch", destination="hbm"), HintAction.PREFETCH, 0),
    ],
)
def test_each_action_and_signal(
    given: dict[str, Any], expected: HintAction, duration_ms: int
) -> None:
    (parsed,) = parse_envelope(envelope(given))
    assert (parsed.action_id, parsed.action, parsed.duration_ms) == ("a", expected, duration_ms)
    assert (parsed.ignored_reason, parsed.keys) == ("", ())
    given_ms = given["payload"].get("ttl_ms", 0)
    assert parsed.clipped == (given_ms > duration_ms)
    assert parsed.is_pin == (given["action_type"] == "kv.pin")
    as_objects = SimpleNamespace(**envelope(SimpleNamespace(**given)))
    assert parse_envelope(as_objects) == [parsed], "as vLLM passes it"


def test_chains_are_named_by_their_last_keys() -> None:
    (parsed,) = parse_envelope(envelope(action(keys=["00fF", "01"], block_hashes=[1])))
    assert parsed.keys == (b"\x00\xff", b"\x01")


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (action("kv.fetch"), "shared"), (action("kv.share"), "shared"),
        (action("kv.compress", keys=7), "unknown"), (action(version="2.0"), "version"),
        (action(block_hashes=[1 << 63]), "block_hashes"), (action(session="s"), "session"),
    ],
)  # fmt: skip
def test_what_the_store_cannot_do_is_ignored_and_said_so(
    given: dict[str, Any], reason: str
) -> None:
    ignored, other = parse_envelope(envelope(given, action("kv.demote")))
    assert reason in ignored.ignored_reason
    assert not ignored.is_pin
    assert other.action is HintAction.DEMOTE


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        (None, "protocol_version"), ({"protocol_version": "0.1"}, "message_id"),
        (envelope() | {"actions": None}, "actions"), (envelope() | {"message_id": 7}, "message_id"),
        (envelope(*[action()] * (ACTIONS_MAX + 1)), "actions"),
        (envelope(*[action(keys=["00"] * PIN_KEYS_MAX), action(keys=["00"])]), "actions"),
        (envelope(action(), 5), "actions.1.action_id"),
        (envelope(action("x" * 300)), "actions.0.action_type"),
        (envelope(action() | {"action_version": 1}), "actions.0.action_version"),
        (envelope(action() | {"payload": []}), "actions.0.payload"),
        (envelope(action(keys="00")), "actions.0.payload.keys"),
        (envelope(action(keys=["0"])), "actions.0.payload.keys"),
        (envelope(action(ttl_ms=0)), "actions.0.payload.ttl_ms"),
        (envelope(action(ttl_ms=1.5)), "actions.0.payload.ttl_ms"),
        (envelope(action("tool_wait", resume_ms="1")), "actions.0.payload.resume_ms"),
        (envelope(action("kv.pin")), "actions.0.payload.ttl_ms"),
    ],
)  # fmt: skip
def test_a_malformed_envelope_is_refused_with_the_name_of_the_field(
    wrong: object, field: str
) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        parse_envelope(wrong)
    assert str(refused.value).startswith(f"{field}: ")
