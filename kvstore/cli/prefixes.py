"""``kvstore prefixes``: the most used chains as a tree of branches."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence

import click

from kvstore.calls import Branch
from kvstore.cli.invocation import Invocation, client_command
from kvstore.cli.json_output import plain, print_json
from kvstore.cli.options import command
from kvstore.limits import CHAINS_MAX
from kvstore.runtime.formatting import duration_text, key_text, name_text, size_text

LEVELS_MAX = 20
"""Maximum indentation level."""

KEY_MAX = 24
"""Displayed characters of a key."""


@command(
    epilog="\b\nExamples:\n  kvstore prefixes\n  kvstore prefixes --namespace llama --json",
    help="""Show the most matched and most recently used prefixes as a tree.

    Of all namespaces that were used last, unless --namespace is given. The master counts a match at
    the last block that it found, since the master's start, and remembers the last such blocks.
    """,
)
@client_command(namespace="Only chains of this namespace; without it, of all that were used last.")
@click.option("--count", metavar="N", type=click.IntRange(1, CHAINS_MAX), default=20,
              show_default=True, help="Maximum number of chains.")  # fmt: skip
def prefixes(invocation: Invocation, count: int) -> None:
    with invocation.client() as client:
        found = client.chains(invocation.given_namespace, count=count)
        nodes = client.status().nodes_by_segment()
    if invocation.as_json:
        branches = [
            {
                **plain(row),
                "first": key_text(row.first),
                "last": key_text(row.last),
                "nodes": row.replicas_by_node(nodes),
            }
            for row in found.branches
        ]
        print_json({**plain(found), "branches": branches})
        return
    for line in lines(found.branches, nodes, full=not sys.stdout.isatty()):
        click.echo(line)
    if not found.branches:
        click.echo("No chain is stored.")
    elif not found.complete:
        click.echo("There are longer chains, or more branches, than one answer holds.", err=True)


def lines(
    branches: Sequence[Branch], nodes: Mapping[int, str], *, full: bool = False
) -> Iterator[str]:
    """Yield a line per branch, indented under the branch that it continues, and the number of
    omitted continuations. ``full``: keys are not shortened."""
    below: list[list[int]] = [[] for _ in branches]
    roots: list[int] = []
    for index, row in enumerate(branches):
        (below[row.above - 1] if row.above else roots).append(index)
    waiting = [(index, 0, 0) for index in reversed(roots)]
    namespace = None
    while waiting:
        index, level, others = waiting.pop()
        indent = "  " * min(level, LEVELS_MAX)
        if others:
            yield f"{indent}and {others:,} more"
            continue
        row = branches[index]
        if row.namespace != namespace:
            namespace = row.namespace
            yield f"{name_text(namespace)}:"
        yield f"{indent}  {_line(row, nodes, full=full)}"
        hidden = row.children - len(below[index])
        if hidden > 0:
            waiting.append((index, level + 2, hidden))
        waiting += [(branch, level + 1, 0) for branch in reversed(below[index])]


def _line(row: Branch, nodes: Mapping[int, str], *, full: bool) -> str:
    text = key_text if full else _short
    keys = text(row.last) if row.blocks == 1 else f"{text(row.first)} … {text(row.last)}"
    return ", ".join(
        [
            f"{keys}  {row.blocks:,} {'block' if row.blocks == 1 else 'blocks'}",
            size_text(row.size),
            f"matched {row.matched:,}" if row.matched else "no match counted",
            f"unused {duration_text(row.idle_ms)}",
            *([f"{row.missing:,} missing"] if row.missing else []),
            *([f"{row.being_written:,} being written"] if row.being_written else []),
            *([f"{row.pinned:,} pinned"] if row.pinned else []),
            *(["goes on above"] if row.truncated else []),
            "on " + (" ".join(map(name_text, row.replicas_by_node(nodes))) or "no node"),
        ]
    )


def _short(key: bytes) -> str:
    text = key_text(key)
    return text if len(text) <= KEY_MAX else f"{text[: KEY_MAX - 7]}…{text[-6:]}"
