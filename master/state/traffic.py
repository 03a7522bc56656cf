"""Records the writers and readers of each namespace, their last missed keys, the tips of matches
and the last evicted first keys of chains, for ``kvstore why`` and the dashboard.

Only the last clients, keys and namespaces are kept, in two dictionaries: a used row moves to the
recent one; when that is full it replaces the older one, whose rows are dropped.

A ``Caller`` caches the row of the client's last call, so that most calls search no dictionary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from kvstore.limits import Key, Namespace
from kvstore.security.identity import UNAUTHENTICATED, Identity

SPACES_MAX = 512
"""Minimum number of remembered namespaces; the maximum is twice that."""

CLIENTS_MAX = 16
"""Minimum number of remembered writers, and of readers, per namespace; at most twice as many."""

TIPS_MAX = 128
"""Minimum number of remembered tips per namespace; the maximum is twice that."""

HEADS_MAX = 4_096
"""Minimum number of remembered evicted first keys of chains in total; the maximum is twice that. A
chain is evicted from its tip, so the next query for it misses its first key."""


class MatchTip:
    """A block at which matches ended: the last one found."""

    __slots__ = ("first_ms", "matched")

    def __init__(self, now_ms: int) -> None:
        self.first_ms = now_ms
        """Start of the count."""
        self.matched = 0
        """Number of matches that ended here since then."""


KeyT = TypeVar("KeyT")
RowT = TypeVar("RowT")


class Recent(Generic[KeyT, RowT]):
    """The last used rows: at least ``rows_min``, at most twice as many."""

    def __init__(self, rows_min: int) -> None:
        self.recent: dict[KeyT, RowT] = {}
        self.older: dict[KeyT, RowT] = {}
        self._rows_min = rows_min

    def get(self, key: KeyT) -> RowT | None:
        row = self.recent.get(key)
        return self.older.get(key) if row is None else row

    def use(self, key: KeyT, row: RowT) -> bool:
        """Add or refresh a row. Return whether others are dropped for it."""
        self.older.pop(key, None)
        drops = key not in self.recent and len(self.recent) >= self._rows_min
        if drops:
            self.older, self.recent = self.recent, {}
        self.recent[key] = row
        return drops

    def items(self) -> list[tuple[KeyT, RowT]]:
        return [*self.older.items(), *self.recent.items()]

    def all(self) -> list[RowT]:
        return [*self.older.values(), *self.recent.values()]


class MatchTips(Recent[Key, MatchTip]):
    """Tips of the last matches in a namespace, by key; at least ``TIPS_MAX`` keep counts."""

    def __init__(self) -> None:
        super().__init__(TIPS_MAX)

    def matched(self, now_ms: int, key: Key) -> None:
        tip = self.recent.get(key)
        if tip is None:
            tip = self.older.get(key) or MatchTip(now_ms)
            self.use(key, tip)
        tip.matched += 1


class CacheGeneration:
    """A period in which no row is dropped, so rows cached in the current one are valid."""


class ClientRow:
    """One client in one namespace, as a writer or as a reader."""

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
        """Tips of the namespace, shared by its clients."""
        self.era = era
        """The generation in which this row was last found in the dictionaries."""
        self.first_ms = now_ms
        self.last_ms = now_ms
        self.keys = 0
        """Keys in puts or queries of the client."""
        self.found = 0
        self.stored = 0
        self.stored_bytes = 0
        self.key = Key(b"")
        self.questions = 0
        self.none = 0
        """Queries without a hit."""
        self.partly = 0
        """Queries with a partial hit."""
        self.missed = Key(b"")
        """First missed key of the last query with a miss."""
        self.missed_ms = 0
        self.missed_at = 0
        """Number of keys before the missed one in that query."""
        self.missed_of = 0
        """Number of keys in that query."""


class Caller:
    """Source of a call: one per connection with the lane protocol, one per call with gRPC."""

    __slots__ = ("asks", "holder", "identity", "name", "number", "puts")

    def __init__(
        self,
        name: str = "",
        identity: Identity = UNAUTHENTICATED,
        holder: int = 0,
        number: int = 0,
    ) -> None:
        self.name = name
        """Client name, a space, and its address without spaces; empty: unknown."""
        self.identity = identity
        """The client's authenticated identity."""
        self.holder = holder
        """Number of the identity for capabilities (``kvstore.master.capabilities``); 0: none, so
        the client gets the segments' tokens."""
        self.number = number
        """Client number of its puts, once it has joined with an identity."""
        self.asks: ClientRow | None = None
        self.puts: ClientRow | None = None

    @property
    def source(self) -> str:
        """Its identity and its address; empty: it has no identity. Neither is what it says."""
        if not self.identity.name:
            return ""
        return f"{self.identity.name} {self.name.rpartition(' ')[2]}"


class NamespaceTrafficRecord:
    def __init__(self, name: Namespace) -> None:
        self.name = name
        self.putters: Recent[str, ClientRow] = Recent(CLIENTS_MAX)
        self.askers: Recent[str, ClientRow] = Recent(CLIENTS_MAX)
        self.tips = MatchTips()
        self.evicted = 0
        self.evicted_ms = 0
        self.evicted_idle_ms = 0
        """Idle time of the last evicted object."""


class TrafficRecorder:
    def __init__(self) -> None:
        self.unknown = Caller()
        """The caller of all calls without a client."""
        self.caller = self.unknown
        self.known: Recent[str, NamespaceTrafficRecord] = Recent(SPACES_MAX)
        self.heads: Recent[tuple[str, Key], int] = Recent(HEADS_MAX)
        """Eviction times of first keys of chains; see ``HEADS_MAX``."""
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
        """Record a query with ``found`` keys; ``first``: index of the first missed key, or -1;
        ``tip``: last matched key of a match."""
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
        """Record an eviction. ``head``: the key, if it is the first of its chain."""
        space = self._space(namespace)
        space.evicted += 1
        space.evicted_ms = now_ms
        space.evicted_idle_ms = idle_ms
        if head is not None:
            self.heads.use((namespace, head), now_ms)

    def had_evicted(self, namespace: Namespace, key: Key, at_ms: int) -> bool:
        """Return whether this first key of a chain is known to have been evicted by then."""
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
        """Return that namespace, if known; all for ""."""
        if not namespace:
            return self.known.all()
        space = self.known.get(namespace)
        return [] if space is None else [space]
