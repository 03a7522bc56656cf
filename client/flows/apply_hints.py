"""Carries out the actions of a hint envelope in several namespaces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvstore.calls import HintAction, HintOutcome
from kvstore.calls.hint_envelopes import EnvelopeAction
from kvstore.client.flows import control_calls
from kvstore.client.flows.steps import Flow
from kvstore.client.hints import ActionResult, HintResult, HintRow
from kvstore.errors import NoSpaceError, PermissionDeniedError, UsageError
from kvstore.limits import Key, Namespace

_REASONS = {
    HintOutcome.CLIPPED: "kept for a shorter time than requested",
    HintOutcome.MISSING: "no stored object has this key",
    HintOutcome.IGNORED: "other chains continue this one",
}
_ORDER = (HintOutcome.CLIPPED, HintOutcome.ACCEPTED, HintOutcome.IGNORED, HintOutcome.MISSING)
"""An action has the first of these outcomes that it has for some key in some namespace."""


def apply_hints(
    actions: Sequence[EnvelopeAction], chains: Mapping[Namespace, Sequence[Key]]
) -> Flow[list[ActionResult]]:
    """As ``Client.apply_hints``: a call per namespace, and one per namespace and pin."""
    replies: list[list[HintResult]] = [[] for _ in actions]
    refusals = [action.ignored_reason for action in actions]
    for namespace, own in chains.items():
        rows: list[HintRow] = []
        owners: list[int] = []
        for number, action in enumerate(actions):
            keys = action.keys or own
            if action.action:
                rows += (HintRow(int(action.action), key, action.duration_ms) for key in keys)
                owners += [number] * len(keys)
            elif action.is_pin:
                try:
                    pinned = yield from control_calls.pin(namespace, keys, action.duration_ms)
                except (NoSpaceError, PermissionDeniedError, UsageError) as error:
                    refusals[number] = str(error)
                else:
                    found = HintResult(HintOutcome.ACCEPTED, action.duration_ms / 1000)
                    absent = HintResult(HintOutcome.MISSING, 0)
                    replies[number] += (found if is_pinned else absent for is_pinned in pinned)
        results = yield from control_calls.hint(namespace, rows)
        for number, result in zip(owners, results, strict=True):
            replies[number].append(result)
    return [
        _merge(action, replies[number], refusals[number]) for number, action in enumerate(actions)
    ]


def _merge(action: EnvelopeAction, replies: list[HintResult], refusal: str) -> ActionResult:
    if not replies:
        reason = refusal or "this names no chain: give keys in hexadecimal"
        return ActionResult(action.action_id, HintOutcome.IGNORED, reason, 0)
    outcome = min((reply.outcome for reply in replies), key=_ORDER.index)
    if outcome is HintOutcome.ACCEPTED and action.clipped:
        outcome = HintOutcome.CLIPPED
    reason = refusal or _REASONS.get(outcome, "")
    if outcome is HintOutcome.IGNORED and action.action is HintAction.PREFETCH:
        reason = "nothing to do: all of it is in memory"
    retained_s = min((reply.retained_s for reply in replies if reply.retained_s), default=0)
    return ActionResult(action.action_id, outcome, reason, retained_s)
