"""The private file of a segment: for the node's user alone, as long as the memory, and believed
before what clients can write."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.calls import NO_VERSION, Version
from kvstore.memory.header import EPOCH_OFFSET, MARK_OFFSET, epoch_checksum
from kvstore.memory.private_file import PrivateFile, PrivateState
from kvstore.memory.segment import OwnedSegment
from kvstore.memory.shm_entries import SHM_PREFIX, key_path, left_overs, remove_left
from kvstore.runtime.host import SHM_DIRECTORY

NAME = f"stamp-key-{os.getpid()}"
SHM_NAME = SHM_PREFIX + NAME
UUID = bytes(range(16))
MIB = 1 << 20
MARK = Version(7, 3)
LIE = Version(8, (1 << 64) - 1)


@pytest.fixture
def path() -> Iterator[Path]:
    path = Path(key_path(SHM_NAME))
    yield path
    with contextlib.suppress(IsADirectoryError):
        path.unlink(missing_ok=True)
    Path(SHM_DIRECTORY, SHM_NAME).unlink(missing_ok=True)


def kept(uuid: bytes = UUID) -> PrivateState:
    """What the file of a segment says after a start."""
    return PrivateFile(key_path(SHM_NAME), uuid).now


# --- the file ------------------------------------------------------------------------------------


def test_the_next_start_has_the_same_key(path: Path) -> None:
    file = PrivateFile(key_path(SHM_NAME), UUID)
    file.change(lambda now: now._replace(removal_watermark=MARK, epoch=9))
    assert kept() == file.now == PrivateState(UUID, file.now.key, MARK, 9)
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.usefixtures("path")
def test_another_segment_has_another_key_and_nothing_that_clients_can_write() -> None:
    first = kept()
    other = kept(UUID[::-1])
    assert other == PrivateState(UUID[::-1], other.key)
    assert other.key != first.key
    assert kept(UUID[::-1]) == other


@pytest.mark.parametrize("damage", ["short", "long", "readable", "link", "pipe", "other's"])
def test_a_file_that_others_may_have_made_is_replaced(
    path: Path, tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = kept().key
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
    made = kept()
    assert made == PrivateState(UUID, made.key)
    assert made.key != key
    monkeypatch.undo()
    assert kept() == made
    assert not path.is_symlink()


def test_a_file_that_cannot_be_written_is_no_more_and_ends_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What it says would be believed otherwise: an older mark."""
    file = PrivateFile(key_path(SHM_NAME), UUID)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING, "kvstore.node"):
        patched.setattr(os, "write", full)
        file.change(lambda now: now._replace(removal_watermark=MARK))
    assert "private_file_lost" in caplog.text
    assert not path.exists()


# --- beside the memory ---------------------------------------------------------------------------


def restarted(segment: OwnedSegment) -> OwnedSegment:
    segment.close(unlink=False)
    again = OwnedSegment.attach(NAME, MIB)
    assert again is not None
    return again


def lie(segment: OwnedSegment) -> None:
    """What any process can do that has the memory mapped to write."""
    words = segment.memory.cast("Q")
    words[MARK_OFFSET // 8], words[MARK_OFFSET // 8 + 1] = LIE
    words[EPOCH_OFFSET // 8], words[EPOCH_OFFSET // 8 + 1] = 99, epoch_checksum(99)
    words.release()


def test_what_clients_write_into_the_superblock_is_not_believed(path: Path) -> None:
    segment = OwnedSegment.create(NAME, MIB)
    segment.keep_private()
    segment.keep_removal_watermark(MARK)
    segment.keep_epoch(9)
    lie(segment)
    assert (segment.removal_watermark, segment.epoch) == (MARK, 9), "not by the node that runs"
    again = restarted(segment)
    again.keep_private()
    assert (again.removal_watermark, again.epoch) == (MARK, 9), "and not by the next one"
    assert kept(again.uuid).removal_watermark == MARK
    again.close()
    assert not path.exists()


@pytest.mark.parametrize("left_by_identity", [True, False])
@pytest.mark.usefixtures("path")
def test_memory_of_the_other_kind_is_discarded(
    caplog: pytest.LogCaptureFixture, *, left_by_identity: bool
) -> None:
    """Also memory of a hugetlbfs, which outlives the private file in the ``/dev/shm`` of a pod."""
    segment = OwnedSegment.create(NAME, MIB)
    if left_by_identity:
        segment.keep_private()
    segment.keep_removal_watermark(MARK)
    segment.keep_epoch(9)
    segment.close(unlink=False)
    for private, is_discarded in ((left_by_identity, False), (not left_by_identity, True)):
        again = OwnedSegment.attach(NAME, MIB, private=private)
        assert again is not None
        assert (again.uuid != segment.uuid) is is_discarded
        assert ("left_over_memory_discarded" in caplog.text) is is_discarded
        if private:
            again.keep_private()
        assert (again.removal_watermark, again.epoch) == (
            (NO_VERSION, 0) if is_discarded else (MARK, 9)
        )
        again.close(unlink=is_discarded)


@pytest.mark.usefixtures("path")
def test_memory_that_was_discarded_is_as_new() -> None:
    """It may be of another cluster, whose mark would make all memory of this one outdated."""
    segment = OwnedSegment.create(NAME, MIB)
    segment.keep_removal_watermark(MARK)
    segment.keep_epoch(9)
    segment.close(unlink=False)
    again = OwnedSegment.attach(NAME, MIB, discard=True)
    assert again is not None
    assert (again.removal_watermark, again.epoch) == (NO_VERSION, 0)
    again.close()


@pytest.mark.parametrize("unlink", [True, False])
def test_it_goes_with_the_entry(path: Path, *, unlink: bool) -> None:
    segment = OwnedSegment.create(NAME, MIB)
    segment.keep_private()
    segment.close(unlink=unlink)
    assert path.exists() is not unlink
    for left in left_overs():
        if left.name == NAME:
            assert remove_left(left)
    assert not path.exists()


# --- files of another user -----------------------------------------------------------------------
