"""Runs a command of the store in which some constants of modules have another value:

python -m tests.support.with_constants kvstore.proxy.health:INTERVAL_S=0.05 -- \
        kvstore.cli.proxy --port 0
"""

from __future__ import annotations

import ast
import importlib
import runpy
import sys
from collections.abc import Mapping

RUNNER = "tests.support.with_constants"


def arguments_of(constants: Mapping[str, object], module: str) -> list[str]:
    """The words behind ``python -m`` that run ``module`` with these constants."""
    if not constants:
        return [module]
    return [RUNNER, *(f"{name}={value!r}" for name, value in constants.items()), "--", module]


def main() -> None:
    split = sys.argv.index("--")
    for each in sys.argv[1:split]:
        name, _, value = each.partition("=")
        module, _, constant = name.partition(":")
        place = importlib.import_module(module)
        assert hasattr(place, constant), name
        setattr(place, constant, ast.literal_eval(value))
    sys.argv = sys.argv[split + 1 :]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
