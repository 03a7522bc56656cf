"""``kvstore archive``: copies of namespaces in an object store."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import click

from kvstore.cli.invocation import Invocation, client_command
from kvstore.cli.json_output import print_json
from kvstore.cli.options import EXIT_FAILED, EXIT_NOT_FOUND, Duration, Group, print_json_error
from kvstore.cli.progress import progress
from kvstore.runtime.formatting import key_from_text, name_text, size_text

if TYPE_CHECKING:
    from kvstore.archive.transfer import ExportOutcome, ImportOutcome

EXAMPLE: Final = """\b
Examples:
  kvstore archive export s3://bucket/kv --namespace llama
  kvstore archive import s3://bucket/kv

\b
URLs: s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX, file:///DIR.
Credentials come from the environment: AWS_..., GOOGLE_..., AZURE_...
Needs: pip install 'obstore>=0.12' (the extra "archive").
"""

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
    "export",
    epilog="\b\nExamples:\n  kvstore archive export s3://bucket/kv\n"
    "  kvstore archive export file:///srv/kv --namespace llama --prefix hex:9f86 --pinned",
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
    given = "namespace" in invocation.given
    is_any = False
    opened = ArchiveStore(url, timeout_s, create=True)
    with contextlib.closing(opened) as store, invocation.client() as client:
        for namespace in [invocation.namespace] if given else namespaces_of(client):
            began = time.monotonic()
            blocks = blocks_of(client, namespace, starts, pinned=pinned)
            if not blocks:
                continue
            is_any = True
            label = f"exporting {name_text(namespace)}"
            with progress(label, wanted=not invocation.as_json) as report:
                outcome = export_namespace(client, store, namespace, blocks, report)
            _print_export(invocation, outcome, time.monotonic() - began)
    if is_any:
        return 0
    return _exit_not_found(invocation, f"no object to export{_of(invocation)}")


@archive.command(
    "import",
    epilog="\b\nExamples:\n  kvstore archive import s3://bucket/kv\n"
    "  kvstore archive import file:///srv/kv --namespace llama",
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
        return _exit_not_found(invocation, str(error))
    is_complete = True
    with contextlib.closing(opened) as store:
        given = invocation.namespace if "namespace" in invocation.given else None
        indexes = indexes_of(store, given)
        if not indexes:
            return _exit_not_found(invocation, f"no archive{_of(invocation)} in {url}")
        with invocation.client() as client:
            for index in indexes:
                began = time.monotonic()
                outcome = ImportOutcome(index.namespace, index.objects)
                label = f"importing {name_text(index.namespace)}"
                try:
                    with progress(label, wanted=not invocation.as_json) as report:
                        import_namespace(client, store, index, outcome, report)
                finally:
                    _print_import(invocation, outcome, time.monotonic() - began)
                is_complete &= not (outcome.missing or outcome.evicted)
    return 0 if is_complete else EXIT_FAILED


def _print_export(invocation: Invocation, outcome: ExportOutcome, seconds: float) -> None:
    fields = {
        "namespace": outcome.namespace,
        "objects": outcome.objects,
        "bytes": outcome.size,
        "missed": outcome.missed,
        "deleted": outcome.deleted,
        "warning": outcome.warning,
    }
    notes = {
        f"{outcome.missed:,} objects were evicted or removed before": outcome.missed,
        f"the earlier archive remains, or a part of it: {outcome.warning}": outcome.warning,
    }
    _print(invocation, "exported", fields, seconds, notes)


def _print_import(invocation: Invocation, outcome: ImportOutcome, seconds: float) -> None:
    fields = {
        "namespace": outcome.namespace,
        "objects": outcome.objects,
        "bytes": outcome.size,
        "stored_before": outcome.found,
        "not_imported": outcome.missing,
        "evicted": outcome.evicted,
    }
    notes = {
        f"{outcome.found:,} were stored before": outcome.found,
        f"{outcome.missing:,} were not imported": outcome.missing,
        f"{outcome.evicted:,} were evicted again: the pool is too small": outcome.evicted,
    }
    _print(invocation, "imported", fields, seconds, notes)


def _print(
    invocation: Invocation, verb: str, fields: dict[str, Any], seconds: float,
    notes: Mapping[str, object],
) -> None:  # fmt: skip
    if invocation.as_json:
        print_json(fields | {"seconds": round(seconds, 3)})
        return
    click.echo(
        f"{name_text(fields['namespace'])}: {verb} {fields['objects']:,} objects, "
        f"{size_text(fields['bytes'])}, in {seconds:.1f} s"
    )
    for note, applies in notes.items():
        if applies:
            click.echo(f"  {note}")


def _of(invocation: Invocation) -> str:
    return f" of {invocation.namespace}" if "namespace" in invocation.given else ""


def _exit_not_found(invocation: Invocation, message: str) -> int:
    if invocation.as_json:
        print_json_error("not_there", message)
    else:
        click.echo(f"kvstore: {message}", err=True)
    return EXIT_NOT_FOUND
