"""What a system must do to be measured, and the memory of its client.

A driver prepares; it times nothing. What it returns as ``Work`` contains the system's own call and
as little else as Python allows, so that both systems pay the same for being measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

PUT: Final = "put"
GET: Final = "get"
GET_VIEW: Final = "get_view"
"""Not copied: an array over the pool's own memory."""
GET_AGAIN: Final = "get_again"
"""The same object under a live lease."""
EXIST: Final = "exist"
MATCH: Final = "match_prefix"
MEMCPY: Final = "memcpy"
"""The same bytes copied inside the client, as one numpy copy: no system is asked."""

READS: Final = (GET, GET_VIEW, GET_AGAIN)


class Work(NamedTuple):
    """One kind of call, ready to be made again and again."""

    call: Callable[[int], Any]
    """With the number of the call; this is what is timed."""
    check: Callable[[Any], None]
    """What the call returned. Raises InternalError: it is not what was asked for."""


class Driver(Protocol):
    """A client of one system. One thread."""

    source: Bytes
    """The caller's memory to put from, touched: piece ``i`` of a size lies at ``i * size``."""
    target: Bytes
    """The caller's memory to get into, as large, touched."""

    def work(self, op: str, batches: Sequence[Sequence[str]], size: int) -> Work:
        """Call ``n`` is about ``batches[n % len(batches)]``, all as long; of one key it is the
        system's call for a single object.

        Args:
            op: one of the names above that this system has, but for ``MEMCPY``.
            size: bytes of each object; key ``i`` of a batch belongs to piece ``i``.
        """
        ...

    def put_chain(self, keys: Sequence[str], size: int) -> None:
        """Put objects of which each is the parent of the next, where the system knows parents.
        All of them have the bytes of piece 0."""

    def remove(self, keys: Sequence[str]) -> None:
        """Remove these objects now."""

    def settle(self) -> None:
        """Wait until the memory of all that was removed is free."""

    def close(self) -> None:
        """Give everything back."""
