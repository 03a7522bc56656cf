"""Carries out hints: clients' expectations of chains, which change the order of eviction.

A retained chain is kept for its ``retain_ms``, but at most for ``RETAINED_TURNOVERS`` times the
time in which puts fill the memory of its tenant: measured to be as good as the best fixed time.
Hints order the objects of one tenant only, and none is refused for want of space: clients that
retain everything get plain LRU."""

from __future__ import annotations

from kvstore import calls
from kvstore.calls import HintAction, HintOutcome
from kvstore.master.state import eviction_hints
from kvstore.master.state.records import ObjectRecord
from kvstore.master.state.state_context import StateContext

RETAINED_TURNOVERS = 6

RELEASE_STEPS = 8_192
"""Blocks of a chain that one hint releases or demotes: 2 ms."""


class HintHandler:
    def __init__(self, common: StateContext) -> None:
        self._common = common
        self._pool = common.pool
        self._counters = common.counters

    def hint(self, now_ms: int, request: calls.Hint) -> calls.HintReply:
        """Carry out the hints of one namespace in their order."""
        table = self._common.forest.table(request.namespace)
        outcomes = bytearray()
        retained_ms: list[int] = []
        rows = zip(request.keys, request.actions, request.retain_ms, strict=True)
        for key, action, wanted_ms in rows:
            record = None if table is None else table.get(key)
            if record is not None and not self._pool.is_stored(record, now_ms):
                record = None
            outcome, until_ms = self.apply(now_ms, record, action, wanted_ms)
            outcomes.append(outcome)
            retained_ms.append(until_ms)
        return calls.HintReply(bytes(outcomes), retained_ms)

    def apply(
        self, now_ms: int, tip: ObjectRecord | None, action: int, retain_ms: int
    ) -> tuple[int, int]:
        """Carry out a hint for the chain that ends with ``tip``. Return its ``HintOutcome``, and
        for how long it is retained."""
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
            self._counters[f"hint_{HintAction(action).name}_{HintOutcome(outcome).name}"] += 1
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
        marked = 0
        while at is not None and at.children <= (marked > 0) and marked < RELEASE_STEPS:
            self._pool.hint(at, hint)
            marked += 1
            at = at.parent
        return marked > 0

    def on_use(self, record: ObjectRecord) -> None:
        """Called when an object with a hint was found: that is what the hint was about."""
        self._counters["retained_found" if record.hint > 0 else "released_found"] += 1
        record.hint = 0
