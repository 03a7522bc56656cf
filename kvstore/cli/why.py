"""``kvstore why``: who writes, who asks, and why nothing is found.

The command gathers what the master remembers of each namespace and the fleet records of engines,
and prints what ``kvstore.diagnosis.why`` makes of them. Names and keys come from strangers, so all
of them are made safe (``shown_text``) before they reach the terminal.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import click

from kvstore.calls import ClientTraffic, ClusterStatus, NamespaceTraffic
from kvstore.cli.invocation import Invocation, connects
from kvstore.cli.options import CONTEXT, FAILED, NOT_THERE
from kvstore.cli.show import print_json
from kvstore.diagnosis.why import Cause, Evidence, Party, counted, diagnose, parties_of, select
from kvstore.errors import KVStoreError
from kvstore.fleet import RECORDS_MAX, Record, parse, worth_reading
from kvstore.limits import FLEET_NAMESPACE
from kvstore.network.addresses import shown_place
from kvstore.texts import duration_text, key_text, shown_text, size_text

if TYPE_CHECKING:
    from kvstore import Client

EXAMPLE = """\b
Examples:
  kvstore why                          every model and namespace that was used last
  kvstore why --model Llama-3.1-8B     the engines of one model
  kvstore why my-namespace --json      one namespace, for a program

\b
The master remembers since its start, and only the last clients and keys.
Exit codes: 0 no problem, 1 a reason why nothing is found, 3 no such namespace or model.
"""

KEYS_LOOKED_FOR: Final = 2
"""Keys that were not found in a namespace, and are looked for in others."""

NAMESPACES_LOOKED_IN: Final = 32
OBJECTS_LOOKED_AT: Final = 1_000
"""Objects of a namespace that are checked for missing ancestors: one page."""

PARTIES_SHOWN: Final = 8
CAUSES_SHOWN: Final = 6
CLIENTS_SHOWN: Final = 3
TEXT_WIDTH: Final = 96


@click.command(
    context_settings=CONTEXT,
    epilog=EXAMPLE,
    help="Say who writes and who asks, and why nothing is found.",
)
@connects()
@click.argument("namespace", required=False, default="")
@click.option("--model", default="", help="Only engines of this model: its name, or its path.")
def why(invocation: Invocation, namespace: str, model: str) -> int:
    if namespace and model:
        raise click.UsageError("give a namespace or --model, not both")
    with invocation.client() as client:
        status = client.status()
        evidence, notes = _gather(client, status)
        everyone = parties_of(evidence.spaces, evidence.records)
        chosen = select(everyone, namespace=namespace, model=model)
        _look_closer(client, evidence, chosen, everyone)
    if not chosen and (namespace or model):
        _say_unknown(invocation, namespace or model, everyone)
        return NOT_THERE
    chosen.sort(key=_last_used)
    causes = diagnose(evidence, chosen, everyone)
    if invocation.as_json:
        print_json(
            {
                "uptime_ms": evidence.uptime_ms,
                "parties": [_party_json(party) for party in chosen],
                "causes": causes,
                "notes": notes,
            }
        )
    else:
        place = shown_place(invocation.config.master)
        age = duration_text(evidence.uptime_ms)
        click.echo(f"{place}: what its master remembers of the {age} since its start\n")
        for line in [*_people(chosen), *_reasons(causes), *(f"note: {note}" for note in notes)]:
            click.echo(line)
    return FAILED if any(cause.is_problem for cause in causes) else 0


# --- gathering ------------------------------------------------------------------------------------


def _gather(client: Client, status: ClusterStatus) -> tuple[Evidence, list[str]]:
    report = client.traffic()
    notes: list[str] = []
    records: list[Record] = []
    try:
        records = _records(client)
    except KVStoreError as error:
        notes.append(shown_text(f"the records of engines could not be read: {error.message}", 200))
    seen = {space.name for space in report.namespaces}
    silent = [
        NamespaceTraffic(row.name, row.objects, row.size, (), (), (), 0, 0, 0, 0, 0, 0)
        for row in status.namespaces
        if row.name not in seen and row.objects
    ]
    evidence = Evidence(
        uptime_ms=report.uptime_ms,
        nodes=sum(node.state in ("alive", "draining") for node in status.nodes),
        spaces=[*report.namespaces, *silent],
        records=records,
    )
    return evidence, notes


def _records(client: Client) -> list[Record]:
    found: list[Record] = []
    for keys in worth_reading(client.list_objects(namespace=FLEET_NAMESPACE)):
        values = client.get_many(keys, namespace=FLEET_NAMESPACE, kind="bytes")
        parsed = [parse(value) for value in values if isinstance(value, bytes)]
        found += [record for record in parsed if record is not None]
        if len(found) >= RECORDS_MAX:
            break
    return found[:RECORDS_MAX]


def _look_closer(
    client: Client, evidence: Evidence, chosen: Sequence[Party], everyone: Sequence[Party]
) -> None:
    """Adds to the evidence what only a look at single objects shows, for parties that find nothing.
    These are operators' calls: they count as no traffic, and lease nothing."""
    written = [space.name for party in everyone for space in party.spaces if space.objects]
    for party in chosen[:PARTIES_SHOWN]:
        if not party.asked or party.found:
            continue
        space = min(
            party.spaces, key=lambda space: min((m.idle_ms for m in space.misses), default=1e15)
        )
        keys = [miss.key for miss in space.misses[:KEYS_LOOKED_FOR]]
        others = [name for name in written if name not in party.namespaces]
        for key, name in itertools.product(keys, others[:NAMESPACES_LOOKED_IN]):
            if client.stat(key, namespace=name) is not None:
                evidence.elsewhere[space.name] = name
                break
        if space.objects:
            rows = itertools.islice(client.list_objects(namespace=space.name), OBJECTS_LOOKED_AT)
            states = [row.state for row in rows]
            evidence.detached[space.name] = states.count("detached"), len(states)


