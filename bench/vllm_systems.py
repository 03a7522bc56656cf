"""Starts the compared systems: vLLM without a store, with this one, and with Mooncake Store.

Each system is engines (``kv_both``; one, unless more are asked for) and, if it has one, a store in
processes of its own that they share. All systems run at the same time and get requests in turns.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import click

from bench import mooncake
from bench.client import ClientProcess, Settings
from kvstore.bench.session import WARM_PIECE
from kvstore.demo.processes import Children
from kvstore.demo_vllm import servers

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
    addresses: list[str]
    """Of its engines."""
    master: str = ""
    """Address of kvstore's master; empty: the system has none."""

    @property
    def address(self) -> str:
        """Of its first engine."""
        return self.addresses[0]


class _Store(NamedTuple):
    """What an engine of a system is started with, and the address of the store's master."""

    transfer: dict[str, object] | None = None
    environ: dict[str, str] | None = None
    kvstore: str = ""
    mooncake: str = ""


def named(context: click.Context, parameter: click.Parameter, value: str) -> list[str]:
    """Callback of a click option: the names in a list with commas.

    Raises:
        click.BadParameter: a name is not one of ``SYSTEMS``.
    """
    names = list(dict.fromkeys(name.strip() for name in value.split(",")))
    for name in names:
        if name not in SYSTEMS:
            raise click.BadParameter(f"{name!r} is not one of {', '.join(SYSTEMS)}")
    return names


def present(names: Sequence[str]) -> list[str]:
    """The systems that can be started here; prints a line about each of the others."""
    theirs = {MOONCAKE, MOONCAKE_EMBEDDED}
    reason = mooncake.missing() if theirs.intersection(names) else None
    left_out = [name for name in names if reason and name in theirs]
    for name in left_out:
        click.echo(f"{name} is left out: {reason}")
    return [name for name in names if name not in left_out]


def start(
    children: Children,
    names: Sequence[str],
    model: Path,
    memory_mib: int,
    *,
    engines: int = 1,
    options: Sequence[str] = (),
    settings: Mapping[str, object] = MappingProxyType({}),
) -> list[System]:
    """Start stores and engines, and wait until all of them serve.

    Args:
        memory_mib: memory of each store.
        engines: how many each system has.
        options: more arguments of each engine.
        settings: of this store's connector, besides those of ``servers.transfer_config``.

    Raises:
        ChildError: a process did not start.
    """
    stores = {name: _store(children, name, memory_mib, settings) for name in names}
    started = {
        name: [
            servers.start_engine(
                children, f"{name}-{number}", model, store.transfer,
                environ=store.environ, options=options,
            )
            for number in range(engines)
        ]
        for name, store in stores.items()
    }  # fmt: skip
    for engine in itertools.chain(*started.values()):
        servers.engine_ready(children, engine)
    # Now that no starting engine uses the whole CPU: write Mooncake's memory through once, as
    # kvstore's node does when it starts. The first touch of a page costs ten times a copy.
    for name, store in stores.items():
        if store.mooncake:
            whole = Settings(MOONCAKE, "tcp", store.mooncake, memory_mib << 20, WARM_PIECE)
            ClientProcess(children, f"{name}-touch", whole).close()
    return [
        System(name, [engine.address for engine in some], stores[name].kvstore)
        for name, some in started.items()
    ]


def _store(
    children: Children, name: str, memory_mib: int, settings: Mapping[str, object]
) -> _Store:
    """Starts a system's store."""
    if name == NONE:
        return _Store()
    if name in (KVSTORE, KVSTORE_TCP):
        master = servers.start_store(children, memory_mib, name=f"{name}-")
        transports = ["tcp"] if name == KVSTORE_TCP else ["shm", "tcp"]
        transfer = servers.transfer_config(
            master, "kv_both", transports=transports, **settings
        )  # fmt: skip
        return _Store(transfer, kvstore=master)
    embedded = name == MOONCAKE_EMBEDDED
    master = mooncake.start(children, 0 if embedded else memory_mib << 20, name=name).master
    theirs = {
        "metadata_server": mooncake.METADATA, "master_server_address": master, "protocol": "tcp",
        "mode": "embedded" if embedded else "standalone-store",
        "global_segment_size": f"{memory_mib}MB" if embedded else 0,
        "local_buffer_size": f"{BUFFER_MIB}MB",
    }  # fmt: skip
    config = children.directory / f"{name}.json"
    config.write_text(json.dumps(theirs))
    built_in: dict[str, object] = {"kv_connector": servers.CONNECTOR, "kv_role": "kv_both"}
    return _Store(built_in, {"MOONCAKE_CONFIG_PATH": str(config)}, mooncake=master)
