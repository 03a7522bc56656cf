"""From when until when a certificate is valid, and whether it ends soon.

Reads certificates without ``cryptography``, which processes that only show theirs need not have.
"""

from __future__ import annotations

import math
import os
import ssl
from _ssl import _test_decode_cert
from datetime import UTC, datetime
from typing import Final, NamedTuple

DAY_S: Final = 86_400

SOON_S: Final = 30 * DAY_S
SOON_SHARE: Final = 0.25
"""A certificate ends soon in its last 30 days, or in the last quarter of its time if that is
shorter: cert-manager and SPIRE renew theirs before."""


class Validity(NamedTuple):
    """Both in seconds since the epoch."""

    since: float
    until: float

    @property
    def until_text(self) -> str:
        return f"{datetime.fromtimestamp(self.until, UTC):%Y-%m-%d %H:%M} UTC"

    def ends_soon(self, now: float, soon_s: float = SOON_S) -> bool:
        """Whether it ends soon, or has ended. ``now``: seconds since the epoch. ``soon_s``: how
        many seconds before its end that is, at most."""
        return now >= self.until - min(soon_s, SOON_SHARE * (self.until - self.since))


FOREVER: Final = Validity(0.0, math.inf)


def validity_of(chain: str) -> Validity:
    """That of the certificate that ends first, of a chain in PEM. ``FOREVER``: its times are
    written in a way that X.509 does not allow."""
    end = "-----END CERTIFICATE-----"
    try:
        found = [_validity(f"{each}{end}\n") for each in chain.split(end)[:-1]]
    except (ssl.SSLError, ValueError):
        return FOREVER
    return min(found, key=lambda each: each.until, default=FOREVER)


def _validity(pem: str) -> Validity:
    # The one function of Python that reads a certificate without a connection; it takes files only.
    descriptor = os.memfd_create("kvstore-certificate", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, pem.encode())
        told = _test_decode_cert(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
    times = str(told["notBefore"]), str(told["notAfter"])
    return Validity(*map(ssl.cert_time_to_seconds, times))
