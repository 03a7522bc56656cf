"""Who belongs to whom: clusters beside each other, and memory that was left."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from kvstore import Client
from kvstore.errors import ClusterMismatchError
from kvstore.memory.shm_entries import left_overs
from kvstore.runtime.host import SHM_DIRECTORY
from tests.support.cluster import MASTER, NODE, Cluster, Node, unique_name
from tests.support.processes import KVSTORE, Server, flags_of, free_port, run_python
from tests.support.wait import until

MEMORY = "16MiB"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path) as cluster:
        yield cluster


@pytest.fixture
def clusters(tmp_path: Path) -> Iterator[list[Cluster]]:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    both = [Cluster(tmp_path / "a"), Cluster(tmp_path / "b")]
    yield both
    for each in both:
        each.finish()


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_python(*KVSTORE, *arguments)


# --- clusters beside each other ----------------------------------------------------------------


def unnamed(cluster: Cluster) -> Server:
    settings = {"master": cluster.address, "memory": MEMORY}
    log = cluster.directory / f"unnamed-{len(list(cluster.directory.iterdir()))}.log"
    node = Server(NODE, flags_of(settings), log=log)
    node.line("serves")
    return node


def test_two_clusters_without_names_on_one_host_do_not_mix(clusters: list[Cluster]) -> None:
    before = {left.path for left in left_overs()}
    for number, cluster in enumerate(clusters):
        cluster.master()
        node = unnamed(cluster)
        cluster.client().put(f"of {number}", b"x" * 1000)
        node.kill()
        node.close()
    nodes = [unnamed(cluster) for cluster in reversed(clusters)]
    for number, cluster in enumerate(clusters):
        until(partial(cluster.client().exists, f"of {number}"))
    for node in nodes:
        assert node.terminate() == 0
        node.close()
    for left in left_overs():
        if left.path not in before:
            os.unlink(left.path)


def test_memory_of_another_cluster_is_refused_and_left_alone(clusters: list[Cluster]) -> None:
    one, other = clusters
    one.settings["cluster"] = "prod"
    for cluster in clusters:
        cluster.master()
    node = one.node()
    one.client().put("key", b"of prod")
    node.kill()

    refused = Server(
        NODE, flags_of({"master": other.address, "name": node.name}), log=other.directory / "log"
    )
    assert refused.wait() == 1
    assert "cluster prod" in refused.errors
    assert f"--master {one.address}" not in refused.errors
    assert "--cluster prod" in refused.errors
    assert "--adopt" in refused.errors
    refused.close()

    one.node(name=node.name)
    until(lambda: one.client().get("key") == b"of prod")


def test_a_name_is_checked_when_nodes_and_clients_join(clusters: list[Cluster]) -> None:
    cluster, _ = clusters
    cluster.settings["cluster"] = "prod"
    cluster.master()
    settings = {"master": cluster.address, "name": unique_name(), "memory": MEMORY}
    log = cluster.directory / "refused.log"
    refused = Server(NODE, flags_of(settings | {"cluster": "test"}), log=log)
    assert refused.wait() == 1
    assert "belongs to the cluster test, and this master serves the cluster prod" in refused.errors
    refused.close()

    cluster.node(cluster="prod")
    cluster.node()  # which takes the master's
    with pytest.raises(ClusterMismatchError), Client(cluster.address, cluster="test") as client:
        client.exists("key")
    with Client(cluster.address, cluster="prod") as client:
        assert not client.exists("key")
    told = run("status", "--master", cluster.address)
    assert told.stdout.startswith("cluster prod, master ")
    status = run("status", "--master", cluster.address, "--json")
    assert json.loads(status.stdout)["cluster"] == "prod"


def test_a_cluster_that_gets_a_name_keeps_its_memory_also_where_it_moves(cluster: Cluster) -> None:
    cluster.settings["port"] = free_port()  # the next one, of its lane, stays free, too
    cluster.master()
    node = cluster.node(keep=True)
    cluster.client().put("key", b"value")
    assert node.terminate() == 0
    for settings in ({"cluster": "prod"}, {"cluster": "prod", "port": free_port()}):
        cluster.master_server.kill()
        cluster.close_clients()
        cluster.settings |= settings
        cluster._stop_asking()
        cluster._asker = None
        cluster.settings.pop("lane_port", None)
        cluster.master()
        node = cluster.node(name=node.name, keep=True, cluster="prod")
        until(lambda: cluster.client().get("key") == b"value")
        assert node.terminate() == 0
    node.entry.unlink()


# --- memory that was left ----------------------------------------------------------------------


def test_a_named_node_keeps_its_memory_at_a_polite_stop(cluster: Cluster) -> None:
    cluster.master()
    settings = {"master": cluster.address, "name": unique_name(), "memory": MEMORY}
    entry = Path(SHM_DIRECTORY, f"kvstore.{settings['name']}")
    for stop in ("SIGTERM", "failed start", "SIGTERM"):
        node = Node(NODE, flags_of(settings), log=cluster.directory / "kept.log")
        node.line("serves")
        cluster.client().put("key", b"value")
        until(lambda: cluster.client().get("key") == b"value")
        assert node.terminate() == 0
        node.close()
        assert entry.exists()
        if stop == "failed start":
            taken = str(cluster.settings["port"])
            failed = Server(
                NODE, [*flags_of(settings), "--port", taken, "--no-keep"],
                log=cluster.directory / "failed.log",
            )  # fmt: skip
            assert failed.wait() == 1
            assert "cannot listen" in failed.errors
            failed.close()
            assert entry.exists(), "a start that fails deletes nothing"

    told = run("clean", settings["name"])
    assert told.returncode == 2
    assert entry.exists(), "it asks first"
    assert settings["name"] in told.stderr
    row = json.loads(run("clean", settings["name"], "--json", "--yes").stdout)
    assert row["removed"] is True
    assert row["node"] == settings["name"]
    assert not entry.exists()
    assert run("clean", settings["name"]).returncode == 3


def test_clean_leaves_what_lives_alone(cluster: Cluster) -> None:
    cluster.master()
    node = cluster.node()
    told = run("clean", node.name, "--yes")
    assert told.returncode == 3
    assert node.entry.exists()


def test_the_memory_of_a_master_is_kept_where_that_is_asked_for(tmp_path: Path) -> None:
    port = free_port()
    path = Path(SHM_DIRECTORY)
    for keep in (True, False):
        flags = flags_of({"memory": MEMORY, "port": port})
        log = tmp_path / f"{keep}.log"
        server = Server(MASTER, [*flags, *(["--keep"] if keep else [])], log=log)
        server.line("owns")
        with Client(f"127.0.0.1:{port}") as client:
            if keep:
                client.put("key", b"value")
            else:
                until(partial(client.get, "key"))
        assert server.terminate() == 0
        server.close()
        assert bool(list(path.glob(f"kvstore.*-{port}"))) is keep


# --- ports ---------------------------------------------------------------------------------------


def test_nodes_of_a_host_take_the_data_ports_one_after_the_other(cluster: Cluster) -> None:
    cluster.master()
    nodes = [cluster.node() for _ in range(2)]
    addresses = {node.name: node.address for node in cluster.status().nodes}
    found = [int(addresses[node.name].rpartition(":")[2]) for node in nodes]
    assert found[0] != found[1]
    assert all(50_003 <= port < 50_019 for port in found)
    for node, port in zip(nodes, found, strict=True):  # other tests may have the first port
        said = "data_port_taken wanted=50003" in node.errors
        assert said == (port != 50_003)
