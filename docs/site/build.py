"""Builds the documentation site: ``python docs/site/build.py OUT``; warnings are errors.

The pages are those of the repository, at the same relative places, so that links lead to the same
pages here and there. The first one is ``README.md`` with the table of contents, ``index.md`` beside
this file. The reference of commands and calls is written from the code.
"""

from __future__ import annotations

import inspect
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import click
from finishing import finished
from reference import SERVERS, all_commands, cell, code

from kvstore import calls
from kvstore.cli import main
from kvstore.config import ClientConfig, Config, settings

ROOT: Final = Path(__file__).resolve().parents[2]
HERE: Final = Path(__file__).parent
PAGES: Final = (
    "README.zh.md", "SECURITY.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE",
    "proto/README.md", "tests/README.md", "docs", "deploy",
)  # fmt: skip
QUERIES: Final = {
    "index": ("install", "download", "start", "quickstart", "try"),
    "docs/comparison": ("should i use", "is it for me", "redis", "alternatives", "vs"),
    "docs/containers": ("docker", "kubernetes", "compose", "systemd", "image", "helm"),
    "docs/dashboard": ("grafana", "web page"),
    "docs/errors": ("no space", "out of memory"),
    "docs/engines/index": ("engine", "integration", "connector"),
    "docs/glossary": ("eviction", "lease", "pin", "quarantine"),
    "docs/gpu": ("gpu", "cuda", "vram"),
    "docs/high-availability": ("ha", "failover", "etcd"),
    "docs/metrics": ("prometheus", "monitoring"),
    "docs/performance": ("benchmark", "latency"),
    "docs/proxy": ("disaggregated", "1p1d", "router"),
    "docs/operations": ("port", "firewall"),
    "docs/python": ("python", "client", "api", "testing"),
    "docs/runbook": ("slow", "alert", "problem", "troubleshooting"),
    "docs/security": (
        "tls",
        "certificate",
        "identity",
        "password",
        "revoke",
        "quota",
        "multi-tenant",
    ),
    "docs/scope": ("backup", "disk"),
    "docs/sizing": ("how much memory", "capacity"),
    "docs/transports": ("rdma",),
    "docs/vllm": ("vllm",),
    "docs/why": ("miss", "no hits", "not found", "hit rate"),
}
"""What people look for, and the page that has it: its first result of the site's search."""
EVERYWHERE: Final = {"--help", "--debug", "--json", "--config", "--strict-config"}


def stage(source: Path) -> None:
    """Puts all pages into an empty folder."""
    shutil.rmtree(source, ignore_errors=True)
    for name in PAGES:
        place = ROOT / name
        if place.is_dir():
            shutil.copytree(place, source / name, ignore=shutil.ignore_patterns("site"))
        else:
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(place, source / name)
    first = (ROOT / "README.md").read_text()
    (source / "index.md").write_text(f"{first}\n{(HERE / 'index.md').read_text()}")
    for page in source.rglob("*.md"):
        page.write_text(linked(page.read_text()))
    for name, queries in QUERIES.items():
        page = source / f"{name}.md"
        words = f"---\nmyst:\n  html_meta:\n    keywords: {', '.join(queries)}\n---\n"
        page.write_text(words + page.read_text())
    pages = {query: name for name, queries in QUERIES.items() for query in queries}
    scorer = (HERE / "scorer.js").read_text()
    (source.parent / "scorer.js").write_text(f"var QUERIES = {json.dumps(pages)};\n{scorer}")
    (source / "reference").mkdir()
    for name, lines in {
        "commands": of_commands(),
        "client": of_client(),
        "calls": of_calls(),
    }.items():
        (source / f"reference/{name}.md").write_text("\n".join(lines) + "\n")


def linked(text: str) -> str:
    """The text of a page with links as they are in the site."""
    text = re.sub(r"\[([^]]+)\]\(tests/\S+\.py\)", r"\1", text)  # sources are no pages
    return re.sub(r"\]\(((?:\.\./)*)README\.md", r"](\1index.md", text)


