"""How sizes, times, keys and names are written for people."""

from __future__ import annotations

from kvstore.errors import InvalidKeyError
from kvstore.limits import Key, check_key

HEX = "hex:"
"""Prefix of the written form of a key that is not printable text, or that begins with "hex:"."""


def name_text(name: str) -> str:
    """A name that a program chose, on one line and without control characters."""
    return name if name.isprintable() else ascii(name)


def field_text(value: object) -> str:
    """The value in a ``key=value`` of the log: quoted unless it is printable and one word, so that
    a peer's text can neither end the value nor add fields."""
    text = str(value)
    return text if text.isprintable() and " " not in text and "'" not in text else repr(text)


def key_text(key: bytes) -> str:
    """A key as text where that is unambiguous, else ``hex:`` and its hexadecimal form."""
    try:
        text = key.decode()
    except UnicodeDecodeError:
        return HEX + key.hex()
    # Spaces would hide where a column ends, and a leading "-" would be read as an option.
    plain = text.isprintable() and " " not in text and not text.startswith((HEX, "-"))
    return text if plain else HEX + key.hex()


def sanitize(text: str, most: int = 80) -> str:
    """A text with words of a stranger, for a terminal: control characters are escaped, and at most
    ``most`` characters are shown. Unlike ``name_text`` it leaves the rest of the text as it is."""
    shown = "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )
    return shown if len(shown) <= most else shown[: most - 1] + "…"


def key_from_text(text: str, *, as_hex: bool = False) -> Key:
    """The inverse of ``key_text``.

    Raises:
        InvalidKeyError: not hexadecimal, or a key that no object can have.
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
    """Three digits and a binary unit: ``1.50 GiB``; bytes below 1 KiB are exact."""
    if size < 1024:
        return f"{size:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        size /= 1024
        if size < 999.5 or unit == "PiB":
            break
    return f"{size:.{max(0, 2 - len(str(int(size))) + 1)}f} {unit}"


def duration_text(milliseconds: int) -> str:
    """``450 ms``, ``12.3 s``, ``4 min 10 s``, ``3 h 20 min``, ``5 d 2 h``."""
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
