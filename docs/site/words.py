"""Finds words that the field has a better term for, so that they do not come back.

    python docs/site/words.py    list them, with the word to use; 1 if there are any

``retired.toml`` lists the words: those of names, that is classes, functions, parameters and
attributes in the product, and those of prose, that is docstrings, comments and documents.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
LISTS: Final = tomllib.loads(Path(__file__).with_name("retired.toml").read_text())
PRODUCT: Final = ("kvstore/", "master/", "client/", "connectors/", "bench/", "examples/")
OTHERS: Final = ("docs/benchmarks/", "docs/decisions/", "CHANGELOG.md", "kvstore/v1/")
WORD: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def names_in(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of all that the module defines."""
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                yield node.lineno, node.name
            case ast.arg():
                yield node.lineno, node.arg
            case ast.Attribute(ctx=ast.Store()):
                yield node.lineno, node.attr
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield node.lineno, name


def prose_in(path: Path, text: str) -> Iterator[tuple[int, str]]:
    """Number and text of each line that people read; names in backticks are left out."""
    blocks = [(1, text)]
    if path.suffix == ".py":
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        blocks = [
            (token.start[0], token.string)
            for token in tokens
            if token.type == tokenize.COMMENT or token.string.startswith(('"""', 'r"""'))
        ]
    for first, block in blocks:
        for number, line in enumerate(block.split("\n"), first):
            yield number, re.sub(r"`[^`]*`", "", line)


def findings() -> Iterator[str]:
    prose = re.compile(rf"\b({'|'.join(LISTS['prose'])})\b", re.IGNORECASE)
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.split():
        path = ROOT / name
        if path.suffix not in (".py", ".md") or name.startswith(OTHERS) or path.is_symlink():
            continue
        if path.suffix == ".py" and not name.startswith(PRODUCT):
            continue
        text = path.read_text()
        if path.suffix == ".py":
            for line, defined in names_in(ast.parse(text)):
                for word in map(str.lower, WORD.findall(defined)):
                    if word in LISTS["names"]:
                        yield f"{name}:{line}: {defined}: say {LISTS['names'][word]}, not {word}"
        for line, read in prose_in(path, text):
            for word in map(str.lower, prose.findall(read)):
                yield f"{name}:{line}: say {LISTS['prose'][word]}, not {word}"


def main() -> int:
    found = list(findings())
    sys.stdout.writelines(f"{defined}\n" for defined in found)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
