"""Writes the tables in docs that are made from code: ``python docs/site/reference.py [--check]``.

A page of docs names a table in the line above it, and whatever stands between that line and the
next ``<!-- end -->`` is the table:

    <!-- by docs/site/reference.py: metrics MASTER -->
    <!-- end -->

The rest of a page is written by hand. ``--check`` writes nothing, and fails if a page's tables are
not what the code says.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final

import click

from kvstore import errors, limits
from kvstore.cli import main, master, node, proxy
from kvstore.cli.main import SETTINGS_WITHOUT
from kvstore.cli.options import SOURCES
from kvstore.config import (
    ClientConfig,
    Config,
    ConnectorConfig,
    MasterConfig,
    NodeConfig,
    ProxyConfig,
    settings,
)
from kvstore.console.diagnostics.rows import ROWS
from kvstore.http import families

DOCS: Final = Path(__file__).resolve().parents[1]
TABLE: Final = re.compile(
    r"(<!-- by docs/site/reference\.py: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL
)
SERVERS: Final[dict[str, tuple[click.Command, type[Config]]]] = {
    "kvstore-master": (master.command, MasterConfig),
    "kvstore-node": (node.command, NodeConfig),
    "kvstore-proxy": (proxy.command, ProxyConfig),
}
OTHERS: Final[dict[str, type[Config]]] = {
    "Client, and every command of kvstore": ClientConfig,
    "The vLLM connector": ConnectorConfig,
}


def all_commands() -> Iterator[tuple[str, click.Command]]:
    """Yields each command by its words (``kvstore put``), and those below it after it."""

    def walk(path: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
        yield path, command
        if isinstance(command, click.Group):
            context = click.Context(command, info_name=path)
            for name in command.list_commands(context):
                found = command.get_command(context, name)
                assert found is not None
                yield from walk(f"{path} {name}", found)

    yield from walk("kvstore", main.cli)
    for name, (command, _) in SERVERS.items():
        yield from walk(name, command)


def cell(text: str) -> str:
    """The text of a cell, escaped so that no character of Markdown or HTML has a meaning."""
    return re.sub(r"([\\|<>*_\[\]`$])", r"\\\1", " ".join(text.split()))


def code(text: str) -> str:
    return f"`{text.replace('|', chr(92) + '|')}`" if text else ""


def of_docstring(text: str) -> str:
    """A docstring as a cell: ``x`` is code, and docs/page.md#heading a link beside the pages."""
    text = " ".join(text.split()).removesuffix(".").replace("``", "`").replace("|", "\\|")
    return re.sub(r"\bdocs/((\w[\w-]*)\.md(#[\w-]+)?)", r"[\2](\1)", text)


def of_settings() -> Iterator[str]:
    yield f"{cell(SOURCES)}\n"
    titles = {name: kind for name, (_, kind) in SERVERS.items()} | OTHERS
    for title, kind in titles.items():
        yield f"## {title}\n\nSection `[{kind.section}]` of the file.\n"
        yield "| flag, variable, name in the file | |\n|---|---|"
        without = SETTINGS_WITHOUT if kind is ClientConfig else ()
        for setting in settings(kind):
            other = f" {setting.metavar}" if setting.metavar else f", --no-{setting.flag[2:]}"
            has_flag = kind is not ConnectorConfig and setting.key not in without
            flag = setting.flag + other if has_flag else ""
            names = "<br>".join(filter(None, map(code, (flag, *setting.variables, setting.key))))
            default = f" Default: {code(setting.default)}." if setting.default else ""
            yield f"| {names} | {cell(setting.help)}{default} |"
        yield ""


def of_metrics(group: tuple[families.Family, ...]) -> Iterator[str]:
    yield "| name | kind | labels | meaning |\n|---|---|---|---|"
    for name, kind, labels, text, _ in group:
        yield f"| `{name}` | {kind} | {', '.join(labels)} | {cell(text)} |"


def of_errors(below: type[errors.KVStoreError]) -> Iterator[str]:
    """The class and those below it; of ``KVStoreError`` the classes that no other group has."""
    yield "| code | class | try again | meaning | do |\n|---|---|---|---|---|"
    kinds = [kind for kind in errors.BY_CODE.values() if issubclass(kind, below)]
    if below is errors.KVStoreError:
        kinds = [kind for kind in below.__subclasses__() if not kind.__subclasses__()]
    for kind in kinds:
        meaning, _, do = " ".join((kind.__doc__ or "").split()).partition("Do: ")
        assert do, f"{kind.__name__}: its docstring does not say what to do"
        again = "yes" if kind.retriable else "no"
        row = f"`{kind.code}`", f"`{kind.__name__}`", again, of_docstring(meaning), of_docstring(do)
        yield f"| {' | '.join(row)} |"


def of_limits() -> Iterator[str]:
    yield "| name | value | of what |\n|---|---|---|"
    told = {}
    for each, after in itertools.pairwise(ast.parse(inspect.getsource(limits)).body):
        match each, after:
            case ast.Assign(targets=[ast.Name(name)]), ast.Expr(ast.Constant(str(text))):
                told[name] = of_docstring(text)
    for name, value in vars(limits).items():
        if name.endswith("_MAX"):
            yield f"| `{name}` | {value:,} | {told[name]} |"


def of_runbook() -> Iterator[str]:
    for row in ROWS:
        yield f"## {row.name}\n"
        for name, text in row.parts:
            yield f"**{name}**: {text}\n"


TABLES: Final[dict[str, Callable[[], Iterator[str]]]] = {
    "settings": of_settings,
    "limits": of_limits,
    "runbook": of_runbook,
    **{f"metrics {name}": partial(of_metrics, getattr(families, name))
       for name in ("MASTER", "STORE", "NODE", "CLIENT")},
    **{f"errors {kind.__name__}": partial(of_errors, kind)
       for kind in (errors.UsageError, errors.UnavailableError, errors.KVStoreError,
                    errors.StartupError)},
}  # fmt: skip


def written(page: str) -> str:
    """A page with its tables as the code has them now."""
    return TABLE.sub(lambda at: f"{at[1]}\n" + "\n".join(TABLES[at[2]]()) + f"\n\n{at[3]}", page)


def write(*arguments: str) -> int:
    pages = {page: page.read_text() for page in sorted(DOCS.glob("*.md"))}
    named = [name for text in pages.values() for _, name, _ in TABLE.findall(text)]
    wrong = [
        f"table {name}: {named.count(name)} times" for name in TABLES if named.count(name) != 1
    ]
    for page, text in pages.items():
        if text == (new := written(text)):
            continue
        if "--check" in arguments:
            wrong.append(f"docs/{page.name}: make reference writes its tables anew")
        else:
            page.write_text(new)
    sys.stderr.writelines(f"{line}\n" for line in wrong)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(write(*sys.argv[1:]))
