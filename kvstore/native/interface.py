"""Arguments and results of the primitives, compiled or in Python."""

from __future__ import annotations

from typing import Final, TypeVar

AnyRecord = TypeVar("AnyRecord")

CLOCK: Final = 7
"""Linux's number of the clock of ``kvstore.runtime.clock.uptime``."""

BatchEnd = int
"""Reason why a batch was not completed: ``UNMOUNTED``, ``LATE`` or ``OUTSIDE``."""

UNMOUNTED: Final = 1
"""The segment has another generation than the batch."""
LATE: Final = 2
OUTSIDE: Final = 3
"""A row is not within the segment; nothing was copied."""

STALE: Final = 1
"""Outcome of a row: no valid header of that object is at its offset."""
CORRUPT: Final = 2
"""Outcome of a row: the payload does not match the checksum in its header."""

ANSWERED: Final = 0
TIMED_OUT: Final = 1
NOT_SENT: Final = 2
BROKEN: Final = 3
ENDED: Final = 4
GARBLED: Final = 5
UNASKED: Final = 6
"""The socket had received something before the request was sent; nothing was sent."""

REFUSED: Final = 8
"""The peer refused, with a ``Status``; -1: it uses another protocol."""

CAPABILITY_BYTES: Final = 32
"""Expiry, wipe sequence number and MAC of a capability (``kvstore.runtime.tcp_protocol``)."""

HEADER_MAC_BYTES: Final = 16
"""A header MAC (``kvstore.memory.header``)."""

WIPE_TABLE_BYTES: Final = 8 << 18
"""A table of ``revoke_writes``. At 5,000 wipes a second a put of 10 ms hits another extent's slot
once in 5,000 times, and its client retries."""

WRITES_BYTES: Final = 8 * (1 + 4096)
"""The number of extents that a connection is writing, and the offset of each."""

Buffers = list[memoryview]
ReadRow = tuple[int, int, int, int, bytes, Buffers | None, bytes]
"""Offset of the extent, payload bytes, epoch and counter of the version, key, destination of the
payload (its sizes add up to the payload's; None: it stays in mapped memory) and capability for the
extent (empty: none)."""

WriteRow = tuple[int, int, int, int, bytes, Buffers | None, bytes, bytes, bytes]
"""As ``ReadRow``, with the payload's source (None: it is in place); then the parent's key (empty: a
root), the descriptor, and the capability, followed by the header MAC (``HEADER_MAC_BYTES``) if
there is one."""
