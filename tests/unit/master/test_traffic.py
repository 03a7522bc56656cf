"""What the master remembers of clients that put and that ask, and that it remembers no more."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import calls
from kvstore.calls import PutOutcome
from kvstore.errors import NoSpaceError
from kvstore.limits import Key, Namespace
from kvstore.master.state import report
from kvstore.master.state.effects import Later
from kvstore.master.state.rules import MasterRules
from kvstore.master.state.traffic import CLIENTS_MAX, MISSES_MAX, SPACES_MAX, Traffic
from tests.unit.master.cluster import EPOCH, NAMESPACE, Cluster, keys_of
from tests.unit.master.conftest import NewCluster
from tests.unit.master.test_inventories import back, claim

OTHER = Namespace("other")


def seen(cluster: Cluster, namespace: str = NAMESPACE) -> calls.NamespaceTraffic:
    found = cluster.state.report.traffic(cluster.now_ms, calls.Traffic(namespace))
    (row,) = found.namespaces
    return row


def ask(cluster: Cluster, request: calls.Lookup | calls.MatchPrefix | calls.Exists) -> None:
    assert not isinstance(cluster.state.asking.find(cluster.now_ms, request), Later)


def as_client(cluster: Cluster, name: str) -> None:
    """The next calls come from there."""
    cluster.state.traffic.caller = f"{name} 10.0.0.8"


def test_who_puts_is_remembered_with_what_became_of_it(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=8)
    as_client(cluster, "prefill 1")
    cluster.put("abc")
    cluster.after(1_000)
    cluster.put("abcd")
    cluster.after(500)

    row = seen(cluster)

    assert (row.objects, row.askers, row.misses) == (4, [], [])
    assert row.putters == [
        calls.ClientTraffic("prefill 1", "10.0.0.8", 1_500, 500, 7, 3, 4, b"a"),
    ]


def test_an_allocation_counts_when_it_has_its_key(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=8)
    as_client(cluster, "one")
    assert cluster.commit(cluster.allocate(), "k") is PutOutcome.STORED
    (putter,) = seen(cluster).putters
    assert (putter.keys, putter.stored, putter.key) == (1, 1, b"k")


def test_a_put_without_space_is_seen_as_one_that_stores_nothing(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=2)
    as_client(cluster, "one")
    with pytest.raises(NoSpaceError):
        cluster.start("abcd")
    (putter,) = seen(cluster).putters
    assert (putter.keys, putter.found, putter.stored) == (4, 0, 0)


@pytest.mark.parametrize(
    "question",
    [
        calls.Lookup(NAMESPACE, keys_of("abx")),
        calls.Exists(NAMESPACE, keys_of("abx")),
        calls.MatchPrefix([NAMESPACE], keys_of("abx"), False),
    ],
    ids=lambda question: type(question).__name__,
)
def test_who_asks_is_remembered_with_the_first_key_that_was_missing(
    new_cluster: NewCluster, question: calls.Lookup | calls.Exists | calls.MatchPrefix
) -> None:
    cluster = new_cluster(one=8)
    cluster.put("abc")
    as_client(cluster, "decode")
    ask(cluster, question)
    ask(cluster, question._replace(keys=keys_of("ab")))
    cluster.after(700)

    row = seen(cluster)

    assert row.askers == [calls.ClientTraffic("decode", "10.0.0.8", 700, 700, 5, 4, 0, b"")]
    assert row.misses == [calls.MissedKey(Key(b"x"), "decode", "10.0.0.8", 700, 2, 3, False)]
    assert (row.questions, row.none, row.partly) == (2, 0, 1)


@pytest.mark.parametrize("kind", [calls.Lookup, calls.Exists, calls.MatchPrefix])
def test_questions_in_a_namespace_without_objects_are_remembered(
    new_cluster: NewCluster, kind: type
) -> None:
    cluster = new_cluster(one=8)
    several = kind is calls.MatchPrefix
    for keys in (keys_of("ab"), []):
        ask(cluster, kind([OTHER], keys, False) if several else kind(OTHER, keys))
    row = seen(cluster, OTHER)
    assert (row.objects, row.questions, row.none, row.partly) == (0, 2, 1, 0)
    assert [miss.key for miss in row.misses] == [b"a"]


def test_a_missed_key_that_is_there_by_now_says_so(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=8)
    ask(cluster, calls.Lookup(NAMESPACE, keys_of("a")))
    grants = cluster.start("a")
    assert [miss.present for miss in seen(cluster).misses] == [False], "it is being written"
    cluster.end(grants)
    assert [miss.present for miss in seen(cluster).misses] == [True]


def test_a_key_that_is_asked_for_again_is_remembered_once(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=8)
    for name in "abbbc":
        ask(cluster, calls.Exists(NAMESPACE, keys_of(name)))
    assert [miss.key for miss in seen(cluster).misses] == [b"c", b"b", b"a"]
    assert seen(cluster).none == 5


def test_evictions_are_counted_where_they_happen(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=4)
    cluster.put("abcd", chain=False)
    cluster.after(cluster.rules.lease_ms + 1_000)
    cluster.put("wxyz", namespace=OTHER, chain=False)
    cluster.after(200)
    row = seen(cluster)
    assert row.evicted >= 4
    assert (row.evicted_ms, row.evicted_idle_ms) == (200, cluster.rules.lease_ms + 1_000)
    assert seen(cluster, OTHER).evicted == 0


def test_what_the_master_moves_is_nobodys_put(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=8, two=8)
    as_client(cluster, "writer")
    cluster.put("ab", host="host-one")
    as_client(cluster, "operator")
    node = cluster.where("a")[0]
    cluster.state.nodes.drain(cluster.now_ms, calls.Drain(node, calls.DrainStep.BEGIN))
    moves = cluster.state.copying.start_moves(
        cluster.now_ms, calls.StartMoves(node, 0, 10, 1 << 30)
    )
    assert isinstance(moves, calls.MovesStarted)
    assert moves.keys
    cluster.end(moves.grants)
    assert [row.client for row in seen(cluster).putters] == ["writer"]


def test_questions_while_inventories_come_in_are_those_of_their_clients(
    new_cluster: NewCluster,
) -> None:
    """A miss of a new master waits; what is remembered is the answer, not the first look."""
    cluster = new_cluster(rules=MasterRules(gather_ms=3_000))
    as_client(cluster, "decode")
    later = cluster.state.asking.find(cluster.now_ms, calls.Exists(NAMESPACE, keys_of("a")))
    assert isinstance(later, Later)
    as_client(cluster, "another")
    back(cluster, "one", claim("a", 0))
    cluster.after(1_000)
    assert later.ticket in cluster.answers
    (row,) = seen(cluster).askers
    assert (row.client, row.keys, row.found) == ("decode", 1, 1)


def test_a_caller_that_is_not_known_has_a_row_without_a_name(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=8)
    cluster.put("a")
    (row,) = seen(cluster).putters
    assert (row.client, row.address, row.stored) == ("", "", 1)


def test_a_report_comes_in_pages(new_cluster: NewCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "TRAFFIC_ROWS_MAX", 5)
    cluster = new_cluster(one=8)
    names = [f"n{number}" for number in range(7)]
    for name in names:
        ask(cluster, calls.Exists(Namespace(name), keys_of("a")))

    pages, cursor = [], 0
    while True:
        page = cluster.state.report.traffic(cluster.now_ms, calls.Traffic("", cursor))
        pages.append([row.name for row in page.namespaces])
        cursor = page.next_cursor
        if not cursor:
            break

    assert [len(page) for page in pages] == [2, 2, 2, 1]
    assert [name for page in pages for name in page] == names


@pytest.mark.parametrize("cursor", [1, 1 << 40, (1 << 64) - 1])
def test_a_cursor_that_nobody_gave_shows_nothing(new_cluster: NewCluster, cursor: int) -> None:
    cluster = new_cluster(one=8)
    cluster.put("a")
    found = cluster.state.report.traffic(0, calls.Traffic("", cursor))
    assert (found.epoch, found.namespaces, found.next_cursor) == (EPOCH, [], 0)
    assert cluster.state.report.traffic(0, calls.Traffic("unknown")).namespaces == []


# --- bounds ------------------------------------------------------------------------------------


def test_many_clients_and_namespaces_leave_the_last_ones() -> None:
    traffic = Traffic()
    keys = keys_of("a")
    for number in range(5 * SPACES_MAX):
        traffic.caller = f"c{number} a"
        traffic.asked(number, Namespace(f"n{number}"), keys, 1, 0, 0)
        traffic.asked(number, Namespace("busy"), keys, 1, 1, -1)
        traffic.check_invariants()
    spaces = traffic.spaces("")
    assert len(spaces) <= 2 * SPACES_MAX
    known = {space.name for space in spaces}
    assert {f"n{number}" for number in range(4 * SPACES_MAX + 1, 5 * SPACES_MAX)} <= known
    (busy,) = traffic.spaces("busy")
    assert busy.questions == 5 * SPACES_MAX, "what is used stays"
    last = {row.name for row in busy.askers.rows()}
    assert len(last) <= 2 * CLIENTS_MAX
    assert {
        f"c{number} a" for number in range(5 * SPACES_MAX - CLIENTS_MAX, 5 * SPACES_MAX)
    } <= last


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["ask", "put", "evict"]),
        st.integers(0, 40),  # the client
        st.integers(0, 3),  # the namespace
        st.integers(0, 12),  # the first key
        st.integers(0, 3),  # how many are found
    ),
    max_size=300,
)


@given(STEPS)
def test_whatever_happens_the_last_misses_and_clients_are_right(
    steps: Sequence[tuple[str, int, int, int, int]],
) -> None:
    traffic = Traffic()
    misses: dict[str, list[Key]] = {}
    last: dict[tuple[str, str], list[str]] = {}
    for now_ms, (what, client, number, first, found) in enumerate(steps):
        traffic.caller = f"c{client} a"
        space = Namespace(f"n{number}")
        keys = [Key(b"%d" % (first + index)) for index in range(4)]
        if what == "evict":
            traffic.evicts(now_ms, space, 5)
        elif what == "put":
            traffic.puts(now_ms, space)
            last.setdefault(("put", space), []).append(traffic.caller)
        else:
            traffic.asked(now_ms, space, keys, 4, found, found)
            last.setdefault(("ask", space), []).append(traffic.caller)
            missed = misses.setdefault(space, [])
            if missed[-1:] != [keys[found]]:
                missed.append(keys[found])
        traffic.check_invariants()
    for name, expected in misses.items():
        (known,) = traffic.spaces(name)
        assert [miss.key for miss in known.last_misses()] == expected[::-1][:MISSES_MAX]
    for (what, name), callers in last.items():
        (known,) = traffic.spaces(name)
        rows = {row.name for row in (known.putters if what == "put" else known.askers).rows()}
        recent = list(dict.fromkeys(reversed(callers)))[:CLIENTS_MAX]
        assert set(recent) <= rows <= set(callers)
