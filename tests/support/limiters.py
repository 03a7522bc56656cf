"""What is true of a limiter at any time."""

from __future__ import annotations

from typing import Any

from kvstore.runtime.limiter import Limiter


def check_limiter(limiter: Limiter[Any]) -> None:
    """Raises AssertionError."""
    held, waiting = limiter._held.values(), limiter._waiting.values()
    assert len(limiter._kept) == sum(held) <= limiter._size
    assert all(each > 0 for each in held)
    assert limiter._weight == sum(weight for weight, _ in waiting)
    assert len(waiting) <= 1 or limiter._weight <= limiter._free
