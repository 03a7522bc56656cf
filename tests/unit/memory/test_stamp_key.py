"""The file with the key of a segment's stamps: for the node's user alone, as long as the memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.errors import StartupError
from kvstore.memory import entries
from kvstore.memory.entries import SHM_PREFIX, key_path, left_overs, remove_left
from kvstore.memory.segment import NodeSegment
from kvstore.memory.stamp_key import keep_stamp_key, note_open

NAME = f"stamp-key-{os.getpid()}"
SHM_NAME = SHM_PREFIX + NAME
UUID = bytes(range(16))
MIB = 1 << 20


@pytest.fixture
def path() -> Iterator[Path]:
    path = Path(key_path(SHM_NAME))
    yield path
    path.unlink(missing_ok=True)


def kept(uuid: bytes) -> bytes:
    """The key; the memory is not open."""
    key, is_open = keep_stamp_key(SHM_NAME, uuid, attached=False)
    assert not is_open
    return key


def test_the_next_start_has_the_same_key(path: Path) -> None:
    key = kept(UUID)
    assert len(key) == 16
    assert kept(UUID) == key
    assert path.stat().st_mode & 0o777 == 0o600


def test_another_segment_has_another_key(path: Path) -> None:
    key = kept(UUID)
    other = kept(UUID[::-1])
    assert other != key
    assert kept(UUID[::-1]) == other
    assert path.read_bytes() == UUID[::-1] + other + b"\0"


@pytest.mark.parametrize("damage", ["short", "long", "readable", "link", "pipe", "other's"])
def test_a_file_that_others_may_have_made_is_replaced(
    path: Path, tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = kept(UUID)
    match damage:
        case "short":
            path.write_bytes(path.read_bytes()[:-1])
        case "long":
            path.write_bytes(path.read_bytes() + b"x")
        case "readable":
            path.chmod(0o640)
        case "link":
            elsewhere = tmp_path / "key"
            elsewhere.touch(mode=0o600)
            elsewhere.write_bytes(path.read_bytes())
            path.unlink()
            path.symlink_to(elsewhere)
        case "pipe":
            path.unlink()
            os.mkfifo(path, 0o600)
        case _:
            uid = os.geteuid()
            monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    made = kept(UUID)
    assert made != key
    monkeypatch.undo()
    assert kept(UUID) == made
    assert not path.is_symlink()


def test_a_key_that_cannot_be_kept_stops_the_start(path: Path) -> None:
    path.mkdir()
    try:
        with pytest.raises(StartupError, match="cannot be kept"):
            kept(UUID)
    finally:
        path.rmdir()


@pytest.mark.parametrize("unlink", [True, False])
def test_it_goes_with_the_entry(path: Path, *, unlink: bool) -> None:
    segment = NodeSegment.create(NAME, MIB)
    kept(segment.uuid)
    segment.close(unlink=unlink)
    assert path.exists() is not unlink
    for left in left_overs():
        if left.name == NAME:
            assert remove_left(left)
    assert not path.exists()


def test_its_name_is_no_segments(path: Path) -> None:
    kept(UUID)
    assert not path.name.startswith(entries.SHM_PREFIX)
    assert not [left for left in left_overs() if left.path == str(path)]


@pytest.mark.usefixtures("path")
def test_memory_of_a_process_without_an_identity_is_open_until_it_is_noted_otherwise() -> None:
    key, is_open = keep_stamp_key(SHM_NAME, UUID, attached=True)
    assert is_open
    assert keep_stamp_key(SHM_NAME, UUID, attached=True) == (key, True)
    for wanted in (False, True, False):
        note_open(SHM_NAME, is_open=wanted)
        assert keep_stamp_key(SHM_NAME, UUID, attached=True) == (key, wanted)


def test_memory_beside_a_key_of_another_is_not_open(path: Path) -> None:
    """Who has the memory mapped can write another uuid into it."""
    kept(UUID)
    assert not keep_stamp_key(SHM_NAME, UUID[::-1], attached=True)[1]
    path.write_bytes(b"short")
    assert not keep_stamp_key(SHM_NAME, UUID, attached=True)[1]
