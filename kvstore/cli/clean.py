"""``kvstore clean``: removes leftover shared memory of dead nodes on this host."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kvstore.cli.json_output import print_json
from kvstore.cli.options import (
    EXIT_FAILED,
    EXIT_NOT_FOUND,
    command,
    confirm,
    debug_option,
    given_anywhere,
    json_option,
)
from kvstore.cli.tables import console_of_names, table_of
from kvstore.runtime.formatting import name_text, size_text

if TYPE_CHECKING:
    from kvstore.memory.shm_entries import LeftoverSegment

EXAMPLE = """\b
Examples:
  kvstore clean                      shows memory that dead nodes left, and asks
  kvstore clean cache-1 --yes        removes the memory of one node, without asking
  kvstore clean --cluster prod       only memory of nodes of this cluster

\b
A node that is restarted with the same options serves the objects in its memory, so use clean only
for nodes that will not return. Memory of running nodes is never touched.

\b
Without a terminal to ask, --yes is needed; --json alone lists the memory.
Exit codes: 0 done, or nothing to do; 1 some memory was not removed; 2 --yes is missing; 3 no such
memory.
"""


@command(epilog=EXAMPLE, help="Remove leftover shared memory of dead nodes on this host.")
@click.argument("names", nargs=-1, metavar="[NODE]...")
@click.option(
    "--cluster", metavar="NAME", callback=given_anywhere, help="Only memory of this cluster."
)
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@json_option
@debug_option
def clean(names: tuple[str, ...], cluster: str | None, yes: bool, as_json: bool | None) -> int:
    from kvstore.memory.shm_entries import left_overs, remove_left

    def is_meant(left: LeftoverSegment) -> bool:
        if names and left.name not in names:
            return False
        return cluster is None or left.owner.cluster == cluster

    found = [left for left in left_overs() if is_meant(left)]
    missing = sorted(set(names) - {left.name for left in found})
    remove = yes or (not as_json and bool(found) and _is_agreed(found))
    rows = [(left, remove and remove_left(left)) for left in found]
    if as_json:
        for left, removed in rows:
            print_json(
                {
                    "node": left.node,
                    "path": left.path,
                    "cluster": left.owner.cluster,
                    "master": list(left.owner.locations),
                    "size": left.size,
                    "held": left.held,
                    "removed": removed,
                }
            )
    elif not found and not missing:
        click.echo("no memory of dead nodes")
    elif remove:
        freed = sum(left.held for left, removed in rows if removed)
        click.echo(f"removed {sum(removed for _, removed in rows)}, {size_text(freed)} freed")
        for left, removed in rows:
            if not removed:
                click.echo(f"{name_text(left.path)}: a process has taken it meanwhile", err=True)
    for name in missing:
        click.echo(f"{name}: no memory of a dead node of this name", err=True)
    if missing:
        return EXIT_NOT_FOUND
    return 0 if all(removed for _, removed in rows) else EXIT_FAILED


def _is_agreed(found: list[LeftoverSegment]) -> bool:
    table = table_of("node", "memory", "cluster", "of the master at", "path")
    for left in found:
        owner, size = left.owner, size_text(left.held)
        cells = (left.node, size, owner.cluster, ", ".join(owner.locations), left.path)
        table.add_row(*(name_text(cell) or "-" for cell in cells))  # any user may choose them
    console_of_names(stderr=True).print(table)
    confirm("Remove this memory, with all objects in it?")
    return True
