"""Waiting for what another thread or process does: the one loop of the tests that asks again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final, TypeVar

import pytest

SOON_S: Final = 15.0
ResultT = TypeVar("ResultT")


def until(
    ask: Callable[[], ResultT], *, within_s: float = SOON_S, every_s: float = 0.02
) -> ResultT:
    """``ask()`` once it is true; fails the test when it is not in time."""
    deadline = time.monotonic() + within_s
    while not (answer := ask()):
        if time.monotonic() >= deadline:
            pytest.fail(f"not within {within_s} s: {ask}, last {answer!r}")
        time.sleep(every_s)
    return answer


async def until_async(ask: Callable[[], bool], *, within_s: float = SOON_S) -> None:
    """As ``until``, in an event loop, which goes on meanwhile."""
    async with asyncio.timeout(within_s):
        while not ask():
            await asyncio.sleep(0.005)
