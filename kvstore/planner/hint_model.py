"""What clients of a replayed trace tell the store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Knowledge = Literal["", "goes on", "soon", "over", "all", "recorded"]
"""What clients tell: nothing; that a chain is used again; that it is used again soon; that it is
over; always that it is used again; or what was recorded."""


@dataclass(frozen=True)
class HintModel:
    """Clients that tell what they know, right or wrong."""

    knowledge: Knowledge = ""
    right: float = 0.8
    """The part of the cases that deserve a hint in which it is given."""
    wrong: float = 0.05
    """The part of the other cases in which it is given all the same."""
    seed: int = 7
