"""Files that are replaced while the process runs: what is read, when, and what is refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.errors import ConfigError
from kvstore.runtime import watched_files
from kvstore.runtime.watched_files import (
    AGAIN_S,
    LOOK_S,
    REST_S,
    WatchedFile,
    read_file,
    refused_files,
)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(watched_files, "uptime", found)
    return found


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_text("1")
    return path


def watched(path: Path) -> WatchedFile[int]:
    def load() -> int:
        try:
            return int(read_file(path, "number", bytes_max=8))
        except ValueError:
            raise ConfigError(f"{path} is no number") from None

    return WatchedFile("number", str(path), load)


def test_new_content_counts_once_it_is_at_rest(path: Path, clock: Clock) -> None:
    """It was read in the moment in which a copy had made it empty, or had written its beginning."""
    file = watched(path)
    for content in ("2", "23", "234"):
        path.write_text(content)
        clock.now += LOOK_S
        assert file.value == 1
    clock.now += REST_S
    assert file.value == 234


def test_what_changes_while_it_is_read_does_not_count(path: Path, clock: Clock) -> None:
    file = watched(path)
    load = file._load

    def late() -> int:
        found = load()
        path.write_text("333")
        return found

    path.write_text("2")
    file._load = late
    for _ in range(2):
        clock.now += LOOK_S
        assert file.value == 1
    file._load = load
    for _ in range(2):
        clock.now += LOOK_S
        assert file.value in (1, 333)
    assert file.value == 333


def no_number(path: Path) -> None:
    path.write_text("x")


def too_long(path: Path) -> None:
    path.write_text("000000002")


def gone(path: Path) -> None:
    path.unlink()


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage", [no_number, too_long, gone, pipe, device, folder])
def test_what_cannot_be_used_changes_nothing_and_is_reported_each_minute(
    path: Path, clock: Clock, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None]
) -> None:
    """A longer file was cut without a word, and a pipe held up who read it."""
    file = watched(path)
    damage(path)
    with pytest.raises(ConfigError):
        watched(path)
    for _ in range(int(1.5 * AGAIN_S / LOOK_S)):
        clock.now += LOOK_S
        assert file.value == 1
    said = [record.getMessage() for record in caplog.records]
    assert [line.split()[:2] for line in said] == [["file_refused", "setting=number"]] * 2
    assert refused_files()["number"] == 1
    if path.exists():
        path.rename(path.with_name("old"))
    path.write_text("2")
    for _ in range(2):
        clock.now += LOOK_S
        assert file.value in (1, 2)
    assert file.value == 2
    assert refused_files()["number"] == 0
