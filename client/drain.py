"""Drains of nodes, for ``kvstore drain`` and HTTP; they can be stopped and resumed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvstore.calls import NO_VERSION, ClusterStatus, NodeStatus, Version
from kvstore.errors import NoSpaceError, UnavailableError
from kvstore.runtime.formatting import size_text

if TYPE_CHECKING:
    from kvstore import Client

PAUSE_S: Final = 0.2
"""Pause before the next pass, after a pass that could not move all objects."""


@dataclass(slots=True)
class DrainOutcome:
    node: str
    moved: int = 0
    moved_bytes: int = 0
    corrupt: int = 0
    """Objects of the last pass that do not match their checksum."""
    remaining: int = 0
    remaining_bytes: int = 0
    evicted: int = 0
    """Less recently used objects on other nodes, evicted to free space."""
    unfinished: int = 0
    """Puts and allocations in progress, and objects that could not be moved, at the end."""
    has_departed: bool = False


def check_room(found: ClusterStatus, node: str) -> None:
    """Raise NoSpaceError if the other nodes lack space for the node's objects."""
    holds = sum(_used_bytes(node_status) for node_status in found.nodes if node_status.name == node)
    remaining_nodes = [
        node_status
        for node_status in found.nodes
        if node_status.name != node and node_status.state == "alive"
    ]
    free = sum(node_status.size - node_status.used for node_status in remaining_nodes)
    if holds <= free:
        return
    raise NoSpaceError(
        f"node {node} holds {size_text(holds)}, and other nodes have {size_text(free)} free. "
        f"Nothing was moved, and {node} stays in service.",
        advice="Start another node. Or allow losses: --evict (less recently used objects on "
        "other nodes) or --discard (objects that do not fit).",
        node=node,
        missing_bytes=holds - free,
    )


def _used_bytes(node: NodeStatus) -> int:
    """Return the bytes of the node's objects, and of puts in progress on it."""
    return sum(segment.used - segment.quarantined - segment.reclaim for segment in node.segments)


def drain_node(
    client: Client,
    node: str,
    *,
    evict: bool,
    discard: bool,
    wait_s: float,
    on_progress: Callable[[int, int], None],
) -> DrainOutcome:
    """Move all objects that can be moved; then let the node leave, if no object would be lost.

    Args:
        evict: evict less recently used objects on other nodes, except those that this drain moved.
        discard: let the node leave even if objects were not moved.
        wait_s: how long to retry without progress: puts are in progress on the node, or the master
            or a node is unreachable.
        on_progress: called with the bytes moved and the bytes to move.
    """
    outcome = DrainOutcome(node)
    begun = client.drain(node)
    used = begun.used
    evict_up_to = begun.began if evict else NO_VERSION
    give_up = time.monotonic() + wait_s
    while True:
        moved = outcome.moved
        try:
            pending = client.drain(node).pending  # again each time: the leader may have changed
            failed = _pass(
                client, outcome, evict_up_to, lambda: on_progress(outcome.moved_bytes, used)
            )
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
    if discard or not (outcome.remaining or outcome.unfinished):
        client.drain(node, leave=True)
        outcome.has_departed = True
    return outcome


def _pass(
    client: Client, outcome: DrainOutcome, evict_up_to: Version, on_progress: Callable[[], None]
) -> int:
    """Try to move all objects once; returns the number of failures."""
    failed = cursor = 0
    outcome.remaining = outcome.remaining_bytes = outcome.corrupt = 0
    while True:
        step = client.move_page(outcome.node, cursor, evict_up_to=evict_up_to)
        outcome.moved += step.objects
        outcome.moved_bytes += step.size
        outcome.remaining += step.remaining
        outcome.remaining_bytes += step.remaining_size
        outcome.evicted += step.evicted
        outcome.corrupt += step.corrupt
        failed += step.failed
        on_progress()
        cursor = step.next_cursor
        if not cursor:
            return failed
