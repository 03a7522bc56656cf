"""Keeps the cache of one caller from others: the ``cache_salt`` that engines are sent.

An engine that is sent a ``cache_salt`` makes it part of the hash of a prompt's first block, so only
requests with the same salt share blocks, in its own cache and in the store. The salt is
HMAC-SHA256, under a secret of the proxies, of the header that says who calls and of the salt that
the caller has sent, as JSON. Without the secret nobody can compute the salt of another caller, and
a salt of the caller's own only divides its own requests further. Proxies with the same secret give
a caller the same salt.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from pathlib import Path
from typing import Final

from multidict import CIMultiDictProxy

from kvstore.config import ProxyConfig, read_token
from kvstore.proxy.bodies import SALT, Body
from kvstore.security.credentials import check_mode_of

SECRET_FILE: Final = "cache_salt_secret_file"  # noqa: S105 - the name of a setting


class CacheSalts:
    """The salts of one proxy."""

    def __init__(self, header: str, secret: str) -> None:
        """``header``: the name of the header that says who calls."""
        self.header = header
        self._secret = secret.encode()

    def caller(self, headers: CIMultiDictProxy[str]) -> str | None:
        """Who calls; None: the header is missing, or there are several: readers would differ in
        which of them counts."""
        given = headers.getall(self.header, [])
        return given[0] or None if len(given) == 1 else None

    def salted(self, caller: str, body: Body) -> Body:
        """The body with the caller's salt. Whatever salt the body has, is replaced."""
        whole = json.dumps([caller, body.get(SALT)], sort_keys=True).encode()
        return {**body, SALT: hmac.digest(self._secret, whole, hashlib.sha256).hex()}


def salts_by(config: ProxyConfig) -> CacheSalts | None:
    """None: requests keep the salts that they have.

    Raises:
        ConfigError: the secret's file cannot be read, holds none, or other users may read it.
    """
    if not config.cache_salt_from:
        return None
    check_mode_of(Path(config.cache_salt_secret_file).expanduser(), SECRET_FILE)
    secret = read_token(config.cache_salt_secret_file, SECRET_FILE)
    return CacheSalts(config.cache_salt_from, secret)
