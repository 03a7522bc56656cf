"""``kvstore doctor`` on hosts and clusters that lack something, each really made so."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.cluster import Cluster
from tests.support.network_namespaces import need_own_shm, own_shm
from tests.support.processes import KVSTORE, free_port, run_python
from tests.support.wait import until


class Report(NamedTuple):
    code: int
    rows: list[dict[str, str]]

    def of(self, subject: str) -> list[dict[str, str]]:
        return [row for row in self.rows if row["subject"] == subject]

    def one(self, subject: str, text: str) -> dict[str, str]:
        [row] = [row for row in self.of(subject) if text in row["found"]]
        return row


def doctor(*arguments: str, prefix: tuple[str, ...] | list[str] = (), **variables: str) -> Report:
    done = run_python(
        *KVSTORE, "doctor", "--json", *arguments, prefix=prefix, within_s=90, variables=variables
    )
    assert done.stderr == ""
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    for row in rows:
        assert set(row) == {"subject", "state", "found", "advice"}
        assert row["state"] in ("ok", "warning", "problem")
        assert row["advice"] or row["state"] == "ok", row
    assert done.returncode == any(row["state"] == "problem" for row in rows)
    return Report(done.returncode, rows)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path) as cluster:
        cluster.master()
        yield cluster


def test_this_host() -> None:
    found = doctor("--memory", "64MiB")
    assert found.code == 0, found.rows
    subjects = {row["subject"] for row in found.rows}
    assert subjects >= {
        "Python", "packages", "shared memory", "huge pages", "NUMA", "locked memory",
        "open files", "left-overs", "RDMA", "transfer engine", "GPU",
        "ports",
    }  # fmt: skip


def test_what_a_person_sees() -> None:
    done = run_python(*KVSTORE, "doctor", "--memory", "60TiB", within_s=90)
    assert done.returncode == 1
    table, _, todo = done.stdout.partition("What to do:\n")
    assert "problem  shared memory" in table
    [line] = [line for line in todo.splitlines() if line.startswith("problem shared memory: ")]
    assert "docker run --shm-size=" in line, "whole, on one line, to be copied"


def test_a_master_and_its_nodes_are_reached(store: Cluster) -> None:
    node = store.node()
    found = doctor("--master", store.address)
    assert found.code == 0, found.rows
    assert found.one(f"master {store.address}", "answers")["state"] == "ok"
    assert found.one("lane", f":{store.lane_port} answers")["state"] == "ok"
    told = [row["found"] for row in found.of(f"node {node.name}")]
    assert told[0].startswith("alive")
    assert told[1].startswith("data port 127.0.0.1:")
    assert told[2] == "its memory can be mapped"


def test_no_master_and_no_node(store: Cluster) -> None:
    nobody = f"127.0.0.1:{free_port()}"
    started = time.monotonic()
    found = doctor("--master", f"{nobody},{store.address}", "--timeout-ms", "1000")
    assert time.monotonic() - started < 30
    assert found.of(f"master {nobody}")[0]["state"] == "problem"
    assert found.of(f"master {store.address}")[0]["state"] == "ok"
    assert found.one("store", "No node has joined")["state"] == "problem"
    assert found.code == 1


def test_a_killed_node_is_named_by_status_and_doctor(store: Cluster) -> None:
    node, _ = store.node(), store.node()
    with store.client() as client:
        for number in range(20):
            client.put(f"key-{number}", b"value")
        node.kill()
        until(lambda: any(each.name == node.name for each in client.status().departed))
    said = run_python(*KVSTORE, "status", "--master", store.address).stdout
    assert f"bad: Node {node.name} (" in said
    assert "Start the node again on its host, with the same --name" in said
    found = doctor("--master", store.address)
    row = found.one("store", f"Node {node.name} (")
    assert (found.code, row["state"]) == (1, "problem")
    assert "with the same --name" in row["advice"]


def test_what_a_killed_node_left(store: Cluster) -> None:
    node = store.node()
    node.kill()
    row = doctor().one("left-overs", "of dead nodes hold")
    assert row["state"] == "warning"
    assert "kvstore clean" in row["advice"]
    assert row["advice"].startswith("Start the node again"), "what loses objects comes last"
    assert node.entry.exists(), "the doctor changes nothing"


def test_a_container_with_little_shared_memory_of_its_own(store: Cluster) -> None:
    need_own_shm()
    node = store.node()
    small = own_shm("size=24m")
    assert doctor("--master", store.address, prefix=small).code == 0, "no node is planned here"
    found = doctor("--master", store.address, "--memory", "1GiB", prefix=small)
    row = found.one("shared memory", "24.0 MiB of 24.0 MiB free")
    assert row["state"] == "problem"
    assert "--shm-size=1g" in row["advice"]
    row = found.one(f"node {node.name}", "another /dev/shm")
    assert "--ipc=host" in row["advice"]


def test_huge_pages_are_tried_and_not_only_read_about() -> None:
    need_own_shm()
    advised = doctor(prefix=own_shm("huge=advise,size=64m")).of("huge pages")[0]
    assert advised["state"] == "ok"
    never = doctor(prefix=own_shm("huge=never,size=64m")).of("huge pages")[0]
    assert never["state"] == "warning"
    assert "mount -o remount,huge=advise /dev/shm" in never["advice"]


def test_another_users_memory_is_told(store: Cluster) -> None:
    need_own_shm()
    node = store.node()
    os.chown(node.entry, 65_534, 65_534)
    no_rights = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"]
    row = doctor("--master", store.address, prefix=no_rights).one(
        f"node {node.name}", "cannot be mapped"
    )
    assert row["state"] == "warning"
    assert "as one user" in row["advice"]


@pytest.mark.parametrize("package", ["grpc", "xxhash", "numpy"])
def test_a_package_that_is_broken(tmp_path: Path, package: str) -> None:
    (tmp_path / f"{package}.py").write_text("raise ImportError('libm.so.9: cannot open')")
    found = doctor(PYTHONPATH=str(tmp_path))
    row = found.one("packages", "ImportError: libm.so.9: cannot open")
    assert row["state"] == "problem"
    assert "pip install" in row["advice"]
    assert found.of("transfer engine"), "the other checks go on"
    assert package != "grpc" or found.of("shared memory")[0]["state"] == "ok"
