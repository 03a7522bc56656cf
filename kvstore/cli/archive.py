"""``kvstore archive``: copies of namespaces in an object store."""

from __future__ import annotations

import contextlib
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

import click

from kvstore.cli.invocation import Invocation, client_command
from kvstore.cli.json_output import print_json
from kvstore.cli.options import EXIT_FAILED, Duration, Group, print_not_found
from kvstore.cli.progress import progress
from kvstore.runtime.formatting import key_from_text, name_text, size_text

if TYPE_CHECKING:
    from kvstore.archive.transfer import ExportOutcome, ImportOutcome

EXAMPLE: Final = """\b
Examples:
  kvstore archive export s3://bucket/kv --namespace llama
  kvstore archive export file:///srv/kv --prefix hex:9f86 --pinned
  kvstore archive import s3://bucket/kv

\b
URLs: s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX, file:///DIR.
Credentials come from the environment: AWS_..., GOOGLE_..., AZURE_...
Needs: pip install 'obstore>=0.12' (the extra "archive").
"""

NOTES: Final = {
    "missed": "objects were evicted or removed before",
    "warning": "(the earlier archive remains, or a part of it)",
    "stored_before": "were stored before",
    "not_imported": "were not imported",
    "evicted": "were evicted again: the pool is too small",
}
"""Texts that follow fields of an outcome, unless they are 0 or empty."""

timeout_option: Final = click.option(
    "--timeout", "timeout_s", metavar="DURATION", type=Duration(min=0, min_open=True),
    default="2min", show_default=True,
    help="Longest time for one archive object (64 MiB), with retries.",
)  # fmt: skip


@click.group(
    cls=Group,
    epilog=EXAMPLE,
    help="Export namespaces to an object store (S3, GCS, Azure, files), and import them.",
)
def archive() -> None:
    pass


@archive.command(
    help="""Write the objects of a namespace, or of all, to an object store.

    The archive of a namespace is replaced when all objects are written. An export that fails or is
    interrupted leaves the previous one as it was.
    """,
)
@client_command(namespace="Only this namespace; without it, all.")
@click.argument("url")
@click.option(
    "--prefix", "prefixes", metavar="KEY", multiple=True,
    help="Only keys with this prefix (hex:... for binary ones), and their ancestors: the last key "
    "of a chain selects the chain. May be repeated.",
)  # fmt: skip
@click.option("--pinned", is_flag=True, help="Only pinned objects, and their ancestors.")
@timeout_option
def export(
    invocation: Invocation, url: str, prefixes: tuple[str, ...], pinned: bool, timeout_s: float
) -> int:
    from kvstore.archive.object_store import ArchiveStore
    from kvstore.archive.transfer import blocks_of, export_namespace, namespaces_of

    starts = [key_from_text(prefix) for prefix in prefixes]
    is_any = False
    opened = ArchiveStore(url, timeout_s, create=True)
    with contextlib.closing(opened) as store, invocation.client() as client:
        given = invocation.given_namespace
        for namespace in namespaces_of(client) if given is None else [given]:
            began = time.monotonic()
            if blocks := blocks_of(client, namespace, starts, pinned=pinned):
                is_any = True
                label = f"exporting {name_text(namespace)}"
                with progress(label, wanted=not invocation.as_json) as report:
                    outcome = export_namespace(client, store, namespace, blocks, report)
                _print(invocation, "exported", outcome, began)
    return 0 if is_any else print_not_found("no object to export", as_json=invocation.as_json)


@archive.command(
    "import",
    help="""Store the objects of an archive, parents first, except those that are stored already.

    Every byte is verified first. Exit code 1: not all objects are stored.
    """,
)
@client_command("replicas", namespace="Only this namespace; without it, all of the archive.")
@click.argument("url")
@timeout_option
def import_(invocation: Invocation, url: str, timeout_s: float) -> int:
    from kvstore.archive.object_store import ArchiveStore
    from kvstore.archive.transfer import ImportOutcome, import_namespace, indexes_of

    try:
        opened = ArchiveStore(url, timeout_s)
    except FileNotFoundError as error:
        return print_not_found(str(error), as_json=invocation.as_json)
    is_complete = True
    with contextlib.closing(opened) as store:
        indexes = indexes_of(store, invocation.given_namespace)
        if not indexes:
            return print_not_found(f"no such archive in {url}", as_json=invocation.as_json)
        with invocation.client() as client:
            for index in indexes:
                began = time.monotonic()
                outcome = ImportOutcome(index.namespace)
                label = f"importing {name_text(index.namespace)}"
                try:
                    with progress(label, wanted=not invocation.as_json) as report:
                        import_namespace(client, store, index, report, outcome)
                finally:
                    _print(invocation, "imported", outcome, began)
                is_complete &= not (outcome.not_imported or outcome.evicted)
    return 0 if is_complete else EXIT_FAILED


def _print(
    invocation: Invocation, verb: str, outcome: ExportOutcome | ImportOutcome, began: float
) -> None:
    seconds = time.monotonic() - began
    fields = asdict(outcome)
    if invocation.as_json:
        print_json(fields | {"seconds": round(seconds, 3)})
        return
    click.echo(
        f"{name_text(outcome.namespace)}: {verb} {outcome.objects:,} objects, "
        f"{size_text(outcome.bytes)}, in {seconds:.1f} s"
    )
    for key, text in NOTES.items():
        if fields.get(key):
            click.echo(f"  {fields[key]} {text}")
