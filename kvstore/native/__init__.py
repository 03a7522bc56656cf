"""The compiled steps of the hot path: ``fast``, or None where they were not built.

``pip install`` compiles them where a C compiler and Python's headers are; without, or with the
variable ``KVSTORE_NATIVE=0`` (to compare, and to look for a fault; the module itself looks at it),
their twins in Python do the same, slower. Both are tested against each other, and
``docs/performance.md`` says what they gain.
"""

from __future__ import annotations

import importlib
from typing import Final, cast

from kvstore.native.kinds import CLOCK, Fast


def _load() -> Fast | None:
    try:
        found = importlib.import_module("kvstore.native.fast")
    except ImportError:
        return None
    # An older build compares deadlines with another clock than ``kvstore.clocks``.
    return cast(Fast, found) if getattr(found, "CLOCK", None) == CLOCK else None


fast: Final = _load()
