"""``kvstore as-mooncake``: run a command with this store as its ``mooncake.store``."""

from __future__ import annotations

import os
import shlex
from typing import Final

import click

from kvstore.cli.options import CONTEXT, command, debug_option
from kvstore.connectors.mooncake_shim import python_path
from kvstore.errors import UsageError

EXAMPLE = """\b
Examples:
  kvstore as-mooncake -- vllm serve MODEL --kv-transfer-config '{"kv_connector":
      "MooncakeStoreConnector", "kv_role": "kv_both"}'
  kvstore as-mooncake -- python -m sglang.launch_server --hicache-storage-backend mooncake ...
  eval "$(kvstore as-mooncake --env)"        for the commands after it, in this shell

\b
The master is the one that the engine's own Mooncake settings name, or KVSTORE_MASTER. Each process
that imports mooncake.store says so in one line. Under Ray, give the variable to the workers:
runtime_env={"env_vars": {"PYTHONPATH": ...}}.

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
@click.option("--env", "as_env", is_flag=True, help="Print the variable for a shell to evaluate.")
@debug_option
def as_mooncake(command: tuple[str, ...], as_env: bool) -> None:
    search_path = python_path(os.environ)
    if as_env:
        click.echo(f"export PYTHONPATH={shlex.quote(search_path)}")
        return
    if not command:
        raise click.UsageError("a command is missing: kvstore as-mooncake -- vllm serve ...")
    click.echo(NOTE, err=True)
    try:
        environ = {**os.environ, "PYTHONPATH": search_path}
        os.execvpe(command[0], command, environ)  # noqa: S606
    except OSError as error:
        raise UsageError(f"{command[0]} cannot be started: {error.strerror}") from error
