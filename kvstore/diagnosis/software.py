"""Checks of Python, of the packages that kvstore needs, and of those that it can use.

Packages are imported in another process: a broken package ends only that process, and a slow
import ends at its deadline.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from kvstore import native
from kvstore._version import __version__
from kvstore.diagnosis import distribution
from kvstore.diagnosis.findings import Finding, ok, problem, warning, warning_if
from kvstore.mooncake import is_ours
from kvstore.native import compiled
from kvstore.process import interpreter

NEEDED: Final = ("numpy", "grpcio", "protobuf", "pydantic", "xxhash", "click", "rich")
OPTIONAL: Final = {
    "torch": "tensors as values: pip install torch",
    "vllm": "the connector: pip install vllm",
    "aiohttp": "kvstore-proxy: pip install aiohttp prometheus-client cbor2",
    "cbor2": "kvstore-proxy, or the extra [proxy]: pip install cbor2",
}
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

# Everything that a client and a master import, generated code included.
_IMPORT_ALL: Final = "import kvstore.client.sync, kvstore.master.app, kvstore.node.app"


def python(timeout_s: float) -> Iterator[Finding]:
    """The interpreter and the packages that kvstore needs."""
    yield ok(f"{platform.python_version()}, kvstore {__version__}")
    versions = ", ".join(f"{name} {version(name) or 'missing'}" for name in NEEDED)
    failure = import_failure(_IMPORT_ALL, timeout_s)
    if failure is None:
        yield ok(versions, subject="packages")
    else:
        needed = shlex.join(distribution.requirements() or NEEDED)
        advice = f"{sys.executable} -m pip install --upgrade {needed}"
        yield problem(f"{versions}; {failure}", advice, "packages")


def installation() -> list[Finding]:
    """Whether another project's package hides this one, and whether the C parts are compiled."""
    strange = [
        warning(
            f"{stranger} is installed, which is another project (this one is "
            f"{distribution.NAME}); its module is also called kvstore, and may hide this one",
            f"{sys.executable} -m pip uninstall {distribution.NAME_BEFORE}",
            "distribution",
        )
        for stranger in distribution.strangers()
    ]
    return [*strange, _compiled()]


def _compiled() -> Finding:
    subject = "compiled parts"
    if os.environ.get("KVSTORE_NATIVE") == "0":
        return ok("not used, because KVSTORE_NATIVE=0", subject=subject)
    missing = []
    if not native.is_compiled:
        missing.append("the steps of the hot path")
    if not compiled.library(str(_STATE)).exists():
        missing.append("the master's state")
    if not missing:
        return ok("the steps of the hot path and the master's state", subject=subject)
    return warning(
        f"not compiled: {', '.join(missing)}; plain Python does the same work, slower",
        "Install a compiler (apt-get install gcc python3-dev), then kvstore again: "
        "pip install . in a checkout compiles them.",
        subject,
    )


def optional() -> Iterator[Finding]:
    """Reads only the versions of optional packages: importing vLLM takes many seconds."""
    for name, purpose in OPTIONAL.items():
        number = version(name)
        yield ok(f"{name} {number}" if number else f"{name} is not installed ({purpose})")


def mooncake_store() -> Iterator[Finding]:
    """Whose ``mooncake.store`` is found by an engine that is started with this environment."""
    try:
        found = find_spec("mooncake.store")
    except ModuleNotFoundError:
        found = None
    if found is not None and is_ours(found.origin):
        yield ok("this store (its directory is in front on PYTHONPATH)")
        return
    whose = "not installed" if found is None else f"Mooncake's own ({found.origin})"
    yield ok(f"{whose}; kvstore as-mooncake -- COMMAND gives it this store")


def transfer_engine(timeout_s: float, *, transfer: bool) -> Iterator[Finding]:
    """Whether Mooncake's transfer engine can be used; with ``transfer``, whether bytes arrive."""
    installed = next((f"{name} {number}" for name in ENGINES if (number := version(name))), None)
    if installed is None:
        what, advice = "not installed (RDMA needs it)", f"pip install {ENGINES[-1]}"
        yield problem(what, advice) if transfer else ok(what)
        return
    failure = import_failure("from mooncake.engine import TransferEngine", timeout_s)
    if failure is not None:
        advice = "apt-get install libibverbs1 librdmacm1 libnuma1 liburing2"
        if ".so" not in failure:
            advice = f"{sys.executable} -m pip install --force-reinstall {installed.split()[0]}"
        yield (problem if transfer else warning)(f"{installed}: {failure}", advice)
        return
    if find_spec("kvstore.transport.mooncake") is None:
        what = f"{installed}, which this release does not use"
        yield problem(what, "Use shm and tcp, or a later release.") if transfer else ok(what)
        return
    rows = _probe(_PROBE, timeout_s)
    if not isinstance(rows, list):
        what = f"{installed}: the probe of its transport failed or took over {timeout_s:.0f} s"
        yield warning(what, f"{sys.executable} -c '{_PROBE}'")
        rows = []
    for row in rows:
        is_well = row["ok"] or (row["what"] == "devices" and row["found"] == "no RDMA card")
        yield warning_if(not is_well, f"{row['what']}: {row['found']}", row["advice"])
    if transfer:
        yield loop_back(timeout_s)


