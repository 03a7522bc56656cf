"""Values and their bytes: descriptors, aliasing, and what is refused."""

from __future__ import annotations

import json
from array import array
from typing import Any

import numpy as np
import pytest

from kvstore.client.values import (
    check_dtype,
    decode,
    described_as,
    encode,
    read_descriptor,
    writable,
)
from kvstore.errors import (
    BufferMismatchError,
    InvalidArgumentError,
    UnsupportedValueError,
)

torch = pytest.importorskip("torch")


class Foreign:
    """An array of another library."""

    def __init__(self, array: Any) -> None:
        self.__dlpack__, self.__dlpack_device__ = array.__dlpack__, array.__dlpack_device__


def back(value: Any, kind: Any = None) -> Any:
    encoded: Any = encode(value)
    data = np.frombuffer(bytearray().join(encoded.parts), np.uint8)
    return decode(encoded.descriptor, data, kind)


# --- descriptors -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "descriptor"),
    [
        (torch.zeros(2, 8).bfloat16(), '{"kind":"torch","dtype":"bfloat16","shape":[2,8]}'),
        (np.zeros(3, "<f4"), '{"kind":"numpy","dtype":"float32","shape":[3]}'),
        (np.zeros((), ">i2"), '{"kind":"numpy","dtype":">i2","shape":[]}'),
        (np.zeros(1, "M8[ns]"), '{"kind":"numpy","dtype":"<M8[ns]","shape":[1]}'),
        (b"", '{"kind":"bytes"}'),
        (array("d", [1]), '{"kind":"bytes"}'),
        (Foreign(np.zeros(3)), '{"kind":"numpy","dtype":"float64","shape":[3]}'),
        (Foreign(torch.zeros(3).bfloat16()), '{"kind":"torch","dtype":"bfloat16","shape":[3]}'),
    ],
)  # fmt: skip
def test_descriptors_are_json_that_other_languages_read(value: Any, descriptor: str) -> None:
    assert encode(value).descriptor == descriptor.encode()


def descriptor_of(kind: str, dtype: str, shape: list[int]) -> bytes:
    return json.dumps({"kind": kind, "dtype": dtype, "shape": shape}).encode()


def test_dtypes_that_nobody_knows_here() -> None:
    for name in ("float7", "load", "nn", "Tensor"):
        with pytest.raises(UnsupportedValueError) as caught:
            decode(descriptor_of("torch", name, [1]), np.zeros(4, np.uint8))
        assert name in str(caught.value)
    with pytest.raises(UnsupportedValueError) as caught:
        decode(descriptor_of("numpy", "float7", [1]), np.zeros(4, np.uint8))
    assert "ml_dtypes" in caught.value.advice


# --- bytes -------------------------------------------------------------------------------------


def test_gradients_and_lazy_views_are_left_behind() -> None:
    z = torch.complex(torch.ones(2, 3), torch.ones(2, 3)).requires_grad_()
    assert torch.equal(back(z.conj()), z.detach().conj())
    assert torch.equal(back(z.conj().imag), -torch.ones(2, 3))
    assert not back(z).requires_grad


@pytest.mark.parametrize(
    "value",
    [
        None, 7, "text", [1], [np.zeros(2)], object(), torch.eye(2).to_sparse(),
        torch.zeros(2, device="meta"), np.array([None]), np.zeros(2, [("a", "i4")]), np.ma,
    ],
)  # fmt: skip
def test_what_has_no_plain_bytes(value: Any) -> None:
    with pytest.raises(UnsupportedValueError) as caught:
        encode(value)
    assert caught.value.advice


# --- buffers to fill ---------------------------------------------------------------------------


def test_buffers_and_what_they_expect() -> None:
    assert writable(np.zeros(2, np.float32))[1] == "float32"
    assert writable(torch.zeros(2, dtype=torch.bfloat16))[1] == "bfloat16"
    assert writable(np.zeros(2, np.uint8))[1] == ""
    assert writable(bytearray(2))[1] == ""
    views, dtype = writable([np.zeros(2, ">i4"), np.zeros((1, 3), ">i4")])
    assert [len(view) for view in views] == [8, 12]
    assert dtype == ">i4"
    assert writable([bytearray(3), np.zeros(1, np.uint8), torch.zeros(2).byte()])[1] == ""
    assert writable([]) == ([], "")
    assert [len(view) for view in writable(np.zeros(()))[0]] == [8]
    assert writable(torch.zeros(2, requires_grad=True))[1] == "float32"


