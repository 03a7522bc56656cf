"""Which headers a node believes when it looks through its memory: with identities, those alone
whose stamp its master has made (``kvstore.memory.header``).

Every client that may write somewhere can make a valid header: within its own extents or, if it has
the memory mapped, anywhere. It may name an object that the master did not grant: of another
namespace, of a version above all others, or of a size that covers its neighbours.

Memory of a process without an identity has no stamps: a node with one discards it.
"""

from __future__ import annotations

import hmac
import secrets

from kvstore.memory.header import Header
from kvstore.memory.segment import NodeSegment
from kvstore.native import steps


def use_stamps(segment: NodeSegment) -> None:
    """Has the master make stamps for this segment.

    Raises:
        StartupError: the key cannot be kept.
    """
    is_kept = segment.place is None  # memory of a device ends with its process
    key = segment.keep_private().now.key if is_kept else secrets.token_bytes(16)
    segment.stamp_key, segment.believed = key, Stamps(key)


class Stamps:
    """See ``kvstore.memory.header.Believed``. One thread at a time uses it."""

    def __init__(self, key: bytes) -> None:
        self.key = key
        self._refused = 0

    def __call__(self, offset: int, header: Header, stamp: bytes) -> bool:
        is_right = hmac.compare_digest(self._made(offset, header), stamp)
        self._refused += not is_right
        return is_right

    def take_refused(self) -> int:
        """How many valid headers lacked their stamp since it was last asked."""
        refused, self._refused = self._refused, 0
        return refused

    def _made(self, offset: int, header: Header) -> bytes:
        name, key, _, size, epoch, counter, _, _ = header
        columns = [offset], [size], [epoch], [counter], [name], [key]
        return steps.stamp({0: self.key}, [0], *columns)
