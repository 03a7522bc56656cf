"""Removing and clearing: hidden at once, acknowledged when wiped, reused one lease later."""

from __future__ import annotations

import pytest

from kvstore import calls
from kvstore.calls import NO_VERSION, PutOutcome, Version
from kvstore.errors import NoSpaceError, UnavailableError
from kvstore.limits import Key, Namespace
from kvstore.master.state.effects import DeferredReply
from tests.support.invariants import check_invariants
from tests.unit.master.cluster import BLOCK, EPOCH, NAMESPACE, Cluster, claim_at
from tests.unit.master.conftest import NewCluster

LEASE_MS = 10_000


def _remove_later(cluster: Cluster, names: str) -> int:
    result = cluster.remove_later(names)
    assert isinstance(result, DeferredReply)
    return result.reply_id


def test_what_is_removed_is_gone(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=4)
    cluster.put("abc")

    assert cluster.remove("bx") == [1, 0]

    assert cluster.match("abc") == 1
    assert cluster.present("abc") == "ac"
    assert cluster.lookup("b") == [[]]
    assert cluster.remove("b") == [0]


def test_a_removal_of_nothing_is_acknowledged_at_once(new_cluster: NewCluster) -> None:
    assert new_cluster(one=4).remove_later("a") == calls.RemoveReply(b"\0")


def test_a_removal_is_hidden_at_once_and_acknowledged_when_wiped(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=4)
    grants = cluster.start("a")
    cluster.end(grants)
    cluster.wipes_at_once = False

    ticket = _remove_later(cluster, "a")

    assert cluster.match("a") == 0
    assert ticket not in cluster.answers
    ((_, order),) = cluster.orders
    assert (order.offsets, order.epochs, order.counters) == (
        list(grants.offsets),
        [EPOCH],
        list(grants.tokens),
    )
    cluster.wipe()
    assert cluster.answers[ticket] == calls.RemoveReply(b"\1")


def test_a_removal_of_replicas_waits_for_every_node(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=4, two=4)
    cluster.put("a", replicas=2)
    cluster.wipes_at_once = False
    ticket = _remove_later(cluster, "a")
    last = cluster.orders.pop()

    cluster.wipe()
    assert ticket not in cluster.answers
    cluster.orders = [last]
    cluster.wipe()

    assert ticket in cluster.answers


def marks_of(cluster: Cluster, node: str) -> list[Version]:
    """Those in the orders that the node has not done yet."""
    session = cluster.sessions[node]
    return [
        order.removal_watermark
        for to, order in cluster.orders
        if to == session and order.removal_watermark != NO_VERSION
    ]


def test_a_removal_that_outlives_its_node_waits_for_a_lease_and_a_mark(
    new_cluster: NewCluster,
) -> None:
    """The node may bring the object to a later master: the mark on all other memory says that its
    memory was away. It had the marks of before."""
    cluster = new_cluster(one=4, two=4)
    cluster.put("a", host="host-one")
    cluster.wipes_at_once = False
    ticket = _remove_later(cluster, "a")
    assert not marks_of(cluster, "two")

    cluster.kill("one")
    assert len(marks_of(cluster, "two")) == 1
    cluster.after(LEASE_MS)
    assert ticket not in cluster.answers
    cluster.wipe()

    assert cluster.answers[ticket] == calls.RemoveReply(b"\1")


def test_a_removal_that_has_its_mark_waits_for_readers_of_the_dead_node(
    new_cluster: NewCluster,
) -> None:
    cluster = new_cluster(one=4, two=4)
    cluster.put("a", host="host-one")
    cluster.wipes_at_once = False
    ticket = _remove_later(cluster, "a")

    cluster.kill("one")
    cluster.wipe()
    assert ticket not in cluster.answers  # a client with a lease may still read there

    cluster.after(LEASE_MS)
    assert ticket in cluster.answers


def test_a_removal_whose_last_node_dies_fails(new_cluster: NewCluster) -> None:
    """Nobody could record it, and the node may come back with the object after a restart."""
    cluster = new_cluster(one=4)
    cluster.put("ab", chain=False)
    cluster.wipes_at_once = False
    tickets = [_remove_later(cluster, "a"), _remove_later(cluster, "b")]

    cluster.kill("one")

    for ticket in tickets:
        assert isinstance(cluster.answers[ticket], UnavailableError)
    cluster.answers.clear()
    cluster.after(2 * LEASE_MS)
    assert not cluster.answers


