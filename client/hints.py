"""Hints: what a program expects of stored chains, as values of ``Client.hint``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

from kvstore import limits
from kvstore.calls import HintAction, HintOutcome
from kvstore.client import validation
from kvstore.client.validation import AnyKey, Duration
from kvstore.limits import check_key

RETAIN_S: int = limits.RETAIN_MS_MAX // 1000
"""The longest time for which a chain is retained, in seconds."""


class Hint(NamedTuple):
    """One expectation of the chain that ends with ``key``."""

    action: HintAction | str
    """``"retain"``, ``"release"``, ``"demote"`` or ``"prefetch"``."""
    key: AnyKey
    ttl: Duration = RETAIN_S
    """Of ``retain``: for how long, from now; at most an hour."""


class HintResult(NamedTuple):
    outcome: HintOutcome
    """ACCEPTED; CLIPPED: retained for a shorter time; MISSING: no such object; IGNORED: other
    chains continue this one, or all of it is in memory already."""
    retained_s: float
    """For how long it is retained from now, in seconds; 0: it is not."""


class HintRow(NamedTuple):
    """A checked hint."""

    action: int
    key: limits.Key
    retain_ms: int


def check_action(action: HintAction | str) -> int:
    """Return the number of an action. Raises InvalidArgumentError."""
    names = {known.name.lower(): int(known) for known in HintAction if known}
    if isinstance(action, HintAction) and action:
        return int(action)
    validation.one_of("action", action, tuple(names))
    return names[str(action)]


def check_hint(action: HintAction | str | None, ttl: Duration) -> tuple[int, int]:
    """Return the action's number and the ms to retain. Raises InvalidArgumentError."""
    number = 0 if action is None else check_action(action)
    if number != HintAction.RETAIN:
        return number, 0
    return number, validation.duration_ms("ttl", ttl, limits.RETAIN_MS_MAX)


def check_hints(hints: Sequence[Hint]) -> list[HintRow]:
    """Return the rows of a call. Raises InvalidArgumentError."""
    rows = []
    for hint in validation.sequence("hints", hints):
        action, key, ttl = Hint(*cast("Hint", hint))
        number, retain_ms = check_hint(action, ttl)
        rows.append(HintRow(number, check_key(key), retain_ms))
    return rows
