"""Creates a model, and starts the processes of a fleet: master, node, vLLM engines and proxy.

All processes listen only on the loopback interface. All files (models, logs, sockets) are in the
directory of the ``Children``, which is removed at the end.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvstore.demo.processes import ChildError, Children, Program, free_port
from kvstore.demo_vllm.requests import MODEL

HOST = "127.0.0.1"
SERVE = "vllm.entrypoints.openai.api_server"
"""The module behind ``vllm serve``. That command itself does not find vLLM's build for CPUs,
because that package has another name."""
CONNECTOR = "MooncakeStoreConnector"
"""kvstore's connector under the name of vLLM's own, as in a deployment that changes one line."""
CONNECTOR_MODULE = "kvstore.connectors.vllm"
POSITIONS = 2048
"""``--max-model-len``: the limit of the tokens of prompt and answer together."""

READY_SECONDS = 30.0
MODEL_SECONDS = 120.0
ENGINE_SECONDS = 600.0
"""Time-out of the start of several engines at once: six take 140 s on two idle cores."""


@dataclass(frozen=True)
class Server:
    """A child process and its address."""

    child: Program
    address: str


def require(*modules: str) -> None:
    """Checks early that these modules are installed.

    Raises:
        ChildError: one of the modules cannot be imported.
    """
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise ChildError(f"{module} is not installed; `make demo-vllm` installs all of it")


def environment() -> dict[str, str]:
    """This process's environment without variables of kvstore and Mooncake, and with those that a
    small engine needs."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("KVSTORE_", "MOONCAKE_"))
    }
    return inherited | {
        "KVSTORE_CONFIG": "",  # no kvstore.toml is read, either
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_SERVER_DEV_MODE": "1",  # for POST /reset_prefix_cache
        "VLLM_HOST_IP": HOST,
        "OMP_NUM_THREADS": "2",
    }


def transfer_config(master: str, role: str, **extra: object) -> dict[str, object]:
    """The value of ``--kv-transfer-config`` for kvstore's connector.

    Args:
        role: ``kv_producer``, ``kv_consumer`` or ``kv_both``.
        extra: more settings. The time-out of lookups, and with it the wait for writers, is far
            longer than usual, because several engines share a few cores here.
    """
    return {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_role": role,
        "kv_connector_extra_config": {"master": master, "lookup_deadline_ms": 2_000, **extra},
    }  # fmt: skip


def make_model(
    children: Children, *, seed: int, hidden: int, layers: int, kind: str = "plain"
) -> Path:
    """Creates a random model in the directory of the children; returns its directory."""
    directory = children.directory / "model"
    sizes = {"--seed": seed, "--hidden": hidden, "--layers": layers, "--kind": kind}
    options = [word for name, value in sizes.items() for word in (name, str(value))]
    job = children.start("model", "kvstore.demo_vllm.tiny", str(directory), *options)
    children.result(job, MODEL_SECONDS)
    return directory


def start_store(children: Children, memory_mib: int, *, name: str = "") -> str:
    """Starts a master and a node; returns the master's address.

    Args:
        name: prefix of the processes' names, if there are several stores.
    """
    master = children.start(
        f"{name}master", "kvstore.cli.master", "--port", "0", "--http-port", "0"
    )
    address = children.ready(master, r"listening on (\S+:\d+)", READY_SECONDS)[1]
    memory = ("--master", address, "--memory", f"{memory_mib}MiB")
    node = children.start(f"{name}node", "kvstore.cli.node", *memory)
    children.ready(node, r"^kvstore-node .+", READY_SECONDS)
    return address


def start_engine(
    children: Children,
    name: str,
    model: Path,
    transfer: Mapping[str, object] | None,
    *,
    options: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Server:
    """Starts a vLLM server; ``engine_ready`` waits for it.

    Args:
        transfer: value of ``--kv-transfer-config``; None: without a connector.
        options: more options of the server; they win over those of ``engine_arguments``.
        environ: variables that are added to the environment of the children.
    """
    port = free_port()
    arguments = [*engine_arguments(model, transfer), *options, "--port", str(port)]
    child = children.start(name, SERVE, *arguments, environment=environ)
    return Server(child, f"{HOST}:{port}")


def engine_arguments(model: Path, transfer: Mapping[str, object] | None) -> list[str]:
    """The arguments of ``SERVE``, without its port, for a small engine among several."""
    arguments = [
        "--model", str(model), "--served-model-name", MODEL, "--dtype", "float32",
        "--max-model-len", str(POSITIONS), "--enforce-eager", "--gpu-memory-utilization", "0.1",
        "--enable-prompt-tokens-details", "--host", HOST,
    ]  # fmt: skip
    if transfer is not None:
        arguments += ["--kv-transfer-config", json.dumps(transfer)]
    return arguments


def proxy_arguments(master: str, prefill: Sequence[str], decode: Sequence[str]) -> list[str]:
    """The arguments of ``kvstore-proxy``, without its port, from addresses."""
    return ["--master", master, "--prefill", ",".join(prefill), "--decode", ",".join(decode)]


def engine_ready(children: Children, engine: Server) -> None:
    """Wait until the engine serves."""
    children.ready(engine.child, r"Application startup complete", ENGINE_SECONDS)


def start_proxy(
    children: Children,
    master: str,
    prefill: Sequence[str],
    decode: Sequence[str],
    *,
    name: str = "proxy",
) -> Server:
    """Starts a proxy, and waits until it serves.

    Args:
        master: empty: the proxy does not ask a store.
        prefill: addresses; empty: the decoders do all the work, in turn.
        decode: addresses.
    """
    port = free_port()
    arguments = [*proxy_arguments(master, prefill, decode), "--port", str(port)]
    child = children.start(name, "kvstore.cli.proxy", *arguments)
    children.ready(child, r"^kvstore-proxy .*listening on", READY_SECONDS)
    return Server(child, f"{HOST}:{port}")
