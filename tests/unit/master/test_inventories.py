"""What nodes that come back say they hold: what is believed, what is wiped, what waits for it."""

from __future__ import annotations

import pytest

from kvstore import calls
from kvstore.calls import Version
from kvstore.errors import ProtocolError, SegmentUnmountedError, UnavailableError
from kvstore.limits import CLAIMS_UNANSWERED_MAX, Key, Namespace
from kvstore.master.state import inventory
from kvstore.master.state.effects import DeferredReply
from kvstore.master.state.inventory import Claim
from kvstore.master.state.rules import MasterRules
from kvstore.memory.header import SUPERBLOCK_BYTES
from tests.unit.master.cluster import BLOCK, EPOCH, EXTENT, HIGHEST, NAMESPACE, Cluster
from tests.unit.master.conftest import NewCluster

LEASE_MS = 10_000
BEFORE = EPOCH - 1


def claim(
    name: str, place: int, *, parent: str = "", version: Version | None = None, size: int = BLOCK
) -> Claim:
    """``place``: which block of the segment."""
    return Claim(
        (NAMESPACE, Key(name.encode())),
        Key(parent.encode()) if parent else None,
        size,
        version or Version(BEFORE, place + 1),
        SUPERBLOCK_BYTES + place * EXTENT,
    )


def back(cluster: Cluster, name: str, *claims: Claim, blocks: int = 8) -> None:
    """A node comes to a master that does not know it, with memory that is not new."""
    cluster.join(name, blocks)
    cluster.break_stream(name)
    cluster.state.nodes.report_failure(
        cluster.now_ms, calls.ReportFailure([max(cluster.state.pool.segments)], epoch=EPOCH)
    )
    cluster.join(name, again=True, tells=False)
    cluster.tell(name, *claims)


