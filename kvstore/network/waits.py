"""Bounds what a server holds for peers that are slow: messages that arrive, replies that are not
read."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable


class CrowdedOutError(Exception):
    """This wait had lasted longest when another one needed its place."""


class Waits:
    """The waits for peers. Use it in one event loop.

    Each wait has a weight. When the sum would be more than ``weight_max``, the oldest wait gives
    way to the next: a peer that does its part has done it within milliseconds.
    """

    def __init__(self, weight_max: int) -> None:
        self._weight_max = weight_max
        self._weight = 0
        self._waiting: dict[object, tuple[int, Callable[[], object]]] = {}
        """Oldest first."""

    def __len__(self) -> int:
        return len(self._waiting)

    def begin(self, wait: object, weight: int, give_way: Callable[[], object]) -> None:
        """Begins a wait, unless it has begun. It has ended when ``give_way`` is called."""
        if wait in self._waiting:
            return
        while self._waiting and self._weight + weight > self._weight_max:
            oldest, (_, crowd_out) = next(iter(self._waiting.items()))
            self.end(oldest)
            crowd_out()
        self._waiting[wait] = weight, give_way
        self._weight += weight

    def end(self, wait: object) -> None:
        """Ends a wait, unless it has ended."""
        if wait in self._waiting:
            self._weight -= self._waiting.pop(wait)[0]

    @contextlib.asynccontextmanager
    async def wait(self, timeout_s: float, weight: int = 1) -> AsyncIterator[None]:
        """The block waits for a peer.

        Raises:
            CrowdedOutError: this wait had to give way.
            TimeoutError: the wait took longer than ``timeout_s``.
        """
        limit = asyncio.timeout(timeout_s)

        def give_way() -> None:
            if not limit.expired():
                limit.reschedule(asyncio.get_running_loop().time())

        try:
            async with limit:
                self.begin(limit, weight, give_way)
                yield
        except TimeoutError:
            if limit not in self._waiting:
                raise CrowdedOutError from None
            raise
        finally:
            self.end(limit)
