"""Checks the file that proves who this process is."""

from __future__ import annotations

import time

from kvstore.auth.credentials import Credentials
from kvstore.diagnosis.findings import Finding, of_row, ok
from kvstore.errors import ConfigError


def identity(auth: str) -> list[Finding]:
    """``auth``: the file, as ``KVSTORE_AUTH`` names it."""
    try:
        valid = Credentials(auth).validity()
    except ConfigError as error:
        return [of_row("error", error=error)]
    now, until = time.time(), valid.until_text
    if valid.ends_soon(now):
        check = "identity_ended" if now >= valid.until else "identity_ends"
        return [of_row(check, auth=auth, until=until)]
    return [ok(f"{auth} is valid until {until}")]
