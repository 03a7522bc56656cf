"""Cutting a call short from outside: its caller was cancelled, or another part of it failed.

    with stop.here():                 # the thread that carries out the call
        transport.read(...)
    stop.set()                        # any other thread: the read fails soon

Code that moves bytes gets the ``current()`` stop. It looks at ``is_set`` in its loops, and uses
``on_cancel`` where it waits. After it has returned, the caller's memory is not touched any more.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvstore.errors import ClosedError


class CallCancelledError(Exception):
    """A stopped call came back from a wait. Its thread gives up: the caller has control again."""


class CancelToken:
    """Stops one call. Threads: any."""

    def __init__(self, deadline: float = math.inf) -> None:
        """``deadline``: a ``uptime()`` value, by which the call must have ended."""
        self.deadline = deadline
        self.is_set = False
        self._lock = threading.Lock()
        self._is_waiting = False
        self._cuts: list[Callable[[], object]] = []

    def set(self) -> bool:
        """Lets the waits and transfers of this call fail. Idempotent.

        Returns:
            Whether the caller's memory is safe from now on: the call was ``cancellable_wait``, and
            touches none any more. Otherwise it is safe once the call's thread has ended the call.
        """
        with self._lock:
            self.is_set = True
            for cut in self._cuts:
                cut()
            return self._is_waiting

    def check(self) -> None:
        """Raises ClosedError: the call was stopped."""
        if self.is_set:
            raise ClosedError("the call was cancelled", settled=1)

    @contextmanager
    def cancellable_wait(self) -> Iterator[None]:
        """For the call's thread while it touches no memory of the caller, such as while the master
        has its request.

        Raises:
            CallStoppedError: the call is stopped, at the beginning or at the end of the block.
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
        """Calls ``cut`` when the call is stopped within this block, and never after it.

        Raises:
            ClosedError: the call is stopped already.
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
        """Makes this the ``current`` stop of the thread."""
        before, _HERE.stop = current(), self
        try:
            yield
        finally:
            _HERE.stop = before


class _Here(threading.local):
    stop: CancelToken | None = None


_HERE = _Here()


def current() -> CancelToken | None:
    """The stop of the call that this thread carries out; None: nothing can stop it."""
    return _HERE.stop


def check_current() -> None:
    """Raises ClosedError: the call that this thread carries out was stopped."""
    stop = current()
    if stop is not None:
        stop.check()
