"""Each command has its help, also where Python has dropped the docstrings (``-OO``), and the help
names values by words of the thing."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest

from kvstore.cli import main, master, node, proxy
from tests.support.processes import run_python

PROGRAM = """
import importlib, pkgutil, click
import kvstore.cli
for each in pkgutil.iter_modules(kvstore.cli.__path__):
    for found in vars(importlib.import_module(f"kvstore.cli.{each.name}")).values():
        if isinstance(found, click.Command) and each.name != "web" and not found.help:
            print(each.name, found.name)
"""

PROGRAMS: dict[str, click.Command] = {
    "kvstore": main.cli,
    "kvstore-master": master.command,
    "kvstore-node": node.command,
    "kvstore-proxy": proxy.command,
}


@pytest.mark.parametrize("flags", [(), ("-OO",)])
def test_every_command_has_a_help(flags: tuple[str, ...]) -> None:
    done = run_python(*flags, "-c", PROGRAM, check=True)
    assert done.stdout == ""


def contexts() -> Iterator[click.Context]:
    """Of every command, and of those below it."""

    def below(context: click.Context) -> Iterator[click.Context]:
        yield context
        if isinstance(context.command, click.Group):
            for name in context.command.list_commands(context):
                found = context.command.get_command(context, name)
                assert found is not None
                yield from below(click.Context(found, context, name))

    for name, command in PROGRAMS.items():
        yield from below(click.Context(command, info_name=name))


COMMANDS = {context.command_path: context for context in contexts()}


def test_every_command_stands_in_one_section_of_the_help() -> None:
    named = [name for names in main.SECTIONS.values() for name in names]
    there = main.cli.list_commands(COMMANDS["kvstore"])
    assert sorted(named) == sorted([*there, *main.PROGRAMS])
    assert {*main.PROGRAMS, "kvstore"} == PROGRAMS.keys()
    lines, _, _ = main.cli.get_help(COMMANDS["kvstore"]).partition("\nOptions:")
    assert "..." not in lines.replace("[ARGS]...", ""), "a sentence was cut"
