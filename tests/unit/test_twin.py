"""The lies of the hostile twin (``tests/support/message_tampering.py``): every field has some."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.wire.messages import CALLS
from tests.support.message_tampering import (
    ForeignValues,
    tampered_variants,
    true_calls,
    true_join,
    true_messages,
)

THEIRS = ForeignValues([b"their key"], ["theirs"], [4711], ["their node"], [b"u" * 16])


def test_every_call_is_there() -> None:
    assert {type(true) for true in true_calls()} == CALLS.keys()


@pytest.mark.parametrize(
    "true",
    [*true_calls(), *true_messages(), true_join("liar", "host")],
    ids=lambda true: type(true).__name__,
)
def test_each_field_has_lies(true: Any) -> None:
    fields = {lie.field.partition(".")[0] for lie in tampered_variants(true, THEIRS)}
    assert fields == set(true._fields)
