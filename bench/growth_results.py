"""The results of the growth benchmark, its goals, and their form as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Self

from bench.growth_chains import Matched
from bench.growth_clients import Together
from bench.growth_master import Eviction, Filled, Large
from kvstore.bench.virtual import Pauses

KEPT: Final = 0.9
"""A total of at least this part of the best one with fewer clients does not count as falling:
machines are noisy."""
SLOWEST: Final = 0.5
FLAT: Final = 2.0
"""Growth by at most this factor counts as nearly flat, while objects grow a thousandfold."""
LARGE: Final = 500_000
"""Below this number of objects, the process's own buffers distort the bytes per object."""
PAUSE_MS: Final = 10.0
LOGARITHMIC: Final = 2.0
"""Allowed factor over the growth of the logarithm alone."""


class Goal(NamedTuple):
    """One line of the verdict."""

    what: str
    found: str
    met: bool


@dataclass(kw_only=True)
class Growth:
    """All results of one run; a part that was not measured is empty."""

    clients: list[Together] = field(default_factory=list)
    master: list[Filled] = field(default_factory=list)
    chains: list[Matched] = field(default_factory=list)
    load: tuple[float, float] = (0.0, 0.0)
    """The machine's load, before and after (1-minute averages)."""
    machine: dict[str, str | int] = field(default_factory=dict)

    def goals(self) -> list[Goal]:
        """The goals that the measured parts can decide."""
        return [*_of_clients(self.clients), *_of_master(self.master), *_of_chains(self.chains)]

    def as_json(self) -> dict[str, Any]:
        return {
            "machine": self.machine,
            "load": list(self.load),
            "clients": [each._asdict() for each in self.clients],
            "master": [_filled_as_json(each) for each in self.master],
            "chains": [each._asdict() for each in self.chains],
            "goals": [each._asdict() for each in self.goals()],
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Self:
        """Reads the output of ``as_json``."""
        return cls(
            clients=[Together(**each) for each in found["clients"]],
            master=[_filled_from_json(each) for each in found["master"]],
            chains=[Matched(**each) for each in found["chains"]],
            load=(found["load"][0], found["load"][1]),
            machine=dict(found["machine"]),
        )


def _of_clients(rows: Sequence[Together]) -> list[Goal]:
    goals = []
    for work in dict.fromkeys(each.work for each in rows):
        some = [each for each in rows if each.work == work]
        parts = [
            after.per_second / max(before.per_second for before in some[:number])
            for number, after in enumerate(some)
            if number
        ]
        if parts:
            kept = min(parts)
            what = f"{work}: the total does not fall ({KEPT:.0%} of the best with fewer clients)"
            goals.append(Goal(what, f"{kept:.0%}", kept >= KEPT))
        slowest = min(each.slowest_part for each in some)
        what = f"{work}: the slowest client is at least half as fast as the mean"
        goals.append(Goal(what, f"{slowest:.0%}", slowest >= SLOWEST))
    return goals


def _of_master(rows: Sequence[Filled]) -> list[Goal]:
    if not rows:
        return []
    goals = []
    first, last = rows[0], rows[-1]
    if last.objects > first.objects:
        grown = f"from {first.objects:,} to {last.objects:,} objects"
        for name, before in first.call_us.items():
            times = last.call_us[name] / before
            what = f"{name}: time per call nearly flat {grown} (at most {FLAT:g} times)"
            goals.append(Goal(what, f"{times:.2f} times", times <= FLAT))
        several = [each for each in rows if each.objects >= LARGE] or [last]
        times = max(each.bytes_per_object for each in several) / min(
            each.bytes_per_object for each in several
        )
        what = f"bytes per object nearly flat from {several[0].objects:,} objects"
        goals.append(Goal(what, f"{times:.2f} times", times <= FLAT))
    for each in rows:
        longest = max(
            [
                each.idle,
                each.mixed,
                *(e.pauses for e in each.evictions),
                *(e.pauses for e in each.large),
            ],
            key=lambda pauses: pauses.longest_ms,
        ).longest_ms
        what = f"{each.objects:,} objects: the loop's longest step under {PAUSE_MS:g} ms"
        step_ms = each.longest_step_us / 1e3
        seen = f"{step_ms:.1f} ms; longest wait seen from outside {longest:.1f} ms"
        goals.append(Goal(what, seen, step_ms < PAUSE_MS))
    return goals


def _of_chains(rows: Sequence[Matched]) -> list[Goal]:
    if len(rows) < 2:
        return []
    first, last = rows[0], rows[-1]
    expected = math.log2(last.blocks) / math.log2(first.blocks)
    times = last.search_us / first.search_us
    what = (
        f"the search for the tip grows with the logarithm from {first.blocks:,} to"
        f" {last.blocks:,} blocks (which alone gives {expected:.1f} times; at most"
        f" {LOGARITHMIC:g} times that)"
    )
    return [Goal(what, f"{times:.1f} times", times <= LOGARITHMIC * expected)]


def _filled_as_json(filled: Filled) -> dict[str, Any]:
    evictions, large = (
        [{**each._asdict(), "pauses": each.pauses._asdict()} for each in some]
        for some in (filled.evictions, filled.large)
    )
    return {
        **filled._asdict(), "idle": filled.idle._asdict(), "mixed": filled.mixed._asdict(),
        "evictions": evictions, "large": large,
    }  # fmt: skip


def _filled_from_json(found: Mapping[str, Any]) -> Filled:
    evictions = [
        Eviction(**{**each, "pauses": Pauses(**each["pauses"])}) for each in found["evictions"]
    ]
    large = [
        Large(**{**each, "pauses": Pauses(**each["pauses"])}) for each in found.get("large", ())
    ]
    idle, mixed = Pauses(**found["idle"]), Pauses(**found["mixed"])
    parts = {"idle": idle, "mixed": mixed, "evictions": evictions, "large": large}
    return Filled(**{**found, **parts})
