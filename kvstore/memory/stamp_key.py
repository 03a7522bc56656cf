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

_FILE: Final = struct.Struct("<16s16s?")
"""The uuid of the segment, the key, whether the memory is open (``keep_stamp_key``)."""

_OPEN_AT: Final = 32
_NO_FILE: Final = bytes(16), b"", False


def keep_stamp_key(shm_name: str, uuid: bytes, *, attached: bool) -> tuple[bytes, bool]:
    """The key of the segment that this process owns, a new one if none was left for it; and whether
    the memory is *open*: it holds objects of clients without an identity, which have no stamp.

    Args:
        attached: whether a process of before has left objects in the segment. Without a file, that
            process had no identity.

    Raises:
        StartupError: the file cannot be written, or is another user's.
    """
    path = key_path(shm_name)
    is_open = attached and not os.path.lexists(path)
    of, key, was_open = _left(path)
    if of == uuid:
        return key, was_open
    key = secrets.token_bytes(16)
    try:
        unlink_entry(path)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, _FILE.pack(uuid, key, is_open))
        finally:
            os.close(fd)
    except OSError as error:
        raise StartupError(
            f"the key of the memory's stamps cannot be kept in {path}: {error.strerror}",
            advice="If the file is another user's, remove it as that user, or choose another "
            "--name. Otherwise a node with an identity needs a writable /dev/shm.",
            path=path,
        ) from error
    return key, is_open


def note_open(shm_name: str, *, is_open: bool) -> None:
    """Notes in the file of ``keep_stamp_key`` whether the memory is open. Raises OSError."""
    fd = os.open(key_path(shm_name), os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.pwrite(fd, bytes([is_open]), _OPEN_AT)
    finally:
        os.close(fd)


def _left(path: str) -> tuple[bytes, bytes, bool]:
    """What is in the file; ``_NO_FILE``: there is none that only this user could have written."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return _NO_FILE
    try:
        there = os.fstat(fd)
        is_ours = stat.S_ISREG(there.st_mode) and there.st_uid == os.geteuid()
        if not is_ours or there.st_mode & 0o077 or there.st_size != _FILE.size:
            return _NO_FILE
        of, key, is_open = _FILE.unpack(os.read(fd, _FILE.size))
        return of, key, is_open
    finally:
        os.close(fd)
