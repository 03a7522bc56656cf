"""Objects that do not fit into memory are on a node's disk, whatever happens to its process."""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path

import pytest

from kvstore.archive.transfer import blocks_of
from kvstore.calls import DiskStatus
from tests.support.cluster import Cluster, Node
from tests.support.wait import until
from tests.support.workload import content

SIZE = 200_000
KEYS = [f"key-{number}" for number in range(300)]
"""60 MB, in a pool of 32 MiB."""
IN_MEMORY = 157
"""As many fit and leave a sixteenth free."""
DISK = "256MiB"


def start(cluster: Cluster, folder: Path, **settings: object) -> Node:
    folder.mkdir(exist_ok=True)
    return cluster.node(disk=folder, disk_size=DISK, **settings)


def restarted(cluster: Cluster, node: Node, folder: Path) -> Node:
    again = start(cluster, folder, name=node.name)
    until(lambda: "medium=disk" in again.errors)
    # Memory of before is granted once the leases on it have ended.
    until(lambda: not any(s.ready_ms for n in cluster.status().nodes for s in n.segments))
    return again


def disks(cluster: Cluster) -> list[DiskStatus]:
    return [disk for node in cluster.status().nodes for disk in node.disks]


def fill(cluster: Cluster) -> set[str]:
    """At the speed of the disk: faster puts evict what is not written yet, and a few may. Returns
    what is there."""
    client = cluster.client()
    for first in range(0, len(KEYS), 5):
        client.put_many([(key, content(key, SIZE)) for key in KEYS[first : first + 5]])
        wanted = int(0.96 * first) + 5 - IN_MEMORY
        until(partial(_has_written, cluster, wanted))
    present = {k for k, is_there in zip(KEYS, client.exists_many(KEYS), strict=True) if is_there}
    assert len(present) > 0.95 * len(KEYS)
    return present


def _has_written(cluster: Cluster, objects: int) -> bool:
    return sum(disk.objects for disk in disks(cluster)) >= objects


def found(cluster: Cluster) -> set[str]:
    client = cluster.client()
    values = {key: client.get(key) for key in KEYS}
    assert all(value in (None, content(key, SIZE)) for key, value in values.items())
    return {key for key, value in values.items() if value is not None}


def test_more_than_memory_is_found_and_survives_kills_and_the_loss_of_memory(
    cluster: Cluster, tmp_path: Path
) -> None:
    cluster.start(0)
    node = start(cluster, tmp_path / "disk")
    present = fill(cluster)
    client = cluster.client()
    assert {b.key.decode() for b in blocks_of(client, "default", (), pinned=False)} == present
    assert found(cluster) == present
    node.kill()
    node = restarted(cluster, node, tmp_path / "disk")
    assert found(cluster) == present
    node.kill()
    node.entry.unlink()  # as after a power failure
    node = restarted(cluster, node, tmp_path / "disk")
    left = found(cluster)
    assert len(left) >= len(present) - IN_MEMORY
    cluster.client().remove_many(list(left)[:50])
    assert not found(cluster) & set(list(left)[:50])
    node.kill()
    restarted(cluster, node, tmp_path / "disk")
    assert not found(cluster) & set(list(left)[:50])


def test_a_master_that_is_killed_knows_the_disk_again(cluster: Cluster, tmp_path: Path) -> None:
    cluster.start(0)
    node = start(cluster, tmp_path / "disk")
    present = fill(cluster)
    cluster.master_server.kill()
    cluster.master()
    until(lambda: "medium=disk" in node.errors)
    until(lambda: not any(s.ready_ms for n in cluster.status().nodes for s in n.segments))
    assert found(cluster) == present


