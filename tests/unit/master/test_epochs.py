"""A node of another cluster, of another release, or of a later master than this one."""

from __future__ import annotations

import pytest

from kvstore import calls, limits
from kvstore.calls import Version
from kvstore.errors import ClusterMismatchError, ProtocolError, UnavailableError
from kvstore.limits import EPOCH_MAX, PROTOCOL_VERSION
from kvstore.master.state.effects import Outrun, Send
from kvstore.master.state.master_state import MasterState
from tests.unit.master.cluster import EPOCH, Cluster, told
from tests.unit.master.conftest import NewCluster
from tests.unit.master.test_inventories import claim

OFFER = calls.SegmentOffer(1 << 20, b"u" * 16, "", "", bytes(16), 0, 1, fresh=False)
JOIN = calls.NodeJoin("new", "host", PROTOCOL_VERSION, 0, [OFFER])


def test_a_node_that_has_joined_a_later_master_waits_for_our_next_term() -> None:
    state = MasterState(epoch=EPOCH)

    with pytest.raises(UnavailableError, match="new term"):
        state.nodes.joined(0, 1, JOIN._replace(highest_epoch=EPOCH + 5))

    assert state.take_effects() == [Outrun(EPOCH + 5)]
    assert state.report.status(0, calls.Status()).nodes == []


def test_a_node_that_knows_our_own_epoch_or_an_earlier_one_joins() -> None:
    for highest in (0, EPOCH - 1, EPOCH):
        state = MasterState(epoch=EPOCH)
        assert state.nodes.joined(0, 1, JOIN._replace(highest_epoch=highest)).epoch == EPOCH


def _back(cluster: Cluster) -> Cluster:
    """A node that is to tell what it holds."""
    cluster.join("one", 8)
    cluster.break_stream("one")
    cluster.report("one")
    cluster.join("one", again=True, tells=False)
    return cluster


def test_what_a_later_master_has_granted_is_not_wiped(new_cluster: NewCluster) -> None:
    """Told by a node of a release that does not know of epochs when it joins."""
    cluster = _back(new_cluster())
    state, session = cluster.state, cluster.sessions["one"]

    of_later = claim("x", 1, version=Version(EPOCH + 1, 1))
    state.nodes.said(
        cluster.now_ms, session, told((claim("a", 0), of_later), first=True, last=True)
    )
    state.work(cluster.now_ms)
    effects = state.take_effects()

    assert Outrun(EPOCH + 1) in effects
    sent = [effect.message for effect in effects if isinstance(effect, Send)]
    assert not [message for message in sent if isinstance(message, calls.MasterWipe)]


def test_an_absurd_epoch_is_damage_and_ends_no_term(new_cluster: NewCluster) -> None:
    cluster = _back(new_cluster())
    state, session = cluster.state, cluster.sessions["one"]

    absurd = claim("x", 1, version=Version(EPOCH_MAX, 1))
    state.nodes.said(cluster.now_ms, session, told((absurd,), first=True, last=True))
    state.work(cluster.now_ms)

    assert not [effect for effect in state.take_effects() if isinstance(effect, Outrun)]


@pytest.mark.parametrize(
    ("ours", "theirs", "fits"),
    [("", "", True), ("a", "", True), ("a", "a", True), ("a", "b", False), ("", "a", False)],
)
def test_a_node_joins_the_cluster_that_it_means(ours: str, theirs: str, fits: bool) -> None:
    state = MasterState(epoch=EPOCH, cluster=ours)
    join = JOIN._replace(cluster=theirs, highest_epoch=EPOCH + 1)
    if fits:
        accepted = state.nodes.joined(0, 1, join._replace(highest_epoch=0))
        assert accepted.cluster == ours == state.report.status(0, calls.Status()).cluster
        return
    with pytest.raises(ClusterMismatchError, match=f"cluster {theirs}"):
        state.nodes.joined(0, 1, join)
    assert state.take_effects() == [], "a stranger ends nobody's term"


@pytest.mark.parametrize(
    ("ours", "theirs", "agreed"),
    [
        ((1, 1), (0, 1), 1),
        ((1, 2), (0, 1), 1),
        ((1, 1), (1, 2), 1),
        ((2, 3), (1, 2), 2),
        ((1, 3), (2, 3), 3),
        ((2, 3), (0, 1), None),
        ((1, 1), (2, 3), None),
        ((1, 1), (0, 2), None),
        ((1, 1), (0, 0), None),
    ],
)
def test_releases_speak_the_highest_version_that_both_know(
    monkeypatch: pytest.MonkeyPatch,
    ours: tuple[int, int],
    theirs: tuple[int, int],
    agreed: int | None,
) -> None:
    monkeypatch.setattr(limits, "PROTOCOL_MIN", ours[0])
    monkeypatch.setattr(limits, "PROTOCOL_VERSION", ours[1])
    state = MasterState(epoch=EPOCH)
    join = JOIN._replace(protocol_min=theirs[0], protocol=theirs[1])
    if agreed is None:
        with pytest.raises(ProtocolError, match="speaks protocol"):
            state.nodes.joined(0, 1, join)
    else:
        assert state.nodes.joined(0, 1, join).protocol == agreed
