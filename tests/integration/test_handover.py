"""Shared memory of nodes with identities: by descriptors, to read or to write, or not at all."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import Client, PutOutcome
from kvstore.errors import NodeUnreachableError
from kvstore.transport.shm import ShmTransport
from tests.support.cluster import SHORT, Cluster
from tests.support.issuing import Identities
from tests.support.processes import KVSTORE, run_python
from tests.support.traffic import content
from tests.support.waiting import until

STORED = PutOutcome.STORED
OURS, THEIRS = "ours", "theirs"
SIZE = 70_001
GROUP = 65_532


@pytest.fixture
def cluster(tmp_path: Path, identities: Identities) -> Iterator[Cluster]:
    with Cluster(tmp_path, settings=SHORT, identities=identities) as cluster:
        cluster.master()
        yield cluster


def client_of(cluster: Cluster, auth: str, **settings: Any) -> Client:
    return cluster.client(auth=auth, namespace=OURS, name=Path(auth).stem, **settings)


def shm_of(client: Client) -> ShmTransport:
    transports = client._state.movers._transports
    return next(each for each in transports if isinstance(each, ShmTransport))


def moved(client: Client) -> set[str]:
    """The transports that have moved bytes since the last call."""
    counts = client._state.movers.moved
    names = set(counts)
    counts.clear()
    return names


def test_who_may_only_read_maps_to_read(cluster: Cluster, identities: Identities) -> None:
    node = cluster.node()
    assert node.entry.stat().st_mode & 0o777 == 0o600
    writer = client_of(cluster, identities.engine("writer", OURS))
    reader = client_of(cluster, identities.file("reader", "engine", reads=[OURS]))
    assert writer.put("k", content("k", SIZE)) is STORED
    assert writer.get("k", kind="bytes") == content("k", SIZE)
    assert writer.allocate(100, kind="numpy") is not None
    assert moved(writer) == {"shm"}
    for copy in (True, False):
        value = reader.get("k", kind="numpy", copy=copy)
        assert isinstance(value, np.ndarray)
        assert value.tobytes() == content("k", SIZE)
    assert moved(reader) == {"shm"}
    (mapping,) = shm_of(reader)._mappings.values()
    assert mapping is not None
    assert mapping.memory.readonly
    maps = Path("/proc/self/maps").read_text()
    assert re.search(rf"r--s .*/kvstore\.{re.escape(node.name)}$", maps, re.MULTILINE)
    assert reader.stats().not_mapped == {}


@pytest.mark.slow  # two doctors
def test_where_a_mapping_needs_all_namespaces_others_are_served_by_tcp(
    cluster: Cluster, identities: Identities
) -> None:
    node = cluster.node(shm_clients="all-namespaces")
    narrow = client_of(cluster, identities.engine("narrow", OURS))
    wide = client_of(cluster, identities.engine("wide", "*"))
    between = client_of(cluster, identities.file("between", "engine", reads=["*"], writes=[OURS]))
    assert narrow.put("k", content("k", SIZE)) is STORED
    assert narrow.get("k", kind="bytes") == content("k", SIZE)
    assert moved(narrow) == {"tcp"}
    assert "may not read all namespaces" in narrow.stats().not_mapped[node.name]
    with pytest.raises(NodeUnreachableError, match="not mapped here to write"):
        narrow.allocate(100)
    assert wide.get("k", kind="bytes") == content("k", SIZE)
    assert wide.put("w", b"w") is STORED
    assert moved(wide) == {"shm"}
    assert between.get("k", kind="bytes") == content("k", SIZE)
    assert moved(between) == {"shm"}
    assert between.put("b", b"b") is STORED
    assert moved(between) == {"tcp"}
    assert not any(shm_of(narrow)._mappings.values())
    assert node.errors.count("handover_refused status=NOT_ALL") == 1
    doctor = _doctor(cluster, identities.engine("narrow", OURS))
    assert "cannot be mapped: this identity may not read all namespaces" in doctor
    assert "its memory can be mapped, to read alone" in _doctor(
        cluster, identities.file("between", "engine")
    )


def _doctor(cluster: Cluster, auth: str) -> str:
    said = run_python(
        *KVSTORE, "doctor", "--master", cluster.address,
        variables={"KVSTORE_AUTH": auth}, within_s=120,
    ).stdout  # fmt: skip
    return " ".join(said.split())


@pytest.mark.slow  # a node that ends twice, and a command
def test_a_killed_node_finds_its_memory_and_its_clients_map_it_again(
    cluster: Cluster, identities: Identities
) -> None:
    node = cluster.node(keep=True)
    client = client_of(cluster, identities.engine("engine", OURS))
    keys = [f"k{number}" for number in range(10)]
    client.put_many([(key, content(key, SIZE)) for key in keys])
    node.process.send_signal(signal.SIGKILL)
    node.wait()
    again = cluster.node(name=node.name)
    assert "memory_attached" in again.errors
    until(lambda: all(client.get_many(keys)), within_s=20)
    moved(client)
    assert client.get_many(keys, kind="bytes") == [content(key, SIZE) for key in keys]
    assert client.put("after", b"x", wait_ms=5_000) is STORED
    newcomer = client_of(cluster, identities.engine("engine", OURS))
    assert newcomer.get_many(keys, kind="bytes") == [content(key, SIZE) for key in keys]
    assert moved(client) == moved(newcomer) == {"shm"}
    again.process.send_signal(signal.SIGKILL)
    again.wait()
    assert again.entry.exists()
    assert again.socket.is_socket()
    run_python(*KVSTORE, "clean", node.name, "--yes", check=True)
    assert not again.entry.exists()
    assert not again.socket.exists()
    assert not again.key.exists()


OTHER = """
import os, sys
from kvstore import Client
with Client(sys.argv[1], auth=sys.argv[2], namespace="ours") as client:
    assert client.get("none") is None
    os.setgroups([int(each) for each in sys.argv[3:]])
    os.setgid(65533)
    os.setuid(65533)
    assert client.get("k", kind="bytes") == b"from root"
    client.put("other", b"from another user")
    print(*client.stats().transports, client.stats().not_mapped)
"""
"""The interpreter and the identity are for root to read, so it becomes another user before it maps
the memory."""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_another_user_of_the_group_is_handed_the_memory_whose_name_it_cannot_open(
    cluster: Cluster, identities: Identities
) -> None:
    node = cluster.node(shm_group=str(GROUP))
    assert node.entry.stat().st_mode & 0o777 == 0o600
    ours = client_of(cluster, identities.engine("engine", OURS))
    ours.put("k", b"from root")
    auth = identities.engine("other", OURS)
    for groups, begin, end in (([str(GROUP)], "shm {", "}"), ([], "tcp {", "lets a group in'}")):
        said = run_python("-c", OTHER, cluster.address, auth, *groups)
        assert said.stdout.startswith(begin), said
        assert said.stdout.endswith(f"{end}\n"), said
        assert ours.remove("other"), said
