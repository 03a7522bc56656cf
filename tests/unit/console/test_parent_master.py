"""The clients of the child that serves HTTP."""

from __future__ import annotations

import asyncio

import pytest

from kvstore.console.dashboard.master import CoalescedQuery, ParentMaster
from kvstore.security.identity import Identity, validated_identity
from kvstore.security.impersonation import ITSELF, impersonate, impersonated


def test_a_query_for_all_requesters_has_no_rights_of_the_first() -> None:
    """Otherwise an engine could have the dashboard show no fleet to an administrator."""

    async def query() -> Identity:
        return impersonated()

    async def main() -> None:
        with impersonate(validated_identity("e", ["engine"], reads=["ours"])):
            assert await CoalescedQuery("query", query)() is ITSELF

    asyncio.run(main())


def test_a_master_that_awaits_its_own_memory_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    async def role(*_: str) -> dict[str, object]:
        return {"leads": True, "leader": "", "awaits_memory": True}

    monkeypatch.setattr(ParentMaster, "_call", role)
    assert not asyncio.run(ParentMaster.readiness(object.__new__(ParentMaster))).ready
