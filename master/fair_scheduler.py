"""Calls of identities take turns, so that the calls of one cannot keep those of others waiting.

The loop's time is dealt out in rounds. Within a round an identity may use ``SLICE_S``; what it asks
for beyond that waits, in order, for the next round. A round begins in the loop's next turn, after
the sockets were looked at: another identity's call waits for one slice of each identity that has
work, and for one call that is under way. An identity that is alone goes on at once.
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
"""The time of one identity in a round. A look at the sockets costs some tens of microseconds."""

ReplyT = TypeVar("ReplyT")


class FairScheduler:
    """See the module. Threads: the loop's."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """``clock``: seconds."""
        self._clock = clock
        self._used: dict[str, float] = {}
        """Seconds that identities have used in this round."""
        self._waiting: dict[str, deque[Callable[[], object]]] = {}
        """What each identity has asked for, oldest first. It has used its slice."""
        self._is_due = False

    def slice_used_up(self, who: str) -> bool:
        """Whether this identity has used its slice of this round."""
        return self._used.get(who, 0.0) >= SLICE_S

    def run_timed(self, who: str, work: Callable[[], ReplyT]) -> ReplyT:
        """Does ``work`` now, in the time of this identity."""
        started = self._clock()
        try:
            return work()
        finally:
            self._used[who] = self._used.get(who, 0.0) + self._clock() - started

    def defer(self, who: str, work: Callable[[], object]) -> None:
        """Does ``work`` in the next round in which this identity has time left, after what it has
        asked for before. ``work`` uses ``run_timed`` and raises nothing."""
        self._waiting.setdefault(who, deque()).append(work)
        self._call_soon()

    async def run_in_turn(self, who: str, work: Callable[[], ReplyT]) -> ReplyT:
        """The result of ``work``, which is done when it is this identity's turn, and not at all if
        the caller is cancelled before that. Raises what ``work`` raises: a ``KVStoreError``."""
        if not self.slice_used_up(who):
            return self.run_timed(who, work)
        turn: asyncio.Future[ReplyT] = asyncio.get_running_loop().create_future()
        self.defer(who, functools.partial(self._go, who, work, turn))
        try:
            return await turn
        finally:
            del turn  # an error's traceback refers to it: a cycle

    def _go(self, who: str, work: Callable[[], ReplyT], turn: asyncio.Future[ReplyT]) -> None:
        if turn.done():  # cancelled
            return
        try:
            turn.set_result(self.run_timed(who, work))
        except KVStoreError as error:
            turn.set_exception(without_frames(error))

    def _call_soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._start_round)

    def _start_round(self) -> None:
        self._is_due = False
        self._used.clear()
        try:
            for who in list(self._waiting):
                while (queue := self._waiting.get(who)) and not self.slice_used_up(who):
                    work = queue.popleft()
                    if not queue:
                        del self._waiting[who]
                    work()
        finally:
            if self._waiting:
                self._call_soon()
