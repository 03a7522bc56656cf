"""Nodes: joining, resuming, leaving, suspicion and death."""

from __future__ import annotations

import pytest

from kvstore import calls
from kvstore.errors import (
    InvalidArgumentError,
    NodeNameTakenError,
    NoSpaceError,
    ProtocolError,
    SegmentUnmountedError,
    UnavailableError,
)
from kvstore.limits import PROTOCOL_VERSION
from kvstore.master.state import background_sweep
from kvstore.master.state.effects import LogClusterEvent
from kvstore.master.state.liveness import AGREEING_MS, HOSTS_MAX, NOTED_MS, LivenessRules
from kvstore.master.state.object_events import REMOVED_SIZE
from kvstore.master.state.rules import MasterRules
from kvstore.master.state.traffic import Caller
from kvstore.security.identity import validated_identity
from tests.support.invariants import check_invariants
from tests.unit.master.cluster import BLOCK, EPOCH, Cluster
from tests.unit.master.conftest import NewCluster

LEASE_MS = 10_000
WRITERS_MS = 50_000
"""Put deadline and quarantine."""
SUSPECT_MS = 2_000
DEAD_MS = 6_000


OFFER = calls.SegmentOffer(1 << 20, b"u" * 16, "", "", b"", 0, 1, True)
JOIN = calls.NodeJoin("new", "host", PROTOCOL_VERSION, 0, [OFFER])


def _join(cluster: Cluster, join: calls.NodeJoin) -> calls.MasterAccepted:
    return cluster.state.nodes.on_node_join(cluster.now_ms, 99, join)


# --- joining -----------------------------------------------------------------------------------


def test_a_node_that_joins_is_told_the_epoch_and_its_segments(new_cluster: NewCluster) -> None:
    cluster = new_cluster()

    accepted = cluster.join("one", 4, 8)

    assert accepted.epoch == EPOCH
    assert len(set(accepted.segment_ids)) == 2
    described = cluster.state.report.describe_segments(
        0, calls.DescribeSegments([1, 2, 3])
    ).segments
    assert [segment.segment_id for segment in described] == list(accepted.segment_ids)
    assert [segment.uuid for segment in described] == [o.uuid for o in cluster.offers["one"]]
    assert cluster.notices == ["node_joined"]


@pytest.mark.parametrize(
    ("join", "error"),
    [
        (JOIN._replace(protocol=PROTOCOL_VERSION + 1), ProtocolError),
        (JOIN._replace(name=""), InvalidArgumentError),
        (JOIN._replace(segments=[]), InvalidArgumentError),
        (JOIN._replace(segments=[OFFER._replace(size=4096)]), InvalidArgumentError),
        (JOIN._replace(segments=[OFFER._replace(uuid=b"short")]), InvalidArgumentError),
        (JOIN._replace(segments=[OFFER, OFFER]), InvalidArgumentError),
        (JOIN._replace(resume_epoch=EPOCH), SegmentUnmountedError),
        (JOIN._replace(resume_epoch=EPOCH - 1), SegmentUnmountedError),
    ],
)
def test_a_join_that_makes_no_sense_is_refused(
    new_cluster: NewCluster, join: calls.NodeJoin, error: type[Exception]
) -> None:
    cluster = new_cluster()

    with pytest.raises(error):
        _join(cluster, join)

    assert cluster.status().nodes == []


def test_the_name_of_a_living_node_is_taken(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=4)
    cluster.put("a")

    with pytest.raises(NodeNameTakenError):
        _join(cluster, JOIN._replace(name="one"))

    assert cluster.match("a") == 1
    cluster.after(1)
    assert cluster.states() == {"one": "alive"}


def test_a_node_that_joins_anew_has_lost_what_it_held(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=4)
    cluster.put("abc")
    old = cluster.sessions["one"]

    cluster.join("one", again=True)

    assert cluster.match("abc") == 0
    assert cluster.hangups == [old]
    cluster.work()
    assert cluster.status().namespaces == []


def test_memory_of_before_is_not_given_out_for_one_lease(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=4)
    cluster.join("one", again=True)

    cluster.after(LEASE_MS - 1)
    with pytest.raises(NoSpaceError):
        cluster.put("a")
    cluster.after(1)

    cluster.put("a")


