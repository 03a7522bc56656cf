"""Why lookups find nothing: finds causes, in words, in what the master and the fleet records say.

``diagnose`` is pure: ``kvstore why`` gathers the ``Evidence`` and prints the ``Cause``s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, cast

from kvstore.calls import ClientTraffic, MissedKey, NamespaceTraffic
from kvstore.fleet import Cut, Difference, Record, are_guesses, contrast
from kvstore.limits import is_fleet, of_tenant, tenant_of

FEW: Final = 0.5
"""If a smaller share of the asked keys is found, the cause says how the questions end."""

NEARLY_NONE: Final = 0.02
"""Up to this share of found keys, a party is compared with others that write the same model."""

FIELDS_SHOWN: Final = 8
"""Differing fields of two descriptions that are shown; the rest is counted."""

REMEDIES_SHOWN: Final = 3

VALUE_CHARS: Final = 60
HASH_BYTES: Final = frozenset({8, 16, 20, 32, 40, 64, 128})
"""Lengths of keys that are hashes of 64 to 512 bits, as bytes or as hexadecimal digits."""

NAMES_SHOWN: Final = 3


class Cause(NamedTuple):
    """One answer to the question why nothing is found."""

    code: str
    """A name of the cause that does not change, for programs."""
    text: str
    remedy: str = ""
    fields: tuple[str, ...] = ()
    """The fields in which the descriptions of two fingerprints differ and must be equal, a line
    each."""
    namespaces: tuple[str, ...] = ()
    """The namespaces that the cause is about."""
    is_problem: bool = True
    cuts: tuple[str, ...] = ()
    """In which the two only cut the same bytes differently, and the setting that lets them share; a
    line each."""

    @property
    def lines(self) -> list[str]:
        """In what two descriptions differ, for people."""
        return [*self.fields, *(f"only another cut: {cut}" for cut in self.cuts)]


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What the master and the fleet records say, and what a look at single objects shows."""

    uptime_ms: int
    """Time since the master's start; it remembers nothing from before."""
    nodes: int = 1
    """Number of nodes that serve memory now."""
    spaces: Sequence[NamespaceTraffic] = ()
    records: Sequence[Record] = ()
    elsewhere: dict[str, str] = field(default_factory=dict)
    """By namespace: another namespace that holds a key which was not found in the first."""
    detached: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By namespace: how many of its objects have a missing ancestor, and how many objects were
    looked at."""


@dataclass(frozen=True, kw_only=True)
class Party:
    """Engines that share blocks: the namespaces of one fleet record, or one without a record."""

    name: str
    record: Record | None
    spaces: Sequence[NamespaceTraffic]

    @property
    def tenant(self) -> str:
        """Whose engines these are, as far as names of namespaces say it; empty: of no tenant."""
        return self.record.tenant if self.record is not None else tenant_of(self.name)

    @property
    def objects(self) -> int:
        return sum(space.objects for space in self.spaces)

    @property
    def states(self) -> list[NamespaceTraffic]:
        """The namespaces whose objects are states of recurrent layers."""
        names = frozenset() if self.record is None else self.record.states
        return [space for space in self.spaces if space.name in names]

    @property
    def evicted(self) -> int:
        return sum(space.evicted for space in self.spaces)

    @property
    def questions(self) -> int:
        return sum(space.questions for space in self.spaces)

    @property
    def none(self) -> int:
        return sum(space.none for space in self.spaces)

    @property
    def partly(self) -> int:
        return sum(space.partly for space in self.spaces)

    @property
    def putters(self) -> list[ClientTraffic]:
        return _merged(row for space in self.spaces for row in space.putters)

    @property
    def askers(self) -> list[ClientTraffic]:
        return _merged(row for space in self.spaces for row in space.askers)

    @property
    def misses(self) -> list[MissedKey]:
        """The keys that were not found, the last one first."""
        return sorted((m for space in self.spaces for m in space.misses), key=lambda m: m.idle_ms)

    @property
    def wanted(self) -> int:
        """Keys that clients wanted to put."""
        return sum(row.keys for row in self.putters)

    @property
    def written(self) -> int:
        """Keys that were put, or were there already when somebody wanted to."""
        return sum(row.stored + row.found for row in self.putters)

    @property
    def asked(self) -> int:
        return sum(row.keys for row in self.askers)

    @property
    def found(self) -> int:
        return sum(row.found for row in self.askers)

    @property
    def share(self) -> float:
        """The share of the asked keys that were found."""
        return self.found / self.asked if self.asked else 0.0

    @property
    def writes(self) -> bool:
        return bool(self.objects or self.written or self.evicted)

    @property
    def namespaces(self) -> tuple[str, ...]:
        return tuple(space.name for space in self.spaces)


def parties_of(spaces: Sequence[NamespaceTraffic], records: Sequence[Record]) -> list[Party]:
    """The parties of all records and namespaces, but for the namespaces of the records."""
    record_of = {name: record for record in records for name in record.namespaces}
    known = {_mark(record): record for record in records}
    by_record: dict[tuple[str, str, str], list[NamespaceTraffic]] = {mark: [] for mark in known}
    alone: list[Party] = []
    for space in spaces:
        if is_fleet(space.name):
            continue
        record = record_of.get(space.name)
        if record is None:
            alone.append(Party(name=space.name, record=None, spaces=[space]))
        else:
            by_record[_mark(record)].append(space)
    together = [
        Party(
            name=of_tenant(tenant, f"{engine} {fingerprint[:8]}"),
            record=known[tenant, engine, fingerprint],
            spaces=found,
        )
        for (tenant, engine, fingerprint), found in by_record.items()
    ]
    return [*together, *alone]


def _mark(record: Record) -> tuple[str, str, str]:
    return record.tenant, record.engine, record.fingerprint


def may_share(one: Party, other: Party) -> bool:
    """Whether it is a fault, and no intention, that they share nothing: engines of two tenants are
    apart on purpose. An engine without a tenant may lack a setting."""
    return one.tenant == other.tenant or not (one.tenant and other.tenant)


def select(parties: Sequence[Party], *, namespace: str = "", model: str = "") -> list[Party]:
    """The parties with this namespace, or of this model; all of them if neither is named."""
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


def diagnose(evidence: Evidence, parties: Sequence[Party], others: Sequence[Party]) -> list[Cause]:
    """The causes: problems first, and of these the ones whose fields are known.

    Args:
        parties: the parties to explain.
        others: all parties of the store.
    """
    if not evidence.nodes:
        return [Cause(*_NO_NODE)]
    if not any(party.objects or party.wanted or party.asked for party in parties):
        return [Cause(*_NOTHING)]
    found = (
        _cause(Case(evidence, party, [each for each in others if each is not party]))
        for party in parties
    )
    return sorted(dict.fromkeys(filter(None, found)), key=_urgency)


def _cause(case: Case) -> Cause | None:
    """The cause of the first row whose condition holds."""
    for row in ROWS:
        if row.holds(case, case.party):
            if row.compared is not None:
                return _differ(*row.compared(case))
            if not row.code:
                return None
            text, advice = (each.format(**case.words) for each in (row.text, row.advice))
            spaces = case.pair if row.code == "other_namespace" else case.party.namespaces
            return Cause(row.code, text, advice, (), spaces, row.is_problem)
    return None


def _urgency(cause: Cause) -> tuple[bool, bool]:
    return not cause.is_problem, not cause.lines


# --- the causes of one party ----------------------------------------------------------------------


class Case(NamedTuple):
    """A party to explain, and what conditions and texts of ``ROWS`` read of it."""

    evidence: Evidence
    party: Party
    others: Sequence[Party]

    @property
    def writer(self) -> Party | None:
        return _nearest(self.party, [each for each in self.others if each.writes])

    @property
    def asker(self) -> Party | None:
        return _nearest(self.party, [each for each in self.others if each.asked])

    @property
    def pair(self) -> tuple[str, ...]:
        """A namespace of the party, and another one that holds a key that was not found in it."""
        elsewhere = self.evidence.elsewhere
        spaces = self.party.namespaces
        return next(((name, elsewhere[name]) for name in spaces if name in elsewhere), ())

    @property
    def is_read_elsewhere(self) -> bool:
        """Whether another party asks for keys of this one: its cause names both namespaces."""
        return bool({*self.party.namespaces} & {*self.evidence.elsewhere.values()})

    @property
    def detached(self) -> tuple[int, int]:
        """How many objects have a missing ancestor, and how many were looked at."""
        seen = [self.evidence.detached.get(name, (0, 0)) for name in self.party.namespaces]
        return sum(some for some, _ in seen), sum(looked for _, looked in seen)

    @property
    def words(self) -> dict[str, object]:
        """What the texts of ``ROWS`` are formatted with."""
        party, named = self.party, self.party.record
        lost = [miss.client or "a client" for miss in party.misses if miss.evicted]
        deep = next((miss for miss in party.misses if miss.found), None)
        last = min((s for s in party.spaces if s.evicted), key=lambda s: s.evicted_ms, default=None)
        evicted = counted(party.evicted, "object")
        is_one = {row.client for row in party.putters} & {row.client for row in party.askers}
        return {
            "p": party,
            "pair": self.pair,
            "detached": self.detached,
            "objects": counted(party.objects, "object"),
            "pages": counted(party.asked, "asked page"),
            "written": counted(party.written, "object"),
            "evicted": evicted,
            "putters": _names(party.putters),
            "askers": _names(party.askers),
            "write": _do(party.putters, "write"),
            "ask": _do(party.askers, "ask"),
            "losers": ", ".join(list(dict.fromkeys(lost))[:NAMES_SHOWN]),
            "model": f"for {named.model}" if named else "there",
            "this_model": "this model" if named else "there",
            "percent": f"{100 * party.share:.0f} %",
            "age": _age(last.evicted_ms if last else 0),
            "idle": _age(last.evicted_idle_ms if last else 0),
            "deep": f", the last after {deep.found} of {deep.asked} keys" if deep else "",
            "sizes": " or ".join(map(str, _sizes(row.key for row in party.putters))),
            "asked_sizes": " or ".join(map(str, _sizes(miss.key for miss in party.misses))),
            "others_write": _OTHERS_WRITE if any(each.writes for each in self.others) else "",
            "seed": "." if is_one else _SEEDS,
            "some_evicted": f" ({evicted} evicted)" if party.evicted else "",
            "small_pool": _SMALL_POOL if party.evicted else "",
        }

    @property
    def has_other_hash(self) -> bool:
        put = _sizes(row.key for row in self.party.putters)
        asked = _sizes(miss.key for miss in self.party.misses)
        return _are_hashes(put) and _are_hashes(asked) and not {*put} & {*asked}


_OTHERS_WRITE: Final = (
    " Clients write other namespaces (kvstore why lists them): if one of these is of the same "
    "model, give both engines the same settings."
)
_SEEDS: Final = (
    ", the seed: PYTHONHASHSEED must be the same for every engine, or use a hash without one "
    "(vLLM: --prefix-caching-hash-algo sha256_cbor)."
)
_SMALL_POOL: Final = " If they come again, the pool may be too small."


class Row(NamedTuple):
    code: str
    """Empty: there is no cause to tell."""
    holds: Callable[[Case, Party], object]
    text: str = ""
    """Formatted with the ``words`` of the case."""
    advice: str = ""
    is_problem: bool = True
    compared: Callable[[Case], tuple[Party, Party]] | None = None
    """The writer and the asker whose descriptions give the cause."""


_MORE_MEMORY: Final = (
    "The pool is too small for what is written between two uses: give it more memory "
    "(kvstore-node --memory), or pin what must stay (kvstore pin)."
)
_EVICTED: Final = (
    "{evicted} of {p.name} evicted, {p.objects} left; the last, {age} ago, had not been used "
    "for {idle}"
)
_ENDS: Final = (
    "{p.partly} of {p.questions} questions in {p.name} found a beginning and no more{deep}; "
    "{p.evicted} objects were evicted",
    "That is how prompts with a shared beginning look. If the rest should be there, look for "
    "something that changes within the prompt (a date, an id), or for evictions.",
)
_FIRST: Final = "the first key of {p.none} of {p.questions} questions is none of them"
_COMPARE: Final = (
    "New prompts have no hit: send one twice. Then compare what the hash of the first block is "
    "made of: the tokens (tokenizer, chat template, system prompt), the block size, salt and "
    "adapter{seed}"
)
_NO_NODE: Final = (
    "no_node", "no node serves memory now, so nothing can be stored",
    "Start one: kvstore-node --master ADDRESS --memory SIZE.",
)  # fmt: skip
_NOTHING: Final = (
    "nothing", "since the master's start no client has put anything or asked for anything here",
    "Is the connector on (vLLM: --kv-transfer-config), and does it name this master and cluster? "
    "The engine's log says which master it has joined; kvstore doctor tests the way.",
)  # fmt: skip

ROWS: Final = (
    # Pages of a draft model are not a reason why nothing is found, whatever becomes of them.
    Row("guesses", lambda c, p: p.spaces and all(map(are_guesses, p.namespaces)),
        "{p.found} of {pages} of a draft model were found ({p.name}); no hit depends on them",
        is_problem=False),
    Row("evicted",
        lambda c, p: any(miss.evicted for miss in p.misses) and p.evicted and p.share < FEW,
        "what {losers} asked for had been evicted before: " + _EVICTED, _MORE_MEMORY),
    Row("", lambda c, p: p.asked and p.share <= NEARLY_NONE and c.writer,
        compared=lambda c: (cast("Party", c.writer), c.party)),
    # Parties that only write, or do nothing.
    Row("no_traffic", lambda c, p: not p.asked and not p.wanted,
        "{objects} in {p.name}, where no client put or asked since the master's start",
        is_problem=False),
    Row("", lambda c, p: not p.asked and c.is_read_elsewhere),
    Row("", lambda c, p: not p.asked and c.asker,
        compared=lambda c: (c.party, cast("Party", c.asker))),
    Row("only_writers", lambda c, p: not p.asked,
        "{write} {p.name}, and no client asks {model}",
        "Is an engine of this model running that may read (vLLM: kv_role kv_consumer or kv_both), "
        "with this master?"),
    # Parties that ask.
    Row("put_fails", lambda c, p: not p.writes and p.wanted,
        "{putters} wanted to put {p.wanted} keys into {p.name}, and none was stored",
        "Its log says why: no space (kvstore status shows free memory), or a node that it cannot "
        "reach (kvstore doctor on that host)."),
    Row("other_namespace",
        lambda c, p: c.pair and (not p.writes or (p.objects and not p.found)),
        "a key that {askers} asked for in {pair[0]} is stored in {pair[1]}: both compute the "
        "same keys, in different namespaces",
        "A namespace stands for the model and all settings on which bytes depend: give both the "
        "same, if their blocks are the same."),
    Row("only_readers", lambda c, p: not p.writes,
        "{ask} in {p.name}, and no client writes {this_model}",
        "Is an engine running that may write (vLLM: kv_role kv_producer or kv_both), with this "
        "master and cluster? Its log says whether its puts fail.{others_write}"),
    Row("evicted", lambda c, p: not p.objects and p.evicted, _EVICTED, _MORE_MEMORY),
    Row("gone", lambda c, p: not p.objects,
        "{written} put into {p.name}, and none is left; none was evicted",
        "They were removed (kvstore rm, clear; a reset of an engine's cache), their ttl is over, "
        "or their node has left: kvstore status --counters."),
    Row("too_early", lambda c, p: not p.found and any(m.present for m in p.misses),
        "{askers} asked in {p.name} for keys before they were put; they are there now",
        "Let the reader ask after the writer has ended, or send the prompt again."),
    Row("fine", lambda c, p: p.share >= FEW,
        "{percent} of {p.asked} keys asked in {p.name} were found", is_problem=False),
    Row("evicted", lambda c, p: p.evicted > p.objects, _EVICTED, _MORE_MEMORY),
    Row("other_keys", lambda c, p: not p.found and c.has_other_hash,
        "{objects} in {p.name}, under keys of {sizes} bytes; asked were keys of "
        "{asked_sizes} bytes",
        "The engines hash blocks by different algorithms: give them the same (vLLM: "
        "--prefix-caching-hash-algo)."),
    Row("broken_chain", lambda c, p: not p.found and 2 * c.detached[0] >= c.detached[1] > 0,
        "{detached[0]} of {detached[1]} objects in {p.name} have a missing ancestor, so no "
        "prefix reaches them",
        "The first blocks of their chains were removed or lost, or are not put: the next put of "
        "the whole prompt mends them."),
    Row("few_hits", lambda c, p: p.found and p.none > p.partly,
        "{percent} of {p.asked} keys asked in {p.name} were found; the first key of {p.none} of "
        "{p.questions} questions was not there: most prompts begin with other tokens than those "
        "that are stored{some_evicted}",
        "That is how new prompts look. If these prompts share a beginning, compare tokenizer, chat "
        "template and system prompt.{small_pool}", is_problem=False),
    Row("prefix_ends", lambda c, p: p.found, *_ENDS, is_problem=False),
    Row("prefix_ends", lambda c, p: p.partly > p.none, *_ENDS),
    Row("perhaps_evicted", lambda c, p: p.evicted,
        "{objects} in {p.name}, {p.evicted} evicted, the last {age} ago; " + _FIRST + ": "
        "either these keys were evicted, too long ago for the master to remember them, or the keys "
        "differ from the first block on",
        f"{_MORE_MEMORY} If that changes nothing: {_COMPARE}"),
    Row("other_keys", lambda c, p: True,
        "{objects} in {p.name}, and " + _FIRST + ": the keys differ from the first block on",
        _COMPARE),
)  # fmt: skip
"""The first row whose condition holds gives the cause of a party."""

# --- two engines of one model ---------------------------------------------------------------------

_SAME_SETTINGS: Final = "Start both engines with the same weights and settings."
_REMEDIES: Final = {
    name: remedy
    for names, remedy in (
        ("weights files config weight_version",
         "weights: these are other checkpoints or revisions. That is right if the models differ; "
         "otherwise load the same files in both."),
        ("dtype quantization chunk_dtype",
         "dtype: start both with the same --dtype and quantization."),
        ("cache_dtype kv_cache_dtype",
         "cache type: start both with the same --kv-cache-dtype."),
        ("block_tokens block_size page_tokens page_bytes hash_tokens chunk_tokens chunk_blocks "
         "chunk_bytes",
         "block size: start both with the same one (vLLM: --block-size; SGLang: --page-size; "
         "LMCache: chunk_size)."),
        ("tensor_parallel tensor_parallel_size pipeline_parallel context_parallel workers",
         "parallel sizes: start both with the same ones (vLLM: --tensor-parallel-size, "
         "--pipeline-parallel-size; SGLang: --tp-size, --pp-size); each rank keeps its own part."),
        ("hash_algorithm", "hash: start both with the same --prefix-caching-hash-algo."),
        ("none_hash",
         "hash seed: set the same PYTHONHASHSEED for both, or start both with "
         "--prefix-caching-hash-algo sha256_cbor."),
        ("format tier_format engine vllm",
         "version: run the same release of the engine and of kvstore in both."),
        ("device machine",
         "device: blocks of other devices or processors differ; let engines of one kind share."),
        ("layout chunk_layout attention",
         "layout: start both with the same attention backend and cache layout."),
        ("job", 'job: give all engines of one training job the same "job_name".'),
        ("draft", "draft model: load the same draft model in both, or none."),
        ("speculative", "speculative decoding: start both with the same settings of it."),
    )
    for name in names.split()
}  # fmt: skip
"""What to do if the descriptions by two connectors differ in a field: by the field's name, or by a
part of the name (``groups.0.block_tokens``)."""


def _nearest(party: Party, others: Sequence[Party]) -> Party | None:
    """The party of the same model whose description differs least from that of ``party``."""
    ours = party.record
    if ours is None:
        return None

    def distance(other: Party) -> tuple[bool, bool, int, int, int]:
        theirs = other.record
        assert theirs is not None
        must, cuts = contrast(ours.engine, ours.description, theirs.description)
        idle_ms = min((row.idle_ms for row in [*other.putters, *other.askers]), default=1 << 62)
        is_apart = ours.tenant != theirs.tenant, ours.engine != theirs.engine
        return *is_apart, len(must), len(cuts), idle_ms

    same = [
        each
        for each in others
        if each.record is not None and ours.serves(each.record.model) and may_share(party, each)
    ]
    return min(same, key=distance, default=None)


_APART: Final = (
    ("engine", "other_engine", "different engines keep different bytes",
     "Blocks are shared between engines of one kind only; let one of this kind write."),
    ("tenant", "other_tenant", "one has a tenant, the other has none, so they share no block",
     "If both are of one tenant, give both its name: tenant, or KVSTORE_TENANT."),
)  # fmt: skip
"""Fields of records in which two engines that share blocks are equal, code, text and advice."""


def _differ(writer: Party, asker: Party) -> Cause:
    """Why an asker does not find what a writer of the same model puts."""
    ours, theirs = writer.record, asker.record
    assert ours is not None
    assert theirs is not None
    writing = f"{_do(writer.putters, 'write', 'another client')} {ours.model} under {writer.name}"
    asking = f"{_do(asker.askers, 'ask')} under {asker.name}"
    spaces = writer.namespaces + asker.namespaces
    for name, code, text, remedy in _APART:
        if getattr(ours, name) != getattr(theirs, name):
            return Cause(code, f"{writing}, {asking}: {text}", remedy, namespaces=spaces)
    must, cuts = contrast(ours.engine, ours.description, theirs.description)
    lines = [
        f"{each.field}: {_value(each.ours)} writes, {_value(each.theirs)} asks"
        for each in must[:FIELDS_SHOWN]
    ]
    if len(must) > FIELDS_SHOWN:
        lines.append(f"and {len(must) - FIELDS_SHOWN} more fields")
    if must:
        told = "These fields must be equal"
    elif cuts:
        told = "They hold the same bytes, only in another cut"
    else:
        told = "They differ in nothing that was described: only the cache's layout does"
    return Cause(
        "other_fingerprint",
        f"{writing}, {asking}: other fingerprints never share a block. {told}",
        _remedy(must, cuts),
        tuple(lines),
        spaces,
        cuts=tuple(cut.text("writes", "asks") for cut in cuts),
    )


def _remedy(must: Sequence[Difference], cuts: Sequence[Cut]) -> str:
    """What to do about two descriptions; each advice once."""
    if cuts and not must:
        settings = " and ".join(cut.setting for cut in cuts)
        flags = " and ".join(cut.flag for cut in cuts)
        return f"Set {settings} (kv_connector_extra_config), or start both with the same {flags}."
    advice = [
        next((_REMEDIES[part] for part in field.split(".") if part in _REMEDIES), "")
        for field, _, _ in must
    ]
    known = [text for text in dict.fromkeys(advice) if text]
    return " ".join(known[:REMEDIES_SHOWN]) or _SAME_SETTINGS


def _merged(rows: Iterable[ClientTraffic]) -> list[ClientTraffic]:
    """One row per client, the last active first. An engine has a namespace, so a row, per rank."""
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
    """Whether keys of these sizes, in bytes, are hashes; others may be of any length."""
    return bool(sizes) and all(size in HASH_BYTES for size in sizes)


def _age(milliseconds: int) -> str:
    seconds = milliseconds / 1000
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
