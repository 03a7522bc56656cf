"""Sockets that servers listen on."""

from __future__ import annotations

import socket

import pytest

from kvstore.errors import StartupError
from kvstore.runtime.listeners import check_family, listen, local_connect_address


@pytest.mark.parametrize("host", ["::", ""])
def test_every_interface_is_heard_by_both_families(host: str) -> None:
    with listen(host, 0) as listener:
        port = listener.getsockname()[1]
        for family in ("127.0.0.1", "::1"):
            with socket.create_connection((family, port), timeout=5):
                pass


def test_a_server_on_every_interface_is_reached_by_loopback() -> None:
    assert local_connect_address("0.0.0.0") == "127.0.0.1"
    assert local_connect_address("::") == "::1"
    assert local_connect_address("10.0.0.1") == "10.0.0.1"


@pytest.mark.parametrize(
    ("host", "address", "heard"),
    [
        ("0.0.0.0", "10.0.0.1", True),
        ("0.0.0.0", "fd00::5", False),
        ("::", "10.0.0.1", True),
        ("", "10.0.0.1", True),
        ("::", "fd00::5", True),
        ("fd00::5", "10.0.0.1", False),
        ("10.0.0.1", "203.0.113.9", True),  # behind an address translation
        ("cache", "fd00::5", True),  # a name may have addresses of both
        ("0.0.0.0", "cache", True),
    ],
)
def test_what_a_server_hears(host: str, address: str, heard: bool) -> None:
    if heard:
        check_family(host, address)
        return
    with pytest.raises(StartupError, match="address families"):
        check_family(host, address)
