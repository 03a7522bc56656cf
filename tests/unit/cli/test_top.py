"""``kvstore top``: what it counts, and what it shows."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator

import pytest
from rich.console import Console

from kvstore.calls import ClusterStatus, Counter, NamespaceStatus, NodeStatus, SegmentStatus
from kvstore.cli.top import NAMESPACES, Snapshot, page, rates, show

LEAVES_SCREEN = "\x1b[?1049l"


def status(epoch: int = 1, **counters: int) -> ClusterStatus:
    counted = [Counter(name, value) for name, value in sorted(counters.items())]
    segment = SegmentStatus(1, 1 << 30, 1 << 28, 1 << 29, "kvstore.a")
    node = NodeStatus("node[/a]", "host", "alive", "h:1", 12, [segment])
    spaces = [NamespaceStatus(f"space-{n}\x1b", n, n << 20) for n in range(NAMESPACES + 5)]
    return ClusterStatus(epoch, "1", 5_000, [node], spaces, counted)


def shown(seen: Snapshot) -> str:
    out = io.StringIO()
    Console(file=out, width=120, markup=False, emoji=False).print(page(seen, "m:1"))
    return out.getvalue()


def test_rates_are_of_the_time_between_two_looks() -> None:
    before, after = status(stored_objects=10), status(stored_objects=40, evicted_objects=6)
    assert rates(before, after, 2.0) == {"stored_objects": 15.0, "evicted_objects": 3.0}


def test_a_page() -> None:
    after = status(matched_objects=75, missed_objects=25, stored_objects=1234)
    text = shown(Snapshot(after, {"matched_objects": 1.0, "missed_objects": 3.0}))
    assert "25.0 % of 4" in text
    assert "75.0 % of 100" in text
    assert "1,234" in text
    assert "node[/a]" in text
    assert f"'space-{NAMESPACES + 4}\\x1b'" in text
    assert "space-4" not in text.replace("space-14", ""), "only the largest"
    assert "\x1b" not in text


@pytest.mark.parametrize("how", ["count", "interrupt", "error"])
def test_the_last_look_stays_in_the_terminal(how: str) -> None:
    ends: dict[str, type[BaseException]] = {"interrupt": KeyboardInterrupt, "error": OSError}

    def looks() -> Iterator[Snapshot]:
        yield Snapshot(status(), {})
        yield Snapshot(None, {}, "gone")
        if how in ends:
            raise ends[how]

    out = io.StringIO()
    console = Console(
        file=out, width=120, height=30, force_terminal=True, color_system=None, markup=False
    )
    with contextlib.suppress(*ends.values()):
        show(looks(), console, "m:1")
    _, _, after = out.getvalue().rpartition(LEAVES_SCREEN)
    assert "no answer from m:1: gone" in after
    assert "node[/a]" not in after
