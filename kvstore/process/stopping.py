"""Cutting a call short from outside: its caller was cancelled, or another part of it failed.

    with stop.here():                 # the thread that carries out the call
        transport.read(...)
    stop.set()                        # any other thread: the read fails soon

Code that moves bytes gets the ``current()`` stop. It looks at ``is_set`` in its loops, and uses
``wakes`` where it waits. After it has returned, the caller's memory is not touched any more.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from kvstore.clocks import uptime
from kvstore.errors import ClosedError

AnyResult = TypeVar("AnyResult")
AnyObject = TypeVar("AnyObject")

TURN_PAUSE_S = 0.001
TURN_PAUSE_MAX_S = 0.05
"""The first and the longest pause between two looks at a ``DeadlineLock`` of another thread."""


class Bell:
    """Wakes the threads that wait for a change.

        with self._lock:              # a ``threading.Lock``
            if self._is_there:
                return
            heard = self._bell.listen()
        self._bell.wait(heard, 0.1)   # and look again

    The methods of ``threading.Condition`` and ``Event`` are Python code. If a signal handler raises
    while the main thread is in them, their lock stays taken for ever, so a client's callers do not
    use them. A bell has no lock. A signal can cost a wake-up at most, so a thread that waits for
    something that ``ring(1)`` announces looks again by itself from time to time.
    """

    def __init__(self) -> None:
        self._listening: deque[SimpleQueue[None]] = deque()

    def listen(self) -> SimpleQueue[None]:
        """Returns what to ``wait`` for; it hears every ``ring`` from now on."""
        heard: SimpleQueue[None] = SimpleQueue()
        self._listening.append(heard)
        return heard

    def wait(self, heard: SimpleQueue[None], seconds: float) -> None:
        """Returns after the next ``ring``, or when the time is over."""
        try:
            heard.get(timeout=min(max(seconds, 0.0), threading.TIMEOUT_MAX))
        except Empty:
            pass
        finally:
            with contextlib.suppress(ValueError):
                self._listening.remove(heard)

    def ring(self, times: int = 1 << 30) -> None:
        """Wakes so many threads, those first that have waited longest. Finalizers may call it."""
        with contextlib.suppress(IndexError):
            for _ in range(times):
                self._listening.popleft().put(None)


class Latch:
    """A ``threading.Event`` without ``clear``, for the threads of callers; see ``Bell``."""

    def __init__(self) -> None:
        self._is_set = False
        self._bell = Bell()

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        """Idempotent. Finalizers may call it."""
        self._is_set = True
        self._bell.ring()

    def wait(self, seconds: float = math.inf) -> bool:
        """Waits until it is set, but not longer than ``seconds``; returns whether it is."""
        if not self._is_set:
            heard = self._bell.listen()
            self._bell.wait(heard, 0.0 if self.is_set() else seconds)
        return self._is_set


class Known(Generic[AnyObject]):
    """A set that does not keep its objects alive. An object that a call forgets, because a signal
    handler has raised in it, leaves the set as well. (``WeakSet`` learns of that by a callback in
    Python, which can be cut short, too.)"""

    def __init__(self) -> None:
        self._objects: dict[int, weakref.ref[AnyObject]] = {}

    def add(self, each: AnyObject) -> None:
        self.prune()
        self._objects[id(each)] = weakref.ref(each)

    def discard(self, each: AnyObject) -> None:
        self._objects.pop(id(each), None)

    def prune(self) -> None:
        """Removes the entries of objects that are gone."""
        for number, known in list(self._objects.items()):
            if known() is None:
                self._objects.pop(number, None)

    def __len__(self) -> int:
        """How many there are, with those that are gone since the last ``prune`` or ``add``."""
        return len(self._objects)

    def __iter__(self) -> Iterator[AnyObject]:
        objects = [known() for known in list(self._objects.values())]
        return iter([each for each in objects if each is not None])


class NotOurTurnError(Exception):
    """Other threads held the ``DeadlineLock`` for all of the time."""


class DeadlineLock:
    """A lock that is waited for by a deadline. Like ``Bell``, it is for the threads of callers:
    ``threading.Lock.acquire(timeout=...)`` can be cut short between the moment in which the lock is
    taken and the ``try`` that gives it back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: dict[object, None] = {}

    @property
    def is_taken(self) -> bool:
        return bool(self._holder)

    def run(self, work: Callable[[], AnyResult], seconds: float) -> AnyResult:
        """Runs ``work``, one thread at a time, and returns its result.

        Raises:
            NotOurTurnError: it was not this thread's turn within this time.
        """
        until = uptime() + seconds
        pause_s = TURN_PAUSE_S
        me = object()
        try:
            while True:
                with self._lock:
                    if not self._holder:
                        self._holder[me] = None
                        break
                if uptime() + pause_s >= until:
                    raise NotOurTurnError
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, TURN_PAUSE_MAX_S)
            return work()
        finally:
            self._holder.pop(me, None)  # one step of the interpreter


class CallStoppedError(Exception):
    """A stopped call came back from a wait. Its thread gives up: the caller has control again."""


class Stop:
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
            Whether the caller's memory is safe from now on: the call was ``waiting``, and touches
            none any more. Otherwise it is safe once the call's thread has ended the call.
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
    def waiting(self) -> Iterator[None]:
        """For the call's thread while it touches no memory of the caller, such as while the master
        has its request.

        Raises:
            CallStoppedError: the call is stopped, at the beginning or at the end of the block.
        """
        with self._lock:
            if self.is_set:
                raise CallStoppedError
            self._is_waiting = True
        try:
            yield
        finally:
            with self._lock:
                if self.is_set:
                    raise CallStoppedError
                self._is_waiting = False

    @contextmanager
    def wakes(self, cut: Callable[[], object]) -> Iterator[None]:
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
    stop: Stop | None = None


_HERE = _Here()


def current() -> Stop | None:
    """The stop of the call that this thread carries out; None: nothing can stop it."""
    return _HERE.stop


def check_current() -> None:
    """Raises ClosedError: the call that this thread carries out was stopped."""
    stop = current()
    if stop is not None:
        stop.check()
