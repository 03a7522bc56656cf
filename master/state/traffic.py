"""Who puts into each namespace, who asks there, what was last asked for and not found, and where
matches ended.

``kvstore why`` and the dashboard show it. Only the last clients, keys and namespaces are
remembered. Two dictionaries keep the last ones without an order: a row that is used moves to the
recent one; when that is full it becomes the older one, and the master forgets what was the older
one.

The usual call is one of a client in the namespace of its last call. Its ``Caller`` still has the
row then, and no dictionary is searched.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.limits import Key, Namespace

SPACES_MAX = 512
"""Namespaces that are remembered at least; twice as many at most."""

CLIENTS_MAX = 16
"""Clients of a namespace that are remembered at least, of those that put and of those that ask;
twice as many at most."""


TIPS_MAX = 128
"""Tips of matches that are remembered of a namespace at least; twice as many at most."""


class Tip:
    """A block at which matches ended: the last one that they found."""

    __slots__ = ("first_ms", "matched")

    def __init__(self, now_ms: int) -> None:
        self.first_ms = now_ms
        """Since when it is counted."""
        self.matched = 0
        """Matches that ended here since then."""


class Tips:
    """The tips of the last matches in a namespace, by key. One that is matched again before
    ``TIPS_MAX`` others are keeps its count. It holds keys and no records, so it keeps nothing of
    what is evicted or removed but its key."""

    __slots__ = ("older", "recent")

    def __init__(self) -> None:
        self.recent: dict[Key, Tip] = {}
        self.older: dict[Key, Tip] = {}

    def matched(self, now_ms: int, key: Key) -> None:
        tip = self.recent.get(key)
        if tip is None:
            tip = self.older.pop(key, None)
            if tip is None:
                tip = Tip(now_ms)
            if len(self.recent) >= TIPS_MAX:
                self.older, self.recent = self.recent, {}
            self.recent[key] = tip
        tip.matched += 1

    def all(self) -> list[tuple[Key, Tip]]:
        return [*self.recent.items(), *self.older.items()]


class Era:
    """The time in which no row was forgotten: a row that was right in it is right."""

    __slots__ = ()


class ClientRow:
    """What one client has done in one namespace, as one who puts or as one who asks."""

    __slots__ = (
        "era", "first_ms", "found", "key", "keys", "last_ms", "missed", "missed_at", "missed_ms",
        "missed_of", "name", "namespace", "none", "partly", "questions", "stored", "tips",
    )  # fmt: skip

    def __init__(self, name: str, space: Space, era: Era, now_ms: int) -> None:
        self.name = name
        self.namespace = space.name
        self.tips = space.tips
        """Of the namespace: those of all its clients."""
        self.era = era
        """In which it was last found in the dictionaries."""
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
        self.questions = 0
        self.none = 0
        """Questions whose first key was not there."""
        self.partly = 0
        """Questions of which a later key was not there."""
        self.missed = Key(b"")
        """The key that was not there, of its last such question; the first one of that question."""
        self.missed_ms = 0
        """When."""
        self.missed_at = 0
        """Keys before it in that question."""
        self.missed_of = 0
        """Keys of that question."""


class Caller:
    """Where calls come from: a connection. Its carrier makes it."""

    __slots__ = ("asks", "name", "puts")

    def __init__(self, name: str = "") -> None:
        self.name = name
        """The client's name, a space, and its address, which has no spaces; empty: not known."""
        self.asks: ClientRow | None = None
        """The row of its last question."""
        self.puts: ClientRow | None = None
        """The row of its last put."""


class LastClients:
    """The last clients of a namespace, by name."""

    __slots__ = ("older", "recent")

    def __init__(self) -> None:
        self.recent: dict[str, ClientRow] = {}
        self.older: dict[str, ClientRow] = {}

    def all(self) -> list[ClientRow]:
        return [*self.recent.values(), *self.older.values()]


class Space:
    """One namespace."""

    __slots__ = ("askers", "evicted", "evicted_idle_ms", "evicted_ms", "name", "putters", "tips")

    def __init__(self, name: Namespace) -> None:
        self.name = name
        self.putters = LastClients()
        self.askers = LastClients()
        self.tips = Tips()
        self.evicted = 0
        """Objects."""
        self.evicted_ms = 0
        """When the last one was evicted."""
        self.evicted_idle_ms = 0
        """How long that one had not been used then."""


class TrafficCounts:
    """See the module."""

    def __init__(self) -> None:
        self.unknown = Caller()
        """Of calls that show no client's name."""
        self.caller = self.unknown
        """Of the call that is being answered."""
        self.recent: dict[str, Space] = {}
        self.older: dict[str, Space] = {}
        self._era = Era()

    def asked(
        self,
        now_ms: int,
        namespace: Namespace,
        keys: Sequence[Key],
        count: int,
        found: int,
        first: int,
        tip: Key | None = None,
    ) -> None:
        """Notes a question.

        Args:
            count: number of ``keys``.
            found: how many of them are there.
            first: which is the first that is not there; -1: none.
            tip: the last matched key, of a match that has found one.
        """
        row = self.caller.asks
        if row is None or row.era is not self._era or row.namespace != namespace:
            space = self._space(namespace)
            row = self._row(now_ms, space, space.askers)
            self.caller.asks = row
        row.last_ms = now_ms
        row.questions += 1
        row.keys += count
        row.found += found
        if tip is not None:
            row.tips.matched(now_ms, tip)
        if first < 0:
            return
        if first:
            row.partly += 1
        else:
            row.none += 1
        row.missed = keys[first]
        row.missed_ms = now_ms
        row.missed_at = first
        row.missed_of = count

    def puts(self, now_ms: int, namespace: Namespace) -> ClientRow:
        """The row of the client that begins or ends a put."""
        row = self.caller.puts
        if row is None or row.era is not self._era or row.namespace != namespace:
            space = self._space(namespace)
            row = self._row(now_ms, space, space.putters)
            self.caller.puts = row
        row.last_ms = now_ms
        return row

    def evicts(self, now_ms: int, namespace: Namespace, idle_ms: int) -> None:
        space = self._space(namespace)
        space.evicted += 1
        space.evicted_ms = now_ms
        space.evicted_idle_ms = idle_ms

    def _space(self, namespace: Namespace) -> Space:
        space = self.recent.get(namespace)
        if space is None:
            space = self.older.pop(namespace, None)
            if space is None:
                space = Space(namespace)
            if len(self.recent) >= SPACES_MAX:
                self.older, self.recent = self.recent, {}
                self._era = Era()
            self.recent[namespace] = space
        return space

    def _row(self, now_ms: int, space: Space, rows: LastClients) -> ClientRow:
        name = self.caller.name
        row = rows.recent.get(name)
        if row is None:
            row = rows.older.pop(name, None)
            if row is None:
                row = ClientRow(name, space, self._era, now_ms)
            if len(rows.recent) >= CLIENTS_MAX:
                rows.older, rows.recent = rows.recent, {}
                self._era = Era()
            rows.recent[name] = row
        row.era = self._era
        return row

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
            tips = space.tips
            assert len(tips.recent) <= TIPS_MAX
            assert len(tips.older) <= TIPS_MAX
            assert not tips.recent.keys() & tips.older.keys()
            for rows in (space.putters, space.askers):
                assert len(rows.recent) <= CLIENTS_MAX
                assert len(rows.older) <= CLIENTS_MAX
                assert not rows.recent.keys() & rows.older.keys()
                for row in rows.all():
                    assert row.namespace == space.name
                    assert row.first_ms <= row.last_ms
                    assert row.found <= row.keys
                    assert row.none + row.partly <= row.questions
