"""The command ``kvstore``; some subcommands are imported on demand."""

from __future__ import annotations

import gc
import importlib
import os
from typing import Final, NoReturn

import click

from kvstore.cli.cluster import drain, status
from kvstore.cli.objects import clear, get, ls, pin, put, rm, stat, unpin
from kvstore.cli.options import (
    SOURCES,
    Group,
    config_options,
    debug_option,
    json_option,
    run,
    sentence,
    version_option,
)
from kvstore.config import ClientConfig

GARBAGE_THRESHOLD = 50_000
"""Garbage collection threshold: higher than usual, as imports leave no garbage."""

EXAMPLE = """\b
Examples:
  kvstore quickstart
  kvstore status
  kvstore put greeting hello.txt && kvstore get greeting
  kvstore ls --prefix gre --json
  kvstore --master 10.0.0.7:50001 rm greeting

\b
Options of kvstore stand before a command; those that say how to reach and use the
store can stand behind it as well: kvstore status --auth me.auth

\b
Exit codes: 0 done, 1 failed, 2 wrong usage, 3 no such object, 130 interrupted.
With --json results are JSON on stdout, and an error is one line of JSON on stderr:
  {"error": {"code": ..., "message": ..., "advice": ..., "fields": {...}}}
"""

# Memory contributed for the duration of one command is useless to the pool.
SETTINGS_WITHOUT = ("memory",)

PROGRAMS: Final = {
    "kvstore-master": "Run the master, which stores the locations of all objects.",
    "kvstore-node": "Run a node, which pools and serves memory of this host.",
    "kvstore-proxy": "Run a proxy between clients of OpenAI's API and engines.",
}
"""Separate programs listed in the help."""

SECTIONS: Final = {
    "Start a store": ("quickstart", *PROGRAMS, "as-mooncake"),
    "Objects": ("put", "get", "ls", "stat", "rm", "clear", "pin", "unpin"),
    "Inspect": ("status", "why", "doctor", "bench", "plan", "size"),
    "Administer": ("drain", "archive", "clean", "auth"),
}  # fmt: skip
"""Groups of commands in the help."""

LATE: Final = {
    "archive": "Export namespaces to an object store (S3, GCS, Azure, files), and import them.",
    "as-mooncake": "Run a command whose mooncake.store is this store.",
    "auth": "Manage identities: issue, inspect, rotate and revoke certificates.",
    "bench": "Run benchmarks on this machine.",
    "clean": "Remove leftover shared memory of dead nodes on this host.",
    "doctor": "Check this host, its programs and the connection to the cluster.",
    "why": "Explain cache misses: list the writers and readers, and why lookups miss.",
    "quickstart": "Start a complete store on this host and print the configuration for vLLM, "
    "SGLang and Python.",
    "plan": "Show what more memory, another eviction policy or hints would bring, from a trace.",
    "size": "Show what a model and its load need: memory, network, the master.",
}
"""Summaries of the commands that are imported on demand."""


class Commands(Group):
    """Imports the commands of ``LATE`` on demand: imports are slow, and ``doctor`` must run even if
    packages of ``bench`` are missing."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *LATE])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in LATE:
            return super().get_command(ctx, cmd_name)
        name = cmd_name.replace("-", "_")
        command: click.Command = getattr(importlib.import_module(f"kvstore.cli.{name}"), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, names in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(name, self._summary_of(name)) for name in names])

    def _summary_of(self, name: str) -> str:
        """Return the summary of a command without importing it."""
        return LATE.get(name) or PROGRAMS.get(name) or sentence(self.commands[name])


@click.group(
    cls=Commands,
    epilog=f"{EXAMPLE}\n\n{SOURCES}",
    help="Inspect a kvstore cluster, and change its objects and nodes.",
)
@config_options(ClientConfig, without=SETTINGS_WITHOUT)
@json_option
@debug_option
@version_option
@click.pass_context
def cli(context: click.Context, /, **options: object) -> None:
    context.obj = options


for command in (clear, drain, get, ls, pin, put, rm, stat, status, unpin):
    cli.add_command(command)


def main() -> NoReturn:
    gc.set_threshold(GARBAGE_THRESHOLD)
    # pydantic would search the metadata of every installed package for plug-ins.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    # OpenBLAS would start a thread per core, which costs 0.1 s of CPU.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    run(cli, "kvstore")


if __name__ == "__main__":
    main()
