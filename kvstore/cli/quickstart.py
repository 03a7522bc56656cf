"""``kvstore quickstart``: a complete store on this host until Ctrl-C, and its configuration
lines."""

from __future__ import annotations

import json
import os
import shlex
from typing import Final

import click

from kvstore.cli.options import SOURCES, command, config_options, debug_option
from kvstore.config import MasterConfig, load
from kvstore.errors import AddressInUseError, SharedMemoryTooSmallError
from kvstore.memory import cgroup
from kvstore.runtime import logs
from kvstore.runtime.addresses import join_address
from kvstore.runtime.formatting import size_text
from kvstore.runtime.listeners import listen

SETTINGS: Final = ("host", "port", "http_port", "log_level")

MEMORY_MAX: Final = 4 << 30
"""Maximum of the default: takes a few seconds to reserve."""

MEMORY_MIN: Final = 16 << 20
MEMORY_STEP: Final = 16 << 20

PORT_STEP: Final = 200
"""Port offset of a second store on a host, beyond all default ports."""

PORT_TRIES: Final = 6

EXAMPLE = """\b
Examples:
  kvstore quickstart                         up to 4 GiB, on this host only
  kvstore quickstart --memory 512MiB
  kvstore quickstart --host 10.0.0.7         engines on other hosts may use it, too

\b
Ctrl-C, SIGTERM or closing the terminal ends all of it and frees the memory. For a store that
outlives its terminal or has several hosts: kvstore-master --help, kvstore-node --help.
"""


@command(
    epilog=f"{EXAMPLE}\n\n{SOURCES}",
    help="""Start a complete store on this host and print the configuration for vLLM, SGLang and
    Python.

    If the default port is taken, for example by another quickstart, the store takes a free one,
    and says so. Its memory ends with it: no object survives the end of its master.
    """,
)
@click.option(
    "--memory",
    metavar="SIZE",
    help="Memory of the store (2GiB). By default what this host can spare: half of what is free in "
    "/dev/shm and within the limit of memory, or a quarter of the free memory, whichever is least, "
    "up to 4 GiB.  [KVSTORE_MASTER_MEMORY]",
)
@config_options(MasterConfig, only=SETTINGS)
@debug_option
def quickstart(config_path: str | None, **flags: object) -> int:
    config = load(MasterConfig, flags, config_path=config_path, origin="{flag}")
    # A single master, whose memory ends with it, even if a configuration file describes real
    # masters.
    change: dict[str, object] = {"etcd": "", "keep": False}
    if not config.memory:
        change["memory"] = spare_memory()
    is_given, usual_port = "port" in config.model_fields_set, config.port
    if "log_level" not in config.model_fields_set:
        change["log_level"] = "warning"
    config = config.model_copy(update=change)
    logs.configure(config.log_level, config.log_format)
    click.echo(f"kvstore quickstart: takes {size_text(config.memory)} of memory (--memory) ...")

    from kvstore.master.main import EphemeralStore
    from kvstore.master.main import run as serve
    from kvstore.runtime.host import (
        own_address,  # imported after the settings are checked
    )
    from kvstore.runtime.listeners import EVERY_INTERFACE

    host = own_address() if config.host in EVERY_INTERFACE else config.host

    def started(port: int, http_port: int) -> None:
        scheme = "https" if config.http_cert else "http"
        page = f"{scheme}://{join_address(host, http_port)}/" if http_port else ""
        passed_over = 0 if is_given or port == usual_port else usual_port
        click.echo(text(join_address(host, port), page, passed_over))

    while True:
        if not is_given:
            config = config.model_copy(update={"port": free_port(config.host, usual_port)})
        try:
            return serve(config, temporary=EphemeralStore("quickstart", started))
        except AddressInUseError:
            if is_given or free_port(config.host, usual_port) == config.port:
                raise  # it is another address


def spare_memory() -> int:
    """Return the bytes that a store may use without harm to other programs.

    Raises:
        SharedMemoryTooSmallError: the host can spare less than ``MEMORY_MIN``.
    """
    from kvstore.console.diagnostics.host import memory_available
    from kvstore.runtime.host import SHM_DIRECTORY

    room = os.statvfs(SHM_DIRECTORY)
    shared = room.f_bavail * room.f_frsize if room.f_blocks else None
    limit = next((limit.available for limit in cgroup.limits()), None)
    free = memory_available()
    bounds = {
        SHM_DIRECTORY: None if shared is None else shared // 2,
        "the memory limit of this control group": None if limit is None else limit // 2,
        "this host": None if free is None else free // 4,
    }
    size, where = min(
        ((size, where) for where, size in bounds.items() if size is not None),
        default=(MEMORY_MAX, ""),
    )
    size = min(size, MEMORY_MAX) // MEMORY_STEP * MEMORY_STEP
    if size < MEMORY_MIN:
        raise SharedMemoryTooSmallError(
            f"{where} has not enough free memory for a store of {size_text(MEMORY_MIN)}",
            advice="kvstore clean frees memory of dead nodes, kvstore doctor says what is there; "
            "or give --memory.",
            needed_bytes=MEMORY_MIN,
            available_bytes=size,
        )
    return size


def free_port(host: str, port: int) -> int:
    """Return ``port``, or a higher port, that is free together with the next one, for the lane; 0:
    none. Another process may take it before it is used."""
    for candidate in range(port, port + PORT_STEP * PORT_TRIES, PORT_STEP):
        try:
            with listen(host, candidate), listen(host, candidate + 1):
                return candidate
        except OSError:
            continue
    return 0


def text(master: str, page: str, passed_over: int = 0) -> str:
    """Return the instructions for a store at ``master`` with a dashboard at ``page`` (may be
    empty). ``passed_over``: the default port, if it or the next one was in use."""
    lines = [f"The store is ready at {master}. Ctrl-C ends it and frees its memory."]
    if passed_over:
        lines.append(
            f"Port {passed_over} or {passed_over + 1} was taken, so give other commands --master "
            f"{master}, as in: kvstore --master {master} status"
        )
    lines += ["", "vLLM:", f"  {vllm_line(master)}"]
    lines += ["", "SGLang:", f"  {sglang_line(master)}"]
    lines += ["", "Python:", f"  {python_line(master)}", ""]
    lines.append(f"Dashboard: {page}" if page else "There is no dashboard (--http-port 0).")
    return "\n".join(lines)


def vllm_line(master: str) -> str:
    config = VLLM | {"kv_connector_extra_config": {"master": master}}
    return f"vllm serve MODEL --kv-transfer-config {_json(config)}"


def sglang_line(master: str) -> str:
    flags = (
        "--enable-hierarchical-cache --hicache-mem-layout page_first_direct "
        "--hicache-storage-backend dynamic --hicache-storage-backend-extra-config"
    )
    config = _json(SGLANG | {"master": master})
    return f"python -m sglang.launch_server --model-path MODEL {flags} {config}"


def python_line(master: str) -> str:
    code = (
        f'from kvstore import Client; c = Client("{master}"); c.put("k", b"v"); print(c.get("k"))'
    )
    return f"python -c {shlex.quote(code)}"


VLLM: Final[dict[str, object]] = {
    "kv_connector": "KVStoreConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
"""As in docs/vllm.md (``SGLANG``: docs/engines/sglang.md), which a test compares."""

SGLANG: Final[dict[str, object]] = {
    "backend_name": "kvstore",
    "module_path": "kvstore.connectors.sglang",
    "class_name": "KVStoreHiCache",
    "interface_v1": 1,
    "hicache_storage_pass_prefix_keys": True,
}


def _json(value: dict[str, object]) -> str:
    return shlex.quote(json.dumps(value))
