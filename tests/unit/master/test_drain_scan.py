"""Draining a node: nothing new goes there, what it holds moves and is never lost on the way."""

from __future__ import annotations

import pytest

from kvstore import calls
from kvstore.calls import DrainStep, PutOutcome
from kvstore.errors import DrainedError, InvalidArgumentError
from kvstore.master.state.effects import CloseSession
from kvstore.memory.header import extent_bytes
from tests.support.invariants import check_invariants
from tests.unit.master.cluster import BLOCK, EXTENT, Cluster, keys_of
from tests.unit.master.conftest import NewCluster

STORED, REFUSED = PutOutcome.STORED, PutOutcome.REFUSED


@pytest.fixture
def two(new_cluster: NewCluster) -> Cluster:
    """Both empty, of ten blocks."""
    return new_cluster(a=10, b=10)


def start(
    cluster: Cluster,
    node: str,
    cursor: int = 0,
    *,
    limit: int = 100,
    bytes_max: int = 1 << 30,
    evict_up_to: calls.Version = calls.NO_VERSION,
) -> calls.StartMovesReply:
    request = calls.StartMoves(node, cursor, limit, bytes_max, evict_up_to=evict_up_to)
    result = cluster.state.copying.start_moves(cluster.now_ms, request)
    cluster._settle()
    reply = cluster.reply(result)
    assert isinstance(reply, calls.StartMovesReply)
    return reply


def move(
    cluster: Cluster, node: str, evict_up_to: calls.Version = calls.NO_VERSION, limit: int = 100
) -> list[PutOutcome]:
    """A whole pass, in which every copy succeeds."""
    outcomes: list[PutOutcome] = []
    cursor = 0
    while True:
        started = start(cluster, node, cursor, limit=limit, evict_up_to=evict_up_to)
        outcomes += cluster.end(started.grants)
        cursor = started.next_cursor
        if not cursor:
            return outcomes


