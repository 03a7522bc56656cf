"""Python child processes with our interpreter, its flags and our ``sys.path``.

``python -m`` and ``python -c`` prepend the working folder to ``sys.path``, so that a file there
(``click.py``, ``token.py``) could shadow a package. Our processes therefore run with ``-P`` and get
the path of their parent in ``PYTHONPATH``.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Final

HOME: Final = os.path.abspath(os.path.join(os.path.dirname(__file__), os.pardir, os.pardir))
"""The directory from which ``kvstore`` is imported."""


def command(*arguments: str) -> list[str]:
    """Return ``python -P arguments``, with our own ``-O``, ``-W``, ``-X`` and so on."""
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # as multiprocessing does
    # With these flags the child would ignore the path from ``environment``.
    ours = [flag for flag in flags if flag not in ("-E", "-I", "-P")]
    return [sys.executable, *ours, *(["-s"] if sys.flags.isolated else []), "-P", *arguments]


def environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return ``environ`` with our ``sys.path`` in ``PYTHONPATH``, and without variables for Python
    if we ignore them (``-E``, ``-I``)."""
    ignored = "PYTHON" if sys.flags.ignore_environment else "PYTHONPATH"
    kept = {name: value for name, value in environ.items() if not name.startswith(ignored)}
    return kept | {"PYTHONPATH": path()}


def path() -> str:
    """Return our ``sys.path`` for ``PYTHONPATH``, without the folder of the script or the working
    folder that Python added, unless kvstore is in it or ``PYTHONPATH`` names it."""
    return os.pathsep.join(dict.fromkeys(_entries()))


def _entries() -> Iterator[str]:
    trusted = {HOME}
    if not sys.flags.ignore_environment:
        given = os.environ.get("PYTHONPATH", "")
        trusted |= {_absolute(entry) for entry in given.split(os.pathsep) if entry}
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    strange = {_absolute(""), _absolute(os.path.dirname(script or ""))}
    if sys.flags.safe_path:
        strange = set()
    for entry in map(_absolute, sys.path):
        if entry and os.pathsep not in entry and (entry in trusted or entry not in strange):
            yield entry


def _absolute(entry: str) -> str:
    """Return the absolute path of ``entry``; empty: the working folder does not exist any more."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.abspath(entry)
    return ""
