"""Each command has its help, also where Python has dropped the docstrings (``-OO``)."""

from __future__ import annotations

import pytest

from tests.support.processes import run_python

PROGRAM = """
import importlib, pkgutil, click
import kvstore.cli
for each in pkgutil.iter_modules(kvstore.cli.__path__):
    for found in vars(importlib.import_module(f"kvstore.cli.{each.name}")).values():
        if isinstance(found, click.Command) and each.name != "web" and not found.help:
            print(each.name, found.name)
"""


@pytest.mark.parametrize("flags", [(), ("-OO",)])
def test_every_command_has_a_help(flags: tuple[str, ...]) -> None:
    done = run_python(*flags, "-c", PROGRAM, check=True)
    assert done.stdout == ""