def test_a_node_that_never_heard_that_it_had_joined_waits_for_its_writers(
    new_cluster: NewCluster,
) -> None:
    cluster = new_cluster(one=4)
    cluster.start("a")
    cluster.break_stream("one")
    offers = cluster.offers["one"]
    join = JOIN._replace(name="one", segments=offers)  # says that it is fresh, and fenced nothing

    cluster.state.nodes.on_node_join(cluster.now_ms, 7, join)
    cluster.sessions["one"] = 7
    cluster.silent.clear()

    cluster.after(WRITERS_MS - 1)
    with pytest.raises(NoSpaceError):
        cluster.put("b")
    cluster.after(1)
    cluster.put("b")


def test_memory_that_was_allocated_waits_for_its_owner(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=4)
    token = cluster.allocate()
    cluster.after(5_000)
    assert cluster.renew_token(token)

    cluster.join("one", again=True)
    cluster.join("one", again=True)

    cluster.after(WRITERS_MS - 1)
    with pytest.raises(NoSpaceError):
        cluster.put("b")
    cluster.after(1)
    cluster.put("b")


def test_an_entry_that_is_gone_is_noted_once_and_at_once(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=4)
    cluster.notices.clear()

    for is_gone in (True, True, False, True):
        cluster.say("one", calls.NodeHeartbeat(1, shm_entry_missing=is_gone))
        check_invariants(cluster.state)

    assert cluster.notices == ["node_shm_entry_missing", "node_shm_entry_missing"]


def test_what_was_moved_is_told_of_each_node(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=8, two=8)
    cluster.put("ab", replicas=2)
    cluster.put("c")
    cluster.say("one", calls.NodeHeartbeat(1, read_bytes=5, written_bytes=7))

    one, two = cluster.status().nodes

    assert min(one.stored_bytes, two.stored_bytes) == 2 * BLOCK
    assert one.stored_bytes + two.stored_bytes == 5 * BLOCK
    assert (one.read_bytes, one.written_bytes) == (5, 7)
    assert (two.read_bytes, two.written_bytes) == (0, 0)

    cluster.join("one", again=True)
    (again,) = (node for node in cluster.status().nodes if node.name == "one")
    assert (again.stored_bytes, again.read_bytes) == (0, 0), "it is another mount"


# --- streams -----------------------------------------------------------------------------------


def test_a_node_that_resumes_keeps_everything(new_cluster: NewCluster) -> None:
    cluster = new_cluster()
    before = cluster.join("one", 4, 8)
    cluster.put("abc")
    grants = cluster.start("d", parent="c")
    cluster.break_stream("one")
    assert cluster.states() == {"one": "suspect"}

    after = cluster.join("one", resume=True)

    assert after.segment_ids == before.segment_ids
    assert cluster.states() == {"one": "alive"}
    cluster.end(grants)
    assert cluster.match("abcd") == 4


def test_clients_are_told_with_which_identity_a_node_has_joined(new_cluster: NewCluster) -> None:
    cluster = new_cluster()
    nodes = cluster.state.nodes

    def told() -> list[str]:
        ask = calls.DescribeSegments(accepted.segment_ids)
        return [each.certified for each in cluster.state.report.describe_segments(0, ask).segments]

    accepted = nodes.on_node_join(0, 1, JOIN, "kvstore:one")
    assert told() == ["kvstore:one"]
    assert [each.certified for each in nodes.segments_of_session(1)] == ["kvstore:one"]
    nodes.on_node_join(0, 2, JOIN._replace(resume_epoch=EPOCH), "kvstore:renewed")
    assert told() == ["kvstore:renewed"]
    cluster.state.effects.clear()


def test_a_node_that_is_dead_cannot_resume(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=4)
    cluster.kill("one")

    with pytest.raises(SegmentUnmountedError):
        cluster.join("one", resume=True)


def test_a_resumed_node_is_hung_up_on_its_old_stream(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=4)
    old = cluster.sessions["one"]

    cluster.join("one", resume=True)
    cluster.state.nodes.on_node_message(cluster.now_ms, old, calls.NodeLeave())
    cluster.state.nodes.stream_broken(old)

    assert cluster.hangups == [old]
    assert cluster.states() == {"one": "alive"}


def test_a_node_joins_once_per_stream(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=4)
    join = calls.NodeJoin("two", "host", PROTOCOL_VERSION, 0, cluster.offers["one"])

    with pytest.raises(ProtocolError):
        cluster.say("one", join)


