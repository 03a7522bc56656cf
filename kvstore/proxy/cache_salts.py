"""Cache isolation between callers, by the ``cache_salt`` in requests to engines.

An engine includes the ``cache_salt`` in the hash of a prompt's first block, so only requests with
the same salt share blocks, in its own cache and in the store. The salt is HMAC-SHA256, under a
secret of the proxies, of the header that identifies the caller and of the caller's own salt, as
JSON. Without the secret the salt of another caller cannot be computed, and a caller's own salt only
divides its own requests further. Proxies with the same secret give a caller the same salt.
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
        """``header``: the name of the header that identifies the caller."""
        self.header = header
        self._secret = secret.encode()

    def caller(self, headers: CIMultiDictProxy[str]) -> str | None:
        """Return the caller; None: the header is missing or repeated, where readers would differ in
        the one that counts."""
        given = headers.getall(self.header, [])
        return given[0] or None if len(given) == 1 else None

    def salted(self, caller: str, body: Body) -> Body:
        """Return the body with the caller's salt in place of any other."""
        whole = json.dumps([caller, body.get(SALT)], sort_keys=True).encode()
        return {**body, SALT: hmac.digest(self._secret, whole, hashlib.sha256).hex()}


def salts_by(config: ProxyConfig) -> CacheSalts | None:
    """Return None if requests keep their own salts.

    Raises:
        ConfigError: the secret's file cannot be read, is empty, or is readable by other users.
    """
    if not config.cache_salt_from:
        return None
    check_mode_of(Path(config.cache_salt_secret_file).expanduser(), SECRET_FILE)
    secret = read_token(config.cache_salt_secret_file, SECRET_FILE)
    return CacheSalts(config.cache_salt_from, secret)
