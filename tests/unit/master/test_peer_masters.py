"""Which masters count as lost."""

from __future__ import annotations

from kvstore.master.cluster_events import ClusterEventLog
from kvstore.master.peer_masters import STOPPED, PeerMasters
from kvstore.runtime.addresses import EtcdPlace
from kvstore.runtime.etcd.client import MASTERS_MAX, Etcd


def test_a_master_is_lost_if_it_ends_without_stopping_until_one_begins() -> None:
    events = ClusterEventLog(lambda: 0)
    masters = PeerMasters(Etcd(EtcdPlace(("h:1",))), "me:1", events)
    masters.observe({"a": "", "b": "", "c": ""})
    masters.observe({"a": STOPPED, "c": ""})
    masters.observe({"c": ""})
    assert list(masters.lost) == ["b"], "a was asked to stop"
    assert "master_lost" in str(events.after(0))
    masters.observe({})
    assert list(masters.lost) == ["b", "c"]
    masters.observe({"c": ""})
    assert list(masters.lost) == ["b"], "c is back"
    masters.observe({"c": "", "d": ""})
    assert not masters.lost, "d is in the place of b"
    for number in range(2 * MASTERS_MAX):
        masters.observe({f"{number}-{each}": "" for each in range(2)})
        masters.observe({})
    assert len(masters.lost) <= MASTERS_MAX
