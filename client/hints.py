"""Hints: what a program expects of stored chains, as values of ``Client.hint``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

from kvstore import limits
from kvstore.calls import HintAction, HintOutcome
from kvstore.calls.hint_envelopes import EnvelopeAction
from kvstore.client import validation
from kvstore.client.validation import AnyKey, Duration
from kvstore.errors import InvalidArgumentError
from kvstore.limits import NAMESPACES_MAX, Namespace, check_key, check_namespace

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


class ActionResult(NamedTuple):
    """The result of one action of an envelope, for all its keys and namespaces together."""

    action_id: str
    outcome: HintOutcome
    reason: str
    """Why it was not carried out as requested; empty: it was."""
    retained_s: float
    """The shortest time for which one of its chains is retained or pinned; 0: none is."""


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
        try:
            action, key, ttl = Hint(*cast("Hint", hint))
        except TypeError:
            raise InvalidArgumentError(
                "hints are Hints", advice='Write [Hint("retain", key, 60)].'
            ) from None
        number, retain_ms = check_hint(action, ttl)
        rows.append(HintRow(number, check_key(key), retain_ms))
    return rows


def check_actions(actions: Sequence[EnvelopeAction]) -> Sequence[EnvelopeAction]:
    """Raises InvalidArgumentError: these are not actions of ``parse_envelope``."""
    several = validation.sequence("actions", actions)
    if not all(isinstance(action, EnvelopeAction) for action in several):
        raise InvalidArgumentError(
            "actions are EnvelopeActions", advice="parse_envelope makes them from an envelope."
        )
    return cast("Sequence[EnvelopeAction]", several)


def check_chains(chains: Mapping[str, Sequence[AnyKey]]) -> dict[Namespace, list[limits.Key]]:
    """Return the keys by namespace. Raises InvalidArgumentError, InvalidKeyError."""
    given: object = chains
    if not isinstance(given, Mapping) or len(given) > NAMESPACES_MAX:
        raise InvalidArgumentError(
            f"chains has the keys of at most {NAMESPACES_MAX} namespaces, by namespace"
        )
    return {check_namespace(name): validation.key_list(keys) for name, keys in chains.items()}
