"""Tells an engine's operator that the store refuses its calls, in one line for each reason.

A call that is refused is a miss like any other, and an engine makes thousands of them.
"""

from __future__ import annotations

import logging
import threading
from typing import Final

from kvstore.errors import PermissionDeniedError

TOLD_MAX: Final = 16
"""Distinct reasons that are logged. A reason names the namespace, and an engine of several models
has many."""


class Refusals:
    """See the module. Threads: any."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._lock = threading.Lock()
        self._told: set[str] = set()

    def tell(self, error: PermissionDeniedError) -> None:
        """Logs this refusal, unless its text was logged before."""
        why = str(error)  # as text: the error's frames hold buffers
        with self._lock:
            if why in self._told or len(self._told) >= TOLD_MAX:
                return
            self._told.add(why)
        self._log.warning("refused_by_the_store, such calls are misses: %s", why)
