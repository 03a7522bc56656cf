"""What others need to know of this host: whether they share its memory, and its address.

A node announces ``host_id()``, and a client compares it with its own before it tries to map a
segment. This is a hint that saves a futile attempt, not a proof: the uuid in the superblock settles
whether a segment is really there (``kvstore.memory.mapping.Mapping``).
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
    """Equal in two processes when they run under one kernel and one mount of ``/dev/shm``.

    The boot id names the running kernel (host names repeat, and containers invent their own); the
    device number tells apart containers that have a ``/dev/shm`` of their own. Where either cannot
    be read the answer is unique to this process, so that it uses tcp.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        return f"{boot}-{os.stat(SHM_DIRECTORY).st_dev:x}"
    except OSError:
        return f"unknown-{uuid.uuid4()}"


def places_of(masters: str) -> tuple[str, ...]:
    """The addresses in ``host:port,...`` or ``etcd://...``, each in a form that is equal for all
    nodes that were given it. They identify a cluster without a name.

    A loopback address gets the name of its host: two containers may share a ``/dev/shm``.
    """
    if masters.startswith(ETCD_SCHEME):
        place = parse_etcd(masters)
        return tuple(f"{ETCD_SCHEME}{_placed(each)}/{place.prefix}" for each in place.endpoints)
    return tuple(_placed(each) for each in masters.split(","))


def _placed(address: str) -> str:
    host, port = split_address(address)
    host = host.lower()
    if is_loopback(host):
        return f"{socket.gethostname()}/{join_address('127.0.0.1', port)}"
    return join_address(host, port)


def is_loopback(host: str) -> bool:
    """Whether the address is one that only this host itself can reach."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def loopback_reason(host: str) -> str:
    """Why only this host itself can reach a server that listens on ``host``; empty: others can.

    On Debian a host's own name is 127.0.1.1 in /etc/hosts, so a server that listens on its name
    hears no other host.
    """
    if is_loopback(host):
        return f"{host} is this host alone"
    try:
        found = resolve(host, 0, uptime() + RESOLVE_S).addresses
    except OSError:
        return ""  # the server that is to listen there says what is wrong
    if not is_loopback(found[0].place[0]):
        return ""
    return f"{host} is {found[0].place[0]} here, by /etc/hosts or the name service"


def own_address() -> str:
    """The address of this host on its default route; a loopback address without such a route."""
    for somewhere in ("192.0.2.1:9", "[2001:db8::1]:9"):  # reserved for documentation
        with contextlib.suppress(StartupError):
            return address_towards(somewhere)
    return "127.0.0.1"


def address_towards(masters: str) -> str:
    """Our own address on the route to the first of ``host:port,...``, or to the etcd that names the
    master. Clients near the master can most likely reach it. It is a loopback address if the master
    is on this host.

    Raises:
        StartupError: there is no route.
    """
    if masters.startswith(ETCD_SCHEME):
        masters = parse_etcd(masters).endpoints[0]
    host, port = split_address(masters.partition(",")[0])
    try:
        family, target = resolve(host, port, uptime() + RESOLVE_S).addresses[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # a datagram socket sends nothing here
            return str(probe.getsockname()[0])
    except OSError as error:
        raise StartupError(
            f"this host has no route to the master at {host}: {error}",
            advice="Check its address, and this host's routes and name service.",
            master=masters,
        ) from error
