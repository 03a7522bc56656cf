"""``kvstore drain``: empty a node, and let it leave.

This process copies: it reads from the node and writes to the others as any client does. It may be
stopped and started again at any time; the node stays drained until it leaves or is taken back.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

from kvstore.errors import UnavailableError

if TYPE_CHECKING:
    from kvstore import Client

PAUSE_S: Final = 0.2
"""Between two passes of which the first could not do all of it yet."""


@dataclass(slots=True)
class Outcome:
    """What a drain came to."""

    node: str
    moved: int = 0
    moved_bytes: int = 0
    corrupt: int = 0
    """Objects of the last pass whose bytes are not what they were."""
    left: int = 0
    """Objects that found no room elsewhere."""
    left_bytes: int = 0
    evicted: int = 0
    """Objects elsewhere that were used longer ago, and had to make room."""
    unfinished: int = 0
    """Puts and allocations, and objects that could not be moved, when the time was over."""
    has_left: bool = False

    def as_json(self) -> dict[str, str | int | bool]:
        return asdict(self)


def drain_node(
    client: Client, node: str, *, discard: bool, wait_s: float, told: Callable[[int, int], None]
) -> Outcome:
    """Move all that can be moved; then let the node leave, if nothing would be lost with it.

    Args:
        discard: let it leave also with what found no room elsewhere, or could not be moved.
        wait_s: how long to try when nothing moves any more: for puts under way there, or while the
            master or a node is away.
        told: called with the bytes moved, and those there are to move.
    """
    outcome = Outcome(node)
    used = client.drain(node).used
    give_up = time.monotonic() + wait_s
    while True:
        moved = outcome.moved
        try:
            pending = client.drain(node).pending  # again each time: the master may be another
            failed = _pass(client, outcome, lambda: told(outcome.moved_bytes, used))
        except UnavailableError:
            if time.monotonic() >= give_up:
                raise
            time.sleep(PAUSE_S)
            continue
        outcome.unfinished = pending + failed
        if outcome.moved > moved:
            give_up = time.monotonic() + wait_s
        elif not outcome.unfinished or time.monotonic() >= give_up:
            break
        else:
            time.sleep(PAUSE_S)
    if discard or not (outcome.left or outcome.unfinished):
        client.drain(node, leave=True)
        outcome.has_left = True
    return outcome


def _pass(client: Client, outcome: Outcome, told: Callable[[], None]) -> int:
    """Over all objects, once; how many could not be moved now."""
    failed = cursor = 0
    outcome.left = outcome.left_bytes = outcome.corrupt = 0
    while True:
        step = client.move_some(outcome.node, cursor)
        outcome.moved += step.objects
        outcome.moved_bytes += step.size
        outcome.left += step.left
        outcome.left_bytes += step.left_size
        outcome.evicted += step.evicted
        outcome.corrupt += step.corrupt
        failed += step.failed
        told()
        cursor = step.next_cursor
        if not cursor:
            return failed
