"""Values to bytes and back; what is refused, and how that is said."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest

from kvstore.client.values import (
    EncodedValue,
    decode,
    described_as,
    encode,
)
from kvstore.errors import (
    InvalidArgumentError,
    UnsupportedValueError,
)
from kvstore.memory.header import DESCRIPTOR_BYTES_MAX


def bytes_of(encoded: EncodedValue) -> bytearray:
    return bytearray().join(cast("list[memoryview]", encoded.parts))


def again(encoded: EncodedValue) -> object:
    return decode(encoded.descriptor, np.frombuffer(bytes_of(encoded), np.uint8))


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.arange(6).reshape(2, 3).T,
        np.array(2.5),
        np.zeros((0, 4), np.int8),
        np.array([1, 2], ">i4"),
        np.array(["ab", "c"]),
        np.array(["2020-01-01"], "M8[D]"),
        np.array([1 + 2j], np.complex64),
        np.array([True, False]),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_arrays_come_back_as_they_were(array: np.ndarray) -> None:
    value = again(encode(array))
    assert isinstance(value, np.ndarray)
    assert (value.dtype, value.shape) == (array.dtype, array.shape)
    assert value.tobytes() == array.tobytes()


@pytest.mark.parametrize("value", [b"abc", bytearray(b"abc"), memoryview(b"xabcx")[1:4], b""])
def test_bytes_of_all_kinds_come_back_as_bytes(value: bytes) -> None:
    assert again(encode(value)) == bytes(value)


def test_contiguous_memory_is_aliased_and_not_copied() -> None:
    array = np.zeros(10, np.float32)
    (data,) = cast("list[memoryview]", encode(array).parts)
    array[:] = 1
    assert bytes(data) == array.tobytes()


def test_too_many_dimensions_for_a_header_are_refused() -> None:
    with pytest.raises(UnsupportedValueError):
        described_as((1_000_000_000,) * 64, "uint8", "numpy")
    descriptor, size = described_as((2, 3), "float32", "numpy")
    assert (size, len(descriptor) <= DESCRIPTOR_BYTES_MAX) == (24, True)
    with pytest.raises(InvalidArgumentError):
        described_as((-1,), "uint8", "numpy")


def test_the_kind_can_be_chosen_by_the_reader() -> None:
    encoded = encode(np.arange(3, dtype=np.int16))
    data = np.frombuffer(bytes_of(encoded), np.uint8)
    assert decode(encoded.descriptor, data, "bytes") == bytes_of(encoded)
    raw = decode(encode(b"abc").descriptor, np.frombuffer(b"abc", np.uint8), "numpy")
    assert raw.tolist() == [97, 98, 99]  # type: ignore[union-attr]
