"""Background tasks and threads whose failures are always reported.

    work = start_task("tick", self._tick_forever(), died=self._died)
    thread = start_thread("kvstore-leases", self._renew_forever, died=self._died)

An exception is logged once with its traceback, and passed to ``died``: the owner decides whether
the process can continue. If not, ``ShutdownRequest`` ends it with ``EXIT_BROKEN``, so that its
supervisor restarts it. ``watch_loop`` and ``watch_threads`` log the failures of tasks and threads
without an owner.

Signal handlers run in the main thread and may raise: Ctrl-C, a timeout by SIGALRM, ``sys.exit`` on
SIGTERM. Work that must not stay half done, because other threads share it or nothing would release
it, runs ``uninterrupted``, in another thread.
"""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Iterable
from queue import SimpleQueue
from typing import Any, Final, Generic, TypeVar, cast

from kvstore.errors import ClosedError
from kvstore.runtime import descriptors
from kvstore.runtime.clock import uptime

log = logging.getLogger("kvstore.background")

Died = Callable[[BaseException], None]
"""Callback of a failed task or thread. Called once, in the loop's thread for a task, in the failed
thread for a thread."""

EXIT_BROKEN: Final = 70
"""Exit status after a bug or lack of memory (EX_SOFTWARE)."""

CLOSE_S: Final = 10.0
"""Maximum time that a ``close`` waits for its own threads, which end soon unless a system call
hangs."""

AnyResult = TypeVar("AnyResult")

_running: Final[set[asyncio.Task[Any]]] = set()
"""References that keep running tasks alive: a loop refers to its tasks weakly."""


def start_task(
    name: str,
    work: Coroutine[Any, Any, AnyResult],
    *,
    died: Died | None = None,
    expected: type[BaseException] | tuple[type[BaseException], ...] = (),
) -> asyncio.Task[AnyResult]:
    """Run ``work`` in the running loop. A cancellation does not count as a failure.

    Args:
        name: the task's name in the log.
        work: the coroutine.
        died: None if a task awaits it.
        expected: exceptions that are neither logged nor passed to ``died``.
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
) -> threading.Thread:
    """Run ``work`` in a thread, which has started when this returns.

    Raises:
        RuntimeError: the system has no thread left.
    """

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  # the purpose of this function
            _tell(name, error, died)

    thread = threading.Thread(target=run, name=name, daemon=True)
    if not _is_main():
        thread.start()
        return thread
    # ``start`` waits for the new thread with a ``threading.Event``; an exception there would leave
    # a thread that never begins.
    started: SimpleQueue[Exception | None] = SimpleQueue()

    def start() -> None:
        try:
            thread.start()
        except Exception as error:  # noqa: BLE001  # raised below
            started.put(error)
        else:
            started.put(None)

    _thread.start_new_thread(start, ())
    error = started.get()
    if error is not None:
        try:
            raise error
        finally:
            del error  # it refers to this frame
    return thread


def start_from_finalizer(name: str, work: Callable[[], object]) -> None:
    """As ``start_thread``, but without waiting, because the current thread may hold any lock. Does
    nothing if the interpreter is ending."""
    with contextlib.suppress(RuntimeError):
        _thread.start_new_thread(start_thread, (name, work))


def uninterrupted(work: Callable[[], AnyResult]) -> AnyResult:
    """Run ``work`` to its end even if a signal handler raises in this thread; return its result.
    Costs the main thread some 100 us; other threads run it directly."""
    if not _is_main():
        return work()
    job = Job(work)
    try:
        start_thread("kvstore-piece", job.run)
    except RuntimeError:  # the system has no thread left, or the interpreter is ending
        job.run()
    return job.result()


def _is_main() -> bool:
    return threading.get_ident() == threading.main_thread().ident


class Job(Generic[AnyResult]):
    """A unit of work for another thread. Threads: any."""

    def __init__(
        self, work: Callable[[], AnyResult], ended: Callable[[], object] | None = None
    ) -> None:
        """Create a job. ``ended``: called after the work or its cancellation, in the thread that
        did it."""
        self._work: Callable[[], AnyResult] | None = work
        self._tell = ended
        self._unclaimed: list[None] = [None]
        self._running = threading.Lock()
        """Released after the work or its cancellation."""
        self._running.acquire()
        self.is_done = False
        self._result: AnyResult | None = None
        self._error: BaseException | None = None
        self.is_cancelled = False

    def run(self) -> None:
        """Do the work, unless it was cancelled."""
        work, self._work = self._work, None
        if work is None or not self._try_start():
            return
        try:
            self._result = work()
        except BaseException as error:  # noqa: BLE001  # ``result`` raises it
            self._error = error
        del work
        self._end()

    def cancel(self) -> bool:
        """Cancel the work unless it has begun; return whether it is cancelled."""
        if self._try_start():
            self.is_cancelled = True
            self._work = None
            self._end()
        return self.is_cancelled

    def wait(self) -> None:
        """Wait until the work has ended or was cancelled."""
        with self._running:
            pass

    def result(self) -> AnyResult:
        """Wait, and return or raise the result of the work."""
        self.wait()
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # it refers to this frame
        if self.is_cancelled:
            raise ClosedError("the call was cancelled", quiesced=1)
        return cast("AnyResult", self._result)

    def _try_start(self) -> bool:
        try:
            self._unclaimed.pop()
        except IndexError:
            return False
        return True

    def _end(self) -> None:
        self.is_done = True
        self._running.release()
        if self._tell is not None:
            self._tell()


class _WorkerPool:
    """State shared by the threads of ``ThreadPool``, which do not refer to it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.jobs: SimpleQueue[Job[Any] | None] = SimpleQueue()
        self.lock = threading.Lock()  # guards the two below
        self.threads: set[threading.Thread] = set()
        self.idle = 0

    def serve(self) -> None:
        me = threading.current_thread()
        with self.lock:
            if len(self.threads) >= self.size:
                return
            self.threads.add(me)
        try:
            while (job := self.jobs.get()) is not None:
                job.run()
                del job  # it refers to memory of its caller
                with self.lock:
                    self.idle += 1
            self.jobs.put(None)  # for the next thread
        finally:
            with self.lock:
                self.threads.discard(me)


