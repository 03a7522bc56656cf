"""What ``make dist`` has built: what is in it, and that a new user can install and use it."""

from __future__ import annotations

import email
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import tomllib
import urllib.request
import zipfile
from email.message import Message
from pathlib import Path

import pytest

from kvstore._version import __version__
from tests.support.processes import ROOT, STOP_S
from tests.support.quickstarts import Quickstart

DIST = ROOT / "dist"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
INSTALL_S = 600.0
VERSIONS = [
    name.rpartition(" ")[2]
    for name in PYPROJECT["project"]["classifiers"]
    if re.search(r":: 3\.\d+$", name)
]
"""The versions of Python that the package names."""
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
PURE = f"kvstore_llm-{__version__}-py3-none-any.whl"
SDIST = f"kvstore_llm-{__version__}.tar.gz"
WHEELS = sorted(path.name for path in DIST.glob("*.whl"))
COMPILED = [name for name in WHEELS if name != PURE]


def tag(version: str) -> str:
    return "cp" + version.replace(".", "")


TRIED = [
    *((PURE, version) for version in VERSIONS),
    *((name, version) for name in COMPILED for version in VERSIONS if f"-{tag(version)}-" in name),
    (SDIST, HERE),
]
"""Each artefact, and the version of Python that installs it."""

pytestmark = pytest.mark.timeout(1_200)


