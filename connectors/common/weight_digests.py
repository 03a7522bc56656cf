"""Digests of complete weight files, which a host computes once.

A digest is XXH3-128 of every byte of a file: any change changes it, but it is not resistant to
forgery. That of a safetensors file is the sum of its tensors' digests (name, dtype, shape, bytes)
modulo 2^128, so that sums over files do not depend on the split into files. It runs at 7 GB/s from
the page cache, in one thread (a second one gained 5 %): 16 GB take some 2.3 s, more from a disk or
network.

The cache key is the file's *state*: device, inode, size, modification time and change time, which
the kernel sets at each write and no program can set back. The next start, and other engines on the
host, then read nothing. Processes that start together divide the work: each checks before each file
for a digest of another process, and takes files in random order.
"""

from __future__ import annotations

import json
import logging
import os
import random
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, Final, NamedTuple

from xxhash import xxh3_128

from kvstore.runtime.watched_files import write_file

log = logging.getLogger("kvstore.weights")

PIECE_BYTES: Final = 1 << 20
"""Bytes per read. The buffer stays in the processor's cache: 16 MiB are a fifth slower."""

QUIESCED_NS: Final = 3_000_000_000
"""A younger file may change again without a change of its times, which have a resolution of two
seconds in some file systems."""

FILES_MAX: Final = 1024
"""Remembered files; the oldest entries are dropped."""

FILE_BYTES_MAX: Final = 1 << 20
"""Several times the size of ``FILES_MAX`` entries."""

HEADER_BYTES_MAX: Final = 100_000_000
"""Limit of a safetensors header, as in its library."""

_DIGEST: Final = re.compile(r"[0-9a-f]{32}")


class FileDigest(NamedTuple):
    size: int
    digest: str
    """32 hexadecimal digits."""
    tensors: tuple[str, ...] = ()
    """Names of the tensors; empty: not a safetensors file, and the digest is that of its bytes."""


class DigestCache:
    """The file with the digests of this user, shared by any number of processes.

    If it is missing or damaged, weight files are read again. Threads: any.
    """

    def __init__(self, folder: Path | None, *, now_ns: Callable[[], int] = time.time_ns) -> None:
        """
        Args:
            folder: of the file, created when needed; None: nothing is remembered.
            now_ns: nanoseconds since 1970.
        """
        self._file = None if folder is None else folder / "weights-by-tensor.json"
        self._now_ns = now_ns

    def get(self, state: str) -> str | None:
        return self._read().get(state)

    def add(self, state: str, digest: str) -> None:
        """Replace the file with one that has this digest. Does nothing if it cannot be written. If
        two processes add at the same time, one of the two digests may be lost."""
        entries = {**self._read(), state: digest}
        try:
            self._write(dict(list(entries.items())[-FILES_MAX:]))
        except OSError as error:
            log.debug("digest_not_remembered reason=%s", error)

    def is_change_detectable(self, file: os.stat_result) -> bool:
        """Return whether any later change of this file changes its state."""
        return self._now_ns() - max(file.st_mtime_ns, file.st_ctime_ns) > QUIESCED_NS

    def _read(self) -> dict[str, str]:
        if self._file is None:
            return {}
        try:
            with self._file.open("rb") as file:
                entries = json.loads(file.read(FILE_BYTES_MAX))  # a truncated one is not JSON
        except (OSError, ValueError, RecursionError):
            return {}
        if not isinstance(entries, dict):
            return {}
        return {
            state: digest
            for state, digest in entries.items()
            if isinstance(digest, str) and _DIGEST.fullmatch(digest)
        }

    def _write(self, entries: Mapping[str, str]) -> None:
        """Raises OSError."""
        if self._file is None:
            return
        self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_file(self._file, json.dumps(entries).encode())


def cache_folder(environ: Mapping[str, str]) -> Path | None:
    """Return kvstore's folder in this user's cache; None: the environment names none."""
    home = environ.get("HOME", "")
    for base in (environ.get("XDG_CACHE_HOME", ""), home and f"{home}/.cache"):
        if os.path.isabs(base):
            return Path(base, "kvstore")
    return None


def digest_files(files: Sequence[Path], remembered: DigestCache) -> list[FileDigest]:
    """Return size and digest of each file.

    Raises:
        OSError: a file cannot be read.
    """
    found: dict[int, FileDigest] = {}
    order = list(range(len(files)))
    random.shuffle(order)
    for at in order:
        found[at] = _content(files[at], remembered)
    return [found[at] for at in range(len(files))]


def _content(path: Path, remembered: DigestCache) -> FileDigest:
    with path.open("rb", buffering=0) as file:
        before = os.fstat(file.fileno())
        tensors = _tensors(file, before.st_size)
        names = tuple(description[0] for description, _ in tensors)
        digest = remembered.get(_state(before))
        if digest is not None:
            return FileDigest(before.st_size, digest, names)
        can_tell = remembered.is_change_detectable(before) and not _is_image(file.fileno(), before)
        total, buffer = 0, memoryview(bytearray(PIECE_BYTES))
        for description, left in tensors or [((), sys.maxsize)]:
            hasher = xxh3_128(json.dumps(description).encode() if description else b"")
            while count := file.readinto(buffer[:left]):
                hasher.update(buffer[:count])
                left -= count
            total += hasher.intdigest()
        digest = f"{total % (1 << 128):032x}"
        if can_tell and _state(os.fstat(file.fileno())) == _state(before):
            remembered.add(_state(before), digest)
    return FileDigest(before.st_size, digest, names)


def _tensors(file: FileIO, size: int) -> list[tuple[tuple[Any, ...], int]]:
    """Return name, dtype and shape of each tensor of a safetensors file, in the order of their
    bytes, with its size. Metadata count as tensors without bytes: some loaders read them. Leaves
    the file at the first byte of the tensors; for another file the result is empty, and it is at
    0."""
    length = int.from_bytes(file.read(8), "little")
    parts: list[tuple[tuple[Any, ...], int]] = []
    at = 8 + length
    if at <= min(size, HEADER_BYTES_MAX):
        try:
            header = json.loads(file.read(length))
            more = header.pop("__metadata__", {})
            parts = [((f"metadata {name}", more[name]), 0) for name in more.keys() - {"format"}]
            for name, tensor in sorted(header.items(), key=lambda each: each[1]["data_offsets"]):
                start, end = tensor["data_offsets"]
                at = at + len(range(start, end)) if start == at - 8 - length else size + 1
                parts.append(((name, tensor["dtype"], tensor["shape"]), len(range(start, end))))
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
            at = size + 1
    if at == size and parts:
        return parts
    file.seek(0)
    return []


def file_state(path: str) -> str:
    """Return the state of a file: another one if it may have changed; "" if it is not here."""
    try:
        return _state(os.stat(path))
    except OSError:
        return ""


def _state(file: os.stat_result) -> str:
    return f"{file.st_dev}:{file.st_ino}:{file.st_size}:{file.st_mtime_ns}:{file.st_ctime_ns}"


def _is_image(descriptor: int, file: os.stat_result) -> bool:
    """Return whether the file may be in an image such as squashfs. Two images can have files with
    different bytes and the same state, because their creator chooses all times and inodes."""
    read_only = os.fstatvfs(descriptor).f_flag & os.ST_RDONLY
    return bool(read_only) and file.st_mtime_ns == file.st_ctime_ns
