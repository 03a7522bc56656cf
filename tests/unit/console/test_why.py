"""Why nothing is found: one story per cause, as the master and the fleet records tell it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.calls import ClientTraffic, ClusterStatus, Counter, MissedKey, NamespaceTraffic
from kvstore.calls.fleet_records import FleetRecord
from kvstore.console.diagnostics.evidence import store_notes
from kvstore.console.diagnostics.rows import CAUSES
from kvstore.console.diagnostics.why import RULES, Cause, Evidence, diagnose, parties_of, select
from kvstore.limits import FLEET_NAMESPACE, Key, of_tenant

DESCRIPTION = {"dtype": "bfloat16", "weights": "files 1a", "groups": [{"block_tokens": 16}]}
KEY = b"k" * 32


def client(
    name: str, keys: int, *, found: int = 0, stored: int = 0, key: bytes = KEY, idle_ms: int = 5
) -> ClientTraffic:
    return ClientTraffic(name, "10.0.0.8", 9_000, idle_ms, keys, found, stored, key)


def miss(
    key: bytes = b"m" * 32, *, found: int = 0, present: bool = False, evicted: bool = False
) -> MissedKey:
    return MissedKey(Key(key), "decode", "10.0.0.9", 7, found, 8, present, evicted)


def space(
    name: str,
    objects: int = 0,
    *,
    putters: Sequence[ClientTraffic] = (),
    askers: Sequence[ClientTraffic] = (),
    misses: Sequence[MissedKey] = (),
    none: int = 0,
    partly: int = 0,
    evicted: int = 0,
) -> NamespaceTraffic:
    queries = max(none + partly, len(askers))
    return NamespaceTraffic(
        name, objects, 10 * objects, putters, askers, misses, queries, none, partly, evicted,
        3, 240_000,
    )  # fmt: skip


def record(
    mark: str, *, engine: str = "vllm", model: str = "/models/m", **changes: Any
) -> FleetRecord:
    description = {**DESCRIPTION, **changes}
    return FleetRecord(engine, (model,), mark * 8, (f"{engine}/{mark}",), description)


def writes(name: str, objects: int = 8, who: str = "prefill", **more: Any) -> NamespaceTraffic:
    return space(name, objects, putters=[client(who, 8, stored=8)], **more)


def asks(name: str, objects: int = 0, who: str = "decode", **more: Any) -> NamespaceTraffic:
    more = {"misses": [miss()], "none": 1, **more}
    return space(name, objects, askers=[client(who, 8, key=b"")], **more)


def both(name: str, objects: int = 8, *, found: int = 0, **more: Any) -> NamespaceTraffic:
    """Of one namespace."""
    return space(
        name, objects, putters=[client("prefill", 8, stored=8)],
        askers=[client("decode", 100, found=found, key=b"")], **{"misses": [miss()], **more},
    )  # fmt: skip


def causes(
    *spaces: NamespaceTraffic,
    records: Sequence[FleetRecord] = (),
    namespace: str = "",
    model: str = "",
    **evidence: Any,
) -> list[Cause]:
    everything = Evidence(uptime_ms=60_000, spaces=spaces, records=records, **evidence)
    parties = parties_of(spaces, records)
    return diagnose(everything, select(parties, namespace=namespace, model=model), parties)


def only(*spaces: NamespaceTraffic, **more: Any) -> Cause:
    (cause,) = causes(*spaces, **more)
    return cause


DRAFT = "vllm/a/g0/p0t0.draft-0123456789abcdef"
ALONE = space(
    "n", 8, putters=[client("one", 8, stored=8)], askers=[client("one", 8)], none=3,
    misses=[miss()],
)  # fmt: skip


def of(tenant: str, mark: str, **changes: Any) -> FleetRecord:
    return record(mark, **changes)._replace(namespaces=(of_tenant(tenant, f"vllm/{mark}"),))


RANKS = tuple(f"vllm/a/{rank}" for rank in range(4))

CASES: list[tuple[str, list[NamespaceTraffic], dict[str, Any], str, str]] = [
    ("nothing", [], {}, "no traffic here", "kvstore doctor"),
    ("nothing", [], {"records": [record("a")]}, "", ""),
    ("nothing", [space(FLEET_NAMESPACE, 3)], {}, "", ""),
    ("nothing", [space("acme/vllm-fleet", 3)], {}, "", ""),
    ("no_node", [asks("n")], {"nodes": 0}, "", "kvstore-node"),
    ("draft_pages", [asks(DRAFT)], {}, "0 of 8 requested pages", ""),
    ("other_engine", [writes("vllm/a"), asks("sglang/b")],
     {"records": [record("a"), record("b", engine="sglang")]}, "different engines", "one kind"),
    ("other_tenant", [writes("acme/vllm/a"), asks("vllm/a")],
     {"records": [of("acme", "a"), of("", "a")]}, "prefill writes m under acme/vllm aaaaaaaa",
     "KVSTORE_TENANT"),
    ("other_fingerprint", [writes("vllm/a"), asks("vllm/b")],
     {"records": [record("a"), record("b")]}, "layout", "same weights and settings"),
    ("only_readers", [asks("n")], {}, "decode reads in n, and no client writes there",
     "kv_producer"),
    ("only_readers", [asks("vllm/a/g0/draft-0123")], {}, "", ""),
    ("only_writers", [writes("n")], {}, "and no client looks up keys", "kv_consumer"),
    ("no_traffic", [space("n", 5)], {}, "5 objects in n", ""),
    ("puts_fail", [space("n", putters=[client("p", 64)], askers=[client("d", 8)], none=1)], {},
     "64 keys", "kvstore status"),
    ("other_namespace", [writes("x", who="p"), both("y")], {"elsewhere": {"y": "x"}},
     "looked up in y is stored in x", "give both the same"),
    ("evicted", [both("n", 0, evicted=8, none=1)], {}, "8 objects of n evicted, 0 left",
     "--memory"),
    ("evicted", [both("n", 4, evicted=90, none=1)], {}, "not been used for 4 min", ""),
    ("evicted", [asks("n", evicted=8)], {}, "", ""),
    ("evicted", [both("n", found=20, evicted=30, partly=4)], {}, "", ""),
    ("evicted", [both("n", 61, evicted=19, none=4, misses=[miss(), miss(evicted=True)])], {},
     "by decode had been evicted before: 19 objects of n evicted, 61 left", "--memory"),
    ("evicted", [both("n", 61, evicted=19, none=4, found=20, misses=[miss(evicted=True)])], {},
     "had been evicted before", ""),
    ("evicted", [both("vllm/b", 61, evicted=19, misses=[miss(evicted=True)]), writes("vllm/a")],
     {"records": [record("a"), record("b", dtype="float16")], "namespace": "vllm/b"}, "", ""),
    ("perhaps_evicted", [both("n", 61, evicted=19, none=4)], {}, "19 evicted, the last 0.0 s ago",
     "PYTHONHASHSEED"),
    ("removed_or_lost", [both("n", 0, none=1)], {}, "8 objects put into n, and none is left",
     "kvstore rm"),
    ("read_before_put", [both("n", none=2, misses=[miss(present=True)])], {},
     "before they were put", ""),
    ("other_keys", [both("n", none=3)], {}, "the first key of 3 of 3", "PYTHONHASHSEED"),
    ("other_keys", [ALONE], {}, "", "salt and adapter."),
    ("other_keys", [both("n", none=3, misses=[miss(b"m" * 16)])], {},
     "under keys of 32 bytes; lookups used keys of 16 bytes", "--prefix-caching-hash-algo"),
    ("other_keys", [both("n", none=3, misses=[miss(b"model/layer")])], {}, "first block on", ""),
    ("broken_chain", [both("n", none=1)], {"detached": {"n": (6, 8)}}, "6 of 8 objects", "repairs"),
    ("other_keys", [both("n", none=1)], {"detached": {"n": (1, 8)}}, "", ""),
    ("prefix_ends", [both("n", found=20, partly=4, none=1, misses=[miss(found=5)])], {},
     "after 5 of 8 keys", "shared beginning"),
    ("prefix_ends", [both("n", partly=4, none=1)], {}, "4 of 5 queries", ""),
    ("few_hits", [both("n", found=20, none=4, partly=1)], {}, "20 % of 100 keys", "new prompts"),
    ("few_hits", [both("n", 61, evicted=19, found=20, none=4)], {}, "(19 objects evicted)",
     "may be too small"),
    ("fine", [both("n", found=87, partly=1)], {}, "87 % of 100 keys", ""),
    ("fine", [both(name, found=90) for name in RANKS],
     {"records": [record("a")._replace(namespaces=RANKS)]}, "90 % of 400 keys", ""),
]  # fmt: skip
"""Code, traffic, further evidence, and parts of the text and of the advice."""


@pytest.mark.parametrize(("code", "spaces", "evidence", "text", "advice"), CASES)
def test_a_cause_has_its_code_words_and_advice(
    code: str, spaces: list[NamespaceTraffic], evidence: dict[str, Any], text: str, advice: str
) -> None:
    cause = only(*spaces, **evidence)
    assert (cause.code, text in cause.text, advice in cause.remedy) == (code, True, True), cause
    assert "{" not in cause.text + cause.remedy
    assert cause.remedy or not cause.is_problem
    seldom = {"draft_pages", "no_traffic", "few_hits", "fine"}
    ends_well = code == "prefix_ends" and any(row.found for row in spaces[0].readers)
    assert cause.is_problem == (code not in seldom and not ends_well)


def test_the_first_prompt_of_an_engine_is_no_problem() -> None:
    cause = only(both("n", none=1, misses=[miss(present=True)]))
    assert (cause.code, cause.is_problem) == ("read_before_put", False)


def test_every_row_is_reached() -> None:
    codes = {row.code or name for name, row in CAUSES.items()} | {"other_fingerprint"}
    assert {code for code, *_ in CASES} == codes
    apart = {"other_engine", "other_tenant", "nothing", "no_node"}
    assert CAUSES.keys() - apart == {name for name, _ in RULES if " " not in name}


def test_engines_of_one_model_with_other_fingerprints_are_told_the_fields() -> None:
    ours = record("a", tensor_parallel=1)
    theirs = record("b", tensor_parallel=2, dtype="float16")
    found = causes(writes("vllm/a"), asks("vllm/b"), records=[ours, theirs])
    (cause,) = found
    assert cause.code == "other_fingerprint"
    assert "prefill writes m under vllm aaaaaaaa" in cause.text
    assert "decode reads under vllm bbbbbbbb" in cause.text
    assert cause.text.endswith("These fields must be equal")
    assert cause.fields == ("dtype: bfloat16 writes, float16 reads",)
    assert cause.split == (
        'tensor-parallel size: 1 writes, 2 reads ("tp_shards": 2 in both would let them share, '
        "if their weights are the same)"
    )
    assert "--dtype" in cause.remedy
    assert cause.namespaces == ("vllm/a", "vllm/b")


def test_engines_of_two_tenants_are_apart_on_purpose() -> None:
    """With equal weights: their fingerprints are equal, too."""
    records = [of("acme", "a"), of("globex", "a")]
    spaces = writes("acme/vllm/a"), asks("globex/vllm/a")
    assert [each.name for each in parties_of(spaces, records)] == [
        "acme/vllm aaaaaaaa", "globex/vllm aaaaaaaa",
    ]  # fmt: skip
    codes = {each.code for each in causes(*spaces, records=records)}
    assert codes == {"only_writers", "only_readers"}


def test_another_model_is_no_partner() -> None:
    records = [record("a", model="other"), record("b")]
    by_code = {cause.code for cause in causes(writes("vllm/a"), asks("vllm/b"), records=records)}
    assert by_code == {"only_writers", "only_readers"}


def test_a_writer_is_no_partner_because_it_is_there() -> None:
    """A miss in one namespace says nothing of a writer in another one."""
    found = {cause.code: cause for cause in causes(writes("prod-a"), asks("default"))}
    assert found.keys() == {"only_readers", "only_writers"}
    for cause in found.values():
        assert len(cause.namespaces) == 1
    assert "prod-a" not in found["only_readers"].text + found["only_readers"].remedy
    assert "write other namespaces" in found["only_readers"].remedy
    only_one = only(asks("default"))
    assert "write other namespaces" not in only_one.remedy


@pytest.mark.parametrize("asked", [asks("default"), asks("vllm/x"), both("fine", found=99)])
def test_a_model_that_is_only_written_is_told_whatever_others_ask(
    asked: NamespaceTraffic,
) -> None:
    records = [record("a"), record("x", model="another")]
    (cause,) = causes(writes("vllm/a"), asked, records=records, model="m")
    assert cause.code == "only_writers"
    assert "no client looks up keys for m" in cause.text


def test_the_same_bytes_in_another_cut_are_told_with_the_setting() -> None:
    other = record("b", tensor_parallel=2)
    cause = only(writes("vllm/a"), asks("vllm/b"), records=[record("a", tensor_parallel=1), other])
    assert cause.text.endswith("They only split the same bytes differently")
    assert not cause.fields
    assert cause.split.startswith("tensor-parallel size: 1 writes, 2 reads")
    assert cause.remedy == (
        'Set "tp_shards": 2 in both (kv_connector_extra_config), or start both with the same '
        "--tensor-parallel-size."
    )


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({"dtype": "float16"}, "--dtype"),
        ({"cache_dtype": "fp8"}, "--kv-cache-dtype"),
        ({"weights": "files 2b"}, "other checkpoints or revisions. That is right if the models"),
        ({"groups": [{"block_tokens": 32}]}, "--block-size"),
        ({"page_tokens": 64}, "--page-size"),
        ({"tensor_parallel": 2}, "--tensor-parallel-size"),
        ({"hash_algorithm": "sha256"}, "--prefix-caching-hash-algo"),
        ({"none_hash": "1f"}, "PYTHONHASHSEED"),
        ({"unheard_of": 1}, "same weights and settings"),
    ],
)
def test_the_remedy_is_that_of_the_field(changes: dict[str, Any], advice: str) -> None:
    cause = only(writes("vllm/a"), asks("vllm/b"), records=[record("a"), record("b", **changes)])
    assert advice in cause.remedy
    assert cause.remedy.count(". ") <= 1


def test_problems_come_first_and_parties_can_be_chosen() -> None:
    spaces = [both("good", found=99), asks("bad")]
    assert [cause.code for cause in causes(*spaces)] == ["only_readers", "fine"]
    assert only(*spaces, namespace="good").code == "fine"
    records = [record("a", model="org/m-8b")]
    chosen = select(parties_of([both("vllm/a")], records), model="/somewhere/m-8b/")
    assert [party.name for party in chosen] == ["vllm aaaaaaaa"]
    assert not select(parties_of([both("vllm/a")], records), model="m-70b")
    assert not select(parties_of(spaces, []), namespace="unknown")


NUMBERS = st.integers(0, 1 << 40)
CLIENTS = st.lists(st.builds(ClientTraffic, *[st.text(max_size=5)] * 2, *[NUMBERS] * 5,
                             st.binary(max_size=4)), max_size=3)  # fmt: skip
MISSES = st.lists(
    st.builds(MissedKey, st.binary(min_size=1, max_size=4), *[st.text(max_size=5)] * 2,
              *[NUMBERS] * 3, st.booleans(), st.booleans()), max_size=3,
)  # fmt: skip
SPACES = st.lists(
    st.builds(NamespaceTraffic, st.sampled_from("abcd"), NUMBERS, NUMBERS, CLIENTS, CLIENTS, MISSES,
              *[NUMBERS] * 6),
    max_size=4, unique_by=lambda row: row.name,
)  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
RECORDS = st.lists(
    st.builds(FleetRecord, st.sampled_from(["vllm", ""]), st.tuples(st.text(max_size=3)),
              st.text(max_size=3), st.lists(st.sampled_from("abcd")).map(tuple),
              st.dictionaries(st.text(max_size=5), JSON)),
    max_size=4,
)  # fmt: skip


@pytest.mark.slow
@given(SPACES, RECORDS, st.dictionaries(st.sampled_from("abcd"), st.text(max_size=3)))
@pytest.mark.timeout(120)
def test_whatever_the_evidence_there_is_an_answer(
    spaces: list[NamespaceTraffic], records: list[FleetRecord], elsewhere: dict[str, str]
) -> None:
    """Counts of a stranger's master may contradict each other."""
    found = causes(*spaces, records=records, elsewhere=elsewhere)
    for cause in found:
        assert cause.text
        assert cause.remedy or not cause.is_problem
    if any(row.keys for space in spaces for row in space.readers):
        assert found, "a client asks, and is told nothing"


def test_notes_on_what_disks_did_not_keep_or_not_return_in_time() -> None:
    def status(**counters: int) -> ClusterStatus:
        return ClusterStatus(7, "1", 0, [], [], [Counter(*row) for row in counters.items()])

    assert store_notes(status(disk_brought_objects=5)) == []
    (note,) = store_notes(status(disk_refused_objects=1_200, disk_bring_timeouts=3))
    assert "1,200 objects evicted without a copy" in note
    assert "--disk-writes-per-day" in note
    assert "3 queries did not wait any longer" in note
    assert "were misses" not in note
