"""What the steps of the hot path, compiled or in Python, take and return."""

from __future__ import annotations

from typing import Final, TypeVar

AnyRecord = TypeVar("AnyRecord")

CLOCK: Final = 7
"""Linux's number of the clock that ``kvstore.runtime.clock.uptime`` reads."""

BatchEnd = int
"""Why a batch was not carried out as a whole: ``GONE``, ``LATE`` or ``OUTSIDE``."""

GONE: Final = 1
"""The segment has another generation than the batch."""
LATE: Final = 2
"""The deadline has passed."""
OUTSIDE: Final = 3
"""A row is not within the segment; nothing was moved."""

STALE: Final = 1
"""The outcome of a row: no valid header of that object is at its offset."""
CORRUPT: Final = 2
"""The outcome of a row: the payload does not match the checksum in its header."""

ANSWERED: Final = 0
TIMED_OUT: Final = 1
NOT_SENT: Final = 2
BROKEN: Final = 3
ENDED: Final = 4
GARBLED: Final = 5
UNASKED: Final = 6
"""The socket had received something before the request was sent; nothing was sent."""

REFUSED: Final = 8
"""The other end refused, with a ``Status``; -1: it speaks another protocol."""

CAPABILITY_BYTES: Final = 32
"""Expiry, order and MAC of a capability (``kvstore.runtime.tcp_protocol``)."""

STAMP_BYTES: Final = 16
"""A MAC behind a header (``kvstore.memory.header``)."""

ORDERS_BYTES: Final = 8 << 18
"""Of a table of orders: ``slow.call_back``. At 5,000 wiped extents a second a put of 10 ms meets
the order of another extent once in 5,000 times, and then its client asks again."""

ASKED_BYTES: Final = 8 * (1 + 4096)
"""The number of extents that a connection is writing, and the offset of each."""

Buffers = list[memoryview]
ReadRow = tuple[int, int, int, int, bytes, Buffers | None, bytes]
"""Offset of the extent, payload bytes, epoch and counter of the version, key, and where the payload
goes (its sizes add up to the payload's); None: it stays where it is, in mapped memory. Last the
capability for the extent; empty: the client has none."""

WriteRow = tuple[int, int, int, int, bytes, Buffers | None, bytes, bytes, bytes]
"""As ``ReadRow``, with the buffers that the payload comes from (None: it is in its place already);
then the parent's key (empty: a root), the descriptor, and the capability, with the ``STAMP_BYTES``
of the header behind it if the master has made a stamp."""
