"""``kvstore as-mooncake``: run a command with this store as its ``mooncake.store``.

The commands ``mooncake_master`` and ``mooncake_http_metadata_server`` of Mooncake's guides are
translated.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import click

from kvstore.cli import master
from kvstore.cli.options import CONTEXT, command, debug_option, run
from kvstore.config import MasterConfig, settings
from kvstore.connectors.mooncake_shim import path, python_path
from kvstore.errors import UsageError

EXAMPLE = """\b
Examples:
  kvstore as-mooncake -- vllm serve MODEL --kv-transfer-config '{"kv_connector":
      "MooncakeStoreConnector", "kv_role": "kv_both"}'
  kvstore as-mooncake -- python -m sglang.launch_server --hicache-storage-backend mooncake ...
  kvstore as-mooncake -- mooncake_master --port 50051 --enable_http_metadata_server=true
  eval "$(kvstore as-mooncake --env)"        for the commands after it, in this shell

\b
The master is the one that the engine's own Mooncake settings name, or KVSTORE_MASTER. Each process
that imports mooncake.store says so in one line. Under Ray, give the variable to the workers:
runtime_env={"env_vars": {"PYTHONPATH": ...}}. mooncake_master is kvstore-master, also in scripts
that the command runs; mooncake_http_metadata_server says that it is not needed.

\b
Exit codes: those of the command; 2 if it cannot be started.
"""


NOTE: Final = (
    "as-mooncake: if no line 'mooncake.store is kvstore' follows, the command does not use this "
    "store: python -I, python -E and env -i drop PYTHONPATH. Leave them out, or call "
    "kvstore.connectors.mooncake_shim.install() in the program."
)


@command(
    "as-mooncake",
    context_settings={**CONTEXT, "ignore_unknown_options": True, "allow_interspersed_args": False},
    epilog=EXAMPLE,
    help="Run a command whose mooncake.store is this store.",
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[--] [COMMAND]...")
@click.option("--env", "as_env", is_flag=True, help="Print the variables for a shell to evaluate.")
@debug_option
def as_mooncake(command: tuple[str, ...], as_env: bool) -> None:
    variables = {"PYTHONPATH": python_path(os.environ), "PATH": path(os.environ)}
    if as_env:
        for name, value in variables.items():
            click.echo(f"export {name}={shlex.quote(value)}")
        return
    if not command:
        raise click.UsageError("a command is missing: kvstore as-mooncake -- vllm serve ...")
    if command[0] in COMMANDS:
        COMMANDS[command[0]](command[1:])
        return
    click.echo(NOTE, err=True)
    try:
        os.execvpe(command[0], command, {**os.environ, **variables})  # noqa: S606
    except OSError as error:
        raise UsageError(f"{command[0]} cannot be started: {error.strerror}") from error


# --- mooncake_master ------------------------------------------------------------------------------

PORT: Final = "50051"
"""Mooncake's default, which differs from ours."""

EVERY_INTERFACE: Final = "0.0.0.0"
"""Mooncake's default. Ours is loopback."""

LEASE_MS_MIN: Final = 1_000
LEASE_MS_MAX: Final = 600_000
"""The bounds of ``--lease-ms``."""

MEANT: Final = {
    "port": "--port",
    "rpc_port": "--port",
    "rpc_address": "--host",
    "metrics_port": "--http-port",
    "default_kv_lease_ttl": "--lease-ms",
    "enable_ha": "--etcd",
    "etcd_endpoints": "--etcd",
    "enable_kv_events": "--events",
    "kv_events_bind_endpoint": "--events",
}
"""Flags of ``kvstore-master`` by flag of ``mooncake_master``."""

_OF_EVERY_COMMAND: Final = {
    "help": "--help",
    "h": "--help",
    "version": "--version",
    "debug": "--debug",
}
_DURATION: Final = re.compile(r"(\d+)(ms|s|m|h|)")
_UNITS_MS: Final = {"": 1, "ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000}


def mooncake_master(arguments: Sequence[str]) -> None:
    """Run ``kvstore-master`` and end the process. Prints the command and ignored flags on
    stderr."""
    own, ignored = translate_arguments(arguments)
    for name in ignored:
        click.echo(f"mooncake_master: --{name} has no effect (docs/from-mooncake.md)", err=True)
    click.echo(f"mooncake_master is kvstore-master {shlex.join(_shown(own))}", err=True)
    run(master.command, "kvstore-master", own)


def _shown(words: Sequence[str]) -> Iterator[str]:
    """Yield the words without etcd passwords."""
    return (word.rpartition("@")[2] for word in words)


def mooncake_http_metadata_server(_arguments: Sequence[str]) -> None:
    click.echo("mooncake_http_metadata_server is not needed: the master knows all nodes", err=True)


COMMANDS: Final[Mapping[str, Callable[[Sequence[str]], None]]] = {
    "mooncake_master": mooncake_master,
    "mooncake_http_metadata_server": mooncake_http_metadata_server,
}


def translate_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments of ``kvstore-master``, and the ignored flags. Flags of
    ``kvstore-master`` are kept, with hyphens or underscores."""
    given = dict(_flags(arguments))
    known = {setting.key: setting.flag for setting in settings(MasterConfig)}
    known |= _OF_EVERY_COMMAND
    own = {"--host": EVERY_INTERFACE, "--port": PORT}
    own |= {known[name]: value for name, value in given.items() if name in known}
    own |= _meant(given)
    words = [word for flag, value in own.items() for word in (flag, value) if word]
    return words, [name for name in given if name not in known and name not in MEANT]


def _flags(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield names and values as Mooncake's parser does: after one or two hyphens, with ``=`` or in
    the next word. A switch has an empty value."""
    words = list(arguments)
    while words:
        name, equals, value = words.pop(0).lstrip("-").partition("=")
        if not equals and words and not words[0].startswith("-"):
            value = words.pop(0)
        yield name.replace("-", "_"), value


def _meant(given: Mapping[str, str]) -> dict[str, str]:
    """Return the flags of ``kvstore-master`` equivalent to Mooncake's."""
    rpc_port = given.get("rpc_port", "")
    found = {
        "--host": given.get("rpc_address", ""),
        "--port": given.get("port", "") if rpc_port in ("", "0") else rpc_port,
        "--http-port": given.get("metrics_port", ""),
        "--lease-ms": _lease_ms(given.get("default_kv_lease_ttl", "")),
        "--etcd": given.get("etcd_endpoints", "") if _is_on(given.get("enable_ha")) else "",
        "--events": (
            given.get("kv_events_bind_endpoint") or "on"
            if _is_on(given.get("enable_kv_events"))
            else ""
        ),
    }
    return {flag: value for flag, value in found.items() if value}


def _is_on(switch: str | None) -> bool:
    return switch is not None and switch.lower() in ("", "true", "1", "yes")


def _lease_ms(text: str) -> str:
    """Convert a number of milliseconds or a duration (``10s``) to milliseconds within the
    bounds."""
    found = _DURATION.fullmatch(text)
    if found is None:
        return text
    wanted = int(found[1]) * _UNITS_MS[found[2]]
    return str(min(max(wanted, LEASE_MS_MIN), LEASE_MS_MAX))
