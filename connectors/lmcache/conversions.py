"""Converts LMCache's names to keys of the store, and its memory to arrays of bytes."""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache
from typing import Any, Final

import numpy as np
import torch
from lmcache.v1.memory_management import MemoryObj
from numpy.typing import NDArray

from kvstore.limits import KEY_BYTES_MAX

Layout = tuple[tuple[tuple[int, ...], str], ...]
"""Shape and dtype of each part of an object, in order."""

_HASHED: Final = re.compile(rb"#sha256:[0-9a-f]{64}")


def name_of(text: str) -> bytes:
    """Return the store's key for LMCache's name: the text, or its digest if it is too long."""
    name = text.encode(errors="surrogateescape")
    if len(name) <= KEY_BYTES_MAX:
        return name
    return b"#sha256:" + hashlib.sha256(name).hexdigest().encode()


def text_of(name: bytes) -> str | None:
    """Invert ``name_of``; None for a digest."""
    if _HASHED.fullmatch(name):
        return None
    return name.decode(errors="surrogateescape")


def memory_of(memory: MemoryObj) -> NDArray[np.uint8]:
    """Return an array over the bytes of an object of LMCache, which it does not keep alive.

    Raises:
        TypeError: the bytes are not in host memory.
    """
    flat: NDArray[np.uint8] = memory.raw_tensor.view(-1).view(torch.uint8).numpy()
    return flat[: memory.get_size()]


@lru_cache(maxsize=256)
def layout_of(shapes: tuple[Any, ...], dtypes: tuple[Any, ...]) -> Layout:
    """Return the layout of an object from LMCache's shapes and dtypes of its parts."""
    return tuple(
        (tuple(map(int, shape)), str(dtype)) for shape, dtype in zip(shapes, dtypes, strict=True)
    )


def layout_of_object(memory: MemoryObj) -> Layout:
    meta = memory.metadata
    if meta.shapes is None:
        return layout_of((meta.shape,), (meta.dtype,))
    return layout_of(tuple(meta.shapes), tuple(meta.dtypes))
