"""The private file of a segment: records for the node's next start that no client may change.

Only the node's user may open it. It names the segment's uuid, which makes the file of an earlier
segment of that name invalid. Memory of a process without an identity has no private file.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import struct
import threading
from collections.abc import Callable
from typing import Final, NamedTuple

from kvstore.calls import NO_VERSION, Version
from kvstore.errors import StartupError
from kvstore.memory.shm_entries import open_entry, unlink_entry

log = logging.getLogger("kvstore.node")

_FILE: Final = struct.Struct("<16s16sQQQ")


class PrivateState(NamedTuple):
    uuid: bytes
    """Of the segment; 16 bytes."""
    key: bytes
    """Key of the header MACs; 16 random bytes."""
    removal_watermark: Version = NO_VERSION
    """As ``Medium.removal_watermark``."""
    epoch: int = 0
    """As ``Medium.epoch``."""


class PrivateFile:
    """See the module. Threads: any may ``change`` it."""

    def __init__(self, path: str, uuid: bytes) -> None:
        """Reads the file of the segment that this process owns, or creates it with a new key.

        Raises:
            StartupError: the file cannot be written, or is another user's.
        """
        self._path: Final = path
        self._changing: Final = threading.Lock()
        self.now = _left(self._path)
        if self.now.uuid == uuid:
            return
        self.now = PrivateState(uuid, secrets.token_bytes(16))
        try:
            unlink_entry(self._path)
            self._write()
        except OSError as error:
            raise StartupError(
                f"the key of the header MACs cannot be kept in {self._path}: {error.strerror}",
                advice="If the file is another user's, remove it as that user, or choose another "
                "--name. Otherwise a node with an identity needs a writable /dev/shm.",
                path=self._path,
            ) from error

    def change(self, change: Callable[[PrivateState], PrivateState]) -> None:
        """Changes the records, and writes the file, also if it was removed. If it cannot be
        written, it is removed and logged: the next start discards memory without its file."""
        with self._changing:
            self.now = change(self.now)
            try:
                self._write()
            except OSError as error:
                log.warning("private_file_lost path=%s reason=%s", self._path, error.strerror)
                self._unlink()

    def remove(self) -> None:
        """Removes the file, unless it is another segment's."""
        with self._changing:
            self._unlink()

    def _unlink(self) -> None:
        if _left(self._path).uuid == self.now.uuid:
            with contextlib.suppress(OSError):
                os.unlink(self._path)

    def _write(self) -> None:
        """Writes the file by one call, within one page: if the process is killed, the file has the
        old or the new content. Needs no space if the file exists.

        Raises:
            OSError: also if the file is another segment's or another user's.
        """
        uuid, key, mark, epoch = self.now
        uuid_before = _left(self._path).uuid
        if not uuid_before:
            unlink_entry(self._path)
        flags = 0 if uuid_before == uuid else os.O_CREAT | os.O_EXCL
        fd = open_entry(self._path, os.O_WRONLY | flags)
        try:
            os.write(fd, _FILE.pack(uuid, key, *mark, epoch))
        finally:
            os.close(fd)


def has_private(path: str, uuid: bytes) -> bool:
    """Whether the segment of this uuid has a private file at ``path``."""
    return _left(path).uuid == uuid


def _left(path: str) -> PrivateState:
    """Reads the file; without a uuid: there is none that only this user could have written."""
    nothing = PrivateState(b"", b"")
    try:
        fd = open_entry(path, os.O_RDONLY)
    except OSError:
        return nothing
    try:
        there = os.fstat(fd)
        if there.st_mode & 0o077 or there.st_size != _FILE.size:
            return nothing
        uuid, key, epoch_of_mark, counter, epoch = _FILE.unpack(os.read(fd, _FILE.size))
        return PrivateState(uuid, key, Version(epoch_of_mark, counter), epoch)
    finally:
        os.close(fd)
