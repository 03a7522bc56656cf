"""Shared memory of nodes with identities: by descriptors, to read or to write, or not at all."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import Client, PutOutcome
from kvstore.errors import NodeUnreachableError
from kvstore.transport.shm import ShmTransport
from tests.support.certificates import Identities
from tests.support.cluster import SHORT, Cluster
from tests.support.processes import KVSTORE, run_python
from tests.support.workload import content

STORED = PutOutcome.STORED
OURS = "ours"
SIZE = 70_001


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
    assert node.errors.count("descriptor_request_refused status=NOT_ALL") == 1
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
