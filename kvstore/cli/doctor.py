"""``kvstore doctor``: what of this host, its programs and the cluster is well, and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvstore.cli.options import CONTEXT, FAILED, config_options, debug_option, json_option
from kvstore.cli.show import print_json
from kvstore.config import ClientConfig, MasterConfig, NodeConfig, load
from kvstore.doctor import software
from kvstore.doctor.findings import Check, Finding, run_all

EXAMPLE = """\b
Examples:
  kvstore doctor                             this host, and a master if one is configured
  kvstore doctor --master 10.0.0.7:50001     and the way to that master and its nodes
  kvstore doctor --memory 64GiB --json       a node of that size is planned here

\b
Exit codes: 0 nothing is a problem, 1 something is.
"""

MARKS = {"ok": "[green]ok[/]", "warning": "[yellow]warning[/]", "problem": "[red]problem[/]"}

IMPORTS_TIMEOUT_S = 60.0
"""The first import of a large package from a cold disk."""


@click.command(context_settings=CONTEXT, epilog=EXAMPLE)
@config_options(ClientConfig, only=("master", "timeout_ms"))
@click.option("--memory", metavar="SIZE", help="That a node here is to have; default: configured.")
@click.option("--transfer-engine", is_flag=True, help="Transfer bytes through it, to this host.")
@json_option
@debug_option
@click.pass_context
def doctor(
    context: click.Context,
    /,
    config_path: str | None,
    memory: str | None,
    transfer_engine: bool,
    as_json: bool,
    **given: Any,
) -> int:
    """Check this host, its programs and the way to the cluster, and say what to do."""
    outer: dict[str, Any] = context.obj or {"as_json": False, "flags": {}, "config_path": None}
    config_path = outer["config_path"] if config_path is None else config_path
    flags = {key: value for key, value in outer["flags"].items() if key in given}
    flags |= {key: value for key, value in given.items() if value is not None}
    client = load(ClientConfig, flags, config_path=config_path, origin="{flag}")
    master = load(MasterConfig, config_path=config_path)
    node = load(NodeConfig, {"memory": memory}, config_path=config_path, origin="{flag}")
    checks = list(_checks(client, master, node, transfer_engine=transfer_engine))
    limit_s = max(3 * client.timeout_ms / 1000, (3 if transfer_engine else 1) * IMPORTS_TIMEOUT_S)
    found = list(run_all(checks, limit_s + 1))
    if as_json or outer["as_json"]:
        for finding in found:
            print_json(finding._asdict())
    else:
        _show(found)
    return FAILED if any(finding.state == "problem" for finding in found) else 0


def _checks(
    client: ClientConfig, master: MasterConfig, node: NodeConfig, *, transfer_engine: bool
) -> Iterator[tuple[str, Check]]:
    # Each imports what it needs itself: a package that cannot be imported is a finding, too.
    timeout_s = client.timeout_ms / 1000

    def of_host(name: str, *arguments: object) -> tuple[str, Check]:
        def check() -> list[Finding]:
            from kvstore.doctor import host

            found: list[Finding] = getattr(host, name)(*arguments)
            return found

        return name.replace("_", " "), check

    yield "Python", lambda: software.python(IMPORTS_TIMEOUT_S)
    yield "optional", software.optional
    yield of_host("entries", node.memory)
    yield of_host("numa_nodes")
    yield of_host("locked_memory", node.memory)
    yield of_host("open_files")
    yield of_host("clock")
    yield of_host("rdma")
    yield (
        "transfer engine",
        lambda: software.transfer_engine(IMPORTS_TIMEOUT_S, transfer=transfer_engine),
    )

    def of_cluster() -> list[Finding]:
        from kvstore.doctor import cluster

        found = cluster.ports(master, timeout_s)
        named = "master" in client.model_fields_set
        if named or any("a master answers" in finding.found for finding in found):
            found += cluster.cluster(client.master, timeout_s)
        return found

    yield "cluster", of_cluster


def _show(found: list[Finding]) -> None:
    """The findings as a table; what to do below it, each on one line that can be copied."""
    console = Console()
    table = Table("", "", "found", box=None, pad_edge=False, show_header=False)
    last = ""
    for finding in found:
        subject = "" if finding.subject == last else finding.subject
        last = finding.subject
        table.add_row(MARKS[finding.state], subject, escape(finding.found))
    console.print(table, highlight=False)
    todo = [finding for finding in found if finding.advice]
    if todo:
        console.print("\nWhat to do:")
    for finding in todo:
        console.print(f"{MARKS[finding.state]} {finding.subject}:", end=" ", highlight=False)
        console.print(finding.advice, soft_wrap=True, highlight=False, markup=False)
