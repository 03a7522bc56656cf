"""Nodes that pool memory of a device: a fake one, which real processes share as they share a GPU's.

The client's own device, where it has one, runs its copies late and in a random order, so a missing
wait is a wrong byte.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import Client, PutOutcome
from kvstore.device import drivers
from kvstore.errors import NoSpaceError
from kvstore.memory.header import SUPERBLOCK_BYTES
from tests.support.cluster import Cluster, Node
from tests.support.fake_device import FakeDriver
from tests.support.wait import until
from tests.support.workload import content, kill_while_used

torch = pytest.importorskip("torch")
STORED = PutOutcome.STORED
TRANSPORTS = pytest.mark.parametrize("transport", ["shm", "tcp"])
POOLED = "fake:0"
"""The device of the nodes."""
KEYS = [f"key-{number}" for number in range(20)]
SIZES = [0, 1, 1_000, 4_096, 70_001, 3 << 20]


@pytest.fixture(params=[POOLED, "cuda:0"])
def fake(request: pytest.FixtureRequest) -> Iterator[FakeDriver]:
    """The client's device: that of the node, or another one."""
    made = FakeDriver(request.param, seed=7)
    drivers.use(made.name, made)
    yield made
    drivers.use(made.name, None)


def start(cluster: Cluster, **settings: Any) -> Node:
    cluster.master()
    return cluster.node(device=POOLED, **settings)


def memory_of(node: Node) -> Path:
    """The memory of the node's fake device."""
    for each in Path(f"/proc/{node.pid}/fd").iterdir():
        if "kvstore-fake-device" in os.readlink(each):
            return each
    raise AssertionError("the node has none")


def used_transports(client: Client) -> set[str]:
    return set(client.stats().transports)


@TRANSPORTS
def test_values_come_back(cluster: Cluster, transport: str) -> None:
    node = start(cluster)
    client = cluster.client(transports=(transport,))
    values = {f"{size}": os.urandom(size) for size in SIZES}
    assert set(client.put_many(list(values.items()))) == {STORED}
    assert client.get_many(list(values)) == list(values.values())
    for key, value in values.items():
        buffer = bytearray(len(value))
        client.get_into(key, buffer)
        assert bytes(buffer) == value
    assert client.get("70001", copy=False) == values["70001"]
    assert client.put("1", b"other", overwrite=True) is STORED
    assert client.get("1") == b"other"
    assert client.remove("4096")
    assert client.get("4096") is None
    keys = [f"block-{number}" for number in range(8)]
    blocks = [os.urandom(10_000) for _ in keys]
    assert set(client.put_chain(keys, blocks)) == {STORED}
    assert client.match_prefix(keys) == len(keys)
    assert client.get_many(keys) == blocks
    assert used_transports(client) == {"device" if transport == "shm" else "tcp"}
    assert node.entry.stat().st_size == SUPERBLOCK_BYTES


@TRANSPORTS
def test_a_killed_node_takes_its_objects_along(cluster: Cluster, transport: str) -> None:
    node = start(cluster)
    client = cluster.client(transports=(transport,), timeout_ms=3_000)
    assert set(client.put_many([(key, content(key)) for key in KEYS])) == {STORED}
    assert client.get_many(KEYS) == [content(key) for key in KEYS]
    node.kill()
    assert client.get_many(KEYS) == [None] * len(KEYS)
    assert node.entry.exists(), "a killed process removes nothing"
    again = cluster.node(device=POOLED, name=node.name)
    assert client.get_many(KEYS) == [None] * len(KEYS)
    assert client.put("new", b"value") is STORED
    assert client.get("new") == b"value"
    again.kill()
    of_host = cluster.node(name=node.name)
    assert until(lambda: client.put("new", b"of the host") is STORED)
    assert client.get("new") == b"of the host"
    assert of_host.entry.stat().st_size > SUPERBLOCK_BYTES


@TRANSPORTS
def test_a_node_is_killed_while_it_is_used(cluster: Cluster, transport: str) -> None:
    """No call returns wrong bytes, none hangs, and a new node of that name serves at once."""
    node = start(cluster, memory="64MiB")
    client = cluster.client(transports=(transport,), timeout_ms=3_000)
    writes = cluster.client(transports=(transport,), timeout_ms=3_000)
    counts = kill_while_used(
        client, writes, KEYS, node,
        lambda name: cluster.node(device=POOLED, name=name, memory="64MiB"), longest_s=4,
    )  # fmt: skip
    assert sum(counts.values()) > 100


def test_a_master_that_is_started_again_learns_the_objects(cluster: Cluster) -> None:
    start(cluster)
    client = cluster.client()
    assert set(client.put_many([(key, content(key)) for key in KEYS])) == {STORED}
    assert client.remove(KEYS[0])
    cluster.master_server.kill()
    cluster.master()
    assert client.get_many(KEYS) == [None, *(content(key) for key in KEYS[1:])]