def wiped(cluster: Cluster) -> list[int]:
    """The blocks whose headers are ordered wiped."""
    return [(at - SUPERBLOCK_BYTES) // EXTENT for _, o in cluster.orders for at in o.offsets]


# --- what is believed --------------------------------------------------------------------------


def test_what_a_node_holds_is_there_again(new_cluster: NewCluster) -> None:
    cluster = new_cluster()

    back(cluster, "one", claim("a", 0), claim("b", 1, parent="a"), claim("c", 5, parent="b"))

    assert cluster.match("abc") == 3
    assert cluster.where("c") == ["one"]
    assert cluster.stat("b").version == Version(BEFORE, 2)
    assert cluster.stat("b").parent == b"a"
    assert cluster.free_blocks() == 5


def test_children_wait_for_their_parents(new_cluster: NewCluster) -> None:
    cluster = new_cluster()

    back(cluster, "one", claim("b", 1, parent="a"))
    assert cluster.match("ab") == 0
    assert cluster.present("ab") == "b"
    back(cluster, "two", claim("a", 0))

    assert cluster.match("ab") == 2


def test_it_is_read_at_once_and_written_when_all_is_told_and_a_lease_is_over(
    new_cluster: NewCluster,
) -> None:
    cluster = new_cluster()
    cluster.join("one", 4)
    cluster.break_stream("one")
    cluster.report("one")
    cluster.join("one", again=True, tells=False)

    cluster.tell("one", claim("a", 0), last=False)
    assert cluster.lookup("a") == [["one"]]
    cluster.after(LEASE_MS)
    assert isinstance(cluster.start_or_wait("x", wait_ms=500), int), "not all is told"
    cluster.tell("one", first=False)

    cluster.put("yz")
    assert cluster.present("ayz") == "ayz"


def test_what_the_master_before_may_have_leased_is_not_written_over(
    new_cluster: NewCluster,
) -> None:
    """Also where the memory that a new master sees for the first time seems to hold nothing."""
    before, cluster = new_cluster(one=4), new_cluster()
    cluster.offers = before.offers
    cluster.join("one", again=True)

    ticket = cluster.start_or_wait("x", wait_ms=LEASE_MS * 2)
    cluster.after(LEASE_MS - 1)
    assert isinstance(ticket, int)
    assert ticket not in cluster.answers
    cluster.after(1)

    assert isinstance(cluster.answers[ticket], calls.Grants)


def test_what_the_master_before_may_have_leased_is_not_evicted(new_cluster: NewCluster) -> None:
    cluster = new_cluster()
    back(cluster, "one", *(claim(name, place) for place, name in enumerate("abcd")), blocks=4)

    assert isinstance(cluster.start_or_wait("x", wait_ms=LEASE_MS * 2), int)
    assert cluster.present("abcd") == "abcd"
    cluster.after(LEASE_MS)

    assert len(cluster.present("abcd")) == 3


def test_the_newest_is_evicted_last(new_cluster: NewCluster) -> None:
    cluster = new_cluster()
    cluster.after(1_000)
    back(cluster, "one", *(claim(name, 3 - place) for place, name in enumerate("dcba")), blocks=4)
    cluster.after(LEASE_MS)

    cluster.put("xy", chain=False)

    assert cluster.present("abcdxy") == "cdxy"


def test_one_version_on_several_nodes_is_one_object(new_cluster: NewCluster) -> None:
    cluster = new_cluster()
    back(cluster, "one", claim("a", 0))

    back(cluster, "two", claim("a", 3, version=Version(BEFORE, 1)))

    assert sorted(cluster.where("a")) == ["one", "two"]


@pytest.mark.parametrize("order", ["older first", "newer first"])
def test_of_two_versions_the_newer_is_believed(new_cluster: NewCluster, order: str) -> None:
    cluster = new_cluster()
    cluster.wipes_at_once = False
    versions = [Version(BEFORE, 7), Version(BEFORE - 1, 9)]
    if order == "older first":
        versions.reverse()

    back(cluster, "one", claim("a", 0, version=versions[0]))
    back(cluster, "two", claim("a", 1, version=versions[1]))

    assert cluster.stat("a").version == Version(BEFORE, 7)
    assert wiped(cluster) == ([0] if order == "older first" else [1])


# --- nonsense ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(claim("x", 8), id="behind the end"),
        pytest.param(claim("x", -1), id="in the superblock"),
        pytest.param(claim("x", 1 << 60), id="far outside"),
        pytest.param(claim("x", 1, size=1 << 62), id="absurd size"),
        pytest.param(claim("x", 0), id="over another"),
        pytest.param(claim("x", 0, size=2 * BLOCK), id="over another, longer"),
        pytest.param(claim("x", 1)._replace(offset=SUPERBLOCK_BYTES + 5_000), id="not aligned"),
        pytest.param(claim("x", 1, parent="x"), id="its own parent"),
        pytest.param(claim("x", 1, version=Version(HIGHEST + 1, 1)), id="epoch not believed"),
        pytest.param(claim("x", 1, version=Version(EPOCH, 1)), id="of a put that never was"),
    ],
)
def test_nonsense_is_refused_and_counted_and_the_rest_believed(
    new_cluster: NewCluster, bad: Claim
) -> None:
    cluster = new_cluster()
    cluster.wipes_at_once = False

    back(cluster, "one", claim("a", 0), bad, claim("b", 7))

    assert cluster.present("axb") == "ab"
    assert cluster.state.counters["refused_claims"] == 1
    assert cluster.state.counters["recovered_objects"] == 2
    assert [at for _, order in cluster.orders for at in order.offsets] == [bad.offset]


def test_a_ring_of_parents_is_cut(new_cluster: NewCluster) -> None:
    cluster = new_cluster()

    back(cluster, "one", claim("a", 0, parent="b"), claim("b", 1, parent="a"))

    assert cluster.present("ab") == "a"
    assert cluster.state.counters["refused_claims"] == 1


def test_more_messages_than_may_be_unanswered_end_the_stream(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=8)
    cluster.kill("one")
    cluster.join("one", again=True, tells=False)
    message = calls.NodeClaims(0, False, False, [], [], [], [], [], [], [], [])

    session = cluster.sessions["one"]
    for _ in range(CLAIMS_UNANSWERED_MAX + 1):
        cluster.state.nodes.on_node_message(cluster.now_ms, session, message)
    with pytest.raises(ProtocolError, match="more claims than requested"):
        cluster.state.nodes.on_node_message(cluster.now_ms, session, message)
    cluster.work()


