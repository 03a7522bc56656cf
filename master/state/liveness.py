"""Which nodes are there: alive, suspect, dead.

    joined ──► alive ──silence, broken stream, reported failures──► suspect ──► dead
                 ▲                                                    │
                 └───────────── heard again, resumed ─────────────────┘

Alive and suspect are derived from what was heard and when, never stored, so no transition can be
missed. Dead is an event: the caller unmounts the segments, and the node is forgotten.
"""

from __future__ import annotations

from dataclasses import dataclass

ALIVE, SUSPECT, DEAD = "alive", "suspect", "dead"


@dataclass(slots=True, eq=False)
class Node:
    """A node that has joined and is not dead. Times are the master's own monotonic clock."""

    name: str
    host: str
    session: int | None
    """The stream it is heard on; None while that is broken."""
    heard_ms: int
    reported_ms: int | None = None
    """When a client last reported that reads or writes fail; cleared by time only."""
    draining: bool = False
    """It is to leave, and given nothing new until then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LivenessRules:
    suspect_ms: int
    """Silence, or time since a reported failure, during which a node is suspect."""
    dead_ms: int
    """Silence after which it is dead."""


def state_of(node: Node, now_ms: int, rules: LivenessRules) -> str:
    silent_ms = now_ms - node.heard_ms
    if silent_ms > rules.dead_ms:
        return DEAD
    reported = node.reported_ms is not None and now_ms - node.reported_ms <= rules.suspect_ms
    if node.session is None and reported:
        return DEAD  # its stream is broken and a client cannot reach it either
    if node.session is None or silent_ms > rules.suspect_ms or reported:
        return SUSPECT
    return ALIVE


def next_change_ms(node: Node, now_ms: int, rules: LivenessRules) -> int:
    """When it is dead if nothing else is heard of it."""
    if state_of(node, now_ms, rules) == DEAD:
        return now_ms
    return node.heard_ms + rules.dead_ms + 1


def trusted_again_ms(node: Node, rules: LivenessRules) -> int:
    """When a report of failures stops to make it suspect; 0: there was none."""
    return 0 if node.reported_ms is None else node.reported_ms + rules.suspect_ms + 1
