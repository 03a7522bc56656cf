"""The steps of the hot path, ``steps``: compiled (``fast``), or in Python (``slow``).

``pip install`` compiles them where it finds a C compiler and Python's headers. Otherwise, or with
the variable ``KVSTORE_NATIVE=0`` (to compare, or to look for a fault; ``fast`` checks it itself),
those in Python do the same, slower. Callers see no difference: one suite tests both, and
``docs/performance.md`` says what the compiled ones gain.
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
