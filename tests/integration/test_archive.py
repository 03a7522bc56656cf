"""``kvstore archive``: what is exported to an object store comes back byte by byte. An object store
that fails, or a damaged bundle, costs the command alone."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from kvstore import Client
from kvstore.archive.bundles import INDEX, folder_of
from tests.support.cluster import SHORT, Cluster
from tests.support.processes import free_port, run_python
from tests.support.wait import until
from tests.support.workload import content

SPACE = "acme/llama ü"
KEYS = [b"\xffblock-%d" % number for number in range(6)]
PIECE = 20 << 20
"""Three of these are a bundle."""

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1",
    "AWS_ALLOW_HTTP": "true",
}  # fmt: skip


class Result(NamedTuple):
    code: int
    rows: list[dict[str, Any]]
    error: dict[str, Any]


class Archive:
    """The command, with the credentials of one object store."""

    def __init__(self, cluster: Cluster, url: str, port: int = 0) -> None:
        self._master = cluster.address
        self.url = url
        self._environment = os.environ | CREDENTIALS
        self._environment["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{port}"

    def start(self, verb: str, *options: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "kvstore.cli.main", "archive", verb, self.url]
        return subprocess.Popen(
            [*command, "--json", "--master", self._master, *options],
            env=self._environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, verb: str, *options: str) -> Result:
        return self.end(self.start(verb, *options))

    def end(self, process: subprocess.Popen[str]) -> Result:
        out, err = process.communicate(timeout=60)
        error = json.loads(err.splitlines()[-1])["error"] if err else {}
        return Result(process.returncode, [*map(json.loads, out.splitlines())], error)


@contextlib.contextmanager
def s3(port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Moto's server with one bucket."""
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, stdout=quiet, stderr=quiet) as server:
        try:
            request = urllib.request.Request(f"http://127.0.0.1:{port}/bucket", method="PUT")

            def has_bucket() -> bool:
                with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=5):
                    return True
                return False

            until(has_bucket)
            yield server
        finally:
            server.kill()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, settings=SHORT) as cluster:
        cluster.start(memory="256MiB")
        yield cluster


@pytest.fixture
def files(cluster: Cluster, tmp_path: Path) -> Archive:
    return Archive(cluster, f"file://{tmp_path}/archive")


def lose_all(cluster: Cluster, memory: str = "256MiB") -> Client:
    """Every node dies with its memory, and an empty one starts."""
    for node in cluster.nodes:
        node.kill()
        node.entry.unlink(missing_ok=True)
    cluster.node(memory=memory)
    until(lambda: not any(node.state == "suspect" for node in cluster.status().nodes))
    client = cluster.client()
    client.clear()
    return client


def fill(client: Client) -> None:
    """A chain with a fork and several kinds of values, and objects without parents."""
    values: list[Any] = [
        content("a"),
        np.arange(12, dtype="<f4").reshape(3, 4),
        b"",
        np.float16(3),
        b"x",
        b"y",
    ]
    client.put_chain(KEYS[:4], values[:4], namespace=SPACE)
    client.put_chain(KEYS[4:], values[4:], parent=KEYS[1], namespace=SPACE)
    client.put_many([("alone", b"1"), ("another", b"2")], namespace="other")


def check(client: Client, keys: list[bytes] = KEYS) -> None:
    values = client.get_many(keys, namespace=SPACE)
    assert values[0] == content("a")
    assert isinstance(values[1], np.ndarray)
    assert np.array_equal(values[1], np.arange(12, dtype="<f4").reshape(3, 4))
    parents = [row.parent for row in client.blocks(keys, namespace=SPACE)]
    assert parents == [b"", *KEYS[:3], KEYS[1], KEYS[4]][: len(keys)]
    assert client.match_prefix(KEYS[:4], namespace=SPACE) == 4


@pytest.mark.slow
def test_s3_brings_back_all_after_the_loss_of_every_node(cluster: Cluster) -> None:
    client = cluster.client()
    fill(client)
    port = free_port()
    with s3(port):
        archive = Archive(cluster, "s3://bucket/some/where", port)
        done = archive.run("export")
        assert [(row["namespace"], row["objects"]) for row in done.rows] == [
            (SPACE, 6), ("other", 2),
        ]  # fmt: skip
        client = lose_all(cluster)
        assert not any(client.exists_many(KEYS, namespace=SPACE))
        done = archive.run("import")
        assert (done.code, [row["objects"] for row in done.rows]) == (0, [6, 2])
        check(client)
        values = client.get_many(KEYS[2:], namespace=SPACE)
        assert values == [b"", np.float16(3), b"x", b"y"]
        assert client.get("another", namespace="other") == b"2"
        assert [row["stored_before"] for row in archive.run("import").rows] == [6, 2]
        assert archive.run("import", "--namespace", "absent").code == 3


@pytest.mark.slow
def test_a_selection_replaces_the_archive_of_its_namespace_alone(
    cluster: Cluster, files: Archive, tmp_path: Path
) -> None:
    client = cluster.client()
    fill(client)
    assert files.run("export").code == 0
    tip = f"hex:{KEYS[3].hex()}"
    chain = files.run("export", "--prefix", tip).rows
    assert [(row["namespace"], row["objects"], row["deleted"]) for row in chain] == [(SPACE, 4, 1)]
    client.clear()
    assert [row["objects"] for row in files.run("import").rows] == [4, 2]
    check(client, KEYS[:4])
    client.pin([KEYS[1]], 60, namespace=SPACE)
    assert [row["objects"] for row in files.run("export", "--pinned").rows] == [2]
    assert files.run("export", "--prefix", "nothing").code == 3
    assert len(list(tmp_path.glob("archive/*/*.bundle"))) == 2


