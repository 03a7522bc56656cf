"""The key of a segment's stamps, which the next start of its node needs to know its objects again.

It is in a file of its own beside the segment's entry in ``/dev/shm``, because clients map all of
the segment. Only the node's user may read that file. It names the segment's uuid: the key of an
earlier segment of that name is of no use.
"""

from __future__ import annotations

import os
import secrets
import stat
import struct
from typing import Final

from kvstore.errors import StartupError
from kvstore.memory.entries import key_path, unlink_entry

_FILE: Final = struct.Struct("<16s16s")
"""The uuid of the segment, the key."""


def keep_stamp_key(shm_name: str, uuid: bytes) -> bytes:
    """The key of the segment that this process owns; a new one if none was left for it.

    Raises:
        StartupError: the file cannot be written, or is another user's.
    """
    path = key_path(shm_name)
    of, key = _left(path)
    if of == uuid:
        return key
    key = secrets.token_bytes(16)
    try:
        unlink_entry(path)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, _FILE.pack(uuid, key))
        finally:
            os.close(fd)
    except OSError as error:
        raise StartupError(
            f"the key of the memory's stamps cannot be kept in {path}: {error.strerror}",
            advice="If the file is another user's, remove it as that user, or choose another "
            "--name. Otherwise a node with an identity needs a writable /dev/shm.",
            path=path,
        ) from error
    return key


def _left(path: str) -> tuple[bytes, bytes]:
    """The uuid and key in the file; empty ones: there is none that only this user could have
    written."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return b"", b""
    try:
        there = os.fstat(fd)
        is_ours = stat.S_ISREG(there.st_mode) and there.st_uid == os.geteuid()
        if not is_ours or there.st_mode & 0o077 or there.st_size != _FILE.size:
            return b"", b""
        of, key = _FILE.unpack(os.read(fd, _FILE.size))
        return of, key
    finally:
        os.close(fd)
