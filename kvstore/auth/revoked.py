"""The identities that are revoked: a file with a number per line, which ``kvstore auth revoke``
writes. Masters look at it once a second.

A file that is missing or is no such list must not let in who was revoked: with it no process
starts, and one that runs keeps what it knew, and says so each minute.
"""

from __future__ import annotations

import logging
from string import hexdigits
from typing import Final

from kvstore.auth.identity import Identity
from kvstore.clocks import uptime
from kvstore.errors import ConfigError
from kvstore.network.tls import mark_of

log = logging.getLogger("kvstore.auth")

LOOK_S: Final = 1.0
REMIND_S: Final = 60.0
FILE_BYTES_MAX: Final = 16 << 20


class Revoked:
    """Numbers of revoked certificates. Threads: one."""

    def __init__(self, path: str, *, kept_s: float = 0.0) -> None:
        """
        Args:
            path: the file. Empty: nothing is ever revoked.
            kept_s: for how long ``lately`` names a number.

        Raises:
            ConfigError: the file cannot be read, or has something else than numbers.
        """
        self._path = path
        self._numbers: frozenset[str] = frozenset()
        self._kept_s = kept_s
        self._lately: dict[str, float] = {}
        """Until when each is named, in their order."""
        self._seen: object = None
        self._look_at = 0.0
        self._remind_at = 0.0
        if path:
            self._seen = mark_of(path)
            self._numbers = _read(path)
            log.info("revoked_read file=%s numbers=%d", path, len(self._numbers))

    def has(self, who: Identity) -> bool:
        if self._path and uptime() >= self._look_at:
            self._look()
        return bool(self._numbers) and plain(who.number) in self._numbers

    def lately(self) -> list[str]:
        """The numbers that came into the file within ``kept_s``, the newest last; not those that
        were there at the first look."""
        now = uptime()
        if self._path and now >= self._look_at:
            self._look()
        while self._lately and next(iter(self._lately.values())) <= now:
            del self._lately[next(iter(self._lately))]
        return list(self._lately)

    def _look(self) -> None:
        now = uptime()
        self._look_at = now + LOOK_S
        seen = mark_of(self._path)
        if seen is not None and seen == self._seen:
            return
        try:
            numbers = _read(self._path)
        except ConfigError as error:
            if now >= self._remind_at:
                self._remind_at = now + REMIND_S
                log.warning(
                    "revoked_not_read file=%s reason=%r kept=%d",
                    self._path, error.message, len(self._numbers),
                )  # fmt: skip
            return
        self._seen, self._remind_at = seen, 0.0
        log.info("revoked_read file=%s numbers=%d", self._path, len(numbers))
        for number in sorted(numbers - self._numbers) if self._kept_s else ():
            self._lately.pop(number, None)
            self._lately[number] = now + self._kept_s
        self._numbers = numbers


def _read(path: str) -> frozenset[str]:
    """The numbers of a file. Raises ConfigError."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            lines = file.read(FILE_BYTES_MAX).splitlines()
    except OSError as error:
        raise ConfigError(
            f"the file of revoked identities cannot be read: {path}: {error.strerror}",
            advice="Copy it from the folder of the authority (kvstore auth init), where it is "
            "empty until somebody is revoked; or leave --auth-revoked out.",
            path=path,
        ) from error
    numbers = frozenset(plain(line.split("#")[0]) for line in lines) - {""}
    for number in numbers:
        if not all(digit in hexdigits for digit in number):
            raise ConfigError(
                f"the file of revoked identities has a line that is no number: {path}: "
                f"{number[:40]!r}",
                advice="Copy it again from the folder of the authority.",
                path=path,
            )
    return numbers


def plain(number: str) -> str:
    """One form of what tools write differently: ``0A:1B`` (openssl), ``0xa1b``, ``a1b``."""
    return number.strip().lower().removeprefix("0x").replace(":", "").lstrip("0")
