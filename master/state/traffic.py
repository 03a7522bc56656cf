"""Who puts into each namespace, who asks there, and what was last asked for and not found.

``kvstore why`` shows it. Only the last clients, keys and namespaces are remembered. Two
dictionaries keep the last ones without an order: a row that is used moves to the recent one; when
that is full it becomes the older one, and what was the older one is forgotten.

The shell says which client makes the next call (``caller``): its name, a space, and its address,
which has no spaces.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.limits import Key, Namespace

SPACES_MAX = 512
"""Namespaces that are remembered at least; twice as many at most. About 10 KiB each, if all rows
are in use."""

CLIENTS_MAX = 16
"""Clients of a namespace that are remembered at least, of those that put and of those that ask;
twice as many at most."""

MISSES_MAX = 8
"""Keys that were not found, of each namespace: different ones in a row."""


class Caller:
    """What one client has done in one namespace, as one who puts or as one who asks."""

    __slots__ = ("first_ms", "found", "key", "keys", "last_ms", "name", "stored")

    def __init__(self, name: str, now_ms: int) -> None:
        self.name = name
        self.first_ms = now_ms
        self.last_ms = now_ms
        self.keys = 0
        """That it wanted to put, or asked for."""
        self.found = 0
        """Of those: that were there."""
        self.stored = 0
        """That it has put."""
        self.key = Key(b"")
        """The first of its last put."""


class Callers:
    """The last clients, by name."""

    __slots__ = ("older", "recent")

    def __init__(self) -> None:
        self.recent: dict[str, Caller] = {}
        self.older: dict[str, Caller] = {}

    def of(self, now_ms: int, name: str) -> Caller:
        caller = self.recent.get(name)
        if caller is None:
            caller = self._add(now_ms, name)
        caller.last_ms = now_ms
        return caller

    def _add(self, now_ms: int, name: str) -> Caller:
        caller = self.older.pop(name, None)
        if caller is None:
            caller = Caller(name, now_ms)
        if len(self.recent) >= CLIENTS_MAX:
            self.older, self.recent = self.recent, {}
        self.recent[name] = caller
        return caller

    def rows(self) -> list[Caller]:
        return [*self.recent.values(), *self.older.values()]


class Miss:
    """A key that was asked for and not found. Overwritten in place."""

    __slots__ = ("asked", "found", "key", "last_ms", "name")

    def __init__(self) -> None:
        self.key = Key(b"")
        """The first one of its question that was not there; empty: none yet."""
        self.name = ""
        """Of the client."""
        self.last_ms = 0
        self.found = 0
        """Keys before it in that question."""
        self.asked = 0
        """Keys of that question."""


class Space:
    """One namespace."""

    __slots__ = (
        "askers", "evicted", "evicted_idle_ms", "evicted_ms", "misses", "name", "next_miss", "none",
        "partly", "putters", "questions",
    )  # fmt: skip

    def __init__(self, name: Namespace) -> None:
        self.name = name
        self.putters = Callers()
        self.askers = Callers()
        self.misses = [Miss() for _ in range(MISSES_MAX)]
        self.next_miss = 0
        self.questions = 0
        self.none = 0
        """Questions whose first key was not there."""
        self.partly = 0
        """Questions of which a later key was not there."""
        self.evicted = 0
        """Objects."""
        self.evicted_ms = 0
        """When the last one was evicted."""
        self.evicted_idle_ms = 0
        """How long that one had not been used then."""

    def last_misses(self) -> list[Miss]:
        """The last one first."""
        at = self.next_miss
        return [miss for miss in reversed(self.misses[at:] + self.misses[:at]) if miss.key]


class Traffic:
    """See the module."""

    def __init__(self) -> None:
        self.caller = ""
        """Of the call that is being answered; empty: not known."""
        self.recent: dict[str, Space] = {}
        self.older: dict[str, Space] = {}

    def asked(
        self,
        now_ms: int,
        namespace: Namespace,
        keys: Sequence[Key],
        count: int,
        found: int,
        first: int,
    ) -> None:
        """Notes a question.

        Args:
            count: number of ``keys``.
            found: how many of them are there.
            first: which is the first that is not there; -1: none.
        """
        space = self.recent.get(namespace)
        if space is None:
            space = self._add(namespace)
        space.questions += 1
        caller = space.askers.of(now_ms, self.caller)
        caller.keys += count
        caller.found += found
        if first >= 0:
            self._missed(now_ms, space, keys, count, first)

    def _missed(
        self, now_ms: int, space: Space, keys: Sequence[Key], count: int, first: int
    ) -> None:
        if first:
            space.partly += 1
        else:
            space.none += 1
        key = keys[first]
        at = space.next_miss
        miss = space.misses[at - 1]  # the last one, which is often asked for again
        if miss.key != key:
            miss = space.misses[at]
            space.next_miss = (at + 1) % MISSES_MAX
            miss.key = key
        miss.name = self.caller
        miss.last_ms = now_ms
        miss.found = first
        miss.asked = count

    def puts(self, now_ms: int, namespace: Namespace) -> Caller:
        """The row of the client that begins or ends a put."""
        space = self.recent.get(namespace)
        if space is None:
            space = self._add(namespace)
        return space.putters.of(now_ms, self.caller)

    def evicts(self, now_ms: int, namespace: Namespace, idle_ms: int) -> None:
        space = self.recent.get(namespace)
        if space is None:
            space = self._add(namespace)
        space.evicted += 1
        space.evicted_ms = now_ms
        space.evicted_idle_ms = idle_ms

    def _add(self, namespace: Namespace) -> Space:
        space = self.older.pop(namespace, None)
        if space is None:
            space = Space(namespace)
        if len(self.recent) >= SPACES_MAX:
            self.older, self.recent = self.recent, {}
        self.recent[namespace] = space
        return space

    def spaces(self, namespace: str) -> list[Space]:
        """That namespace, if it is known; all of them for "", by the time of their first use."""
        if not namespace:
            return [*self.older.values(), *self.recent.values()]
        space = self.recent.get(namespace) or self.older.get(namespace)
        return [] if space is None else [space]

    def check_invariants(self) -> None:
        assert len(self.recent) <= SPACES_MAX
        assert len(self.older) <= SPACES_MAX
        assert not self.recent.keys() & self.older.keys()
        for space in [*self.recent.values(), *self.older.values()]:
            assert len(space.misses) == MISSES_MAX
            assert space.none + space.partly <= space.questions
            for callers in (space.putters, space.askers):
                assert len(callers.recent) <= CLIENTS_MAX
                assert len(callers.older) <= CLIENTS_MAX
                assert not callers.recent.keys() & callers.older.keys()
                for caller in callers.rows():
                    assert caller.first_ms <= caller.last_ms
                    assert caller.found <= caller.keys
