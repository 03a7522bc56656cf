"""Reads request bodies: a limited number at once, each within a time limit."""

from __future__ import annotations

import asyncio

from aiohttp import web


class CrowdedOutError(Exception):
    """This body had been arriving longest when another one needed its place."""


class BodyReader:
    """Reads the bodies of one event loop.

    When ``bodies_max`` bodies are arriving already, the oldest of them gives way to the next: a
    client that does send its body has sent it within milliseconds.
    """

    def __init__(self, *, bodies_max: int, timeout_ms: int) -> None:
        self._bodies_max = bodies_max
        self._timeout_s = timeout_ms / 1000
        self._coming: dict[asyncio.Timeout, None] = {}
        """Bodies that are arriving, oldest first."""

    def __len__(self) -> int:
        return len(self._coming)

    async def read(self, request: web.Request) -> bytes:
        """Reads the whole body.

        Raises:
            CrowdedOutError: the body had to give way.
            TimeoutError: the body did not arrive in time.
            web.HTTPRequestEntityTooLarge: the body is larger than the application allows.
        """
        if len(self._coming) >= self._bodies_max:
            self._crowd_out()
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                self._coming[limit] = None
                return await request.read()
        except TimeoutError:
            if limit not in self._coming:
                raise CrowdedOutError from None
            raise
        finally:
            self._coming.pop(limit, None)

    def _crowd_out(self) -> None:
        oldest = next(iter(self._coming))
        del self._coming[oldest]
        if not oldest.expired():
            oldest.reschedule(asyncio.get_running_loop().time())