class ThreadPool:
    """A bounded number of threads, started on demand, that run jobs.

    Replaces ``ThreadPoolExecutor``, whose lock stays acquired if a signal handler raises. Threads:
    any.
    """

    def __init__(self, name: str, size: int) -> None:
        self._name = name
        self._crew = _WorkerPool(size)
        self._is_closed = False

    def begin(self, job: Job[Any]) -> None:
        """Queue the job for a thread. If this raises, ``cancel`` the job.

        Raises:
            ClosedError
        """
        if self._is_closed:
            raise ClosedError("the client is closed")
        crew = self._crew
        crew.jobs.put(job)
        with crew.lock:
            needed = crew.idle <= 0 and len(crew.threads) < crew.size
            crew.idle = max(0, crew.idle - 1)
        if needed:
            start_thread(self._name, crew.serve)

    def end(self) -> None:
        """Let the threads end after the queued jobs. Finalizers may call it."""
        self._is_closed = True
        self._crew.jobs.put(None)

    def close(self, patience_s: float) -> None:
        """As ``end``, then wait for the threads, at most ``patience_s``. Idempotent."""
        self.end()
        with self._crew.lock:
            threads = list(self._crew.threads)
        join_all(threads, patience_s)


def join_all(threads: Iterable[threading.Thread], patience_s: float) -> None:
    """Wait for these threads, at most ``patience_s`` in total, except for the current one; log
    those that have not ended."""
    until = uptime() + patience_s
    for thread in threads:
        if thread is threading.current_thread():
            continue
        thread.join(max(0.0, until - uptime()))
        if thread.is_alive():
            log.warning("thread_still_running name=%s waited_s=%.1f", thread.name, patience_s)


def _tell(name: str, error: BaseException, died: Died | None) -> None:
    log.error("background_task_failed name=%s error=%r", name, error, exc_info=error)
    if died is not None:
        died(error)


class ShutdownRequest:
    """The reason for which a process must end; the first one counts. Threads: any. Create it in the
    loop."""

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


def shutdown_signals() -> list[signal.Signals]:
    """Return the signals that stop a server cleanly. SIGHUP only if a terminal may close, and
    ``nohup`` does not ignore it."""
    ends = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        with contextlib.suppress(OSError):
            os.close(os.open(os.ctermid(), os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY))
            ends.append(signal.SIGHUP)
    return ends


def install_signal_handlers() -> None:
    """Prepare the signals of a server in its main thread, after its handlers are installed.

    Signals that the parent blocks or ignores are inherited: unblocks them, so that SIGTERM and
    SIGCHLD arrive. Ignores SIGTTOU, by which a terminal stops background programs that write, and
    SIGHUP without a terminal: supervisors take an end by it for a wanted one.
    """
    if signal.SIGHUP not in shutdown_signals():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def watch_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Log failures of callbacks, and of tasks that ``start_task`` has not started."""
    loop.set_exception_handler(_log_context)


def _log_context(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    del loop
    error = context.get("exception")
    if isinstance(error, OSError) and error.errno in descriptors.NONE_LEFT:
        # ``socket.accept``: asyncio tries again after a second, when file descriptors may be free.
        log.warning("connection_not_accepted reason=%r", error.strerror)
        return
    log.error("loop_error what=%r error=%r", context.get("message"), error, exc_info=error)


def watch_threads(died: Callable[[str, BaseException], None] | None = None) -> None:
    """Log the failure of any other thread by name, and call ``died`` then."""

    def hook(args: threading.ExceptHookArgs) -> None:
        error = args.exc_value
        if error is None or isinstance(error, SystemExit):
            return
        name = "unknown" if args.thread is None else args.thread.name
        log.error("background_task_failed name=%s error=%r", name, error, exc_info=error)
        if died is not None:
            died(name, error)

    threading.excepthook = hook
