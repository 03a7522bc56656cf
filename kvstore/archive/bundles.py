"""The format of an archive: an index per namespace, and bundles of its objects.

A bundle holds payloads one after another, then a table of them. Its name is its checksum, so a new
bundle never replaces another one. The index lists bundles such that parents come first. Table and
index are JSON. Every byte that is read is verified by a checksum (XXH3, 128 bits).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import xxhash

from kvstore.client.raw_objects import RawObject
from kvstore.errors import ArchiveError, KVStoreError
from kvstore.limits import Key, check_key, check_namespace
from kvstore.memory.header import DESCRIPTOR_BYTES_MAX

FORMAT: Final = 1
INDEX: Final = "index.json"
FOLDER_MAX: Final = 200
"""Characters of a readable folder name; file systems allow 255."""


class Bundle(NamedTuple):
    """One archive object, as the index lists it."""

    checksum: str
    size: int
    objects: int
    payload: int
    """Bytes before the table."""
    table_checksum: str

    @property
    def name(self) -> str:
        return f"{self.checksum}.bundle"


class ArchiveIndex(NamedTuple):
    namespace: str
    bundles: Sequence[Bundle]

    @property
    def objects(self) -> int:
        return sum(bundle.objects for bundle in self.bundles)

    @property
    def payload(self) -> int:
        return sum(bundle.payload for bundle in self.bundles)


class BundleRow(NamedTuple):
    """One object in a bundle."""

    key: Key
    parent: Key | None
    descriptor: bytes
    offset: int
    size: int

    def object_in(self, content: memoryview) -> RawObject:
        payload = content[self.offset : self.offset + self.size]
        return RawObject(self.key, self.descriptor, payload)


def folder_of(namespace: str) -> str:
    """Return the folder of a namespace: its name, with ``=XX`` for bytes that some store or file
    system rejects, or a checksum if that is too long."""
    text = re.sub(rb"[^A-Za-z0-9_.-]|^\.", _escaped, namespace.encode()).decode()
    return text if len(text) <= FOLDER_MAX else f"=={_checksum(namespace.encode())}"


def _escaped(found: re.Match[bytes]) -> bytes:
    return b"=%02X" % found[0][0]


def pack(objects: Sequence[tuple[RawObject, Key | None]]) -> tuple[bytes, Bundle]:
    """Return a bundle of objects and their parents, and its entry in the index."""
    rows: list[list[object]] = []
    offset = 0
    for (key, descriptor, payload), parent in objects:
        rows.append([key.hex(), parent and parent.hex(), descriptor.hex(), offset, len(payload)])
        offset += len(payload)
    table = json.dumps(rows, separators=(",", ":")).encode()
    content = b"".join([*(row.payload for row, _ in objects), table])
    return content, Bundle(_checksum(content), len(content), len(rows), offset, _checksum(table))


def verify(bundle: Bundle, content: memoryview, path: str) -> None:
    """Raise ArchiveError: these are not the bytes of the bundle."""
    if len(content) != bundle.size:
        raise corrupt(path, f"it has {len(content)} bytes, not {bundle.size}")
    if _checksum(content) != bundle.checksum:
        raise corrupt(path, "its checksum does not match")


def parse_table(bundle: Bundle, table: memoryview, path: str) -> list[BundleRow]:
    """Raises ArchiveError: these bytes are not the table of the bundle."""
    if _checksum(table) != bundle.table_checksum:
        raise corrupt(path, "it is truncated, or the checksum of its table does not match")
    try:
        rows = [_row(row, bundle.payload) for row in json.loads(bytes(table))]
    except (KVStoreError, ValueError, TypeError) as error:
        raise corrupt(path, f"its table is invalid: {error}") from error
    if len(rows) != bundle.objects:
        raise corrupt(path, f"its table has {len(rows)} objects, not {bundle.objects}")
    return rows


def _row(row: Sequence[Any], payload: int) -> BundleRow:
    key, parent, descriptor, offset, size = row
    described = bytes.fromhex(descriptor)
    if not (0 <= offset <= offset + size <= payload and len(described) <= DESCRIPTOR_BYTES_MAX):
        raise ValueError(f"object {key}")
    above = None if parent is None else check_key(bytes.fromhex(parent))
    return BundleRow(check_key(bytes.fromhex(key)), above, described, offset, size)


def index_content(index: ArchiveIndex) -> bytes:
    fields = {
        "format": FORMAT,
        "namespace": index.namespace,
        "objects": index.objects,
        "payload": index.payload,
        "bundles": [bundle._asdict() for bundle in index.bundles],
    }
    body = json.dumps(fields, indent=1).encode()
    return b"%s\n%s\n" % (body, _checksum(body).encode())


def parse_index(content: bytes, path: str) -> ArchiveIndex:
    """Raises ArchiveError: this is no index, or one of another release."""
    body, _, checksum = content.removesuffix(b"\n").rpartition(b"\n")
    if not body or _checksum(body) != checksum.decode(errors="replace"):
        raise corrupt(path, "it is truncated, or its checksum does not match")
    try:
        fields = json.loads(body)
        if fields["format"] != FORMAT:
            raise ArchiveError(
                f"{path} has format {fields['format']}, this release reads {FORMAT}",
                advice="Use the release that exported it.", object=path,
            )  # fmt: skip
        bundles = [Bundle(**bundle) for bundle in fields["bundles"]]
        namespace = check_namespace(fields["namespace"])
    except (KeyError, TypeError, ValueError) as error:
        raise corrupt(path, f"its content is invalid: {error}") from error
    return ArchiveIndex(namespace, bundles)


def corrupt(path: str, reason: str) -> ArchiveError:
    return ArchiveError(
        f"{path} is corrupt: {reason}. None of its bytes were stored",
        advice="Restore this archive object, or export again.", object=path,
    )  # fmt: skip


def _checksum(content: bytes | memoryview) -> str:
    return xxhash.xxh3_128_hexdigest(content)
