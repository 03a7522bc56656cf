"""Who may change the instances: the guard of our ports (``tests/unit/http/test_access_control.py``)
is that of the proxy, too."""

from __future__ import annotations

import asyncio
from typing import cast
from unittest import mock

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from multidict import CIMultiDict

from kvstore.proxy.admin import AdminHandlers
from kvstore.proxy.instances import Instances

TOKEN = {"Authorization": "Bearer secret"}


def status(peer: str, headers: dict[str, str], token: str) -> int:
    """Of an answer to one who asks for the instances."""
    transport = mock.Mock()
    transport.get_extra_info = lambda name: (peer, 1) if name == "peername" else None
    application = web.Application()
    AdminHandlers(Instances(), mock.Mock(), token=token).add_routes(application.router)
    given = CIMultiDict({"Host": "127.0.0.1:8000", **headers})
    request = make_mocked_request("GET", "/admin/instances", given, transport=transport)

    async def ask() -> web.StreamResponse:
        match = await application.router.resolve(request)
        return await match.handler(request)

    answer = cast("web.Response", asyncio.run(ask()))
    if answer.status != 200:
        assert b"permission_denied" in cast("bytes", answer.body)
    return answer.status


@pytest.mark.parametrize("peer", ["127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1"])
def test_this_host_may_if_there_is_no_token(peer: str) -> None:
    assert status(peer, {}, "") == 200
    assert status(peer, {}, "secret") == 401, "a reverse proxy on this host looks the same"
    assert status(peer, TOKEN, "secret") == 200


@pytest.mark.parametrize("peer", ["10.0.0.1", "::ffff:10.0.0.1", "fe80::1%eth0", "", "x"])
def test_others_may_with_the_token_only(peer: str) -> None:
    assert status(peer, {}, "") == status(peer, {"Authorization": "Bearer "}, "") == 403
    for wrong in ("Bearer other", "Basic secret", "Bearer s\xe9cret", "Bearer "):
        assert status(peer, {"Authorization": wrong}, "secret") == 401
    assert status(peer, {"Authorization": "bearer  secret"}, "secret") == 200
    assert status(peer, {"Host": "proxy.example", **TOKEN}, "secret") == 200


def test_no_page_of_another_site_may() -> None:
    for headers in ({"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
        assert status("127.0.0.1", headers, "") == 403
        assert status("127.0.0.1", {**headers, **TOKEN}, "secret") == 403
    rebound = {"Host": "evil.example:8000", "Origin": "http://evil.example:8000"}
    assert status("127.0.0.1", rebound, "") == 421
    assert status("127.0.0.1", rebound, "secret") == 401
