"""The format of an archive: it returns what was packed, and rejects every damaged byte."""

from __future__ import annotations

import pytest

from kvstore.archive.bundles import (
    ArchiveIndex,
    Bundle,
    folder_of,
    index_content,
    pack,
    parse_index,
    parse_table,
    verify,
)
from kvstore.client.raw_objects import RawObject
from kvstore.errors import ArchiveError
from kvstore.limits import NAMESPACE_BYTES_MAX, Key

ROOT, LEAF = Key(b"\x00root"), Key(b"leaf")
OBJECTS = [
    (RawObject(ROOT, b'{"kind":"bytes"}', memoryview(b"payload")), b""),
    (RawObject(LEAF, b"\xff", memoryview(b"")), ROOT),
]


def read(content: bytes, bundle: Bundle) -> list[tuple[RawObject, bytes]]:
    view = memoryview(content)
    verify(view, bundle.checksum, "name")
    rows = parse_table(bundle, view[bundle.payload :], "name")
    return [(row.object_in(view), row.parent) for row in rows]


def test_objects_come_back() -> None:
    content, bundle = pack(OBJECTS)
    assert read(content, bundle) == OBJECTS
    index = ArchiveIndex("a/ü", [bundle, bundle])
    assert parse_index(index_content(index), "name") == index
    assert (index.objects, index.payload) == (4, 14)


def test_every_flipped_byte_and_every_truncation_is_found() -> None:
    content, bundle = pack(OBJECTS)
    index = index_content(ArchiveIndex("space", [bundle]))
    for number in range(len(content)):
        with pytest.raises(ArchiveError, match="name is corrupt"):
            read(flipped(content, number), bundle)
        with pytest.raises(ArchiveError, match="name is corrupt"):
            read(content[:number], bundle)
    for number in range(len(index) - 1):
        with pytest.raises(ArchiveError, match="name is corrupt"):
            parse_index(flipped(index, number), "name")
        with pytest.raises(ArchiveError, match="name is corrupt"):
            parse_index(index[:number], "name")


def flipped(content: bytes, number: int) -> bytes:
    return content[:number] + bytes([content[number] ^ 1]) + content[number + 1 :]


def test_an_index_of_another_format_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.archive.bundles.FORMAT", 2)
    content = index_content(ArchiveIndex("space", []))
    monkeypatch.undo()
    with pytest.raises(ArchiveError, match="name has format 2, this release reads 1"):
        parse_index(content, "name")


def test_folders_are_distinct_names_of_files() -> None:
    names = ["llama", "a/b", "a=2Fb", "..", ".", "ü", "a\nb", "n" * 128, "/" * NAMESPACE_BYTES_MAX]
    folders = [folder_of(name) for name in names]
    assert folders[:4] == ["llama", "a=2Fb", "a=3D2Fb", "=2E."]
    assert len({*folders}) == len(names)
    assert all(len(folder) < 255 and "/" not in folder for folder in folders)
    assert not {".", ".."} & {*folders}
