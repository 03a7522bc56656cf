"""Who may read, and who may change something, over HTTP."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from multidict import CIMultiDict

from kvstore.config import read_token
from kvstore.errors import ConfigError
from kvstore.http.access_control import (
    HTTP_TOKEN,
    AccessControl,
    AllowedHosts,
    IdentityAccessControl,
)
from kvstore.security.identity import UNAUTHENTICATED, Identity
from kvstore.security.impersonation import ITSELF, impersonated
from kvstore.security.revocation_list import RevocationList

TOKEN = "0123456789abcdef-secret"
HERE = ("127.0.0.1", 40_000)
ELSEWHERE = ("10.0.0.9", 40_000)


Headers = list[tuple[str, str]]

OPEN = AccessControl(AllowedHosts(["kv.example.com"]))
TOKENED = AccessControl(AllowedHosts(["kv.example.com"]), token=TOKEN)
READS_TOO = AccessControl(AllowedHosts([]), token=TOKEN, reads="token")


def request_of(peer: Any, *headers: tuple[str, str], certificate: object = None) -> web.Request:
    transport = mock.Mock()
    transport.get_extra_info = {"peername": peer, "peercert": certificate}.get
    host = [] if "Host" in dict(headers) else [("Host", "127.0.0.1:50080")]
    return make_mocked_request("PUT", "/", CIMultiDict([*host, *headers]), transport=transport)


def status(access: AccessControl, way: str, peer: Any, *headers: tuple[str, str]) -> int:
    async def done(_: web.Request) -> web.Response:
        return web.Response(status=204)

    found: web.StreamResponse = asyncio.run(getattr(access, way)(done)(request_of(peer, *headers)))
    return found.status


def bearer(token: str) -> tuple[str, str]:
    return "Authorization", f"Bearer {token}"


@pytest.mark.parametrize(
    ("access", "peer", "headers", "write", "read", "known_host", "metrics"),
    [
        # Without a token, loopback may change something; headers do not make a loopback.
        (OPEN, HERE, [], 204, 204, 204, 204),
        (OPEN, ELSEWHERE, [], 403, 204, 204, 204),
        (OPEN, None, [], 403, 204, 204, 204),
        (OPEN, ELSEWHERE, [bearer(TOKEN)], 403, 204, 204, 204),
        (OPEN, ELSEWHERE, [("X-Forwarded-For", "127.0.0.1")], 403, 204, 204, 204),
        (OPEN, ELSEWHERE, [("Forwarded", "for=127.0.0.1")], 403, 204, 204, 204),
        (OPEN, ELSEWHERE, [("Host", "localhost")], 403, 204, 204, 204),
        # With a token, loopback needs it, too.
        (TOKENED, HERE, [], 401, 204, 204, 204),
        (TOKENED, ELSEWHERE, [], 401, 204, 204, 204),
        (TOKENED, HERE, [bearer(TOKEN)], 204, 204, 204, 204),
        (TOKENED, ELSEWHERE, [bearer(TOKEN)], 204, 204, 204, 204),
        (TOKENED, HERE, [bearer("x"), bearer(TOKEN)], 401, 204, 204, 204),
        (TOKENED, HERE, [bearer(TOKEN), bearer("x")], 401, 204, 204, 204),
        # Reading can need it as well; the page asks for it, and so needs none.
        (READS_TOO, HERE, [], 401, 401, 204, 401),
        (READS_TOO, HERE, [bearer(TOKEN)], 204, 204, 204, 204),
        # A page of ours may, and so may one behind a proxy that is known.
        (OPEN, HERE, [("Origin", "http://127.0.0.1:50080"), ("Sec-Fetch-Site", "same-origin")],
         204, 204, 204, 204),
        (OPEN, HERE, [("Host", "kv.example.com"), ("Origin", "https://kv.example.com")],
         204, 204, 204, 204),
        # An unknown name is refused before all else; numbers are for any.
        (TOKENED, HERE, [("Host", "evil.example"), bearer(TOKEN)], 421, 421, 421, 204),
        (READS_TOO, HERE, [("Host", "evil.example")], 421, 421, 421, 401),
    ],
)  # fmt: skip
def test_who_may(
    access: AccessControl, peer: Any, headers: Headers, write: int, read: int, known_host: int,
    metrics: int,
) -> None:  # fmt: skip
    for way, expected in (
        ("require_write", write), ("require_read", read), ("require_known_host", known_host),
        ("require_metrics", metrics),
    ):  # fmt: skip
        assert status(access, way, peer, *headers) == expected, way


@pytest.mark.parametrize(
    "given",
    [
        "", "Bearer", "Bearer ", f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN}x",
        f"Bearer {TOKEN[:-1]}",
        f"Bearer {TOKEN.upper()}", f"Bearer {TOKEN} {TOKEN}", "Bearer ü",
    ],
)  # fmt: skip
def test_a_wrong_token_is_refused(given: str) -> None:
    assert status(TOKENED, "require_write", HERE, ("Authorization", given)) == 401


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"}, {"Origin": "null"}, {"Origin": ""},
        {"Origin": "http://127.0.0.1:8000"}, {"Origin": "http://[::1"},
        {"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"}, {"Sec-Fetch-Site": ""},
        {"Origin": "http://127.0.0.1:50080", "Sec-Fetch-Site": "cross-site"},
    ],
)  # fmt: skip
def test_a_page_of_another_site_changes_nothing(headers: dict[str, str]) -> None:
    for access in (OPEN, TOKENED):
        assert status(access, "require_write", HERE, bearer(TOKEN), *headers.items()) == 403


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        *(dict.fromkeys(
            ["127.0.0.1", "10.0.0.7:50080", "[::1]:50080", "[fe80::1]", "localhost", "LOCALHOST:1",
             "cache-1:50080", "kv.example.com", "KV.example.com:443"], True).items()),
        *(dict.fromkeys(
            ["", ":", "evil.example", "evil.example:50080", "localhost.evil.example",
             "127.0.0.1.nip.io", "kv.example.com.", "x.kv.example.com", "127.1", "0x7f000001",
             "2130706433", "[::1", "::1", "evil@127.0.0.1", "127.0.0.1 evil", "127.0.0.1:80:80",
             "127.0.0.1:x", "[localhost.evil]"], False).items()),
    ],
)  # fmt: skip
def test_by_which_names_it_answers(host: str, expected: bool) -> None:
    hosts = AllowedHosts(["Cache-1", "kv.example.com"])
    assert hosts.allow([host]) is expected
    assert not hosts.allow([host] * 2)
    assert not hosts.allow([])


# --- the settings ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["short-secret", "two words of a secret", "secret" * 100, "sécret" * 4]
)
def test_what_is_no_token_is_refused_and_not_shown(tmp_path: Path, text: str) -> None:
    file = tmp_path / "token"
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        read_token(str(file))
    assert "ecret" not in str(refused.value)


@pytest.mark.parametrize(
    "way", ["require_read", "require_write", "require_all_namespaces", "require_metrics"]
)
@pytest.mark.parametrize("asked_before", [0, 1, 2])
def test_a_request_whose_identity_is_revoked_meanwhile_is_refused(
    way: str, asked_before: int
) -> None:
    """It must never be answered with the rights of the process itself."""

    class Revoking(IdentityAccessControl):
        _left = asked_before

        def _identity_of(self, request: web.Request) -> Identity:
            del request
            self._left -= 1
            return HTTP_TOKEN if self._left >= 0 else UNAUTHENTICATED

    acted: list[Identity] = []

    async def handler(_: web.Request) -> web.Response:
        acted.append(impersonated())
        return web.Response(status=204)

    uri, end = ("URI", "kvstore:admin/a"), "Jan  1 00:00:00 2020 GMT"
    ended = request_of(ELSEWHERE, certificate={"subjectAltName": (uri,), "notAfter": end})
    assert not IdentityAccessControl(None, RevocationList("")).name_of(ended)
    access = Revoking(None, RevocationList(""))
    found = asyncio.run(getattr(access, way)(handler)(request_of(ELSEWHERE)))
    assert (found.status == 401) == (not acted)
    assert asked_before == 2 or found.status == 401
    assert way == "require_metrics" or ITSELF not in acted