@pytest.mark.parametrize(
    "buffer",
    [
        b"ab", memoryview(b"ab"), memoryview(bytearray(4))[::2], np.zeros(4)[::2], 7, None, "text",
        torch.zeros(4)[::2], torch.zeros(2, device="meta"), torch.eye(2).to_sparse(),
        torch.zeros(2, dtype=torch.complex64).conj(), [np.zeros(1), np.zeros(1, np.int8)],
        np.broadcast_to(np.zeros(1), (3,)), [np.zeros(1), bytearray(8)],
    ],
)  # fmt: skip
def test_what_cannot_be_filled(buffer: Any) -> None:
    with pytest.raises(BufferMismatchError):
        writable(buffer)


def test_a_dtype_must_be_the_stored_one_or_none() -> None:
    stored = descriptor_of("numpy", "float32", [1])
    check_dtype(stored, "float32")
    check_dtype(stored, "")
    check_dtype(b'{"kind":"bytes"}', "int8")
    with pytest.raises(BufferMismatchError) as caught:
        check_dtype(stored, "int32")
    assert caught.value.fields == {"stored": "float32", "expected": "int32"}


# --- descriptions of what is to be allocated ---------------------------------------------------


def test_what_is_allocated() -> None:
    assert described_as(3, torch.bfloat16, "torch")[1] == 6
    assert described_as((2, 3), "float8_e4m3fn", "torch")[1] == 6
    assert described_as((2, 3), np.float64, "numpy")[1] == 48
    assert described_as((), "bfloat16", "numpy")[1] == 2
    assert described_as([0, 5], "int8", "torch")[1] == 0
    assert read_descriptor(described_as((2,), ">i4", "numpy")[0]).dtype == ">i4"
    for shape, dtype, kind, error in (
        ((-1,), "int8", "torch", InvalidArgumentError),
        (1, "float7", "torch", UnsupportedValueError),
        (1, "float7", "numpy", UnsupportedValueError),
        (1, "O", "numpy", UnsupportedValueError),
        (1, "nn", "torch", UnsupportedValueError),
    ):
        with pytest.raises(error):
            described_as(shape, dtype, kind)  # type: ignore[arg-type]


# --- what is more than its bytes ---------------------------------------------------------------


class Metres(np.ndarray[Any, Any]):
    pass


class Image(torch.Tensor):  # type: ignore[misc, name-defined]
    """Carries more than its numbers, as those of torchvision do."""


masked: Any = np.ma.masked_array


def without_memory(by: int = 1) -> Any:
    tensor = torch.ones(1 << 20)[::by]
    tensor.untyped_storage().resize_(0)  # as sharded training does between its steps
    return tensor


MORE: dict[str, Any] = {
    "a mask": masked([1.0, 2.0], mask=[True, False]),
    "a matrix": np.zeros((1, 2)).view(np.matrix),
    "a unit": np.zeros(2).view(Metres),
    "a mask in a list": [b"head", masked([1.0], mask=[True])],
    "pointers": np.array([None, 5]).data,
    "an image": torch.ones(2).as_subclass(Image),
    "no memory": without_memory(),
    "functional": torch._to_functional_tensor(torch.ones(3)),
    "zeros that are nowhere": torch._efficientzerotensor(3),
    "lazy": torch.nn.parameter.UninitializedParameter(),
    "jagged": torch.nested.as_nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
}


@pytest.mark.parametrize("value", MORE.values(), ids=MORE)
def test_what_is_more_than_its_bytes_is_refused(value: Any) -> None:
    with pytest.raises(UnsupportedValueError) as caught:
        encode(value)
    assert caught.value.advice
    if not isinstance(value, np.generic):  # no buffer at all
        with pytest.raises(BufferMismatchError):
            writable(value)
