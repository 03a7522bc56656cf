"""By which names the dashboard answers."""

from __future__ import annotations

import pytest

from kvstore.web.server.hosts import Hosts

HOSTS = Hosts(["Cache-1", "kv.example.com"])


@pytest.mark.parametrize(
    "given",
    [
        "127.0.0.1", "10.0.0.7:50080", "[::1]:50080", "[fe80::1]", "localhost", "LOCALHOST:1",
        "cache-1:50080", "kv.example.com", "KV.example.com:443",
    ],
)  # fmt: skip
def test_addresses_and_known_names(given: str) -> None:
    assert HOSTS.allow([given])


@pytest.mark.parametrize(
    "given",
    [
        "", ":", "evil.example", "evil.example:50080", "localhost.evil.example", "127.0.0.1.nip.io",
        "kv.example.com.", "x.kv.example.com", "127.1", "0x7f000001", "2130706433", "[::1", "::1",
        "evil@127.0.0.1", "127.0.0.1 evil", "127.0.0.1:80:80", "127.0.0.1:x", "[localhost.evil]",
    ],
)  # fmt: skip
def test_everything_else_is_refused(given: str) -> None:
    assert not HOSTS.allow([given])


def test_one_name_is_needed() -> None:
    assert not HOSTS.allow([])
    assert not HOSTS.allow(["localhost", "localhost"])
