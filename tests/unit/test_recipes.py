"""The recipes of CONTRIBUTING.md work: their blocks are applied to a copy of the tree, and used."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final, NamedTuple

import pytest

ROOT: Final = Path(__file__).resolve().parents[2]
PAGE: Final = (ROOT / "CONTRIBUTING.md").read_text()
BLOCK: Final = re.compile(
    r"^`(?P<file>[\w./]+)`, (?:(?P<where>after|before|instead of) `(?P<line>.+?)`|a new file):"
    r"[^\n]*\n\n```(?:py|text)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
FILES: Final = re.compile(r"^\| (\w+) \| (\d+)", re.MULTILINE)
SECTIONS: Final = {
    "verb": "A verb",
    "metric": "A metric",
    "setting": "A setting",
    "transport": "A transport",
    "check": "A check of `kvstore doctor`",
    "policy": "An eviction policy",
}


class Insertion(NamedTuple):
    file: str
    where: str
    """after, before or instead of; empty: a new file."""
    line: str
    text: str


def recipe(name: str) -> list[Insertion]:
    """The blocks of one recipe, in their order."""
    section = PAGE.partition(f"\n## {SECTIONS[name]}\n")[2].partition("\n## ")[0]
    blocks = BLOCK.finditer(section)
    found = [Insertion(*(field or "" for field in match.groups())) for match in blocks]
    assert len(found) == section.count("\n```\n"), "a block does not say where it goes"
    return found


def apply(insertion: Insertion, root: Path) -> None:
    path = root / insertion.file
    if not insertion.where:
        assert not path.exists(), f"{insertion.file} exists"
        path.write_text(insertion.text)
        return
    lines = path.read_text().splitlines(keepends=True)
    found = [n for n, line in enumerate(lines) if line.lstrip().startswith(insertion.line)]
    assert len(found) == 1, f"{insertion.file}: {len(found)} lines begin with {insertion.line!r}"
    first = found[0] + (insertion.where == "after")
    lines[first : found[0] + (insertion.where != "before")] = [insertion.text]
    path.write_text("".join(lines))


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the product with all recipes applied."""
    root = tmp_path_factory.mktemp("recipes")
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    for folder in ("kvstore", "client", "master", "connectors", "proto"):
        shutil.copytree(ROOT / folder, root / folder, symlinks=True, ignore=ignored)
    for name in SECTIONS:
        for insertion in recipe(name):
            apply(insertion, root)
    run(root, "proto/generate.py")
    return root


def run(root: Path, *arguments: str) -> str:
    """What ``python ARGUMENTS`` prints with the packages of ``root``."""
    variables = {"PYTHONPATH": str(root), "KVSTORE_NATIVE": "0"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=root, env=os.environ | variables, text=True, timeout=60,
        check=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
    ).stdout  # fmt: skip


def test_the_page_counts_the_files_of_each_recipe() -> None:
    counts = {name: int(count) for name, count in FILES.findall(PAGE) if name in SECTIONS}
    assert counts == {name: len({each.file for each in recipe(name)}) for name in SECTIONS}


STORE: Final = """
import asyncio, subprocess, sys, time, urllib.request
from kvstore import AsyncClient, Client

master = subprocess.Popen(
    [sys.executable, "-m", "kvstore.cli.master", "--memory", "16MiB", "--port", "0"],
    stdout=subprocess.PIPE, text=True,
)
try:
    lines = [master.stdout.readline() for _ in range(3)]
    assert lines[0] == "good morning\\n", lines
    address = lines[1].split()[3]
    with Client(address, transports=("local-tcp",)) as client:
        while not client.status().nodes:
            time.sleep(0.01)
        client.put("key", b"value")
        assert client.get("key") == b"value"
        assert client.exists("key")
        assert client.count_objects() == 1
        assert "local-tcp" in client.stats().transports

    async def count() -> int:
        async with AsyncClient(address) as client:
            return await client.count_objects(namespace="other")

    assert asyncio.run(count()) == 0
    url, count = lines[2].split()[4].rstrip(","), 0.0
    while not count:  # the dashboard's process reads the counters from time to time
        time.sleep(0.1)
        with urllib.request.urlopen(url) as page:
            rows = dict(row.rsplit(" ", 1) for row in page.read().decode().splitlines())
        count = float(rows["kvstore_queries_total"])
finally:
    master.terminate()
    assert master.wait() == 0
"""


@pytest.mark.slow  # generates protobuf code, for which `make test` installs nothing
def test_verb_metric_setting_transport_and_policy_are_served(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSTORE_MASTER_GREETING", "good morning")
    if "policy" in SECTIONS:
        monkeypatch.setenv("KVSTORE_MASTER_EVICTION", "fifo")
    run(tree, "-c", STORE)


@pytest.mark.slow
def test_the_check_runs(tree: Path) -> None:
    program = "from kvstore.cli.main import cli; cli(['doctor', '--json'])"
    found = subprocess.run(
        [sys.executable, "-c", program], cwd=tree, env=os.environ | {"PYTHONPATH": str(tree)},
        capture_output=True, text=True, timeout=60, check=False,
    ).stdout  # fmt: skip
    assert '"clock source: ' in found
