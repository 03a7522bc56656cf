"""Text forms of sizes, times, keys and names."""

from __future__ import annotations

import re
from typing import Final

from kvstore.errors import InvalidKeyError
from kvstore.limits import Key, check_key

HEX = "hex:"
"""Prefix of the text form of keys that are not printable, or that begin with "hex:"."""

_SECONDS: Final = {"ms": 0.001, "s": 1, "min": 60, "m": 60, "h": 3_600, "d": 86_400}


def parse_duration(text: str) -> float | None:
    """Return seconds of a text with a unit (``90s``, ``1.5h``; ms, s, min, m, h, d), or None."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s|min|m|h|d)", text.strip(), re.ASCII)
    return float(found[1]) * _SECONDS[found[2]] if found else None


def name_text(name: str) -> str:
    """Return a program's name on one line and without control characters."""
    return name if name.isprintable() else ascii(name)


def field_text(value: object) -> str:
    """Return the value of a ``key=value`` in the log, quoted unless it is one printable word, so
    that text of a peer cannot end the value or add fields."""
    text = str(value)
    return text if text.isprintable() and " " not in text and "'" not in text else repr(text)


def key_text(key: bytes) -> str:
    """Return a key as text if that is unambiguous, else ``hex:`` and its hexadecimal form."""
    try:
        text = key.decode()
    except UnicodeDecodeError:
        return HEX + key.hex()
    # Spaces would hide the ends of columns, and a leading "-" would look like an option.
    plain = text.isprintable() and " " not in text and not text.startswith((HEX, "-"))
    return text if plain else HEX + key.hex()


def sanitize(text: str, most: int = 80) -> str:
    """Escape control characters in text of a peer for a terminal, and truncate it to ``most``
    characters. Unlike ``name_text`` it leaves the rest as it is."""
    shown = "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )
    return shown if len(shown) <= most else shown[: most - 1] + "…"


def key_from_text(text: str, *, as_hex: bool = False) -> Key:
    """Return the inverse of ``key_text``.

    Raises:
        InvalidKeyError: not hexadecimal, or an invalid key.
    """
    if not as_hex and not text.startswith(HEX):
        return check_key(text)
    digits = text.removeprefix(HEX)
    try:
        return check_key(bytes.fromhex(digits))
    except ValueError as error:
        raise InvalidKeyError(
            f"{digits!r} is not hexadecimal",
            advice="Write two digits per byte; a text key needs no --hex.",
        ) from error


def size_text(size: float) -> str:
    """Return three digits and a binary unit: ``1.50 GiB``; bytes below 1 KiB are exact."""
    if size < 1024:
        return f"{size:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        size /= 1024
        if size < 999.5 or unit == "PiB":
            break
    return f"{size:.{max(0, 2 - len(str(int(size))) + 1)}f} {unit}"


def duration_text(milliseconds: int) -> str:
    """Return a duration: ``450 ms``, ``12.3 s``, ``4 min 10 s``, ``3 h 20 min``, ``5 d 2 h``."""
    if milliseconds < 1000:
        return f"{milliseconds} ms"
    seconds = milliseconds / 1000
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, hours, days = int(seconds // 60), int(seconds // 3600), int(seconds // 86400)
    if minutes < 60:
        return f"{minutes} min {int(seconds % 60)} s"
    if hours < 24:
        return f"{hours} h {minutes % 60} min"
    return f"{days} d {hours % 24} h"
