"""Files of ``kvstore put`` and ``kvstore get``."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Final

from kvstore.errors import ValueTooLargeError
from kvstore.runtime.watched_files import write_file

STREAM_BYTES_MAX: Final = 1 << 30
"""Bytes to read from what may not end: a pipe, a device."""


def read_file(name: str) -> bytes:
    """Return the bytes of a file, or of standard input for ``-``.

    Raises:
        ValueTooLargeError: not a regular file, and more than ``STREAM_BYTES_MAX`` bytes.
    """
    if name != "-" and Path(name).is_file():
        return Path(name).read_bytes()
    with contextlib.nullcontext(sys.stdin.buffer) if name == "-" else Path(name).open("rb") as file:
        content = file.read(STREAM_BYTES_MAX + 1)
    if len(content) > STREAM_BYTES_MAX:
        raise ValueTooLargeError(
            f"{name} has more than {STREAM_BYTES_MAX >> 20} MiB, and is not a regular file",
            advice="Write it to a file, and give the file's name.",
        )
    return content


def write_output(path: Path, content: memoryview) -> None:
    """Write the file atomically: the old file stays until the new content is complete."""
    if path.exists() and not path.is_file():  # a pipe, /dev/null
        path.write_bytes(content)
        return
    mask = os.umask(0)
    os.umask(mask)
    write_file(path, content, 0o666 & ~mask)  # the mode of a plain open


def is_text(content: memoryview) -> bool:
    """Return whether a terminal can show ``content``, judged by its beginning."""
    head = bytes(content[:4096])
    try:
        text = head.decode()
    except UnicodeDecodeError as error:
        if error.start < len(head) - 3:  # else a character is truncated
            return False
        text = head[: error.start].decode()
    return all(sign.isprintable() or sign in "\n\r\t" for sign in text)
