"""The clients of the child that serves HTTP."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from kvstore.console.dashboard.master import CoalescedQuery, ParentMaster
from kvstore.master.ipc_channel import ChildChannel
from kvstore.security.identity import Identity, validated_identity
from kvstore.security.impersonation import ITSELF, impersonate, impersonated
from tests.support.identities import MASTER, authority, credentials


class Silent:
    async def request_until_reply(self, what: str, timeout_s: float) -> Any:
        del what, timeout_s
        await asyncio.Event().wait()


@pytest.mark.parametrize("demands", [True, False])
def test_a_drain_demands_encryption_as_its_master_does(tmp_path: Path, demands: bool) -> None:
    async def main() -> str:
        master = ParentMaster(
            "127.0.0.1:1", cluster="", pid=1, channel=cast(ChildChannel, Silent()), scheme="https",
            auth=credentials(tmp_path, authority(), MASTER).path, demands_encryption=demands,
        )  # fmt: skip
        try:
            with master.connect() as client:
                return client._state.config.data_encryption
        finally:
            await master.close()

    assert asyncio.run(main()) == ("tls" if demands else "off")


def test_a_query_for_all_requesters_has_no_rights_of_the_first() -> None:
    """Otherwise an engine could have the dashboard show no fleet to an administrator."""

    async def query() -> Identity:
        return impersonated()

    async def main() -> None:
        with impersonate(validated_identity("e", ["engine"], reads=["ours"])):
            assert await CoalescedQuery("query", query)() is ITSELF

    asyncio.run(main())