def holds(cluster: Cluster, node: str) -> str:
    """The keys of what lies there, of those with one letter."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    there = cluster.present(letters)
    return "".join(name for name in there if node in cluster.where(name))


def state_of(cluster: Cluster, node: str) -> str:
    return next(each.state for each in cluster.status().nodes if each.name == node)


def test_nothing_new_goes_there_and_what_is_there_is_read(two: Cluster) -> None:
    two.put("abc", host="host-a")
    assert holds(two, "a") == "abc"
    two.drain("a")
    assert state_of(two, "a") == "draining"
    two.put("de", parent="c", host="host-a")  # neither the parent nor the host decides
    two.put("x", host="host-a")
    assert holds(two, "b") == "dex"
    assert two.match("abcde") == 5
    assert two.lookup("a") == [["a"]]


def test_undone_it_is_chosen_again(two: Cluster) -> None:
    two.drain("a")
    two.drain("a", DrainStep.UNDO)
    assert state_of(two, "a") == "alive"
    two.put("a", host="host-a")
    assert holds(two, "a") == "a"


def test_all_that_it_holds_moves_as_a_chain(two: Cluster) -> None:
    two.put("abc", host="host-a")
    two.put("x", host="host-a")
    before = two.stat("b").version
    two.drain("a")
    assert move(two, "a") == [STORED] * 4
    assert holds(two, "b") == "abcx"
    assert two.match("abc") == 3
    assert two.stat("b").version > before
    assert two.stat("b").parent == b"a"
    assert move(two, "a") == []
    two.after(two.rules.lease_ms)
    assert two.drain("a").used == 0, "the old bytes are free one lease later"


def test_a_chain_goes_to_one_node(new_cluster: NewCluster) -> None:
    cluster = new_cluster(a=40, b=20, c=20)
    names = [f"{number:02d}" for number in range(16)]
    cluster.put(names, host="host-a")
    cluster.put("x", host="host-b")  # so c has more room now
    cluster.drain("a")
    cursor = 0
    while True:  # three at a time: the later ones find their parents moved
        started = start(cluster, "a", cursor, limit=3)
        cluster.end(started.grants)
        cursor = started.next_cursor
        if not cursor:
            break
    assert {tuple(cluster.where(name)) for name in names} == {("c",)}


def test_the_bytes_and_objects_of_one_call_are_bounded(two: Cluster) -> None:
    two.put("abcdef", chain=False, host="host-a")
    two.drain("a")
    assert len(start(two, "a", limit=2).keys) == 2
    assert len(start(two, "a", bytes_max=3 * BLOCK).keys) == 3
    assert len(start(two, "a", bytes_max=0).keys) == 1, "one at least"


def test_an_old_view_is_told_that_its_bytes_are_not_kept(two: Cluster) -> None:
    two.put("a", host="host-a")
    old = two.stat("a").version
    assert two.lookup("a") == [["a"]]
    two.drain("a")
    move(two, "a")
    assert not two.renew("a", old)
    assert two.renew("a", two.stat("a").version)
    two.after(two.rules.lease_ms - 500)
    assert two.drain("a").used == EXTENT, "what was promised before is kept"


def test_what_was_removed_meanwhile_stays_removed(two: Cluster) -> None:
    two.put("ab", host="host-a")
    two.drain("a")
    started = start(two, "a")
    assert two.remove("b") == [1]
    assert two.end(started.grants) == [STORED, REFUSED]
    assert two.present("ab") == "a"
    two.after(two.rules.put_deadline_ms + two.rules.quarantine_ms + 1_000)  # it may have written
    free = sum(s.size - s.used for n in two.status().nodes for s in n.segments if n.name == "b")
    check_invariants(two.state)
    assert two.status().nodes[1].segments[0].used == EXTENT, free


@pytest.mark.parametrize("ends", [True, False])
def test_a_copy_of_what_was_removed_is_wiped_again_when_its_writer_has_ended(
    two: Cluster, ends: bool
) -> None:
    """A writer through shared memory cannot be cut: its header may land behind the first wiping."""
    two.put("a", host="host-a")
    two.drain("a")
    grants = start(two, "a").grants
    two.remove("a")
    two.wipes_at_once = False
    if ends:
        assert two.end(grants) == [REFUSED]
    else:
        assert two.revoke(grants, quiesced=True) == 0
    ((_, order),) = two.orders
    assert (order.offsets, order.counters) == (list(grants.offsets), list(grants.tokens))
    assert list(order.disconnect_clients) == [], "it tells the node that nothing comes any more"
    check_invariants(two.state)


def test_what_was_replaced_meanwhile_keeps_the_new_bytes(two: Cluster) -> None:
    two.put("a", host="host-a")
    two.drain("a")
    started = start(two, "a")
    two.put("a", overwrite=True)  # is not told that somebody else writes
    newer = two.stat("a").version
    assert two.end(started.grants) == [REFUSED]
    assert two.stat("a").version == newer


def test_a_replacement_that_began_first_ends_last(two: Cluster) -> None:
    two.put("a", host="host-a")
    two.drain("a")
    grants = two.start("a", overwrite=True)
    started = start(two, "a")
    assert (started.skipped, list(started.keys)) == (1, [])
    assert two.end(grants) == [STORED]
    assert holds(two, "b") == "a"


def test_two_that_move_one_object(two: Cluster) -> None:
    two.put("a", host="host-a")
    two.drain("a")
    first, second = start(two, "a"), start(two, "a")
    assert two.end(second.grants) == [STORED]
    assert two.end(first.grants) == [REFUSED]
    two.after(two.rules.lease_ms)
    assert sum(s.used for n in two.status().nodes for s in n.segments) == EXTENT


def test_a_mover_that_dies_costs_nothing(two: Cluster) -> None:
    two.put("abc", host="host-a")
    two.drain("a")
    started = start(two, "a")
    two.after(two.rules.put_deadline_ms + two.rules.quarantine_ms + 1_000)
    assert two.end(started.grants) == [REFUSED] * 3
    assert holds(two, "a") == "abc"
    assert move(two, "a") == [STORED] * 3


def test_what_was_used_later_makes_room_for_itself(new_cluster: NewCluster) -> None:
    cluster = new_cluster(a=2, b=2)
    cluster.put("o", host="host-a")  # older than what is on b
    cluster.after(20_000)
    cluster.put("pq", chain=False, host="host-b")
    cluster.after(20_000)
    cluster.put("n", host="host-a")  # newer
    cluster.after(20_000)
    began = cluster.drain("a").began
    started = start(cluster, "a", evict_up_to=began)
    assert (list(started.keys), started.remaining, started.remaining_bytes) == (
        keys_of("n"),
        1,
        BLOCK,
    )
    assert cluster.end(started.grants) == [STORED]
    assert len(cluster.present("pq")) == 1
    assert cluster.present("no") == "no", "o waits where it is"


def test_without_another_node_all_is_left(new_cluster: NewCluster) -> None:
    cluster = new_cluster(a=4)
    cluster.put("ab")
    cluster.drain("a")
    left = cursor = 0
    while True:  # one at a time, which the chain does not fit into
        started = start(cluster, "a", cursor, limit=1)
        assert list(started.keys) == []
        left += started.remaining
        cursor = started.next_cursor
        if not cursor:
            break
    assert left == 2
    assert holds(cluster, "a") == "ab"


def test_a_chain_is_as_recent_as_its_tip(new_cluster: NewCluster) -> None:
    """Its first blocks were put long ago, and are what every match needs."""
    cluster = new_cluster(a=4, b=4)
    cluster.put("pqr", host="host-a")
    cluster.after(20_000)
    cluster.put("wxyz", chain=False, host="host-b")
    cluster.after(20_000)
    assert cluster.match("pqr") == 3
    cluster.after(20_000)
    began = cluster.drain("a").began
    assert move(cluster, "a", began) == [STORED] * 3
    assert cluster.match("pqr") == 3
    assert len(cluster.present("wxyz")) == 1


def test_nothing_makes_room_unless_the_drain_says_so(new_cluster: NewCluster) -> None:
    """Not even an object that no root leads to."""
    cluster = new_cluster(a=2, b=2)
    cluster.put("pq", host="host-b")
    cluster.remove("p")
    cluster.after(60_000)
    cluster.put("mn", chain=False, host="host-a")
    cluster.after(20_000)
    cluster.drain("a")
    started = start(cluster, "a")
    assert (len(started.keys), started.remaining, started.evicted) == (1, 1, 0)
    cluster.end(started.grants)
    assert cluster.present("qmn") == "qmn"


@pytest.mark.parametrize("limit", [1, 100])
def test_a_drain_evicts_nothing_that_it_has_moved(new_cluster: NewCluster, limit: int) -> None:
    """Later ones of a pass were used more recently than those before them. The node stays with
    what finds no room then."""
    cluster = new_cluster(a=8, b=3)
    cluster.put("x", host="host-b")
    cluster.after(20_000)
    for name in "abcdefg":
        cluster.put(name, host="host-a")
        cluster.after(20_000)
    began = cluster.drain("a").began
    assert move(cluster, "a", began, limit) == [STORED] * 3
    cluster.after(20_000)
    assert cluster.drain("a").began == began, "the drain is begun again"
    assert move(cluster, "a", began, limit) == []
    assert cluster.present("abcdefg") == "abcdefg"
    assert (len(holds(cluster, "b")), len(holds(cluster, "a"))) == (3, 4)
    assert cluster.present("x") == "", "it was used before all of them"


def test_memory_that_is_not_given_out_yet_is_waited_for(new_cluster: NewCluster) -> None:
    """A node that has come back, and every node after a restart of the master."""
    cluster = new_cluster(a=4, b=4)
    cluster.put("a", host="host-a")
    cluster.join("b", again=True)
    cluster.drain("a")
    started = start(cluster, "a")
    assert (list(started.keys), started.remaining, started.skipped) == ([], 0, 1)
    cluster.after(cluster.rules.lease_ms + 1_000)
    assert move(cluster, "a") == [STORED]


def test_replicas_stay_as_many_as_they_were(new_cluster: NewCluster) -> None:
    cluster = new_cluster(a=4, b=4, c=4, d=4)
    cluster.put("a", replicas=2, host="host-a")
    cluster.put("z", host="host-a")
    cluster.drain("a")
    for _ in range(2):
        move(cluster, "a")
    assert len(cluster.where("a")) == 2
    assert "a" not in cluster.where("a")
    assert cluster.where("z") != ["a"]


def test_it_leaves_when_it_is_told_to_and_is_told_why(two: Cluster) -> None:
    two.put("a", host="host-a")
    with pytest.raises(InvalidArgumentError, match="not draining"):
        two.drain("a", DrainStep.LEAVE)
    two.drain("a")
    move(two, "a")
    two.state.nodes.drain(two.now_ms, calls.Drain("a", DrainStep.LEAVE))
    hangups = [effect for effect in two.state.effects if isinstance(effect, CloseSession)]
    assert [(each.session, type(each.error)) for each in hangups] == [
        (two.sessions["a"], DrainedError)
    ]
    two._settle()
    two.silent.add("a")
    assert [node.name for node in two.status().nodes] == ["b"]
    assert two.match("a") == 1
    assert two.drain("a", DrainStep.LEAVE).used == 0, "asked again, it has left"
    with pytest.raises(DrainedError):  # its stream broke before it heard
        two.join("a", resume=True)
    two.join("a", 10)  # started again, later
    assert state_of(two, "a") == "alive"


def test_a_node_that_is_not_there(two: Cluster) -> None:
    for step in (DrainStep.BEGIN, DrainStep.UNDO):
        with pytest.raises(InvalidArgumentError, match="no node x"):
            two.drain("x", step)
    with pytest.raises(InvalidArgumentError, match="no node x"):
        start(two, "x")
    with pytest.raises(InvalidArgumentError, match="not draining"):
        start(two, "a")


def test_it_is_drained_still_after_it_resumed_or_joined_anew(two: Cluster) -> None:
    two.drain("a")
    two.break_stream("a")
    two.join("a", resume=True)
    assert state_of(two, "a") == "draining"
    two.join("a", again=True)
    assert state_of(two, "a") == "draining"
    two.put("x", host="host-a")
    assert holds(two, "b") == "x"


def test_puts_under_way_there_are_counted(two: Cluster) -> None:
    grants = two.start("ab", host="host-a")
    assert two.drain("a").pending == 2
    assert two.end(grants) == [STORED] * 2
    drained = two.drain("a")
    assert (drained.pending, drained.used) == (0, 2 * extent_bytes(BLOCK))
