"""The compared systems: vLLM without a store, with this one, and with its built-in on Mooncake.

Each system is one engine (``kv_both``) and, if it has one, a store in processes of its own. All
systems run at the same time and get requests in turns.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import mooncake
from kvstore.demo.processes import Children
from kvstore.demo_vllm import servers
from kvstore.demo_vllm.servers import Server

NONE = "none"
KVSTORE = "kvstore"
KVSTORE_TCP = "kvstore-tcp"
MOONCAKE = "mooncake"
MOONCAKE_EMBEDDED = "mooncake-embedded"
SYSTEMS = {
    NONE: "vLLM without a store",
    KVSTORE: "with this store; bytes through shared memory",
    KVSTORE_TCP: "with this store; bytes over TCP",
    MOONCAKE: "with vLLM's built-in connector; Mooncake's memory in a process of its own, over TCP",
    MOONCAKE_EMBEDDED: "with vLLM's built-in connector; Mooncake's memory inside the engine",
}
DEFAULT_SYSTEMS = (NONE, KVSTORE, KVSTORE_TCP, MOONCAKE)

BUFFER_MIB = 512
"""Mooncake's transfer buffer; its default of 4 GiB is more than a small machine can spare."""
MOONCAKE_SECONDS = 60.0


@dataclass(frozen=True)
class System:
    """A running system, one of ``SYSTEMS``."""

    name: str
    address: str


def missing(name: str) -> str | None:
    """Why this system cannot be started here; None: it can."""
    if name not in (MOONCAKE, MOONCAKE_EMBEDDED):
        return None
    return mooncake.missing()


def start(children: Children, names: Sequence[str], model: Path, memory_mib: int) -> list[System]:
    """Start stores and engines, and wait until all of them serve.

    Args:
        memory_mib: memory of each store.

    Raises:
        ChildError: a process did not start.
    """
    engines = {name: _start(children, name, model, memory_mib) for name in names}
    for engine in engines.values():
        servers.engine_ready(children, engine)
    for name in (MOONCAKE, MOONCAKE_EMBEDDED):
        if name in engines:
            _touch(children, name, memory_mib)
    return [System(name, engine.address) for name, engine in engines.items()]


def _start(children: Children, name: str, model: Path, memory_mib: int) -> Server:
    if name == NONE:
        return servers.start_engine(children, name, model, None)
    if name in (KVSTORE, KVSTORE_TCP):
        master = servers.start_store(children, memory_mib, name=f"{name}-")
        transports = ["tcp"] if name == KVSTORE_TCP else ["shm", "tcp"]
        transfer = servers.transfer_config(master, "kv_both", transports=transports)
        return servers.start_engine(children, name, model, transfer)
    config = _start_mooncake(children, name, memory_mib)
    transfer = {"kv_connector": servers.CONNECTOR, "kv_role": "kv_both"}
    environ = {"MOONCAKE_CONFIG_PATH": str(config)}
    return servers.start_engine(children, name, model, transfer, environ=environ)


def _start_mooncake(children: Children, name: str, memory_mib: int) -> Path:
    """Starts Mooncake's master and, unless the engine holds the memory, its memory process. Returns
    the path of the engine's configuration."""
    embedded = name == MOONCAKE_EMBEDDED
    started = mooncake.start(children, 0 if embedded else memory_mib << 20, name=name)
    settings = {
        "metadata_server": "P2PHANDSHAKE", "master_server_address": started.master,
        "protocol": "tcp", "mode": "embedded" if embedded else "standalone-store",
        "global_segment_size": f"{memory_mib}MB" if embedded else 0,
        "local_buffer_size": f"{BUFFER_MIB}MB",
    }  # fmt: skip
    config = children.directory / f"{name}.json"
    config.write_text(json.dumps(settings))
    return config


def _touch(children: Children, name: str, memory_mib: int) -> None:
    """Write all of Mooncake's memory once: the first touch of a page costs ten times a copy.

    kvstore's node does the same when it starts. Called when all engines serve, because starting
    engines use the whole CPU.
    """
    config = children.directory / f"{name}.json"
    module = "bench.vllm.touch"
    job = children.start(f"{name}-touch", module, str(config), str(memory_mib))
    children.result(job, MOONCAKE_SECONDS)
