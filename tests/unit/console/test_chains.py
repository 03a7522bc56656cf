"""Who may see chains."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, cast

import pytest

from kvstore import calls
from kvstore.client.async_client import AsyncClient
from kvstore.console.api.chains import ChainsAPI, ChainsRequest
from kvstore.errors import PermissionDeniedError
from kvstore.security.identity import validated_identity
from kvstore.security.impersonation import impersonate


def test_a_cached_reply_is_for_identities_that_may_read_its_namespace() -> None:
    queries: list[str | None] = []

    class Store:
        async def chains(self, namespace: str | None, **_: Any) -> calls.ChainsReply:
            queries.append(namespace)
            return calls.ChainsReply(7, 0, [], True)

    async def nodes_of(_: Iterable[int]) -> dict[int, str]:
        return {}

    async def main() -> None:
        api = ChainsAPI(cast(AsyncClient, Store()), nodes_of)
        engine = validated_identity("e", ["engine"], reads=["ours"])
        for namespace in ("ours", "theirs", ""):
            request = ChainsRequest(namespace=namespace)
            await api._chains(request)
            with impersonate(engine):
                if namespace == "ours":
                    await api._chains(request)
                else:
                    with pytest.raises(PermissionDeniedError):
                        await api._chains(request)

    asyncio.run(main())
    assert queries == ["ours", "theirs", None], "the engine gets the cached reply, or none"
