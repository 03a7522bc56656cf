"""Constraints on the fields of calls, as annotations of ``kvstore.calls``.

The codec checks them when it decodes a call (``kvstore.wire.codec``). A field without an annotation
takes any value of its type, and as many rows as a frame holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from kvstore.limits import (
    AVOID_MAX,
    BATCH_KEYS_MAX,
    PIN_MS_MAX,
    RELEASED_MAX,
    REPLICAS_MAX,
    RETAIN_MS_MAX,
    SIZE_BYTES_MAX,
    TTL_MS_MAX,
    WAIT_MS_MAX,
)


@dataclass(frozen=True, slots=True)
class IntRange:
    """A number from ``min`` to ``max``."""

    min: int
    max: int


@dataclass(frozen=True, slots=True)
class Text:
    """Text that may stand in a log line."""

    empty: bool = False
    """Whether empty text is allowed."""


@dataclass(frozen=True, slots=True)
class FileName:
    """A name in ``/dev/shm``, or empty."""


@dataclass(frozen=True, slots=True)
class SixteenBytes:
    """16 bytes."""

    empty: bool = False
    """Whether an empty value is allowed."""


@dataclass(frozen=True, slots=True)
class KeyPrefix:
    """The beginning of a key: at most as many bytes as a key."""


@dataclass(frozen=True, slots=True)
class AnyNamespace:
    """A namespace, or empty: all of them."""


@dataclass(frozen=True, slots=True)
class RowCount:
    """Limits on the rows of a column or repeated field."""

    max: int = BATCH_KEYS_MAX
    like: str = ""
    """An earlier field with the required number of rows, in place of ``max``."""
    value_max: int | None = None
    """The largest number in a row; None: any of 64 bits."""
    distinct: bool = False
    """Whether the rows must be distinct."""


Name = Annotated[str, Text()]
NameOrEmpty = Annotated[str, Text(empty=True)]
NamespaceOrEmpty = Annotated[str, AnyNamespace()]
ShmName = Annotated[str, FileName()]
Uuid = Annotated[bytes, SixteenBytes()]
SixteenOrEmpty = Annotated[bytes, SixteenBytes(empty=True)]
ClockMs = Annotated[int, IntRange(0, 1 << 53)]
Port = Annotated[int, IntRange(0, 65_535)]
Size = Annotated[int, IntRange(0, SIZE_BYTES_MAX)]
WaitMs = Annotated[int, IntRange(0, WAIT_MS_MAX)]
PinMs = Annotated[int, IntRange(1, PIN_MS_MAX)]
TtlMs = Annotated[int, IntRange(0, TTL_MS_MAX)]
RetainMs = Annotated[int, IntRange(0, RETAIN_MS_MAX)]
Replicas = Annotated[int, IntRange(1, REPLICAS_MAX)]
PageRows = Annotated[int, IntRange(1, BATCH_KEYS_MAX)]
Numbers = Annotated[Sequence[int], RowCount()]
NumberPerKey = Annotated[Sequence[int], RowCount(like="keys")]
NumberPerOffset = Annotated[Sequence[int], RowCount(like="offsets")]
Released = Annotated[Sequence[int], RowCount(RELEASED_MAX)]
Avoided = Annotated[Sequence[bytes], RowCount(AVOID_MAX), SixteenBytes()]
