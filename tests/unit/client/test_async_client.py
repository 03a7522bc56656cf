"""What ``AsyncClient`` adds to ``Client``: turns, deadlines in the line, cancelling."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvstore import AsyncClient, Client
from kvstore.client import async_client
from kvstore.errors import DeadlineExceededError
from kvstore.runtime.cancellation import CallCancelledError, current


@asynccontextmanager
async def unconnected() -> AsyncIterator[AsyncClient]:
    """A client that calls nobody; closed, its threads have ended."""
    before = set(threading.enumerate())
    async with AsyncClient(timeout_ms=10_000) as client:
        yield client
    assert not {each for each in threading.enumerate() if "aio" in each.name} - before


class Transfer:
    """A call that is in the caller's memory until it is cut short."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.ended = threading.Event()

    def __call__(self, client: Client, *, timeout_ms: int | None = None) -> None:
        stop = current()
        assert stop is not None
        cut = threading.Event()
        with stop.on_cancel(cut.set):
            self.begun.set()
            assert cut.wait(10)
        time.sleep(0.05)  # still in the caller's memory
        self.ended.set()
        stop.check()


class Question:
    """A call that waits for an answer, and would write it into the caller's memory."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.answered = threading.Event()
        self.written = False
        self.stopped = threading.Event()

    def __call__(self, client: Client, *, timeout_ms: int | None = None) -> None:
        stop = current()
        assert stop is not None
        try:
            with stop.cancellable_wait():
                self.begun.set()
                assert self.answered.wait(10)
            self.written = True
        except CallCancelledError:
            self.stopped.set()
            raise


async def begun(call: Transfer | Question) -> None:
    assert await asyncio.to_thread(call.begun.wait, 10)


def test_a_cancelled_transfer_ends_when_the_memory_is_the_callers_again() -> None:
    async def scenario() -> None:
        async with unconnected() as client:
            transfer = Transfer()
            calling = asyncio.create_task(client._carry_out(transfer))
            await begun(transfer)
            calling.cancel()
            await asyncio.sleep(0)
            calling.cancel()  # an impatient caller
            with pytest.raises(asyncio.CancelledError):
                await calling
            assert transfer.ended.is_set()

    asyncio.run(scenario())


def test_a_cancelled_question_ends_at_once_and_its_answer_is_dropped() -> None:
    async def scenario() -> None:
        async with unconnected() as client:
            question = Question()
            calling = asyncio.create_task(client._carry_out(question))
            await begun(question)
            calling.cancel()
            with pytest.raises(asyncio.CancelledError):
                await calling  # would last: nothing has answered
            question.answered.set()
            assert await asyncio.to_thread(question.stopped.wait, 10)
            assert not question.written

    asyncio.run(scenario())


def test_calls_beyond_the_threads_wait_until_their_deadlines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(async_client, "CALLS_AT_ONCE", 2)

    async def scenario() -> None:
        async with unconnected() as client:
            questions = [Question(), Question()]
            calling = [asyncio.create_task(client._carry_out(each)) for each in questions]
            for question in questions:
                await begun(question)
            third, fourth = Question(), Question()
            with pytest.raises(DeadlineExceededError, match="2 calls"):
                await client._carry_out(third, timeout_ms=20)
            waiting = asyncio.create_task(client._carry_out(fourth))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            for question in questions:
                question.answered.set()
            await asyncio.gather(*calling)
            assert all(question.written for question in questions)
            assert not third.begun.is_set()
            assert not fourth.begun.is_set()

    asyncio.run(scenario())