@pytest.mark.slow
@pytest.mark.parametrize("file", ["bundle", "table", "truncated", "absent", INDEX])
def test_a_damaged_archive_is_named_and_not_stored(
    cluster: Cluster, files: Archive, tmp_path: Path, file: str
) -> None:
    client = cluster.client()
    fill(client)
    assert files.run("export", "--namespace", SPACE).code == 0
    folder = tmp_path / "archive" / folder_of(SPACE)
    (bundle,) = folder.glob("*.bundle")
    damaged = folder / INDEX if file == INDEX else bundle
    data = bytearray(damaged.read_bytes())
    data[-9 if file == "table" else 99] ^= 1
    damaged.write_bytes(data[:-5] if file == "truncated" else data)
    if file == "absent":
        damaged.unlink()
    client.clear()
    done = files.run("import")
    assert (done.code, done.error["code"]) == (1, "archive")
    assert done.error["fields"]["object"] == f"file://{damaged}"
    assert not list(client.list_objects())


class Unavailable(http.server.BaseHTTPRequestHandler):
    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_error(503)

    def do_GET(self) -> None:
        self.send_error(503)

    def log_message(self, format: str, *_: object) -> None:  # noqa: A002
        pass


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["export", "import"])
def test_a_server_that_answers_503_ends_the_command(cluster: Cluster, verb: str) -> None:
    fill(cluster.client())
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Unavailable) as server:
        threading.Thread(target=server.serve_forever).start()
        began = time.monotonic()
        done = Archive(cluster, "s3://bucket", server.server_port).run(verb, "--timeout", "3s")
        assert time.monotonic() - began < 10
        server.shutdown()
    assert (done.code, done.error["code"]) == (1, "archive")
    assert done.error["fields"]["object"].startswith("s3://bucket")


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_dies_or_hangs_leaves_store_and_archive_as_they_were(
    cluster: Cluster, how: signal.Signals
) -> None:
    client = cluster.client()
    keys = [b"%d" % number for number in range(8)]
    for key in keys:
        client.put(key, content(str(key), PIECE), namespace="large")
    port = free_port()
    with s3(port) as server:
        archive = Archive(cluster, "s3://bucket", port)
        assert archive.run("export").code == 0
        client.put("more", content("more", PIECE), namespace="large")
        process = archive.start("export", "--timeout", "3s")
        until(lambda: any(row.leased_ms for row in client.list_objects(namespace="large")))
        server.send_signal(how)
        began = time.monotonic()
        rounds = 0
        while process.poll() is None:
            client.put("meanwhile", content("m"), overwrite=True)
            assert client.get("meanwhile") == content("m")
            rounds += 1
        done = archive.end(process)
        assert (done.code, done.error["code"]) == (1, "archive")
        assert time.monotonic() - began < 10
        assert rounds > 10
        server.send_signal(signal.SIGCONT)
        if how == signal.SIGSTOP:
            client.clear()
            until(lambda: client.status().used < PIECE)  # leases have ended
            assert [row["objects"] for row in archive.run("import").rows] == [8]
            assert client.get(keys[7], namespace="large") == content(str(keys[7]), PIECE)


@pytest.mark.slow
def test_an_interrupted_export_leaves_the_archive_as_it_was(
    cluster: Cluster, files: Archive, tmp_path: Path
) -> None:
    client = cluster.client()
    fill(client)
    assert files.run("export", "--namespace", SPACE).code == 0
    for number in range(6):
        client.put(f"large-{number}", content(str(number), PIECE), namespace=SPACE)
    process = files.start("export")
    until(lambda: len(list(tmp_path.glob("archive/*/*"))) > 2)
    process.send_signal(signal.SIGINT)
    assert files.end(process).code == 130
    client.clear()
    assert [row["objects"] for row in files.run("import").rows] == [6]
    check(client)


@pytest.mark.slow
def test_a_pool_that_is_too_small_says_what_it_has(cluster: Cluster, files: Archive) -> None:
    client = cluster.client()
    keys = [b"%d" % number for number in range(400)]
    client.put_chain(keys, [content(str(key), 500_000) for key in keys])
    assert files.run("export").code == 0
    client = lose_all(cluster, "64MiB")
    done = files.run("import")
    assert (done.code, done.error["code"]) == (1, "no_space")
    (row,) = done.rows
    stored = sum(client.exists_many(keys))
    assert 0 < stored == row["objects"] - row["evicted"]
    assert row["objects"] + row["not_imported"] == 400
    assert all(client.get(key) in (None, content(str(key), 500_000)) for key in keys[::20])


def test_a_missing_package_is_named() -> None:
    done = run_python(
        "-c",
        "import sys; sys.modules['obstore'] = None\n"
        "sys.argv = ['kvstore', 'archive', 'import', 'file:///absent']\n"
        "from kvstore.cli.main import main; main()",
    )
    assert done.returncode == 2
    assert "pip install 'obstore>=0.12'" in done.stderr
    assert "[archive]" in done.stderr
