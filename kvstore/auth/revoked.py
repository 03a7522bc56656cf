"""The identities that are revoked: a file with a number per line, which ``kvstore auth revoke``
writes.

A file that is missing, cut or no such list must not let in who was revoked. With it no process
starts, and one that runs keeps what it knew. Numbers that are no longer in the file stay revoked
until the process starts again.
"""

from __future__ import annotations

from string import hexdigits
from typing import Final

from kvstore.auth.identity import Identity
from kvstore.clocks import uptime
from kvstore.errors import ConfigError
from kvstore.process.watched_files import WatchedFile, read_file

FILE_BYTES_MAX: Final = 16 << 20

_NONE: Final[frozenset[str]] = frozenset()


class Revoked:
    """Numbers of revoked certificates. Threads: any; one for ``lately``."""

    def __init__(self, path: str, *, kept_s: float = 0.0) -> None:
        """
        Args:
            path: the file. Empty: nothing is ever revoked.
            kept_s: for how long ``lately`` names a number.

        Raises:
            ConfigError: the file cannot be read, is cut, or has something else than numbers.
        """
        self._file = (
            WatchedFile("auth_revoked", path, lambda: _read(path), accept=_merge) if path else None
        )
        self._kept_s = kept_s
        self._lately: dict[str, float] = {}
        """Until when each is named, in their order."""
        self._named = self._numbers()

    def has(self, who: Identity) -> bool:
        numbers = self._numbers()
        return bool(numbers) and plain(who.number) in numbers

    def lately(self) -> list[str]:
        """The numbers that came into the file within ``kept_s``, the newest last; not those that
        were there at the first look."""
        now, numbers = uptime(), self._numbers()
        if numbers is not self._named:
            self._lately |= dict.fromkeys(sorted(numbers - self._named), now + self._kept_s)
            self._named = numbers
        while self._lately and next(iter(self._lately.values())) <= now:
            del self._lately[next(iter(self._lately))]
        return list(self._lately)

    def _numbers(self) -> frozenset[str]:
        return _NONE if self._file is None else self._file.value


def _merge(before: frozenset[str], now: frozenset[str]) -> tuple[frozenset[str], str]:
    """All numbers that were ever in the file."""
    lacking = len(before - now)
    why = f"it lacks {lacking} of the revoked, who stay so until this process starts again"
    return before | now, why if lacking else ""


def _read(path: str) -> frozenset[str]:
    """The numbers of a file. Raises ConfigError."""
    content = read_file(
        path, "auth_revoked", bytes_max=FILE_BYTES_MAX,
        advice="Copy it from the folder of the authority (kvstore auth init), where it is empty "
        "until somebody is revoked; or leave --auth-revoked out.",
    )  # fmt: skip
    lines = content.decode(errors="replace").splitlines()
    numbers = frozenset(plain(line.split("#")[0]) for line in lines) - {""}
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


def plain(number: str) -> str:
    """One form of what tools write differently: ``0A:1B`` (openssl), ``0xa1b``, ``a1b``."""
    return number.strip().lower().removeprefix("0x").replace(":", "").lstrip("0")
