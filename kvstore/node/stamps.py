"""Which headers a node believes when it looks through its memory: with identities, those alone
whose stamp its master has made (``kvstore.memory.header``).

Every client that may write somewhere can make a valid header: within its own extents or, if it has
the memory mapped, anywhere. It may name an object that the master did not grant: of another
namespace, of a version above all others, or of a size that covers its neighbours.
"""

from __future__ import annotations

import hmac
import secrets

from kvstore.memory.header import Header
from kvstore.memory.segment import NodeSegment
from kvstore.memory.stamp_key import keep_stamp_key
from kvstore.native import steps


def use_stamps(segment: NodeSegment, *, only: bool) -> None:
    """Has the master make stamps for this segment. With ``only`` the node believes no header
    without one; otherwise clients without an identity may write, too.

    Raises:
        StartupError: the key cannot be kept.
    """
    if not segment.stamp_key and segment.place is None:
        segment.stamp_key = keep_stamp_key(segment.shm_name, segment.uuid)
    elif not segment.stamp_key:  # memory of a device ends with its process
        segment.stamp_key = secrets.token_bytes(16)
    segment.believed = Stamps(segment.stamp_key) if only else None


class Stamps:
    """See ``kvstore.memory.header.Believed``. One thread at a time uses it."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._refused = 0

    def __call__(self, offset: int, header: Header, stamp: bytes) -> bool:
        name, key, _, size, epoch, counter, _, _ = header
        made = steps.stamp({0: self._key}, [0], [offset], [size], [epoch], [counter], [name], [key])
        is_right = hmac.compare_digest(made, stamp)
        self._refused += not is_right
        return is_right

    def take_refused(self) -> int:
        """How many valid headers lacked their stamp since it was last asked."""
        refused, self._refused = self._refused, 0
        return refused
