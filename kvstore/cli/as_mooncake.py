"""``kvstore as-mooncake``: runs a command whose ``mooncake.store`` is this store, or a command of
Mooncake's guides in this store's words."""

from __future__ import annotations

import os
import shlex

import click

from kvstore.cli.mooncake_commands import COMMANDS
from kvstore.cli.options import CONTEXT, Command, debug_option
from kvstore.errors import UsageError
from kvstore.mooncake import path, python_path

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


@click.command(
    "as-mooncake",
    cls=Command,
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
    try:
        os.execvpe(command[0], command, {**os.environ, **variables})  # noqa: S606
    except OSError as error:
        raise UsageError(f"{command[0]} cannot be started: {error.strerror}") from error