def test_an_allocation_is_memory_of_a_host(cluster: Cluster) -> None:
    start(cluster)
    client = cluster.client()
    with pytest.raises(NoSpaceError) as caught:
        client.allocate(1_000)
    assert caught.value.fields["cause"] == "on_device"
    del caught  # its traceback refers to this frame, which refers to it and to the allocation
    cluster.node()
    array = client.allocate(1_000, kind="numpy")
    assert isinstance(array, np.ndarray)
    array[:] = 7
    assert client.put("key", array) is STORED
    assert client.get("key", kind="bytes") == bytes([7]) * 1_000


# --- without a copy ------------------------------------------------------------------------------


def lent(client: Client, key: str) -> Any:
    """A tensor over the pool's memory, or None."""
    return client.get(key, device=POOLED, copy=False)


def held(client: Client, tensor: Any) -> bool:
    lease = client.lease(tensor)
    assert lease is not None
    return lease.is_held


def address_in(node: Node, needle: bytes) -> int:
    """Where the only copy of ``needle`` is in the memory of the node's device."""
    memory = memory_of(node).read_bytes()
    assert memory.count(needle) == 1
    return memory.index(needle)


def overwrite(node: Node, at: int, data: bytes) -> None:
    with memory_of(node).open("r+b") as file:
        file.seek(at)
        file.write(data)


def test_a_tensor_is_used_where_it_is(cluster: Cluster) -> None:
    """It is the pool's own memory, of the dtype and shape that were put, and leased."""
    node = start(cluster)
    client = cluster.client()
    values = {
        "floats": torch.randn(64, 33),
        "halves": torch.randn(5, 7).to(torch.bfloat16),
        "empty": torch.empty(0, 4),
    }
    assert set(client.put_many(values)) == {STORED}
    assert client.put("bytes", b"as they are") is STORED
    views: Any = client.get_many([*values, "bytes", "absent"], device=POOLED, copy=False)
    for view, value in zip(views, values.values(), strict=False):
        assert isinstance(view, torch.Tensor)
        assert (view.dtype, view.shape) == (value.dtype, value.shape)
        assert torch.equal(view, value)
    floats, halves, empty, raw, absent = views
    assert absent is None
    assert bytes(raw.tolist()) == b"as they are"
    assert client.lease(empty) is None
    assert all(held(client, view) for view in (floats, halves, raw))
    assert held(client, floats[3:].view(torch.int32)), "what was made of it has its lease"
    data = values["floats"].numpy().tobytes()
    overwrite(node, address_in(node, data), bytes(4))
    assert floats.flatten()[0] == 0, "it is not the pool's memory"


def test_a_lent_tensor_keeps_its_bytes(cluster: Cluster) -> None:
    """As long as the view lives, its lease is renewed, and nothing takes its memory."""
    start(cluster, memory="4MiB")
    client = cluster.client()
    value = torch.arange(200_000)
    assert client.put("kept", value) is STORED
    view = lent(client, "kept")
    for number in range(30):
        outcome = client.put(f"{number}", os.urandom(1 << 20), wait_ms=0)
        assert outcome in (STORED, PutOutcome.NO_SPACE)
        assert held(client, view)
        time.sleep(0.1)  # three leases pass
    assert torch.equal(view, value)
    del view
    assert client.put("new", os.urandom(3 << 20), wait_ms=10_000) is STORED


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_lease_ends_with_the_owner_of_the_memory(cluster: Cluster, how: str) -> None:
    node = start(cluster)
    client = cluster.client(timeout_ms=3_000)
    assert client.put("k", torch.arange(1_000)) is STORED
    view = lent(client, "k")
    assert held(client, view)
    if how == "kill":
        node.kill()
    else:
        node.process.terminate()
        assert node.wait() == 0
    assert not held(client, view)
    assert lent(client, "k") is None


def test_what_cannot_be_lent_is_copied(cluster: Cluster, fake: FakeDriver) -> None:
    """Objects of a host, of another device, and all of them over tcp."""
    start(cluster)
    value = torch.arange(1_000)
    over_tcp = cluster.client(transports=("tcp",))
    assert over_tcp.put("k", value) is STORED
    client = cluster.client(timeout_ms=10_000)
    for each in (over_tcp, client):
        copied: Any = each.get("k", device=fake.name, copy=False)
        fake.finish()
        assert torch.equal(copied, value)
        is_lent = each is client and fake.name == POOLED
        assert (each.lease(copied) is not None) == is_lent


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"protocol": "tcp"}, "--device"),
        ({"keep": True}, "--device"),
        ({"device": "gpu"}, "cuda:0"),
    ],
)
def test_settings_that_do_not_go_together(
    cluster: Cluster, settings: dict[str, Any], said: str
) -> None:
    cluster.master()
    refused = cluster.launch_node(**({"device": POOLED} | settings))
    assert refused.wait() != 0
    assert said in refused.errors
