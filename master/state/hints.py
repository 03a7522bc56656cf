"""Carries out hints: clients' expectations of chains, which change the order of eviction.

A retained chain is kept for its ``retain_ms``, but at most for ``RETAINED_TURNOVERS`` times the
time in which puts fill the memory of its tenant: measured to be as good as the best fixed time.
Hints order the objects of one tenant only, and none is refused for want of space: clients that
retain everything get what they would get without hints."""

from __future__ import annotations

from kvstore import calls
from kvstore.calls import HintAction, HintOutcome
from kvstore.master.state import eviction_hints
from kvstore.master.state.disk_tier import DiskTier
from kvstore.master.state.records import ObjectRecord
from kvstore.master.state.state_context import StateContext

RETAINED_TURNOVERS = 6

_COUNTERS = {
    (int(action), int(outcome)): f"hints.{action.name.lower()}.{outcome}"
    for action in HintAction
    for outcome in HintOutcome
}

RELEASE_STEPS = 8_192
"""Blocks that the hints of one request release or demote: 2 ms."""


class HintHandler:
    def __init__(self, common: StateContext, tier: DiskTier) -> None:
        self._common = common
        self._tier = tier
        self._pool = common.pool
        self._counters = common.counters
        self._steps = 0
        """Blocks that the present request may still release."""

    def hint(self, now_ms: int, request: calls.Hint) -> calls.HintReply:
        """Carry out the hints of one namespace in their order."""
        table = self._common.forest.table(request.namespace)
        outcomes = bytearray()
        retained_ms: list[int] = []
        self._steps = RELEASE_STEPS
        rows = zip(request.keys, request.actions, request.retain_ms, strict=True)
        for key, action, wanted_ms in rows:
            record = None if table is None else table.get(key)
            if record is not None and not self._pool.is_stored(record, now_ms):
                record = None
            if action == int(HintAction.PREFETCH) and self._tier.prefetch(request.namespace, key):
                outcome, granted_ms = int(HintOutcome.ACCEPTED), 0
                self._counters[_COUNTERS[action, outcome]] += 1
            else:
                outcome, granted_ms = self._apply(now_ms, record, action, wanted_ms)
            outcomes.append(outcome)
            retained_ms.append(granted_ms)
        return calls.HintReply(bytes(outcomes), retained_ms)

    def apply(self, now_ms: int, tip: ObjectRecord, action: int, retain_ms: int) -> None:
        """Carry out a hint for the chain that ends with ``tip``."""
        self._steps = RELEASE_STEPS
        self._apply(now_ms, tip, action, retain_ms)

    def _apply(
        self, now_ms: int, tip: ObjectRecord | None, action: int, retain_ms: int
    ) -> tuple[int, int]:
        """Return the ``HintOutcome``, and for how long the chain is retained."""
        outcome, granted_ms = int(HintOutcome.IGNORED), 0
        if tip is None:
            outcome = int(HintOutcome.MISSING)
        elif action == int(HintAction.RETAIN) and retain_ms:
            outcome, granted_ms = self._retain(now_ms, tip, retain_ms)
        elif action in (int(HintAction.RELEASE), int(HintAction.DEMOTE)):
            over = action == int(HintAction.RELEASE)
            if self._dismiss(tip, eviction_hints.dismissed(now_ms, over=over)):
                outcome = int(HintOutcome.ACCEPTED)
        if action:
            self._counters[_COUNTERS[action, outcome]] += 1
        return outcome, granted_ms

    def _retain(self, now_ms: int, tip: ObjectRecord, retain_ms: int) -> tuple[int, int]:
        """Ancestors need no mark: they are candidates only after the tip, and inherit its hint."""
        granted_ms = retain_ms
        turnover_ms = self._pool.turnover_ms(tip.namespace, now_ms)
        if turnover_ms is not None:
            granted_ms = min(retain_ms, RETAINED_TURNOVERS * max(1, turnover_ms))
        self._pool.hint(tip, now_ms + granted_ms)
        clipped = granted_ms < retain_ms
        return int(HintOutcome.CLIPPED if clipped else HintOutcome.ACCEPTED), granted_ms

    def _dismiss(self, tip: ObjectRecord, hint: int) -> bool:
        """Mark the blocks at the end of the chain that no other chain shares."""
        at: ObjectRecord | None = tip
        is_tip = True
        while at is not None and at.children == (not is_tip) and self._steps > 0:
            self._pool.hint(at, hint)
            self._steps -= 1
            is_tip = False
            at = at.parent
        return not is_tip

    def on_use(self, record: ObjectRecord) -> None:
        """Called when an object with a hint was found: that is what the hint was about."""
        hint = "retained" if record.hint > 0 else "released"
        self._counters[f"hinted_found.{hint}"] += 1
        record.hint = 0