def test_an_inventory_that_was_broken_off_begins_again(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=8)
    cluster.kill("one")
    cluster.join("one", again=True, tells=False)
    cluster.tell("one", claim("a", 0), last=False)
    cluster.break_stream("one")
    with pytest.raises(SegmentUnmountedError):
        cluster.join("one", resume=True)
    cluster.join("one", again=True, tells=False)

    cluster.tell("one", claim("a", 0), claim("b", 1))

    assert cluster.present("ab") == "ab"
    assert cluster.state.counters["refused_claims"] == 0
    assert cluster.free_blocks() == 6


# --- what was removed stays removed ------------------------------------------------------------


def away(new_cluster: NewCluster) -> Cluster:
    """Node "one" holds a, b and c, of versions 1 to 3, and is dead for long."""
    cluster = new_cluster(one=8, two=8)
    cluster.put("abc", chain=False, host="host-one")
    assert cluster.where("c") == ["one"]
    cluster.kill("one")
    cluster.after(LEASE_MS)
    return cluster


HELD = [claim(n, place, version=Version(EPOCH, place + 1)) for place, n in enumerate("abc")]


def test_what_was_removed_while_its_node_was_away_is_wiped(new_cluster: NewCluster) -> None:
    cluster = away(new_cluster)
    cluster.remove("a")
    cluster.put("b", overwrite=True)
    cluster.remove("b")

    cluster.join("one", again=True, tells=False)
    cluster.wipes_at_once = False
    cluster.tell("one", *HELD)

    assert cluster.present("abc") == "c"
    assert wiped(cluster) == [0, 1]


def test_what_was_cleared_while_its_node_was_away_is_wiped(new_cluster: NewCluster) -> None:
    cluster = away(new_cluster)
    cluster.clear(100)
    cluster.join("one", again=True, tells=False)

    cluster.tell("one", *HELD)

    assert cluster.present("abc") == ""


def test_more_removals_than_are_remembered_are_all_removals(
    new_cluster: NewCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inventory, "TOMBSTONES_MAX", 2)
    cluster = away(new_cluster)
    cluster.remove("axy")
    cluster.join("one", again=True, tells=False)

    cluster.tell("one", *HELD)

    assert cluster.present("abc") == ""


def test_what_is_put_again_is_not_removed(new_cluster: NewCluster) -> None:
    cluster = away(new_cluster)
    cluster.remove("a")
    cluster.put("a")
    cluster.join("one", again=True, tells=False)

    cluster.tell("one", *HELD)

    assert cluster.present("abc") == "abc"
    assert cluster.where("a") == ["two"]


def test_a_removal_waits_until_all_is_told(new_cluster: NewCluster) -> None:
    cluster = away(new_cluster)
    cluster.join("one", again=True, tells=False)

    result = cluster.remove_later("a")
    assert isinstance(result, DeferredReply)
    assert result.reply_id not in cluster.answers
    cluster.tell("one", *HELD)

    assert cluster.reply(result) == calls.RemoveReply(bytes([0]))
    assert cluster.present("abc") == "bc"


# --- over masters -------------------------------------------------------------------------------

MARK = Version(BEFORE, 3)


def test_memory_with_an_older_mark_is_not_believed(new_cluster: NewCluster) -> None:
    cluster = new_cluster()
    cluster.join("two", 8)
    cluster.break_stream("two")
    cluster.report("two")
    cluster.join("two", again=True, mark=MARK)

    back(cluster, "one", claim("a", 0))

    assert cluster.present("a") == ""


def test_memory_that_was_believed_too_early_joins_again(new_cluster: NewCluster) -> None:
    cluster = new_cluster(two=8)
    cluster.kill("two")
    back(cluster, "one", claim("a", 0))
    assert cluster.present("a") == "a"

    cluster.join("two", again=True, mark=MARK)
    told = {"node": "two", "epoch": MARK.epoch, "number": MARK.counter}
    assert [each.fields for each in cluster.noted if each.event == "removal_watermark_found"] == [
        told
    ]
    assert cluster.present("a") == ""
    assert "one" not in cluster.states()
    cluster.join("one", again=True, tells=False, mark=Version(EPOCH, 1))
    cluster.tell("one", claim("a", 0))

    assert cluster.present("a") == ""


