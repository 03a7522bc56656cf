"""Questions of one kind that are dear to the master: one at a time, then a pause, however many
pages ask."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

SHARE: Final = 0.2
"""The share of time that may go into asking them, if one takes under half a second."""

REST_S: Final = 2.0
"""The longest pause between two of them."""

ResultT = TypeVar("ResultT")


class Turns(asyncio.Lock):
    """``async with turns:`` waits for its turn; inside, ``ask`` makes the calls."""

    _rest_until = 0.0

    async def ask(self, call: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """What the call returns. Raises what it raises."""
        await asyncio.sleep(self._rest_until - time.monotonic())
        started = time.monotonic()
        try:
            return await call()
        finally:
            ended = time.monotonic()
            self._rest_until = ended + min(REST_S, (ended - started) * (1 / SHARE - 1))
