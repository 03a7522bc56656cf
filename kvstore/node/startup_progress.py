"""Reports the progress of a node that reserves its memory, in the log and to systemd. A GiB takes
750 ms, so a large node takes minutes."""

from __future__ import annotations

import logging
import time
from typing import Final

from kvstore.runtime import sd_notify
from kvstore.runtime.formatting import duration_text, size_text

log = logging.getLogger("kvstore.node")

LOG_INTERVAL_S: Final = 10.0
"""How often progress is logged."""


class StartupProgress:
    """The reserved memory. The thread that reserves it calls this; another one reads it."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.done = 0
        self._began = time.monotonic()
        self._logged_s = -LOG_INTERVAL_S
        self(0, size)

    def __call__(self, done: int, size: int) -> None:
        self.done, self._size = done, size
        elapsed = time.monotonic() - self._began
        if elapsed - self._logged_s >= LOG_INTERVAL_S:
            self._logged_s = elapsed
            log.info("reserving_memory bytes=%d of=%d seconds=%.0f", done, size, elapsed)
            sd_notify.still_starting(self.text)

    @property
    def text(self) -> str:
        """``reserves memory: 12.0 GiB of 664 GiB, 8 min 20 s left``"""
        done, elapsed = self.done, time.monotonic() - self._began
        text = f"reserves memory: {size_text(done)} of {size_text(self._size)}"
        if not done:
            return text
        left_s = elapsed / done * (self._size - done)
        return f"{text}, {duration_text(int(left_s * 1000))} left"
