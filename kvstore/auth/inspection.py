"""What a file that proves an identity says, and what is wrong with it: ``kvstore auth show``."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Final, NamedTuple

from kvstore.auth.authority import certificates
from kvstore.auth.credentials import MASTER_NAME, NODE_NAME, check_mode_of, key_file, read
from kvstore.auth.identity import MASTER, NODE, Identity, identity_of
from kvstore.errors import ConfigError, KVStoreError

if TYPE_CHECKING:
    from cryptography import x509

SERVED: Final = {MASTER: MASTER_NAME, NODE: NODE_NAME}
"""The name that peers look for in the certificate of each role."""


class Shown(NamedTuple):
    identity: Identity | None
    number: str
    since: datetime
    until: datetime
    hosts: list[str]
    signed_by: str
    """Empty: none of the authorities in the file."""
    trusts: list[str]
    problems: list[str]


def inspect(path: str, now: datetime) -> Shown:
    """
    Raises:
        ConfigError: it cannot be read, or has no key, certificate or authority.
        StartupError: ``cryptography`` is not installed.
    """
    of = certificates()
    pems = read(path, check_mode=False)
    leaf: x509.Certificate
    leaf, *between = of.loaded(pems.chain)
    authorities: list[x509.Certificate] = of.loaded(pems.authorities)
    problems = []
    try:
        check_mode_of(key_file(path))
    except ConfigError as error:
        problems.append(str(error))
    who: Identity | None = None
    try:
        who = identity_of(of.uris_of(leaf))
    except KVStoreError as error:
        problems.append(str(error))
    hosts: list[str] = of.hosts_of(leaf)
    if who is not None:
        problems += [
            f"has the role {role}, and not its name {name}: peers will refuse it"
            for role, name in SERVED.items()
            if role in who.roles and name not in hosts
        ]
        problems += [
            f"its common name {name} is that of a {role}, and clients would take it for one"
            for role, name in SERVED.items()
            if role not in who.roles and of.common_name(leaf) == name
        ]
        if not SERVED.keys().isdisjoint(who.roles) and not of.may_serve(leaf):
            problems.append("its uses do not allow it to serve: it needs server auth")
        if who.number and who.number != of.number_of(leaf):
            problems.append(
                f"its identity has the number {who.number}, and the certificate another one"
            )
    if not of.may_connect(leaf):
        problems.append("its uses do not allow it to connect: it needs client auth")
    since, until = of.since_of(leaf), of.until_of(leaf)
    if now < since:
        problems.append(f"is not valid before {since:%Y-%m-%d %H:%M} UTC")
    if now >= until:
        problems.append(f"has expired on {until:%Y-%m-%d %H:%M} UTC: issue it anew")
    if not of.belongs(pems.key, leaf):
        problems.append("the key is not the certificate's")
    authority = of.signed_by(leaf, between, authorities)
    if authority is None:
        problems.append("the certificate is not signed by an authority in this file")
    elif now >= of.until_of(authority):
        problems.append(f"{of.shown_name(authority)} has expired")
    return Shown(
        who,
        of.number_of(leaf),
        since,
        until,
        hosts,
        of.shown_name(authority) if authority is not None else "",
        [of.shown_name(each) for each in authorities],
        problems,
    )