def graphics(timeout_s: float) -> Iterator[Finding]:
    """Whether kvstore can copy from and to the memory of GPUs, and in which way."""
    rows = _probe(_PROBE_GPU, timeout_s)
    if rows is None:
        what = f"the probe of NVIDIA's driver failed or took over {timeout_s:.0f} s"
        yield warning(what, "nvidia-smi says whether the driver works.")
    elif not isinstance(rows, list):
        yield ok(f"none is used: {rows}")
    elif not rows:
        yield ok("none")
    else:
        for name, copies_batches, locks in rows:
            if not locks:
                yield warning(
                    f"{name}: memory of the host cannot be page-locked, so bytes are copied twice",
                    "Raise the limit of locked memory: ulimit -l unlimited, or the container's.",
                )
            elif not copies_batches:
                why = "the driver is older than CUDA 12.8, so each page is a call of its own"
                yield warning(f"{name}: {why}", "Install a newer driver.")
            else:
                yield ok(f"{name}: copies straight from and to the pool, in batches")


def loop_back(timeout_s: float) -> Finding:
    """Runs puts and gets through the engine, against a store on this host; by RDMA where there is
    a card."""
    protocol = os.environ.get("KVSTORE_CLIENT_PROTOCOL") or "tcp"
    if "KVSTORE_CLIENT_PROTOCOL" not in os.environ and any(Path("/sys/class/infiniband").glob("*")):
        protocol = "rdma"
    arguments = ["-m", "kvstore.cli.main", "bench", "--transport", "mooncake",
                 "--rows", "get/mooncake/1MiB", "--seconds", "0.05", "--json"]  # fmt: skip
    again = f"KVSTORE_CLIENT_PROTOCOL={protocol} kvstore bench --transport mooncake"
    try:
        environ = os.environ | {"KVSTORE_CLIENT_PROTOCOL": protocol}
        done = _run(arguments, timeout_s, environ)
    except subprocess.TimeoutExpired:
        what = f"no bytes arrived by {protocol} within {timeout_s:.0f} s"
        return problem(what, f"{again} shows where it stops")
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    speeds = [row["gb_per_second"] for row in rows]
    if done.returncode != 0 or not speeds:
        reason = done.stderr.strip().rpartition("\n")[2][:300]
        return problem(f"no bytes arrived by {protocol}: {reason}", again)
    return ok(f"bytes arrive by {protocol}: gets at {max(speeds):.2f} GB/s")


# --- what the checks read ----------------------------------------------------------------------


def version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def import_failure(code: str, timeout_s: float) -> str | None:
    """Why ``code`` fails to import, in one line; None: it does not."""
    script = (
        "import json, sys\n"
        "try:\n"
        f"    exec({code!r})\n"
        "except BaseException as error:\n"
        "    print(json.dumps(f'{type(error).__name__}: {error}'))\n"
    )
    try:
        done = _run(["-c", script], timeout_s)
    except subprocess.TimeoutExpired:
        return f"the import took over {timeout_s:.0f} s"
    if done.returncode != 0:
        return f"the import ended with status {done.returncode}"
    last = done.stdout.strip().rpartition("\n")[2]
    return str(json.loads(last)).partition("\n")[0] if last.startswith('"') else None


def _probe(code: str, timeout_s: float) -> Any:
    """What ``code`` prints as its last line, in JSON; None: nothing of the kind, or too late."""
    try:
        done = _run(["-c", code], timeout_s)
        return json.loads(done.stdout.strip().rpartition("\n")[2])
    except (subprocess.TimeoutExpired, ValueError):
        return None


def _run(
    arguments: Sequence[str], timeout_s: float, environ: Mapping[str, str] = os.environ
) -> subprocess.CompletedProcess[str]:
    """Runs Python in a process of its own."""
    return subprocess.run(
        interpreter.command(*arguments), env=interpreter.environment(environ),
        capture_output=True, text=True, timeout=timeout_s, check=False,
    )  # fmt: skip
