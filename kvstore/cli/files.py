"""Files of ``kvstore put`` and ``kvstore get``: bytes or NumPy arrays."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from pathlib import Path
from typing import Any, Final

from kvstore.errors import UnsupportedValueError, ValueTooLargeError
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


def array_of(content: bytes, name: str) -> Any:
    import numpy as np

    try:
        return np.load(io.BytesIO(content), allow_pickle=False)
    except ValueError as error:
        raise UnsupportedValueError(
            f"{name} is not a NumPy array: {error}", advice="Leave out --npy to store its bytes."
        ) from error


def npy_of(array: Any) -> memoryview:
    """Return an array as a ``.npy`` file."""
    import numpy as np

    if array.dtype.isbuiltin == 2:  # ml_dtypes' bfloat16: .npy would store it as two bytes
        raise UnsupportedValueError(
            f"NumPy files cannot hold {array.dtype}", advice="Leave out --npy to get its bytes."
        )
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getbuffer()


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
