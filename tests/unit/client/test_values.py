"""Values to bytes and back; what is refused, and how that is said."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.client.values import (
    Encoded,
    check_dtype,
    decode,
    described_as,
    encode,
    read_descriptor,
    writable,
)
from kvstore.errors import (
    BufferMismatchError,
    CorruptObjectError,
    InvalidArgumentError,
    UnsupportedValueError,
)
from kvstore.memory.header import DESCRIPTOR_BYTES_MAX


def again(encoded: Encoded) -> object:
    return decode(encoded.descriptor, np.frombuffer(bytes(encoded.data), np.uint8).copy())


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
    data = encode(array).data
    array[:] = 1
    assert bytes(data) == array.tobytes()


@pytest.mark.parametrize(
    "value",
    [object(), "text", 3, None, [1], np.array([object()]), np.zeros(2, [("a", "i4")])],
    ids=lambda value: type(value).__name__,
)
def test_what_has_no_plain_bytes_is_refused_with_advice(value: object) -> None:
    with pytest.raises(UnsupportedValueError) as caught:
        encode(value)  # type: ignore[arg-type]
    assert caught.value.advice


def test_too_many_dimensions_for_a_header_are_refused() -> None:
    with pytest.raises(UnsupportedValueError):
        described_as((1_000_000_000,) * 64, "uint8", "numpy")
    descriptor, size = described_as((2, 3), "float32", "numpy")
    assert (size, len(descriptor) <= DESCRIPTOR_BYTES_MAX) == (24, True)
    with pytest.raises(InvalidArgumentError):
        described_as((-1,), "uint8", "numpy")


@pytest.mark.parametrize(
    "descriptor",
    [b"", b"{}", b"nonsense", b'{"kind":"x","dtype":"f4","shape":[1]}', b'{"kind":"numpy"}',
     b'{"kind":"numpy","dtype":"float32","shape":[-1]}', b"[1]", b"\xff"],
)  # fmt: skip
def test_descriptors_that_are_none_are_corrupt(descriptor: bytes) -> None:
    with pytest.raises(CorruptObjectError):
        read_descriptor(descriptor)


def test_a_descriptor_that_does_not_fit_its_bytes_is_corrupt() -> None:
    with pytest.raises(CorruptObjectError):
        decode(b'{"kind":"numpy","dtype":"float32","shape":[3]}', np.zeros(11, np.uint8))


def test_a_dtype_that_is_not_here_says_what_to_install() -> None:
    with pytest.raises(UnsupportedValueError, match="kind="):
        decode(b'{"kind":"numpy","dtype":"float1_e0m0","shape":[1]}', np.zeros(1, np.uint8))


def test_the_kind_can_be_chosen_by_the_reader() -> None:
    encoded = encode(np.arange(3, dtype=np.int16))
    data = np.frombuffer(bytes(encoded.data), np.uint8)
    assert decode(encoded.descriptor, data, "bytes") == bytes(encoded.data)
    raw = decode(encode(b"abc").descriptor, np.frombuffer(b"abc", np.uint8), "numpy")
    assert raw.tolist() == [97, 98, 99]  # type: ignore[union-attr]


def test_buffers_to_fill_are_flat_views_of_the_caller_s_memory() -> None:
    array = np.zeros((2, 2), np.float32)
    views, dtype = writable(array)
    views[0][:4] = np.float32(7).tobytes()
    assert (array[0, 0], dtype) == (7, "float32")
    assert writable([bytearray(3), np.zeros(2, np.uint8)])[1] == ""


@pytest.mark.parametrize(
    "buffer",
    [
        b"read-only",
        np.zeros((4, 4))[:, ::2],
        np.frombuffer(b"1234", np.uint8),
        object(),
        [np.zeros(2, np.float32), np.zeros(2, np.float64)],
    ],
    ids=["bytes", "strided", "frozen", "object", "mixed"],
)
def test_buffers_that_cannot_be_filled_are_refused(buffer: object) -> None:
    with pytest.raises(BufferMismatchError):
        writable(buffer)  # type: ignore[arg-type]


def test_a_wrong_dtype_names_both() -> None:
    descriptor = encode(np.zeros(2, np.float32)).descriptor
    with pytest.raises(BufferMismatchError) as caught:
        check_dtype(descriptor, "float16")
    assert (caught.value.fields["stored"], caught.value.fields["expected"]) == (
        "float32",
        "float16",
    )
    check_dtype(descriptor, "float32")
    check_dtype(descriptor, "")
