"""The leases of one client on objects that it reads, and which of them it has finished with.

A get leases what it looks up under a new number, and releases the number once it has read the
bytes: the client's next call carries the number, or ``Release`` where no call follows soon
(``IDLE_S``). An object that is read twice within ``AGAIN_S`` is leased by time instead, and its
location is remembered, so that reading it again needs no call (``PlacementCache``). Leases of
objects that will be read by later calls (``lookup``, ``exists_many``, a match) are released when
those have been read, or by ``Client.release``.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from itertools import count
from typing import Final

from kvstore.limits import RELEASED_MAX, Key, Namespace
from kvstore.runtime.clock import uptime

AGAIN_S: Final = 1.0
"""How soon an object must be read again to be leased by time: at least this, twice this at most."""

IDLE_S: Final = 0.25
"""How long a lease that can be released waits for a call that carries it."""

EXPECTED_MAX: Final = 65_536
"""Leased objects that are to be read by later calls. The leases of older ones end by time."""


class ReadLease:
    """A lease on some objects that the client reads once each. Not synchronized: a count that is
    lost between two threads leaves the lease to its time."""

    __slots__ = ("number", "unread")

    def __init__(self, number: int) -> None:
        self.number = number
        self.unread = 1
        """Objects, or reads of several together, that have not ended."""


class ReadLeases:
    """See the module. Any thread may call any method: each step is one operation of a built-in
    container."""

    def __init__(self, keys_max: int, clock: Callable[[], float] = uptime, first: int = 0) -> None:
        """
        Args:
            keys_max: objects whose reads are remembered; 0: none is leased by time.
            first: the first number; 0: a random one, which no other client can guess.
        """
        self._keys_max = keys_max // 2
        self._clock = clock
        self._numbers = count(first or 1 + secrets.randbits(60))
        self._finished: deque[int] = deque()
        self._expected: dict[tuple[Namespace, Key], ReadLease] = {}
        self._reads: dict[Namespace, set[Key]] = {}
        self._older_reads: dict[Namespace, set[Key]] = {}
        self._reads_since = clock()
        self._finished_at = 0.0
        self.on_finish: Callable[[], object] | None = None
        """Called when there is a lease to release."""

    def new(self) -> ReadLease:
        return ReadLease(next(self._numbers))

    # --- objects that are read again ----------------------------------------------------------

    def read_again(self, namespace: Namespace, keys: Sequence[Key]) -> AbstractSet[Key]:
        """Those of ``keys`` that were read a moment ago."""
        if self._clock() - self._reads_since >= AGAIN_S:
            self._forget_reads()
        found: AbstractSet[Key] = frozenset()
        for reads in (self._reads.get(namespace), self._older_reads.get(namespace)):
            if reads and not reads.isdisjoint(keys):
                found = found | reads.intersection(keys)
        return found

    def note_reads(self, namespace: Namespace, keys: Sequence[Key]) -> None:
        """Called when these objects were read."""
        if self._keys_max:
            reads = self._reads.setdefault(namespace, set())
            reads.update(keys)
            if len(reads) > self._keys_max:
                self._forget_reads()

    def _forget_reads(self) -> None:
        now = self._clock()
        is_recent = now - self._reads_since < 2 * AGAIN_S
        self._older_reads, self._reads = (self._reads if is_recent else {}), {}
        self._reads_since = now

    # --- the end of leases --------------------------------------------------------------------

    def expect(self, lease: ReadLease, objects: Iterable[tuple[Namespace, Key]]) -> None:
        """Releases this lease once each of these distinct objects, ``lease.unread`` in all, was
        read. A lease on an object takes the place of an earlier one on it."""
        expected = self._expected
        for each in objects:
            before = expected.pop(each, None)
            expected[each] = lease
            if before is not None:
                self.done(before)
        while len(expected) > EXPECTED_MAX:
            expected.pop(next(iter(expected), ("", Key(b""))), None)  # type: ignore[arg-type]

    def give_up(
        self, namespace: Namespace, keys: Sequence[Key], leases: Sequence[ReadLease]
    ) -> None:
        """Called when a read of these objects has ended, or is not wanted any more: gives up one
        share of each of ``leases``, and of those that expect these objects."""
        if self._expected:
            for key in keys:
                expected = self._expected.pop((namespace, key), None)
                if expected is not None:
                    self.done(expected)
        for lease in leases:
            self.done(lease)

    def done(self, lease: ReadLease) -> None:
        """Gives up one share of a lease; the last one releases it."""
        lease.unread -= 1
        if not lease.unread:
            self._finished.append(lease.number)
            self._finished_at = self._clock()
            if self.on_finish is not None:
                self.on_finish()

    # --- releasing ----------------------------------------------------------------------------

    def __len__(self) -> int:
        """Leases that wait for a call that releases them."""
        return len(self._finished)

    @property
    def expects(self) -> bool:
        """Whether any lease ends with reads of its objects by later calls."""
        return bool(self._expected)

    def release_at(self) -> float:
        """When a call of its own should release what still waits then."""
        return self._finished_at + IDLE_S

    def take(self) -> Sequence[int]:
        """Up to ``RELEASED_MAX`` leases, which the caller sends to the master."""
        if not self._finished:
            return ()
        taken: list[int] = []
        while self._finished and len(taken) < RELEASED_MAX:
            try:
                taken.append(self._finished.popleft())
            except IndexError:  # another thread has taken it
                break
        return taken
