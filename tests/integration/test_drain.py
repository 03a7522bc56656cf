"""Draining real nodes, while others read, write, remove and die."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvstore.calls import PutOutcome
from tests.support.cluster import SHORT, Cluster, Node
from tests.support.processes import KVSTORE, ROOT, run_python
from tests.support.wait import until
from tests.support.workload import content

SIZE, MIB = 200 << 10, 1 << 20
SETTINGS = SHORT | {"put_deadline_ms": 20_000}
"""Who moves or allocates keeps what it was granted, however busy the machine is."""

TRANSPORTS = (("shm",), ("tcp",))


class Result(NamedTuple):
    code: int
    told: dict[str, int]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, settings=SETTINGS) as cluster:
        cluster.master()
        yield cluster


def launch(store: Cluster, node: Node, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "kvstore.cli.main", "drain", node.name, "--json", *options]
    return subprocess.Popen(
        [*command, "--master", store.address],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def result_of(process: subprocess.Popen[str]) -> Result:
    out, err = process.communicate(timeout=120)
    assert "Traceback" not in err, err
    assert out, err
    return Result(process.returncode, json.loads(out))


def drain(store: Cluster, node: Node, *options: str) -> Result:
    return result_of(launch(store, node, *options))


def refused(store: Cluster, node: Node) -> dict[str, Any]:
    """The error of a drain that does not begin."""
    process = launch(store, node)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (1, "")
    error: dict[str, Any] = json.loads(err)["error"]
    return error


def has_left(node: Node) -> None:
    """By itself and cleanly."""
    assert node.wait() == 0, node.errors
    assert "node_drained" in node.errors
    assert not node.entry.exists()


def fill(store: Cluster, count: int = 60) -> list[str]:
    """Some with replicas or a chain; what nobody knows of is put by tcp."""
    keys = [f"key-{number}" for number in range(count)]
    client = store.client()
    for key in keys[: count // 2]:
        assert client.put(key, content(key, SIZE)) is PutOutcome.STORED
    chain = keys[count // 2 :]
    outcomes = client.put_chain(chain, [content(key, SIZE) for key in chain])
    assert set(outcomes) == {PutOutcome.STORED}
    client.put("empty", b"")
    return [*keys, "empty"]


def all_right(store: Cluster, keys: list[str]) -> None:
    for transports in TRANSPORTS:
        client = store.client(transports=transports)
        for key in keys:
            size = 0 if key == "empty" else SIZE
            assert client.get(key) == content(key, size), (key, transports)
    chain = [key for key in keys if key.startswith("key-")][len(keys) // 2 :]
    assert store.client().match_prefix(chain) == len(chain)


class Reader(threading.Thread):
    """Gets objects, one after the other, until it is stopped; a miss or other bytes are kept."""

    def __init__(self, store: Cluster, keys: list[str], transports: tuple[str, ...]) -> None:
        super().__init__()
        self._client = store.client(transports=transports, placements_max=len(keys) // 2)
        self._keys = keys
        self._ending = threading.Event()
        self.wrong: list[str] = []
        self.rounds = 0
        self.start()

    def run(self) -> None:
        while not self._ending.is_set():
            for key in self._keys:
                try:
                    found = self._client.get(key)
                except Exception as error:
                    self.wrong.append(f"{key}: {error!r}")
                    return
                if found != content(key, 0 if key == "empty" else SIZE):
                    self.wrong.append(f"{key}: {'a miss' if found is None else 'other bytes'}")
            self.rounds += 1

    def stop(self) -> None:
        self._ending.set()
        self.join()
        assert self.wrong == []
        assert self.rounds


def test_nobody_who_reads_notices(store: Cluster) -> None:
    old = store.node(memory="64MiB", keep=True)
    keys = fill(store)
    store.node(memory="64MiB")
    store.node(memory="64MiB")
    readers = [Reader(store, keys, transports) for transports in TRANSPORTS]
    done = drain(store, old)
    has_left(old)
    rounds = [reader.rounds for reader in readers]
    until(lambda: all(r.rounds > before for r, before in zip(readers, rounds, strict=True)))
    for reader in readers:
        reader.stop()
    assert done.code == 0
    assert done.told["moved"] == len(keys)
    assert (done.told["remaining"], done.told["corrupt"], done.told["has_departed"]) == (0, 0, True)
    assert store.state_of(old) == "gone"
    all_right(store, keys)


def test_taken_back_it_is_used_again(store: Cluster) -> None:
    node = store.node(memory="64MiB")
    keys = fill(store)
    assert refused(store, node)["code"] == "no_space"
    assert store.state_of(node) == "alive"
    done = drain(store, node, "--evict")  # nowhere to go
    assert done.code == 1
    assert done.told["remaining"] == len(keys)
    assert not done.told["has_departed"]
    assert store.state_of(node) == "draining"
    shown = run_python(*KVSTORE, "status", "--master", store.address, check=True).stdout
    assert f"{node.name}  draining" in " ".join(shown.split("\n")).replace("   ", "  ")
    assert drain(store, node, "--undo").told == {"node": node.name, "draining": False}
    assert store.state_of(node) == "alive"
    assert store.client().put("another", b"x") is PutOutcome.STORED
    all_right(store, keys)


def test_more_than_fits_is_not_begun(store: Cluster) -> None:
    """Otherwise objects that have just moved make room for the next ones, and are lost."""
    old = store.node(memory="64MiB")
    client = store.client()
    keys = [f"key-{number}" for number in range(50)]
    for key in keys:
        client.put(key, content(key, MIB))
    store.node(memory="16MiB")
    until(lambda: all(row.leased_ms == 0 for row in client.list_objects()))
    error = refused(store, old)
    assert error["code"] == "no_space"
    assert error["fields"]["missing_bytes"] > 30 * MIB
    assert "Nothing was moved" in error["message"]
    assert "--evict" in error["advice"]
    assert store.state_of(old) == "alive"
    for options in (["--evict"], ["--evict"]):  # a second drain spares what the first one moved
        done = drain(store, old, *options)
        assert (done.code, done.told["evicted"], done.told["has_departed"]) == (1, 0, False)
        assert all(client.exists(key) for key in keys)
        until(lambda: all(row.leased_ms == 0 for row in client.list_objects()))
    done = drain(store, old, "--discard")
    assert done.code == 0
    assert done.told["remaining"] >= 34
    has_left(old)
    assert sum(client.get(key) == content(key, MIB) for key in keys) == 50 - done.told["remaining"]


def test_a_mover_that_is_killed_and_started_again(store: Cluster) -> None:
    old = store.node(memory="200MiB")
    keys = fill(store, 500)
    store.node(memory="200MiB")
    first = launch(store, old)

    def some_moved() -> int:
        return dict(store.status().counters).get("moved_objects", 0)

    until(some_moved)
    first.kill()
    first.communicate()
    assert store.state_of(old) == "draining"
    assert drain(store, old).code == 0
    has_left(old)
    all_right(store, keys)


def test_the_target_dies_meanwhile(store: Cluster) -> None:
    old = store.node(memory="200MiB")
    keys = fill(store, 500)
    dies = store.node(memory="200MiB")
    process = launch(store, old, "--wait-s", "30")
    until(lambda: dict(store.status().counters).get("moved_objects", 0) > 0)
    dies.kill()
    client = store.client()
    until(lambda: store.state_of(dies) == "gone")
    kept = [key for key in keys if client.exists(key)]
    store.node(memory="200MiB")
    assert result_of(process).code in (0, 1)  # 1: it gave up before there was another
    if store.state_of(old) == "draining":
        assert drain(store, old).code == 0
    has_left(old)
    for key in kept:
        assert client.get(key) == content(key, 0 if key == "empty" else SIZE), key