def test_a_node_that_leaves_is_forgotten_at_once(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=4)
    cluster.put("abc")

    cluster.say("one", calls.NodeLeave())

    assert cluster.match("abc") == 0
    assert cluster.status().nodes == []
    assert cluster.hangups == []
    assert cluster.notices[-1] == "node_left"


# --- suspicion and death -----------------------------------------------------------------------


def test_silence_makes_suspect_and_then_dead(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=4)
    cluster.put("a")
    cluster.silent.add("one")

    cluster.after(SUSPECT_MS)
    assert cluster.states() == {"one": "alive"}
    cluster.after(1)
    assert cluster.states() == {"one": "suspect"}
    assert cluster.match("a") == 1
    cluster.after(DEAD_MS - SUSPECT_MS - 1)
    assert cluster.states() == {"one": "suspect"}
    cluster.after(1)

    assert cluster.states() == {}
    assert cluster.match("a") == 0
    assert cluster.hangups == [cluster.sessions["one"]]


def test_a_failure_that_two_hosts_report_makes_suspect_for_a_while(
    new_cluster: NewCluster,
) -> None:
    cluster = new_cluster(one=4, two=4)

    assert cluster.report("one") == 1

    assert cluster.states() == {"one": "suspect", "two": "alive"}
    cluster.after(SUSPECT_MS + 1)
    assert cluster.states() == {"one": "alive", "two": "alive"}


def test_what_one_host_reports_counts_for_nobody_else(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=4, two=4)

    for _ in range(100):
        assert cluster.report("one", "walled") == cluster.report("two", "walled") == 0
        cluster.after(100)

    assert cluster.states() == {"one": "alive", "two": "alive"}
    cluster.put("a", host="host-one")
    assert cluster.present("a") == "a"


def test_two_hosts_are_no_majority_of_four(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=9)
    for key, host in zip("abcd", ("host-a", "host-b", "host-c", "host-d"), strict=True):
        cluster.put(key, host=host)

    assert cluster.report("one", "host-a", "host-b") == 0
    assert cluster.report("one", "host-c") == 1


def test_reports_and_uses_of_long_ago_do_not_count(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=9)
    cluster.put("a", host="host-c")
    cluster.put("b", host="host-d")
    assert cluster.report("one", "host-a", "host-b") == 0
    cluster.after(AGREEING_MS + 1)

    assert cluster.report("one", "host-a") == 0, "alone again"
    assert cluster.report("one", "host-b") == 1, "nobody else uses it now"


def test_reports_of_one_host_are_noted_once_in_a_while(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=4)
    for ms in (0, 0, 0, NOTED_MS):
        cluster.after(ms)
        cluster.report("one", "walled")
    noted = [each for each in cluster.noted if each.event == "node_reported"]
    assert len(noted) == 2


def test_where_a_node_cannot_be_reached_is_in_the_status_until_it_can(
    new_cluster: NewCluster,
) -> None:
    cluster = new_cluster()
    _join(cluster, JOIN)
    (session,) = cluster.state.membership._by_session
    nodes = cluster.state.nodes
    assert [each.address for each in nodes.segments_of_session(session)] == [OFFER.address]

    def told() -> str:
        return cluster.state.report.status(0, calls.Status()).nodes[0].unreachable

    nodes.on_connectivity_result(session, "refused the tcp connection")
    assert told() == "refused the tcp connection"
    nodes.on_connectivity_result(session, "")
    assert told() == ""
    effects = cluster.state.take_effects()
    events = [effect.event for effect in effects if isinstance(effect, LogClusterEvent)]
    assert events[-2:] == ["node_unreachable", "node_reachable"]
    nodes.stream_broken(session)
    assert nodes.segments_of_session(session) == []
    nodes.on_connectivity_result(session, "too late")


def test_hosts_that_are_remembered_have_a_bound(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=4)
    for number in range(HOSTS_MAX + 9):
        cluster.report("one", f"host-{number}")
    node = cluster.state.membership.nodes["one"]
    assert len(node.reports) == HOSTS_MAX
    assert f"host-{HOSTS_MAX + 8}" in node.reports


@pytest.mark.parametrize(("epoch", "suspects"), [(EPOCH, 1), (0, 0), (EPOCH - 1, 0)])
def test_a_report_about_a_segment_of_another_master_is_about_no_node_of_this_one(
    new_cluster: NewCluster, epoch: int, suspects: int
) -> None:
    cluster = new_cluster(one=4, two=4)
    seen = []
    for host in ("host-a", "host-b"):
        report = calls.ReportFailure([1], "client", host, "refused", epoch)
        seen.append(cluster.state.nodes.report_failure(cluster.now_ms, report).suspects)
    assert seen == [0, suspects]


