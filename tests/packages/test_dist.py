"""What ``make dist`` has built: what is in it, and that a new user can install and use it."""

from __future__ import annotations

import email
import os
import re
import subprocess
import sys
import tarfile
import time
import tomllib
import venv
import zipfile
from email.message import Message
from pathlib import Path

import pytest

from kvstore._version import __version__
from tests.integration.cluster import ROOT, STOP_S
from tests.integration.quickstarts import Quickstart

DIST = ROOT / "dist"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
INSTALL_S = 600.0
HERE = f"cp{sys.version_info.major}{sys.version_info.minor}"
PURE = f"kvstore_llm-{__version__}-py3-none-any.whl"
SDIST = f"kvstore_llm-{__version__}.tar.gz"
WHEELS = sorted(path.name for path in DIST.glob("*.whl"))
COMPILED = [name for name in WHEELS if name != PURE]

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
    mine = [name for name in COMPILED if f"-{HERE}-{HERE}-" in name]
    assert len(mine) == 1
    assert all(re.search(r"-manylinux[\w.]+_(x86_64|aarch64)\.whl$", name) for name in COMPILED)


@pytest.mark.parametrize("wheel", WHEELS)
def test_a_wheel_holds_the_packages_and_their_files_and_nothing_else(wheel: str) -> None:
    found = {name for name in names_in(wheel) if ".dist-info/" not in name}
    libraries = {name for name in found if name.endswith(".so")}
    assert found - libraries == sources()
    if wheel == PURE:
        assert not libraries
        return
    assert any(re.match(r"kvstore/native/fast\..*\.so$", name) for name in libraries)
    assert any(re.match(r"kvstore/master/state/of_\w+__mypyc\..*\.so$", name) for name in libraries)


@pytest.mark.parametrize("wheel", WHEELS)
def test_the_metadata_of_a_wheel(wheel: str) -> None:
    said = metadata_of(wheel)
    assert said["Name"] == "kvstore-llm"
    assert said["Version"] == __version__
    assert said["License-Expression"] == "Apache-2.0"
    assert said["Requires-Python"] == PYPROJECT["project"]["requires-python"]
    needed = [each for each in said.get_all("Requires-Dist", []) if "extra ==" not in each]
    assert len(needed) == len(PYPROJECT["project"]["dependencies"])
    assert not any("torch" in each for each in needed)
    licences = [name for name in names_in(wheel) if name.endswith("/LICENSE")]
    assert len(licences) == 1


def test_the_sdist_holds_what_a_build_needs() -> None:
    with tarfile.open(DIST / SDIST) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    headers = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("kvstore/native/*.[ch]")}
    assert headers <= names
    assert {"LICENSE", "README.md", "pyproject.toml", "setup.py"} <= names
    assert "deploy/Containerfile" in names
    assert not any(name.startswith("tests/") for name in names)


class Environment:
    """An empty virtual environment in which no compiler is found."""

    def __init__(self, directory: Path) -> None:
        self.python = str(directory / "venv/bin/python")
        venv.create(directory / "venv", with_pip=True)
        self.bin = directory / "venv/bin"
        self.directory = directory
        self.variables = {
            name: value
            for name, value in os.environ.items()
            if name not in ("PYTHONPATH", "VIRTUAL_ENV")
        } | {"PATH": f"{self.bin}:{directory}", "CC": "/bin/false"}

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


@pytest.fixture(params=[PURE, *(name for name in COMPILED if HERE in name), SDIST])
def installed(request: pytest.FixtureRequest, tmp_path: Path) -> Environment:
    """Each artefact, installed where nothing but Python is."""
    environment = Environment(tmp_path)
    artefact = str(DIST / request.param)
    began = time.monotonic()
    environment.run(environment.python, "-m", "pip", "install", "--quiet", artefact,
                    timeout_s=INSTALL_S)  # fmt: skip
    print(f"pip install {request.param}: {time.monotonic() - began:.1f} s")
    return environment


def test_a_new_user_installs_it_and_runs_the_readme(
    installed: Environment, request: pytest.FixtureRequest
) -> None:
    assert installed.run(str(installed.bin / "kvstore"), "--version").strip() == __version__
    where = "import kvstore; print(kvstore.__file__)"
    assert installed.run(installed.python, "-c", where).startswith(str(installed.directory))
    parts = "from kvstore.doctor.software import installation as i; print(i()[-1].state)"
    is_compiled = "manylinux" in request.node.callspec.id
    assert installed.run(installed.python, "-c", parts).strip() == (
        "ok" if is_compiled else "warning"
    )

    store = Quickstart(
        "--memory", "32MiB",
        python=installed.python, at=installed.directory, variables=installed.variables,
    )  # fmt: skip
    try:
        store.ready()
        told = installed.run(str(installed.bin / "kvstore"),
                             "--master", f"127.0.0.1:{store.port}", "version")  # fmt: skip
        assert __version__ in told
        (lines,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
        assert "127.0.0.1:50001" in lines
        program = lines.replace("127.0.0.1:50001", f"127.0.0.1:{store.port}")
        assert installed.run(installed.python, "-c", program) == "2\n"
        store.process.terminate()
        assert store.process.wait(STOP_S) == 0, store.text
    finally:
        store.end()
