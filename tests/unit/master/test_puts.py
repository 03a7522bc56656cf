"""The two phases of a put: tokens, deadlines, outcomes, allocations, overwriting."""

from __future__ import annotations

import pytest

from kvstore import calls
from kvstore.calls import PutOutcome, Version
from kvstore.errors import (
    BusyError,
    InvalidArgumentError,
    KVStoreError,
    NoSpaceError,
    ValueTooLargeError,
)
from kvstore.limits import REPLICAS_MAX, Key
from kvstore.master.state.effects import DeferredReply
from kvstore.master.state.rules import MasterRules
from tests.unit.master.cluster import BLOCK, EPOCH, EXTENT, NAMESPACE, Cluster, keys_of
from tests.unit.master.conftest import NewCluster

LEASE_MS = 10_000
DEADLINE_MS = 30_000
QUARANTINE_MS = 20_000
WRITE, FOUND, BEING_WRITTEN = PutOutcome.WRITE, PutOutcome.FOUND, PutOutcome.BEING_WRITTEN
STORED, REFUSED = PutOutcome.STORED, PutOutcome.REFUSED


# --- outcomes ----------------------------------------------------------------------------------


def test_an_object_is_there_only_after_put_end(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=4)
    grants = cluster.start("ab")
    assert cluster.match("ab") == 0

    assert cluster.end(grants) == [STORED, STORED]

    assert cluster.match("ab") == 2


def test_what_is_there_is_found_and_what_is_written_is_left_to_its_writer(
    new_cluster: NewCluster,
) -> None:
    cluster = new_cluster(one=8)
    cluster.put("a")
    cluster.start("b", parent="a")

    grants = cluster.start("abc")

    assert list(grants.outcomes) == [FOUND, BEING_WRITTEN, WRITE]
    assert len(grants.tokens) == 1
    assert (grants.epoch, grants.deadline_ms) == (EPOCH, DEADLINE_MS)


def test_a_complete_object_is_found_although_it_is_being_overwritten(
    new_cluster: NewCluster,
) -> None:
    cluster = new_cluster(one=4)
    cluster.put("a")
    cluster.start("a", overwrite=True)

    assert list(cluster.start("a").outcomes) == [FOUND]
    assert list(cluster.start("a", overwrite=True).outcomes) == [BEING_WRITTEN]


def test_a_lost_object_is_written_again_at_its_new_place_in_the_forest(
    new_cluster: NewCluster,
) -> None:
    cluster = new_cluster(one=4, two=4)
    cluster.put("abc", host="host-one")
    cluster.silent.add("one")
    cluster.after(5_500)
    cluster.now_ms += 1_000
    cluster.state.tick(cluster.now_ms)  # dead, and nothing is swept yet

    grants = cluster.start("xc")
    assert list(grants.outcomes) == [WRITE, WRITE]
    cluster.end(grants)

    assert cluster.match("xc") == 2
    cluster.work()
    assert [(row.objects, row.size) for row in cluster.status().namespaces] == [(2, 2 * BLOCK)]


@pytest.mark.parametrize("replicas", [0, REPLICAS_MAX + 1])
def test_replicas_out_of_range_are_refused(new_cluster: NewCluster, replicas: int) -> None:
    with pytest.raises(InvalidArgumentError):
        new_cluster(one=4).start("a", replicas=replicas)


def test_a_chain_that_would_bite_its_tail_is_refused_and_nothing_is_kept(
    new_cluster: NewCluster,
) -> None:
    cluster = new_cluster(one=8)
    cluster.put("abc")
    cluster.remove("a")
    cluster.after(LEASE_MS)

    with pytest.raises(InvalidArgumentError):
        cluster.start("xyza", parent="c")
    with pytest.raises(InvalidArgumentError):
        cluster.start("xy", parent="y")

    assert cluster.present("abcxyz") == "bc"
    assert cluster.free_blocks() == 6
    assert not cluster.stat("x").row


def test_a_value_larger_than_any_segment_is_refused_at_once(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=4, two=8)

    with pytest.raises(ValueTooLargeError) as refused:
        cluster.start("a", size=8 * EXTENT)

    assert refused.value.fields["segment_bytes_max"] == 8 * EXTENT
    cluster.start("a", size=7 * EXTENT)


