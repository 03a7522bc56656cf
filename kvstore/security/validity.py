"""Validity periods of certificates. Pure.

Parses the two times of X.509 (RFC 5280, 4.1) without ``cryptography``, which only ``kvstore auth``
requires.
"""

from __future__ import annotations

import math
import ssl
from datetime import UTC, datetime
from typing import Final, NamedTuple

DAY_S: Final = 86_400

SOON_S: Final = 30 * DAY_S
SOON_SHARE: Final = 0.25
"""A certificate expires soon in its last 30 days, or in the last quarter of its validity if that is
shorter: cert-manager and SPIRE renew theirs earlier."""

_VERSION: Final = 0xA0
_UTC_TIME: Final = 0x17


class ValidityPeriod(NamedTuple):
    """Both in seconds since the epoch."""

    since: float
    until: float

    def error(self, now: float) -> str:
        """Return why it is not valid at ``now``, a Unix time; "": it is."""
        if self.since <= now < self.until:
            return ""
        since, until, now_text = map(time_text, (self.since, self.until, now))
        return f"it is valid from {since} to {until}, and the clock of this host shows {now_text}"

    def ends_soon(self, now: float, soon_s: float = SOON_S) -> bool:
        """Return whether it expires soon, or has expired. ``now``: seconds since the epoch.
        ``soon_s``: maximum seconds before its end."""
        return now >= self.until - min(soon_s, SOON_SHARE * (self.until - self.since))


def time_text(unix_time: float) -> str:
    return f"{datetime.fromtimestamp(unix_time, UTC):%Y-%m-%d %H:%M} UTC"


FOREVER: Final = ValidityPeriod(0.0, math.inf)


def validity_of(chain: str) -> ValidityPeriod:
    """Return the period in which all certificates of a PEM chain are valid. ``FOREVER``: its times
    are not valid X.509."""
    end = "-----END CERTIFICATE-----"
    try:
        ders = [ssl.PEM_cert_to_DER_cert(each.strip() + end) for each in chain.split(end)[:-1]]
        since, until = zip(*map(_validity, ders), strict=True)
        return ValidityPeriod(max(since), min(until))
    except (ValueError, IndexError):  # also of an empty chain
        return FOREVER


def _validity(der: bytes) -> ValidityPeriod:
    _, at, _ = _element(der, 0)  # Certificate
    _, at, _ = _element(der, at)  # TBSCertificate
    tag, _, after = _element(der, at)
    if tag == _VERSION:
        at = after
    for _ in ("serialNumber", "signature", "issuer"):
        _, _, at = _element(der, at)
    _, at, _ = _element(der, at)  # Validity
    _, _, after = _element(der, at)
    return ValidityPeriod(_time(der, at), _time(der, after))


def _element(der: bytes, at: int) -> tuple[int, int, int]:
    """Return tag, start and end of the content of the element at ``at``."""
    tag, length, begin = der[at], der[at + 1], at + 2
    if length & 0x80:
        count = length & 0x7F
        length = int.from_bytes(der[begin : begin + count], "big")
        begin += count
    return tag, begin, begin + length


def _time(der: bytes, at: int) -> float:
    tag, begin, end = _element(der, at)
    form = "%y%m%d%H%M%SZ" if tag == _UTC_TIME else "%Y%m%d%H%M%SZ"
    return datetime.strptime(der[begin:end].decode(), form).replace(tzinfo=UTC).timestamp()
