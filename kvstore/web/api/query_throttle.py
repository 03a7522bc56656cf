"""Queries that are expensive for the master: one at a time, then a pause, whoever asks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

SHARE: Final = 0.2
"""The share of time that may go into them, if one takes under half a second."""

REST_S: Final = 2.0
"""The longest pause between two of them."""

ResultT = TypeVar("ResultT")


class QueryThrottle:
    """Use it in one event loop."""

    def __init__(self) -> None:
        self.lock: Final = asyncio.Lock()
        """Held by the caller of ``ask``."""
        self._rest_until = 0.0

    async def ask(self, call: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """Calls, after a pause. Raises what the call raises."""
        await asyncio.sleep(self._rest_until - time.monotonic())
        started = time.monotonic()
        try:
            return await call()
        finally:
            ended = time.monotonic()
            self._rest_until = ended + min(REST_S, (ended - started) * (1 / SHARE - 1))
