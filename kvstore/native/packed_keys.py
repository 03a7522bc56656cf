"""The keys of a batch in one ``bytes``, in which they are sent and looked up together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast, overload

from kvstore.limits import BATCH_KEYS_MAX, KEY_BYTES_MAX, REQUEST_KEY_BYTES_MAX, Key, check_keys
from kvstore.native import steps


class PackedKeys(Sequence[Key]):
    """Immutable keys of one length in one ``bytes``, sliced on access; equal to any sequence."""

    __slots__ = ("_count", "data", "stride")

    def __init__(self, data: bytes, stride: int) -> None:
        """``len(data)`` is a multiple of ``stride``, which is 1 or more."""
        self.data = data
        self.stride = stride
        self._count = len(data) // stride

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Key: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Key]: ...

    def __getitem__(self, index: int | slice) -> Key | Sequence[Key]:
        stride = self.stride
        if isinstance(index, slice):
            first, last, step = index.indices(self._count)
            if step != 1:
                return self.unpack()[index]
            return PackedKeys(self.data[first * stride : max(first, last) * stride], stride)
        if index < 0:
            index += self._count
        if not 0 <= index < self._count:
            raise IndexError(index)
        return cast(Key, self.data[index * stride : (index + 1) * stride])

    def __iter__(self) -> Iterator[Key]:
        return iter(self.unpack())

    def unpack(self) -> list[Key]:
        """Return all keys at once: much faster than one by one."""
        return steps.unpack_keys(self.data, self.stride)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, PackedKeys) and other.stride == self.stride:
            return other.data == self.data
        if isinstance(other, (list, tuple, PackedKeys)):
            return self.unpack() == list(other)
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]  # compares equal to lists

    def __repr__(self) -> str:
        return f"PackedKeys({self._count} keys of {self.stride} bytes)"


def keys_per_request(keys: Sequence[Key]) -> int:
    """Return how many of these keys fit into any request."""
    if len(keys) * KEY_BYTES_MAX <= REQUEST_KEY_BYTES_MAX:
        return BATCH_KEYS_MAX
    longest = keys.stride if isinstance(keys, PackedKeys) else max(map(len, keys))
    return min(BATCH_KEYS_MAX, REQUEST_KEY_BYTES_MAX // longest)


def packed_keys(keys: Sequence[object], keys_max: int = BATCH_KEYS_MAX) -> Sequence[Key]:
    """As ``check_keys`` for lookups; packs the keys if fast (0.05 instead of 0.6 ms for 8,192)."""
    if 1 < len(keys) <= keys_max:
        packed = steps.pack_keys(keys)
        if packed is not None:
            return PackedKeys(*packed)
    return check_keys(keys, distinct=False, keys_max=keys_max)
