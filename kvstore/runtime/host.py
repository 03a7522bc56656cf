"""The identity of this host's shared memory, and its addresses.

A client maps segments of nodes with its own ``host_id()`` only. This only avoids futile attempts:
the uuid in the superblock identifies a segment (``kvstore.memory.mapping.Mapping``).
"""

from __future__ import annotations

import contextlib
import os
import socket
import uuid
from functools import cache
from ipaddress import ip_address
from typing import Final

from kvstore.errors import StartupError
from kvstore.runtime.addresses import ETCD_SCHEME, join_address, parse_etcd, split_address
from kvstore.runtime.clock import uptime
from kvstore.runtime.resolver import RESOLVE_S, resolve

SHM_DIRECTORY: Final = "/dev/shm"  # noqa: S108 - shared memory is what it is for


@cache
def host_id() -> str:
    """Return an id that is equal in processes with the same kernel and mount of ``/dev/shm``.

    The boot id identifies the running kernel (host names are not unique), the device number a
    container's own ``/dev/shm``. If either cannot be read the id is unique to this process, which
    then uses tcp.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        return f"{boot}-{os.stat(SHM_DIRECTORY).st_dev:x}"
    except OSError:
        return f"unknown-{uuid.uuid4()}"


def places_of(masters: str) -> tuple[str, ...]:
    """Return the addresses in ``host:port,...`` or ``etcd://...`` in a normal form. They identify a
    cluster without a name.

    Loopback addresses include the host name: two containers may share a ``/dev/shm``.
    """
    if masters.startswith(ETCD_SCHEME):
        place = parse_etcd(masters)
        return tuple(
            f"{ETCD_SCHEME}{_placed(endpoint)}/{place.prefix}" for endpoint in place.endpoints
        )
    return tuple(_placed(master) for master in masters.split(","))


def _placed(address: str) -> str:
    host, port = split_address(address)
    host = host.lower()
    if is_loopback(host):
        return f"{socket.gethostname()}/{join_address('127.0.0.1', port)}"
    return join_address(host, port)


def is_loopback(host: str) -> bool:
    """Return whether the address is reachable from this host only."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def loopback_reason(host: str) -> str:
    """Return the reason if a server that listens on ``host`` is reachable from this host only; else
    "".

    On Debian a host's own name is 127.0.1.1 in /etc/hosts.
    """
    if is_loopback(host):
        return f"{host} is this host alone"
    try:
        found = resolve(host, 0, uptime() + RESOLVE_S)
    except OSError:
        return ""  # the server that listens there reports the error
    if not is_loopback(found[0].place[0]):
        return ""
    return f"{host} is {found[0].place[0]} here, by /etc/hosts or the name service"


def own_address() -> str:
    """Return this host's address on the default route; without one, a loopback address."""
    for somewhere in ("192.0.2.1:9", "[2001:db8::1]:9"):  # reserved for documentation
        with contextlib.suppress(StartupError):
            return address_towards(somewhere)
    return "127.0.0.1"


def address_towards(masters: str) -> str:
    """Return our address on the route to the first of ``host:port,...`` or to the etcd, which
    clients near the master can most likely reach. It is a loopback address if the master is on this
    host.

    Raises:
        StartupError: there is no route.
    """
    if masters.startswith(ETCD_SCHEME):
        masters = parse_etcd(masters).endpoints[0]
    host, port = split_address(masters.partition(",")[0])
    try:
        family, target = resolve(host, port, uptime() + RESOLVE_S)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # a datagram socket sends nothing here
            return str(probe.getsockname()[0])
    except OSError as error:
        raise StartupError(
            f"this host has no route to the master at {host}: {error}",
            advice="Check its address, and this host's routes and name service.",
            master=masters,
        ) from error
