"""A node of another cluster, of another release, or of a later master than this one."""

from __future__ import annotations

from random import Random

import pytest

from kvstore import calls
from kvstore.calls import Version
from kvstore.errors import ClusterMismatchError, ProtocolError, UnavailableError
from kvstore.limits import PROTOCOL_VERSION, plausible_epoch_max
from kvstore.master.state.effects import SendToNode, SupersedeEpoch
from kvstore.master.state.master_state import MasterState
from kvstore.master.state.queries import JOINING_MS
from kvstore.master.superseded_epochs import SUPERSEDED_S, SupersededEpochs
from tests.unit.master.cluster import EPOCH, HIGHEST, Cluster, told
from tests.unit.master.conftest import NewCluster
from tests.unit.master.test_inventories import claim

OFFER = calls.SegmentOffer(1 << 20, b"u" * 16, "", "", bytes(16), 0, 1, fresh=False)
JOIN = calls.NodeJoin("new", "host", PROTOCOL_VERSION, 0, [OFFER])


def test_a_node_that_has_joined_a_later_master_waits_for_our_next_term() -> None:
    state = MasterState(epoch=EPOCH)

    with pytest.raises(UnavailableError, match="starts a higher one"):
        state.nodes.on_node_join(0, 1, JOIN._replace(highest_epoch=EPOCH + 5))

    assert state.take_effects() == [SupersedeEpoch(EPOCH + 5)]
    assert state.report.status(0, calls.Status()).nodes == []


def outrun_by(state: MasterState) -> list[int]:
    return [each.epoch for each in state.take_effects() if isinstance(each, SupersedeEpoch)]


def _back(cluster: Cluster) -> Cluster:
    """A node that is to tell what it holds."""
    cluster.join("one", 8)
    cluster.break_stream("one")
    cluster.report("one")
    cluster.join("one", again=True, tells=False)
    return cluster


def test_what_a_later_master_has_granted_is_not_wiped(new_cluster: NewCluster) -> None:
    """Told by a node whose memory has lost the epoch that it recorded."""
    cluster = _back(new_cluster())
    state, session = cluster.state, cluster.sessions["one"]

    of_later = claim("x", 1, version=Version(EPOCH + 1, 1))
    claims = told((claim("a", 0), of_later), first=True, last=True)
    with pytest.raises(UnavailableError, match="starts a higher one"):
        state.nodes.on_node_message(cluster.now_ms, session, claims)
    state.work(cluster.now_ms)
    effects = state.take_effects()

    assert SupersedeEpoch(EPOCH + 1) in effects
    sent = [effect.message for effect in effects if isinstance(effect, SendToNode)]
    assert not [message for message in sent if isinstance(message, calls.MasterWipe)]


def test_an_epoch_that_is_not_believed_ends_no_term(new_cluster: NewCluster) -> None:
    cluster = _back(new_cluster())
    state, session = cluster.state, cluster.sessions["one"]

    absurd = claim("x", 1, version=Version(HIGHEST + 1, 1))
    claims = told((claim("a", 0), absurd), first=True, last=True)
    state.nodes.on_node_message(cluster.now_ms, session, claims)
    state.work(cluster.now_ms)

    assert not outrun_by(state)
    assert state.counters["recovered_objects"] == 1, "the other one is served"


def test_a_node_whose_epoch_is_not_believed_joins_without_what_it_has_of_it() -> None:
    """Memory of a store in which a stranger could raise the epoch without a bound."""
    state = MasterState(epoch=EPOCH, epoch_max=HIGHEST)
    for epoch in (HIGHEST + 1, (1 << 62) + 5, (1 << 64) - 1):
        assert state.nodes.on_node_join(0, 1, JOIN._replace(highest_epoch=epoch)).epoch == EPOCH
        assert not outrun_by(state)


@pytest.mark.parametrize("epoch", [EPOCH + 1, HIGHEST, HIGHEST + 1, (1 << 64) - 1])
def test_the_word_of_a_client_ends_no_term(epoch: int) -> None:
    state = MasterState(epoch=EPOCH, epoch_max=HIGHEST, started_ms=1_000)
    join = calls.Join("c", "h", PROTOCOL_VERSION, highest_epoch=epoch)
    with pytest.raises(UnavailableError, match="when a node reports"):
        state.nodes.client_joined(1_000 + JOINING_MS - 1, join)
    state.nodes.client_joined(1_000 + JOINING_MS, join)
    assert not outrun_by(state)


def test_a_report_ends_a_term_once_per_interval() -> None:
    outruns = SupersededEpochs(Random(1))
    assert not outruns.ends_term(EPOCH, EPOCH, 0.0)
    assert outruns.ends_term(EPOCH, EPOCH + 1, 0.0)
    assert not outruns.ends_term(EPOCH + 5, EPOCH + 6, SUPERSEDED_S - 0.1)
    assert outruns.ends_term(EPOCH + 5, EPOCH + 6, SUPERSEDED_S)


def test_the_next_master_believes_every_epoch_that_reports_can_lead_to() -> None:
    """However often a node lies as high as it is believed, and whenever the master restarts."""
    outruns, now_ms = SupersededEpochs(Random(1)), 1_800_000_000_000
    for _ in range(100):
        highest = plausible_epoch_max(now_ms)
        for lie in (highest, highest - 1):
            epoch = outruns.next_epoch(lie, now_ms + 1)
            assert lie < epoch <= plausible_epoch_max(now_ms + 1)
        now_ms += 1
    assert outruns.next_epoch(5, now_ms) >= now_ms
    assert (
        outruns.next_epoch(plausible_epoch_max(now_ms) + 9, now_ms)
        > plausible_epoch_max(now_ms) + 9
    )


@pytest.mark.parametrize(
    ("ours", "theirs", "fits"),
    [("", "", True), ("a", "", True), ("a", "a", True), ("a", "b", False), ("", "a", False)],
)
def test_a_node_joins_the_cluster_that_it_means(ours: str, theirs: str, fits: bool) -> None:
    state = MasterState(epoch=EPOCH, cluster=ours)
    join = JOIN._replace(cluster=theirs, highest_epoch=EPOCH + 1)
    if fits:
        accepted = state.nodes.on_node_join(0, 1, join._replace(highest_epoch=0))
        assert accepted.cluster == ours == state.report.status(0, calls.Status()).cluster
        return
    with pytest.raises(ClusterMismatchError, match=f"cluster {theirs}"):
        state.nodes.on_node_join(0, 1, join)
    assert state.take_effects() == [], "a stranger ends nobody's term"


@pytest.mark.parametrize("version", [0, PROTOCOL_VERSION + 1])
def test_a_node_of_another_protocol_is_refused_with_both_numbers(version: int) -> None:
    state = MasterState(epoch=EPOCH)
    with pytest.raises(ProtocolError, match=f"speaks protocol {version}, this master 1"):
        state.nodes.on_node_join(0, 1, JOIN._replace(protocol=version))
