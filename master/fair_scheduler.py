"""Fair scheduling of identities on the event loop.

Loop time is divided into rounds. In each, an identity may use ``SLICE_S``; its further calls wait
in order for the next round, which begins after the sockets were polled. So a call of another
identity waits for one slice per busy identity and for one running call. A single identity continues
immediately.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections import deque
from collections.abc import Callable
from typing import Final, TypeVar

from kvstore.errors import KVStoreError, without_frames

SLICE_S: Final = 0.001
"""Time slice of one identity per round. Polling the sockets costs some tens of microseconds."""

ReplyT = TypeVar("ReplyT")


class FairScheduler:
    """Schedules calls by identity. Threads: the loop's."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._used: dict[str, float] = {}
        """Seconds used by identities in this round."""
        self._waiting: dict[str, deque[Callable[[], object]]] = {}
        """Deferred work of each identity that has used its slice, oldest first."""
        self._is_due = False

    def slice_used_up(self, identity: str) -> bool:
        return self._used.get(identity, 0.0) >= SLICE_S

    def run_timed(self, identity: str, work: Callable[[], ReplyT]) -> ReplyT:
        """Run ``work`` now and charge its time to the identity."""
        started = self._clock()
        try:
            return work()
        finally:
            self._used[identity] = self._used.get(identity, 0.0) + self._clock() - started

    def defer(self, identity: str, work: Callable[[], object]) -> None:
        """Run ``work``, which calls ``run_timed`` and does not raise, in a later slice."""
        self._waiting.setdefault(identity, deque()).append(work)
        self._call_soon()

    async def run_in_turn(self, identity: str, work: Callable[[], ReplyT]) -> ReplyT:
        """Return the result of ``work`` in a slice of this identity, or its ``KVStoreError``."""
        if not self.slice_used_up(identity):
            return self.run_timed(identity, work)
        result: asyncio.Future[ReplyT] = asyncio.get_running_loop().create_future()
        self.defer(identity, functools.partial(self._go, identity, work, result))
        try:
            return await result
        finally:
            del result  # an error's traceback refers to it: a cycle

    def _go(
        self, identity: str, work: Callable[[], ReplyT], result: asyncio.Future[ReplyT]
    ) -> None:
        if result.done():  # cancelled
            return
        try:
            result.set_result(self.run_timed(identity, work))
        except KVStoreError as error:
            result.set_exception(without_frames(error))

    def _call_soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._start_round)

    def _start_round(self) -> None:
        self._is_due = False
        self._used.clear()
        try:
            for identity in list(self._waiting):
                while (queue := self._waiting.get(identity)) and not self.slice_used_up(identity):
                    work = queue.popleft()
                    if not queue:
                        del self._waiting[identity]
                    work()
        finally:
            if self._waiting:
                self._call_soon()
