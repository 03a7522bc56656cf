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

from kvstore.config import MasterConfig, NodeConfig, load, read_token, settings
from kvstore.errors import ConfigError
from kvstore.web.server.access import Access, is_loopback
from kvstore.web.server.hosts import Hosts

TOKEN = "0123456789abcdef-secret"
HERE = ("127.0.0.1", 40_000)
ELSEWHERE = ("10.0.0.9", 40_000)


def request_of(peer: Any, headers: dict[str, str] | list[tuple[str, str]] = {}) -> web.Request:  # noqa: B006
    transport = mock.Mock()
    transport.get_extra_info = lambda name: peer if name == "peername" else None
    given = list(headers.items()) if isinstance(headers, dict) else headers
    if not any(name == "Host" for name, _ in given):
        given = [("Host", "127.0.0.1:50080"), *given]
    return make_mocked_request("PUT", "/", CIMultiDict(given), transport=transport)


def status(access: Access, way: str, request: web.Request) -> int:
    async def done(_: web.Request) -> web.Response:
        return web.Response(status=204)

    found: web.StreamResponse = asyncio.run(getattr(access, way)(done)(request))
    return found.status


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def test_without_a_token_only_loopback_may_change_something() -> None:
    access = Access(Hosts([]))
    assert status(access, "trusted", request_of(HERE)) == 204
    assert status(access, "trusted", request_of(ELSEWHERE)) == 403
    assert status(access, "trusted", request_of(ELSEWHERE, bearer(TOKEN))) == 403
    forwarded = {"X-Forwarded-For": "127.0.0.1", "Forwarded": "for=127.0.0.1"}
    assert status(access, "trusted", request_of(ELSEWHERE, forwarded)) == 403
    assert status(access, "trusted", request_of(ELSEWHERE, {"Host": "localhost"})) == 403
    assert status(access, "trusted", request_of(None)) == 403


def test_with_a_token_loopback_needs_it_too() -> None:
    access = Access(Hosts([]), token=TOKEN)
    for peer in (HERE, ELSEWHERE):
        assert status(access, "trusted", request_of(peer)) == 401
        assert status(access, "trusted", request_of(peer, bearer(TOKEN))) == 204
        assert status(access, "reading", request_of(peer)) == 204


@pytest.mark.parametrize(
    "given",
    [
        "", "Bearer", "Bearer ", f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN}x",
        f"Bearer {TOKEN[:-1]}",
        f"Bearer {TOKEN.upper()}", f"Bearer {TOKEN} {TOKEN}", "Bearer ü",
    ],
)  # fmt: skip
def test_a_wrong_token_is_refused(given: str) -> None:
    access = Access(Hosts([]), token=TOKEN)
    refused = request_of(HERE, {"Authorization": given})
    assert status(access, "trusted", refused) == 401


def test_two_tokens_are_none() -> None:
    access = Access(Hosts([]), token=TOKEN)
    twice = [("Authorization", "Bearer x"), ("Authorization", f"Bearer {TOKEN}")]
    for given in (twice, twice[::-1]):
        assert status(access, "trusted", request_of(HERE, given)) == 401


def test_reading_can_be_limited_to_the_token() -> None:
    access = Access(Hosts([]), token=TOKEN, reads="token")
    for way in ("reading", "measuring"):
        assert status(access, way, request_of(HERE)) == 401
        assert status(access, way, request_of(HERE, bearer(TOKEN))) == 204
    assert status(access, "named", request_of(HERE)) == 204  # the page, which asks for the token


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
    for access in (Access(Hosts([])), Access(Hosts([]), token=TOKEN)):
        assert status(access, "trusted", request_of(HERE, headers | bearer(TOKEN))) == 403


def test_our_own_page_and_programs_may() -> None:
    access = Access(Hosts(["kv.example.com"]))
    own = {"Origin": "http://127.0.0.1:50080", "Sec-Fetch-Site": "same-origin"}
    assert status(access, "trusted", request_of(HERE, own)) == 204
    behind = {"Host": "kv.example.com", "Origin": "https://kv.example.com"}
    assert status(access, "trusted", request_of(HERE, behind)) == 204


def test_an_unknown_name_is_refused_before_all_else() -> None:
    access = Access(Hosts([]), token=TOKEN)
    rebound = request_of(HERE, {"Host": "evil.example", **bearer(TOKEN)})
    for way in ("named", "reading", "trusted"):
        assert status(access, way, rebound) == 421
    assert status(access, "measuring", rebound) == 204


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("::ffff:127.0.0.1", True),
        ("10.0.0.1", False), ("::ffff:10.0.0.1", False), ("fe80::1%lo", False), ("", False),
        ("localhost", False), ("0.0.0.0", False), ("::", False),
    ],
)  # fmt: skip
def test_what_counts_as_loopback(host: str, expected: bool) -> None:
    assert is_loopback(request_of((host, 1))) is expected


# --- the settings ---------------------------------------------------------------------------------


def test_a_token_comes_from_a_file_or_a_variable_and_from_no_flag(tmp_path: Path) -> None:
    flags = {setting.key: setting.flag for setting in settings(MasterConfig)}
    assert flags["http_token"] == ""
    assert flags["http_token_file"] == "--http-token-file"
    kinds: tuple[type[MasterConfig | NodeConfig], ...] = (MasterConfig, NodeConfig)
    for kind in kinds:
        found = load(kind, {}, config_path="", environ={"KVSTORE_HTTP_TOKEN": TOKEN})
        assert found.http_token == TOKEN
        assert TOKEN not in repr(found)
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    assert read_token(str(file)) == TOKEN


@pytest.mark.parametrize(
    "text", ["short-secret", "two words of a secret", "secret" * 100, "sécret" * 4]
)
def test_what_is_no_token_is_refused_and_not_shown(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(MasterConfig, {}, config_path="", environ={"KVSTORE_HTTP_TOKEN": text})
    assert "http_token" in str(refused.value)
    assert "ecret" not in str(refused.value)
    file = tmp_path / "token"
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        read_token(str(file))
    assert "ecret" not in str(refused.value)


def test_a_token_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_token(str(tmp_path / "none"))


@pytest.mark.parametrize(
    "given",
    [
        {"http_reads": "token"}, {"http_cert": "c"}, {"http_key": "k"}, {"http_reads": "some"},
        {"http_token": TOKEN, "http_token_file": "f"},
    ],
)  # fmt: skip
def test_settings_that_do_not_go_together(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as refused:
        MasterConfig(**given)
    assert TOKEN not in str(refused.value)
