"""Packages that mypyc compiles at installation. ``setup.py`` imports this file by its path."""

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
    """Import the sources if they changed since compilation, or with ``KVSTORE_NATIVE=0``."""
    if os.environ.get("KVSTORE_NATIVE") == "0" or not library(directory).exists():
        prefer_sources(directory)


def prefer_sources(directory: str) -> None:
    """Import the directory's modules from sources, unless they are imported already."""
    for folder in {directory, *(str(path.parent) for path in modules(directory))}:
        finder = FileFinder(folder, (SourceFileLoader, SOURCE_SUFFIXES))
        sys.path_importer_cache[folder] = finder


def library(directory: str) -> Path:
    """Return the library for the present sources of the directory."""
    return Path(directory, library_name(directory) + "__mypyc" + EXTENSION_SUFFIXES[0])


def library_name(directory: str) -> str:
    """Return the library's name for mypyc, which depends on the sources."""
    digest = blake2b(digest_size=8)
    for path in modules(directory):
        name = str(path.relative_to(directory))
        digest.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return "of_" + digest.hexdigest()


def modules(directory: str) -> list[Path]:
    """Return the compiled modules, also of subpackages: all but each ``__init__``."""
    found = Path(directory).rglob("*.py")
    return sorted(path for path in found if path.name != "__init__.py")
