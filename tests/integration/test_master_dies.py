"""The master is killed, stopped, frozen and started again."""

from __future__ import annotations

import contextlib
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import PutOutcome
from kvstore.errors import (
    DeadlineExceededError,
    MasterUnreachableError,
    NoSpaceError,
    UnavailableError,
)
from tests.integration.conftest import either_client
from tests.support.cluster import MASTER, SHORT, Cluster
from tests.support.processes import children_of, is_running
from tests.support.traffic import at_work, content, getter, putter
from tests.support.waiting import until

STORED = PutOutcome.STORED
KEYS = [f"key-{number}" for number in range(20)]


def kill_master(cluster: Cluster) -> None:
    cluster.master_server.kill()


def test_calls_wait_for_a_master_that_comes_back(cluster: Cluster) -> None:
    cluster.start()
    with contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(either_client(kind, cluster.address, lane=lane))
            for kind in ("sync", "async")
            for lane in (True, False)
        ]
        for number, client in enumerate(clients):
            client.put(f"k{number}", b"old")
        kill_master(cluster)
        workers = [
            stack.enter_context(at_work(putter(client, f"new{number}", wait_ms=5_000)))
            for number, client in enumerate(clients)
        ]
        time.sleep(0.3)  # so that they have found out and wait
        started = time.monotonic()
        cluster.master()
        for worker in workers:
            worker.wait_for("stored", more=5)
        assert time.monotonic() - started < 6
        for worker in workers:
            assert set(worker.finish()) == {"stored"}
        for number, client in enumerate(clients):
            assert client.get(f"k{number}") == b"old"
            assert client.get(f"new{number}-1") == content(f"new{number}-1")
    (node,) = cluster.status().nodes
    assert node.name == cluster.nodes[0].name
    assert "node_fenced" in cluster.nodes[0].errors


def test_what_was_promised_before_holds_after(cluster: Cluster) -> None:
    """Old views keep their bytes while their leases are held, whatever is put meanwhile."""
    cluster.start(memory="16MiB")
    client = cluster.client()
    old = np.full(1 << 20, 1, np.uint8)
    for number in range(8):
        client.put(f"old-{number}", old)
    views = [client.get(f"old-{number}", copy=False) for number in range(8)]
    leases = [client.lease(view) for view in views if view is not None]
    kill_master(cluster)
    cluster.master()
    restarted = time.monotonic()
    number = 0
    while time.monotonic() - restarted < 3:
        number += 1
        with contextlib.suppress(UnavailableError, NoSpaceError):
            client.put(f"new-{number}", np.full(1 << 20, 2, np.uint8), wait_ms=100)
        for view, lease in zip(views, leases, strict=True):
            assert isinstance(view, np.ndarray)
            assert lease is not None
            whole = (view == 1).all()
            assert whole or not lease.held
    view = None
    views.clear()
    assert client.put("after", old, wait_ms=2_000) is STORED


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
    until(lambda: lease.seconds_left > 14 or not lease.held)
    assert lease.held, "the promise has held without a gap"
    assert view == b"x" * 1_000


def test_a_cached_place_of_another_epoch_is_asked_for_again(cluster: Cluster) -> None:
    cluster.start()
    for transport in ("shm", "tcp"):
        client = cluster.client(transports=(transport,))
        client.put("k", b"old", wait_ms=3_000)
        assert client.get("k") == b"old"
        kill_master(cluster)
        cluster.master()
        until(lambda: cluster.status().nodes)
        assert client.get("k") == b"old"
        assert client.remove("k")
        assert client.get("k") is None
        assert cluster.state_of(cluster.nodes[0]) == "alive", "nobody may call it suspect"


def test_a_frozen_master_costs_a_deadline(cluster: Cluster) -> None:
    cluster.start()
    client = cluster.client(timeout_ms=700)
    client.put("k", b"x")
    for _ in range(2):  # what is read twice within a second stays leased
        assert client.get("k") == b"x"
    cluster.master_server.freeze()
    frozen = time.monotonic()
    assert client.get("k") == b"x"  # its lease lives: nobody is asked
    for attempt in (lambda: client.exists("k"), lambda: client.put("l", b"x")):
        started = time.monotonic()
        with pytest.raises((DeadlineExceededError, MasterUnreachableError)):
            attempt()
        assert time.monotonic() - started < 3
    until(lambda: time.monotonic() - frozen > SHORT["dead_ms"] / 1000 + 0.2)
    cluster.master_server.resume()
    until(lambda: cluster.state_of(cluster.nodes[0]) == "alive")
    patient = cluster.client()
    assert patient.put("l", b"x", wait_ms=3_000) in (STORED, PutOutcome.FOUND)


def test_reading_and_writing_go_on_over_two_restarts(cluster: Cluster) -> None:
    cluster.start(2)
    client = cluster.client()
    with (
        at_work(getter(cluster.client(), [f"new-{number}" for number in range(1, 50)])) as reader,
        at_work(lambda number: putter(client, "new", wait_ms=4_000)(number % 50)) as writer,
    ):
        for _ in range(2):
            reader.wait_for("right", more=20)
            kill_master(cluster)
            cluster.master()
            writer.wait_for("found", more=50)
    assert set(reader.counts) <= {"right", "miss"}
    assert set(writer.counts) <= {"stored", "found", "being_written", "no_space"}


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


def test_a_node_that_cannot_find_its_master_stops_when_told(cluster: Cluster) -> None:
    cluster.start()
    assert cluster.master_server.terminate() == 0
    node = cluster.nodes[0]
    until(lambda: "waiting_for_master" in node.errors)
    assert node.terminate(within_s=5) == 0
    never = cluster.launch_node()
    until(lambda: "waiting_for_master" in never.errors)
    assert never.terminate(within_s=5) == 0
    cluster.master_server = None


def test_a_stopping_master_lets_nobody_hang(cluster: Cluster) -> None:
    """Puts that wait for room, streams of nodes, idle connections: all end."""
    cluster.start(memory="8MiB")
    client: Any = cluster.client(timeout_ms=3_000)
    for number in range(6):
        client.put(f"k{number}", content("k", 1 << 20))
        client.get(f"k{number}")
    views = [client.get(f"k{number}", copy=False) for number in range(6)]
    writing = putter(cluster.client(timeout_ms=2_000), "w", wait_ms=1_500)
    with at_work(lambda n: writing(n) if n == 1 else "over", longest_s=4) as writer:
        time.sleep(0.2)
        assert cluster.master_server.terminate(within_s=5) == 0
        writer.wait_for("over")
    assert views
    cluster.master_server = None
