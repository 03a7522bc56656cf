"""Nodes that are killed or stop, and clients that are, in the middle of things."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import pytest

from kvstore import PutOutcome
from kvstore.errors import NoSpaceError
from tests.support.cluster import SHORT, Cluster
from tests.support.processes import ROOT
from tests.support.wait import until
from tests.support.workload import at_work, content, getter, putter

STORED, FOUND = PutOutcome.STORED, PutOutcome.FOUND
BEING_WRITTEN = PutOutcome.BEING_WRITTEN
KEYS = [f"key-{number}" for number in range(60)]
TRANSPORTS = pytest.mark.parametrize("transport", ["shm", "tcp"])


def fill(client: Any, **options: Any) -> None:
    assert set(client.put_many([(key, content(key)) for key in KEYS], **options)) == {STORED}


# --- kill -9 -----------------------------------------------------------------------------------


@TRANSPORTS
def test_a_node_is_killed_while_it_is_read(cluster: Cluster, transport: str) -> None:
    cluster.start()
    client = cluster.client(transports=(transport,), timeout_ms=3_000)
    fill(client)
    reads = getter(client, KEYS)
    views = getter(cluster.client(transports=(transport,)), KEYS, copy=False)
    with at_work(reads, longest_s=4) as reader, at_work(views, longest_s=4) as viewer:
        reader.wait_for("right", more=100)
        cluster.nodes[0].kill()
        reader.wait_for("miss", more=20)
        viewer.wait_for("miss", more=20)
    assert cluster.state_of(cluster.nodes[0]) == "gone"
    with pytest.raises(NoSpaceError) as caught:
        client.put("k", b"x", wait_ms=0)
    assert "kvstore-node" in caught.value.advice
    cluster.node()
    assert client.put("k", b"x") is STORED
    assert client.get("k") == b"x"


@TRANSPORTS
def test_a_node_is_killed_while_it_is_written(cluster: Cluster, transport: str) -> None:
    cluster.start(memory="64MiB")
    client = cluster.client(transports=(transport,), timeout_ms=3_000)
    with at_work(putter(client, "new", wait_ms=200), longest_s=4) as writer:
        writer.wait_for("stored", more=50)
        cluster.nodes[0].kill()
        writer.wait_for("no_space", more=2)
        cluster.node(memory="64MiB")
        writer.wait_for("stored", more=20)
        highest = sum(writer.counts.values())
    found = 0
    for number in range(highest, 0, -1):
        value = client.get(f"new-{number}")
        assert value is None or value == content(f"new-{number}")
        found += value is not None
    assert found >= 20


@TRANSPORTS
def test_with_two_replicas_nobody_notices(cluster: Cluster, transport: str) -> None:
    cluster.start(3)
    client = cluster.client(transports=(transport,))
    fill(client, replicas=2)
    writes = cluster.client(transports=(transport,))
    views = cluster.client(transports=(transport,))
    with (
        at_work(getter(client, KEYS)) as reader,
        at_work(getter(views, KEYS, copy=False)) as viewer,
        at_work(lambda number: putter(writes, "new", replicas=2)(number % 200)) as writer,
    ):
        reader.wait_for("right", more=100)
        writer.wait_for("stored", more=20)
        cluster.nodes[1].kill()
        for _ in range(2):
            reader.wait_for("right", more=2 * len(KEYS))
            viewer.wait_for("right", more=2 * len(KEYS))
        until(lambda: cluster.state_of(cluster.nodes[1]) == "gone")
        reader.wait_for("right", more=2 * len(KEYS))
        viewer.wait_for("right", more=2 * len(KEYS))
    assert set(reader.counts) == {"right"}
    assert set(viewer.counts) == {"right"}
    assert set(writer.counts) <= {"stored", "found"}


# --- stopped, not dead -------------------------------------------------------------------------


def test_a_node_that_stalls_for_too_long_joins_anew(cluster: Cluster) -> None:
    cluster.start()
    client = cluster.client(transports=("tcp",), timeout_ms=1_500)
    fill(client)
    node = cluster.nodes[0]
    with at_work(getter(client, KEYS), longest_s=3) as reader:
        reader.wait_for("right", more=10)
        node.freeze()
        reader.wait_for("miss", more=10)
        until(lambda: cluster.state_of(node) == "gone")
        node.resume()
        until(lambda: cluster.state_of(node) == "alive")
        reader.wait_for("right", more=len(KEYS))
    assert "node_fenced" in node.errors
    assert client.put(KEYS[0], content(KEYS[0])) is FOUND  # it has told what it holds
    assert client.put("new", b"x", wait_ms=1_400) is STORED
    assert client.get("new") == b"x"


# --- clients -----------------------------------------------------------------------------------

HALF_A_PUT = """
import sys, time
from kvstore import Client, calls
client = Client(sys.argv[1])
client.get("nothing")
request = calls.PutStart(
    "default", [b"half"], [4 << 20], None, False, 1, False, 0, client._state.host
)
client._stub.call(request, time.monotonic() + 5)
print("granted", flush=True)
time.sleep(600)
"""


def test_a_client_is_killed_between_put_start_and_put_end(cluster: Cluster) -> None:
    cluster.start()
    client = cluster.client()
    client.put("k", b"x")
    before = cluster.used_bytes()
    process = subprocess.Popen(
        [sys.executable, "-c", HALF_A_PUT, cluster.address], stdout=subprocess.PIPE, cwd=ROOT
    )
    try:
        assert process.stdout is not None
        with process.stdout as said:
            assert said.readline() == b"granted\n"
    finally:
        process.kill()
        process.wait()
    started = time.monotonic()
    assert client.put("half", b"mine") is BEING_WRITTEN
    assert client.get("half") is None
    assert not client.exists("half")
    assert cluster.used_bytes() >= before + (4 << 20)
    until(lambda: client.put("half", b"mine") is STORED)
    assert client.get("half") == b"mine"
    promised_s = (SHORT["put_deadline_ms"] + SHORT["dead_ms"]) / 1000
    until(lambda: cluster.used_bytes() < before + (4 << 20))
    assert promised_s - 0.5 < time.monotonic() - started < promised_s + 2
