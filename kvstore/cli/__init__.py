"""The commands, with their entry points, which load a command's modules and run it."""

import sys
from functools import partial
from importlib import import_module
from typing import NoReturn


def _start(module: str) -> NoReturn:
    try:
        main = import_module(f"kvstore.cli.{module}").main
    except KeyboardInterrupt:  # Ctrl-C while modules load: as in ``options.run``
        sys.exit(130)
    sys.exit(main())


start, start_master, start_node, start_proxy = (
    partial(_start, module) for module in ("main", "master", "node", "proxy")
)
