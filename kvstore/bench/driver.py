"""The interface of a measured system, and the memory of its client.

A driver prepares calls and does not time them. The ``Work`` that it returns contains the system's
own call and as little else as possible, so that the measurement costs both systems the same.
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
"""A get without a copy: an array over the pool's own memory."""
GET_AGAIN: Final = "get_again"
"""The same object under a live lease."""
EXIST: Final = "exist"
MATCH: Final = "match_prefix"
MEMCPY: Final = "memcpy"
"""One numpy copy of the same bytes inside the client; uses no system."""

READS: Final = (GET, GET_VIEW, GET_AGAIN)


class Work(NamedTuple):
    """One kind of call, ready to be repeated."""

    call: Callable[[int], Any]
    """The timed call; its argument is the call's number."""
    check: Callable[[Any], None]
    """Checks the result of a call. Raises InternalError if it is wrong."""


class Driver(Protocol):
    """A client of one system. One thread."""

    @property
    def source(self) -> Bytes:
        """The caller's memory to put from, touched: piece ``i`` of a size is at ``i * size``."""
        ...

    @property
    def target(self) -> Bytes:
        """The caller's memory to get into, of the same size, touched."""
        ...

    def work(self, op: str, batches: Sequence[Sequence[str]], size: int) -> Work:
        """Work whose call ``n`` uses the keys ``batches[n % len(batches)]``. All batches have the
        same length; a batch of one key uses the system's call for a single object.

        Args:
            op: one of the names above that this system has, except ``MEMCPY``.
            size: bytes of each object; key ``i`` of a batch belongs to piece ``i``.
        """
        ...

    def put_chain(self, keys: Sequence[str], size: int) -> None:
        """Put objects, each the parent of the next if the system supports parents. All of them have
        the bytes of piece 0."""

    def remove(self, keys: Sequence[str]) -> None:
        """Remove these objects now."""

    def settle(self) -> None:
        """Wait until the memory of all removed objects is free."""

    def close(self) -> None:
        """Release all memory and connections."""
