"""What is planted."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """One fault."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    """Files, folders, or single tests (``file.py::test``)."""
    native: bool = True
    """False: tests run without what is compiled, because its twin in Python is broken."""
    engine: str = ""
    """Its tests need this engine's environment, ``.venv-ENGINE``; empty: that of this process."""
