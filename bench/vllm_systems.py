"""Starts the compared systems: vLLM without a store, with this one, and with Mooncake Store.

Each system is one engine (``kv_both``) and, if it has one, a store in processes of its own. All
systems run at the same time and get requests in turns.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import mooncake
from bench.client import ClientProcess, Settings
from kvstore.bench.session import WARM_PIECE
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
    masters: dict[str, str] = {}
    engines = {name: _start(children, name, model, memory_mib, masters) for name in names}
    for engine in engines.values():
        servers.engine_ready(children, engine)
    # Now that no starting engine uses the whole CPU: write Mooncake's memory through once, as
    # kvstore's node does when it starts. The first touch of a page costs ten times a copy.
    for name, master in masters.items():
        settings = Settings(MOONCAKE, "tcp", master, memory_mib << 20, WARM_PIECE)
        ClientProcess(children, f"{name}-touch", settings).close()
    return [System(name, engine.address) for name, engine in engines.items()]


def _start(
    children: Children, name: str, model: Path, memory_mib: int, masters: dict[str, str]
) -> Server:
    """Starts one system. If it has a Mooncake master, adds its address to ``masters``."""
    if name == NONE:
        return servers.start_engine(children, name, model, None)
    if name in (KVSTORE, KVSTORE_TCP):
        master = servers.start_store(children, memory_mib, name=f"{name}-")
        transports = ["tcp"] if name == KVSTORE_TCP else ["shm", "tcp"]
        transfer = servers.transfer_config(master, "kv_both", transports=transports)
        return servers.start_engine(children, name, model, transfer)
    embedded = name == MOONCAKE_EMBEDDED
    master = mooncake.start(children, 0 if embedded else memory_mib << 20, name=name).master
    masters[name] = master
    settings = {
        "metadata_server": mooncake.METADATA, "master_server_address": master, "protocol": "tcp",
        "mode": "embedded" if embedded else "standalone-store",
        "global_segment_size": f"{memory_mib}MB" if embedded else 0,
        "local_buffer_size": f"{BUFFER_MIB}MB",
    }  # fmt: skip
    config = children.directory / f"{name}.json"
    config.write_text(json.dumps(settings))
    transfer = {"kv_connector": servers.CONNECTOR, "kv_role": "kv_both"}
    environ = {"MOONCAKE_CONFIG_PATH": str(config)}
    return servers.start_engine(children, name, model, transfer, environ=environ)
