"""Leases of one client on objects that it reads, and their release.

A get leases what it looks up under a new number. After the read, the client's next call releases
the number, or ``Release`` after ``IDLE_S``. An object that is read twice within ``AGAIN_S`` is
leased by time instead and its location cached (``PlacementCache``). Leases for later reads
(``lookup``, ``exists_many``, a match) are released by those reads, or by ``Client.release``.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from itertools import count
from typing import Final

from kvstore.calls import Release, Request
from kvstore.limits import RELEASED_MAX, Key, Namespace
from kvstore.runtime.clock import uptime

AGAIN_S: Final = 1.0
"""An object read again within this time (at most twice this) is leased by time."""

IDLE_S: Final = 0.25
"""Maximum wait of a releasable lease for a call that carries its release."""

EXPECTED_MAX: Final = 65_536
"""Maximum leased objects that await later reads. Older leases end by time."""


class ReadLease:
    """A lease on objects that are read once each. Not synchronized: a lost count delays its end."""

    __slots__ = ("number", "unread")

    def __init__(self, number: int) -> None:
        self.number = number
        self.unread = 1
        """Reads (of one or several objects) that have not ended."""


class ReadLeases:
    """The read leases of a client. Threads: any."""

    def __init__(self, keys_max: int, clock: Callable[[], float] = uptime, first: int = 0) -> None:
        """``keys_max``: remembered reads; 0: none. ``first``: the first number; 0: a secret one."""
        self._keys_max = keys_max // 2
        self._clock = clock
        self._numbers = count(first or 1 + secrets.randbits(60))
        self._finished: deque[int] = deque()
        self._expected: dict[tuple[Namespace, Key], ReadLease] = {}
        self._reads: dict[Namespace, set[Key]] = {}
        self._older_reads: dict[Namespace, set[Key]] = {}
        self._reads_since = clock()
        self._finished_at = 0.0
        self.on_hold: Callable[[], object] | None = None

    def new(self) -> ReadLease:
        return ReadLease(next(self._numbers))

    def read_again(self, namespace: Namespace, keys: Sequence[Key]) -> AbstractSet[Key]:
        if self._clock() - self._reads_since >= AGAIN_S:
            self._forget_reads()
        found: AbstractSet[Key] = frozenset()
        for reads in (self._reads.get(namespace), self._older_reads.get(namespace)):
            if reads and not reads.isdisjoint(keys):
                found = found | reads.intersection(keys)
        return found

    def note_reads(self, namespace: Namespace, keys: Sequence[Key]) -> None:
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

    def expect(self, lease: ReadLease, objects: Iterable[tuple[Namespace, Key]]) -> None:
        """Release this lease once each of these ``lease.unread`` distinct objects was read."""
        expected = self._expected
        for expected_object in objects:
            before = expected.pop(expected_object, None)
            expected[expected_object] = lease
            if before is not None:
                self.done(before)
        while len(expected) > EXPECTED_MAX:
            expected.pop(next(iter(expected), ("", Key(b""))), None)  # type: ignore[arg-type]

    def give_up(
        self, namespace: Namespace, keys: Sequence[Key], leases: Sequence[ReadLease]
    ) -> None:
        """Release one share of ``leases`` and of expected leases, after a read or instead of it."""
        if self._expected:
            for key in keys:
                expected = self._expected.pop((namespace, key), None)
                if expected is not None:
                    self.done(expected)
        for lease in leases:
            self.done(lease)

    def done(self, lease: ReadLease) -> None:
        """Release one share of a lease; the last share ends it."""
        lease.unread -= 1
        if not lease.unread:
            self._finished.append(lease.number)
            self._finished_at = self._clock()
            if self.on_hold is not None:
                self.on_hold()

    def __len__(self) -> int:
        return len(self._finished)

    @property
    def expects(self) -> bool:
        """Whether any lease ends with later reads of its objects."""
        return bool(self._expected)

    def due_at(self) -> float:
        """Return the time of a separate release call for what still waits then."""
        return self._finished_at + IDLE_S

    def give_back(self) -> Sequence[Request]:
        return [Release(self.take())]

    def take(self) -> Sequence[int]:
        """Take up to ``RELEASED_MAX`` leases, which the caller sends to the master."""
        if not self._finished:
            return ()
        taken: list[int] = []
        while self._finished and len(taken) < RELEASED_MAX:
            try:
                taken.append(self._finished.popleft())
            except IndexError:  # another thread has taken it
                break
        return taken
