"""``kvstore why``: writers, readers and the causes of cache misses.

Prints the findings of ``kvstore.console.diagnostics``. Names and keys come from peers, so they are
escaped (``sanitize``) for the terminal."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator, Sequence
from typing import Final

import click

from kvstore.calls import ClientTraffic
from kvstore.cli.invocation import Invocation, client_command
from kvstore.cli.json_output import print_json
from kvstore.cli.options import EXIT_FAILED, EXIT_NOT_FOUND, command
from kvstore.console.diagnostics.evidence import Explanation, Report, explain, report_of
from kvstore.console.diagnostics.why import Cause, counted
from kvstore.runtime.addresses import shown_place
from kvstore.runtime.formatting import duration_text, sanitize, size_text

EXAMPLE = """\b
Examples:
  kvstore why                          every model and namespace that was used last
  kvstore why --model Llama-3.1-8B     the engines of one model
  kvstore why my-namespace --json      one namespace, for a program

\b
The master remembers since its start, and only the last clients and keys.
Exit codes: 0 no problem, 1 a reason why nothing is found, 3 no such namespace or model.
"""

PARTIES_SHOWN: Final = 8
CAUSES_SHOWN: Final = 6


@command(
    epilog=EXAMPLE, help="Explain cache misses: list the writers and readers, and why lookups miss."
)
@client_command()
@click.argument("namespace", required=False, default="")
@click.option(
    "--model", metavar="NAME", default="", help="Only engines of this model: its name, or its path."
)
def why(invocation: Invocation, namespace: str, model: str) -> int:
    if namespace and model:
        raise click.UsageError("give a namespace or --model, not both")
    with invocation.client() as client:
        found = explain(client, client.status(), namespace=namespace, model=model)
    report, causes = report_of(found), found.causes
    if not found.groups and (namespace or model):
        _say_unknown(invocation, namespace or model, found)
        return EXIT_NOT_FOUND
    if invocation.as_json:
        print_json(report)
    else:
        place = shown_place(invocation.config.master)
        age = duration_text(found.uptime_ms)
        click.echo(f"{place}: what its master remembers of the {age} since its start\n")
        for line in [
            *_print_clients(report),
            *_reasons(causes),
            *(f"note: {n}" for n in report.notes),
        ]:
            click.echo(line)
    return EXIT_FAILED if any(cause.is_problem for cause in causes) else 0


# --- showing --------------------------------------------------------------------------------------


def _print_clients(report: Report) -> Iterator[str]:
    for party in report.groups[:PARTIES_SHOWN]:
        size, states = party.size, party.state_size
        head = f"{party.model}  {party.name}" if party.model else party.name
        yield f"{sanitize(head)}: {counted(party.objects, 'object')}, {size_text(size)}"
        if party.state_objects:
            blocks = f"{counted(party.objects - party.state_objects, 'block')} of attention"
            yield (
                f"  holds   {counted(party.state_objects, 'state')} of recurrent layers, "
                f"{size_text(states)}; {blocks}, {size_text(size - states)}"
            )
        for row in party.writers:
            there = f", {row.found} were there" if row.found else ""
            yield f"  writes  {_client(row)}: {row.stored} of {row.keys} keys stored{there}"
        for row in party.readers:
            yield f"  asks    {_client(row)}: {row.found} of {row.keys} keys found"
        if not party.writers and not party.readers:
            yield "  neither put nor asked"
        if (miss := party.missed) is not None:
            there = " (it had been evicted)" if miss.evicted else ""
            there += " (stored since)" if miss.present else ""
            yield (
                f"  missed  {sanitize(miss.text, 40)}{there}, key {miss.found + 1} of "
                f"{miss.requested}, asked by {sanitize(miss.client or 'a client', 40)} "
                f"{duration_text(miss.idle_ms)} ago"
            )
        yield ""
    more = len(report.groups) + report.others - PARTIES_SHOWN
    if more > 0:
        yield f"and {more} more: name one, or use --json\n"


def _client(row: ClientTraffic) -> str:
    name = sanitize(row.client or "a client without a name", 40)
    address = f" ({sanitize(row.address, 40)})" if row.address else ""
    return f"{name}{address}, {duration_text(row.idle_ms)} ago"


def _reasons(causes: Sequence[Cause]) -> Iterator[str]:
    for number, cause in enumerate(causes[:CAUSES_SHOWN], 1):
        text = sanitize(cause.text, 600)
        yield from _wrapped(f"{number}. ", text + (":" if cause.lines else "."))
        for line in cause.lines:
            yield from _wrapped("     ", sanitize(line, 200))
        if cause.remedy:
            yield from _wrapped("   -> ", cause.remedy)
    if len(causes) > CAUSES_SHOWN:
        yield f"and {len(causes) - CAUSES_SHOWN} more: name a namespace or --model, or use --json"


def _wrapped(begin: str, text: str) -> list[str]:
    after = " " * len(begin)
    width = max(40, shutil.get_terminal_size().columns - 1)
    return textwrap.wrap(
        text, width, initial_indent=begin, subsequent_indent=after, break_on_hyphens=False
    )


def _say_unknown(invocation: Invocation, wanted: str, found: Explanation) -> None:
    known = [party.record.model if party.record else party.name for party in found.clients]
    names = ", ".join(sanitize(name, 60) for name in dict.fromkeys(known[:20])) or "nothing"
    message = f"{sanitize(wanted)}: neither puts nor questions nor objects; there is: {names}"
    if invocation.as_json:
        print_json(Report(found.uptime_ms, [], [], 0, [message]))
    else:
        click.echo(message, err=True)
