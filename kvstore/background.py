"""Background tasks and threads of a process, none of which ends unseen.

    work = start_task("tick", self._tick_forever(), died=self._died)
    thread = start_thread("kvstore-leases", self._renew_forever, died=self._died)

When one ends by an exception, the exception is logged once with its traceback, and ``died`` is
called with it: the owner knows whether the process can go on without it. ``End`` is for an owner
that cannot: the process ends with ``EXIT_BROKEN``, so that its supervisor starts it again.
``watch_loop`` and ``watch_threads`` log the failures of tasks and threads without an owner.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

log = logging.getLogger("kvstore.background")

Died = Callable[[BaseException], None]
"""Tells the owner that its task or thread has failed. Called once, in the loop's thread for a task,
and in the dying thread for a thread."""

EXIT_BROKEN: Final = 70
"""The exit status of a process that ends because of a bug or for want of memory (EX_SOFTWARE)."""

AnyResult = TypeVar("AnyResult")

_running: Final[set[asyncio.Task[Any]]] = set()
"""Keeps running tasks alive: a loop refers to its tasks weakly."""


def start_task(
    name: str,
    work: Coroutine[Any, Any, AnyResult],
    *,
    died: Died | None = None,
    expected: type[BaseException] | tuple[type[BaseException], ...] = (),
) -> asyncio.Task[AnyResult]:
    """Runs ``work`` in the running loop. A cancellation does not count as a failure.

    Args:
        name: as in the log.
        work: what the task runs.
        died: None: the task that awaits it is its owner.
        expected: exceptions by which it may end: they are neither logged nor given to ``died``.
    """
    task = asyncio.get_running_loop().create_task(work, name=name)
    _running.add(task)

    def ended(task: asyncio.Task[AnyResult]) -> None:
        _running.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, expected):
            _tell(name, error, died)

    task.add_done_callback(ended)
    return task


def start_thread(
    name: str,
    work: Callable[[], object],
    *,
    died: Died | None = None,
    daemon: bool = True,
) -> threading.Thread:
    """Run ``work`` in a thread, which is started when this returns.

    Raises:
        RuntimeError: the system has no thread left.
    """

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  # that is what this function is for
            _tell(name, error, died)

    thread = threading.Thread(target=run, name=name, daemon=daemon)
    thread.start()
    return thread


def _tell(name: str, error: BaseException, died: Died | None) -> None:
    log.error("background_died name=%s error=%r", name, error, exc_info=error)
    if died is not None:
        died(error)


class End:
    """Why a process has to end; the first reason counts. Threads: any. Make it in the loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._asked = asyncio.Event()
        self.error: BaseException | None = None

    def __call__(self, error: BaseException) -> None:
        if self.error is None:
            self.error = error
        try:
            self._loop.call_soon_threadsafe(self._asked.set)
        except RuntimeError:
            pass  # the loop is closed: the process is ending

    async def wait(self) -> None:
        await self._asked.wait()


def end_signals() -> list[signal.Signals]:
    """The signals that end a server cleanly. SIGHUP comes from a terminal that is closed; a server
    that ``nohup`` has started outlives it."""
    ends = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        ends.append(signal.SIGHUP)
    return ends


def hear_signals() -> None:
    """Called in the main thread of a server when the signals that end it have their handlers.

    A process inherits what its parent, or the one thread that started it, blocks and ignores: a
    server would not hear SIGTERM, or not how its children end. A server in the background of a
    terminal that stops such programs when they write (``stty tostop``) goes on.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def watch_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Log what goes wrong in callbacks, and in tasks that were started in another way."""
    loop.set_exception_handler(_log_context)


def _log_context(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    del loop
    error = context.get("exception")
    log.error("loop_error what=%r error=%r", context.get("message"), error, exc_info=error)


def watch_threads(died: Callable[[str, BaseException], None] | None = None) -> None:
    """Logs the death of any other thread of this process by name, and calls ``died`` then."""

    def hook(args: threading.ExceptHookArgs) -> None:
        error = args.exc_value
        if error is None or isinstance(error, SystemExit):
            return
        name = "unknown" if args.thread is None else args.thread.name
        log.error("background_died name=%s error=%r", name, error, exc_info=error)
        if died is not None:
            died(name, error)

    threading.excepthook = hook
