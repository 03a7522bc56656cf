"""Primitives of the hot path: compiled, or in Python.

``pip install`` compiles them if it finds a C compiler and Python's headers. Otherwise, or with
``KVSTORE_NATIVE=0`` (for comparison or debugging; ``_native`` checks it), the slower Python ones
are used. One suite tests both; ``docs/performance.md`` has the gain.
"""

from __future__ import annotations

import contextlib
import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Final

from kvstore.native.interface import CLOCK


def _load() -> ModuleType:
    with contextlib.suppress(ImportError):
        found = importlib.import_module("kvstore.native._native")
        # An older build compares deadlines with another clock than ``kvstore.runtime.clock``.
        if getattr(found, "CLOCK", None) == CLOCK:
            return found
    return importlib.import_module("kvstore.native.pure_python")


if TYPE_CHECKING:
    from kvstore.native import pure_python as steps
else:
    steps = _load()
is_compiled: Final = hasattr(steps, "CLOCK")
