"""Who may change the instances."""

from __future__ import annotations

import pytest

from kvstore.proxy.admin import may

TOKEN = {"Authorization": "Bearer secret"}


@pytest.mark.parametrize("peer", ["127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1"])
def test_this_host_may(peer: str) -> None:
    assert may(peer, {}, "")
    assert may(peer, {}, "secret")


@pytest.mark.parametrize("peer", ["10.0.0.1", "::ffff:10.0.0.1", "fe80::1%eth0", "", "x", None])
def test_others_may_with_the_token_only(peer: str | None) -> None:
    assert not may(peer, {}, "")
    assert not may(peer, {}, "secret")
    assert not may(peer, {"Authorization": "Bearer "}, "")
    assert not may(peer, {"Authorization": "Bearer other"}, "secret")
    assert not may(peer, {"Authorization": "Basic secret"}, "secret")
    assert not may(peer, {"Authorization": "Bearer s\xe9cret"}, "secret")
    assert may(peer, TOKEN, "secret")
    assert may(peer, {"Authorization": "bearer  secret"}, "secret")


def test_no_page_in_a_browser_may() -> None:
    assert not may("127.0.0.1", {"Origin": "http://127.0.0.1:8000", **TOKEN}, "secret")
