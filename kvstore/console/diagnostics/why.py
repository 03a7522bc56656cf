"""Causes of cache misses, found in the master's traffic report and the fleet records.

``diagnose`` is pure: ``kvstore why`` gathers the ``Evidence`` and prints the ``Cause``s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, cast

from kvstore.calls import ClientTraffic, MissedKey, NamespaceTraffic
from kvstore.calls.fleet_records import (
    Difference,
    FleetRecord,
    SplitDifference,
    compare_descriptions,
    is_draft_namespace,
)
from kvstore.console.diagnostics.rows import ADVICE_ON_FIELDS, CAUSES, PHRASES
from kvstore.limits import is_fleet, of_tenant, tenant_of

FEW: Final = 0.5
"""Hit ratio below which the cause describes the last keys of the lookups."""

NEARLY_NONE: Final = 0.02
"""Hit ratio up to which a group is compared with other writers of the same model."""

FIELDS_SHOWN: Final = 8
"""Differing fields that are shown; the rest is counted."""

REMEDIES_SHOWN: Final = 3

VALUE_CHARS: Final = 60
HASH_BYTES: Final = frozenset({8, 16, 20, 32, 40, 64, 128})
"""Lengths of keys that are hashes of 64 to 512 bits, as bytes or as hexadecimal digits."""

NAMES_SHOWN: Final = 3


class Cause(NamedTuple):
    """A cause of misses."""

    code: str
    """A stable name, for programs."""
    text: str
    remedy: str = ""
    fields: tuple[str, ...] = ()
    """The fields in which two fingerprints differ and must be equal, a line each."""
    namespaces: tuple[str, ...] = ()
    """The namespaces that the cause concerns."""
    is_problem: bool = True
    split: str = ""
    """A difference that only splits the same bytes differently, and the setting that lets the
    engines share."""

    @property
    def lines(self) -> list[str]:
        """The differences of two fingerprints: ``fields`` and ``split``, for people."""
        return [*self.fields, *([f"can be reconciled: {self.split}"] if self.split else [])]


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The master's traffic, the fleet records, and the state of single objects."""

    uptime_ms: int
    """Time since the master's start; it remembers nothing from before."""
    nodes: int = 1
    """Number of nodes that serve memory now."""
    spaces: Sequence[NamespaceTraffic] = ()
    records: Sequence[FleetRecord] = ()
    elsewhere: dict[str, str] = field(default_factory=dict)
    """By namespace: another namespace that holds a key missed in the first."""
    detached: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By namespace: objects with a missing ancestor, and objects inspected."""


@dataclass(frozen=True, kw_only=True)
class EngineGroup:
    """Engines that share blocks: the namespaces of one fleet record, or one without a record."""

    name: str
    record: FleetRecord | None
    spaces: Sequence[NamespaceTraffic]

    @property
    def tenant(self) -> str:
        """The tenant according to the names of namespaces; empty: none."""
        return self.record.tenant if self.record is not None else tenant_of(self.name)

    @property
    def objects(self) -> int:
        return sum(space.objects for space in self.spaces)

    @property
    def size(self) -> int:
        return sum(space.size for space in self.spaces)

    @property
    def states(self) -> list[NamespaceTraffic]:
        """The namespaces of recurrent states."""
        names = frozenset() if self.record is None else self.record.states
        return [space for space in self.spaces if space.name in names]

    @property
    def evicted(self) -> int:
        return sum(space.evicted for space in self.spaces)

    @property
    def queries(self) -> int:
        return sum(space.queries for space in self.spaces)

    @property
    def none(self) -> int:
        return sum(space.queries_without_hit for space in self.spaces)

    @property
    def partly(self) -> int:
        return sum(space.queries_with_partial_hit for space in self.spaces)

    @property
    def writers(self) -> list[ClientTraffic]:
        return _merged(row for space in self.spaces for row in space.writers)

    @property
    def readers(self) -> list[ClientTraffic]:
        return _merged(row for space in self.spaces for row in space.readers)

    @property
    def misses(self) -> list[MissedKey]:
        """The missed keys, the last one first."""
        return sorted((m for space in self.spaces for m in space.misses), key=lambda m: m.idle_ms)

    @property
    def requested(self) -> int:
        """Keys that clients requested to put."""
        return sum(row.keys for row in self.writers)

    @property
    def written(self) -> int:
        """Keys that were put, or already stored."""
        return sum(row.stored + row.found for row in self.writers)

    @property
    def requested_keys(self) -> int:
        return sum(row.keys for row in self.readers)

    @property
    def found(self) -> int:
        return sum(row.found for row in self.readers)

    @property
    def hit_ratio(self) -> float:
        return self.found / self.requested_keys if self.requested_keys else 0.0

    @property
    def writes(self) -> bool:
        return bool(self.objects or self.written or self.evicted)

    @property
    def namespaces(self) -> tuple[str, ...]:
        return tuple(space.name for space in self.spaces)


def parties_of(
    spaces: Sequence[NamespaceTraffic], records: Sequence[FleetRecord]
) -> list[EngineGroup]:
    """Group namespaces by fleet record; a namespace without one is a group of its own."""
    record_of = {name: record for record in records for name in record.namespaces}
    known = {_mark(record): record for record in records}
    by_record: dict[tuple[str, str, str], list[NamespaceTraffic]] = {mark: [] for mark in known}
    alone: list[EngineGroup] = []
    for space in spaces:
        if is_fleet(space.name):
            continue
        record = record_of.get(space.name)
        if record is None:
            alone.append(EngineGroup(name=space.name, record=None, spaces=[space]))
        else:
            by_record[_mark(record)].append(space)
    together = [
        EngineGroup(
            name=of_tenant(tenant, f"{engine} {fingerprint[:8]}"),
            record=known[tenant, engine, fingerprint],
            spaces=found,
        )
        for (tenant, engine, fingerprint), found in by_record.items()
    ]
    return [*together, *alone]


def _mark(record: FleetRecord) -> tuple[str, str, str]:
    return record.tenant, record.engine, record.fingerprint


def expected_to_share(one: EngineGroup, other: EngineGroup) -> bool:
    """Return whether sharing nothing is a fault: engines of two tenants are separate on purpose. An
    engine without a tenant may lack a setting."""
    return one.tenant == other.tenant or not (one.tenant and other.tenant)


def select(
    parties: Sequence[EngineGroup], *, namespace: str = "", model: str = ""
) -> list[EngineGroup]:
    """Return the groups with this namespace, or of this model; all if neither is given."""
    if namespace:
        return [party for party in parties if namespace in party.namespaces]
    if model:
        return [
            party
            for party in parties
            if (party.record is not None and party.record.serves(model))
            or (party.record is None and model in party.name)
        ]
    return list(parties)


def diagnose(
    evidence: Evidence, parties: Sequence[EngineGroup], others: Sequence[EngineGroup]
) -> list[Cause]:
    """Return the causes: problems first, and of these the ones with known fields.

    Args:
        parties: the groups to explain.
        others: all groups of the store.
    """
    if not evidence.nodes:
        return [_of_row("no_node", {})]
    if not any(party.objects or party.requested or party.requested_keys for party in parties):
        return [_of_row("nothing", {})]
    found = (
        _cause(Case(evidence, party, [other for other in others if other is not party]))
        for party in parties
    )
    return sorted(
        dict.fromkeys(filter(None, found)),
        key=lambda cause: (not cause.is_problem, not cause.lines),
    )


def _cause(case: Case) -> Cause | None:
    """Return the cause of the first rule whose condition holds."""
    party = case.group
    name = next(name for name, holds in RULES if holds(case, party))
    if name == "explained elsewhere":
        return None
    if name == "compared with the writer":
        return _differ(cast("EngineGroup", case.writer), party)
    if name == "compared with the reader":
        return _differ(party, cast("EngineGroup", case.reader))
    cause = _of_row(name, case.words)
    is_first = name == "read_before_put" and all(space.queries <= 1 for space in party.spaces)
    is_problem = cause.is_problem and not (is_first or (name == "prefix_ends" and party.found))
    spaces = case.pair if name == "other_namespace" else party.namespaces
    return cause._replace(namespaces=spaces, is_problem=is_problem)


def _of_row(name: str, words: Mapping[str, object]) -> Cause:
    row = CAUSES[name]
    text, advice = (each.format(**words) for each in (row.text, row.advice))
    return Cause(row.code or name, text, advice, is_problem=row.is_problem)


# --- the causes of one group ---------------------------------------------------------------------


class Case(NamedTuple):
    """A group to explain, and the values that ``RULES`` and the texts of ``CAUSES`` read."""

    evidence: Evidence
    group: EngineGroup
    others: Sequence[EngineGroup]

    @property
    def writer(self) -> EngineGroup | None:
        return _nearest(self.group, [other for other in self.others if other.writes])

    @property
    def reader(self) -> EngineGroup | None:
        return _nearest(self.group, [other for other in self.others if other.requested_keys])

    @property
    def pair(self) -> tuple[str, ...]:
        """A namespace of the group, and another one that holds a key missed in it."""
        elsewhere = self.evidence.elsewhere
        spaces = self.group.namespaces
        return next(((name, elsewhere[name]) for name in spaces if name in elsewhere), ())

    @property
    def is_read_elsewhere(self) -> bool:
        """Whether another group looks up keys of this one; its cause names both namespaces."""
        return bool({*self.group.namespaces} & {*self.evidence.elsewhere.values()})

    @property
    def detached(self) -> tuple[int, int]:
        """The numbers of objects with a missing ancestor, and of objects inspected."""
        seen = [self.evidence.detached.get(name, (0, 0)) for name in self.group.namespaces]
        return sum(some for some, _ in seen), sum(looked for _, looked in seen)

    @property
    def words(self) -> dict[str, object]:
        """The values for the texts of ``CAUSES``."""
        party, named = self.group, self.group.record
        lost = [miss.client or "a client" for miss in party.misses if miss.evicted]
        deep = next((miss for miss in party.misses if miss.found), None)
        last = min((s for s in party.spaces if s.evicted), key=lambda s: s.evicted_ms, default=None)
        are_others = any(other.writes for other in self.others)
        evicted = counted(party.evicted, "object")
        is_one = {row.client for row in party.writers} & {row.client for row in party.readers}
        return {
            "p": party,
            "pair": self.pair,
            "detached": self.detached,
            "objects": counted(party.objects, "object"),
            "pages": counted(party.requested_keys, "requested page"),
            "written": counted(party.written, "object"),
            "evicted": evicted,
            "writers": _names(party.writers),
            "readers": _names(party.readers),
            "write": _do(party.writers, "write"),
            "ask": _do(party.readers, "read"),
            "losers": ", ".join(list(dict.fromkeys(lost))[:NAMES_SHOWN]),
            "model": f"for {named.model}" if named else "there",
            "this_model": "this model" if named else "there",
            "percent": f"{100 * party.hit_ratio:.0f} %",
            "age": _age(last.evicted_ms if last else 0),
            "idle": _age(last.evicted_idle_ms if last else 0),
            "deep": f", the last after {deep.found} of {deep.requested} keys" if deep else "",
            "sizes": " or ".join(map(str, _sizes(row.key for row in party.writers))),
            "asked_sizes": " or ".join(map(str, _sizes(miss.key for miss in party.misses))),
            "others_write": f" {PHRASES['others_write']}" if are_others else "",
            "seed": "." if is_one else PHRASES["seeds"],
            "more_memory": PHRASES["more_memory"],
            "some_evicted": f" ({evicted} evicted)" if party.evicted else "",
            "small_pool": f" {PHRASES['small_pool']}" if party.evicted else "",
        }

    @property
    def has_other_hash(self) -> bool:
        put = _sizes(row.key for row in self.group.writers)
        asked = _sizes(miss.key for miss in self.group.misses)
        return _are_hashes(put) and _are_hashes(asked) and not {*put} & {*asked}


Condition = Callable[[Case, EngineGroup], object]

RULES: Final[Sequence[tuple[str, Condition]]] = (
    # Draft pages never cause misses.
    ("draft_pages", lambda c, p: p.spaces and all(map(is_draft_namespace, p.namespaces))),
    ("evicted_keys",
     lambda c, p: any(miss.evicted for miss in p.misses) and p.evicted and p.hit_ratio < FEW),
    ("compared with the writer",
     lambda c, p: p.requested_keys and p.hit_ratio <= NEARLY_NONE and c.writer),
    # Groups that only write, or are idle.
    ("no_traffic", lambda c, p: not p.requested_keys and not p.requested),
    ("explained elsewhere", lambda c, p: not p.requested_keys and c.is_read_elsewhere),
    ("compared with the reader", lambda c, p: not p.requested_keys and c.reader),
    ("only_writers", lambda c, p: not p.requested_keys),
    # Groups with lookups.
    ("puts_fail", lambda c, p: not p.writes and p.requested),
    ("other_namespace", lambda c, p: c.pair and (not p.writes or (p.objects and not p.found))),
    ("only_readers", lambda c, p: not p.writes),
    ("evicted", lambda c, p: not p.objects and p.evicted),
    ("removed_or_lost", lambda c, p: not p.objects),
    ("read_before_put", lambda c, p: not p.found and any(miss.present for miss in p.misses)),
    ("fine", lambda c, p: p.hit_ratio >= FEW),
    ("evicted", lambda c, p: p.evicted > p.objects),
    ("other_hash", lambda c, p: not p.found and c.has_other_hash),
    ("broken_chain", lambda c, p: not p.found and 2 * c.detached[0] >= c.detached[1] > 0),
    ("few_hits", lambda c, p: p.found and p.none > p.partly),
    ("prefix_ends", lambda c, p: p.found or p.partly > p.none),
    ("perhaps_evicted", lambda c, p: p.evicted),
    ("other_keys", lambda c, p: True),
)  # fmt: skip
"""Conditions of the rows in ``CAUSES``: the first one that holds gives the cause of a group."""


def _nearest(party: EngineGroup, others: Sequence[EngineGroup]) -> EngineGroup | None:
    """Return the group of the same model whose fingerprint differs least from that of ``group``."""
    ours = party.record
    if ours is None:
        return None

    def distance(other: EngineGroup) -> tuple[bool, bool, int, bool, int]:
        theirs = other.record
        assert theirs is not None
        must, split = compare_descriptions(ours.engine, ours.description, theirs.description)
        idle_ms = min((row.idle_ms for row in [*other.writers, *other.readers]), default=1 << 62)
        is_apart = ours.tenant != theirs.tenant, ours.engine != theirs.engine
        return *is_apart, len(must), split is not None, idle_ms

    same = [
        each
        for each in others
        if each.record is not None
        and ours.serves(each.record.model)
        and expected_to_share(party, each)
    ]
    return min(same, key=distance, default=None)


def _differ(writer: EngineGroup, reader: EngineGroup) -> Cause:
    """Explain why a reader does not find what a writer of the same model puts."""
    ours, theirs = writer.record, reader.record
    assert ours is not None
    assert theirs is not None
    writing = f"{_do(writer.writers, 'write', 'another client')} {ours.model} under {writer.name}"
    asking = f"{_do(reader.readers, 'read')} under {reader.name}"
    spaces = writer.namespaces + reader.namespaces
    for name in ("engine", "tenant"):
        if getattr(ours, name) != getattr(theirs, name):
            apart = _of_row(f"other_{name}", {"both": f"{writing}, {asking}"})
            return apart._replace(namespaces=spaces)
    must, split = compare_descriptions(ours.engine, ours.description, theirs.description)
    must.sort(key=lambda each: each.field != "dtype")
    lines = [
        f"{each.field}: {_value(each.ours)} writes, {_value(each.theirs)} reads"
        for each in must[:FIELDS_SHOWN]
    ]
    if len(must) > FIELDS_SHOWN:
        lines.append(f"and {len(must) - FIELDS_SHOWN} more fields")
    if must:
        told = "These fields must be equal"
    elif split:
        told = "They only split the same bytes differently"
    else:
        told = "Only the layout of the cache differs"
    return Cause(
        "other_fingerprint",
        f"{writing}, {asking}: different fingerprints never share blocks. {told}",
        _remedy(must, split),
        tuple(lines),
        spaces,
        split=split.text("writes", "reads") if split else "",
    )


def _remedy(must: Sequence[Difference], split: SplitDifference | None) -> str:
    """Return the advice for two fingerprints, without repetitions."""
    if split and not must:
        return (
            f"Set {split.setting} (kv_connector_extra_config), or start both with the same "
            "--tensor-parallel-size."
        )
    if must and must[0].field == "dtype":  # weights, cache and layout follow from it
        must = must[:1]
    advice = [
        next(filter(None, map(ADVICE_ON_FIELDS.get, field.split("."))), "") for field, _, _ in must
    ]
    known = [text for text in dict.fromkeys(advice) if text]
    return " ".join(known[:REMEDIES_SHOWN]) or PHRASES["same_settings"]


def _merged(rows: Iterable[ClientTraffic]) -> list[ClientTraffic]:
    """Merge rows to one per client, the last active first: an engine has a row per rank."""
    by_name: dict[tuple[str, str], ClientTraffic] = {}
    for row in rows:
        mark = row.client, row.address
        known = by_name.get(mark)
        if known is None:
            by_name[mark] = row
            continue
        by_name[mark] = known._replace(
            first_ms=max(known.first_ms, row.first_ms),
            idle_ms=min(known.idle_ms, row.idle_ms),
            keys=known.keys + row.keys,
            found=known.found + row.found,
            stored=known.stored + row.stored,
            key=known.key or row.key,
        )
    return sorted(by_name.values(), key=lambda row: row.idle_ms)


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _names(rows: Sequence[ClientTraffic], unknown: str = "a client") -> str:
    names = list(dict.fromkeys(row.client or unknown for row in rows)) or [unknown]
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more


def _do(rows: Sequence[ClientTraffic], verb: str, unknown: str = "a client") -> str:
    several = len({row.client for row in rows}) > 1
    return f"{_names(rows, unknown)} {verb}{'' if several else 's'}"


def _value(value: object) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= VALUE_CHARS else text[: VALUE_CHARS - 1] + "…"


def _sizes(keys: Iterable[bytes]) -> list[int]:
    return sorted({len(key) for key in keys if key})


def _are_hashes(sizes: Sequence[int]) -> bool:
    """Return whether keys of these sizes, in bytes, are hashes."""
    return bool(sizes) and all(size in HASH_BYTES for size in sizes)


def _age(milliseconds: int) -> str:
    seconds = milliseconds / 1000
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
