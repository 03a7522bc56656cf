"""The format of an archive: an index per namespace, and bundles of its objects.

A bundle holds payloads one after another, then a table of them. Its name is its checksum, so a new
bundle never replaces another one. The index lists bundles such that parents come first. Table and
index are JSON. Every byte that is read is verified by a checksum (XXH3, 128 bits).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from xxhash import xxh3_128_hexdigest

from kvstore.client.raw_objects import RawObject
from kvstore.errors import ArchiveError
from kvstore.limits import Key

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
    parent: bytes
    """Empty: a root."""
    descriptor: bytes
    offset: int
    size: int

    def object_in(self, content: memoryview) -> RawObject:
        payload = content[self.offset : self.offset + self.size]
        return RawObject(self.key, self.descriptor, payload)


def folder_of(namespace: str) -> str:
    """Return the folder of a namespace: its name, with ``=XX`` for bytes that some store or file
    system rejects, or a checksum if that is too long."""
    name = namespace.encode()
    text = re.sub(rb"[^A-Za-z0-9_.-]|^\.", lambda found: b"=%02X" % ord(found[0]), name).decode()
    return text if len(text) <= FOLDER_MAX else f"=={xxh3_128_hexdigest(name)}"


def pack(objects: Sequence[tuple[RawObject, bytes]]) -> tuple[bytes, Bundle]:
    """Return a bundle of objects and their parents, and its entry in the index."""
    rows: list[list[object]] = []
    offset = 0
    for (key, descriptor, payload), parent in objects:
        rows.append([key.hex(), parent.hex(), descriptor.hex(), offset, len(payload)])
        offset += len(payload)
    table = json.dumps(rows, separators=(",", ":")).encode()
    content = b"".join([*(row.payload for row, _ in objects), table])
    checksums = xxh3_128_hexdigest(content), xxh3_128_hexdigest(table)
    return content, Bundle(checksums[0], len(content), len(rows), offset, checksums[1])


def verify(content: bytes | memoryview, checksum: str, path: str) -> None:
    """Raise ArchiveError: these bytes have another checksum."""
    if xxh3_128_hexdigest(content) != checksum:
        raise ArchiveError(
            f"{path} is corrupt: it is truncated, or its checksum does not match. None of its "
            "bytes were stored",
            advice="Restore this archive object, or export again.", object=path,
        )  # fmt: skip


def parse_table(bundle: Bundle, table: memoryview, path: str) -> list[BundleRow]:
    """Raises ArchiveError: these bytes are not the table of the bundle."""
    verify(table, bundle.table_checksum, path)
    return [
        BundleRow(Key(bytes.fromhex(key)), bytes.fromhex(parent), bytes.fromhex(descriptor), *span)
        for key, parent, descriptor, *span in json.loads(bytes(table))
    ]


def index_content(index: ArchiveIndex) -> bytes:
    bundles = [bundle._asdict() for bundle in index.bundles]
    fields = {"format": FORMAT, "namespace": index.namespace, "bundles": bundles}
    body = json.dumps(fields, indent=1).encode()
    return b"%s\n%s\n" % (body, xxh3_128_hexdigest(body).encode())


def parse_index(content: bytes, path: str) -> ArchiveIndex:
    """Raises ArchiveError: this is no index, or one of another release."""
    body, _, checksum = content.removesuffix(b"\n").rpartition(b"\n")
    verify(body, checksum.decode(errors="replace"), path)
    fields = json.loads(body)
    if fields["format"] != FORMAT:
        raise ArchiveError(
            f"{path} has format {fields['format']}, this release reads {FORMAT}",
            advice="Use the release that exported it.", object=path,
        )  # fmt: skip
    return ArchiveIndex(fields["namespace"], [Bundle(**bundle) for bundle in fields["bundles"]])
