"""Values of which every block identifies itself, and memory that shows whether it was written to.

A block has 64 bytes: what it belongs to (a digest of namespace and key), which put made it (its
*version*, unique in a run), the run's seed, the value's size, the block's number, and words that
are computed from those. So each block of a value that a get returns can be judged alone, and a
value made of two others is detected.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

BLOCK_BYTES: Final = 64
FLIPS_MAX: Final = 4
"""Of one value, in a run: the nemesis inverts 20 bytes of a whole segment at a time."""
_WORDS: Final = BLOCK_BYTES // 8
_MAGIC: Final = int.from_bytes(b"soakblk1", "little")
_MASK: Final = (1 << 64) - 1
_ODD: Final = np.uint64(0x9E37_79B9_7F4A_7C15)

Words = NDArray[np.uint64]


class ObservedValue(NamedTuple):
    """What some bytes are."""

    version: int
    """0: of no put of this key."""
    problem: str
    """Empty, or: foreign, torn, garbage."""
    detail: str = ""
    flipped: bool = False
    """The only difference is a few bytes, inverted: what the nemesis does to memory."""


def name_of(namespace: str, key: bytes) -> int:
    digest = hashlib.blake2b(namespace.encode() + b"\0" + key, digest_size=8).digest()
    return int.from_bytes(digest, "little")


def make(namespace: str, key: bytes, version: int, seed: int, size: int) -> NDArray[np.uint8]:
    """The value of one put; at least one block, so that it is known whose it is."""
    assert size >= BLOCK_BYTES
    words = _words(name_of(namespace, key), version, seed, size)
    return words.reshape(-1).view(np.uint8)[:size]


def look(namespace: str, key: bytes, data: Any) -> ObservedValue:
    """What the value of a key is."""
    found = as_bytes(data)
    size = len(found)
    if size < BLOCK_BYTES:
        return ObservedValue(0, "garbage", f"{size} bytes")
    name = name_of(namespace, key)
    first = found[:BLOCK_BYTES].view(np.uint64) if found.flags.aligned else None
    if first is None or found.ctypes.data % 8:
        first = np.frombuffer(found[:BLOCK_BYTES].tobytes(), np.uint64)
    version, seed = int(first[2]), int(first[3]) >> 32
    expected = _words(name, version, seed, size).reshape(-1).view(np.uint8)[:size]
    if np.array_equal(found, expected):
        return ObservedValue(version, "")
    return _difference(name, found)


def _difference(name: int, found: NDArray[np.uint8]) -> ObservedValue:
    """How a value is not what it should be; by the version that most of its blocks name."""
    size = len(found)
    whole = np.frombuffer(found[: size // BLOCK_BYTES * BLOCK_BYTES].tobytes(), np.uint64)
    blocks = whole.reshape(-1, _WORDS)
    ours = blocks[blocks[:, 0] == _MAGIC]
    if not len(ours):
        return ObservedValue(0, "garbage", f"no block of {len(blocks)} is one, {_hex(found)}")
    versions, counts = np.unique(ours[:, 2], return_counts=True)
    version = int(versions[counts.argmax()])
    of_it = ours[ours[:, 2] == np.uint64(version)][0]
    expected = _words(name, version, int(of_it[3]) >> 32, size).reshape(-1).view(np.uint8)[:size]
    where = np.flatnonzero(expected != found)
    if 0 < len(where) <= FLIPS_MAX and np.array_equal(found[where], expected[where] ^ 0xFF):
        return ObservedValue(
            version, "torn", f"bytes {list(where)} of {size} are inverted", flipped=True
        )
    names = {f"{int(each):016x}" for each in np.unique(ours[:, 1])}
    if names != {f"{name:016x}"} and len(versions) == 1:
        return ObservedValue(version, "foreign", f"it is of {sorted(names)}, not {name:016x}")
    first = f"first difference at {where[0]} of {size}" if len(where) else "equal now"
    shown = {f"{int(v):x}": int(n) for v, n in zip(versions, counts, strict=True)}
    others = len(blocks) - len(ours)
    reason = f"blocks by version {shown}, {others} of none, {len(where)} bytes differ, {first}"
    return ObservedValue(version, "torn", reason)


def _words(name: int, version: int, seed: int, size: int) -> Words:
    blocks = -(-size // BLOCK_BYTES)
    words = np.empty((blocks, _WORDS), np.uint64)
    number = np.arange(blocks, dtype=np.uint64)
    words[:, 0] = _MAGIC
    words[:, 1] = name
    words[:, 2] = version
    words[:, 3] = (seed & 0xFFFF_FFFF) << 32 | size
    words[:, 4] = number
    mixed = (number + np.uint64((name ^ version) & _MASK)) * _ODD
    words[:, 5] = mixed
    words[:, 6] = ~mixed
    words[:, 7] = mixed ^ (mixed >> np.uint64(29))
    return words


# --- canaries ----------------------------------------------------------------------------------


def canary(memory: NDArray[np.uint8], number: int) -> None:
    """Fill memory with what no value holds."""
    memory[:] = (number * 37 + 11) & 0xFF


def touched(memory: NDArray[np.uint8], number: int) -> str:
    """Whether memory has changed since ``canary``: where; empty if it has not."""
    where = np.flatnonzero(memory != np.uint8((number * 37 + 11) & 0xFF))
    if not len(where):
        return ""
    return f"{len(where)} of {len(memory)} bytes changed, from {where[0]} to {where[-1]}"


def as_bytes(data: Any) -> NDArray[np.uint8]:
    """Any value of the store as flat bytes, without copying it."""
    if isinstance(data, np.ndarray):
        flat: NDArray[np.uint8] = data.reshape(-1).view(np.uint8)
        return flat
    if hasattr(data, "numpy"):
        return as_bytes(data.numpy())
    return np.frombuffer(data, np.uint8)


def _hex(found: NDArray[np.uint8]) -> str:
    return f"it begins with {found[:16].tobytes().hex()}"
