"""Which headers a node believes when it looks through its memory: with identities, those alone
whose stamp its master has made (``kvstore.memory.header``).

Every client that may write somewhere can make a valid header: within its own extents or, if it has
the memory mapped, anywhere. It may name an object that the master did not grant: of another
namespace, of a version above all others, or of a size that covers its neighbours.

While clients without an identity write, the memory is *open*: all valid headers count, since
anybody could put anything. When such clients are served no more, the node stamps what it finds,
once.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable, Iterable

from kvstore.calls import STAMP_BYTES
from kvstore.memory.header import HEADER_BYTES, Header, stamp_at
from kvstore.memory.segment import NodeSegment
from kvstore.native import steps


def use_stamps(segment: NodeSegment, *, serves_all: bool) -> None:
    """Has the master make stamps for this segment. ``serves_all``: clients without an identity
    write, too; may change with each join, before the inventory.

    Raises:
        StartupError: the key cannot be kept.
    """
    stamps = segment.believed
    if not isinstance(stamps, Stamps):
        if segment.place is None:
            file = segment.keep_private()

            def note(is_open: bool) -> None:
                file.change(lambda now: now._replace(is_open=is_open))

            stamps = Stamps(file.now.key, file.now.is_open, note)
        else:  # memory of a device ends with its process
            stamps = Stamps(secrets.token_bytes(16))
        segment.stamp_key, segment.believed = stamps.key, stamps
    stamps.serve(everybody=serves_all)


class Stamps:
    """See ``kvstore.memory.header.Believed``. One thread at a time uses it."""

    def __init__(
        self, key: bytes, is_open: bool = False, note: Callable[[bool], None] = lambda _: None
    ) -> None:
        """``note``: told when the memory is open, or is not any more."""
        self.key = key
        self._is_open = is_open
        self._note = note
        self._serves_all = False
        self._refused = 0

    def __call__(self, offset: int, header: Header, stamp: bytes) -> bool:
        is_right = self._is_open or hmac.compare_digest(self._made(offset, header), stamp)
        self._refused += not is_right
        return is_right

    def serve(self, *, everybody: bool) -> None:
        """From now on clients without an identity write, or they do not."""
        self._serves_all = everybody
        if everybody and not self._is_open:
            self._note(True)
            self._is_open = True

    def adopt(self, segment: NodeSegment, found: Iterable[tuple[int, Header]]) -> int:
        """Stamps what was found in memory that was open until now; returns how many headers.
        The segment must be fenced, and its master must not have granted an extent since."""
        if self._serves_all or not self._is_open:
            return 0
        count = 0
        for offset, header in found:
            at = offset + stamp_at(header)
            if at + STAMP_BYTES <= offset + HEADER_BYTES:
                segment.write(at, self._made(offset, header))
                count += 1
        self._note(False)
        self._is_open = False
        return count

    def take_refused(self) -> int:
        """How many valid headers lacked their stamp since it was last asked."""
        refused, self._refused = self._refused, 0
        return refused

    def _made(self, offset: int, header: Header) -> bytes:
        name, key, _, size, epoch, counter, _, _ = header
        columns = [offset], [size], [epoch], [counter], [name], [key]
        return steps.stamp({0: self.key}, [0], *columns)
