"""Packages whose modules are compiled from their own sources, by mypyc, when kvstore is installed.

``setup.py`` compiles them, and imports this file by its path: it needs nothing but Python.
"""

from __future__ import annotations

import os
import sys
from hashlib import blake2b
from importlib.machinery import (
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    FileFinder,
    SourceFileLoader,
)
from pathlib import Path


def choose(directory: str) -> None:
    """For the ``__init__`` of such a package: sources are imported instead of what is compiled of
    them if they have changed since, and with ``KVSTORE_NATIVE=0``."""
    if os.environ.get("KVSTORE_NATIVE") == "0" or not library(directory).exists():
        prefer_sources(directory)


def prefer_sources(directory: str) -> None:
    """Import the modules of this directory from their sources, if they were not imported yet."""
    finder = FileFinder(directory, (SourceFileLoader, SOURCE_SUFFIXES))
    sys.path_importer_cache[directory] = finder


def library(directory: str) -> Path:
    """What the modules of the directory, as they are now, are compiled into."""
    return Path(directory, library_name(directory) + "__mypyc" + EXTENSION_SUFFIXES[0])


def library_name(directory: str) -> str:
    """mypyc's name of it, made of the sources, so that others are never taken for these."""
    digest = blake2b(digest_size=8)
    for path in modules(directory):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return "of_" + digest.hexdigest()


def modules(directory: str) -> list[Path]:
    """What is compiled: all but ``__init__``, which decides whether that is used."""
    found = Path(directory).glob("*.py")
    return sorted(path for path in found if path.name != "__init__.py")
