"""The commands as a person uses them: real processes, real output, real signals."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from kvstore.runtime.child_process import start_master

GIB = 1 << 30
MEMORY = 64 << 20
BENCH_FIELDS = {
    "system": str,
    "mode": str,
    "op": str,
    "size_bytes": int,
    "batch": int,
    "per_second": float,
    "gb_per_second": float,
    "p50_us": float,
    "p99_us": float,
    "processor_us": float,
}


class Result(NamedTuple):
    code: int
    out: bytes
    err: str


def kvstore(*arguments: str, stdin: bytes = b"", **variables: str) -> Result:
    done = subprocess.run(
        [sys.executable, "-m", "kvstore.cli.main", *arguments],
        input=stdin,
        capture_output=True,
        env={**os.environ, **variables},
        timeout=120,
        check=False,
    )
    return Result(done.returncode, done.stdout, done.stderr.decode())


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A whole store."""
    master = start_master(memory=MEMORY)
    yield f"127.0.0.1:{master.said['port']}"
    master.stop()


@pytest.fixture
def kv(address: str) -> Callable[..., Result]:
    def call(*arguments: str, stdin: bytes = b"") -> Result:
        return kvstore(*arguments, stdin=stdin, KVSTORE_MASTER=address)

    return call


KV = Callable[..., Result]


def test_bytes_there_and_back(kv: KV, tmp_path: Path) -> None:
    content = os.urandom(9 << 20)
    (tmp_path / "in").write_bytes(content)
    assert kv("put", "big", str(tmp_path / "in")) == (0, b"big: stored, 9.00 MiB\n", "")
    assert kv("get", "big", "-o", str(tmp_path / "out")).code == 0
    assert (tmp_path / "out").read_bytes() == content
    assert kv("get", "big").out == content


def test_through_pipes(kv: KV) -> None:
    assert kv("put", "piped", "-", stdin=b"hello").code == 0
    assert kv("get", "piped") == (0, b"hello", "")
    assert kv("put", "nothing", "-").code == 0
    assert kv("get", "nothing") == (0, b"", "")


def test_a_life_in_a_namespace(kv: KV) -> None:
    here = ("--namespace", "life")
    assert kv("put", "a", "-", *here, stdin=b"1").code == 0
    assert kv("put", "b", "-", "--parent", "a", *here, stdin=b"22").code == 0
    lines = [json.loads(line) for line in kv("ls", "--json", *here).out.splitlines()]
    assert {(row["key"], row["size"]) for row in lines} == {("a", 1), ("b", 2)}
    assert json.loads(kv("stat", "b", "--json", *here).out)["parent"] == "a"
    assert kv("get", "a").code == 3, "another namespace"

    assert kv("rm", "b", *here).out == b"removed 1\n"
    assert kv("get", "b", *here).code == 3
    assert json.loads(kv("clear", "--yes", "--json", *here).out) == {
        "removed": 1,
        "namespace": "life",
    }
    assert kv("ls", *here).out == b""


def test_a_command_that_waits_for_a_master_says_so() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{nobody.getsockname()[1]}"
        result = kvstore("ls", "--master", where, "--timeout-ms", "3000")
        silent = kvstore("ls", "--master", where, "--timeout-ms", "3000", "--json")
    first, last = result.err.splitlines()
    assert re.fullmatch(
        rf"kvstore: waiting for a master at {where}, up to \d\.\d s more: connection refused", first
    )
    assert "no master could be reached" in last
    assert json.loads(silent.err)["error"]["code"] == "master_unreachable"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_servers_say_where_they_are_and_stop_cleanly(number: int) -> None:
    before = set(os.listdir("/dev/shm"))
    with server("master", "--port", "0") as (master, first):
        found = re.search(r"listening on (127\.0\.0\.1:\d+)", first)
        assert found, first
        assert "--host" in first, "says that it listens on loopback only"
        name = f"stop-{os.getpid()}"
        where = ("--master", found[1], "--memory", "16MiB", "--name", name, "--no-keep")
        with server("node", *where) as (node, first):
            assert "16 MiB" in first
            assert any(name in entry for entry in set(os.listdir("/dev/shm")) - before)
            node.send_signal(number)
            assert node.wait(20) == 0
        assert not any(name in entry for entry in set(os.listdir("/dev/shm")) - before)
        master.send_signal(number)
        assert master.wait(20) == 0


@contextlib.contextmanager
def server(kind: str, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and the first line that it printed."""
    command = [sys.executable, "-m", f"kvstore.cli.{kind}", *options]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline()
        finally:
            process.kill()


@pytest.mark.skipif(shutil.disk_usage("/dev/shm").free < 2 * GIB, reason="/dev/shm is small")
def test_a_row_of_the_bench_over_both_transports() -> None:
    rows = bench("--rows", "get_again")
    assert [(row["mode"], row["op"]) for row in rows] == [
        ("shm", "get_again"),
        ("tcp", "get_again"),
    ]


def bench(*options: str) -> list[dict[str, object]]:
    result = kvstore("bench", "--json", "--seconds", "0.01", *options)
    assert result.code == 0, result.err
    rows: list[dict[str, object]] = [json.loads(line) for line in result.out.splitlines()]
    for row in rows:
        assert {name: type(value) for name, value in row.items()} == BENCH_FIELDS
    return rows
