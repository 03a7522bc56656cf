"""``kvstore status`` and ``drain``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from kvstore.calls import ClusterStatus
from kvstore.cli.invocation import Invocation, client_command
from kvstore.cli.json_output import plain, print_json
from kvstore.cli.options import EXIT_FAILED, Duration, command
from kvstore.cli.progress import progress
from kvstore.runtime.addresses import shown_place
from kvstore.runtime.formatting import size_text


@command(
    epilog="\b\nExample:\n  kvstore status --master 10.0.0.7:50001",
    help="Show the cluster: nodes, their memory, objects and problems.",
)
@client_command()
@click.option("--counters", is_flag=True, help="Also show counters since the master started.")
def status(invocation: Invocation, counters: bool) -> None:
    with invocation.client() as client:
        found = client.status()
    if invocation.as_json:
        print_json(status_json(found))
        return
    from kvstore.cli.tables import print_status

    print_status(found, shown_place(invocation.config.master), counters=counters)


@command(
    epilog="\b\nExamples:\n  kvstore drain host-7          then stop it, or upgrade it\n"
    "  kvstore drain host-7 --undo",
    help="""Drain a node: stop placing objects on it, move its objects to other nodes, then shut it
    down.

    No objects are lost: if other nodes lack space, nothing is moved. --evict and --discard
    allow losses.
    """,
)
@client_command()
@click.argument("node")
@click.option("--undo", is_flag=True, help="Cancel the drain: the node gets new objects again.")
@click.option(
    "--evict",
    is_flag=True,
    help="Evict less recently used objects on other nodes to make space.",
)
@click.option("--discard", is_flag=True, help="Drop objects that do not fit on other nodes.")
@click.option("--wait-s", metavar="DURATION", type=Duration(min=0), default=60.0,
              show_default=True,
              help="Maximum wait for puts on the node when nothing moves.")  # fmt: skip
def drain(
    invocation: Invocation, node: str, undo: bool, evict: bool, discard: bool, wait_s: float
) -> int:
    from kvstore.client.drain import check_room, drain_node

    with invocation.client() as client:
        if undo:
            client.drain(node, undo=True)
            said = {"node": node, "draining": False}
            print_json(said) if invocation.as_json else click.echo(f"{node} gets new objects again")
            return 0
        if not evict and not discard:
            check_room(client.status(), node)
        with progress(f"emptying {node}", wanted=not invocation.as_json) as report:
            done = drain_node(
                client, node, evict=evict, discard=discard, wait_s=wait_s, on_progress=report
            )
    if invocation.as_json:
        print_json(asdict(done))
        return 0 if done.has_departed else EXIT_FAILED
    counted = f"{done.moved} objects ({size_text(done.moved_bytes)}) moved"
    if done.evicted:
        counted += f", {done.evicted} less recently used ones evicted to make room"
    if done.remaining:
        counted += (
            f", no space on other nodes for {done.remaining} ({size_text(done.remaining_bytes)})"
        )
    if done.corrupt:
        counted += f", {done.corrupt} are corrupt"
    if done.has_departed:
        click.echo(f"{node} has left: {counted}")
        return 0
    click.echo(f"{node} has not left, and gets no new objects: {counted}")
    if done.unfinished:
        click.echo(f"{done.unfinished} puts, allocations or moves under way did not end in time")
    advice = (
        f"To lose less recently used objects elsewhere: kvstore drain {node} --evict. To lose the "
        "rest: --discard. To stop draining: --undo."
    )
    click.echo(advice, err=True)
    return EXIT_FAILED


def status_json(found: ClusterStatus) -> dict[str, Any]:
    from kvstore.console.diagnostics.problems import (
        of_a_status,  # here, because shell completion imports this module
    )

    problems = plain(of_a_status(found))
    return {**plain(found), "counters": dict(found.counters), "problems": problems}