def test_no_more_puts_are_under_way_than_allowed(new_cluster: NewCluster) -> None:
    cluster = new_cluster(rules=MasterRules(pending_puts_max=3), one=8)
    cluster.put("xyz")
    grants = cluster.start("ab")

    with pytest.raises(BusyError):
        cluster.start("cd")
    with pytest.raises(BusyError):
        cluster.start("cdef")
    assert list(cluster.start("xyz").outcomes) == [FOUND] * 3  # writes nothing

    cluster.end(grants)
    cluster.start("cd")


# --- tokens and deadlines ----------------------------------------------------------------------


def test_a_token_is_good_once(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=4)
    grants = cluster.start("a")

    assert cluster.end(grants) == [STORED]
    assert cluster.end(grants) == [REFUSED]
    assert cluster.revoke(grants, quiesced=True) == 0
    assert cluster.present("a") == "a"


def test_a_token_of_another_epoch_is_refused(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=4)
    grants = cluster.start("a")

    assert cluster.end_tokens(grants.tokens, epoch=EPOCH - 1) == [REFUSED]
    assert not cluster.renew_token(grants.tokens[0], epoch=EPOCH - 1)

    assert cluster.end(grants) == [STORED]


def test_a_token_is_good_until_its_deadline(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=4)
    in_time, late = cluster.start("a"), cluster.start("b")

    cluster.now_ms += DEADLINE_MS
    assert cluster.end(in_time) == [STORED]
    cluster.now_ms += 1
    assert cluster.end(late) == [REFUSED]

    assert cluster.present("ab") == "a"


def test_a_put_that_ends_too_late_leaves_its_memory_in_quarantine(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=1)
    grants = cluster.start("a")

    cluster.after(DEADLINE_MS + 1)
    with pytest.raises(NoSpaceError):
        cluster.start("b")

    cluster.after(QUARANTINE_MS + 1)
    cluster.put("b")
    assert cluster.end(grants) == [REFUSED]
    assert "puts_expired" in cluster.notices


def test_an_expired_put_makes_way_for_another_writer(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=2)
    old = cluster.start("a")
    cluster.after(DEADLINE_MS + 1)

    new = cluster.start("a")

    assert list(new.outcomes) == [WRITE]
    assert cluster.end(old) == [REFUSED]
    assert cluster.end(new) == [STORED]


def test_a_settled_revocation_frees_at_once(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=1)
    grants = cluster.start("a")

    assert cluster.revoke(grants, quiesced=True) == 1

    cluster.put("b")
    assert cluster.match("a") == 0


def test_another_revocation_frees_after_deadline_and_quarantine(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=1)
    grants = cluster.start("a")

    assert cluster.revoke(grants, quiesced=False) == 1

    cluster.after(DEADLINE_MS + QUARANTINE_MS - 1)
    with pytest.raises(NoSpaceError):
        cluster.start("b")
    cluster.after(1)
    cluster.put("b")


def _cut(cluster: Cluster) -> list[tuple[int, int]]:
    """The connections that nodes are ordered to end, in orders that are not carried out yet."""
    orders = [order for _, order in cluster.orders]
    pairs = [zip(o.disconnect_clients, o.disconnect_connections, strict=True) for o in orders]
    return [pair for of_order in pairs for pair in of_order]


@pytest.mark.parametrize(
    ("connections", "cut"), [((), [(77, 0)]), ((5,), [(77, 5)]), ((5, 6), [(77, 5), (77, 6)])]
)
def test_what_may_still_carry_bytes_of_a_revoked_put_is_cut(
    new_cluster: NewCluster, connections: tuple[int, ...], cut: list[tuple[int, int]]
) -> None:
    cluster = new_cluster(one=4)
    grants = cluster.start("ab", client_number=77)
    cluster.wipes_at_once = False

    cluster.revoke(grants, quiesced=False, connections=connections)

    assert _cut(cluster) == cut
    assert [order.counters for _, order in cluster.orders] == [list(grants.tokens)]


def test_nothing_is_cut_for_a_settled_put(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=4)
    grants = cluster.start("a", client_number=77)
    cluster.wipes_at_once = False

    cluster.revoke(grants, quiesced=True)

    assert _cut(cluster) == []
    assert [order.counters for _, order in cluster.orders] == [list(grants.tokens)]


def test_the_connections_of_a_client_whose_put_expired_are_cut(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=4)
    cluster.start("a", client_number=77)
    cluster.start("b", client_number=77)
    cluster.start("c", client_number=78)
    cluster.wipes_at_once = False

    cluster.after(DEADLINE_MS + 1)

    assert sorted(set(_cut(cluster))) == [(77, 0), (78, 0)]