def test_a_mark_that_a_dying_node_had_not_kept_is_not_waited_for(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=4, two=4, three=4)
    cluster.put("a", host="host-one")
    cluster.kill("three")
    cluster.wipes_at_once = False
    ticket = _remove_later(cluster, "a")  # orders the first mark since a node has died
    assert marks_of(cluster, "one")
    assert marks_of(cluster, "two")

    cluster.kill("one")
    cluster.wipe()
    cluster.after(LEASE_MS)

    assert cluster.answers[ticket] == calls.RemoveReply(b"\1")


def test_a_removal_waits_for_an_earlier_one_of_the_same_object(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=4)
    cluster.put("ab", chain=False)
    cluster.wipes_at_once = False
    first = _remove_later(cluster, "a")

    again, both = _remove_later(cluster, "a"), _remove_later(cluster, "ab")
    assert cluster.remove_later("x") == calls.RemoveReply(b"\0")

    last = cluster.orders.pop()
    cluster.wipe()
    assert set(cluster.answers) == {first, again}
    cluster.orders = [last]
    cluster.wipe()
    assert set(cluster.answers) == {first, again, both}


def test_a_wipe_is_ordered_again_when_a_broken_stream_is_resumed(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=4)
    cluster.put("a")
    cluster.break_stream("one")
    cluster.wipes_at_once = False
    ticket = _remove_later(cluster, "a")
    assert not cluster.orders

    cluster.join("one", resume=True)

    assert len(cluster.orders) == 1
    cluster.wipe()
    assert ticket in cluster.answers


def test_a_wipe_is_believed_once_and_only_from_its_own_node(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=4, two=4)
    cluster.put("a", host="host-one")
    cluster.wipes_at_once = False
    ticket = _remove_later(cluster, "a")
    ((_, order),) = cluster.orders

    cluster.say("two", calls.NodeWipeDone(order.wipe_seq))
    assert ticket not in cluster.answers
    cluster.say("one", calls.NodeWipeDone(order.wipe_seq))
    cluster.say("one", calls.NodeWipeDone(order.wipe_seq))
    assert ticket in cluster.answers

    cluster.after(LEASE_MS)
    cluster.say("one", calls.NodeWipeDone(order.wipe_seq))
    assert cluster.free_blocks() == 8


def test_removed_bytes_are_reused_one_lease_later(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=1)
    cluster.put("a")
    cluster.match("a")
    cluster.after(1)
    cluster.remove("a")

    cluster.after(LEASE_MS - 1)
    with pytest.raises(NoSpaceError):
        cluster.put("x")
    cluster.after(1)

    cluster.put("x")


def test_removed_bytes_are_not_reused_before_they_are_wiped(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=1)
    cluster.put("a")
    cluster.wipes_at_once = False
    cluster.remove_later("a")

    cluster.after(2 * LEASE_MS)
    with pytest.raises(NoSpaceError):
        cluster.put("x")

    cluster.wipe()
    cluster.put("x")


def _stores(cluster: Cluster, how: str) -> int | None:
    """Stores ``a`` (or finds it, or gives an allocation its name): the ticket of the answer, if it
    has to wait."""
    state, now_ms = cluster.state, cluster.now_ms
    result: calls.Reply | DeferredReply
    if how == "commit":
        token = cluster.allocate()
        commit = calls.Commit(EPOCH, token, NAMESPACE, Key(b"a"), None, BLOCK, False)
        result = state.putting.commit(now_ms, commit)
    else:
        result = state.putting.put_end(now_ms, calls.PutEnd(EPOCH, cluster.start("a").tokens))
        if how == "found":  # by another client, meanwhile
            request = calls.PutStart(NAMESPACE, [Key(b"a")], [BLOCK], None, True, 1, False, 0, "")
            result = state.putting.put_start(now_ms, request)
    cluster._settle()
    return result.reply_id if isinstance(result, DeferredReply) else None


WAYS = ["put", "commit", "found"]


@pytest.mark.parametrize("how", WAYS)
def test_a_put_is_acknowledged_when_no_client_reads_what_was_removed(
    new_cluster: NewCluster, how: str
) -> None:
    """A client that remembers the place under its lease reads it until it is wiped. The removal may
    have been given up by its client meanwhile."""
    cluster = new_cluster(one=4, two=4)
    cluster.put("a")
    cluster.wipes_at_once = False
    removal = _remove_later(cluster, "a")

    ticket = _stores(cluster, how)

    assert cluster.present("a") == "a"
    assert ticket is not None
    assert ticket not in cluster.answers
    cluster.wipe()
    assert ticket in cluster.answers
    assert removal in cluster.answers


