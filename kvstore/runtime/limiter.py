"""Limits on the connections, requests and bytes of one endpoint.

A slot is *kept* from the authentication of its peer until the peer leaves. An identity gets another
slot while more are free than it keeps: alone it gets half of them, each of n greedy ones gets 1/(n
+ 1), and as many stay free. Kept slots are never preempted, because a transfer or call in progress
would fail.

Other slots *wait* for their peer: for its handshake, for the rest of a message, until it reads a
reply. These count as free: when a slot is needed, the longest wait is preempted. A correct peer
needs milliseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Final, Generic, TypeVar

from kvstore.errors import BusyError
from kvstore.runtime.formatting import name_text

log = logging.getLogger("kvstore.runtime")

SlotT = TypeVar("SlotT")


class WaitPreemptedError(Exception):
    """This wait, the longest one, was preempted for another peer."""


class Limiter(Generic[SlotT]):
    """The slots of one endpoint, each named by its user. Threads: any."""

    def __init__(self, name: str, size: int) -> None:
        """``name``: for logs and errors. ``size``: at least 1."""
        self.name: Final = name
        self._size = size
        self._kept: dict[SlotT, str] = {}
        """The identity of each kept slot; empty: it has none."""
        self._waiting: dict[SlotT, tuple[int, Callable[[], object]]] = {}
        """Weight and callback of each other slot, the longest wait first."""
        self._weight = 0
        """Total weight of the waits."""
        self._held: dict[str, int] = {}
        """Number of kept slots of each identity."""
        self._changing = threading.RLock()  # ``on_preempted`` may release

    def __iter__(self) -> Iterator[SlotT]:
        """Iterate over the slots in use at the time of the call."""
        with self._changing:
            return iter([*self._kept, *self._waiting])

    def __len__(self) -> int:
        return len(self._kept) + len(self._waiting)

    def wait(self, slot: SlotT, on_preempted: Callable[[], object], weight: int = 1) -> None:
        """Acquire a slot for a wait, unless it already waits. It is released when ``on_preempted``
        is called. A ``weight`` above the size preempts all other waits.

        Raises:
            BusyError: all slots are kept.
        """
        with self._changing:
            if slot in self._waiting:
                return
            if self._free <= 0:
                raise self._refusal("")
            self._preempt(weight)
            self._waiting[slot] = weight, on_preempted
            self._weight += weight

    def keep(self, slot: SlotT, identity: str = "") -> None:
        """Turn a wait into a kept slot.

        Raises:
            BusyError: the identity has reached its limit, or the wait was preempted.
        """
        with self._changing:
            if slot not in self._waiting:
                raise BusyError(f"{self.name}: the slot was given to another peer")
            self._keep(slot, identity)
            self._end_wait(slot)

    def acquire(self, slot: SlotT, identity: str = "") -> None:
        """Acquire a slot and keep it. Raises BusyError: the identity has reached its limit."""
        with self._changing:
            self._keep(slot, identity)
            self._preempt(0)

    def release(self, slot: SlotT) -> None:
        """Idempotent."""
        with self._changing:
            if slot in self._waiting:
                self._end_wait(slot)
            elif (identity := self._kept.pop(slot, None)) is not None:
                self._held[identity] -= 1
                if not self._held[identity]:
                    del self._held[identity]

    @contextlib.asynccontextmanager
    async def waiting(
        self: Limiter[asyncio.Timeout], timeout_s: float, weight: int = 1
    ) -> AsyncIterator[None]:
        """Hold a waiting slot for the block.

        Raises:
            WaitPreemptedError
            TimeoutError: the wait took longer than ``timeout_s``.
        """
        limit = asyncio.timeout(timeout_s)

        def preempt() -> None:
            if not limit.expired():
                limit.reschedule(asyncio.get_running_loop().time())

        try:
            async with limit:
                self.wait(limit, preempt, weight)
                yield
        except TimeoutError:
            if limit not in self._waiting:
                raise WaitPreemptedError from None
            raise
        finally:
            self.release(limit)

    @property
    def _free(self) -> int:
        return self._size - len(self._kept)

    def _keep(self, slot: SlotT, identity: str) -> None:
        held = self._held.get(identity, 0)
        if self._free <= (held if identity else 0):
            raise self._refusal(identity)
        self._kept[slot] = identity
        self._held[identity] = held + 1

    def _end_wait(self, slot: SlotT) -> Callable[[], object]:
        weight, on_preempted = self._waiting.pop(slot)
        self._weight -= weight
        return on_preempted

    def _preempt(self, weight: int) -> None:
        """Preempt waits until there is space for ``weight``."""
        while self._waiting and self._weight + weight > self._free:
            self._end_wait(next(iter(self._waiting)))()

    def _refusal(self, identity: str) -> BusyError:
        if not identity:
            return BusyError(f"{self.name}: {self._size} slots are in use, the limit")
        held, free = self._held.get(identity, 0), self._free
        log.warning(
            "identity_limit_reached endpoint=%s identity=%s held=%d free=%d",
            self.name, name_text(identity), held, free,
        )  # fmt: skip
        return BusyError(
            f"{self.name}: identity {identity} has reached its limit: {held} of {self._size} slots "
            f"in use, {free} free",
            advice="An identity may hold as many as it leaves free. Issue separate certificates.",
        )
