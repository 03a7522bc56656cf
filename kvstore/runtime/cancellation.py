"""Cancellation of a call from outside: its caller was cancelled, or another part failed.

    with stop.here():                 # the thread that carries out the call
        transport.read(...)
    stop.set()                        # any other thread: the read fails soon

Transports take the ``current()`` token, check ``is_set`` in their loops, and use ``on_cancel``
where they wait. After they return, the caller's memory is not touched any more.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvstore.errors import ClosedError


class CallCancelledError(Exception):
    """A cancelled call returned from a wait; its thread abandons it, because the caller has control
    again."""


class CancelToken:
    """The cancellation of one call. Threads: any."""

    def __init__(self, deadline: float = math.inf) -> None:
        """Create a token for a call that ends by ``deadline``, a ``uptime()`` value."""
        self.deadline = deadline
        self.is_set = False
        self._lock = threading.Lock()
        self._is_waiting = False
        self._cuts: list[Callable[[], object]] = []

    def set(self) -> bool:
        """Fail the waits and transfers of this call. Idempotent.

        Returns:
            Whether the caller's memory is safe from now on, because the call was in
            ``cancellable_wait``. Otherwise it is safe once the call's thread has ended the call.
        """
        with self._lock:
            self.is_set = True
            for cut in self._cuts:
                cut()
            return self._is_waiting

    def check(self) -> None:
        """Raise ClosedError if the call was cancelled."""
        if self.is_set:
            raise ClosedError("the call was cancelled", quiesced=1)

    @contextmanager
    def cancellable_wait(self) -> Iterator[None]:
        """Mark a block that touches no memory of the caller, such as a wait for the master's reply.

        Raises:
            CallCancelledError: the call is cancelled, at the beginning or at the end of the block.
        """
        with self._lock:
            if self.is_set:
                raise CallCancelledError
            self._is_waiting = True
        try:
            yield
        finally:
            with self._lock:
                if self.is_set:
                    raise CallCancelledError
                self._is_waiting = False

    @contextmanager
    def on_cancel(self, cut: Callable[[], object]) -> Iterator[None]:
        """Call ``cut`` if the call is cancelled within this block, never after it.

        Raises:
            ClosedError: the call is already cancelled.
        """
        with self._lock:
            self.check()
            self._cuts.append(cut)
        try:
            yield
        finally:
            with self._lock:
                self._cuts.remove(cut)

    @contextmanager
    def here(self) -> Iterator[None]:
        """Make this the ``current`` token of the thread."""
        before, _HERE.stop = current(), self
        try:
            yield
        finally:
            _HERE.stop = before


class _Here(threading.local):
    stop: CancelToken | None = None


_HERE = _Here()


def current() -> CancelToken | None:
    """Return the token of the call that this thread executes; None: it cannot be cancelled."""
    return _HERE.stop


def check_current() -> None:
    """Raise ClosedError if the call that this thread executes was cancelled."""
    stop = current()
    if stop is not None:
        stop.check()
