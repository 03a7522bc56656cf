"""Addresses as users write them: ``host:port``, and ``etcd://`` for masters that etcd announces."""

from __future__ import annotations

import re
from ipaddress import ip_address
from typing import Final, NamedTuple
from urllib.parse import parse_qsl, quote, unquote, urlencode

from kvstore.errors import InvalidArgumentError

ETCD_SCHEME: Final = "etcd://"
ETCD_PORT: Final = 2379
ETCD_PREFIX: Final = "kvstore"
"""The default prefix of a cluster's keys in etcd."""

_FILES: Final = ("ca", "cert", "key")


def is_address(host: str) -> bool:
    """Return whether this is an IP address, not a name."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def split_address(address: str, *, default_port: int | None = None) -> tuple[str, int]:
    """Split ``host:port`` or ``[IPv6]:port``; the brackets are removed.

    Raises:
        InvalidArgumentError: not of that form, or without a port and a default.
    """
    text = address.strip()
    advice = "Write HOST:PORT, and an IPv6 address in brackets: [::1]:50001."
    if text.startswith("["):
        host, closing, rest = text[1:].partition("]")
        colon, port = rest[:1], rest[1:]
        valid = bool(closing and host) and colon in ("", ":")
    else:
        host, colon, port = text.partition(":")
        valid = bool(host) and not any(sign in host for sign in "/ ]@") and ":" not in port
    if valid and not colon and default_port is not None:
        return host, default_port
    if not valid or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise InvalidArgumentError(f"{address!r} is not an address", advice=advice)
    return host, int(port)


def is_host_port(text: str) -> bool:
    """Return whether ``split_address`` accepts the text."""
    try:
        split_address(text)
    except InvalidArgumentError:
        return False
    return True


def join_address(host: str, port: int) -> str:
    """Return the inverse of ``split_address``."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class EtcdPlace(NamedTuple):
    """The members of an etcd, its credentials, and the prefix of one cluster's keys."""

    endpoints: tuple[str, ...]
    """``host:port`` of its members, at least one."""
    prefix: str = ETCD_PREFIX
    ca: str = ""
    """File with the CA certificates for etcd; empty: no TLS."""
    cert: str = ""
    key: str = ""
    """Files with our certificate and key, if etcd requires one."""
    user: str = ""
    password: str = ""

    @property
    def leader_key(self) -> bytes:
        """The key of the leader's address, attached to its etcd lease."""
        return f"{self.prefix}/leader".encode()

    @property
    def epoch_key(self) -> bytes:
        """The key of the last leader's epoch."""
        return f"{self.prefix}/epoch".encode()

    @property
    def cluster_key(self) -> bytes:
        """The key of the cluster's name, if it has one."""
        return f"{self.prefix}/cluster".encode()

    def __str__(self) -> str:
        """Return the inverse of ``parse_etcd``."""
        user = f"{quote(self.user, safe='')}:{quote(self.password, safe='')}@" if self.user else ""
        files = {name: getattr(self, name) for name in _FILES if getattr(self, name)}
        query = "?" + urlencode(files, safe="/") if files else ""
        return f"{ETCD_SCHEME}{user}{','.join(self.endpoints)}/{self.prefix}{query}"

    @property
    def text(self) -> str:
        """The text for messages: without the password and the files."""
        return f"{ETCD_SCHEME}{','.join(self.endpoints)}/{self.prefix}"


def parse_etcd(text: str) -> EtcdPlace:
    """``[etcd://][USER:PASSWORD@]HOST[:PORT],...[/PREFIX][?ca=FILE&cert=FILE&key=FILE]``.

    Members are separated by commas or, as with Mooncake, by semicolons.

    Raises:
        InvalidArgumentError: not of that form, or one of the files is missing.
    """
    rest, _, query = text.strip().removeprefix(ETCD_SCHEME).partition("?")
    members, _, prefix = rest.partition("/")
    who, at, members = members.rpartition("@")
    user, _, password = who.partition(":")
    endpoints = tuple(
        join_address(*split_address(member, default_port=ETCD_PORT))
        for member in re.split("[,;]", members)
    )
    files = dict(parse_qsl(query, keep_blank_values=True))
    unknown = files.keys() - set(_FILES)
    prefix = prefix.strip("/") or ETCD_PREFIX
    if unknown or (at and not user) or not prefix.isprintable() or len(prefix) > 128:
        raise InvalidArgumentError(
            f"{text.partition('?')[0].rpartition('@')[2]!r} is not an etcd address",
            advice="Write etcd://HOST:2379,HOST:2379/PREFIX?ca=FILE&cert=FILE&key=FILE.",
        )
    place = EtcdPlace(endpoints, prefix, user=unquote(user), password=unquote(password), **files)
    if bool(place.cert) != bool(place.key) or (place.cert and not place.ca):
        raise InvalidArgumentError(
            "a certificate for etcd needs its key, and both need the certificate of its authority",
            advice="Give ca, cert and key; or ca alone, if etcd requires no client certificate.",
        )
    return place


def shown_place(master: str) -> str:
    """Return the address of a master for messages: an etcd without its password."""
    return parse_etcd(master).text if master.startswith(ETCD_SCHEME) else master
