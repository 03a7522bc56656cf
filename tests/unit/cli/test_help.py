"""Each command has its help, also where Python has dropped the docstrings (``-OO``)."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.processes import ROOT

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
    done = subprocess.run(
        [sys.executable, *flags, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True,
        timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout == ""
