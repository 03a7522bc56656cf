"""Names of other authorities, and the identities that they stand for.

A certificate of SPIFFE has exactly one URI, which is its own (``spiffe://prod/ns/llm/sa/decode``).
A file of TOML says who that is here:

    "spiffe://prod/ns/llm/sa/decode" = "kvstore:engine/decode?read=vllm/*&write=vllm/*"
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from typing import Final

from kvstore.auth.identity import SCHEME, Identity, identity_of, parse
from kvstore.errors import ConfigError, InvalidArgumentError
from kvstore.process.watched_files import read_file

NAMES_MAX: Final = 65_536
FILE_BYTES_MAX: Final = 64 << 20


def load_names(path: str) -> dict[str, Identity]:
    """The identities by name; empty if ``path`` is.

    Raises:
        ConfigError: the file cannot be read, or an entry names no identity.
    """
    if not path:
        return {}
    try:
        content = read_file(path, "auth_names", bytes_max=FILE_BYTES_MAX)
        given = tomllib.loads(content.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"auth_names {path} is no TOML: {error}", key="auth_names") from None
    names: dict[str, Identity] = {}
    for name, uri in given.items():
        try:
            if name.startswith(SCHEME) or not isinstance(uri, str):
                raise InvalidArgumentError("it is no name of another authority and an identity")
            names[name] = parse(uri)._replace(other=name)
        except InvalidArgumentError as error:
            raise ConfigError(
                f"auth_names {path}: {name[:80]!r}: {error.message}",
                advice='Each line is "URI" = "kvstore:ROLE/NAME?read=PATTERN&write=PATTERN".',
                key="auth_names",
            ) from None
    if len(names) > NAMES_MAX:
        raise ConfigError(f"auth_names {path} has more than {NAMES_MAX} names", key="auth_names")
    return names


def identity_by(names: Iterable[str], known: Mapping[str, Identity]) -> Identity:
    """The identity of a certificate with these alternative names. One of our own counts more than
    what is known of others.

    Raises:
        InvalidArgumentError: there is none, or there are several.
    """
    given = list(names)
    of_others = [known[name] for name in given if name in known]
    if len(of_others) == 1 and not any(name.startswith(SCHEME) for name in given):
        return of_others[0]
    return identity_of(given)
