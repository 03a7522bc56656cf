"""Remembers who puts into each namespace, who asks there, which keys were last asked for and not
found, where matches ended, and which first keys of chains were evicted last.

``kvstore why`` and the dashboard show this. Only the last clients, keys and namespaces are
remembered. Two dictionaries keep the last ones without an order: a row that is used moves to the
recent one; when that is full it becomes the older one, and the former older one is forgotten.

The usual call is one of a client in the namespace of its last call. Its ``Caller`` still has the
row then, and no dictionary is searched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from kvstore.limits import Key, Namespace
from kvstore.security.identity import UNAUTHENTICATED, Identity

SPACES_MAX = 512
"""Namespaces that are remembered at least; twice as many at most."""

CLIENTS_MAX = 16
"""Clients of a namespace that are remembered at least, of those that put and of those that ask;
twice as many at most."""

TIPS_MAX = 128
"""Tips of matches that are remembered of a namespace at least; twice as many at most."""

HEADS_MAX = 4_096
"""Evicted first keys of chains that are remembered at least, of all namespaces together; twice as
many at most. A chain is evicted from its end, so its first key goes last, and is the key that the
next question for the chain misses."""


class MatchTip:
    """A block at which matches ended: the last block that they found."""

    __slots__ = ("first_ms", "matched")

    def __init__(self, now_ms: int) -> None:
        self.first_ms = now_ms
        """Since when matches are counted."""
        self.matched = 0
        """Matches that have ended at this block since then."""


KeyT = TypeVar("KeyT")
RowT = TypeVar("RowT")


class Recent(Generic[KeyT, RowT]):
    """The rows that were used last: at least ``most``, at most twice as many."""

    def __init__(self, most: int) -> None:
        self.recent: dict[KeyT, RowT] = {}
        self.older: dict[KeyT, RowT] = {}
        self._most = most

    def get(self, key: KeyT) -> RowT | None:
        row = self.recent.get(key)
        return self.older.get(key) if row is None else row

    def use(self, key: KeyT, row: RowT) -> bool:
        """Adds a row, or notes its use. Returns whether others are forgotten for it."""
        self.older.pop(key, None)
        forgets = key not in self.recent and len(self.recent) >= self._most
        if forgets:
            self.older, self.recent = self.recent, {}
        self.recent[key] = row
        return forgets

    def items(self) -> list[tuple[KeyT, RowT]]:
        return [*self.older.items(), *self.recent.items()]

    def all(self) -> list[RowT]:
        return [*self.older.values(), *self.recent.values()]


class MatchTips(Recent[Key, MatchTip]):
    """The tips of the last matches in a namespace, by key. A tip keeps its count if it is matched
    again before ``TIPS_MAX`` others. This class holds keys and no records, so only the key of an
    evicted or removed object stays."""

    def __init__(self) -> None:
        super().__init__(TIPS_MAX)

    def matched(self, now_ms: int, key: Key) -> None:
        tip = self.recent.get(key)
        if tip is None:
            tip = self.older.get(key) or MatchTip(now_ms)
            self.use(key, tip)
        tip.matched += 1


class CacheGeneration:
    """A time in which no row is forgotten: a row that was found in the present one is valid."""


class ClientRow:
    """The record of one client in one namespace, either as one that puts or as one that asks."""

    __slots__ = (
        "era", "first_ms", "found", "key", "keys", "last_ms", "missed", "missed_at", "missed_ms",
        "missed_of", "name", "namespace", "none", "partly", "questions", "stored", "stored_bytes",
        "tips",
    )  # fmt: skip

    def __init__(
        self, name: str, space: NamespaceTrafficRecord, era: CacheGeneration, now_ms: int
    ) -> None:
        self.name = name
        self.namespace = space.name
        self.tips = space.tips
        """The tips of the namespace, which all of its clients share."""
        self.era = era
        """The era in which this row was last found in the dictionaries."""
        self.first_ms = now_ms
        self.last_ms = now_ms
        self.keys = 0
        """Keys that the client wanted to put, or asked for."""
        self.found = 0
        """Those of these keys that were there."""
        self.stored = 0
        """Objects that the client has put."""
        self.stored_bytes = 0
        """Payload bytes of these objects."""
        self.key = Key(b"")
        """The first key of its last put."""
        self.questions = 0
        self.none = 0
        """Questions whose first key was not there."""
        self.partly = 0
        """Questions whose first key was there, and a later one was not."""
        self.missed = Key(b"")
        """The first key that was not there, in the last question that asked for such a key."""
        self.missed_ms = 0
        """When the client asked that question."""
        self.missed_at = 0
        """The number of keys before the missed one in that question."""
        self.missed_of = 0
        """The number of keys in that question."""


class Caller:
    """Where a call comes from. The lane makes one per connection, gRPC one per call."""

    __slots__ = ("asks", "holder", "identity", "name", "number", "puts")

    def __init__(
        self,
        name: str = "",
        identity: Identity = UNAUTHENTICATED,
        holder: int = 0,
        number: int = 0,
    ) -> None:
        self.name = name
        """The client's name, a space, and its address, which has no spaces; empty: not known."""
        self.identity = identity
        """The client's authenticated identity."""
        self.holder = holder
        """The number of its identity, for which the master makes capabilities
        (``kvstore.master.capabilities``); 0: it has none, and gets the segments' tokens."""
        self.number = number
        """Of the client, as its puts have it, if it has an identity and has joined."""
        self.asks: ClientRow | None = None
        """The client's row for its last question."""
        self.puts: ClientRow | None = None
        """The client's row for its last put."""

    @property
    def source(self) -> str:
        """Its identity and its address; empty: it has no identity. Neither is what it says."""
        if not self.identity.name:
            return ""
        return f"{self.identity.name} {self.name.rpartition(' ')[2]}"


