"""Decides whether an engine loads stored tokens or computes them.

Computing the first n tokens takes C(n) = a n + b n² seconds, loading n tokens takes
t0 + n / R, and those on disks n_disk / R_disk more. C is convex and loading linear, so the time of
loading a part and computing the rest is concave between the ends of what each medium has: the
minimum is at none, at all that is in memory, or at all. All constants are measured on the engine's
own requests, while others run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

PREFILL_DECAY: Final = 0.98
MEMORY_DECAY: Final = 0.9
DISK_DECAY: Final = 0.7
"""Weight of earlier measurements after each new one: what counts are the last 50 prefills, 10 loads
from memory and 3 from disks, whose rate changes with what others do."""

PREFILLS_MIN: Final = 8
"""Measured prefills without which all that is stored is loaded."""

PREFILL_TOKENS_MIN: Final = 256
"""Computed tokens of a prefill that is measured: fewer take as long as a step does."""

SWITCH: Final = 0.8
"""A medium that was not worth loading from is used again when loading takes at most this part of
the time of computing: estimates differ from request to request."""

LOAD_S_MIN: Final = 0.02
"""A load that takes at most this is always worth it: so does a step of the engine, which computes
other requests meanwhile."""

PROBE_DECISIONS: Final = 64
"""Decisions without a measurement of what was not chosen, after which it is chosen once."""


@dataclass
class LinearFit:
    """Least squares of ``y = a x1 + b x2`` with a, b >= 0, in which earlier points fade."""

    decay: float
    points: int = 0
    _sums: list[float] = field(default_factory=lambda: [0.0] * 5)

    def add(self, x1: float, x2: float, y: float) -> None:
        self.points += 1
        products = (x1 * x1, x1 * x2, x2 * x2, x1 * y, x2 * y)
        self._sums = [self.decay * old + new for old, new in zip(self._sums, products, strict=True)]

    def at(self, x1: float, x2: float) -> float:
        """Return the estimate of y; 0 without points."""
        s11, s12, s22, s1y, s2y = self._sums
        determinant = s11 * s22 - s12 * s12
        if determinant > 1e-9 * s11 * s22:
            a = (s1y * s22 - s2y * s12) / determinant
            b = (s2y * s11 - s1y * s12) / determinant
            if a >= 0 and b >= 0:
                return a * x1 + b * x2
        if not s11:
            return 0.0
        if not s22 or s1y * s1y / s11 >= s2y * s2y / s22:  # the better of those with one constant
            return s1y / s11 * x1
        return s2y / s22 * x2


class LoadRule:
    """The measurements of one engine, and its decisions. For the scheduler's thread."""

    def __init__(self, *, is_on: bool, all_or_none: bool) -> None:
        """
        Args:
            is_on: whether computing stored tokens is considered at all.
            all_or_none: whether a hit cannot end before the last stored token, as with recurrent
                states.
        """
        self.loads_disks = True
        """Whether what is on disks is worth loading, at the last decision about it."""
        self._is_on = is_on
        self._all_or_none = all_or_none
        self._loads_memory = True
        self._prefills = LinearFit(PREFILL_DECAY)
        self._memory = LinearFit(MEMORY_DECAY)
        """Seconds of loads from memory, by their tokens and 1."""
        self._disk = LinearFit(DISK_DECAY)
        """Seconds that loads from disks take longer, by their tokens on disks and 1."""
        self._unmeasured = dict.fromkeys(("computing", "memory", "disk"), 0)
        """Decisions since the last measurement of each."""

    def choose(self, computed: int, in_memory: int, tokens: int) -> int:
        """Return the end of the tokens to load, of those after ``computed``; ``computed``: none.

        Args:
            in_memory: end of the tokens that need no disk.
            tokens: end of the stored tokens, above ``computed``.
        """
        if not self._is_on:
            return tokens
        in_memory = max(computed, min(in_memory, tokens))
        for what in self._unmeasured:
            self._unmeasured[what] += 1
        load_s = self._load_s(computed, in_memory, tokens)
        if load_s <= LOAD_S_MIN:
            return tokens
        has_prefills = self._prefills.points >= PREFILLS_MIN
        best = self._best(computed, in_memory, tokens) if has_prefills else tokens
        if best < tokens:
            rejected = "disk" if tokens > in_memory else "memory"
            return tokens if self._should_probe(rejected) else best
        is_close = not has_prefills or load_s > self._compute_s(computed, tokens) / 2
        return computed if is_close and self._should_probe("computing") else best

    def _best(self, computed: int, in_memory: int, tokens: int) -> int:
        """Return the end with the least time. A medium that was not worth it the last time must be
        faster by ``SWITCH``."""

        def cost(end: int) -> float:
            load_s = self._load_s(computed, in_memory, end)
            was_worth_it = self.loads_disks if end > in_memory else self._loads_memory
            return (load_s if was_worth_it else load_s / SWITCH) + self._compute_s(end, tokens)

        ends = (computed, tokens) if self._all_or_none else (computed, in_memory, tokens)
        best = min(reversed(ends), key=cost)
        if in_memory > computed:
            self._loads_memory = best > computed
        if tokens > in_memory:
            self.loads_disks = best > in_memory
        return best

    def _should_probe(self, what: str) -> bool:
        if self._unmeasured[what] <= PROBE_DECISIONS:
            return False
        self._unmeasured[what] = 0
        return True

    def loaded(self, tokens: int, on_disk: int, seconds: float, *, is_complete: bool) -> None:
        """Record a load that has ended, of which ``on_disk`` tokens were on disks only. One that
        failed counts if it took longer than the load should have."""
        memory_s = self._memory.at(tokens, 1.0)
        expected_s = memory_s + (self._disk.at(on_disk, 1.0) if on_disk else 0.0)
        if not is_complete and seconds <= expected_s:
            return
        is_better = seconds < SWITCH * expected_s  # then the next decision tries it again
        self._unmeasured["disk" if on_disk else "memory"] = PROBE_DECISIONS * is_better
        if on_disk:
            self._disk.add(on_disk, 1.0, max(0.0, seconds - memory_s))
        else:
            self._memory.add(tokens, 1.0, seconds)

    def prefilled(self, first: int, end: int, seconds: float) -> None:
        """Record that the tokens from ``first`` to ``end`` of a prompt were computed."""
        if end - first >= PREFILL_TOKENS_MIN:
            self._unmeasured["computing"] = 0
            self._prefills.add(end - first, end**2 - first**2, seconds)

    def _compute_s(self, first: int, end: int) -> float:
        return self._prefills.at(end - first, end**2 - first**2)

    def _load_s(self, computed: int, in_memory: int, end: int) -> float:
        if end <= computed:
            return 0.0
        seconds = self._memory.at(end - computed, 1.0)
        return seconds + (self._disk.at(end - in_memory, 1.0) if end > in_memory else 0.0)
