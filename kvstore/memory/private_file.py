"""The private file of a segment: what its node needs to know at its next start, and what no client
may change.

It is beside the segment's entry, in ``/dev/shm``, because clients map all of the segment. Only the
node's user may open it. It names the segment's uuid: the file of an earlier segment of that name is
of no use. Memory of a process without an identity has no such file.
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
    """Of the segment's stamps; 16 bytes, random."""
    removal_watermark: Version = NO_VERSION
    """As ``OwnedSegment.removal_watermark``."""
    epoch: int = 0
    """As ``OwnedSegment.epoch``."""


class PrivateFile:
    """See the module. Threads: any may ``change`` it; it blocks for microseconds."""

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
                f"the key of the memory's stamps cannot be kept in {self._path}: {error.strerror}",
                advice="If the file is another user's, remove it as that user, or choose another "
                "--name. Otherwise a node with an identity needs a writable /dev/shm.",
                path=self._path,
            ) from error

    def change(self, change: Callable[[PrivateState], PrivateState]) -> None:
        """Changes what the file says; makes it again if somebody has removed it.

        If the file cannot be written, it is removed, and that is logged: the next start discards
        memory without its file.
        """
        with self._changing:
            self.now = change(self.now)
            try:
                self._write()
            except OSError as error:
                log.warning("private_file_lost path=%s reason=%s", self._path, error.strerror)
                self._unlink()

    def remove(self) -> None:
        """Removes the file, unless it is another segment's by now."""
        with self._changing:
            self._unlink()

    def _unlink(self) -> None:
        if _left(self._path).uuid == self.now.uuid:
            with contextlib.suppress(OSError):
                os.unlink(self._path)

    def _write(self) -> None:
        """Writes all of the file by one call, within one page: if the process is killed, the file
        says what it said before, or all that is new. Needs no room if the file is there.

        Raises:
            OSError: also if the file is another segment's or another user's.
        """
        uuid, key, mark, epoch = self.now
        there = _left(self._path).uuid
        if not there:
            unlink_entry(self._path)
        flags = 0 if there == uuid else os.O_CREAT | os.O_EXCL
        fd = open_entry(self._path, os.O_WRONLY | flags)
        try:
            os.write(fd, _FILE.pack(uuid, key, *mark, epoch))
        finally:
            os.close(fd)


def has_private(path: str, uuid: bytes) -> bool:
    """Whether the segment of this uuid has a private file at ``path``."""
    return _left(path).uuid == uuid


def _left(path: str) -> PrivateState:
    """What is in the file; without a uuid: there is none that only this user could have written."""
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
