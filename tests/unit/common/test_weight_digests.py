"""Whole files of weights are hashed once, and what is remembered of them is never wrong."""

from __future__ import annotations

import json
import os
import shutil
import stat
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from xxhash import xxh3_128

from kvstore.connectors.common import weight_digests
from kvstore.connectors.common.weight_digests import (
    FILES_MAX,
    PIECE_BYTES,
    DigestCache,
    cache_folder,
    digest_files,
)
from tests.support.processes import run_python

AN_HOUR_NS = 3_600_000_000_000


def later() -> int:
    """A time at which every file of a test has quiesced."""
    return time.time_ns() + AN_HOUR_NS


class Hashing:
    """Counts the files that are hashed, in place of ``xxh3_128``."""

    def __init__(self) -> None:
        self.files = 0
        self.meanwhile: Callable[[], object] = lambda: None

    def __call__(self, first: bytes) -> Hasher:
        self.files += 1
        return Hasher(self, first)


class Hasher:
    def __init__(self, hashing: Hashing, first: bytes) -> None:
        self._hashing = hashing
        self._hasher = xxh3_128(first)
        self.intdigest = self._hasher.intdigest

    def update(self, piece: memoryview) -> None:
        self._hasher.update(piece)
        self._hashing.meanwhile()


@pytest.fixture
def hashing(monkeypatch: pytest.MonkeyPatch) -> Hashing:
    hashing = Hashing()
    monkeypatch.setattr(weight_digests, "xxh3_128", hashing)
    return hashing


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"weights")
    return path


@pytest.fixture
def remembered(tmp_path: Path) -> DigestCache:
    return DigestCache(tmp_path / "cache" / "kvstore", now_ns=later)


@pytest.fixture
def kept(tmp_path: Path, file: Path, remembered: DigestCache, hashing: Hashing) -> Path:
    """The file in which ``file`` is remembered."""
    digest_files([file], remembered)
    hashing.files = 0
    [path] = (tmp_path / "cache" / "kvstore").iterdir()
    return path


def digest_of(file: Path, remembered: DigestCache) -> str:
    [(size, digest, _)] = digest_files([file], remembered)
    assert size == file.stat().st_size
    assert digest == xxh3_128(file.read_bytes()).hexdigest()
    return digest


def test_every_byte_is_hashed(tmp_path: Path) -> None:
    for size in (0, 1, PIECE_BYTES, 3 * PIECE_BYTES + 1):
        file = tmp_path / f"{size}.gguf"
        file.write_bytes(os.urandom(size))
        digest_of(file, DigestCache(None))


def test_what_has_not_changed_is_not_read_again(
    file: Path, remembered: DigestCache, hashing: Hashing
) -> None:
    first = digest_of(file, remembered)
    assert digest_of(file, remembered) == first
    assert hashing.files == 1


@pytest.mark.usefixtures("kept")
def test_a_link_to_a_file_is_the_same_file(
    tmp_path: Path, file: Path, remembered: DigestCache, hashing: Hashing
) -> None:
    (tmp_path / "link").symlink_to(file)
    digest_of(tmp_path / "link", remembered)
    assert hashing.files == 0


def longer(file: Path) -> None:
    with file.open("ab") as opened:
        opened.write(b"!")


def written_to(file: Path) -> None:
    file.write_bytes(b"WEIGHTS")


def written_to_and_its_time_put_back(file: Path) -> None:
    before = file.stat()
    file.write_bytes(b"WEIGHTS")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def touched(file: Path) -> None:
    os.utime(file, ns=(1, 1))


def replaced_by_one_of_the_same_age(file: Path) -> None:
    shutil.copy2(file, file.with_suffix(".new"))
    file.with_suffix(".new").replace(file)


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize(
    "change",
    [
        longer,
        written_to,
        written_to_and_its_time_put_back,
        touched,
        replaced_by_one_of_the_same_age,
    ],
)
def test_what_may_have_changed_is_read_again(
    file: Path, remembered: DigestCache, hashing: Hashing, change: Callable[[Path], None]
) -> None:
    change(file)
    digest_of(file, remembered)
    assert hashing.files == 1


def test_a_file_that_was_just_written_is_not_remembered(
    tmp_path: Path, file: Path, hashing: Hashing
) -> None:
    """The next write may leave its size and times as they are."""
    written_ns = file.stat().st_ctime_ns
    for age_ns in (-AN_HOUR_NS, 0, weight_digests.QUIESCED_NS):
        remembered = DigestCache(tmp_path, now_ns=lambda age_ns=age_ns: written_ns + age_ns)  # type: ignore[misc]
        digest_of(file, remembered)
        digest_of(file, remembered)
    assert hashing.files == 6


def test_a_file_that_changes_while_it_is_hashed_is_not_remembered(
    tmp_path: Path, file: Path, remembered: DigestCache, hashing: Hashing
) -> None:
    hashing.meanwhile = lambda: file.write_bytes(b"WEIGHTS")
    digest_files([file], remembered)
    assert not (tmp_path / "cache").exists()
    hashing.meanwhile = lambda: None
    digest_of(file, remembered)


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize(
    "field", ["st_dev", "st_ino", "st_size", "st_mtime_ns", "st_ctime_ns", "st_atime_ns"]
)
def test_each_part_of_a_files_state_counts(
    file: Path, remembered: DigestCache, hashing: Hashing, monkeypatch: pytest.MonkeyPatch,
    field: str,
) -> None:  # fmt: skip
    """But not when it was read last."""
    fstat = os.fstat

    def changed(descriptor: int) -> Any:
        found = fstat(descriptor)
        fields = {name: getattr(found, name) for name in dir(found) if name.startswith("st_")}
        return SimpleNamespace(**{**fields, field: fields[field] + 1})

    monkeypatch.setattr(os, "fstat", changed)
    digest_files([file], remembered)
    assert hashing.files == (0 if field == "st_atime_ns" else 1)


