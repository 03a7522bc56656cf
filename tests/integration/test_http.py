"""Health and metrics of a real master over HTTP, also when it hangs, dies, or its child does."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.cluster import NODE, Cluster
from tests.support.http import get, http_port_of, metric
from tests.support.processes import Server, children_of, free_port, is_running
from tests.support.programs import need_program
from tests.support.wait import until


def child_of(server: Server) -> int:
    """The process that serves HTTP."""

    def found() -> int:
        for pid in children_of(server.pid):
            with contextlib.suppress(OSError):
                if b"kvstore.console.master_server" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return pid
        return 0

    return until(found)


@pytest.fixture
def served(cluster: Cluster) -> tuple[Cluster, int]:
    """A master and a node; where HTTP is."""
    cluster.settings["http_port"] = free_port()
    server = cluster.master()
    port = http_port_of(server)
    assert port == cluster.settings["http_port"]
    cluster.node()
    return cluster, port


def test_a_master_says_how_it_is_and_what_it_counted(served: tuple[Cluster, int]) -> None:
    cluster, port = served
    assert get(port, "/healthz") == (200, "ok\n")
    assert get(port, "/readyz") == (200, "leads\n")
    with cluster.client(namespace="of\n\x1b a } test") as client:
        client.put_chain([b"a", b"b"], [b"x" * 1000, b"y" * 1000])
        assert client.match_prefix([b"a", b"b", b"c"]) == 2

    def counted() -> bool:
        return metric(port, "kvstore_stored_objects_total") == 2

    until(counted)
    until(lambda: metric(port, "kvstore_matched_objects_total") == 2)
    assert metric(port, "kvstore_missed_objects_total") == 1
    assert metric(port, "kvstore_reuse_seconds_count") == 1
    assert metric(port, "kvstore_eviction_age_seconds_count") == 0
    assert metric(port, "kvstore_namespace_bytes", namespace="of\n\x1b a } test") == 2000
    assert metric(port, "kvstore_nodes", state="alive") == 1
    assert metric(port, "kvstore_master_calls_total", call="PutStart", outcome="ok") == 1
    resident = metric(port, "process_resident_memory_bytes")
    assert resident is not None
    assert resident > 1 << 20
    assert get(port, "/nothing").status == 404
    assert get(port, "/../../etc/passwd").status == 404


def test_a_master_that_hangs_is_not_healthy_and_the_answer_says_so_in_time(
    served: tuple[Cluster, int],
) -> None:
    cluster, port = served
    until(lambda: "kvstore_nodes" in get(port, "/metrics").text)  # the first look is over
    cluster.master_server.freeze()
    try:
        for path in ("/healthz", "/readyz", "/metrics"):
            started = time.monotonic()
            answer = get(port, path)
            assert answer.status == 503, path
            assert "does not answer" in answer.text
            assert time.monotonic() - started < 5.0
    finally:
        cluster.master_server.resume()
    until(lambda: get(port, "/healthz").status == 200)
    assert "kvstore_nodes" in get(port, "/metrics").text


def test_a_child_that_is_killed_comes_back_and_nobody_is_refused_meanwhile(
    served: tuple[Cluster, int],
) -> None:
    cluster, port = served
    before = child_of(cluster.master_server)
    assert get(port, "/healthz").status == 200
    os.kill(before, signal.SIGKILL)
    assert get(port, "/healthz", timeout_s=60).status == 200
    assert child_of(cluster.master_server) != before
    with cluster.client() as client:
        client.put("k", b"v")


def test_a_child_that_hangs_is_named_and_replaced(served: tuple[Cluster, int]) -> None:
    cluster, port = served
    server = cluster.master_server
    assert get(port, "/healthz").status == 200
    before = child_of(server)
    os.kill(before, signal.SIGSTOP)
    until(lambda: child_of(server) != before, within_s=60)
    assert f"http_child_killed pid={before} reason=no message for" in server.errors
    assert get(port, "/healthz", timeout_s=60).status == 200


def test_nothing_is_left_of_a_master_that_is_killed(served: tuple[Cluster, int]) -> None:
    cluster, port = served
    child = child_of(cluster.master_server)
    assert get(port, "/healthz").status == 200
    cluster.master_server.kill()
    until(lambda: not is_running(child))
    again = cluster.master()
    assert http_port_of(again) == port
    assert get(port, "/readyz").status == 200


def test_a_node_says_how_it_is_and_what_it_moved(served: tuple[Cluster, int]) -> None:
    cluster, _ = served
    port = free_port()
    cluster.nodes[0].terminate()
    node = cluster.node(http_port=port)
    assert get(port, "/readyz") == (200, "joined\n")
    with cluster.client(transports=("tcp",)) as client:
        client.put("k", b"x" * 5000)
        assert client.get("k") == b"x" * 5000
    until(lambda: (metric(port, "kvstore_node_moved_bytes_total", direction="read") or 0) >= 5000)
    assert metric(port, "kvstore_node_memory_bytes") == 32 << 20
    cluster.master_server.kill()
    until(lambda: get(port, "/readyz").status == 503)
    assert get(port, "/healthz").status == 200
    assert metric(port, "kvstore_node_joined") == 0
    cluster.master()
    until(lambda: get(port, "/readyz").status == 200)
    refused = cluster.launch(
        NODE, {"master": cluster.address, "memory": "32MiB", "name": "x", "http_port": port}
    )
    assert refused.wait() == 1
    assert f"port {port} for HTTP is taken" in refused.errors
    assert node.process.poll() is None


def test_prometheus_scrapes_it(served: tuple[Cluster, int], tmp_path: Path) -> None:
    """The real one finds the target up, and our numbers in its database."""
    program = need_program("prometheus", "prometheus")
    _, port = served
    mine = free_port()
    config = tmp_path / "prometheus.yml"
    config.write_text(
        "global: {scrape_interval: 500ms}\n"
        "scrape_configs:\n"
        f"  - {{job_name: kvstore, static_configs: [{{targets: ['127.0.0.1:{port}']}}]}}\n"
    )
    log = (tmp_path / "log").open("wb")
    with log, subprocess.Popen(
        [
            program, f"--config.file={config}", f"--storage.tsdb.path={tmp_path}/data",
            f"--web.listen-address=127.0.0.1:{mine}",
        ],
        stdout=log, stderr=log, stdin=subprocess.DEVNULL,
    ) as prometheus:  # fmt: skip
        try:

            def found() -> bool:
                with contextlib.suppress(OSError):
                    return (
                        '"value"' in get(mine, "/api/v1/query?query=kvstore_master_is_leader").text
                    )
                return False

            until(found, within_s=60)
        finally:
            prometheus.terminate()
    shutil.rmtree(tmp_path / "data")
