"""The identities that are revoked: a file with a number per line, which ``kvstore auth revoke``
writes. Masters look at it once a second."""

from __future__ import annotations

import logging
from typing import Final

from kvstore.auth.identity import Identity
from kvstore.clocks import uptime
from kvstore.network.tls import mark_of

log = logging.getLogger("kvstore.auth")

LOOK_S: Final = 1.0
FILE_BYTES_MAX: Final = 16 << 20


class Revoked:
    """Numbers of revoked certificates. Threads: one."""

    def __init__(self, path: str, *, kept_s: float = 0.0) -> None:
        """
        Args:
            path: the file; it may come later. Empty: nothing is ever revoked.
            kept_s: for how long ``lately`` names a number.
        """
        self._path = path
        self._numbers: frozenset[str] = frozenset()
        self._kept_s = kept_s
        self._lately: dict[str, float] = {}
        """Until when each is named, in their order."""
        self._seen: object = None
        self._look_at = 0.0
        self._has_looked = False
        self._wrong = ""

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
        has_looked, self._has_looked = self._has_looked, True
        self._look_at = uptime() + LOOK_S
        try:
            seen = mark_of(self._path)
            if seen is not None and seen == self._seen:
                return
            with open(self._path, encoding="utf-8", errors="replace") as file:
                lines = file.read(FILE_BYTES_MAX).splitlines()
        except FileNotFoundError:
            return  # nobody was revoked so far; and who was stays so
        except OSError as error:
            if self._wrong != (wrong := str(error)):  # once, and not each second
                self._wrong = wrong
                log.warning("revoked_not_read file=%s reason=%s", self._path, wrong)
            return
        self._seen = seen
        self._wrong = ""
        numbers = frozenset(plain(line.split("#")[0]) for line in lines) - {""}
        log.info("revoked_read file=%s numbers=%d", self._path, len(numbers))
        for number in sorted(numbers - self._numbers) if has_looked and self._kept_s else ():
            self._lately.pop(number, None)
            self._lately[number] = uptime() + self._kept_s
        self._numbers = numbers


def plain(number: str) -> str:
    """One form of what tools write differently: ``0A:1B`` (openssl), ``0xa1b``, ``a1b``."""
    return number.strip().lower().removeprefix("0x").replace(":", "").lstrip("0")
