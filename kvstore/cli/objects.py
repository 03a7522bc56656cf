"""``kvstore ls``, ``stat``, ``put``, ``get``, ``pin``, ``unpin``, ``rm`` and ``clear``."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from kvstore.calls import ObjectRow
from kvstore.cli.files import is_text, read_file, write_output
from kvstore.cli.invocation import Invocation, client_command
from kvstore.cli.json_output import plain, print_json
from kvstore.cli.options import EXIT_NOT_FOUND, Duration, command, confirm, print_not_found
from kvstore.cli.progress import progress
from kvstore.errors import CorruptObjectError
from kvstore.limits import BATCH_KEYS_MAX, Key
from kvstore.runtime.formatting import duration_text, key_from_text, key_text, name_text, size_text

LIST_ROWS_MAX = 1_000
"""Rows of ``ls`` on a terminal; in a pipe ``ls`` prints all."""


@command(
    epilog="\b\nExample:\n  kvstore ls --namespace llama --prefix hex:9f86",
    help="List objects, of all namespaces unless --namespace is given.",
)
@client_command(namespace="Only objects of this namespace; without it, of all.")
@click.option(
    "--prefix",
    metavar="KEY",
    default="",
    help="Only keys with this prefix (hex:... for binary ones).",
)
@click.option("--limit", metavar="N", type=click.IntRange(min=0), help="At most this many; 0: all.")
def ls(invocation: Invocation, prefix: str, limit: int | None) -> None:
    namespace = invocation.given_namespace or ""
    start = key_from_text(prefix) if prefix else b""
    table_wanted = sys.stdout.isatty() and not invocation.as_json
    rows_max = limit if limit is not None else LIST_ROWS_MAX if table_wanted else 0
    with invocation.client() as client:
        rows = iter(client.list_objects(namespace=namespace, prefix=start))
        shown = itertools.islice(rows, rows_max or None)
        if invocation.as_json:
            for row in shown:
                print_json(row_json(row))
        elif table_wanted:
            from kvstore.cli.tables import print_rows

            print_rows(row_cells(row, exact=False) for row in shown)
        else:
            for row in shown:
                click.echo("\t".join(row_cells(row, exact=True)))
        if rows_max and not invocation.as_json and next(rows, None) is not None:
            click.echo(f"There are more: --limit {rows_max} reached.", err=True)


@command(
    epilog="\b\nExample:\n  kvstore stat greeting",
    help="Show one object: size, location, lease, parent, node with a copy on a disk.",
)
@client_command(namespace="Namespace of the object.")
@click.argument("key")
@click.option("--hex", "as_hex", is_flag=True, help="KEY is hexadecimal.")
def stat(invocation: Invocation, key: str, as_hex: bool) -> int:
    wanted = key_from_text(key, as_hex=as_hex)
    with invocation.client() as client:
        found = client.stat(wanted, namespace=invocation.namespace)
        if found is None or found.detail.row is None:
            return exit_not_found(invocation, [wanted])
        nodes = client.status().nodes_by_segment()
    detail, header, row = found.detail, found.header, found.detail.row
    places = detail.placements
    fields = {
        **row_json(row),
        "parent": key_text(detail.parent) if detail.parent else None,
        "children": detail.children,
        "version": f"{detail.version.epoch}.{detail.version.counter}",
        "idle_ms": detail.idle_ms,
        "disk": detail.disk or None,
        "content": content_of(header.descriptor) if header is not None else None,
        "locations": [
            {"node": nodes.get(segment, ""), "segment": segment, "offset": offset}
            for segment, offset in zip(places.segments, places.offsets, strict=True)
        ],
    }
    if invocation.as_json:
        print_json(fields)
        return 0
    from kvstore.cli.tables import print_fields  # rich is slow to import

    print_fields(fields)
    return 0


def content_of(descriptor: bytes) -> dict[str, Any]:
    """Return the payload's properties from the descriptor in an object's header."""
    from kvstore.client.values import read_descriptor

    try:
        kind, dtype, shape = read_descriptor(descriptor)
    except CorruptObjectError:
        return {"kind": "unreadable"}
    return {"kind": kind} if kind == "bytes" else {"kind": kind, "dtype": dtype, "shape": shape}


@command(
    epilog="\b\nExamples:\n  kvstore put greeting hello.txt\n  date | kvstore put now -",
    help="Store a file as one object. FILE may be - for standard input.",
)
@client_command("replicas", namespace="Namespace to store the object in.")
@click.argument("key")
@click.argument("file", type=click.Path(dir_okay=False, allow_dash=True))
@click.option("--hex", "as_hex", is_flag=True, help="KEY is hexadecimal.")
@click.option("--parent", metavar="KEY", help="Key of the object that this one continues.")
@click.option("--overwrite", is_flag=True, help="Replace an existing object.")
@click.option(
    "--ttl",
    type=Duration(min=0, min_open=True),
    metavar="DURATION",
    help="TTL of the object, such as 1h.",
)
def put(
    invocation: Invocation,
    key: str,
    file: str,
    as_hex: bool,
    parent: str | None,
    overwrite: bool,
    ttl: float | None,
) -> None:
    from kvstore.calls import PutOutcome

    wanted = key_from_text(key, as_hex=as_hex)
    parent_key = key_from_text(parent, as_hex=as_hex) if parent is not None else None
    content = read_file(file)
    with invocation.client() as client:
        outcome = client.put(
            wanted,
            content,
            namespace=invocation.namespace,
            parent=parent_key,
            replicas=invocation.config.replicas,
            overwrite=overwrite,
            ttl=ttl,
        )
    told = {
        PutOutcome.STORED: f"stored, {size_text(len(content))}",
        PutOutcome.FOUND: "was there already; its bytes stay, yours were not stored",
        PutOutcome.BEING_WRITTEN: "another client is writing it; yours was not stored",
    }.get(outcome, str(outcome))
    if invocation.as_json:
        print_json({"key": key_text(wanted), "outcome": str(outcome), "size": len(content)})
    else:
        click.echo(f"{key_text(wanted)}: {told}")


@command(
    epilog="\b\nExamples:\n  kvstore get greeting\n  kvstore get block-7 -o block",
    help="Fetch one object's bytes.",
)
@client_command(namespace="Namespace of the object.")
@click.argument("key")
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=click.Path(),
    help="Write to FILE instead of standard output.",
)
@click.option("--hex", "as_hex", is_flag=True, help="KEY is hexadecimal.")
def get(invocation: Invocation, key: str, output: str | None, as_hex: bool) -> int:
    wanted = key_from_text(key, as_hex=as_hex)
    with invocation.client() as client:
        # Bytes require neither torch nor a dtype that NumPy supports.
        value = client.get(wanted, namespace=invocation.namespace, kind="bytes")
    if value is None:
        return exit_not_found(invocation, [wanted])
    content = memoryview(value)
    to_stdout = output in (None, "-")
    if to_stdout and sys.stdout.isatty() and not is_text(content):
        raise click.UsageError("The value is not text: write it to a file with -o, or pipe it.")
    if to_stdout or output is None:
        sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()
    else:
        write_output(Path(output), content)
    if invocation.as_json and not to_stdout:
        print_json({"key": key_text(wanted), "size": len(content), "file": output})
    return 0


@command(
    epilog="\b\nExample:\n  kvstore rm greeting farewell",
    help="Remove objects. They disappear at once; their memory is freed when the last lease on "
    "them ends.",
)
@client_command(namespace="Namespace of the objects.")
@click.argument("keys", nargs=-1, required=True, metavar="KEY...")
@click.option("--hex", "as_hex", is_flag=True, help="Each KEY is hexadecimal.")
def rm(invocation: Invocation, keys: tuple[str, ...], as_hex: bool) -> int:
    wanted = list(dict.fromkeys(key_from_text(key, as_hex=as_hex) for key in keys))
    removed: list[bool] = []
    with invocation.client() as client:
        for start in range(0, len(wanted), BATCH_KEYS_MAX):
            some = wanted[start : start + BATCH_KEYS_MAX]
            removed += client.remove_many(some, namespace=invocation.namespace)
    return _print_result(invocation, "removed", wanted, removed)


@command(
    epilog="\b\nExample:\n  kvstore pin system-prompt --for 1h",
    help="Protect objects and their ancestors from eviction.",
)
@client_command(namespace="Namespace of the objects.")
@click.argument("keys", nargs=-1, required=True, metavar="KEY...")
@click.option("--hex", "as_hex", is_flag=True, help="Each KEY is hexadecimal.")
@click.option(
    "--for",
    "seconds",
    type=Duration(min=0, min_open=True),
    metavar="DURATION",
    required=True,
    help="Duration of the pin, up to a day; a number is seconds.",
)
def pin(invocation: Invocation, keys: tuple[str, ...], as_hex: bool, seconds: float) -> int:
    wanted = list(dict.fromkeys(key_from_text(key, as_hex=as_hex) for key in keys))
    with invocation.client() as client:
        pinned = client.pin(wanted, seconds, namespace=invocation.namespace)
    return _print_result(invocation, "pinned", wanted, pinned)


@command(
    epilog="\b\nExample:\n  kvstore unpin system-prompt",
    help="End the pins of objects, which can then be evicted.",
)
@client_command(namespace="Namespace of the objects.")
@click.argument("keys", nargs=-1, required=True, metavar="KEY...")
@click.option("--hex", "as_hex", is_flag=True, help="Each KEY is hexadecimal.")
def unpin(invocation: Invocation, keys: tuple[str, ...], as_hex: bool) -> None:
    wanted = list(dict.fromkeys(key_from_text(key, as_hex=as_hex) for key in keys))
    with invocation.client() as client:
        unpinned = client.unpin(wanted, namespace=invocation.namespace)
    if invocation.as_json:
        print_json({"unpinned": sum(unpinned)})
    else:
        click.echo(f"unpinned {sum(unpinned)}")


@command(
    epilog="\b\nExample:\n  kvstore clear --namespace llama",
    help="Remove all objects of one namespace, or of all namespaces.",
)
@client_command(namespace="The namespace to clear.")
@click.option("--all", "everything", is_flag=True, help="Clear every namespace.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask for confirmation.")
def clear(invocation: Invocation, everything: bool, yes: bool) -> None:
    if everything and "namespace" in invocation.given:
        raise click.UsageError("--all and --namespace exclude each other.")
    namespace = None if everything else invocation.namespace
    what = "every namespace" if everything else f"namespace {namespace}"
    confirm(f"Remove all objects of {what}?", yes=yes, as_json=invocation.as_json)
    with (
        invocation.client() as client,
        progress("removing", wanted=not invocation.as_json) as report,
    ):
        removed = client.clear(namespace, progress=lambda done, left: report(done, done + left))
    if invocation.as_json:
        print_json({"removed": removed, "namespace": namespace})
    else:
        click.echo(f"removed {removed} of {what}")


def _print_result(invocation: Invocation, what: str, keys: list[Key], done: list[bool]) -> int:
    """Print the number of successful keys, and the absent ones; return the exit code."""
    missing = [key for key, was_there in zip(keys, done, strict=True) if not was_there]
    if invocation.as_json:
        print_json({what: sum(done), "missing": [key_text(key) for key in missing]})
    else:
        click.echo(f"{what} {sum(done)}")
    return exit_not_found(invocation, missing) if missing else 0


def exit_not_found(invocation: Invocation, keys: Iterable[bytes]) -> int:
    for key in keys:
        fields = {"key": key_text(key), "namespace": invocation.namespace}
        message = f"{key_text(key)} is not in {invocation.namespace}"
        print_not_found(message, as_json=invocation.as_json, fields=fields)
    return EXIT_NOT_FOUND


def row_json(row: ObjectRow) -> dict[str, Any]:
    return {**plain(row), "key": key_text(row.key), "key_hex": row.key.hex()}


def row_cells(row: ObjectRow, *, exact: bool) -> list[str]:
    return [
        name_text(row.namespace),
        key_text(row.key),
        str(row.size) if exact else size_text(row.size),
        str(row.replicas),
        str(row.depth),
        str(row.leased_ms) if exact else duration_text(row.leased_ms) if row.leased_ms else "-",
        row.state,
    ]
