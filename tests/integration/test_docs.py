"""What README and docs tell a reader to do can be done: links lead somewhere, commands, flags and
variables exist, Python runs.

A fenced block of Python is run against a store, at whatever address it names, unless the line above
it is ``<!-- not run: REASON -->``. Commands are parsed by the parsers of the commands themselves,
and are not run.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import click
import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

from kvstore import config, errors
from kvstore.cli import main, master, node, proxy
from kvstore.config import Config, settings
from tests.support.cluster import Cluster
from tests.support.processes import run_python

ROOT: Final = Path(__file__).parents[2]
PAGES: Final = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("tests/*.md")])
CHINESE: Final = [page for page in PAGES if page.name.endswith(".zh.md")]
KINDS: Final[dict[str, type[Config]]] = {kind.section: kind for kind in config.KINDS}
COMMANDS: Final = {
    "kvstore": main.cli,
    "kvstore-master": master.command,
    "kvstore-node": node.command,
    "kvstore-proxy": proxy.command,
}
SERVERS: Final[dict[str, type[Config]]] = {
    "kvstore-master": config.MasterConfig,
    "kvstore-node": config.NodeConfig,
    "kvstore-proxy": config.ProxyConfig,
}
OPERATORS: Final = {"|", "&&", "||", "&", ";", ">", ">>", "<", "2>"}
ADDRESSES: Final = re.compile(r"(?:127\.0\.0\.1|10\.0\.0\.7):50001")
NOT_SETTINGS: Final = {
    config.CONFIG_VARIABLE,
    config.NATIVE_VARIABLE,
    config.STRICT_VARIABLE,
}
NOT_RUN: Final = re.compile(r"<!-- not run: .{10,} -->")


class Block(NamedTuple):
    page: Path
    line: int
    language: str
    """Empty for an indented block."""
    text: str
    is_run: bool

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@functools.cache
def tokens(page: Path) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(page.read_text())


def blocks(page: Path) -> Iterator[Block]:
    above = ""
    for token in tokens(page):
        if token.type in ("fence", "code_block"):
            first = token.map[0] + 1 if token.map else 0
            language = token.info.split()[0] if token.info else ""
            yield Block(page, first, language, token.content, not NOT_RUN.search(above))
        above = token.content if token.type == "html_block" else ""


def inline(page: Path, kind: str) -> Iterator[Token]:
    for token in tokens(page):
        yield from (child for child in token.children or () if child.type == kind)


ALL_BLOCKS: Final = [block for page in PAGES for block in blocks(page)]
PYTHON: Final = [block for block in ALL_BLOCKS if block.language == "python"]


# --- links ------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """As GitHub and the site make them of headings."""
    found: list[str] = []
    parsed = tokens(page)
    for heading, content in itertools.pairwise(parsed):
        if heading.type == "heading_open":
            text = "".join(each.content for each in content.children or ())
            slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
            found.append(f"{slug}-{found.count(slug)}" if slug in found else slug)
    return set(found)


def links(page: Path) -> Iterator[str]:
    yield from (str(each.attrs["href"]) for each in inline(page, "link_open"))
    yield from (str(each.attrs["src"]) for each in inline(page, "image"))


def leads_nowhere(page: Path, target: str) -> bool:
    name, _, anchor = target.partition("#")
    file = (page.parent / name).resolve() if name else page
    return not file.exists() or bool(anchor and anchor not in anchors(file))


def test_links_lead_to_a_file_and_a_heading() -> None:
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in PAGES
        for target in links(page)
        if "://" not in target and leads_nowhere(page, target)
    ]
    assert broken == []


def targets_of(page: Path) -> set[str]:
    return {target.partition("#")[0] for target in links(page)}


@pytest.mark.parametrize("page", CHINESE, ids=lambda page: page.name)
def test_a_page_in_chinese_has_what_the_english_one_has(page: Path) -> None:
    english = page.with_name(page.name.replace(".zh", ""))
    assert [each.text for each in blocks(page)] == [each.text for each in blocks(english)]
    one, other = ([token.type for token in tokens(each)] for each in (page, english))
    assert one.count("tr_open") == other.count("tr_open")
    assert targets_of(english) - targets_of(page) <= {page.name}
    assert english.name in targets_of(page)


# --- commands ---------------------------------------------------------------------------------


def commands(text: str) -> Iterator[list[str]]:
    """The commands of a block, as words, each with its own name first."""
    for found in re.finditer(r"\$\(([^()]*)\)", text):
        yield from commands(found[1])
    lines = iter(text.splitlines())
    for line in lines:
        told = line.strip().removeprefix("$ ")
        while True:
            try:
                words = shlex.split(told.replace("\\\n", " "), comments=True)
            except ValueError:  # a quotation that goes on in the next line
                words = []
            if words and not told.endswith("\\"):
                break
            following = next(lines, None)
            if following is None:
                break
            told += "\n" + following.strip()
        command: list[str] = []
        for word in [*words, ";"]:
            bare = word.removesuffix(";")
            command += [bare] if bare and bare not in OPERATORS else []
            if word in OPERATORS or word != bare:
                if named := without_variables(command):
                    yield named
                command = []


def without_variables(words: list[str]) -> list[str]:
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0], re.DOTALL):
        words = words[1:]
    return words


def ours(block: Block) -> Iterator[list[str]]:
    """Commands of ours; a block that is no shell may have lines that only look like one."""
    if block.language in ("", "sh", "console"):
        lines = block.text.splitlines()
        starts = ("kvstore", "make", "python", "$", "MOONCAKE", "KVSTORE", "eval", "vllm")
        if any(line.strip().startswith(starts) for line in lines):
            yield from commands(block.text)


def checked(words: list[str]) -> None:
    """Raises click.ClickException or KVStoreError: it is not how the command is called."""
    name, *given = [word for word in words if word not in ("...", "…")]
    command: click.Command = COMMANDS[name]
    context = command.make_context(name, given)
    if isinstance(command, click.Group):
        while isinstance(command, click.Group):  # kvstore auth issue
            rest = [*context._protected_args, *context.args]
            _, below, rest = command.resolve_command(context, rest)
            assert below is not None
            command, context = below, below.make_context(below.name, rest, parent=context)
    else:
        given_values = {key: value for key, value in context.params.items() if value is not None}
        kind = SERVERS[words[0]]
        kind(**{key: value for key, value in given_values.items() if key in kind.model_fields})


def problem_of(words: list[str]) -> str:
    """Why a command cannot be carried out; empty: it can, or is not ours."""
    name, *rest = words
    if name in COMMANDS:
        try:
            checked(words)
        except (click.ClickException, errors.KVStoreError) as error:
            return str(error)
    elif name == "make":
        return next((f"no target {each}" for each in rest[:1] if each not in targets()), "")
    elif name.startswith("python") and rest[:1] == ["-m"]:
        module = rest[1]
        if module.startswith(("kvstore", "tests")) and importlib.util.find_spec(module) is None:
            return f"no module {module}"
    for word in rest:
        if word.startswith("{") and (wrong := wrong_json(word)):
            return wrong
    return ""


@functools.cache
def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def wrong_json(text: str) -> str:
    try:
        value = json.loads(text)
    except ValueError as error:
        return f"{error}: {text}"
    if value.get("kv_connector") == "KVStoreConnector":
        known = settings(config.ConnectorConfig)
        unknown = set(value.get("kv_connector_extra_config", {})) - {each.key for each in known}
        return f"unknown settings {unknown}" if unknown else ""
    return ""


def test_commands_are_what_the_programs_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(config.STRICT_VARIABLE, "")  # --strict-config sets it
    wrong = {
        f"{block}: {shlex.join(words)}": problem
        for block in ALL_BLOCKS
        for words in ours(block)
        if (problem := problem_of(words))
    }
    assert wrong == {}


def test_enough_commands_are_found_to_trust_this_test() -> None:
    found = [words for block in ALL_BLOCKS for words in ours(block)]
    names = [words[0] for words in found]
    assert {name for name in COMMANDS if names.count(name) >= 2} == set(COMMANDS)
    assert names.count("make") >= 15


@pytest.mark.parametrize(
    "line",
    [
        "kvstore statsu",
        "kvstore auth issue x --rle node",
        "kvstore-master --lease-ms 1",
        "make tset",
        "python -m kvstore.none",
        "date | KVSTORE_MASTER=a:1 kvstore put now",
        'eval "$(kvstore as-mooncaek --env)"',
        'vllm serve -k \'{"kv_connector": "KVStoreConnector",\n'
        '"kv_connector_extra_config": {"mater": "a:1"}}\'',
    ],
)
def test_a_wrong_command_is_found(line: str) -> None:
    assert any(problem_of(words) for words in commands(line))


def options_of(command: click.Command) -> set[str]:
    found = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            found |= options_of(below)
    return found | {"--help"}


def has_all(code: str) -> bool:
    """Whether the command of ours, if it is one, has that subcommand and these flags."""
    name, *words = code.split() or [""]
    command: click.Command | None = COMMANDS.get(name)
    if command is None:
        return True
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        command = command.get_command(click.Context(command), words.pop(0))
    flags = {word.partition("=")[0] for word in words if word.startswith("--") and word != "--"}
    return command is not None and flags <= options_of(command)


def test_commands_and_flags_within_sentences_exist() -> None:
    """``kvstore drain NODE`` and ``kvstore-master --lease-ms``: the names of both."""
    wrong = [
        f"{page.relative_to(ROOT)}: {token.content}"
        for page in PAGES
        for token in inline(page, "code_inline")
        if not has_all(token.content)
    ]
    assert wrong == []


def test_variables_exist() -> None:
    known = {name for kind in KINDS.values() for each in settings(kind) for name in each.variables}
    unknown = [
        f"{page.relative_to(ROOT)}: {name}"
        for page in PAGES
        for name in re.findall(r"\bKVSTORE_[A-Z_]*[A-Z]\b(?!_)", page.read_text())
        if name not in known | NOT_SETTINGS
    ]
    assert unknown == []


# --- tables that are the code's ---------------------------------------------------------------


def test_tables_are_what_the_code_says() -> None:
    command = [sys.executable, "docs/site/reference.py", "--check"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_page_of_errors_leaves_none_out() -> None:
    text = (ROOT / "docs/errors.md").read_text()
    kinds = [kind for kind in errors.BY_CODE.values() if kind is not errors.KVStoreError]
    assert [kind for kind in kinds if f"| `{kind.code}` | `{kind.__name__}` |" not in text] == []


# --- files and Python -------------------------------------------------------------------------


@pytest.mark.parametrize("block", [each for each in ALL_BLOCKS if each.language == "toml"], ids=str)
def test_settings_in_files_exist(block: Block) -> None:
    for section, values in tomllib.loads(block.text).items():
        KINDS[section](**values)


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_python_can_be_compiled(block: Block) -> None:
    compile(block.text, str(block), "exec", dont_inherit=True)


@pytest.mark.parametrize("block", [block for block in PYTHON if block.is_run], ids=str)
def test_python_runs(block: Block, store: Cluster) -> None:
    text = ADDRESSES.sub(store.address, block.text)
    done = run_python("-W", "error", "-c", text)
    assert done.returncode == 0, f"{block}\n{done.stderr}"


def test_no_block_of_python_hides_from_this_test() -> None:
    """Indented, or without its language. ``tests/unit/test_recipes.py`` runs those of recipes."""
    hidden = [
        str(block)
        for block in ALL_BLOCKS
        if block.language in ("", "py") and re.match(r"\s*(?:import|from) \w+", block.text)
        if block.page.name != "CONTRIBUTING.md"
    ]
    assert hidden == []
