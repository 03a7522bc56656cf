"""What a reader makes of descriptors, which any client may have written: a value, or one of two
errors; never anything else, and never memory that is read as pointers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.client import dtypes
from kvstore.client.values import (
    UNREADABLE,
    array_over,
    check_dtype,
    decode,
    decode_tensor,
    encode,
    read_descriptor,
)
from kvstore.errors import BufferMismatchError, CorruptObjectError, UnsupportedValueError

torch = pytest.importorskip("torch")

PAYLOAD = np.frombuffer(bytes(range(1, 9)) * 8, np.uint8)
KINDS: list[Any] = [None, "numpy", "torch", "bytes"]


def described(kind: object, dtype: object, shape: object) -> bytes:
    return json.dumps({"kind": kind, "dtype": dtype, "shape": shape}).encode()


def numpy(dtype: object, *shape: object) -> bytes:
    return described("numpy", dtype, shape)


def tensor(dtype: object, *shape: object) -> bytes:
    return described("torch", dtype, shape)


NONE = {
    "pointers": numpy("O", 8),
    "pointers in records": numpy("i4,O", 4),
    "records by dict": numpy("{'names':['a'],'formats':['O']}", 8),
    "texts of no length": numpy("S0", 64),
    "no text": numpy("U16", 1),
    "a class of ml_dtypes": numpy("finfo", 8),
    "a list of fields": numpy([["a", "O"]], 8),
    "a line feed": numpy("u1\nERROR", 64),
    "an endless text": numpy("U999999999", 1),
    "too many dimensions": numpy("u1", *[1] * 80),
    "too large": numpy("u1", 1 << 62, 4),
    "negative": numpy("u1", -1),
    "half": numpy("u1", 64.0),
    "a text as shape": described("numpy", "u1", "64"),
    "no shape": b'{"kind":"numpy","dtype":"u1"}',
    "nothing, but huge": numpy("u1", 1 << 62, 1 << 62, 0),
    "torch's function": tensor("load", 64),
    "a torch dtype of other size": tensor("float32", 64),
    "a huge tensor": tensor("float32", 1 << 63),
    "another kind": described("pickle", "u1", [64]),
    "a list as kind": described(["numpy"], "u1", [64]),
    "a list": b"[]",
    "": b"",
    "half of JSON": b'{"kind":"bytes"',
    "twice": b'{"kind":"bytes","kind":"numpy","dtype":"O","shape":[8]}',
    "deep": b"[" * 300,
    "no UTF-8": b"\xff",
}
"""Descriptors of 64 bytes that say nothing true of them."""

READERS: dict[str, Callable[[bytes, Any], object]] = {
    "copied": lambda descriptor, kind: decode(descriptor, PAYLOAD.copy(), kind),
    "over the pool": lambda descriptor, kind: array_over(
        descriptor, kind, PAYLOAD.data, 0, PAYLOAD.size
    ),
    "on a device": lambda descriptor, _: decode_tensor(
        descriptor, torch.from_numpy(PAYLOAD.copy())
    ),
}


@pytest.mark.parametrize("descriptor", NONE.values(), ids=NONE)
def test_no_value_is_made_of_a_descriptor_that_lies(descriptor: bytes) -> None:
    try:
        kind = read_descriptor(descriptor).kind
    except CorruptObjectError:
        kind = "bytes"
    for reader in (READERS["copied"], READERS["on a device"]):
        if kind != "bytes" or reader is READERS["copied"]:
            with pytest.raises(UNREADABLE) as caught:
                reader(descriptor, None)
            assert caught.value.advice
            assert "\n" not in str(caught.value)
    if kind == "numpy":
        with pytest.raises(UNREADABLE):
            READERS["over the pool"](descriptor, None)


@pytest.mark.parametrize("descriptor", NONE.values(), ids=NONE)
def test_its_bytes_can_be_had_all_the_same(descriptor: bytes) -> None:
    assert decode(descriptor, PAYLOAD.copy(), "bytes") == PAYLOAD.tobytes()
    over: Any = array_over(descriptor, "bytes", PAYLOAD.data, 0, PAYLOAD.size)
    assert over.tobytes() == PAYLOAD.tobytes()
    check_dtype(descriptor, "")  # a buffer of bytes


def test_a_buffer_of_a_dtype_is_not_filled_with_what_says_nothing() -> None:
    with pytest.raises(BufferMismatchError):
        check_dtype(b"[", "int32")


WORDS = st.sampled_from([
    "kind", "dtype", "shape", "numpy", "torch", "bytes", "O", "i4,O", "u1", "<U2", "M8[ns]", "V8",
    "float32", "bfloat16", "int4", "finfo", "load", "uint8", "S1", "complex64", ">f8",
])  # fmt: skip
SHAPES = st.lists(st.one_of(st.integers(-2, 70), st.integers(), st.floats(), WORDS), max_size=4)
JSON = st.recursive(
    st.one_of(WORDS, st.integers(), st.floats(), st.booleans(), st.none(), st.text(max_size=3)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)
DESCRIPTORS = st.one_of(
    st.binary(max_size=40),
    JSON.map(lambda each: json.dumps(each).encode()),
    st.builds(described, st.sampled_from(["numpy", "torch", "bytes"]), WORDS | JSON, SHAPES | JSON),
)


@given(DESCRIPTORS, st.sampled_from(KINDS), st.sampled_from(list(READERS)))
def test_a_value_or_one_of_two_errors(descriptor: bytes, kind: Any, reader: str) -> None:
    try:
        value: Any = READERS[reader](descriptor, kind)
    except UNREADABLE:
        return
    nbytes = len(value) if isinstance(value, bytes) else value.nbytes
    assert nbytes == PAYLOAD.size
    if isinstance(value, np.ndarray):
        assert not value.dtype.hasobject
        value.tolist()


def test_all_that_can_be_put_has_a_name_and_nothing_else() -> None:
    for dtype in {each for each in vars(torch).values() if isinstance(each, torch.dtype)}:
        assert dtypes.torch_dtype(torch, dtypes.torch_name(dtype)) is dtype
    for letter in "?bBhHiIlLqQefdgFDG":
        dtype = np.dtype(letter)
        assert dtypes.numpy_dtype(dtypes.numpy_name(dtype)) == dtype
    for text in (">i4", "<M8[25us]", ">m8[s]", "M8", "<U5", ">U5", "S3", "V7", "m8[generic]"):
        assert dtypes.numpy_dtype(dtypes.numpy_name(np.dtype(text))) == np.dtype(text)
    for other in ("O", "i4,i4", "(2,)i4", "V0", "S0"):
        with pytest.raises(UnsupportedValueError):
            dtypes.numpy_name(np.dtype(other))


@pytest.mark.parametrize("name", ["complex32", "bfloat16", "int4", "float8_e5m2"])
def test_dtypes_of_ml_dtypes_come_back(name: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    kind = getattr(ml_dtypes, name, None)
    if kind is None:
        pytest.skip("an older ml_dtypes")
    array = np.zeros(3, kind)
    encoded: Any = encode(array)
    back: Any = decode(encoded.descriptor, np.frombuffer(bytearray().join(encoded.parts), np.uint8))
    assert back.dtype == array.dtype