@pytest.mark.parametrize("next_master", [False, True])
def test_a_disk_that_was_absent_shows_nothing_that_was_removed_or_replaced(
    cluster: Cluster, tmp_path: Path, next_master: bool
) -> None:
    """The node is started without ``--disk``, and with it again."""
    cluster.start(0)
    node = start(cluster, tmp_path / "disk")
    present = sorted(fill(cluster))
    node.kill()
    node = cluster.node(name=node.name)
    until(lambda: not any(s.ready_ms for n in cluster.status().nodes for s in n.segments))
    client = cluster.client()
    removed, replaced, put, kept = (present[number::4] for number in range(4))
    client.remove_many(removed)
    for keys, overwrite in ((replaced[:20], True), (put[:20], False)):
        values = [(key, content(f"new {key}", SIZE)) for key in keys]
        client.put_many(values, overwrite=overwrite)
    before = {key: client.get(key) for key in present}
    assert all(before[key] for key in replaced[:20] + put[:20])
    node.kill()
    if next_master:
        cluster.master_server.kill()
        cluster.master()
    restarted(cluster, node, tmp_path / "disk")
    after = {key: client.get(key) for key in present}
    for key in removed + replaced[:20] + put[:20]:
        assert after[key] in (None, before[key])
    for key in kept:
        assert after[key] in (None, content(key, SIZE))
    is_found_again = any(after[key] and not before[key] for key in kept)
    assert is_found_again or next_master, "that master knows what was removed"


def test_an_image_of_a_disk_in_use_has_only_whole_objects(cluster: Cluster, tmp_path: Path) -> None:
    """A copy of the file while it is written is what a power failure may leave."""
    cluster.start(0)
    node = start(cluster, tmp_path / "disk")
    client = cluster.client()
    image = tmp_path / "image"
    image.mkdir()
    for number in range(0, len(KEYS), 10):
        client.put_many([(key, content(key, SIZE)) for key in KEYS[number : number + 10]])
        if number == 200:
            shutil.copy(tmp_path / "disk" / f"kvstore.{node.name}", image)
    node.kill()
    node.entry.unlink()
    restarted(cluster, node, image)
    assert len(found(cluster)) > 20


@pytest.mark.parametrize("damage", ["size", "format"])
def test_a_file_that_is_no_use_is_refused_or_discarded(
    cluster: Cluster, tmp_path: Path, damage: str
) -> None:
    cluster.start(0)
    node = start(cluster, tmp_path / "disk")
    node.kill()
    file = tmp_path / "disk" / f"kvstore.{node.name}"
    given = {"name": node.name, "disk": file.parent, "disk_size": DISK}
    why = "its format is version"
    if damage == "size":
        given["disk_size"] = "128MiB"
        why = "it has 256 MiB, and 128 MiB were asked for"
    else:
        with file.open("r+b") as opened:
            os.pwrite(opened.fileno(), b"\xff", 24)
    refused = cluster.launch_node(**given)
    assert refused.process.wait(20) != 0
    assert f"{file} was left" in refused.errors
    assert why in refused.errors
    assert "--discard" in refused.errors
    assert file.exists(), "nothing was thrown away"
    cluster.prefix = ["env", "KVSTORE_NODE_DISCARD=1"]
    cluster.node(**given)
    assert [disk.objects for disk in disks(cluster)] == [0]


@pytest.mark.parametrize("how", ["size", "directory", "none"])
def test_a_disk_that_cannot_be_used_is_refused_with_its_reason(
    cluster: Cluster, tmp_path: Path, how: str
) -> None:
    cluster.start(0)
    size = "10TiB" if how == "size" else DISK
    folder = tmp_path if how == "size" else tmp_path / "absent"
    given = {"disk": folder} if how == "none" else {"disk": folder, "disk_size": size}
    node = cluster.launch_node(**given)
    assert node.process.wait(20) != 0
    wanted = {"size": "No space left", "directory": "is not a directory", "none": "disk_size"}
    assert wanted[how].replace("_", "-") in node.errors.replace("_", "-")
    assert not list(tmp_path.glob("kvstore.*"))
