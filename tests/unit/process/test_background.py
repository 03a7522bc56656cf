"""Nothing in the background ends unseen: tasks, threads, callbacks of the loop."""

from __future__ import annotations

import asyncio
import logging
import signal
import subprocess
import sys
import threading

import pytest

from kvstore.errors import UnavailableError
from kvstore.process import background


class BugError(Exception):
    pass


async def breaks(error: BaseException) -> None:
    await asyncio.sleep(0)
    raise error


def test_the_death_of_a_task_is_logged_and_told(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> list[BaseException]:
        told: list[BaseException] = []
        task = background.start_task("tick", breaks(BugError("why")), died=told.append)
        await asyncio.wait([task])
        return told

    (error,) = asyncio.run(main())
    assert isinstance(error, BugError)
    (record,) = caplog.records
    assert record.getMessage() == "background_died name=tick error=BugError('why')"
    assert record.exc_info


def test_a_task_that_nobody_refers_to_runs_on(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> int:
        background.start_task("forgotten", breaks(BugError()))
        running = len(background._running)
        await asyncio.sleep(0.01)
        return running

    assert asyncio.run(main()) == 1
    assert not background._running
    assert "name=forgotten" in caplog.text


@pytest.mark.parametrize("expected", [True, False])
def test_cancelling_and_what_is_expected_are_no_deaths(
    expected: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        error = UnavailableError("gone") if expected else asyncio.CancelledError()
        task = background.start_task(
            "t", breaks(error), died=lambda _: pytest.fail("told"), expected=UnavailableError
        )
        await asyncio.wait([task])

    asyncio.run(main())
    assert not caplog.records


def test_the_death_of_a_thread_is_logged_and_told(caplog: pytest.LogCaptureFixture) -> None:
    told: list[BaseException] = []

    def work() -> None:
        raise BugError

    background.start_thread("kvstore-leases", work, died=told.append).join(10)
    assert [type(error) for error in told] == [BugError]
    assert "background_died name=kvstore-leases" in caplog.text
    assert "Traceback" in caplog.text


def test_threads_and_callbacks_that_were_started_otherwise(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    told: list[str] = []
    background.watch_threads(lambda name, error: told.append(f"{name} {error}"))

    def work() -> None:
        raise BugError("x")

    thread = threading.Thread(target=work, name="other")
    thread.start()
    thread.join(10)
    assert told == ["other x"]
    assert "background_died name=other" in caplog.text

    async def main() -> None:
        loop = asyncio.get_running_loop()
        background.watch_loop(loop)
        loop.call_soon(work)
        await asyncio.sleep(0.01)

    asyncio.run(main())
    (record,) = [r for r in caplog.records if r.levelno == logging.ERROR and "loop_error" in r.msg]
    assert record.exc_info


def test_the_first_reason_to_end_counts_and_comes_from_any_thread() -> None:
    async def main() -> BaseException | None:
        end = background.End()
        await asyncio.to_thread(end, BugError("first"))
        end(BugError("second"))
        await asyncio.wait_for(end.wait(), 10)
        return end.error

    assert str(asyncio.run(main())) == "first"


@pytest.mark.parametrize(
    ("handler", "ends"), [(signal.SIG_DFL, True), (signal.SIG_IGN, False)], ids=["usual", "nohup"]
)
def test_a_closed_terminal_ends_a_server_unless_nohup_started_it(
    handler: signal.Handlers, ends: bool
) -> None:
    before = signal.signal(signal.SIGHUP, handler)
    try:
        assert (signal.SIGHUP in background.end_signals()) == ends
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_server_hears_signals_that_its_parent_blocked_or_ignored() -> None:
    code = (
        "import signal\n"
        "from kvstore.process import background\n"
        "background.hear_signals()\n"
        "assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())\n"
        "assert signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL\n"
        "assert signal.getsignal(signal.SIGTTOU) is signal.SIG_IGN\n"
    )
    started = (
        "import os, signal, sys\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\n"
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        f"os.execv(sys.executable, [sys.executable, '-c', {code!r}])\n"
    )
    subprocess.run([sys.executable, "-c", started], check=True, timeout=60)
