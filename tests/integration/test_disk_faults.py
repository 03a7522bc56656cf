"""A disk of a node that fails, moves parts of what it is asked to, or is slow."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from kvstore.calls import DiskStatus
from tests.support.cluster import Cluster, Node
from tests.support.faulty_disk import FaultyDisk
from tests.support.http import metric
from tests.support.processes import free_port
from tests.support.wait import until
from tests.support.workload import content

pytestmark = pytest.mark.slow

SIZE = 200_000
KEYS = [f"key-{number}" for number in range(240)]
"""48 MB, in a pool of 32 MiB."""
IN_MEMORY = 167
"""As many fit at most."""
BRING_S = 2.0
"""The longest wait for a disk."""
LATE_S = 1.0
"""For what else a get costs where tests share the processors."""


@pytest.fixture
def faulty(tmp_path: Path) -> Iterator[FaultyDisk]:
    disk = FaultyDisk(tmp_path)
    yield disk
    disk.close()


def start(cluster: Cluster, faulty: FaultyDisk, **settings: object) -> Node:
    if not cluster.nodes:
        cluster.settings["http_port"] = free_port()
        cluster.start(0)
    cluster.prefix = faulty.prefix
    try:
        return cluster.node(disk=faulty.files, disk_size="128MiB", **settings)
    finally:
        cluster.prefix = []


def disk_of(cluster: Cluster) -> DiskStatus:
    [node] = cluster.status().nodes
    [disk] = node.disks
    return disk


def put(cluster: Cluster, keys: list[str] = KEYS) -> None:
    """At the speed of the disk, so that all of it is written."""
    client = cluster.client()
    for first in range(0, len(keys), 5):
        client.put_many([(key, content(key, SIZE)) for key in keys[first : first + 5]])
        until(partial(_has_written, cluster, first + 15 - IN_MEMORY))


def _has_written(cluster: Cluster, objects: int) -> bool:
    return disk_of(cluster).objects >= objects


def get(cluster: Cluster, keys: list[str] = KEYS) -> tuple[set[str], float]:
    """Return the keys that were found, and the longest wait for one. Each value is whole."""
    client = cluster.client()
    found: set[str] = set()
    longest_s = 0.0
    for key in keys:
        began = time.monotonic()
        value = client.get(key)
        longest_s = max(longest_s, time.monotonic() - began)
        assert value in (None, content(key, SIZE))
        if value is not None:
            found.add(key)
    return found, longest_s


def check_is_off(cluster: Cluster, node: Node, faulty: FaultyDisk, reason: str) -> None:
    """The disk is not used any more, and everybody says so."""
    until(lambda: disk_of(cluster).failed)
    port = cluster.settings["http_port"]
    until(lambda: metric(port, "kvstore_disk_failed", node=node.name) == 1)
    assert f"disk_failed node={node.name}" in cluster.master_server.errors
    [line, *_] = [line for line in node.errors.splitlines() if "disk_error" in line]
    assert f"path={faulty.files}/" in line
    assert reason in line


def test_objects_on_a_disk_whose_reads_fail_are_misses(
    cluster: Cluster, faulty: FaultyDisk
) -> None:
    node = start(cluster, faulty)
    put(cluster)
    assert len(get(cluster)[0]) > 0.9 * len(KEYS)
    faulty.set(reads_fail=1)
    found, longest_s = get(cluster)
    assert IN_MEMORY / 2 < len(found) <= IN_MEMORY
    assert longest_s < LATE_S, "a failed read is a miss at once"
    check_is_off(cluster, node, faulty, "Input/output error")
    reads = faulty.count("reads")
    assert get(cluster)[0] == found, "memory goes on"
    more = [f"more-{number}" for number in range(60)]
    cluster.client().put_many([(key, content(key, SIZE)) for key in more])
    assert get(cluster, more[-10:])[0] == set(more[-10:])
    assert faulty.count("reads") == reads


def test_puts_go_on_with_a_disk_whose_writes_fail(cluster: Cluster, faulty: FaultyDisk) -> None:
    node = start(cluster, faulty)
    faulty.set(writes_fail=1)
    client = cluster.client()
    for key in KEYS:
        began = time.monotonic()
        client.put(key, content(key, SIZE))
        assert time.monotonic() - began < LATE_S
    check_is_off(cluster, node, faulty, "Input/output error")
    found, longest_s = get(cluster)
    assert len(found) > IN_MEMORY / 2
    assert longest_s < LATE_S
    assert 3 <= faulty.count("writes") <= IN_MEMORY


@pytest.mark.parametrize("fault", ["writes_fail", "syncs_fail"])
def test_what_could_not_be_wiped_does_not_come_back(
    cluster: Cluster, faulty: FaultyDisk, fault: str
) -> None:
    node = start(cluster, faulty)
    put(cluster)
    client = cluster.client()
    removed = [key for key in KEYS[:20] if client.exists(key)]
    faulty.set(**{fault: 1})
    client.remove_many(removed)
    assert not get(cluster, removed)[0]
    until(lambda: "disk_failed" in node.errors)
    assert f"{faulty.files}/" in node.errors.partition("disk_failed")[2].splitlines()[0]
    until(lambda: not cluster.status().nodes[0].disks)
    client.put("key", b"value")
    assert client.get("key") == b"value"
    faulty.set(**{fault: 0})
    node.kill()
    start(cluster, faulty, name=node.name)
    until(lambda: not disk_of(cluster).reports)
    assert not get(cluster, removed)[0]


@pytest.mark.parametrize("fault", ["reads_fail", "syncs_fail"])
def test_a_node_whose_disk_fails_when_it_joins_goes_on_without(
    cluster: Cluster, faulty: FaultyDisk, fault: str
) -> None:
    node = start(cluster, faulty)
    put(cluster)
    faulty.set(**{fault: 1})
    cluster.master_server.kill()
    cluster.master()
    until(lambda: "disk_failed" in node.errors)
    until(lambda: cluster.state_of(node) == "alive" and not cluster.status().nodes[0].disks)
    assert len(get(cluster)[0]) > IN_MEMORY / 2, "memory goes on"
    cluster.client().remove_many(KEYS[:20])
    assert node.terminate() == 0
    faulty.set(**{fault: 0})
    start(cluster, faulty, name=node.name)
    until(lambda: not disk_of(cluster).reports)
    assert not get(cluster, KEYS[:20])[0]


def test_objects_on_a_slow_disk_are_misses_until_it_is_fast_again(
    cluster: Cluster, faulty: FaultyDisk
) -> None:
    cluster.settings["put_deadline_ms"] = 10_000  # a copy ends after its query, as by default
    start(cluster, faulty)
    put(cluster)
    faulty.set(bytes_per_s=50_000_000)
    found, longest_s = get(cluster)
    assert len(found) > 0.9 * len(KEYS)
    assert longest_s < LATE_S
    client = cluster.client()
    on_disk = [key for key in KEYS if key in found][:20]
    faulty.set(bytes_per_s=20_000)  # ten seconds for each object
    waited_s = []
    for key in on_disk:
        began = time.monotonic()
        assert client.get(key) is None
        waited_s.append(time.monotonic() - began)
        began = time.monotonic()
        client.put(f"new-{key}", b"value")
        assert client.get(f"new-{key}") == b"value"
        assert time.monotonic() - began < LATE_S, "memory is not slowed"
    assert max(waited_s) < BRING_S + LATE_S
    assert sum(waited > LATE_S for waited in waited_s) <= 3, "most are misses at once"
    faulty.set(bytes_per_s=0)
    until(lambda: len(get(cluster, on_disk)[0]) == len(on_disk))
    assert not disk_of(cluster).failed
