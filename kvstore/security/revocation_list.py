"""Revoked identities: a file with one number per line, written by ``kvstore auth revoke``.

A missing, truncated, unreadable or older list must not admit a revoked identity: no process starts
with it, and a running one reports it and keeps the previous list.
"""

from __future__ import annotations

from string import hexdigits
from typing import Final

from kvstore.errors import ConfigError
from kvstore.runtime.watched_files import WatchedFile, read_file
from kvstore.security.identity import Identity

FILE_BYTES_MAX: Final = 16 << 20

_NONE: Final[frozenset[str]] = frozenset()


class RevocationList:
    """Numbers of revoked certificates. Threads: any."""

    def __init__(self, path: str) -> None:
        """
        Args:
            path: the file; empty: nothing is revoked.

        Raises:
            ConfigError: the file cannot be read, is truncated, or has lines that are no numbers.
        """
        self._file = (
            WatchedFile("auth_revoked", path, lambda: _read(path), accept=_accept) if path else None
        )

    def has(self, who: Identity) -> bool:
        numbers = self._numbers()
        return bool(numbers) and normalize_serial(who.number) in numbers

    def _numbers(self) -> frozenset[str]:
        return _NONE if self._file is None else self._file.value


def _accept(before: frozenset[str], now: frozenset[str]) -> frozenset[str]:
    """Raise ConfigError if numbers are missing in the new list."""
    if lacking := len(before - now):
        raise ConfigError(f"it lacks {lacking} numbers of the list in use, so it may be older")
    return now


def _read(path: str) -> frozenset[str]:
    """Read the numbers of a file. Raises ConfigError."""
    content = read_file(
        path, "auth_revoked", bytes_max=FILE_BYTES_MAX,
        advice="Copy it from the folder of the authority (kvstore auth init), where it is empty "
        "until somebody is revoked; or leave --auth-revoked out.",
    )  # fmt: skip
    lines = content.decode(errors="replace").splitlines()
    numbers = frozenset(normalize_serial(line.split("#")[0]) for line in lines) - {""}
    what = ""
    if content and not content.endswith(b"\n"):
        what = "ends within a line, so it may be cut"
    for number in numbers:
        if not all(digit in hexdigits for digit in number):
            what = f"has a line that is no number: {number[:40]!r}"
    if what:
        raise ConfigError(
            f"auth_revoked {path} {what}",
            advice="Copy it again from the folder of the authority.",
            path=path,
        )
    return numbers


def normalize_serial(number: str) -> str:
    """Normalize a serial number: ``0A:1B`` (openssl), ``0xa1b``, ``a1b``."""
    return number.strip().lower().removeprefix("0x").replace(":", "").lstrip("0")
