"""Nodes that are killed or stop, and clients that are, in the middle of things."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import pytest

from kvstore import PutOutcome
from kvstore.errors import KVStoreError, NoSpaceError
from tests.support.cluster import SHORT, Cluster
from tests.support.processes import ROOT
from tests.support.traffic import at_work, content, getter, putter
from tests.support.waiting import until

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


def test_a_node_that_stalls_for_a_moment_loses_nothing(cluster: Cluster) -> None:
    cluster.settings["dead_ms"] = 2_100  # suspect before a read is given up
    cluster.start()
    client = cluster.client(transports=("tcp",), timeout_ms=5_000)
    fill(client)
    node = cluster.nodes[0]
    with at_work(getter(client, KEYS), longest_s=6) as reader:
        reader.wait_for("right", more=10)
        node.freeze()
        until(lambda: cluster.state_of(node) == "suspect")
        node.resume()
        until(lambda: cluster.state_of(node) == "alive")
        reader.wait_for("right", more=len(KEYS))
    assert set(reader.counts) == {"right"}
    assert client.put("k", b"x") is STORED


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


def test_with_two_replicas_a_stalled_node_costs_time_and_no_error(cluster: Cluster) -> None:
    cluster.start(2)
    client = cluster.client(transports=("tcp",), timeout_ms=3_000)
    fill(client, replicas=2)
    with at_work(getter(client, KEYS), longest_s=2.5) as reader:
        reader.wait_for("right", more=len(KEYS))
        cluster.nodes[0].freeze()
        reader.wait_for("right", more=3 * len(KEYS))
        cluster.nodes[0].resume()
        reader.wait_for("right", more=len(KEYS))
    assert set(reader.counts) == {"right"}


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


def test_a_client_is_killed_while_it_writes(cluster: Cluster) -> None:
    cluster.start(memory="64MiB")
    program = (
        "import sys; sys.path.insert(0, '.')\n"
        "from kvstore import Client\nfrom tests.support.traffic import content\n"
        "client = Client(sys.argv[1], transports=(sys.argv[2],))\n"
        "for number in range(10**6):\n"
        "    key = f'new-{number % 40}'\n"
        "    client.put(key, content(key), overwrite=True, wait_ms=5_000)\n"
        "    number or print('begun', flush=True)\n"
    )
    client = cluster.client()
    for transport in ("shm", "tcp"):
        process = subprocess.Popen(
            [sys.executable, "-c", program, cluster.address, transport],
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        try:
            assert process.stdout is not None
            with process.stdout as said:
                assert said.readline() == b"begun\n"
            until(lambda: client.exists("new-5"))
        finally:
            process.kill()
            process.wait()
        for number in range(40):
            value = client.get(f"new-{number}")
            assert value is None or value == content(f"new-{number}")
    until(lambda: client.put("new-1", content("new-1"), overwrite=True) is STORED)


# --- a full pool -------------------------------------------------------------------------------


def test_a_pool_that_is_full_of_leased_objects(cluster: Cluster) -> None:
    lease_s = 3
    cluster.settings["lease_ms"] = lease_s * 1000
    cluster.start(memory="16MiB")
    client = cluster.client()
    size = 1 << 20
    stored: list[str] = []

    def put_one_more() -> None:
        key = f"leased-{len(stored)}"
        client.put(key, content(key, size), wait_ms=0)
        stored.append(key)
        client.lookup(stored)  # leases them until they are read
        assert client.exists_many(stored) == [True] * len(stored)

    with pytest.raises(NoSpaceError) as caught:  # noqa: PT012  # one of these calls
        for _ in range(20):
            put_one_more()
    assert 10 <= len(stored) < 16
    assert 0 < int(caught.value.fields["missing_bytes"]) <= size + 2048
    assert caught.value.advice
    assert caught.value.retriable
    assert client.get_many(stored, copy=False) is not None
    held = client.get(stored[0], copy=False)
    started = time.monotonic()
    with pytest.raises(NoSpaceError):
        client.put("new", content("new", size), wait_ms=0)
    assert time.monotonic() - started < 2
    assert client.put("new", content("new", size), wait_ms=5_000) is STORED
    waited = time.monotonic() - started
    assert 0.1 < waited < lease_s + 1.5
    number = 0
    while client.exists(stored[1]):  # the rest is replaced as its leases end; what is held is not
        assert time.monotonic() - started < 15
        assert client.put(f"more-{number}", content("m", size), wait_ms=5_000) is STORED
        number += 1
    assert held is not None
    lease = client.lease(held)
    assert lease is not None
    assert lease.held
    assert bytes(held) == content(stored[0], size)
    assert client.get(stored[1]) is None
    del caught  # its traceback refers to this frame, which refers to it and to what is held


def test_those_who_wait_for_room_are_served_in_order(cluster: Cluster) -> None:
    cluster.start(memory="8MiB")
    client = cluster.client()
    for number in range(6):
        client.put(f"old-{number}", content("o", 1 << 20))
        client.get(f"old-{number}")
    writers = [
        at_work(putter(cluster.client(), f"w{number}", wait_ms=5_000), longest_s=6)
        for number in range(3)
    ]
    with writers[0] as first, writers[1] as second, writers[2] as third:
        for writer in (first, second, third):
            writer.wait_for("stored", more=20)
    with pytest.raises(KVStoreError):
        client.put_many([(f"b-{n}", content("b", 1 << 20)) for n in range(9)], wait_ms=0)


def test_a_partial_put_fills_a_pool_of_leased_objects(cluster: Cluster) -> None:
    cluster.settings["lease_ms"] = 60_000
    cluster.start(memory="16MiB")
    client = cluster.client()
    size = 1 << 20
    client.put_many([(f"leased-{number}", content(f"{number}", size)) for number in range(8)])
    client.lookup([f"leased-{number}" for number in range(8)])
    items = [(f"new-{number}", content(f"new-{number}", size)) for number in range(12)]
    items.append(("small", b"small"))
    outcomes = client.put_many(items, partial=True, wait_ms=0)
    fit = outcomes.index(PutOutcome.NO_SPACE)
    assert 4 <= fit < 8
    assert outcomes == [STORED] * fit + [PutOutcome.NO_SPACE] * (12 - fit) + [STORED]
    assert client.exists_many([key for key, _ in items]) == [
        outcome is STORED for outcome in outcomes
    ]
    with pytest.raises(NoSpaceError):
        client.put_many(items[:12], wait_ms=0)
    keys, values = [key for key, _ in items[:12]], [value for _, value in items[:12]]
    client.lookup(keys)
    assert (
        client.put_chain(keys, values, partial=True, wait_ms=0, namespace="chain")
        == [PutOutcome.NO_SPACE] * 12
    )
