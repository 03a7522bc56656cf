"""Export of a namespace into an archive, and import from it. Memory: a few bundles."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

from kvstore.archive.bundles import (
    INDEX,
    ArchiveIndex,
    Bundle,
    BundleRow,
    corrupt,
    folder_of,
    index_content,
    pack,
    parse_index,
    parse_table,
    verify,
)
from kvstore.archive.object_store import ArchiveStore
from kvstore.calls import BlockStatus, PutOutcome
from kvstore.client.raw_objects import RawObject, get_raw, put_raw
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


class StoredBlock(NamedTuple):
    key: Key
    parent: Key | None
    size: int


@dataclass(slots=True)
class ExportOutcome:
    namespace: str
    objects: int = 0
    size: int = 0
    missed: int = 0
    """Objects that were evicted or removed before they were read."""
    deleted: int = 0
    """Archive objects of earlier exports that were deleted."""
    warning: str = ""
    """The reason why the previous archive, or a part of it, remains."""


@dataclass(slots=True)
class ImportOutcome:
    namespace: str
    archived: int
    objects: int = 0
    size: int = 0
    found: int = 0
    """Objects that were stored before, or that another client is storing."""
    evicted: int = 0
    """Imported objects that are not stored any more."""
    _keys: list[Key] = field(default_factory=list, repr=False)

    @property
    def missing(self) -> int:
        return self.archived - self.objects - self.found


# --- export ---------------------------------------------------------------------------------


def namespaces_of(client: Client) -> list[str]:
    """Return all namespaces with objects, except those of fleet records: these describe running
    engines."""
    names = {row.namespace for row in client.list_objects()}
    return sorted(name for name in names if not is_fleet(name))


def blocks_of(
    client: Client, namespace: str, prefixes: Sequence[Key] = (), *, pinned: bool = False
) -> list[StoredBlock]:
    """Return stored objects, each after its parent, and chain by chain.

    Args:
        prefixes: only objects whose keys begin with one of these, and their ancestors.
        pinned: only objects that are pinned, and their ancestors.
    """
    stored: dict[Key, StoredBlock] = {}
    known: set[bytes] = set()
    for prefix in prefixes or (b"",):
        rows = client.list_objects(namespace=namespace, prefix=prefix)
        keys = (row.key for row in rows if row.state != "being_written")
        while some := list(islice(keys, BLOCKS_MAX)):
            blocks = client.blocks(some, namespace=namespace)
            _add(stored, known, (row for row in blocks if row.pinned_ms or not pinned))
    if prefixes or pinned:
        for block in list(stored.values()):
            parent = block.parent
            while parent is not None and parent not in known:
                blocks = client.blocks([parent], above=BLOCKS_MAX, namespace=namespace)
                _add(stored, known, blocks)
                parent = Key(blocks[-1].parent) if blocks[-1].parent else None
    return list(_parents_first(stored))


def _add(stored: dict[Key, StoredBlock], known: set[bytes], blocks: Iterable[BlockStatus]) -> None:
    for row in blocks:
        known.add(row.key)
        if row.state == "complete":
            parent = Key(row.parent) if row.parent else None
            stored[row.key] = StoredBlock(row.key, parent, row.size)


def _parents_first(stored: dict[Key, StoredBlock]) -> Iterator[StoredBlock]:
    children: dict[Key | None, list[StoredBlock]] = {}
    for block in stored.values():
        children.setdefault(block.parent if block.parent in stored else None, []).append(block)
    waiting = children.get(None, [])[::-1]
    while waiting:
        block = waiting.pop()
        yield block
        waiting += reversed(children.get(block.key, ()))


def export_namespace(
    client: Client,
    store: ArchiveStore,
    namespace: str,
    blocks: Sequence[StoredBlock],
    on_progress: Progress,
) -> ExportOutcome:
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
        found = _get(client, namespace, list(parents))
        outcome.missed += len(run) - len(found)
        read += sum(block.size for block in run)
        if found:
            content, bundle = pack([(row, parents[row.key]) for row in found])
            del found
            while len(uploads) >= UPLOADS:
                uploads.popleft().result()
            uploads.append(store.put(f"{folder}/{bundle.name}", content))
            bundles.append(bundle)
        on_progress(read, total)
    for upload in uploads:
        upload.result()
    if not bundles:
        outcome.warning = "no object was read"
        return outcome
    index = ArchiveIndex(namespace, bundles)
    store.put(f"{folder}/{INDEX}", index_content(index)).result()
    outcome.objects, outcome.size = index.objects, index.payload
    try:
        kept = {INDEX, *(bundle.name for bundle in bundles)}
        outcome.deleted = store.delete_others(folder, kept).result()
    except ArchiveError as error:  # the export is complete
        outcome.warning = error.message
    return outcome


def _runs(blocks: Sequence[StoredBlock]) -> Iterator[list[StoredBlock]]:
    run: list[StoredBlock] = []
    size = 0
    for block in blocks:
        if run and (size + block.size > BUNDLE_BYTES or len(run) == BUNDLE_OBJECTS):
            yield run
            run, size = [], 0
        run.append(block)
        size += block.size
    if run:
        yield run


def _get(client: Client, namespace: str, keys: Sequence[Key]) -> list[RawObject]:
    """Return those of the objects that exist. A disk may need a second request."""
    rows = get_raw(client, namespace, keys)
    missed = [key for key, row in zip(keys, rows, strict=True) if row is None]
    if missed:
        again = dict(zip(missed, get_raw(client, namespace, missed), strict=True))
        rows = [row or again[key] for key, row in zip(keys, rows, strict=True)]
    return [row for row in rows if row is not None]


# --- import ---------------------------------------------------------------------------------


def indexes_of(store: ArchiveStore, namespace: str | None = None) -> list[ArchiveIndex]:
    """Return the index of one namespace, or of all in the archive; empty: there is none."""
    folders = store.folders().result() if namespace is None else [folder_of(namespace)]
    paths = [f"{folder}/{INDEX}" for folder in folders]
    contents = [(path, store.get(path).result()) for path in paths]
    return [
        parse_index(bytes(content), store.path_text(path))
        for path, content in contents
        if content is not None
    ]


class _Download(NamedTuple):
    bundle: Bundle
    rows: Sequence[BundleRow]
    """Rows that are not stored."""
    path: str
    content: Future[memoryview | None]


def import_namespace(
    client: Client, store: ArchiveStore, index: ArchiveIndex, outcome: ImportOutcome,
    on_progress: Progress,
) -> None:  # fmt: skip
    """Store what is not stored, parents first; ``outcome`` is valid also after an error.

    Raises:
        ArchiveError: an archive object is missing or corrupt; nothing of it was stored.
        NoSpaceError: the pool is too small.
    """
    done = 0
    sample: list[Key] = []
    try:
        for download, bundle in _downloads(client, store, index):
            outcome.found += bundle.objects
            if download is not None:
                outcome.found -= len(download.rows)
                _import_bundle(client, index.namespace, download, outcome)
                sample = [*sample, *outcome._keys[-1:]][:SAMPLED]
                if sample and not all(client.exists_many(sample, namespace=index.namespace)):
                    raise NoSpaceError(
                        f"the pool evicts what was imported into {index.namespace}",
                        advice="Add memory, or export fewer chains (--prefix, --pinned).",
                    )
            done += bundle.payload
            on_progress(done, index.payload)
    finally:
        with contextlib.suppress(UnavailableError):  # the error that ended the import counts
            for start in range(0, len(outcome._keys), BATCH_KEYS_MAX):
                keys = outcome._keys[start : start + BATCH_KEYS_MAX]
                stored = client.exists_many(keys, namespace=index.namespace)
                outcome.evicted += stored.count(False)


def _downloads(
    client: Client, store: ArchiveStore, index: ArchiveIndex
) -> Iterator[tuple[_Download | None, Bundle]]:
    """Yield bundles with objects that are not stored, and None for others. The next bundle is
    requested before the current one is yielded."""
    waiting: deque[tuple[_Download | None, Bundle]] = deque()
    for bundle in index.bundles:
        waiting.append((_download(client, store, index.namespace, bundle), bundle))
        if len(waiting) > 1:
            yield waiting.popleft()
    yield from waiting


def _download(
    client: Client, store: ArchiveStore, namespace: str, bundle: Bundle
) -> _Download | None:
    path = f"{folder_of(namespace)}/{bundle.name}"
    text = store.path_text(path)
    table = store.get(path, bundle.payload, bundle.size).result()
    if table is None:
        raise corrupt(text, "it does not exist")
    rows = parse_table(bundle, table, text)
    are_stored = client.exists_many([row.key for row in rows], namespace=namespace)
    rows = [row for row, is_stored in zip(rows, are_stored, strict=True) if not is_stored]
    return _Download(bundle, rows, text, store.get(path)) if rows else None


def _import_bundle(
    client: Client, namespace: str, download: _Download, outcome: ImportOutcome
) -> None:
    content = download.content.result()
    if content is None:
        raise corrupt(download.path, "it does not exist")
    verify(download.bundle, content, download.path)
    for run in _put_runs(download.rows):
        give_up = time.monotonic() + SPACE_S
        rows: Sequence[BundleRow] = run
        while rows := _put(client, namespace, rows, content, outcome):
            if time.monotonic() >= give_up:
                raise NoSpaceError(
                    f"the pool has no space for more of {namespace}",
                    advice="Add memory, or wait for leases and pins to end; then import again.",
                )
            time.sleep(PAUSE_S)


def _put(
    client: Client,
    namespace: str,
    rows: Sequence[BundleRow],
    content: memoryview,
    outcome: ImportOutcome,
) -> list[BundleRow]:
    """Store a chain, or objects with the same parent; returns those without space."""
    chain = len(rows) > 1 and rows[1].parent == rows[0].key
    objects = [row.object_in(content) for row in rows]
    outcomes = put_raw(client, namespace, objects, parent=rows[0].parent, chain=chain)
    remaining: list[BundleRow] = []
    for row, result in zip(rows, outcomes, strict=True):
        if result is PutOutcome.STORED:
            outcome.objects += 1
            outcome.size += row.size
            outcome._keys.append(row.key)
        elif result is PutOutcome.NO_SPACE:
            remaining.append(row)
        else:
            outcome.found += 1
    return remaining


def _put_runs(rows: Sequence[BundleRow]) -> Iterator[list[BundleRow]]:
    """Split rows into chains, and runs of objects with the same parent."""
    run: list[BundleRow] = []
    for row in rows:
        if run:
            is_chain = row.parent == run[-1].key
            is_sibling = row.parent == run[-1].parent
            was_chain = len(run) == 1 or run[1].parent == run[0].key
            was_sibling = len(run) == 1 or not was_chain
            if not ((is_chain and was_chain) or (is_sibling and was_sibling)):
                yield run
                run = []
        run.append(row)
    if run:
        yield run
