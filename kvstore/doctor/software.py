"""Python, the packages that kvstore needs, and those that it can use.

What is imported is imported in another process: a broken package ends that one, and a slow one is
left to its deadline.
"""

from __future__ import annotations

import importlib
import json
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Final

from kvstore._version import __version__
from kvstore.doctor.findings import Finding, ok, problem, warning

NEEDED: Final = ("numpy", "grpcio", "protobuf", "pydantic", "xxhash", "click", "rich")
OPTIONAL: Final = {
    "torch": "tensors as values: pip install 'kvstore[torch]'",
    "vllm": "the connector: pip install vllm",
    "aiohttp": "kvstore-proxy: pip install 'kvstore[proxy]'",
}
ENGINES: Final = ("mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda")

# Everything that a client and a master import, generated code included.
_IMPORT_ALL: Final = "import kvstore.client.sync, kvstore.master.app, kvstore.node.app"


def python(timeout_s: float) -> list[Finding]:
    """The interpreter and what kvstore cannot do without."""
    versions = ", ".join(f"{name} {version(name) or 'missing'}" for name in NEEDED)
    found = [ok("Python", f"{platform.python_version()}, kvstore {__version__}")]
    failure = import_failure(_IMPORT_ALL, timeout_s)
    if failure is None:
        return [*found, ok("packages", versions)]
    advice = f"{sys.executable} -m pip install --upgrade kvstore"
    return [*found, problem("packages", f"{versions}; {failure}", advice)]


def optional() -> list[Finding]:
    """Looks at versions only: importing vLLM takes many seconds."""
    found = []
    for name, purpose in OPTIONAL.items():
        number = version(name)
        what = f"{name} {number}" if number else f"{name} is not installed ({purpose})"
        found.append(ok("optional", what))
    return found


def transfer_engine(timeout_s: float, *, transfer: bool) -> list[Finding]:
    """Whether Mooncake's transfer engine can be used; with ``transfer``, whether bytes arrive."""
    subject = "transfer engine"
    installed = next((f"{name} {number}" for name in ENGINES if (number := version(name))), None)
    if installed is None:
        what = f"not installed (RDMA: pip install {ENGINES[-1]})"
        return [problem(subject, what, "")] if transfer else [ok(subject, what)]
    failure = import_failure("from mooncake.engine import TransferEngine", timeout_s)
    if failure is not None:
        advice = "apt-get install libibverbs1 librdmacm1 libnuma1 liburing2"
        if ".so" not in failure:
            advice = f"{sys.executable} -m pip install --force-reinstall {installed.split()[0]}"
        return [(problem if transfer else warning)(subject, f"{installed}: {failure}", advice)]
    found = [ok(subject, installed)]
    return [*found, *loop_back(timeout_s)] if transfer else found


def loop_back(timeout_s: float) -> list[Finding]:
    """A transfer from this host to itself, through the engine, as the transport does it."""
    subject = "transfer engine"
    try:
        importlib.import_module("kvstore.transport.mooncake")
    except ImportError:
        what = "this release has no transport that uses it, so nothing was transferred"
        return [problem(subject, what, "Use shm and tcp, or a later release.")]
    what = f"its transport is here, but cannot be tried within {timeout_s:.0f} s yet"
    return [problem(subject, what, "")]


# --- what they look at -------------------------------------------------------------------------


def version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def import_failure(code: str, timeout_s: float) -> str | None:
    """Why these imports fail, in one line; None: they do not."""
    script = (
        "import json, sys\n"
        "try:\n"
        f"    exec({code!r})\n"
        "except BaseException as error:\n"
        "    print(json.dumps(f'{type(error).__name__}: {error}'))\n"
    )
    try:
        done = _run([sys.executable, "-c", script], timeout_s)
    except subprocess.TimeoutExpired:
        return f"was not imported within {timeout_s:.0f} s"
    if done.returncode != 0:
        return f"the import ended with status {done.returncode}"
    last = done.stdout.strip().rpartition("\n")[2]
    return str(json.loads(last)).partition("\n")[0] if last.startswith('"') else None


def _run(command: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
