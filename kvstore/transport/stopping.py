"""Cutting a transfer short from outside: its caller was cancelled, or another part of it failed.

    with stop.here():                 # the thread that moves bytes
        transport.read(...)
    stop.set()                        # any other thread: the read fails soon

A transport asks for ``current()`` and looks at ``is_set`` where it loops; where it waits it adds
what wakes it. Then no caller's memory is touched any more once the transport has returned.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvstore.errors import ClosedError


class Stop:
    """Of one call. Any thread."""

    def __init__(self) -> None:
        self.is_set = False
        self._lock = threading.Lock()
        self._cuts: list[Callable[[], None]] = []

    def set(self) -> None:
        """Let the transfers of this call fail. Idempotent."""
        with self._lock:
            self.is_set = True
            for cut in self._cuts:
                cut()

    def check(self) -> None:
        """Raises ClosedError: it is set."""
        if self.is_set:
            raise ClosedError("the call was cancelled", settled=1)

    @contextmanager
    def wakes(self, cut: Callable[[], None]) -> Iterator[None]:
        """Has ``cut`` called when it is set within this block, and never after it.

        Raises:
            ClosedError: it is set already.
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
        """Makes it the ``current`` one of this thread."""
        before, _HERE.stop = current(), self
        try:
            yield
        finally:
            _HERE.stop = before


class _Here(threading.local):
    stop: Stop | None = None


_HERE = _Here()


def current() -> Stop | None:
    """What may cut short what this thread does; None: nothing will."""
    return _HERE.stop
