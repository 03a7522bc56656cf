"""Listening sockets of servers, and their addresses."""

from __future__ import annotations

import socket
from ipaddress import ip_address
from typing import Final

from kvstore.errors import StartupError
from kvstore.runtime.clock import uptime
from kvstore.runtime.resolver import RESOLVE_S, resolve

EVERY_INTERFACE: Final = ("", "0.0.0.0", "::")
"""Values of ``--host`` for all interfaces: ``::`` for IPv6 and IPv4, if the host has both."""


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on ``host:port``.

    Args:
        host: an address or a name of this host. ``::`` and the empty one: all interfaces, by IPv6
            and IPv4; by IPv4 alone where the kernel has no IPv6.
        port: 0 for any that is free.

    Raises:
        OSError: the address is unusable; UnknownNameError: ``host`` has no address.
    """
    if host in ("", "::"):
        if not _has_ipv6():
            return socket.create_server(("0.0.0.0", port))
        return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
    address = resolve(host, port, uptime() + RESOLVE_S)[0]
    return socket.create_server(address.place, family=address.family)


def local_connect_address(host: str) -> str:
    """Return the address at which local processes reach a server that listens on ``host``."""
    if host == "0.0.0.0" or (host in EVERY_INTERFACE and not _has_ipv6()):
        return "127.0.0.1"
    return "::1" if host in EVERY_INTERFACE else host


def check_family(host: str, address: str) -> None:
    """Raise StartupError if a server that listens on ``host`` accepts no connections to the
    advertised ``address``, judged by their address families. Names may have addresses of both."""
    try:
        wanted, listens = ip_address(address).version, ip_address(host or "::")
    except ValueError:
        return
    if listens.version != wanted and not (host in EVERY_INTERFACE and listens.version == 6):
        raise StartupError(
            f"advertised address {address} and listen address {host} have different address "
            "families",
            advice="Listen on ::, or advertise another address.",
            host=host,
        )


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True
