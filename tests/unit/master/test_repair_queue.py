"""Objects with fewer replicas than they were put with get them back, within bounds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvstore import calls
from kvstore.calls import PutOutcome, Version
from kvstore.master.state import repair_queue
from kvstore.master.state.effects import DeferredReply, SendToNode
from kvstore.master.state.repair_queue import RepairRules
from kvstore.master.state.rules import MasterRules
from tests.unit.master.cluster import BLOCK, EPOCH, NAMESPACE, Cluster, claim_at, keys_of
from tests.unit.master.conftest import NewCluster

STORED, REFUSED = PutOutcome.STORED, PutOutcome.REFUSED
RULES = MasterRules()
AFTER_MS = RULES.repair.after_ms
SOON_MS = 3_000
"""A pass begins a second after a change."""


def rules(**repair: int) -> MasterRules:
    return replace(RULES, repair=RepairRules(**repair))


@pytest.fixture
def three(new_cluster: NewCluster) -> Cluster:
    """Empty, of twenty blocks each."""
    return new_cluster(a=20, b=20, c=20)


def ask(
    cluster: Cluster, node: str, *, limit: int = 100, bytes_max: int = 1 << 30
) -> calls.StartMovesReply:
    request = calls.StartMoves(node, 0, limit, bytes_max, client_number=7, repair=True)
    reply = cluster.reply(cluster.state.copying.start_moves(cluster.now_ms, request))
    assert isinstance(reply, calls.StartMovesReply)
    assert reply.keeps_version
    return reply


def is_asked(cluster: Cluster, node: str) -> bool:
    """Whether the answer to the node's beat says that there is something to copy."""
    cluster.state.nodes.on_node_message(
        cluster.now_ms, cluster.sessions[node], calls.NodeHeartbeat(9)
    )
    sent = [effect for effect in cluster.state.effects if isinstance(effect, SendToNode)]
    cluster._settle()
    return calls.MasterHeartbeat(9, True) in [effect.message for effect in sent]


def granted(reply: calls.StartMovesReply) -> str:
    return "".join(key.decode() for key in reply.keys)


def repair(cluster: Cluster) -> str:
    """Every node that is asked copies; the keys, in their order."""
    done = ""
    for node in list(cluster.sessions):
        if node not in cluster.silent and is_asked(cluster, node):
            started = ask(cluster, node)
            outcomes = cluster.end(started.grants)
            assert set(outcomes) <= {STORED}
            done += granted(started)
    return done


def short(cluster: Cluster) -> int:
    return dict(cluster.status().counters)["under_replicated_objects"]


# --- what is repaired --------------------------------------------------------------------------


def test_a_put_that_found_too_few_nodes_is_repaired_when_one_comes(
    new_cluster: NewCluster,
) -> None:
    cluster = new_cluster(a=20)
    cluster.put("a", replicas=2)
    assert short(cluster) == 1
    cluster.after(SOON_MS)
    assert not is_asked(cluster, "a")
    cluster.join("b", 20)
    version = cluster.stat("a").version
    cluster.after(SOON_MS)
    started = ask(cluster, "a")
    assert granted(started) == "a"
    assert started.sources.epochs == [version.epoch]
    assert cluster.where("a") == ["a"], "before it is copied"
    assert cluster.end(started.grants) == [STORED]
    assert sorted(cluster.where("a")) == ["a", "b"]
    assert cluster.stat("a").version == version
    assert short(cluster) == 0
    counters = dict(cluster.status().counters)
    assert (counters["repaired_objects"], counters["repaired_bytes"]) == (1, BLOCK)
    assert [node.stored_bytes for node in cluster.status().nodes] == [BLOCK, BLOCK]
    cluster.after(120_000)
    assert ask(cluster, "a").keys == ask(cluster, "b").keys == []


def test_a_replica_is_gone_when_its_node_has_been_dead_for_a_while(three: Cluster) -> None:
    three.put("a", replicas=2)
    gone = three.where("a")[1]
    three.kill(gone)
    three.after(SOON_MS)
    assert short(three) == 1, "counted at once"
    assert repair(three) == "", "it may come back with what it holds"
    three.after(AFTER_MS)
    assert repair(three) == "a"
    assert len(three.where("a")) == 2
    assert gone not in three.where("a")


