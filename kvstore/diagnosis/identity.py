"""Checks the file that proves who this process is."""

from __future__ import annotations

import time

from kvstore.auth.credentials import Credentials
from kvstore.diagnosis.findings import Finding, ok, problem, warning
from kvstore.diagnosis.rows import ADVICE
from kvstore.errors import ConfigError

ISSUE = ADVICE["KvstoreIdentityEnds"]


def identity(auth: str) -> list[Finding]:
    """``auth``: the file, as ``KVSTORE_AUTH`` names it."""
    try:
        valid = Credentials(auth).validity()
    except ConfigError as error:
        return [problem(error.message, error.advice)]
    now = time.time()
    if now >= valid.until:
        return [problem(f"{auth} has ended on {valid.until_text}", ISSUE)]
    if valid.ends_soon(now):
        return [warning(f"{auth} ends on {valid.until_text}", ISSUE)]
    return [ok(f"{auth} is valid until {valid.until_text}")]
