"""The master is killed, stopped, frozen and started again."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from kvstore import PutOutcome
from tests.support.cluster import MASTER, Cluster
from tests.support.processes import children_of, is_running
from tests.support.wait import until

STORED = PutOutcome.STORED


def kill_master(cluster: Cluster) -> None:
    cluster.master_server.kill()


def test_a_view_is_held_on_by_the_next_master(cluster: Cluster) -> None:
    cluster.settings["lease_ms"] = 15_000
    cluster.start()
    client = cluster.client()
    client.put("k", b"x" * 1_000)
    view = client.get("k", copy=False)
    assert isinstance(view, memoryview)
    lease = client.lease(view)
    assert lease is not None
    kill_master(cluster)
    cluster.master()
    until(lambda: lease.remaining_s > 14 or not lease.is_held)
    assert lease.is_held, "the promise has held without a gap"
    assert view == b"x" * 1_000


# --- SIGTERM, in any order ---------------------------------------------------------------------


@pytest.mark.parametrize("order", ["master first", "nodes first", "all at once", "ctrl-c"])
def test_everything_stops_cleanly_in_any_order(cluster: Cluster, order: str) -> None:
    cluster.start(2)
    client = cluster.client()
    client.put("k", b"x", replicas=2)
    view = client.get("k", copy=False)
    master = cluster.master_server
    servers = [master, *cluster.nodes]
    if order == "nodes first":
        servers.reverse()
    if order in ("all at once", "ctrl-c"):
        number = signal.SIGINT if order == "ctrl-c" else signal.SIGTERM
        for server in servers:
            server.process.send_signal(number)
        assert [server.wait(within_s=8) for server in servers] == [0] * 3
    else:
        assert [server.terminate(within_s=8) for server in servers] == [0] * 3
    assert not any(node.entry.exists() for node in cluster.nodes)
    assert view == b"x"
    cluster.master_server = None  # it is not to serve any more


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_master_with_memory_takes_its_node_along(tmp_path: Path, number: int) -> None:
    cluster = Cluster(tmp_path)
    try:
        master = cluster.launch(MASTER, {"port": 0, "http_port": 0, "memory": "32MiB"})
        address = master.line(r"listening on (\S+) \(gRPC\)")[1]
        name = master.line("owns 32 MiB as node (.+)")[1]
        cluster.settings["port"] = int(address.rpartition(":")[2])
        client = cluster.client()
        assert client.put("k", b"x") is STORED
        children = children_of(master.pid)
        assert len(children) == 1
        master.process.send_signal(number)
        assert master.wait() == 0
        until(lambda: not any(map(is_running, children)))
        until(lambda: not Path(f"/dev/shm/kvstore.{name}").exists())
        assert "Traceback" not in master.errors
    finally:
        cluster.close()
