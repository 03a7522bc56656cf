"""Nothing in the background ends unseen: tasks, threads, callbacks of the loop."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading

import pytest

from kvstore.runtime import tasks


class BugError(Exception):
    pass


async def breaks(error: BaseException) -> None:
    await asyncio.sleep(0)
    raise error


def test_the_death_of_a_task_is_logged_and_told(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> list[BaseException]:
        told: list[BaseException] = []
        task = tasks.start_task("tick", breaks(BugError("why")), died=told.append)
        await asyncio.wait([task])
        return told

    (error,) = asyncio.run(main())
    assert isinstance(error, BugError)
    (record,) = caplog.records
    assert record.getMessage() == "background_task_failed name=tick error=BugError('why')"
    assert record.exc_info


def test_the_death_of_a_thread_is_logged_and_told(caplog: pytest.LogCaptureFixture) -> None:
    told: list[BaseException] = []

    def work() -> None:
        raise BugError

    tasks.start_thread("kvstore-leases", work, died=told.append).join(10)
    assert [type(error) for error in told] == [BugError]
    assert "background_task_failed name=kvstore-leases" in caplog.text
    assert "Traceback" in caplog.text


def test_threads_and_callbacks_that_were_started_otherwise(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    told: list[str] = []
    tasks.watch_threads(lambda name, error: told.append(f"{name} {error}"))

    def work() -> None:
        raise BugError("x")

    thread = threading.Thread(target=work, name="other")
    thread.start()
    thread.join(10)
    assert told == ["other x"]
    assert "background_task_failed name=other" in caplog.text

    async def main() -> None:
        loop = asyncio.get_running_loop()
        tasks.watch_loop(loop)
        loop.call_soon(work)
        await asyncio.sleep(0.01)

    asyncio.run(main())
    (record,) = [r for r in caplog.records if r.levelno == logging.ERROR and "loop_error" in r.msg]
    assert record.exc_info


@pytest.mark.parametrize(
    ("handler", "terminal", "ends"),
    [
        (signal.SIG_DFL, "/dev/null", True),
        (signal.SIG_IGN, "/dev/null", False),
        (signal.SIG_DFL, "/no/terminal", False),
    ],
    ids=["usual", "nohup", "supervisor"],
)
def test_a_closed_terminal_ends_a_server_unless_nohup_or_a_supervisor_started_it(
    handler: signal.Handlers, terminal: str, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "ctermid", lambda: terminal)
    before = signal.signal(signal.SIGHUP, handler)
    try:
        assert (signal.SIGHUP in tasks.shutdown_signals()) == ends
    finally:
        signal.signal(signal.SIGHUP, before)
