"""The lies of the hostile twin (``tests/support/twin.py``): every field has some."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore import calls
from kvstore.limits import TTL_MS_MAX, Key, Namespace
from kvstore.wire.messages import CALLS
from tests.support.twin import Theirs, lies, true_calls, true_join, true_messages

THEIRS = Theirs([b"their key"], ["theirs"], [4711], ["their node"], [b"u" * 16])


def test_every_call_is_there() -> None:
    assert {type(true) for true in true_calls()} == CALLS.keys()


@pytest.mark.parametrize(
    "true",
    [*true_calls(), *true_messages(), true_join("liar", "host")],
    ids=lambda true: type(true).__name__,
)
def test_each_field_has_lies(true: Any) -> None:
    fields = {lie.field.partition(".")[0] for lie in lies(true, THEIRS)}
    assert fields == set(true._fields)


def test_a_lie_is_one_field() -> None:
    true = calls.Lookup(Namespace("mine"), [Key(b"key")])
    for lie in lies(true, THEIRS):
        assert sum(a != b for a, b in zip(true, lie.message, strict=True)) == 1


def test_bounds_and_what_others_have() -> None:
    start = next(each for each in true_calls() if isinstance(each, calls.PutStart))
    told = {(lie.field, lie.value) for lie in lies(start, THEIRS) if isinstance(lie.value, int)}
    assert {("ttl_ms", TTL_MS_MAX - 1), ("ttl_ms", TTL_MS_MAX), ("ttl_ms", TTL_MS_MAX + 1)} <= told
    assert ("client_number", 4711) in told
    assert "theirs" in {lie.value for lie in lies(start, THEIRS) if lie.field == "namespace"}


def test_nested_fields() -> None:
    join = true_join("liar", "host", device=calls.DevicePlace("cuda:0", "liar", "1/2/3"))
    told = {lie.field for lie in lies(join, THEIRS)}
    assert {"segments.0.device.handle", "segments.0.uuid", "segments.0.mark.epoch"} <= told
