"""Checks of Python and of packages.

Packages are imported in another process, so that a broken package or a slow import does not affect
this one.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from kvstore import native
from kvstore._version import __version__
from kvstore.console.diagnostics.findings import Finding, of_row, ok, under
from kvstore.native import compiled
from kvstore.runtime import interpreter

NEEDED: Final = ("numpy", "grpcio", "protobuf", "pydantic", "xxhash", "click", "rich")
ENGINES: Final = ("mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda")

_STATE: Final = Path(native.__file__).parents[1] / "master" / "state"

_PROBE: Final = (
    "import json; from kvstore.transport.mooncake import probe; "
    "print(json.dumps([each._asdict() for each in probe()]))"
)

_PROBE_GPU: Final = (
    "import json; from kvstore.device import cuda; from kvstore.errors import DeviceError\n"
    "try: print(json.dumps(cuda.probe()))\n"
    "except DeviceError as error: print(json.dumps(error.message))"
)

# All imports of a client and a master, generated code included.
_IMPORT_ALL: Final = "import kvstore.client.client, kvstore.master.main, kvstore.node.main"


def python(timeout_s: float) -> Iterator[Finding]:
    """Check the interpreter and the required packages."""
    yield ok(f"{platform.python_version()}, kvstore {__version__}")
    versions = ", ".join(f"{name} {version(name) or 'missing'}" for name in NEEDED)
    failure = import_failure(_IMPORT_ALL, timeout_s)
    if failure is None:
        found = ok(versions)
    else:
        needed = shlex.join(requirements() or NEEDED)
        found = of_row(
            "packages", versions=versions, failure=failure, python=sys.executable, needed=needed
        )
    yield found._replace(subject="packages")


def installation() -> list[Finding]:
    """Check that no other package hides this one, and that the C parts are compiled.

    The distribution is called ``kvstore-llm``: ``kvstore`` on the public index is another project,
    a client of etcd and consul with a module ``kvstore``.
    """
    others = sorted(
        {
            f"kvstore {distribution.version}"
            for distribution in metadata.distributions(name="kvstore")
        }
    )
    found = [of_row("stranger", stranger=other, python=sys.executable) for other in others]
    return [*under("distribution", found), compiled_parts()._replace(subject="compiled parts")]


def compiled_parts() -> Finding:
    """Check that the C parts are compiled, unless ``KVSTORE_NATIVE=0`` says that they are not."""
    if os.environ.get("KVSTORE_NATIVE") == "0":
        return ok("not used, because KVSTORE_NATIVE=0")
    parts = {
        "the steps of the hot path": native.is_compiled,
        "the master's state": compiled.library(str(_STATE)).exists(),
    }
    if missing := [name for name, is_there in parts.items() if not is_there]:
        return of_row("not_compiled", missing=", ".join(missing))
    return ok(" and ".join(parts))


def transfer_engine(timeout_s: float) -> Iterator[Finding]:
    """Check that Mooncake's transfer engine can be used; ``kvstore bench --transport mooncake``
    tests transfers."""
    installed = next((f"{name} {number}" for name in ENGINES if (number := version(name))), None)
    if installed is None:
        yield ok("not installed (RDMA needs it)")
        return
    words: dict[str, Any] = {
        "installed": installed, "package": installed.split()[0], "python": sys.executable,
    }  # fmt: skip
    failure = import_failure("from mooncake.engine import TransferEngine", timeout_s)
    if failure is not None:
        check = "engine_libraries" if ".so" in failure else "engine_package"
        yield of_row(check, failure=failure, **words)
        return
    rows = _probe(_PROBE, timeout_s)
    if not isinstance(rows, list):
        yield of_row("engine_probe", seconds=timeout_s, probe=_PROBE, **words)
        return
    for row in rows:
        is_well = row["ok"] or (row["what"] == "devices" and row["found"] == "no RDMA device")
        yield of_row("engine", holds=not is_well, **row)


def graphics(timeout_s: float) -> Iterator[Finding]:
    """Check whether kvstore can copy from and to GPU memory, and by which method."""
    rows = _probe(_PROBE_GPU, timeout_s)
    if rows is None:
        yield of_row("gpu_probe", seconds=timeout_s)
    elif not isinstance(rows, list):
        yield ok(f"none is used: {rows}")
    elif not rows:
        yield ok("none")
    else:
        for name, copies_batches, locks in rows:
            if locks and copies_batches:
                yield ok(f"{name}: copies straight from and to the pool, in batches")
            else:
                yield of_row("gpu_driver" if locks else "gpu_not_locked", name=name)


def requirements() -> list[str]:
    """Return the required packages in pip's form; empty if pip did not install kvstore."""
    ours = next(iter(metadata.distributions(name="kvstore-llm")), None)
    needed = (ours.requires if ours is not None else None) or []
    return [requirement for requirement in needed if "extra ==" not in requirement]


def version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def import_failure(code: str, timeout_s: float) -> str | None:
    """Return the error of importing ``code``, in one line; None: it succeeds."""
    try:
        done = _run(code, timeout_s)
    except subprocess.TimeoutExpired:
        return f"the import took over {timeout_s:.0f} s"
    if done.returncode == 1:  # the last line of a traceback names the error
        return done.stderr.strip().rpartition("\n")[2]
    return f"the import ended with status {done.returncode}" if done.returncode else None


def _probe(code: str, timeout_s: float) -> Any:
    """Return the JSON in the last output line of ``code``; None: there is none in time."""
    try:
        done = _run(code, timeout_s)
        return json.loads(done.stdout.strip().rpartition("\n")[2])
    except (subprocess.TimeoutExpired, ValueError):
        return None


def _run(code: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        interpreter.command("-c", code), env=interpreter.environment(),
        capture_output=True, text=True, timeout=timeout_s, check=False,
    )  # fmt: skip
