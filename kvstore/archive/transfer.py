"""Export of a namespace into an archive, and import from it. Memory: a few bundles."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

from kvstore.archive.bundles import (
    INDEX,
    ArchiveIndex,
    Bundle,
    BundleRow,
    folder_of,
    index_content,
    pack,
    parse_index,
    parse_table,
    verify,
)
from kvstore.archive.object_store import ArchiveStore
from kvstore.calls import BlockStatus, PutOutcome
from kvstore.client.raw_objects import get_raw, put_raw
from kvstore.errors import ArchiveError, NoSpaceError, UnavailableError
from kvstore.limits import BATCH_KEYS_MAX, BLOCKS_MAX, Key, is_fleet

if TYPE_CHECKING:
    from kvstore import Client

BUNDLE_BYTES: Final = 64 << 20
BUNDLE_OBJECTS: Final = 4_096
UPLOADS: Final = 2
"""Bundles that are being written while the next one is read from the store."""
SPACE_S: Final = 12.0
"""Longest wait for space: leases of readers last 10 s."""
PAUSE_S: Final = 0.5
SAMPLED: Final = 512
"""Imported objects whose eviction ends an import."""

Progress = Callable[[int, int], None]


@dataclass(slots=True)
class ExportOutcome:
    namespace: str
    objects: int = 0
    bytes: int = 0
    missed: int = 0
    """Objects that were evicted or removed before they were read."""
    deleted: int = 0
    """Archive objects of earlier exports that were deleted."""
    warning: str = ""
    """The reason why the previous archive, or a part of it, remains."""


@dataclass(slots=True)
class ImportOutcome:
    namespace: str
    objects: int = 0
    bytes: int = 0
    stored_before: int = 0
    """Objects that were stored before, or that another client is storing."""
    not_imported: int = 0
    evicted: int = 0
    """Imported objects that are not stored any more."""


# --- export ---------------------------------------------------------------------------------


def namespaces_of(client: Client) -> list[str]:
    """Return all namespaces with objects, except those of fleet records: these describe running
    engines."""
    names = {row.namespace for row in client.list_objects()}
    return sorted(name for name in names if not is_fleet(name))


def blocks_of(
    client: Client, namespace: str, prefixes: Sequence[Key], *, pinned: bool
) -> list[BlockStatus]:
    """Return stored objects, each after its parent, and chain by chain.

    Args:
        prefixes: only objects whose keys begin with one of these, and their ancestors.
        pinned: only objects that are pinned, and their ancestors.
    """
    blocks: dict[bytes, BlockStatus] = {}
    for prefix in prefixes or (b"",):
        keys = (row.key for row in client.list_objects(namespace=namespace, prefix=prefix))
        while some := list(islice(keys, BLOCKS_MAX)):
            rows = client.blocks(some, namespace=namespace)
            blocks |= {row.key: row for row in rows if row.pinned_ms or not pinned}
    for block in list(blocks.values()):
        while block.parent and block.parent not in blocks:
            parent = [Key(block.parent)]
            rows = client.blocks(parent, above=BLOCKS_MAX, namespace=namespace)
            blocks |= {row.key: row for row in rows}
            block = rows[-1]
    stored = {key: row for key, row in blocks.items() if row.state in ("complete", "on_disk")}
    return list(_parents_first(stored))


def _parents_first(blocks: dict[bytes, BlockStatus]) -> Iterator[BlockStatus]:
    children: dict[bytes, list[BlockStatus]] = {}
    for block in blocks.values():
        children.setdefault(block.parent if block.parent in blocks else b"", []).append(block)
    waiting = children.get(b"", [])[::-1]
    while waiting:
        yield (block := waiting.pop())
        waiting += reversed(children.get(block.key, ()))


def export_namespace(
    client: Client, store: ArchiveStore, namespace: str, blocks: Sequence[BlockStatus],
    on_progress: Progress,
) -> ExportOutcome:  # fmt: skip
    """Write bundles of these objects, then the index, then delete what no index names any more.

    Raises:
        ArchiveError: the previous index and its bundles are as they were.
    """
    outcome = ExportOutcome(namespace)
    folder = folder_of(namespace)
    total, read = sum(block.size for block in blocks), 0
    bundles: list[Bundle] = []
    uploads: deque[Future[object]] = deque()
    for run in _runs(blocks):
        parents = {block.key: block.parent for block in run}
        found = {row.key: row for row in get_raw(client, namespace, list(parents))}
        if missed := [key for key in parents if key not in found]:  # a disk may need a second call
            found |= {row.key: row for row in get_raw(client, namespace, missed)}
        outcome.missed += len(run) - len(found)
        if found:
            content, bundle = pack([(found[key], parents[key]) for key in parents if key in found])
            del found
            if len(uploads) == UPLOADS:
                uploads.popleft().result()
            uploads.append(store.put(f"{folder}/{bundle.name}", content))
            bundles.append(bundle)
        read += sum(block.size for block in run)
        on_progress(read, total)
    for upload in uploads:
        upload.result()
    if not bundles:
        outcome.warning = "no object was read"
        return outcome
    index = ArchiveIndex(namespace, bundles)
    store.put(f"{folder}/{INDEX}", index_content(index)).result()
    outcome.objects, outcome.bytes = index.objects, index.payload
    kept = {INDEX, *(bundle.name for bundle in bundles)}
    try:
        if others := [f"{folder}/{name}" for name in store.names(folder) if name not in kept]:
            store.delete(others)
        outcome.deleted = len(others)
    except ArchiveError as error:  # the export is complete
        outcome.warning = error.message
    return outcome


def _runs(blocks: Sequence[BlockStatus]) -> Iterator[list[BlockStatus]]:
    run: list[BlockStatus] = []
    size = 0
    for block in blocks:
        if run and (size + block.size > BUNDLE_BYTES or len(run) == BUNDLE_OBJECTS):
            yield run
            run, size = [], 0
        run.append(block)
        size += block.size
    if run:
        yield run


# --- import ---------------------------------------------------------------------------------


def indexes_of(store: ArchiveStore, namespace: str | None = None) -> list[ArchiveIndex]:
    """Return the index of one namespace, or of all in the archive; empty: there is none."""
    folders = store.folders() if namespace is None else [folder_of(namespace)]
    paths = [f"{folder}/{INDEX}" for folder in folders if INDEX in store.names(folder)]
    return [parse_index(bytes(store.get(path).result()), store.path_text(path)) for path in paths]


class _Download(NamedTuple):
    bundle: Bundle
    rows: Sequence[BundleRow]
    """Rows that are not stored; empty: the bundle is not read."""
    path: str
    content: Future[memoryview] | None


def import_namespace(
    client: Client, store: ArchiveStore, index: ArchiveIndex, on_progress: Progress,
    outcome: ImportOutcome,
) -> None:  # fmt: skip
    """Store what is not stored, parents first; ``outcome`` is valid also after an error.

    Raises:
        ArchiveError: an archive object is missing or corrupt; nothing of it was stored.
        NoSpaceError: the pool is too small.
    """
    done = 0
    imported: list[Key] = []
    sample: list[Key] = []
    downloads = (_download(client, store, index.namespace, bundle) for bundle in index.bundles)
    try:
        following = next(downloads, None)
        while following is not None:
            download, following = following, next(downloads, None)
            outcome.stored_before += download.bundle.objects - len(download.rows)
            if download.content is not None:
                _import_bundle(client, index.namespace, download, outcome, imported)
                sample = [*sample, *imported[-1:]][:SAMPLED]
                if sample and not all(client.exists_many(sample, namespace=index.namespace)):
                    raise NoSpaceError(
                        f"the pool evicts what was imported into {index.namespace}",
                        advice="Add memory, or export fewer chains (--prefix, --pinned).",
                    )
            done += download.bundle.payload
            on_progress(done, index.payload)
    finally:
        outcome.not_imported = index.objects - outcome.objects - outcome.stored_before
        with contextlib.suppress(UnavailableError):  # the error that ended the import counts
            while keys := [imported.pop() for _ in imported[:BATCH_KEYS_MAX]]:
                outcome.evicted += client.exists_many(keys, namespace=index.namespace).count(False)


def _download(client: Client, store: ArchiveStore, namespace: str, bundle: Bundle) -> _Download:
    """Read the table of a bundle, and begin to read the bundle if some object is not stored."""
    path = f"{folder_of(namespace)}/{bundle.name}"
    text = store.path_text(path)
    rows = parse_table(bundle, store.get(path, bundle.payload, bundle.size).result(), text)
    are_stored = client.exists_many([row.key for row in rows], namespace=namespace)
    rows = [row for row, is_stored in zip(rows, are_stored, strict=True) if not is_stored]
    return _Download(bundle, rows, text, store.get(path) if rows else None)


def _import_bundle(
    client: Client, namespace: str, download: _Download, outcome: ImportOutcome,
    imported: list[Key],
) -> None:  # fmt: skip
    assert download.content is not None
    content = download.content.result()
    verify(content, download.bundle.checksum, download.path)
    for rows in _put_runs(download.rows):
        remaining = rows
        give_up = time.monotonic() + SPACE_S
        while remaining := _put(client, namespace, remaining, content, outcome, imported):
            if time.monotonic() >= give_up:
                raise NoSpaceError(
                    f"the pool has no space for more of {namespace}",
                    advice="Add memory, or wait for leases and pins to end; then import again.",
                )
            time.sleep(PAUSE_S)


def _put(
    client: Client, namespace: str, rows: Sequence[BundleRow], content: memoryview,
    outcome: ImportOutcome, imported: list[Key],
) -> list[BundleRow]:  # fmt: skip
    """Store a chain, or objects with the same parent; return those without space."""
    chain = len(rows) > 1 and rows[1].parent == rows[0].key
    objects = [row.object_in(content) for row in rows]
    outcomes = put_raw(client, namespace, objects, parent=rows[0].parent, chain=chain)
    remaining: list[BundleRow] = []
    for row, result in zip(rows, outcomes, strict=True):
        if result is PutOutcome.STORED:
            outcome.objects += 1
            outcome.bytes += row.size
            imported.append(row.key)
        elif result is PutOutcome.NO_SPACE:
            remaining.append(row)
        else:
            outcome.stored_before += 1
    return remaining


def _put_runs(rows: Sequence[BundleRow]) -> Iterator[Sequence[BundleRow]]:
    """Split rows into chains, and runs of objects with the same parent."""
    begin = 0
    while begin < len(rows):
        end = begin + 1
        while end < len(rows) and rows[end].parent == rows[end - 1].key:
            end += 1
        if end == begin + 1:
            while end < len(rows) and rows[end].parent == rows[begin].parent:
                end += 1
        yield rows[begin:end]
        begin = end