def test_a_node_that_left_for_good_is_not_waited_for(three: Cluster) -> None:
    three.put("a", replicas=2)
    gone = three.where("a")[1]
    three.say(gone, calls.NodeLeave())
    three.silent.add(gone)
    three.after(SOON_MS)
    assert repair(three) == "a"


def test_a_chain_from_its_root(new_cluster: NewCluster) -> None:
    cluster = new_cluster(a=20, rules=rules(after_ms=0))
    cluster.put("abc", replicas=2)
    cluster.join("b", 20)
    cluster.after(SOON_MS)
    assert granted(ask(cluster, "a", limit=2)) == "ab"
    cluster.after(100)
    assert granted(ask(cluster, "a")) == "c"


def test_replicas_of_a_chain_lie_together(new_cluster: NewCluster) -> None:
    cluster = new_cluster(a=20)
    cluster.put("abc", replicas=2)
    for name in "bcd":
        cluster.join(name, 20)
    cluster.after(SOON_MS)
    assert repair(cluster) == "abc"
    assert len({*cluster.where("a"), *cluster.where("b"), *cluster.where("c")}) == 2


def test_it_goes_on_after_all_of_several_replicas_are_there(new_cluster: NewCluster) -> None:
    cluster = new_cluster(a=20)
    cluster.put("a", replicas=3)
    cluster.join("b", 20)
    cluster.join("c", 20)
    cluster.after(SOON_MS)
    assert repair(cluster) == "a"
    assert repair(cluster) == "a"
    assert sorted(cluster.where("a")) == ["a", "b", "c"]
    assert repair(cluster) == ""


# --- bounds ------------------------------------------------------------------------------------


def test_no_more_at_once_than_allowed(new_cluster: NewCluster) -> None:
    cluster = new_cluster(a=20, rules=rules(copies_max=2))
    cluster.put("abc", chain=False, replicas=2)
    cluster.join("b", 20)
    cluster.after(SOON_MS)
    first = ask(cluster, "a")
    assert len(first.keys) == 2
    assert not is_asked(cluster, "a")
    assert ask(cluster, "a").keys == []
    cluster.end(first.grants)
    assert is_asked(cluster, "a")
    assert len(ask(cluster, "a").keys) == 1


def test_no_more_bytes_at_once_but_one_object_always(new_cluster: NewCluster) -> None:
    cluster = new_cluster(a=20, rules=rules(bytes_max=BLOCK + 1))
    cluster.put("abc", chain=False, replicas=2)
    cluster.join("b", 20)
    cluster.after(SOON_MS)
    assert len(ask(cluster, "a").keys) == 1
    assert ask(cluster, "a").keys == []


