"""File descriptors of a segment for processes of other users: one to read, one to read and write.

The kernel fixes the permissions of a file descriptor when it is opened. A read-only one cannot be
mapped writable.

A writer can truncate the file, which kills processes that access the missing pages (SIGBUS). It can
make the file longer (``fallocate``), or free pages in it (``MADV_REMOVE``): they read as zeros, or
kill a process that accesses them while ``/dev/shm`` is full. The node's next start repairs what
left the file long enough. A process of the file's own user can open the file again, with all
permissions.
"""

from __future__ import annotations

import os
from typing import NamedTuple


class SharedDescriptors(NamedTuple):
    """File descriptors for other processes."""

    to_read: int
    to_write: int

    def close(self) -> None:
        os.close(self.to_read)
        os.close(self.to_write)