class NamespaceTrafficRecord:
    """What is remembered of one namespace."""

    def __init__(self, name: Namespace) -> None:
        self.name = name
        self.putters: Recent[str, ClientRow] = Recent(CLIENTS_MAX)
        self.askers: Recent[str, ClientRow] = Recent(CLIENTS_MAX)
        self.tips = MatchTips()
        self.evicted = 0
        """Number of evicted objects."""
        self.evicted_ms = 0
        """When the last object was evicted."""
        self.evicted_idle_ms = 0
        """For how long that object had not been used."""


class TrafficRecorder:
    """See the module."""

    def __init__(self) -> None:
        self.unknown = Caller()
        """The caller of all calls that name no client."""
        self.caller = self.unknown
        """The caller of the call that is being answered."""
        self.known: Recent[str, NamespaceTrafficRecord] = Recent(SPACES_MAX)
        self.heads: Recent[tuple[str, Key], int] = Recent(HEADS_MAX)
        """When the first keys of chains were evicted; see ``HEADS_MAX``."""
        self._era = CacheGeneration()

    def record_query(
        self,
        now_ms: int,
        namespace: Namespace,
        keys: Sequence[Key],
        found: int,
        first: int,
        tip: Key | None = None,
    ) -> None:
        """Notes a question.

        Args:
            found: how many of them are there.
            first: the index of the first key that is not there; -1: all are.
            tip: the last matched key; None: the question is no match, or matched nothing.
        """
        row = self.caller.asks
        if row is None or row.era is not self._era or row.namespace != namespace:
            space = self._space(namespace)
            row = self._row(now_ms, space, space.askers)
            self.caller.asks = row
        row.last_ms = now_ms
        row.questions += 1
        row.keys += len(keys)
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
        row.missed_of = len(keys)

    def writer_row(self, now_ms: int, namespace: Namespace) -> ClientRow:
        """The row of the client that begins or ends a put."""
        row = self.caller.puts
        if row is None or row.era is not self._era or row.namespace != namespace:
            space = self._space(namespace)
            row = self._row(now_ms, space, space.putters)
            self.caller.puts = row
        row.last_ms = now_ms
        return row

    def record_eviction(
        self, now_ms: int, namespace: Namespace, idle_ms: int, head: Key | None = None
    ) -> None:
        """Notes the eviction of one object.

        Args:
            idle_ms: for how long it had not been used.
            head: its key, if it is the first of its chain.
        """
        space = self._space(namespace)
        space.evicted += 1
        space.evicted_ms = now_ms
        space.evicted_idle_ms = idle_ms
        if head is not None:
            self.heads.use((namespace, head), now_ms)

    def had_evicted(self, namespace: Namespace, key: Key, at_ms: int) -> bool:
        """Whether the key, the first of its chain, had been evicted by then, as far as known."""
        evicted_ms = self.heads.get((namespace, key))
        return evicted_ms is not None and evicted_ms <= at_ms

    def _space(self, namespace: Namespace) -> NamespaceTrafficRecord:
        space = self.known.recent.get(namespace)
        if space is None:
            space = self.known.older.get(namespace) or NamespaceTrafficRecord(namespace)
            if self.known.use(namespace, space):
                self._era = CacheGeneration()
        return space

    def _row(
        self, now_ms: int, space: NamespaceTrafficRecord, rows: Recent[str, ClientRow]
    ) -> ClientRow:
        name = self.caller.name
        row = rows.recent.get(name)
        if row is None:
            row = rows.older.get(name) or ClientRow(name, space, self._era, now_ms)
            if rows.use(name, row):
                self._era = CacheGeneration()
        row.era = self._era
        return row

    def spaces(self, namespace: str) -> list[NamespaceTrafficRecord]:
        """That namespace, if it is known; all of them for ""."""
        if not namespace:
            return self.known.all()
        space = self.known.get(namespace)
        return [] if space is None else [space]
