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


def select_compiled_or_source(directory: str) -> None:
    """Called by the ``__init__`` of such a package. Makes Python import the sources instead of the
    compiled library if they have changed since it was built, or with ``KVSTORE_NATIVE=0``."""
    if os.environ.get("KVSTORE_NATIVE") == "0" or not library(directory).exists():
        prefer_sources(directory)


def prefer_sources(directory: str) -> None:
    """Makes Python import the directory's modules from sources, unless it has imported them."""
    for folder in {directory, *(str(path.parent) for path in modules(directory))}:
        finder = FileFinder(folder, (SourceFileLoader, SOURCE_SUFFIXES))
        sys.path_importer_cache[folder] = finder


def library(directory: str) -> Path:
    """The library into which the directory's modules, as they are now, are compiled."""
    return Path(directory, library_name(directory) + "__mypyc" + EXTENSION_SUFFIXES[0])


def library_name(directory: str) -> str:
    """The library's name for mypyc. It depends on the sources, so that only a library of exactly
    these sources is used."""
    digest = blake2b(digest_size=8)
    for path in modules(directory):
        name = str(path.relative_to(directory))
        digest.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return "of_" + digest.hexdigest()


def modules(directory: str) -> list[Path]:
    """The modules that are compiled, also of packages inside: all but each ``__init__``. The
    ``__init__`` of the directory decides whether the library is used."""
    found = Path(directory).rglob("*.py")
    return sorted(path for path in found if path.name != "__init__.py")