def _report_as(cluster: Cluster, reporter: str, node: str, host: str) -> None:
    """``reporter``: the common name of its certificate and its address."""
    who, address = reporter.split()
    cluster.state.traffic.caller = Caller(f"client {address}", validated_identity(who, ["engine"]))
    cluster.report(node, host)


@pytest.mark.parametrize("is_broken_first", [True, False])
def test_one_identity_does_not_make_a_broken_stream_a_death(
    new_cluster: NewCluster, is_broken_first: bool
) -> None:
    """It could report all nodes each second, and empty the pool when their streams break."""
    cluster = new_cluster(one=4)
    cluster.put("a")
    if is_broken_first:
        cluster.break_stream("one")
    for number in range(3):
        _report_as(cluster, "e 10.0.0.1", "one", f"host-{number}")
    if not is_broken_first:
        cluster.break_stream("one")
    cluster.state.tick(cluster.now_ms)
    assert cluster.states() == {"one": "suspect"}

    _report_as(cluster, "f 10.0.0.1", "one", "host-f")
    assert cluster.states() == {"one": "suspect"}, "two of four hosts are not most"
    _report_as(cluster, "g 10.0.0.1", "one", "host-0")
    assert cluster.states() == {}


def test_a_broken_stream_and_a_reported_failure_are_death(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=4)
    cluster.put("a")
    cluster.break_stream("one")

    assert cluster.report("one", "host-a") == 0

    assert cluster.match("a") == 0
    assert cluster.status().nodes == []


def test_a_reported_failure_and_then_a_broken_stream_are_death_at_the_next_tick(
    new_cluster: NewCluster,
) -> None:
    cluster = new_cluster(one=4)
    cluster.put("a")
    cluster.report("one", "host-a")

    cluster.break_stream("one")

    cluster.state.tick(cluster.now_ms)
    cluster.work()
    assert cluster.match("a") == 0


def test_what_is_lost_above_a_put_under_way_is_gone_at_once(new_cluster: NewCluster) -> None:
    """No object is below it, from which the background work would come to it."""
    cluster = new_cluster(one=6, two=6)
    cluster.put("ab", host="host-one")
    cluster.break_stream("one")
    grants = cluster.start("c", parent="b", host="host-two")
    cluster.state.forest.events = []

    cluster.kill("one")

    gone = [event[1] for event in cluster.state.take_events(10) if event[3] == REMOVED_SIZE]
    assert gone == [b"b", b"a"]
    (row,) = cluster.status().namespaces
    assert row.objects == 0
    cluster.end(grants)
    assert cluster.present("abc") == "c"


def test_lost_blocks_above_many_puts_are_found_in_slices(
    new_cluster: NewCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_sweep, "SWEEP_STEPS", 2)
    cluster = new_cluster(one=8, two=20)
    cluster.put("abcdefgh", host="host-one", chain=False)
    cluster.break_stream("one")
    for name in "abcdefgh":
        cluster.start(name.upper(), parent=name, host="host-two")
    cluster.state.forest.events = []

    cluster.kill("one")

    gone = [event[1] for event in cluster.state.take_events(20)]
    assert sorted(gone) == [name.encode() for name in "abcdefgh"]


def test_the_quarantine_must_outlast_a_node_that_nobody_hears() -> None:
    with pytest.raises(ValueError, match="quarantine_ms"):
        MasterRules(quarantine_ms=10, liveness=LivenessRules(suspect_ms=10, dead_ms=20))


def test_memory_that_a_node_has_mounted_is_not_mounted_by_another_one(
    new_cluster: NewCluster,
) -> None:
    """Also while its node is silent: it may come back. Once it is dead, anybody may have it."""
    cluster = new_cluster(one=8)
    cluster.put("a")
    offers = [cluster.offers["one"][0]._replace(fresh=False)]
    liar = calls.NodeJoin("liar", "host", PROTOCOL_VERSION, 0, offers)
    for _ in range(2):
        with pytest.raises(UnavailableError, match="mounted by node one"):
            cluster.state.nodes.on_node_join(cluster.now_ms, 99, liar)
        assert cluster.present("a") == "a"
        cluster.break_stream("one")
    cluster.kill("one")
    cluster.state.nodes.on_node_join(cluster.now_ms, 99, liar)
