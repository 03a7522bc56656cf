"""Holder ids: the numbers by which data servers know identities."""

from __future__ import annotations

import functools
import hmac
from typing import Final

from kvstore.security.identity import Identity
from kvstore.security.revocation_list import normalize_serial

_REMEMBERED: Final = 2_048


def holder_of(who: Identity) -> int:
    """Derive it from the number of the certificate; without one, from its URI."""
    return _holder_by(normalize_serial(who.number) or who.uri)


@functools.lru_cache(_REMEMBERED)
def _holder_by(said: str) -> int:
    """Return the holder for a certificate number in the form of ``normalize_serial``."""
    digest = hmac.digest(b"holder", said.encode(), "sha256")
    return int.from_bytes(digest[:8], "little") >> 1 | 1


def shown(holder: int) -> str:
    """Format a holder for logs, metrics and ``kvstore auth show``."""
    return f"{holder:016x}"