@pytest.mark.parametrize(("same_times", "is_remembered"), [(True, False), (False, True)])
def test_a_file_of_an_image_is_not_remembered(
    file: Path, remembered: DigestCache, hashing: Hashing, monkeypatch: pytest.MonkeyPatch,
    same_times: bool, is_remembered: bool,
) -> None:  # fmt: skip
    """Images of other weights, mounted one after the other, have the same inodes and times."""
    flags = os.statvfs_result((0,) * 8 + (os.ST_RDONLY, 255))
    monkeypatch.setattr(os, "fstatvfs", lambda descriptor: flags)
    if not same_times:
        touched(file)
    digest_of(file, remembered)
    digest_of(file, remembered)
    assert (hashing.files == 1) is is_remembered


def test_only_its_user_reads_what_is_remembered(kept: Path) -> None:
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert stat.S_IMODE(kept.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    "damaged",
    [
        b"", b"{", b"\xff", b"[1]", b"{}", b"[" * 100_000, b'{"state": 1}',
        b'{"state": "not a digest"}', b" " * (2 << 20) + b"{}",
    ],
)  # fmt: skip
def test_a_damaged_file_is_begun_again(
    file: Path, kept: Path, remembered: DigestCache, hashing: Hashing, damaged: bytes
) -> None:
    kept.write_bytes(damaged)
    for _ in range(2):
        digest_of(file, remembered)
    assert hashing.files == 1
    assert len(json.loads(kept.read_bytes())) == 1


def test_without_a_folder_files_are_read_each_time(
    tmp_path: Path, file: Path, hashing: Hashing
) -> None:
    (tmp_path / "no-folder").write_bytes(b"")
    for folder in (None, tmp_path / "no-folder" / "kvstore"):
        for _ in range(2):
            digest_of(file, DigestCache(folder, now_ns=later))
    assert hashing.files == 4


def test_a_full_disk_leaves_what_was_remembered(
    tmp_path: Path, file: Path, kept: Path, remembered: DigestCache,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    before = kept.read_bytes()
    monkeypatch.setattr(os, "fsync", full)
    other = tmp_path / "other.bin"
    other.write_bytes(b"other")
    digest_of(other, remembered)
    assert kept.read_bytes() == before
    assert list(kept.parent.iterdir()) == [kept]


def test_the_oldest_are_forgotten(kept: Path, remembered: DigestCache) -> None:
    [first] = json.loads(kept.read_bytes())
    kept.write_text(json.dumps({f"{at}": "1" * 32 for at in range(FILES_MAX)}))
    remembered.add(first, "2" * 32)
    assert len(json.loads(kept.read_bytes())) == FILES_MAX
    assert remembered.get("0") is None
    assert remembered.get(first) == "2" * 32
    assert kept.stat().st_size < weight_digests.FILE_BYTES_MAX // 4


def test_what_another_process_hashes_meanwhile_is_not_read(
    tmp_path: Path, remembered: DigestCache, hashing: Hashing
) -> None:
    files = [tmp_path / f"{at}.safetensors" for at in range(8)]
    for file in files:
        file.write_bytes(file.name.encode())

    def another_process() -> None:
        hashing.meanwhile = lambda: None
        digest_files(files, remembered)

    hashing.meanwhile = another_process
    assert [each.digest for each in digest_files(files, remembered)] == [
        xxh3_128(file.read_bytes()).hexdigest() for file in files
    ]
    assert hashing.files == len(files) + 1  # both have begun with one


AT_ONCE = """
import sys, time
from pathlib import Path
from kvstore.connectors.common.weight_digests import DigestCache, digest_files
folder, *files = map(Path, sys.argv[1:])
later = DigestCache(folder, now_ns=lambda: time.time_ns() + 10**13)
for _ in range(5):
    found = digest_files(files, later)
print(*[each.digest for each in found])
"""


def test_two_processes_at_once(tmp_path: Path) -> None:
    files = [tmp_path / f"{at}.bin" for at in range(40)]
    for file in files:
        file.write_bytes(os.urandom(10_000))
    right = [xxh3_128(file.read_bytes()).hexdigest() for file in files]
    folder = tmp_path / "kvstore"

    def run(_: int) -> list[str]:
        return run_python("-c", AT_ONCE, str(folder), *map(str, files), check=True).stdout.split()

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, range(2))) == [right, right]
    [kept] = folder.iterdir()
    assert set(json.loads(kept.read_bytes()).values()) <= set(right)


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"XDG_CACHE_HOME": "/c", "HOME": "/h"}, "/c/kvstore"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/h"}, "/h/.cache/kvstore"),
        ({"XDG_CACHE_HOME": "", "HOME": "/h"}, "/h/.cache/kvstore"),
        ({"HOME": "relative"}, None),
        ({"HOME": ""}, None),
        ({}, None),
    ],
)
def test_the_folder_of_the_cache(environ: dict[str, str], folder: str | None) -> None:
    assert cache_folder(environ) == (Path(folder) if folder else None)