def of_commands() -> Iterator[str]:
    yield "# Commands\n"
    yield "Flags that are settings are in [Settings](../docs/settings.md). Every command has"
    yield "`--help`, `--debug` and `--config FILE`; commands that print results have `--json`."
    yield "Exit codes: 0 done, 1 failed, 2 wrong usage, 3 no such object, 130 interrupted.\n"
    for name, command in all_commands():
        if command is not main.cli:
            _, kind = SERVERS.get(name, (None, ClientConfig))
            yield from of_command(name, command, kind)


def of_command(name: str, command: click.Command, kind: type[Config]) -> Iterator[str]:
    context = click.Context(command, info_name=name)
    usage = " ".join(command.collect_usage_pieces(context))
    yield f"## {name}\n\n{cell(command.help or '')}\n\n    {name} {usage}\n"
    known = {setting.flag: setting.help for setting in settings(kind)}

    def is_setting(option: click.Option) -> bool:
        flag = option.opts[0]
        return flag in known and (option.help or "").startswith(known[flag])

    options = [
        param
        for param in command.params
        if isinstance(param, click.Option) and not param.hidden and not set(param.opts) & EVERYWHERE
    ]
    own = [each for each in options if not is_setting(each)]
    if own:
        yield "| flag | |\n|---|---|"
        for each in own:
            metavar = "" if each.is_flag else f" {each.make_metavar(context)}"
            flag = ", ".join([*each.opts, *each.secondary_opts]) + metavar
            yield f"| {code(flag)} | {cell(each.help or '')} |"
        yield ""
    taken = [code(each.opts[0]) for each in options if is_setting(each)]
    if taken and name not in SERVERS:
        yield f"Settings: {', '.join(taken)}.\n"
    elif taken:
        yield f"All settings of [{name}](../docs/settings.md#{name}).\n"
    examples = (command.epilog or "").replace("\b", "").partition("\n\n")[0].strip("\n")
    if examples.strip().startswith("Example"):
        _, _, lines = examples.partition("\n")
        yield f"```console\n{inspect.cleandoc(lines)}\n```\n"


def of_client() -> Iterator[str]:
    yield "# Client\n"
    yield from auto("autoclass:: kvstore.Client", "members", "special-members: __init__")
    yield "## AsyncClient\n"
    yield from auto("autoclass:: kvstore.AsyncClient")
    yield "## Results\n"
    for name in ("kvstore.PutOutcome", "kvstore.Lease"):
        yield from auto(f"autoclass:: {name}", "members", "undoc-members")
    yield "## Errors\n\nThe codes are in [Errors](../docs/errors.md).\n"
    yield from auto("autoclass:: kvstore.KVStoreError")


def of_calls() -> Iterator[str]:
    yield "# Calls to the master\n"
    yield "What clients and nodes ask a master, as values (`kvstore.calls`). A program uses"
    yield "[Client](client.md) instead.\n"
    for name, kind in vars(calls).items():
        if isinstance(kind, type) and kind.__module__.startswith(calls.__name__) and kind.__doc__:
            yield from auto(f"autoclass:: kvstore.calls.{name}", "no-index")


def auto(directive: str, *options: str) -> Iterator[str]:
    yield f"```{{eval-rst}}\n.. {directive}"
    yield from (f"   :{option if ':' in option else option + ':'}" for option in options)
    yield "```\n"


def run(out: Path) -> int:
    source = out / "source"
    stage(source)
    shutil.rmtree(out / "html", ignore_errors=True)  # drops pages that were removed
    command: list[Any] = [
        sys.executable, "-m", "sphinx", "--fail-on-warning", "--fresh-env", "--quiet", "-b", "html",
        "-c", HERE, "-d", out / "cache", "-D", f"html_search_scorer={out / 'scorer.js'}",
        source, out / "html",
    ]  # fmt: skip
    done = subprocess.run(command, check=False, cwd=ROOT).returncode
    for page in (out / "html").rglob("*.html"):
        page.write_text(finished(page.read_text()))
    return done


if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1]).resolve()))