@pytest.mark.parametrize("how", WAYS)
def test_a_put_waits_for_the_last_lease_on_what_was_removed_from_a_dead_node(
    new_cluster: NewCluster, how: str
) -> None:
    cluster = new_cluster(one=4, two=4)
    cluster.put("a")
    cluster.kill(cluster.where("a")[0])
    _remove_later(cluster, "a")

    ticket = _stores(cluster, how)

    assert ticket is not None
    cluster.after(LEASE_MS - 2_000)
    assert ticket not in cluster.answers
    cluster.after(2_000)
    assert ticket in cluster.answers


def test_a_put_does_not_wait_for_what_no_client_can_read(new_cluster: NewCluster) -> None:
    """Nothing is wiped yet. But all leases have ended, or were on another object."""
    cluster = new_cluster(one=4)
    cluster.put("ab")
    cluster.wipes_at_once = False
    _remove_later(cluster, "b")
    assert cluster.end(cluster.start("c")) == [PutOutcome.STORED]
    _remove_later(cluster, "a")
    cluster.after(LEASE_MS)

    assert _stores(cluster, "put") is None

    cluster.wipe()


def test_a_put_under_way_is_not_removed(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=2)
    grants = cluster.start("a")

    assert cluster.remove("a") == [0]

    cluster.end(grants)
    assert cluster.match("a") == 1


@pytest.mark.parametrize("removes", ["key", "namespace", "all"])
def test_what_a_put_under_way_stores_after_a_removal_comes_back_with_its_node(
    new_cluster: NewCluster, removes: str
) -> None:
    cluster = new_cluster(one=4, two=4)
    cluster.put("b")
    first, second = cluster.start("a"), cluster.start("c")
    if removes == "key":
        cluster.remove("a")
    else:
        cluster.clear(10, "" if removes == "all" else NAMESPACE)
    cluster.end(first)
    node, offset = cluster.segments[first.segments[0]], first.offsets[0]
    version = cluster.stat("a").version
    earlier = version._replace(counter=version.counter - 1)
    cluster.revoke(second, quiesced=True)

    for allowed, claimed in ((False, earlier), (True, version)):
        cluster.kill(node)
        cluster.join(node, again=True, tells=False)
        cluster.tell(node, claim_at("a", claimed, offset))
        assert cluster.present("a") == ("a" if allowed else "")

    if removes != "key":
        cluster.clear(10, NAMESPACE)
        cluster.kill(node)
        cluster.join(node, again=True, tells=False)
        cluster.tell(node, claim_at("a", version, offset))
        assert cluster.present("a") == "", "removed after all"


def test_clearing_goes_in_slices(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=8)
    cluster.put("abcde")
    cluster.put("xy", namespace=Namespace("other"))

    assert cluster.clear(3) == calls.ClearReply(3, 2)
    assert cluster.clear(3) == calls.ClearReply(2, 0)
    assert cluster.clear(3) == calls.ClearReply(0, 0)

    assert [row.name for row in cluster.status().namespaces] == ["other"]
    assert cluster.clear(10, namespace="") == calls.ClearReply(2, 0)


def test_clearing_is_acknowledged_when_wiped(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=8)
    cluster.put("abc")
    cluster.wipes_at_once = False

    result = cluster.state.removing.clear(cluster.now_ms, calls.Clear(NAMESPACE, 10))

    assert isinstance(result, DeferredReply)
    cluster.work()
    assert result.reply_id not in cluster.answers
    cluster.wipe()
    assert cluster.answers[result.reply_id] == calls.ClearReply(3, 0)


def test_clearing_what_died_a_moment_ago_counts_every_object_once(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=8, two=4)
    cluster.put("b", host="host-one")
    cluster.put("c", parent="b", host="host-one")
    cluster.remove("b")
    cluster.put("a", host="host-two")
    cluster.put("b", parent="a", host="host-one")
    assert cluster.where("b") == ["two"]
    cluster.silent.add("two")
    cluster.after(5_000)
    cluster.now_ms += 2_000
    cluster.state.nodes.on_node_message(
        cluster.now_ms, cluster.sessions["one"], calls.NodeHeartbeat(1)
    )
    cluster.state.tick(cluster.now_ms)  # dead, and nothing is swept yet

    cluster.clear(10)

    check_invariants(cluster.state)
    cluster.work()
    assert cluster.status().namespaces == []
