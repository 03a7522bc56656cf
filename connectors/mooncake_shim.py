"""Selects the ``mooncake.store`` of a process: Mooncake's or this store's.

    import kvstore.connectors.mooncake_shim

    kvstore.connectors.mooncake_shim.install()
    from mooncake.store import MooncakeDistributedStore  # is ours

``kvstore as-mooncake -- vllm serve ...`` does the same for a whole command. Both put a directory of
this package first on ``PYTHONPATH``. It holds a package ``mooncake`` with the module ``store``
alone; other modules are those of the installed ``mooncake``. Every process that an engine spawns
inherits the variable.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from kvstore.errors import UsageError

DIRECTORY: Final = str(Path(__file__).parent / "as_mooncake")

_NAME: Final = "mooncake.store"


def python_path(environ: Mapping[str, str]) -> str:
    """Return ``PYTHONPATH`` with the directory in front."""
    rest = [each for each in environ.get("PYTHONPATH", "").split(os.pathsep) if each != DIRECTORY]
    return os.pathsep.join([DIRECTORY, *filter(None, rest)])


def is_ours(file: str | None) -> bool:
    """Return whether the module ``mooncake.store`` of this file is this store."""
    return file is not None and Path(file).is_relative_to(DIRECTORY)


def install() -> None:
    """Make ``import mooncake.store`` find this store, in this process and in its children.

    Raises:
        UsageError: Mooncake's own ``mooncake.store`` has been imported before.
    """
    present = sys.modules.get(_NAME)
    if present is not None and not is_ours(getattr(present, "__file__", None)):
        raise UsageError(
            "mooncake.store has been imported already, and it is Mooncake's own",
            advice="Call mooncake_shim.install() before anything imports mooncake.store.",
        )
    os.environ["PYTHONPATH"] = python_path(os.environ)
    if DIRECTORY not in sys.path:
        sys.path.insert(0, DIRECTORY)
    package, ours = sys.modules.get("mooncake"), str(Path(DIRECTORY) / "mooncake")
    if package is not None and ours not in package.__path__:  # another module of it was imported
        package.__path__.insert(0, ours)
