"""Every command in the hands of somebody in a hurry: no terminal, a closed pipe, a narrow terminal,
a full disk. ``ROWS`` has a row for every command."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Final, NamedTuple

import pytest

from kvstore import Client
from kvstore.cli.main import LATE, cli
from tests.integration.hurried import CIRCUMSTANCES
from tests.support.cluster import Cluster
from tests.support.processes import ROOT

NODE: Final = f"ip-10-0-12-31.eu-central-1.compute.internal-{os.getpid()}"
KEY: Final = "a-key-of-a-system-prompt-that-is-longer-than-a-column/" + "x" * 80
SPACE: Final = "namespace-of-a-model/Llama-3.1-405B-Instruct-FP8/tp8-pp2"
HERE: Final = ["--namespace", SPACE]


class Row(NamedTuple):
    """A command, and what it shows."""

    arguments: list[str]
    codes: tuple[int, ...] = (0,)
    shows: tuple[str, ...] = ()
    """Names that its output has in full."""


ROWS: Final = {
    "archive": Row(["import", "file:///nowhere"], (3,)),
    "as-mooncake": Row(["--env"], shows=("PYTHONPATH",)),
    "auth": Row(["ls", "--ca", "nowhere"], (2,)),
    "bench": Row(["--rows", "nothing", "--memory", "1MiB"], (2,)),
    "clean": Row(["nobody"], (3,)),
    "clear": Row(HERE, (2, 130)),
    "doctor": Row(["--memory", "1MiB"], (0, 1), ("/dev/shm",)),
    "drain": Row(["nobody"], (2,)),
    "get": Row([KEY, *HERE], shows=("a value",)),
    "ls": Row([], shows=(KEY, SPACE)),
    "pin": Row([KEY, "--for", "1s", *HERE], shows=("pinned 1",)),
    "put": Row([KEY, "FILE", *HERE], shows=(KEY,)),
    "quickstart": Row(["--memory", "nonsense"], (2,)),
    "plan": Row(["no-trace.jsonl", "--memory", "1GiB"], (1, 2)),
    "rm": Row(["nothing"], (3,)),
    "size": Row(["llama-3-8b"], shows=("memory",)),
    "stat": Row([KEY, *HERE], shows=(KEY, SPACE, NODE)),
    "status": Row([], shows=(NODE, SPACE)),
    "unpin": Row([KEY, *HERE]),
    "why": Row([SPACE], (0, 1), (SPACE,)),
}

SERVERS: Final = {
    "kvstore-master --help": Row([], shows=("--memory",)),
    "kvstore-master --version": Row([]),
    "kvstore-master --memory nonsense": Row([], (2,)),
    "kvstore-master --host 192.0.2.1 --port 0": Row([], (1,)),
    "kvstore-node --help": Row([], shows=("--memory",)),
    "kvstore-node --memory 1": Row([], (2,)),
    "kvstore-node --memory 16MiB --host 192.0.2.1": Row([], (1, 2)),
    "kvstore-proxy --help": Row([], shows=("--prefill",)),
    "kvstore-proxy --port nonsense": Row([], (2,)),
}
"""Also of the servers: their help, and that they cannot start."""

DOCTORS: Final = ("no terminal", "narrow", "full disk")
"""The doctor takes seconds."""

ENVIRONMENTS: Final[dict[str, dict[str, str]]] = {
    "usual": {"TERM": "xterm-256color"},
    "dumb": {"TERM": "dumb"},
    "no colour": {"TERM": "xterm-256color", "NO_COLOR": "1"},
    "C": {"TERM": "xterm", "LANG": "C", "LC_ALL": "C"},
}
CASES: Final = [
    *((circumstance, "usual") for circumstance in CIRCUMSTANCES),
    ("terminal", "dumb"), ("terminal", "no colour"), ("narrow", "C"),
]  # fmt: skip


class Result(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def whole(self) -> str:
        """What it said, as one line: what a terminal wraps is one again."""
        return re.sub(r"\s+", "", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.out + self.err))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("hurried")) as cluster:
        cluster.master()
        cluster.node(name=NODE, memory="16MiB")
        yield cluster


def hurried(store: Cluster, circumstance: str, environment: str) -> dict[str, Result]:
    with Client(store.address) as client:
        client.put(KEY, b"a value", namespace=SPACE)
    file = store.directory / "file"
    file.write_bytes(b"a value")
    is_for_doctor = environment == "usual" and circumstance in DOCTORS
    asked: dict[str, tuple[str, list[str]]] = {
        name: (
            "kvstore.cli.main",
            ["kvstore", name, *(str(file) if each == "FILE" else each for each in row.arguments)],
        )
        for name, row in ROWS.items()
        if name != "doctor" or is_for_doctor
    }
    asked |= {
        name: (f"kvstore.cli.{name.split()[0].removeprefix('kvstore-')}", name.split())
        for name in SERVERS
    }
    late = [f"kvstore.cli.{name.replace('-', '_')}" for name in LATE]
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.hurried", circumstance, "kvstore.cli.main",
         "kvstore.cli.tables", "kvstore.client.drain", *late],
        input=json.dumps(asked), capture_output=True, text=True, timeout=300, check=False, cwd=ROOT,
        env={
            **{
                name: value
                for name, value in os.environ.items()
                if name not in ("COLUMNS", "PYTHONUNBUFFERED")
            },
            **ENVIRONMENTS[environment], "KVSTORE_MASTER": store.address, "KVSTORE_CONFIG": "",
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    with Client(store.address) as client:
        assert client.exists(KEY, namespace=SPACE), "it was destroyed without a question"
    return {name: Result(**fields) for name, fields in json.loads(done.stdout).items()}


def test_every_command_has_a_row() -> None:
    assert ROWS.keys() == {*cli.commands, *LATE}


@pytest.mark.parametrize(("circumstance", "environment"), CASES)
def test_every_command_is_whole_and_says_what_is_wrong(
    store: Cluster, circumstance: str, environment: str
) -> None:
    wrong = []
    for name, result in hurried(store, circumstance, environment).items():
        row = ROWS.get(name) or SERVERS[name]
        progress = re.compile(r"\x1b\[2K[^\n]*")
        closed = circumstance in ("pipe closed", "both closed", "full disk")
        # What was asked wrongly prints nothing that could be lost: its code stays.
        codes = (*row.codes, 1) if closed and 2 not in row.codes else row.codes
        said = result.out + result.err
        told = {
            "code": result.code not in codes,
            "bug": any(each in said for each in ("Traceback", "is a bug", "unexpected")),
            "cut": not closed and "…" in progress.sub("", said),
            "incomplete": not closed
            and any(re.sub(r"\s", "", each) not in result.whole for each in row.shows),
            "colour": environment in ("dumb", "no colour")
            and bool(re.search(r"\x1b\[[0-9;]*[349]\d", said)),
            "escape": circumstance not in ("terminal", "narrow") and "\x1b" in said,
            "full disk untold": circumstance == "full disk"
            and 0 in row.codes
            and not (result.code == 1 and "No space left" in result.err),
            "closed pipe told": circumstance == "pipe closed" and "roken pipe" in result.err,
            "lines": circumstance == "no terminal"
            and any(each not in result.out.replace("\n", " ") for each in row.shows),
        }
        wrong += [f"{name}: {what}: {result}" for what, is_wrong in told.items() if is_wrong]
    assert not wrong, "\n".join(wrong)
