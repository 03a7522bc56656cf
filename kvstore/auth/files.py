"""Files that others read while they are replaced: the old content or the new one, never half."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvstore.clocks import uptime
from kvstore.errors import BusyError

LOCK_WAIT_S: Final = 10.0
LOOK_S: Final = 0.05

SECRET: Final = 0o600
PUBLIC: Final = 0o644


def write_whole(path: Path, content: bytes, mode: int) -> None:
    """Replaces the file, which is on the disk when this returns.

    Raises:
        OSError: the old file is still there.
    """
    # Is made with mode 600, so that a key can never be read by others.
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".kvstore-auth.")
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            os.fchmod(descriptor, mode)
            file.flush()
            os.fsync(descriptor)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds the lock of a file, which is made for it.

    Raises:
        BusyError: another process holds it.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, SECRET)
    try:
        until = uptime() + LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if uptime() >= until:
                    raise BusyError(
                        f"another command of kvstore auth uses {path.parent}",
                        advice="Wait until it has ended, and try again.",
                    ) from None
            time.sleep(LOOK_S)
        yield
    finally:
        os.close(descriptor)  # ends the lock
