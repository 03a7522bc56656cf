"""The compiled steps of the hot path: ``fast``, or None where they were not built.

``pip install`` compiles them where a C compiler and Python's headers are; without, or with the
variable ``KVSTORE_NATIVE=0`` (to compare, and to look for a fault; the module itself looks at it),
their twins in Python do the same, slower. Both are tested against each other, and
``docs/performance.md`` says what they gain.
"""

from __future__ import annotations

import importlib
from typing import Final, cast

from kvstore.native.kinds import Fast


def _load() -> Fast | None:
    try:
        return cast(Fast, importlib.import_module("kvstore.native.fast"))
    except ImportError:
        return None


fast: Final = _load()
