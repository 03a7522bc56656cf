"""Validation of a program's arguments, before anything is sent.

An invalid argument raises InvalidArgumentError with its name, unit and value. Equivalent types are
accepted, such as numpy's integers or an iterator of keys; but a text is not a sequence of keys, and
``"no"`` is not False.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, SupportsFloat, SupportsIndex, Union, cast

import numpy as np

from kvstore.client.values import Buffer, Payload, Storable, writable
from kvstore.device.memory import DeviceMemory
from kvstore.errors import BufferMismatchError, InvalidArgumentError
from kvstore.limits import (
    BATCH_KEYS_MAX,
    MATCH_KEYS_MAX,
    SIZE_BYTES_MAX,
    Key,
    check_count,
    check_key,
    check_keys,
)
from kvstore.memory.mapping import any_shown
from kvstore.native import steps
from kvstore.runtime.formatting import key_text, parse_duration

if TYPE_CHECKING:
    import torch

    from kvstore.device.device import Device

AnyKey = str | bytes
Duration = float | timedelta | str
"""Seconds, a ``timedelta``, or a text with a unit: ``"90s"``, ``"1h"`` (``duration_ms``)."""
Pairs = Mapping[Any, Storable] | Iterable[tuple[AnyKey, Storable]]
Range = tuple[int, Buffer | Sequence[Buffer]]
"""Offset in the payload, in bytes, and memory, which is as long as the part."""
DType = Union[str, "torch.dtype", "np.dtype[np.generic]", type]
Stream = Union[int, "torch.cuda.Stream"]
"""A stream of a device: torch's, or the driver's handle."""

_TEXTS: Final = (str, bytes, bytearray, memoryview)
ADDRESS_MAX: Final = (1 << 64) - 1
SIZE_MAX: Final = SIZE_BYTES_MAX
CURSOR_MAX: Final = (1 << 64) - 1
OFFSET_MAX: Final = (1 << 62) - 1
TIMEOUT_MS_MAX: Final = 3_600_000
"""Maximum timeout of one call, as that of ``ClientConfig.timeout_ms``."""
KINDS: Final = ("torch", "numpy", "bytes")


def check_integer(name: str, value: object, least: int, most: int, unit: str = "") -> int:
    if type(value) is int and least <= value <= most:  # fast path
        return value
    expected = f"{name} is a whole number{unit and f' of {unit}'}"
    if isinstance(value, bool | np.bool_):
        raise InvalidArgumentError(f"{expected}, not {_shown(value)}")
    try:
        number = operator.index(cast("SupportsIndex", value))
    except TypeError:
        raise InvalidArgumentError(f"{expected}, not {_shown(value)}") from None
    if not least <= number <= most:
        raise InvalidArgumentError(f"{name} is {least} to {most}, not {_shown(number)}")
    return number


def check_integers(
    name: str, values: object, least: int, most: int, unit: str = ""
) -> Sequence[int]:
    """Check integers against bounds; lists of ``int`` without a Python step per item."""
    several = sequence(name, values)
    if set(map(type, several)) == {int}:
        numbers = cast("Sequence[int]", several)
        if least <= min(numbers) and max(numbers) <= most:
            return numbers
    return [check_integer(f"each of {name}", each, least, most, unit) for each in several]


def duration_ms(name: str, value: object, most_ms: int) -> int:
    """Return a duration in ms, rounded up; a text has a unit (``"1.5h"``; ms, s, min, h, d)."""
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
    elif isinstance(value, str):
        parsed = parse_duration(value)
        if parsed is None:
            raise InvalidArgumentError(
                f"{name} is in seconds, or a text with a unit, not {_shown(value)}",
                advice="Write 60, '60s', '5min', '1h' or timedelta(hours=1).",
            )
        seconds = parsed
    else:
        try:
            if isinstance(value, bool | np.bool_ | np.ndarray | bytes | bytearray):
                raise TypeError
            seconds = float(cast("SupportsFloat", value))
        except (TypeError, ValueError, OverflowError):
            raise InvalidArgumentError(
                f"{name} is a number of seconds, not {_shown(value)}",
                advice="Write 60, '60s', '5min', '1h' or timedelta(hours=1).",
            ) from None
    if not 0 < seconds <= most_ms / 1000:  # also rejects NaN
        raise InvalidArgumentError(
            f"{name} is more than 0 and at most {most_ms // 1000} seconds, not {_shown(value)}"
        )
    return math.ceil(seconds * 1000)


def flag(name: str, value: object) -> bool:
    """Return the argument as a boolean; 1 and 0 are accepted."""
    if value is True or value is False:
        return value
    if isinstance(value, int | np.bool_ | np.integer) and value in (0, 1):
        return bool(value)
    raise InvalidArgumentError(f"{name} is True or False, not {_shown(value)}")


def text(name: str, value: object) -> str:
    if type(value) is str:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    raise InvalidArgumentError(f"{name} is a text, not {_shown(value)}")


def one_of(name: str, value: object, allowed: Sequence[str]) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise InvalidArgumentError(
            f"{name} is {', '.join(map(repr, allowed[:-1]))} or {allowed[-1]!r}, "
            f"not {_shown(value)}"
        )


def sequence(name: str, value: object, most: int = MATCH_KEYS_MAX) -> Sequence[object]:
    """Return a sequence; a single text is rejected. Raises BatchTooLargeError."""
    if type(value) is list or type(value) is tuple:  # fast path
        return value
    if isinstance(value, _TEXTS):
        raise InvalidArgumentError(
            f"{name} is a sequence, and this is one {type(value).__name__}: {_shown(value)}",
            advice="Put a single one in brackets.",
        )
    if isinstance(value, Sequence):
        return value
    try:
        several = list(itertools.islice(cast("Iterable[object]", value), most + 1))
    except TypeError:
        raise InvalidArgumentError(f"{name} is a sequence, not {_shown(value)}") from None
    check_count(len(several), most)
    return several


def key_list(keys: object, most: int = BATCH_KEYS_MAX) -> list[Key]:
    """Return the keys. Raises InvalidKeyError; BatchTooLargeError: more than ``most``."""
    return check_keys(sequence("keys", keys), distinct=False, keys_max=most)


def pairs(items: Pairs) -> tuple[list[Key], list[Storable]]:
    given = items.items() if isinstance(items, Mapping) else items
    several = cast("Sequence[tuple[AnyKey, Storable]]", sequence("items", given, BATCH_KEYS_MAX))
    try:
        keys = [key for key, _ in several]
    except (TypeError, ValueError):
        raise InvalidArgumentError("items are pairs of a key and a value, or a dict") from None
    return check_keys(keys, distinct=True), [value for _, value in several]


def rows(name: str, values: object) -> Sequence[object]:
    """Return values or buffers, one per key. An array or tensor is a sequence of its rows."""
    if isinstance(values, np.ndarray) and not values.ndim:
        raise InvalidArgumentError(f"{name} is a sequence, and this is one number")
    try:
        return sequence(name, values)
    except (ValueError, RuntimeError) as error:  # a tensor without dimensions, for example
        raise InvalidArgumentError(f"{name} is a sequence: {error}") from None


def per_key(keys: object, given: object, what: str) -> tuple[Sequence[Key], Sequence[Any]]:
    """Return the keys and the argument of each; ``keys`` may also be a single key."""
    if isinstance(keys, str | bytes):
        return [check_key(keys)], [given]
    checked, each = key_list(keys), rows(what, given)
    if len(each) != len(checked):
        raise InvalidArgumentError(
            f"{len(checked)} keys and {len(each)} {what}", advice="Give one for each key."
        )
    return checked, each


def parts(ranges: Sequence[Range]) -> list[tuple[int, memoryview]]:
    """Return offset and memory of each part; empty parts are skipped."""
    flat: list[tuple[int, memoryview]] = []
    for pair in sequence("ranges", ranges):
        try:
            offset, buffer = cast("Range", pair)
        except (TypeError, ValueError):
            raise InvalidArgumentError(
                "ranges are pairs of an offset in bytes and a buffer"
            ) from None
        offset = check_integer("an offset", offset, 0, OFFSET_MAX, "bytes")
        for view in writable(buffer)[0]:  # filled in sequence, as by ``get_into``
            if len(view):
                flat.append((offset, view))
            offset += len(view)
    return flat


def check_no_overlap(keys: Sequence[Key], payloads: Sequence[Payload]) -> Device | None:
    """Check the memory that one call fills, per key. Returns its device; None: host memory.

    Raises:
        InvalidArgumentError: buffers overlap.
        BufferMismatchError: a buffer is a view of the pool, or on another device than the first.
    """
    on_device = [payload for payload in payloads if not isinstance(payload, list)]
    host = [view for payload in payloads if isinstance(payload, list) for view in payload]
    devices: set[Device | None] = {memory.device for memory in on_device if memory}
    if len(devices) + bool(host) > 1:
        raise BufferMismatchError(
            "the buffers of one call are in different memories",
            advice="Make a call for each device, and one for the host's memory.",
        )
    if on_device and DeviceMemory.joined(on_device).overlaps_itself:
        raise _not_apart("the buffers")
    if len(host) > 1 and (two := steps.overlap(host)) is not None:
        named = zip(keys, payloads, strict=True)
        of = [key for key, payload in named if isinstance(payload, list) for _ in payload]
        raise _not_apart(f"buffers of {' and '.join(key_text(of[each]) for each in two)}")
    if any_shown(host):
        raise BufferMismatchError(
            "a view of the pool is read-only", advice="Get into memory of your own."
        )
    return devices.pop() if devices else None


def _not_apart(subject: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{subject} overlap: the bytes of one value would overwrite those of another",
        advice="Give each value memory of its own.",
    )


def _shown(value: object) -> str:
    """Format a value for an error: its type, and its text if that is short."""
    try:
        text = repr(value) if not isinstance(value, int) or -(1 << 64) < value < 1 << 64 else ""
    except Exception:  # noqa: BLE001  # the program's own class
        text = ""
    of = type(value).__name__
    if not text or len(text) > 60 or not text.isprintable():
        return f"{'an' if of[0] in 'aeiou' else 'a'} {of}"
    return text if value is None or isinstance(value, bool | int | float) else f"{text} ({of})"