def test_a_removal_is_marked_on_who_is_there_once_for_each_loss(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=8, two=8)
    cluster.wipes_at_once = False

    assert isinstance(cluster.remove_later("x"), calls.RemoveReply), "nobody is away"
    cluster.kill("one")
    result = cluster.remove_later("x")
    cluster.after(LEASE_MS)
    assert [order.removal_watermark for _, order in cluster.orders] == [Version(EPOCH, 2)]
    assert isinstance(result, DeferredReply)
    assert result.reply_id not in cluster.answers, "not kept yet"
    cluster.wipe()

    assert result.reply_id in cluster.answers
    assert isinstance(cluster.remove_later("y"), calls.RemoveReply)


def test_nothing_is_removed_where_nobody_would_remember(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=8)
    cluster.put("a")
    cluster.kill("one")

    with pytest.raises(UnavailableError):
        cluster.remove_later("a")


def test_nothing_is_removed_before_the_first_node_has_joined(new_cluster: NewCluster) -> None:
    """It may hold the object, and join only the master after this one."""
    cluster = new_cluster()

    with pytest.raises(UnavailableError):
        cluster.remove_later("a")
    with pytest.raises(UnavailableError):
        cluster.clear(100)


# --- questions wait ------------------------------------------------------------------------------


def test_what_would_be_a_miss_waits_for_the_nodes(new_cluster: NewCluster) -> None:
    cluster = new_cluster(rules=MasterRules(inventory_wait_ms=3_000))
    request = calls.Lookup(NAMESPACE, [Key(b"a")])
    asked = cluster.state.asking.find(cluster.now_ms, request)
    assert isinstance(asked, DeferredReply)

    back(cluster, "one", claim("a", 0))
    cluster.after(1_000)

    found = cluster.answers.pop(asked.reply_id)
    assert isinstance(found, calls.LookupReply)
    assert found.placements.replicas == [1]
    later = cluster.state.asking.find(cluster.now_ms, calls.Lookup(NAMESPACE, [Key(b"b")]))
    assert isinstance(later, calls.LookupReply), "nobody is expected any more"


def test_a_new_store_does_not_wait(new_cluster: NewCluster) -> None:
    cluster = new_cluster(rules=MasterRules(inventory_wait_ms=3_000), one=8)

    reply = cluster.state.asking.find(cluster.now_ms, calls.Exists(NAMESPACE, [Key(b"a")]))

    assert reply == calls.ExistsReply(bytes(1))


# --- nodes that do not do what they should -----------------------------------------------------


def test_a_node_that_beats_and_tells_nothing_must_join_anew(new_cluster: NewCluster) -> None:
    cluster = new_cluster(two=8)
    back(cluster, "one", claim("a", 0), blocks=8)
    cluster.join("one", again=True, tells=False)
    waits = cluster.remove_later("a")
    assert isinstance(waits, DeferredReply)

    cluster.after(cluster.rules.node_patience_ms)
    assert waits.reply_id not in cluster.answers
    cluster.after(2_000)

    assert cluster.sessions["one"] in cluster.hangups
    assert set(cluster.states()) == {"two"}
    cluster.after(LEASE_MS)
    assert waits.reply_id in cluster.answers


def test_a_node_that_goes_on_telling_is_heard_out(new_cluster: NewCluster) -> None:
    cluster = new_cluster()
    back(cluster, "one")
    cluster.join("one", again=True, tells=False)
    for turn in range(19):
        assert set(cluster.states()) == {"one"}
        cluster.tell("one", first=not turn, last=False)
        cluster.after(cluster.rules.node_patience_ms // 2)
    cluster.tell("one", last=False)
    cluster.after(cluster.rules.node_patience_ms)
    assert not cluster.states(), "it went on for ever"


def test_a_node_that_beats_and_wipes_nothing_must_join_anew(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=8, two=8)
    cluster.put("a")
    cluster.put("z", host="host-two", namespace=Namespace("other"))
    cluster.wipes_at_once = False
    holder = cluster.where("a")[0]
    waits = cluster.remove_later("a")
    assert isinstance(waits, DeferredReply)

    cluster.after(cluster.rules.node_patience_ms - 1_000)
    assert set(cluster.states()) == {"one", "two"}
    cluster.after(3_000)

    assert set(cluster.states()) == {"one", "two"} - {holder}
    assert cluster.sessions[holder] in cluster.hangups
    cluster.wipe()  # the mark on the other
    cluster.after(LEASE_MS)
    assert waits.reply_id in cluster.answers