# --- showing --------------------------------------------------------------------------------------


def _last_used(party: Party) -> int:
    return min((row.idle_ms for row in [*party.putters, *party.askers]), default=1 << 62)


def _people(parties: Sequence[Party]) -> Iterator[str]:
    for party in parties[:PARTIES_SHOWN]:
        model = f"{party.record.model}  " if party.record is not None else ""
        size = _amount(party.spaces)[1]
        head = f"{model}{party.name}"
        yield f"{shown_text(head)}: {counted(party.objects, 'object')}, {size_text(size)}"
        if party.states:
            count, bytes_ = _amount(party.states)
            blocks = f"{counted(party.objects - count, 'block')} of attention"
            yield (
                f"  holds   {counted(count, 'state')} of recurrent layers, {size_text(bytes_)}; "
                f"{blocks}, {size_text(size - bytes_)}"
            )
        for row in party.putters[:CLIENTS_SHOWN]:
            there = f", {row.found} were there" if row.found else ""
            yield f"  writes  {_client(row)}: {row.stored} of {row.keys} keys stored{there}"
        for row in party.askers[:CLIENTS_SHOWN]:
            yield f"  asks    {_client(row)}: {row.found} of {row.keys} keys found"
        if not party.putters and not party.askers:
            yield "  neither put nor asked"
        if party.misses:
            miss = party.misses[0]
            there = " (it is there now)" if miss.present else ""
            yield (
                f"  missed  {shown_text(key_text(miss.key), 40)}{there}, key {miss.found + 1} of "
                f"{miss.asked}, asked by {shown_text(miss.client or 'a client', 40)} "
                f"{duration_text(miss.idle_ms)} ago"
            )
        yield ""
    if len(parties) > PARTIES_SHOWN:
        yield f"and {len(parties) - PARTIES_SHOWN} more: name one, or use --json\n"


def _amount(spaces: Sequence[NamespaceTraffic]) -> tuple[int, int]:
    """Objects and bytes."""
    return sum(space.objects for space in spaces), sum(space.size for space in spaces)


def _client(row: ClientTraffic) -> str:
    name = shown_text(row.client or "a client without a name", 40)
    address = f" ({shown_text(row.address, 40)})" if row.address else ""
    return f"{name}{address}, {duration_text(row.idle_ms)} ago"


def _reasons(causes: Sequence[Cause]) -> Iterator[str]:
    for number, cause in enumerate(causes[:CAUSES_SHOWN], 1):
        text = shown_text(cause.text, 600)
        yield from _wrapped(f"{number}. ", text + (":" if cause.lines else "."))
        for line in cause.lines:
            yield from _wrapped("     ", shown_text(line, 200))
        if cause.remedy:
            yield from _wrapped("   -> ", cause.remedy)
    if len(causes) > CAUSES_SHOWN:
        yield f"and {len(causes) - CAUSES_SHOWN} more: name a namespace or --model, or use --json"


def _wrapped(begin: str, text: str) -> list[str]:
    after = " " * len(begin)
    return textwrap.wrap(
        text, TEXT_WIDTH, initial_indent=begin, subsequent_indent=after, break_on_hyphens=False
    )


def _party_json(party: Party) -> dict[str, Any]:
    record = party.record
    return {
        "name": party.name,
        "engine": record.engine if record else None,
        "models": record.models if record else [],
        "fingerprint": record.fingerprint if record else None,
        "objects": party.objects,
        "states": dict(zip(("objects", "size"), _amount(party.states), strict=True)),
        "asked": party.asked,
        "found": party.found,
        "namespaces": party.spaces,
    }


def _say_unknown(invocation: Invocation, wanted: str, everyone: Sequence[Party]) -> None:
    known = [party.record.model if party.record else party.name for party in everyone]
    names = ", ".join(shown_text(name, 60) for name in dict.fromkeys(known[:20])) or "nothing"
    message = f"{shown_text(wanted)}: neither puts nor questions nor objects; there is: {names}"
    if invocation.as_json:
        print_json({"parties": [], "causes": [], "notes": [message]})
    else:
        click.echo(message, err=True)