def test_bytes_per_second(new_cluster: NewCluster) -> None:
    counted = repair_queue.OBJECT_COUNTS_FOR  # more than a block
    cluster = new_cluster(a=20, rules=rules(bytes_max=counted, bytes_per_s=counted // 2))
    cluster.put("abc", chain=False, replicas=2)
    cluster.join("b", 20)
    cluster.after(SOON_MS)
    assert len(repair(cluster)) == 1
    assert not is_asked(cluster, "a")
    cluster.after(1_000)
    assert len(repair(cluster)) == 1, "half of it is allowed by now, and it may be overdrawn"
    assert repair(cluster) == ""
    cluster.after(1_000)
    assert repair(cluster) == ""
    cluster.after(2_000)
    assert repair(cluster)


def test_nothing_is_evicted_and_a_16th_stays_free(new_cluster: NewCluster) -> None:
    cluster = new_cluster(a=40)
    cluster.put([f"k{index:02}" for index in range(20)], chain=False, replicas=2)
    cluster.join("b", 16)
    cluster.after(SOON_MS)
    started = ask(cluster, "a")
    assert len(started.keys) == 15
    cluster.end(started.grants)
    assert dict(cluster.status().counters).get("evicted_objects", 0) == 0
    assert short(cluster) == 5
    cluster.after(200_000)
    assert ask(cluster, "a").keys == []


def test_puts_that_wait_for_room_come_first(new_cluster: NewCluster) -> None:
    cluster = new_cluster(a=4)
    cluster.put("ab", chain=False, replicas=2)
    cluster.lookup("ab")
    cluster.join("b", 20)
    cluster.after(SOON_MS)
    assert is_asked(cluster, "a")
    cluster.wait("cdefghijklmnopqrstuvwxyz")
    assert ask(cluster, "a").keys == []


def test_nothing_while_a_node_is_suspect(three: Cluster) -> None:
    three.kill("c")
    three.put("a", replicas=3)
    three.join("d", 20)
    three.after(SOON_MS)
    assert any(is_asked(three, node) for node in "ab")
    three.break_stream("d")
    assert ask(three, "a").keys == ask(three, "b").keys == []
    three.join("d", resume=True)
    three.after(1_000)
    assert repair(three) == "a"


def test_a_node_that_is_drained_takes_no_copy(new_cluster: NewCluster) -> None:
    cluster = new_cluster(a=20)
    cluster.put("a", replicas=2)
    cluster.join("b", 20)
    cluster.drain("b")
    cluster.after(SOON_MS)
    assert ask(cluster, "a").keys == []


# --- what happens meanwhile --------------------------------------------------------------------


@pytest.fixture
def copying(new_cluster: NewCluster) -> tuple[Cluster, calls.StartMovesReply]:
    """``a`` is being copied from a to b."""
    cluster = new_cluster(a=20)
    cluster.put("a", replicas=2)
    cluster.join("b", 20)
    cluster.after(SOON_MS)
    started = ask(cluster, "a")
    assert granted(started) == "a"
    return cluster, started


def used(cluster: Cluster, node: str) -> int:
    return sum(s.used for n in cluster.status().nodes if n.name == node for s in n.segments)


def test_a_removal_waits_until_the_copy_is_cut_and_wiped(
    copying: tuple[Cluster, calls.StartMovesReply],
) -> None:
    cluster, started = copying
    version = cluster.stat("a").version
    cluster.wipes_at_once = False
    removed = cluster.remove_later("a")
    assert isinstance(removed, DeferredReply)
    orders = dict(cluster.orders)
    order = orders[cluster.sessions["b"]]
    assert order.offsets == list(started.grants.offsets)
    assert (order.epochs, order.counters) == ([version.epoch], [version.counter])
    assert order.disconnect_clients == [7]
    assert cluster.end(started.grants) == [REFUSED]
    assert removed.reply_id not in cluster.answers
    cluster.wipe()
    assert removed.reply_id in cluster.answers
    cluster.after(RULES.put_deadline_ms + RULES.quarantine_ms)
    cluster.wipe()
    assert used(cluster, "b") == 0


def test_a_replaced_object_gets_no_replica_of_the_old_bytes(
    copying: tuple[Cluster, calls.StartMovesReply],
) -> None:
    cluster, started = copying
    cluster.put("a", overwrite=True, host="host-a")
    assert cluster.end(started.grants) == [REFUSED]
    assert len(cluster.where("a")) == 1


def test_clearing_ends_copies(copying: tuple[Cluster, calls.StartMovesReply]) -> None:
    cluster, started = copying
    assert cluster.clear(100).removed == 1
    assert cluster.end(started.grants) == [REFUSED]


def test_retries_are_further_and_further_apart(
    copying: tuple[Cluster, calls.StartMovesReply],
) -> None:
    cluster, started = copying
    pauses: list[int] = []
    for _ in range(8):
        cluster.revoke(started.grants, quiesced=True)
        since = cluster.now_ms
        while not is_asked(cluster, "a"):
            cluster.after(1_000)
        started = ask(cluster, "a")
        pauses.append(cluster.now_ms - since)
    assert pauses == sorted(pauses)
    assert pauses[0] <= 3_000
    assert 30_000 <= pauses[-1] <= RULES.repair.pause_max_ms + 3_000


def test_a_copy_that_does_not_end_expires(copying: tuple[Cluster, calls.StartMovesReply]) -> None:
    cluster, started = copying
    cluster.after(RULES.put_deadline_ms + SOON_MS)
    assert cluster.end(started.grants) == [REFUSED]
    again = ask(cluster, "a")
    assert granted(again) == "a"
    assert again.grants.offsets != started.grants.offsets, "what may be written late is not used"


def test_a_copy_whose_target_died_is_made_elsewhere(
    copying: tuple[Cluster, calls.StartMovesReply],
) -> None:
    cluster, started = copying
    cluster.join("c", 20)
    cluster.kill("b")
    assert cluster.end(started.grants) == [REFUSED]
    cluster.after(SOON_MS)
    assert repair(cluster) == "a"
    assert sorted(cluster.where("a")) == ["a", "c"]


def test_a_copy_whose_source_died_is_refused(
    copying: tuple[Cluster, calls.StartMovesReply],
) -> None:
    cluster, started = copying
    cluster.kill("a")
    assert cluster.end(started.grants) == [REFUSED]
    assert cluster.present("a") == ""


def test_a_copy_of_one_version_is_made_once(copying: tuple[Cluster, calls.StartMovesReply]) -> None:
    cluster, started = copying
    cluster.join("c", 20)
    cluster.after(SOON_MS)
    assert ask(cluster, "a").keys == []
    assert cluster.end(started.grants) == [STORED]
    cluster.after(60_000)
    assert ask(cluster, "a").keys == []


# --- nodes that come back ----------------------------------------------------------------------


def test_a_node_that_comes_back_in_time_has_its_replica_again(three: Cluster) -> None:
    three.put("a", replicas=2)
    gone = three.where("a")[1]
    version, offset = three.stat("a").version, three.place("a", gone)[1]
    for _ in range(10):  # as often as it likes: dead replicas do not pile up
        three.kill(gone)
        three.join(gone, again=True, tells=False)
        three.tell(gone, claim_at("a", version, offset))
        assert len(three.where("a")) == 2
    three.after(AFTER_MS + SOON_MS)
    assert repair(three) == ""
    assert three.renew("a", version)


def test_a_node_that_comes_back_late_keeps_no_surplus(three: Cluster) -> None:
    three.put("a", replicas=2)
    gone = three.where("a")[1]
    version, offset = three.stat("a").version, three.place("a", gone)[1]
    three.kill(gone)
    three.after(AFTER_MS + SOON_MS)
    assert repair(three) == "a"
    three.join(gone, again=True, tells=False)
    three.tell(gone, claim_at("a", version, offset))
    assert gone not in three.where("a")
    assert len(three.where("a")) == 2
    three.after(RULES.lease_ms)
    assert used(three, gone) == 0


def test_a_copy_that_was_not_ended_comes_back_and_is_one_too_many(three: Cluster) -> None:
    three.put("a", replicas=2)
    first, gone = three.where("a")
    target = next(node for node in "abc" if node not in (first, gone))
    version, offset = three.stat("a").version, three.place("a", gone)[1]
    three.kill(gone)
    three.after(AFTER_MS + SOON_MS)
    started = ask(three, first)
    assert granted(started) == "a"
    three.kill(target)  # the header is whole there
    three.join(gone, again=True, tells=False)
    three.tell(gone, claim_at("a", version, offset))
    three.join(target, again=True, tells=False)
    three.tell(target, claim_at("a", version, started.grants.offsets[0]))
    assert sorted(three.where("a")) == sorted((first, gone))


def test_what_a_new_master_is_told_counts_as_it_is(new_cluster: NewCluster) -> None:
    """A master knows how many replicas were asked for only of puts that it has seen."""
    cluster = new_cluster(a=20, b=20, c=20)
    version = Version(EPOCH - 1, 3)
    for node in "ab":
        cluster.kill(node)
        cluster.join(node, again=True, tells=False)
        cluster.tell(node, claim_at("a", version, 4096))
    assert sorted(cluster.where("a")) == ["a", "b"]
    cluster.kill("b")
    cluster.after(AFTER_MS + SOON_MS)
    assert repair(cluster) == "a"
    assert sorted(cluster.where("a")) == ["a", "c"]


# --- promises ----------------------------------------------------------------------------------


def test_what_is_moved_still_lacks_its_replica(new_cluster: NewCluster) -> None:
    cluster = new_cluster(a=20)
    cluster.put("a", replicas=3)
    cluster.join("b", 20)
    cluster.drain("a")
    moved = cluster.state.copying.start_moves(cluster.now_ms, calls.StartMoves("a", 0, 10, 1 << 20))
    assert isinstance(moved, calls.StartMovesReply)
    assert cluster.end(moved.grants) == [STORED]
    assert cluster.where("a") == ["b"]
    assert repair_queue.missing(cluster.state.forest.get(NAMESPACE, keys_of("a")[0])) == 2  # type: ignore[arg-type]
