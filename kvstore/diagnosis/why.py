"""Why lookups find nothing: finds causes, in words, in what the master and the fleet records say.

``diagnose`` is pure: ``kvstore why`` gathers the ``Evidence`` and prints the ``Cause``s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

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
        text = "no node serves memory now, so nothing can be stored"
        return [Cause("no_node", text, "Start one: kvstore-node --master ADDRESS --memory SIZE.")]
    if not any(party.objects or party.wanted or party.asked for party in parties):
        return [_nothing()]
    causes = []
    for party in parties:
        for rule in _RULES:
            cause = rule(evidence, party, [each for each in others if each is not party])
            if cause is not None:
                causes.append(cause._replace(namespaces=cause.namespaces or party.namespaces))
                break
    return sorted(dict.fromkeys(causes), key=_urgency)


def _urgency(cause: Cause) -> tuple[bool, bool]:
    return not cause.is_problem, not cause.lines


# --- rules: the first rule that knows a cause for a party gives it -------------------------------

Rule = Callable[[Evidence, Party, Sequence[Party]], Cause | None]


def _guesses(evidence: Evidence, party: Party, others: Sequence[Party]) -> Cause | None:
    """Pages of a draft model are not a reason why nothing is found, whatever becomes of them."""
    del evidence, others
    if not party.spaces or not all(map(are_guesses, party.namespaces)):
        return None
    return Cause(
        "guesses",
        f"{party.found} of {counted(party.asked, 'asked page')} of a draft model were found "
        f"({party.name}); no hit depends on them",
        is_problem=False,
    )


def _evicted_keys(evidence: Evidence, party: Party, others: Sequence[Party]) -> Cause | None:
    """Little is found, and the master remembers that it has evicted what was asked for."""
    del evidence, others
    lost = [miss for miss in party.misses if miss.evicted]
    if not lost or not party.evicted or party.share >= FEW:
        return None
    cause = _evicted(party)
    names = ", ".join(list(dict.fromkeys(miss.client or "a client" for miss in lost))[:NAMES_SHOWN])
    return cause._replace(text=f"what {names} asked for had been evicted before: {cause.text}")


def _other_fingerprint(evidence: Evidence, party: Party, others: Sequence[Party]) -> Cause | None:
    """The party finds next to nothing, and a party with another fingerprint writes its model."""
    del evidence
    if not party.asked or party.share > NEARLY_NONE:
        return None
    writer = _nearest(party, [each for each in others if each.writes])
    return None if writer is None else _differ(writer, party)


def _not_asked(evidence: Evidence, party: Party, others: Sequence[Party]) -> Cause | None:
    if party.asked:
        return None
    if not party.wanted:
        return Cause(
            "no_traffic",
            f"{counted(party.objects, 'object')} in {party.name}, where no client put or asked "
            "since the master's start",
            "",
            is_problem=False,
        )
    if set(party.namespaces) & set(evidence.elsewhere.values()):
        return None  # the cause of the party that asks for these keys names both namespaces
    asker = _nearest(party, [each for each in others if each.asked])
    if asker is not None:
        return _differ(party, asker)
    what = "there" if party.record is None else f"for {party.record.model}"
    return Cause(
        "only_writers",
        f"{_do(party.putters, 'write')} {party.name}, and no client asks {what}",
        "Is an engine of this model running that may read (vLLM: kv_role kv_consumer or kv_both), "
        "with this master?",
    )


def _not_written(evidence: Evidence, party: Party, others: Sequence[Party]) -> Cause | None:
    if not party.asked or party.writes:
        return None
    if party.wanted:
        return _put_fails(party)
    elsewhere = _elsewhere(evidence, party)
    if elsewhere is not None:
        return elsewhere
    remedy = (
        "Is an engine running that may write (vLLM: kv_role kv_producer or kv_both), with this "
        "master and cluster? Its log says whether its puts fail."
    )
    if any(each.writes for each in others):
        remedy += (
            " Clients write other namespaces (kvstore why lists them): if one of these is of the "
            "same model, give both engines the same settings."
        )
    writes = "this model" if party.record is not None else "there"
    return Cause(
        "only_readers",
        f"{_do(party.askers, 'ask')} in {party.name}, and no client writes {writes}",
        remedy,
    )


def _gone(evidence: Evidence, party: Party, others: Sequence[Party]) -> Cause | None:
    del others
    if not party.asked or party.objects or not party.writes:
        return None
    if party.evicted:
        return _evicted(party)
    return Cause(
        "gone",
        f"{counted(party.written, 'object')} put into {party.name}, and none is left; none "
        "was evicted",
        "They were removed (kvstore rm, clear; a reset of an engine's cache), their ttl is over, "
        "or their node has left: kvstore status --counters.",
    )


def _none_found(evidence: Evidence, party: Party, others: Sequence[Party]) -> Cause | None:
    del others
    if not party.asked or party.found:
        return None
    misses, putters = party.misses, party.putters
    here = f"{counted(party.objects, 'object')} in {party.name}"
    elsewhere = _elsewhere(evidence, party)
    if elsewhere is not None:
        return elsewhere
    if any(miss.present for miss in misses):
        return Cause(
            "too_early",
            f"{_names(party.askers)} asked in {party.name} for keys before they were put; they are "
            "there now",
            "Let the reader ask after the writer has ended, or send the prompt again.",
        )
    if party.evicted > party.objects:
        return _evicted(party)
    sizes = sorted({len(row.key) for row in putters if row.key})
    asked_sizes = sorted({len(miss.key) for miss in misses})
    if _are_hashes(sizes) and _are_hashes(asked_sizes) and not {*sizes} & {*asked_sizes}:
        return Cause(
            "other_keys",
            f"{here}, under keys of {_list(sizes)} bytes; asked were keys of "
            f"{_list(asked_sizes)} bytes",
            "The engines hash blocks by different algorithms: give them the same "
            "(vLLM: --prefix-caching-hash-algo).",
        )
    detached, looked = _detached(evidence, party)
    if looked and 2 * detached >= looked:
        return Cause(
            "broken_chain",
            f"{detached} of {looked} objects in {party.name} have a missing ancestor, so no prefix "
            "reaches them",
            "The first blocks of their chains were removed or lost, or are not put: the next put "
            "of the whole prompt mends them.",
        )
    if party.partly > party.none:
        return _ends(party)
    both = {row.client for row in putters} & {row.client for row in party.askers}
    first = f"the first key of {party.none} of {party.questions} questions is none of them"
    compare = (
        "New prompts have no hit: send one twice. Then compare what the hash of the first block "
        "is made of: the tokens (tokenizer, chat template, system prompt), the block size, salt "
        "and adapter"
        + (
            "."
            if both
            else ", the seed: PYTHONHASHSEED must be the same for every engine, or use a hash "
            "without one (vLLM: --prefix-caching-hash-algo sha256_cbor)."
        )
    )
    if party.evicted:
        return Cause(
            "perhaps_evicted",
            f"{here}, {party.evicted} evicted, the last {_age(_last_evicting(party).evicted_ms)} "
            f"ago; {first}: either these keys were evicted, too long ago for the master to "
            "remember them, or the keys differ from the first block on",
            f"{_MORE_MEMORY} If that changes nothing: {compare}",
        )
    text = f"{here}, and {first}: the keys differ from the first block on"
    return Cause("other_keys", text, compare)


def _some_found(evidence: Evidence, party: Party, others: Sequence[Party]) -> Cause | None:
    del evidence, others
    if not party.asked:
        return None
    ratio = f"{100 * party.share:.0f} % of {party.asked} keys asked in {party.name} were found"
    if party.share >= FEW:
        return Cause("fine", ratio, is_problem=False)
    if party.evicted > party.objects:
        return _evicted(party)
    if party.none > party.partly:
        return Cause(
            "few_hits",
            f"{ratio}; the first key of {party.none} of {party.questions} questions was not there: "
            "most prompts begin with other tokens than those that are stored"
            + (f" ({counted(party.evicted, 'object')} evicted)" if party.evicted else ""),
            "That is how new prompts look. If these prompts share a beginning, compare tokenizer, "
            "chat template and system prompt."
            + (" If they come again, the pool may be too small." if party.evicted else ""),
            is_problem=False,
        )
    return _ends(party)._replace(is_problem=False)


_MORE_MEMORY: Final = (
    "The pool is too small for what is written between two uses: give it more memory "
    "(kvstore-node --memory), or pin what must stay (kvstore pin)."
)
_SAME_SETTINGS: Final = "Start both engines with the same weights and settings."
_WEIGHTS: Final = (
    "weights: these are other checkpoints or revisions. That is right if the models differ; "
    "otherwise load the same files in both."
)
_DTYPE: Final = "dtype: start both with the same --dtype and quantization."
_CACHE_DTYPE: Final = "cache type: start both with the same --kv-cache-dtype."
_BLOCK: Final = (
    "block size: start both with the same one (vLLM: --block-size; SGLang: --page-size; LMCache: "
    "chunk_size)."
)
_PARALLEL: Final = (
    "parallel sizes: start both with the same ones (vLLM: --tensor-parallel-size, "
    "--pipeline-parallel-size; SGLang: --tp-size, --pp-size); each rank keeps its own part."
)
_HASH: Final = "hash: start both with the same --prefix-caching-hash-algo."
_SEED: Final = (
    "hash seed: set the same PYTHONHASHSEED for both, or start both with "
    "--prefix-caching-hash-algo sha256_cbor."
)
_VERSION: Final = "version: run the same release of the engine and of kvstore in both."
_MACHINE: Final = (
    "device: blocks of other devices or processors differ; let engines of one kind share."
)
_LAYOUT: Final = "layout: start both with the same attention backend and cache layout."

_REMEDIES: Final[dict[str, str]] = {
    "weights": _WEIGHTS, "files": _WEIGHTS, "config": _WEIGHTS, "weight_version": _WEIGHTS,
    "dtype": _DTYPE, "quantization": _DTYPE, "chunk_dtype": _DTYPE, "cache_dtype": _CACHE_DTYPE,
    "kv_cache_dtype": _CACHE_DTYPE, "block_tokens": _BLOCK, "block_size": _BLOCK,
    "page_tokens": _BLOCK, "page_bytes": _BLOCK, "hash_tokens": _BLOCK, "chunk_tokens": _BLOCK,
    "chunk_blocks": _BLOCK, "chunk_bytes": _BLOCK, "tensor_parallel": _PARALLEL,
    "tensor_parallel_size": _PARALLEL, "pipeline_parallel": _PARALLEL,
    "context_parallel": _PARALLEL, "workers": _PARALLEL, "hash_algorithm": _HASH,
    "none_hash": _SEED, "format": _VERSION, "tier_format": _VERSION, "engine": _VERSION,
    "vllm": _VERSION, "device": _MACHINE, "machine": _MACHINE, "layout": _LAYOUT,
    "chunk_layout": _LAYOUT, "attention": _LAYOUT,
    "job": 'job: give all engines of one training job the same "job_name".',
    "draft": "draft model: load the same draft model in both, or none.",
    "speculative": "speculative decoding: start both with the same settings of it.",
}  # fmt: skip
"""What to do if the descriptions by two connectors differ in a field: by the field's name, or by a
part of the name (``groups.0.block_tokens``)."""

_RULES: Final[tuple[Rule, ...]] = (
    _guesses, _evicted_keys, _other_fingerprint, _not_asked, _not_written, _gone, _none_found,
    _some_found,
)  # fmt: skip


def _nothing() -> Cause:
    return Cause(
        "nothing",
        "since the master's start no client has put anything or asked for anything here",
        "Is the connector on (vLLM: --kv-transfer-config), and does it name this master and "
        "cluster? The engine's log says which master it has joined; kvstore doctor tests the way.",
    )


def _put_fails(party: Party) -> Cause:
    return Cause(
        "put_fails",
        f"{_names(party.putters)} wanted to put {party.wanted} keys into {party.name}, and none "
        "was stored",
        "Its log says why: no space (kvstore status shows free memory), or a node that it cannot "
        "reach (kvstore doctor on that host).",
    )


def _evicted(party: Party) -> Cause:
    last = _last_evicting(party)
    return Cause(
        "evicted",
        f"{counted(party.evicted, 'object')} of {party.name} evicted, {party.objects} left; the "
        f"last, {_age(last.evicted_ms)} ago, had not been used for {_age(last.evicted_idle_ms)}",
        _MORE_MEMORY,
    )


def _last_evicting(party: Party) -> NamespaceTraffic:
    """Where objects of a party, of which some were evicted, were evicted last."""
    return min((s for s in party.spaces if s.evicted), key=lambda space: space.evicted_ms)


def _ends(party: Party) -> Cause:
    deep = [miss for miss in party.misses if miss.found]
    example = f", the last after {deep[0].found} of {deep[0].asked} keys" if deep else ""
    return Cause(
        "prefix_ends",
        f"{party.partly} of {party.questions} questions in {party.name} found a beginning and no "
        f"more{example}; {party.evicted} objects were evicted",
        "That is how prompts with a shared beginning look. If the rest should be there, look for "
        "something that changes within the prompt (a date, an id), or for evictions.",
    )


def _elsewhere(evidence: Evidence, party: Party) -> Cause | None:
    for name in party.namespaces:
        other = evidence.elsewhere.get(name)
        if other is not None:
            return Cause(
                "other_namespace",
                f"a key that {_names(party.askers)} asked for in {name} is stored in {other}: "
                "both compute the same keys, in different namespaces",
                "A namespace stands for the model and all settings on which bytes depend: give "
                "both the same, if their blocks are the same.",
                namespaces=(name, other),
            )
    return None


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


def _differ(writer: Party, asker: Party) -> Cause:
    """Why an asker does not find what a writer of the same model puts."""
    ours, theirs = writer.record, asker.record
    assert ours is not None
    assert theirs is not None
    writing = f"{_do(writer.putters, 'write', 'another client')} {ours.model} under {writer.name}"
    asking = f"{_do(asker.askers, 'ask')} under {asker.name}"
    spaces = writer.namespaces + asker.namespaces
    if ours.engine != theirs.engine:
        return Cause(
            "other_engine",
            f"{writing}, {asking}: different engines keep different bytes",
            "Blocks are shared between engines of one kind only; let one of this kind write.",
            namespaces=spaces,
        )
    if ours.tenant != theirs.tenant:
        return Cause(
            "other_tenant",
            f"{writing}, {asking}: one has a tenant, the other has none, so they share no block",
            "If both are of one tenant, give both its name: tenant, or KVSTORE_TENANT.",
            namespaces=spaces,
        )
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


def _detached(evidence: Evidence, party: Party) -> tuple[int, int]:
    seen = [evidence.detached.get(name, (0, 0)) for name in party.namespaces]
    return sum(some for some, _ in seen), sum(looked for _, looked in seen)


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


def _are_hashes(sizes: Sequence[int]) -> bool:
    """Whether keys of these sizes, in bytes, are hashes; others may be of any length."""
    return bool(sizes) and all(size in HASH_BYTES for size in sizes)


def _list(numbers: Sequence[int]) -> str:
    return " or ".join(map(str, numbers))


def _age(milliseconds: int) -> str:
    seconds = milliseconds / 1000
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