def test_a_removal_waits_until_an_attempt_that_was_given_up_is_cut_and_wiped(
    new_cluster: NewCluster,
) -> None:
    """The put is stored elsewhere by then; what its first attempt has sent may land at any time."""
    cluster = new_cluster(one=1, two=2)
    first = cluster.start("a", host="host-one", client_number=77)
    cluster.wipes_at_once = False
    cluster.revoke(first, quiesced=False, connections=[5])
    ((session, order),) = cluster.orders
    cluster.orders.clear()
    second = cluster.start("a")
    assert cluster.end(second) == [STORED]

    removed = cluster.remove_later("a")

    assert isinstance(removed, DeferredReply)
    cluster.wipe()  # of the second
    assert removed.reply_id not in cluster.answers
    cluster.orders = [(session, order)]
    cluster.wipe()
    assert removed.reply_id in cluster.answers


def test_a_renewed_token_has_a_later_deadline_than_those_behind_it(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=4)
    first, second = cluster.start("a"), cluster.start("b")
    cluster.after(DEADLINE_MS // 2)
    assert cluster.renew_token(first.tokens[0])

    cluster.after(DEADLINE_MS // 2 + 1)

    assert cluster.end(second) == [REFUSED]
    assert cluster.end(first) == [STORED]


def test_a_put_whose_only_segment_died_is_refused(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=4, two=4)
    grants = cluster.start("a", host="host-one")
    replicated = cluster.start("b", replicas=2)

    cluster.kill("one")

    assert cluster.end(grants) == [REFUSED]
    assert not cluster.renew_token(replicated.tokens[0])
    assert cluster.end(replicated) == [STORED]
    assert cluster.where("b") == ["two"]


# --- allocations -------------------------------------------------------------------------------


def test_a_committed_allocation_is_leased_to_its_owner(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=1)
    cluster.commit(cluster.allocate(), "a")

    cluster.after(cluster.rules.put_deadline_ms - 1)
    with pytest.raises(NoSpaceError):
        cluster.put("x")
    cluster.after(1)

    cluster.put("x")


@pytest.mark.parametrize("verb", ["lookup", "exists", "match", "renew"])
def test_a_reader_does_not_shorten_the_lease_of_the_owner(
    new_cluster: NewCluster, verb: str
) -> None:
    cluster = new_cluster(one=1)
    token = cluster.allocate()
    cluster.commit(token, "a")
    if verb == "exists":
        keys = keys_of("a")
        cluster.state.asking.exists(cluster.now_ms, calls.Exists(NAMESPACE, keys, lease=True))
    elif verb == "renew":
        assert cluster.renew("a", Version(EPOCH, token))
    else:
        assert getattr(cluster, verb)("a")

    cluster.after(cluster.rules.put_deadline_ms - 1)
    with pytest.raises(NoSpaceError):
        cluster.put("x")


def test_a_commit_of_more_than_was_allocated_is_refused_and_keeps_the_allocation(
    new_cluster: NewCluster,
) -> None:
    cluster = new_cluster(one=4)
    token = cluster.allocate()

    assert cluster.commit(token, "a", size=BLOCK + 1) is REFUSED
    assert cluster.commit(token, "a", size=BLOCK) is STORED


def test_a_commit_of_what_is_there_frees_the_allocation_after_its_quarantine(
    new_cluster: NewCluster,
) -> None:
    cluster = new_cluster(one=8)
    cluster.put("a")
    cluster.start("b")
    first, second = cluster.allocate(), cluster.allocate()

    assert cluster.commit(first, "a") is FOUND
    assert cluster.commit(second, "b") is BEING_WRITTEN

    assert cluster.free_blocks() == 4
    cluster.after(DEADLINE_MS + QUARANTINE_MS)
    assert cluster.free_blocks() == 6


def commit_and_next(cluster: Cluster, token: int, name: str) -> calls.CommitReply:
    """What a client sends that has copied its payload, and goes on with another one."""
    request = calls.Commit(
        EPOCH, token, NAMESPACE, Key(name.encode()), None, BLOCK, False, quiesced=True,
        next_size=BLOCK,
    )  # fmt: skip
    reply = cluster.reply(cluster.state.putting.commit(cluster.now_ms, request))
    assert isinstance(reply, calls.CommitReply)
    return reply


def test_the_end_of_a_put_brings_the_memory_of_the_next(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=4)
    token, ahead = cluster.allocate(), 0
    for name in "abcdef":  # the pool is full from the fourth on
        reply = commit_and_next(cluster, token, name)
        assert reply.outcome == STORED
        assert cluster.present(name) == name, "it was not evicted for the next one"
        cluster.after(10)
        ahead += reply.next_token > 0
        token = reply.next_token or cluster.allocate()
    assert ahead >= 3
    assert cluster.commit(token, "last") is STORED


def test_what_is_there_frees_the_memory_of_a_put_at_once(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=4)
    cluster.put("a")
    token = cluster.allocate()
    assert cluster.free_blocks() == 2
    assert commit_and_next(cluster, token, "a") == calls.CommitReply(FOUND)
    assert cluster.free_blocks() == 3


def test_the_memory_of_a_put_that_never_comes_is_free_after_its_deadline(
    new_cluster: NewCluster,
) -> None:
    cluster = new_cluster(one=4)
    assert commit_and_next(cluster, cluster.allocate(), "a").next_token
    assert cluster.free_blocks() == 2
    cluster.after(DEADLINE_MS + QUARANTINE_MS + 1_000)
    assert cluster.free_blocks() == 3


def test_a_commit_on_a_segment_that_died_is_refused(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=4)
    token = cluster.allocate()

    cluster.kill("one")

    assert cluster.commit(token, "a") is REFUSED
    assert cluster.match("a") == 0


def test_a_commit_that_would_close_a_ring_keeps_the_allocation(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=8)
    cluster.put("ab")
    cluster.remove("a")
    token = cluster.allocate()

    with pytest.raises(InvalidArgumentError):
        cluster.commit(token, "a", parent="b")
    with pytest.raises(InvalidArgumentError):
        cluster.commit(token, "c", parent="c")

    assert cluster.commit(token, "c") is STORED


def test_a_put_cannot_be_committed_nor_an_allocation_ended(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=4)
    put, allocation = cluster.start("a").tokens[0], cluster.allocate()

    assert cluster.commit(put, "b") is REFUSED
    assert cluster.end_tokens([allocation]) == [REFUSED]

    assert cluster.end_tokens([put]) == [STORED]
    assert cluster.commit(allocation, "b") is STORED


# --- overwriting -------------------------------------------------------------------------------


def test_overwriting_makes_a_new_version_and_keeps_the_place_in_the_chain(
    new_cluster: NewCluster,
) -> None:
    cluster = new_cluster(one=8)
    cluster.put("abc")
    before = cluster.stat("b").version

    cluster.put("b", overwrite=True)

    assert cluster.stat("b").version.counter > before.counter
    assert cluster.match("abc") == 3


def test_the_old_version_is_read_until_the_new_one_is_there(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=4)
    cluster.put("a")
    before = cluster.stat("a").version

    grants = cluster.start("a", overwrite=True)

    assert cluster.match("a") == 1
    assert cluster.stat("a").version == before
    assert cluster.revoke(grants, quiesced=True) == 1
    assert cluster.stat("a").version == before


def test_overwritten_bytes_are_reused_only_after_lease_and_wipe(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=2)
    cluster.put("a")
    cluster.wipes_at_once = False
    ticket = _end_later(cluster, cluster.start("a", overwrite=True))
    assert ticket not in cluster.answers

    cluster.after(LEASE_MS)
    cluster.match("a")
    with pytest.raises(NoSpaceError):
        cluster.put("x")
    cluster.wipe()

    answer = cluster.answers[ticket]
    assert answer == calls.PutEndReply(bytes([STORED]))
    cluster.wipes_at_once = True
    cluster.put("x")
    assert cluster.present("ax") == "ax"


def test_removing_what_is_being_overwritten_leaves_the_new_version(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=4)
    cluster.put("ab")
    grants = cluster.start("b", overwrite=True)

    assert cluster.remove("b") == [1]
    assert cluster.match("ab") == 1

    assert cluster.end(grants) == [STORED]
    assert cluster.match("ab") == 2


def _end_later(cluster: Cluster, grants: calls.Grants) -> int:
    request = calls.PutEnd(EPOCH, list(grants.tokens))
    result = cluster.state.putting.put_end(cluster.now_ms, request)
    cluster.work()
    assert isinstance(result, DeferredReply)
    return result.reply_id


def test_sizes_and_keys_go_together(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=4)
    request = calls.PutStart(NAMESPACE, [Key(b"a")], [1, 2], None, True, 1, False, 0, "")

    with pytest.raises(KVStoreError):
        cluster.state.putting.put_start(0, request)
