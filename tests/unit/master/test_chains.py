"""The chains that are used most, as operators see them: where they branch, what is missing."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from kvstore import calls
from kvstore.errors import BusyError
from kvstore.limits import CHAINS_MAX, Key, Namespace
from kvstore.master.state.background_jobs import DRAW
from kvstore.master.state.effects import DeferredReply
from kvstore.master.state.records import ONE_SHARD_RECORDS
from kvstore.master.state.traffic import TIPS_MAX, MatchTips
from kvstore.master.state.views import chains
from tests.unit.master.cluster import BLOCK, EPOCH, NAMESPACE, Cluster, keys_of
from tests.unit.master.conftest import NewCluster

OTHER = Namespace("other")


def found(
    cluster: Cluster, namespace: str = NAMESPACE, keys: Iterable[str] = (), count: int = 0
) -> calls.ChainsReply:
    request = calls.Chains(namespace, keys_of(keys), count)
    later = cluster.state.chains.find(cluster.now_ms, request)
    cluster.work()
    answer = cluster.answers.pop(later.reply_id)
    assert isinstance(answer, calls.ChainsReply)
    return answer


def found_at_once(cluster: Cluster) -> calls.ChainsReply:
    """Before any other work is done."""
    later = cluster.state.chains.find(cluster.now_ms, calls.Chains(NAMESPACE))
    while cluster.state.common.jobs.due & DRAW:
        cluster.state.chains.walk_on(cluster.now_ms)
    cluster._settle()
    answer = cluster.answers.pop(later.reply_id)
    assert isinstance(answer, calls.ChainsReply)
    return answer


def rows(answer: calls.ChainsReply) -> list[tuple[str, str, int]]:
    """First and last block of each branch, and the branch that it continues."""
    return [(row.first.decode(), row.last.decode(), row.above) for row in answer.branches]


def block(cluster: Cluster, name: str) -> calls.BlockStatus:
    request = calls.Blocks(NAMESPACE, keys_of([name]))
    return cluster.state.chains.blocks(cluster.now_ms, request).blocks[0]


# --- what is shown --------------------------------------------------------------------------------


def test_two_conversations_that_share_their_beginning(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=20)
    cluster.put("abcde")
    cluster.put("xyz", parent="c")
    for _ in range(3):
        cluster.match("abcxyz")
    cluster.match("abcde")
    cluster.match("abcq")
    cluster.after(500)

    answer = found(cluster)

    assert (answer.epoch, answer.uptime_ms, answer.complete) == (EPOCH, 500, True)
    assert rows(answer) == [("a", "c", 0), ("x", "z", 1), ("d", "e", 1)]
    trunk, often, once = answer.branches
    assert (trunk.blocks, trunk.size, trunk.depth, trunk.children) == (3, 3 * BLOCK, 2, 2)
    assert (trunk.matched, trunk.matches_ended, trunk.counted_ms) == (5, 1, 500)
    assert (often.matched, often.matches_ended, often.depth, often.children) == (3, 3, 5, 0)
    assert (once.matched, once.matches_ended) == (1, 1)
    assert [row.idle_ms for row in answer.branches] == [500] * 3
    assert trunk.leased_ms == cluster.rules.lease_ms - 500
    assert [cluster.segments[each] for each in trunk.segments] == ["one"]
    assert list(trunk.replicas) == [3]


def test_what_is_used_below_a_branch_uses_it(new_cluster: NewCluster) -> None:
    """A match uses, leases and counts the last block only."""
    cluster = new_cluster(one=20)
    cluster.put("abc")
    cluster.put("d", parent="b")
    cluster.after(3_000)
    cluster.match("abc")
    cluster.after(2_000)

    above, used, unused = found(cluster).branches

    assert (above.last, used.last, unused.last) == (b"b", b"c", b"d")
    assert (above.idle_ms, used.idle_ms, unused.idle_ms) == (2_000, 2_000, 5_000)
    assert (above.leased_ms, used.leased_ms, unused.leased_ms) == (8_000, 8_000, 0)
    assert (above.counted_ms, used.counted_ms) == (2_000, 2_000)


def test_missing_blocks_cut_a_chain_for_matches_and_are_shown(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=20)
    cluster.put("abcde")
    cluster.remove("b")
    cluster.start("f", parent="e")

    (row,) = found(cluster).branches

    assert (row.first, row.last, row.blocks) == (b"a", b"f", 6)
    assert (row.missing, row.being_written) == (1, 1)
    assert row.size == 4 * BLOCK
    assert block(cluster, "b").state == "missing"
    assert block(cluster, "f").state == "being_written"
    assert block(cluster, "?").state == "absent"
    assert cluster.match("abc") == 1


def test_what_is_lost_counts_as_missing_before_it_is_swept(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=20, two=20)
    cluster.put("ab", host="host-one")
    cluster.put("c", parent="b", replicas=2)
    first, second = cluster.where("c")
    assert (first, second) == ("one", "two")
    cluster.break_stream(second)
    cluster.put("d", parent="c", host="host-one")
    cluster.report(second)  # it is dead from now on
    (row,) = found_at_once(cluster).branches
    assert (row.blocks, row.missing, row.size) == (4, 0, 4 * BLOCK)
    assert [cluster.segments[segment] for segment in row.segments] == ["one"]
    assert list(row.replicas) == [4]

    cluster.break_stream(first)
    cluster.report(first)

    (row,) = found_at_once(cluster).branches
    assert (row.blocks, row.missing, row.size, list(row.segments)) == (4, 4, 0, [])


def test_the_chains_of_chosen_blocks(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=30)
    cluster.put("abcde")
    cluster.put("xyz", parent="c")
    cluster.put("klm")
    cluster.match("abcxy")

    answer = found(cluster, keys="dyd?")

    assert rows(answer) == [("a", "c", 0), ("x", "y", 1), ("d", "d", 1)]
    assert answer.branches[1].matches_ended == 1
    assert found(cluster, keys="?").branches == []
    assert found(cluster, namespace="unknown", keys="a").branches == []
    assert found(cluster, namespace="unknown") == calls.ChainsReply(EPOCH, 0, [], True)


def test_replicas_pins_and_the_end_of_a_lifetime(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=20, two=20)
    cluster.put("ab", replicas=2)
    cluster.put("c", parent="b", host="host-one")
    cluster.state.keeping.pin(0, calls.Pin(NAMESPACE, keys_of("b"), 5_000))
    cluster.put("d", parent="c", ttl_ms=1_000, host="host-one")

    (row,) = found(cluster).branches
    names = {cluster.segments[s]: n for s, n in zip(row.segments, row.replicas, strict=True)}
    assert names == {"one": 4, "two": 2}
    assert (row.blocks, row.missing, row.pinned) == (4, 0, 2)
    assert 0 < block(cluster, "b").pinned_ms <= 5_064
    assert block(cluster, "a").pinned_ms == 0
    assert len(block(cluster, "a").segments) == 2

    cluster.now_ms += 1_100  # and no work yet
    assert block(cluster, "d").state == "missing"


def test_the_blocks_above_one(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=20)
    cluster.put("abcde")
    cluster.after(100)
    before = cluster.state.traffic.spaces(NAMESPACE)[0].askers.all()

    def told(keys: str, above: int) -> list[tuple[str, str]]:
        request = calls.Blocks(NAMESPACE, keys_of(keys), above)
        answer = cluster.state.chains.blocks(cluster.now_ms, request)
        return [(each.key.decode(), each.parent.decode()) for each in answer.blocks]

    assert told("ae", 3) == [("a", ""), ("e", "d"), ("d", "c"), ("c", "b"), ("b", "a")]
    assert told("b", 9) == [("b", "a"), ("a", "")]
    assert told("e?", 9) == [("e", "d"), ("?", "")]
    assert cluster.state.chains.blocks(0, calls.Blocks(OTHER, keys_of("a"), 1)).blocks == [
        calls.BlockStatus(Key(b"a"), "absent", b"", 0, 0, 0, 0, 0, 0, [])
    ]
    assert block(cluster, "e").idle_ms == 100, "to be asked about is no use"
    assert block(cluster, "e").leased_ms == 0
    assert cluster.state.traffic.spaces(NAMESPACE)[0].askers.all() == before


def test_leaves_of_a_large_namespace_are_found_among_its_newest_records(
    new_cluster: NewCluster,
) -> None:
    count = ONE_SHARD_RECORDS + 3_000
    cluster = new_cluster(one=count + 10)
    cluster.put([f"k{number}" for number in range(count)], chain=False)
    cluster.after(10)
    cluster.put("xyz")

    answer = found(cluster)

    assert rows(answer)[0] == ("x", "z", 0)
    assert len(answer.branches) == CHAINS_MAX


# --- counts ---------------------------------------------------------------------------------------


def test_what_is_matched_again_and_again_keeps_its_count() -> None:
    tips = MatchTips()
    for number in range(50 * TIPS_MAX):
        tips.matched(number, Key(b"%d" % number))
        if number % (TIPS_MAX // 2) == 0:
            tips.matched(number, Key(b"hot"))
        assert len(tips.items()) <= 2 * TIPS_MAX

    known = dict(tips.items())

    assert (known[Key(b"hot")].matched, known[Key(b"hot")].first_ms) == (100, 0)
    assert Key(b"0") not in known


def test_every_namespace_of_a_match_counts_and_only_matches_do(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=20)
    cluster.put("ab")
    cluster.put("ab", namespace=OTHER)
    cluster.lookup("ab")
    cluster.present("ab")
    request = calls.MatchPrefix([NAMESPACE, OTHER, Namespace("none")], keys_of("abc"), False)
    cluster.state.asking.find(cluster.now_ms, request)

    counts = {row.namespace: row.matched for row in found(cluster, "").branches}
    assert counts == {NAMESPACE: 1, OTHER: 1}
    assert cluster.state.traffic.spaces("none")[0].tips.items() == []


def test_a_block_that_was_evicted_or_removed_is_no_tip_any_more(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=20)
    cluster.put("abc")
    cluster.match("abc")
    cluster.remove("c")

    assert rows(found(cluster)) == [("a", "b", 0)]
    assert found(cluster).branches[0].matched == 0


# --- bounds ---------------------------------------------------------------------------------------


def test_walks_end_after_so_many_records_and_say_so(
    new_cluster: NewCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chains, "STEPS", 100)
    monkeypatch.setattr(chains, "STEPS_MAX", 500)
    cluster = new_cluster(one=1_100)
    names = [f"k{number}" for number in range(1_000)]
    cluster.put(names)
    cluster.match(names)

    answer = found(cluster)

    assert not answer.complete
    (row,) = answer.branches
    assert row.truncated
    assert 400 <= row.blocks <= 500
    assert (row.last, row.depth) == (b"k999", 999)


def test_there_are_so_many_branches_at_most(
    new_cluster: NewCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chains, "BRANCHES_MAX", 10)
    cluster = new_cluster(one=1_100)
    trunk = [f"t{number}" for number in range(100)]
    cluster.put(trunk)
    for name in trunk:
        cluster.put([f"{name}-leaf"], parent=name)

    answer = found(cluster)

    assert len(answer.branches) == 10
    assert not answer.complete
    assert [row for row in answer.branches if row.truncated]


def test_a_tip_that_is_removed_before_it_is_walked_from_is_left_out(
    new_cluster: NewCluster,
) -> None:
    cluster = new_cluster(one=20)
    cluster.put("abc")
    cluster.put("xyz")
    later = cluster.state.chains.find(cluster.now_ms, calls.Chains(NAMESPACE))
    for _ in range(2):  # looks for tips, and chooses them
        cluster.state.chains.walk_on(cluster.now_ms)
    cluster.remove("xyz")
    cluster.work()

    answer = cluster.answers.pop(later.reply_id)

    assert isinstance(answer, calls.ChainsReply)
    assert rows(answer) == [("a", "c", 0)]


def test_so_many_questions_wait_and_can_be_given_up(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=20)
    cluster.put("ab")
    waiting: list[DeferredReply] = [
        cluster.state.chains.find(0, calls.Chains()) for _ in range(chains.WAITING_MAX)
    ]
    with pytest.raises(BusyError):
        cluster.state.chains.find(0, calls.Chains())
    cluster.state.cancel(waiting[0].reply_id)
    cluster.work()

    assert waiting[0].reply_id not in cluster.answers
    for later in waiting[1:]:
        assert isinstance(cluster.answers.pop(later.reply_id), calls.ChainsReply)
