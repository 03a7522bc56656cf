"""``kvstore doctor``: checks this host, its programs and the cluster, with advice."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import Any

import click

from kvstore.cli.invocation import CONNECTION, client_config
from kvstore.cli.json_output import print_json
from kvstore.cli.options import EXIT_FAILED, command, config_options, debug_option, json_option
from kvstore.cli.tables import console_of_names, table_of
from kvstore.config import ClientConfig, MasterConfig, NodeConfig, load, unknown_settings
from kvstore.console.diagnostics.findings import Check, Finding, of_row, ok, run_all

EXAMPLE = """\b
Examples:
  kvstore doctor                             checks this host, and a configured master
  kvstore doctor --master 10.0.0.7:50001     also checks that master and its nodes
  kvstore doctor --memory 64GiB --json       checks for a planned node of that size

\b
Exit codes: 0 no problem, 1 at least one problem.
"""

USED = ("master", "auth", "timeout_ms")
"""Client settings used by the checks."""

COLOURS = {"ok": "green", "warning": "yellow", "problem": "red"}

IMPORTS_TIMEOUT_S = 60.0
"""Timeout of the first import of a large package from a cold disk."""


@command(
    epilog=EXAMPLE,
    help="Check this host, its programs and the cluster, and give advice.",
)
@config_options(ClientConfig, only=USED, common=USED, helps=CONNECTION)
@click.option("--memory", metavar="SIZE", help="Size of a planned node; default: configured.")
@json_option
@debug_option
def doctor(config_path: str | None, memory: str | None, as_json: bool | None, **given: Any) -> int:
    client = client_config(given, config_path)
    master = load(MasterConfig, config_path=config_path)
    node = load(NodeConfig, {"memory": memory}, config_path=config_path, origin="{flag}")
    checks = list(_checks(client, master, node, config_path))
    logging.getLogger("kvstore").setLevel(logging.ERROR)  # warnings would repeat the findings
    limit_s = max(3 * client.timeout_ms / 1000, IMPORTS_TIMEOUT_S)
    found = list(run_all(checks, limit_s + 1))
    if as_json:
        for finding in found:
            print_json(finding._asdict())
    else:
        _show(found)
    return EXIT_FAILED if any(finding.state == "problem" for finding in found) else 0


def _checks(
    client: ClientConfig, master: MasterConfig, node: NodeConfig, config_path: str | None
) -> Iterator[tuple[str, Check]]:
    yield "settings", lambda: _of_settings(config_path)
    # Zero without a planned node: a host of clients alone needs no memory for one.
    node_memory = node.memory if "memory" in node.model_fields_set else master.memory
    checks: list[tuple[Any, ...]] = [
        ("Python", "software.python", IMPORTS_TIMEOUT_S),
        ("installation", "software.installation"),
        ("entries", "host.entries", node_memory),
        ("NUMA", "host.numa_nodes"),
        ("locked memory", "host.locked_memory", node_memory),
        ("open files", "host.open_files"),
        ("RDMA", "host.rdma"),
        ("transfer engine", "software.transfer_engine", IMPORTS_TIMEOUT_S),
        ("GPU", "software.graphics", IMPORTS_TIMEOUT_S),
        *([("identity", "cluster.identity", client.auth)] if client.auth else []),
        ("cluster", "cluster.reached", client, master),
    ]
    for subject, place, *arguments in checks:
        yield subject, _check(place, *arguments)


def _of_settings(config_path: str | None) -> list[Finding]:
    found = [of_row("error", error=setting) for setting in unknown_settings(config_path)]
    return found or [ok("no unknown ones")]


def _check(place: str, *arguments: object) -> Check:
    """Return a check by a function of ``kvstore.console.diagnostics``, imported only when it runs,
    so that a failed import is a finding."""

    def check() -> Iterable[Finding]:
        module, name = place.split(".")
        function = getattr(import_module(f"kvstore.console.diagnostics.{module}"), name)
        found: Iterable[Finding] = function(*arguments)
        return found

    return check


def _show(found: list[Finding]) -> None:
    """Print the findings as a table, followed by the advice, one per line."""
    from rich.text import Text  # here, because shell completion imports this module

    console = console_of_names(fits=True)
    table = table_of("", "", "found", show_header=False)
    last = ""
    for finding in found:
        subject = "" if finding.subject == last and console.is_terminal else finding.subject
        last = finding.subject
        table.add_row(Text(finding.state, COLOURS[finding.state]), subject, finding.found)
    console.print(table)
    todo = [finding for finding in found if finding.advice]
    if todo:
        console.print("\nWhat to do:")
    for finding in todo:
        mark = Text(finding.state, COLOURS[finding.state])
        console.print(mark, f"{finding.subject}: {finding.advice}", soft_wrap=True)
