"""Events of real masters: the set that a reader builds from them is what ``kvstore ls`` lists."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore import Client, KVStoreError
from kvstore.client.sse_client import follow
from tests.integration.test_high_availability import HaCluster
from tests.integration.test_http import child_of
from tests.support.cluster import Cluster
from tests.support.etcd import running
from tests.support.http import get
from tests.support.processes import ROOT, free_port
from tests.support.wait import until

Name = tuple[str, str]


class Reader:
    """Follows in a thread, and applies all in order."""

    def __init__(self, *ports: int, namespace: str = "", after: Reader | None = None) -> None:
        """``after``: goes on where this one has stopped."""
        self.objects: dict[Name, int] = {} if after is None else dict(after.objects)
        self.parents: dict[Name, str | None] = {}
        self.place: str = "" if after is None else after.place
        self.seen: list[str] = []
        self.is_whole = False
        self._stopped = False
        self._addresses = [f"127.0.0.1:{port}" for port in ports]
        self._namespace = namespace
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(KVStoreError):
            for told in follow(
                self._addresses, namespace=self._namespace, since=self.place, patience_s=60
            ):
                if self._stopped:
                    return
                if told.name in ("stored", "removed"):
                    name = told.data["namespace"], told.data["key"]
                    self.objects.pop(name, None)
                    if told.name == "stored":
                        self.objects[name] = told.data["size"]
                        self.parents[name] = told.data["parent"]
                else:
                    self.seen.append(told.name)
                    if told.name == "cleared":
                        self.objects.clear()
                    self.is_whole = told.name == "complete"
                self.place = told.position

    def stop(self, client: Client) -> None:
        """It ends with the next event."""
        self._stopped = True
        for number in itertools.count():
            client.put(b"the end of a reader %d %d" % (id(self), number), b"")
            self._thread.join(0.2)
            if not self._thread.is_alive():
                return


def listed(client: Client, namespace: str = "") -> dict[Name, int]:
    return {
        (row.namespace, row.key.hex()): row.size
        for row in client.list_objects(namespace=namespace)
        if row.state != "being_written"
    }


def agree(reader: Reader, client: Client, within_s: float = 30.0) -> None:
    """Once nothing changes any more."""
    until(lambda: reader.objects == listed(client), within_s=within_s, every_s=0.1)


@pytest.fixture
def cluster_with_events(cluster: Cluster) -> Cluster:
    cluster.settings |= {"http_port": free_port(), "events": "on"}
    cluster.master()
    cluster.node()
    return cluster


@pytest.fixture
def port(cluster_with_events: Cluster) -> int:
    return int(cluster_with_events.settings["http_port"])


@contextlib.contextmanager
def reading(cluster: Cluster, *ports: int, namespace: str = "") -> Iterator[Reader]:
    reader = Reader(*(ports or (cluster.settings["http_port"],)), namespace=namespace)
    try:
        yield reader
    finally:
        reader.stop(cluster.client(namespace=namespace or "readers end"))


def test_what_is_stored_removed_and_evicted_is_told(
    cluster_with_events: Cluster, port: int
) -> None:
    cluster = cluster_with_events
    client = cluster.client(namespace="n\n\x1b\u202e")
    client.put(b"before", b"x")
    with reading(cluster) as reader, reading(cluster, namespace="other") as filtered:
        until(lambda: reader.is_whole and filtered.is_whole)
        assert reader.objects == {("n\n\x1b\u202e", b"before".hex()): 1}
        client.put_chain([b"\x00", b"\xff"], [b"x" * 10, b"y" * 20])
        until(lambda: ("n\n\x1b\u202e", "ff") in reader.objects)
        assert reader.parents["n\n\x1b\u202e", "ff"] == "00"
        client.remove(b"before")
        with cluster.client(namespace="other") as other:
            for number in range(100):  # of a pool of 32 MiB: most are evicted
                other.put(b"%d" % number, bytes(1 << 20))
            agree(reader, other)
            assert len(reader.objects) < 100
            until(lambda: filtered.objects == listed(other, "other"))
        client.clear()
        agree(reader, client)
        assert reader.seen == ["cleared", "complete"]


def test_a_question_that_makes_no_sense(port: int) -> None:
    assert get(port, "/api/v1/events?from=x").status == 400
    assert get(port, f"/api/v1/events?namespace={'x' * 200}").status == 400


def test_a_reader_that_comes_back_resumes_where_it_was(
    cluster_with_events: Cluster, port: int
) -> None:
    with cluster_with_events.client() as client:
        client.put(b"a", b"1")
        with reading(cluster_with_events) as reader:
            until(lambda: reader.is_whole)
        client.put(b"b", b"2")
        client.remove(b"a")
        again = Reader(port, after=reader)
        agree(again, client)
        assert again.seen == []
        again.stop(client)


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_another_master_leads(tmp_path: Path, how: str) -> None:
    ports = [free_port(), free_port()]
    with contextlib.ExitStack() as stack:
        cluster = HaCluster(tmp_path, stack.enter_context(running(tmp_path / "etcd")))
        stack.callback(cluster.close)
        first = cluster.add_master(http_port=ports[0], events="on")
        until(lambda: cluster.leader() == first)
        cluster.add_master(http_port=ports[1], events="on")
        cluster.node()
        cluster.node()
        client = cluster.client()
        with reading(cluster, *ports) as reader:
            for number in range(300):
                client.put(b"%d" % number, b"x", wait_ms=3_000)
            agree(reader, client)
            leader = cluster.masters[first]
            if how == "killed":
                leader.kill()
            else:
                leader.freeze()
            cluster.another_leads(first)
            put = 0
            while put < 300:
                with contextlib.suppress(KVStoreError):
                    client.put(b"later %d" % put, b"x", wait_ms=3_000)
                    client.remove(b"%d" % put)
                    put += 1
            until(lambda: len(listed(client)) == 300)
            agree(reader, client, within_s=60)
            if how == "stopped":
                assert get(ports[0], "/api/v1/events").status == 503
                leader.resume()
                cluster.stands_by(first)
                answer = get(ports[0], "/api/v1/events")
                assert answer.status == 503
                assert "leads" in answer.text
                client.put(b"at last", b"", wait_ms=3_000)
                agree(reader, client)
            assert b"later 299".hex() in {key for _, key in reader.objects}
        cluster.finish()


def test_without_events_the_answer_says_how_to_get_them(cluster: Cluster) -> None:
    cluster.settings["http_port"] = port = free_port()
    cluster.master()
    answer = get(port, "/api/v1/events")
    assert answer.status == 404
    assert "--events" in answer.text


def test_the_reader_in_the_documentation(cluster_with_events: Cluster, port: int) -> None:
    cluster = cluster_with_events
    text = (ROOT / "docs" / "events.md").read_text()
    code = text.partition("```python\n")[2].partition("```")[0]
    program = cluster.directory / "reader.py"
    program.write_text(code.replace("50080", str(port)))
    with cluster.client() as client:
        client.put(b"a", b"x")
        log = (cluster.directory / "reader").open("wb")
        with (
            log,
            subprocess.Popen(
                [sys.executable, program], stdout=subprocess.PIPE, stderr=log, text=True
            ) as reader,
        ):
            assert reader.stdout is not None
            try:
                told = [reader.stdout.readline() for _ in range(3)]
                assert told == ["cleared 0\n", "stored 1\n", "complete 1\n"]
                client.remove(b"a")
                assert reader.stdout.readline() == "removed 0\n"
                os.kill(child_of(cluster.master_server), signal.SIGKILL)
                client.put(b"b", b"x")
                assert reader.stdout.readline() in ("cleared 0\n", "stored 1\n")
            finally:
                reader.kill()
