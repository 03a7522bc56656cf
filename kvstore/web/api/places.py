"""Which node each segment belongs to, for answers that name nodes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping

from kvstore.client.aio import AsyncClient
from kvstore.web.api.objects import TIMEOUT_MS


class Places:
    """Use it in one event loop."""

    def __init__(
        self, client: AsyncClient, known: Callable[[], Awaitable[Mapping[int, str]]]
    ) -> None:
        """``known``: the node of each segment, of a moment ago."""
        self._client = client
        self._known = known

    async def of(self, segments: Iterable[int]) -> Mapping[int, str]:
        """The nodes of these segments, among others. Asks the master only for new ones."""
        names = await self._known()
        if not names.keys() >= set(segments):
            names = (await self._client.status(timeout_ms=TIMEOUT_MS)).nodes_by_segment()
        return names