def names_in(wheel: str) -> set[str]:
    with zipfile.ZipFile(DIST / wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


def metadata_of(wheel: str) -> Message:
    with zipfile.ZipFile(DIST / wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def sources() -> set[str]:
    """What every wheel holds, by its place in it."""
    found = set()
    for top in ("kvstore", "master", "client", "connectors"):
        prefix = "" if top == "kvstore" else "kvstore/"
        for pattern in ("*.py", "*.pyi", "py.typed", "page/*"):
            for path in (ROOT / top).rglob(pattern):
                inside = path.relative_to(ROOT)
                if path.is_file() and inside.parts[1] not in ("master", "client", "connectors"):
                    found.add(prefix + inside.as_posix())
    return found


def test_there_is_an_sdist_a_pure_wheel_and_a_compiled_one_for_this_interpreter() -> None:
    assert (DIST / SDIST).is_file()
    assert PURE in WHEELS
    mine = [name for name in COMPILED if f"-{tag(HERE)}-{tag(HERE)}-" in name]
    assert len(mine) == 1
    assert {name for name, _ in TRIED} == {*WHEELS, SDIST}
    assert all(re.search(r"-manylinux[\w.]+_(x86_64|aarch64)\.whl$", name) for name in COMPILED)


@pytest.mark.parametrize("wheel", WHEELS)
def test_a_wheel_holds_the_packages_and_their_files_and_nothing_else(wheel: str) -> None:
    found = {name for name in names_in(wheel) if ".dist-info/" not in name}
    pages = {name for name in found if "/share/man/man1/" in name}
    assert {Path(name).name for name in pages} >= {"kvstore.1", "kvstore-put.1", "kvstore-master.1"}
    deployed = {name for name in found if "/share/kvstore/deploy/" in name}
    assert {name.partition("/share/kvstore/")[2] for name in deployed} == {
        path.relative_to(ROOT).as_posix()
        for path in ROOT.glob("deploy/**/*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    }
    found -= pages | deployed
    libraries = {name for name in found if name.endswith(".so")}
    assert found - libraries == sources()
    if wheel == PURE:
        assert not libraries
        return
    assert any(re.match(r"kvstore/native/_native\..*\.so$", name) for name in libraries)
    assert any(re.match(r"kvstore/master/state/of_\w+__mypyc\..*\.so$", name) for name in libraries)


@pytest.mark.parametrize("wheel", WHEELS)
def test_the_metadata_of_a_wheel(wheel: str) -> None:
    said = metadata_of(wheel)
    assert said["Name"] == "kvstore-llm"
    assert said["Version"] == __version__
    assert said["License-Expression"] == "Apache-2.0 AND BSD-2-Clause"
    assert said["Requires-Python"] == PYPROJECT["project"]["requires-python"]
    needed = [each for each in said.get_all("Requires-Dist", []) if "extra ==" not in each]
    assert len(needed) == len(PYPROJECT["project"]["dependencies"])
    assert not any("torch" in each for each in needed)
    licences = [name for name in names_in(wheel) if name.endswith("/LICENSE")]
    assert len(licences) == 2


def test_the_sdist_holds_what_a_build_needs() -> None:
    with tarfile.open(DIST / SDIST) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    headers = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("kvstore/native/**/*.[ch]")}
    assert headers <= names
    assert {"LICENSE", "README.md", "pyproject.toml", "setup.py"} <= names
    assert "deploy/Containerfile" in names
    assert "docs/man/kvstore-auth-issue.1" in names
    assert not any(name.startswith("tests/") for name in names)


@functools.cache
def interpreter(version: str) -> str | None:
    """A Python of this version that runs, or None. A shim of pyenv may be found and not run."""
    found = sys.executable if version == HERE else shutil.which(f"python{version}")
    says = "import ensurepip, sys; print(sys.version_info[:2])"
    major, minor = version.split(".")
    if found is None:
        return None
    done = subprocess.run(
        [found, "-c", says], capture_output=True, text=True, timeout=60.0, check=False
    )
    return found if done.stdout == f"({major}, {minor})\n" else None


class Environment:
    """An empty virtual environment in which no compiler is found."""

    def __init__(self, interpreter: str, directory: Path) -> None:
        self.python = str(directory / "venv/bin/python")
        self.bin = directory / "venv/bin"
        self.directory = directory
        self.variables = {
            name: value
            for name, value in os.environ.items()
            if name not in ("PYTHONPATH", "VIRTUAL_ENV")
        } | {"PATH": f"{self.bin}:{directory}", "CC": "/bin/false"}
        self.run(interpreter, "-m", "venv", str(directory / "venv"))

    def run(self, *command: str, timeout_s: float = 120.0) -> str:
        done = subprocess.run(
            command,
            cwd=self.directory,
            env=self.variables,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def kvstore(self, *arguments: str) -> str:
        return self.run(str(self.bin / "kvstore"), *arguments)


@pytest.mark.parametrize(("artefact", "version"), TRIED)
def test_a_new_user_installs_it_and_runs_the_readme(
    artefact: str, version: str, tmp_path: Path
) -> None:
    python = interpreter(version)
    if python is None:
        pytest.skip(f"{artefact} is not tried: no python{version} on PATH")
    user = Environment(python, tmp_path)
    began = time.monotonic()
    user.run(user.python, "-m", "pip", "install", "--quiet", str(DIST / artefact),
             timeout_s=INSTALL_S)  # fmt: skip
    took_s = time.monotonic() - began
    load = os.getloadavg()[0]
    print(f"python{version} -m pip install {artefact}: {took_s:.1f} s, load {load:.1f}")

    assert user.kvstore("--version").strip() == __version__
    assert (user.bin.parent / "share/man/man1/kvstore.1").is_file()
    assert (user.bin.parent / "share/kvstore/deploy/prometheus/alerts.yml").is_file()
    where = "import kvstore; print(kvstore.__file__)"
    assert user.run(user.python, "-c", where).startswith(str(user.directory))

    store = Quickstart(
        "--memory", "32MiB",
        python=user.python, at=user.directory, variables=user.variables,
    )  # fmt: skip
    try:
        store.ready()
        master = ("--master", f"127.0.0.1:{store.port}")
        assert __version__ in user.kvstore(*master, "version")
        said = user.kvstore(*master, "doctor", "--json").splitlines()
        rows = [json.loads(line) for line in said]
        (row,) = (row for row in rows if row["subject"] == "compiled parts")
        assert row["state"] == ("ok" if artefact in COMPILED else "warning"), row

        with urllib.request.urlopen(f"http://127.0.0.1:{store.http_port}/", timeout=10) as page:
            assert "kvstore" in page.read().decode()
        (lines,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
        assert "127.0.0.1:50001" in lines
        program = lines.replace("127.0.0.1:50001", f"127.0.0.1:{store.port}")
        assert user.run(user.python, "-c", program) == "2\n"
        store.process.terminate()
        assert store.process.wait(STOP_S) == 0, store.text
    finally:
        store.end()
    user.run(user.python, "-m", "pip", "uninstall", "--quiet", "--yes", "kvstore-llm")
    left = [path for path in user.bin.parent.rglob("*kvstore*") if path.name != "__pycache__"]
    assert left == []
