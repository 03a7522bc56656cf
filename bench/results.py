"""The results of the comparison: the arithmetic, and their form as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from bench.rows import TABLES, Row
from kvstore.bench.timing import Spread

OURS = "kvstore"


Shares = dict[str, float]
"""Processor time of one system, by process: ``client``, ``master``, ``storage``."""


@dataclass
class Comparison:
    """One row: per round the median time of a call, whatever its batch."""

    row: Row
    ours_us: list[float] = field(default_factory=list)
    theirs_us: list[float] = field(default_factory=list)
    memcpy_us: list[float] = field(default_factory=list)
    """Times of a memcpy of the same bytes, inside the client's process; only if the row has a goal
    for it."""
    ours_processor: list[Shares] = field(default_factory=list)
    """Microseconds of processor time of a call in the mean, by process; polling included."""
    theirs_processor: list[Shares] = field(default_factory=list)

    def add(self, system: str, microseconds: float, processor: Shares) -> None:
        """One round of a system."""
        is_ours = system == OURS
        (self.ours_us if is_ours else self.theirs_us).append(microseconds)
        (self.ours_processor if is_ours else self.theirs_processor).append(processor)

    @property
    def ratios(self) -> list[float]:
        """The peer's time over ours, for each round: above 1 ours is faster."""
        return [theirs / ours for theirs, ours in zip(self.theirs_us, self.ours_us, strict=True)]

    @property
    def memcpy_parts(self) -> list[float]:
        """The time of one memcpy over ours, for each round."""
        if not self.memcpy_us:
            return []
        return [copy / ours for copy, ours in zip(self.memcpy_us, self.ours_us, strict=True)]

    @property
    def ratio(self) -> Spread:
        return Spread.of(self.ratios)

    @property
    def processor_ratio(self) -> Spread | None:
        """The peer's processor time over ours, of all processes; None: not measured."""
        pairs = zip(self.theirs_processor, self.ours_processor, strict=True)
        ratios = [sum(theirs.values()) / sum(ours.values()) for theirs, ours in pairs]
        return Spread.of(ratios) if ratios else None

    @property
    def processor_met(self) -> bool:
        ratio = self.processor_ratio
        return ratio is not None and ratio.median >= self.row.processor_goal

    @property
    def memcpy_part(self) -> Spread | None:
        return Spread.of(self.memcpy_parts) if self.memcpy_parts else None

    @property
    def met(self) -> bool:
        """Whether the median of the rounds reaches the goal, and also the memcpy goal if there is
        one."""
        part = self.memcpy_part
        return self.ratio.median >= self.row.goal and (
            part is None or part.median >= self.row.memcpy_goal
        )


@dataclass(kw_only=True)
class Measured:
    """All results of one run."""

    rounds: int
    seconds: float
    """Per row, round and system."""
    pool_bytes: int
    comparisons: list[Comparison]
    idle_percent: dict[str, list[float]]
    """Percent of one processor that all processes of an idle system take."""
    load: tuple[float, float]
    """The machine's load, before and after (1-minute averages)."""
    machine: dict[str, str | int] = field(default_factory=dict)
    """What the numbers depend on; see ``bench.machine``."""

    @property
    def behind(self) -> str:
        """What was between the benchmark and the systems; see ``Row``."""
        return self.comparisons[0].row.behind if self.comparisons else ""

    @property
    def missed(self) -> list[Row]:
        """The rows that do not reach their goals."""
        return [each.row for each in self.comparisons if not each.met]

    @property
    def with_processor(self) -> list[Comparison]:
        """The rows whose processor time was measured."""
        return [each for each in self.comparisons if each.processor_ratio is not None]

    def as_json(self) -> dict[str, Any]:
        return {
            "machine": self.machine,
            "load": list(self.load),
            "rounds": self.rounds,
            "seconds": self.seconds,
            "pool_bytes": self.pool_bytes,
            "behind": self.behind,
            "idle_percent": self.idle_percent,
            "rows": [_row_as_json(each) for each in self.comparisons],
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Self:
        """Reads the output of ``as_json``. Leaves out rows that the table no longer has."""
        known = {row.id: row for row in TABLES[found.get("behind", "")]}
        return cls(
            rounds=found["rounds"],
            seconds=found["seconds"],
            pool_bytes=found["pool_bytes"],
            comparisons=[
                Comparison(
                    known[each["id"]],
                    each["ours_us"],
                    each["theirs_us"],
                    each["memcpy_us"],
                    each["ours_processor_us"],
                    each["theirs_processor_us"],
                )
                for each in found["rows"]
                if each["id"] in known
            ],
            idle_percent=found["idle_percent"],
            load=(found["load"][0], found["load"][1]),
            machine=dict(found["machine"]),
        )


def _row_as_json(comparison: Comparison) -> dict[str, Any]:
    row, part = comparison.row, comparison.memcpy_part
    return {
        "id": row.id, "title": row.title, "mode": row.mode, "peer_op": row.their_op,
        "size_bytes": row.size, "batch": row.batch,
        "ours_us": comparison.ours_us, "theirs_us": comparison.theirs_us,
        "memcpy_us": comparison.memcpy_us,
        "ours_processor_us": comparison.ours_processor,
        "theirs_processor_us": comparison.theirs_processor,
        "processor_goal": row.processor_goal,
        "ratio": comparison.ratio._asdict(), "goal": row.goal,
        "memcpy_part": part._asdict() if part else None, "memcpy_goal": row.memcpy_goal,
        "met": comparison.met,
    }  # fmt: skip
