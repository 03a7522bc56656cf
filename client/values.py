"""Turns values (torch tensors, numpy arrays, bytes) into bytes and back, dtype and shape intact.

A descriptor travels in the header of each object and says what its bytes are: JSON of at most
``DESCRIPTOR_BYTES_MAX`` bytes, ``{"kind": "torch", "dtype": "bfloat16", "shape": [2, 8]}``, so that
other languages can read it. torch is optional and imported only when a tensor is met.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Sequence
from functools import lru_cache
from types import ModuleType
from typing import TYPE_CHECKING, Literal, NamedTuple, Union

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import (
    BufferMismatchError,
    CorruptObjectError,
    InvalidArgumentError,
    UnsupportedValueError,
)
from kvstore.memory.header import DESCRIPTOR_BYTES_MAX

if TYPE_CHECKING:
    import torch

Kind = Literal["torch", "numpy", "bytes"]
Value = Union["torch.Tensor", NDArray[np.generic], bytes]
"""What ``get`` returns: the kind that was put."""
Storable = Union[Value, bytearray, memoryview, Sequence[Union[Value, bytearray, memoryview]]]
"""What ``put`` takes. ``bytearray`` and ``memoryview`` come back as ``bytes``. A list is a gather
list: its values are stored one after the other, and come back as one ``bytes``."""
Buffer = Union["torch.Tensor", NDArray[np.generic], bytearray, memoryview]
"""What ``get_into`` fills: contiguous, writable, in CPU memory."""
Bytes1D = NDArray[np.uint8]


class Described(NamedTuple):
    """A parsed descriptor."""

    kind: Kind
    dtype: str
    """torch's or numpy's name (``bfloat16``, ``float8_e4m3fn``, ``<M8[ns]``); "" for bytes."""
    shape: tuple[int, ...]


class Encoded(NamedTuple):
    """A value as bytes, which alias the value where that is contiguous and on the CPU."""

    descriptor: bytes
    data: memoryview
    """One-dimensional, ``B``-formatted; keeps its memory alive."""
    more: Sequence[memoryview] = ()
    """The further parts of a gather list."""

    @property
    def parts(self) -> list[memoryview]:
        """All parts that are not empty."""
        return [part for part in (self.data, *self.more) if len(part)]


class Columns(NamedTuple):
    """Values as bytes, a row each: like a list of ``Encoded``, at a fourth of its cost."""

    sizes: list[int]
    """In bytes."""
    parts: list[list[memoryview]]
    descriptors: list[bytes]


# --- values to bytes ---------------------------------------------------------------------------

_UINT8 = np.dtype(np.uint8)


def encode_all(values: Iterable[Storable]) -> Columns:
    """Raises as ``encode``."""
    sizes: list[int] = []
    parts: list[list[memoryview]] = []
    descriptors: list[bytes] = []
    for value in values:
        if type(value) is np.ndarray and value.dtype is _UINT8:  # a fast path: what engines put
            data = memoryview(value)  # type: ignore[arg-type]
            size = len(data) if data.ndim == 1 and data.c_contiguous else 0
            if size:
                sizes.append(size)
                parts.append([data])
                descriptors.append(_flat_array(size))
                continue
        encoded = encode(value)
        parts.append(encoded.parts)
        sizes.append(sum(map(len, parts[-1])))
        descriptors.append(encoded.descriptor)
    return Columns(sizes, parts, descriptors)


def encode(value: Storable) -> Encoded:
    """The bytes of a value and what they are.

    A tensor that is not contiguous, or not in CPU memory, is copied once; its gradient history
    is left behind.

    Raises:
        UnsupportedValueError: a type, layout or dtype whose bytes mean nothing elsewhere.
    """
    torch = _torch_of(value)
    if torch is not None:
        return _encode_tensor(torch, value)  # type: ignore[arg-type]
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        return Encoded(_describe("numpy", _numpy_name(array.dtype), array.shape), _bytes_of(array))
    if isinstance(value, bytes | bytearray | memoryview):
        data = memoryview(value)
        if not data.c_contiguous:
            data = memoryview(bytes(data))
        return Encoded(_describe("bytes", "", ()), _flat(data))
    if isinstance(value, list | tuple):
        first, *more = [encode(part).data for part in value] or [memoryview(b"")]
        return Encoded(_describe("bytes", "", ()), first, more)
    raise UnsupportedValueError(
        f"{type(value).__name__} cannot be stored",
        advice="Put a torch tensor, a numpy array, bytes, or a list of those.",
        type=type(value).__name__,
    )


def writable(buffers: Buffer | Sequence[Buffer]) -> tuple[list[memoryview], str]:
    """Caller's memory to fill, as flat views, and the dtype it expects ("" for raw bytes).

    Raises:
        BufferMismatchError: not contiguous, read-only, not in CPU memory, or mixed dtypes.
    """
    if type(buffers) is np.ndarray and buffers.dtype is _UINT8:  # as in ``encode_all``
        data = memoryview(buffers)  # type: ignore[arg-type]
        if data.ndim == 1 and data.c_contiguous and not data.readonly and data:
            return [data], ""
    views: list[memoryview] = []
    dtypes: set[str] = set()
    several = isinstance(buffers, list | tuple)
    for buffer in buffers if several else [buffers]:
        torch = _torch_of(buffer)
        if torch is not None:
            view, dtype = _writable_tensor(torch, buffer)  # type: ignore[arg-type]
        elif isinstance(buffer, np.ndarray):
            if not buffer.flags.c_contiguous or not buffer.flags.writeable:
                raise BufferMismatchError("a buffer must be contiguous and writable")
            view, dtype = _bytes_of(buffer), _numpy_name(buffer.dtype)
        else:
            try:
                raw = memoryview(buffer)  # type: ignore[arg-type]
            except TypeError:
                raise BufferMismatchError(
                    f"{type(buffer).__name__} cannot be filled",
                    advice="Give a tensor, an array, a bytearray or a writable memoryview.",
                ) from None
            if raw.readonly or not raw.c_contiguous:
                raise BufferMismatchError("a buffer must be contiguous and writable")
            view, dtype = _flat(raw), ""
        views.append(view)
        dtypes.add("" if dtype in ("uint8", "") else dtype)
    if len(dtypes) > 1:
        raise BufferMismatchError(f"buffers of one value differ in dtype: {sorted(dtypes)}")
    return views, dtypes.pop() if dtypes else ""


def _encode_tensor(torch: ModuleType, tensor: torch.Tensor) -> Encoded:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        raise UnsupportedValueError(
            f"a tensor of layout {tensor.layout} (quantized: {tensor.is_quantized}, device: "
            f"{tensor.device}) has no plain bytes",
            advice="Put the dense tensors that it is made of.",
        )
    descriptor = _describe("torch", _torch_name(tensor.dtype), tuple(tensor.shape))
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.device.type != "cpu":
        tensor = tensor.cpu()
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return Encoded(descriptor, _bytes_of_tensor(torch, tensor))


def _writable_tensor(torch: ModuleType, tensor: torch.Tensor) -> tuple[memoryview, str]:
    if (
        tensor.layout != torch.strided
        or tensor.is_quantized
        or tensor.device.type != "cpu"
        or not tensor.is_contiguous()
        or tensor.is_conj()
        or tensor.is_neg()
    ):
        raise BufferMismatchError(
            "a tensor to fill must be dense, contiguous and in CPU memory",
            advice="Pass tensor.contiguous(), or get into a CPU tensor and copy.",
        )
    return _bytes_of_tensor(torch, tensor.detach()), _torch_name(tensor.dtype)


def _bytes_of_tensor(torch: ModuleType, tensor: torch.Tensor) -> memoryview:
    if not tensor.numel():
        return memoryview(b"")
    flat: NDArray[np.uint8] = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)  # type: ignore[arg-type]


def _bytes_of(array: NDArray[np.generic]) -> memoryview:
    if not array.size:
        return memoryview(b"")
    if array.dtype == np.uint8 and array.ndim == 1 and array.flags.c_contiguous:
        return memoryview(array)  # type: ignore[arg-type]
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return memoryview(flat)  # type: ignore[arg-type]


def _flat(view: memoryview) -> memoryview:
    if view.format == "B" and view.ndim == 1:
        return view
    return view.cast("B") if view.nbytes else memoryview(b"")


@lru_cache(maxsize=4096)
def _describe(kind: Kind, dtype: str, shape: tuple[int, ...]) -> bytes:
    described = {"kind": kind} if kind == "bytes" else {"kind": kind, "dtype": dtype}
    if kind != "bytes":
        described["shape"] = list(shape)  # type: ignore[assignment]
    descriptor = json.dumps(described, separators=(",", ":")).encode()
    if len(descriptor) > DESCRIPTOR_BYTES_MAX:
        raise UnsupportedValueError(
            f"a shape of {len(shape)} dimensions does not fit into a header",
            advice="Reshape the tensor to fewer dimensions.",
        )
    return descriptor


@lru_cache(maxsize=4096)
def _flat_array(size: int) -> bytes:
    return _describe("numpy", "uint8", (size,))


@lru_cache(maxsize=256)
def _numpy_name(dtype: np.dtype[np.generic]) -> str:
    if dtype.hasobject or dtype.names is not None or dtype.subdtype is not None:
        raise UnsupportedValueError(
            f"arrays of {dtype} cannot be stored",
            advice="Put plain numbers: one array per field, no objects.",
        )
    # The name where it is unambiguous; the type string for byte orders, strings and times.
    if dtype.isnative and dtype.kind in "biufcV":
        return dtype.name if dtype.kind != "V" or dtype.isbuiltin == 2 else dtype.str
    return dtype.str


@lru_cache(maxsize=256)
def _torch_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# --- bytes to values ---------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def read_descriptor(descriptor: bytes) -> Described:
    """Raises CorruptObjectError: not a descriptor of this format."""
    try:
        read = json.loads(descriptor)
        kind = read["kind"]
        if kind == "bytes":
            return Described("bytes", "", ())
        shape = tuple(int(size) for size in read["shape"])
        if kind not in ("torch", "numpy") or min(shape, default=0) < 0:
            raise ValueError(kind)
        return Described(kind, str(read["dtype"]), shape)
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptObjectError(f"not a descriptor: {descriptor[:64]!r}") from error


def decode(descriptor: bytes, data: Bytes1D, kind: Kind | None = None) -> Value:
    """The value whose bytes are ``data``, which it aliases (``bytes`` are a copy).

    Args:
        kind: what to return; None: the kind that was put.

    Raises:
        UnsupportedValueError: torch, or the dtype, is not available here.
        CorruptObjectError: descriptor and bytes disagree.
    """
    described = read_descriptor(descriptor)
    wanted = kind or described.kind
    if wanted == "bytes":
        return data.tobytes()
    if described.kind == "bytes":
        described = Described("numpy", "uint8", (data.size,))
    try:
        if wanted == "torch":
            return _decode_tensor(described, data)
        dtype = _numpy_dtype(described.dtype)
        return data.view(dtype).reshape(described.shape)
    except (ValueError, RuntimeError) as error:
        raise CorruptObjectError(
            f"{data.size} bytes do not make a {described.dtype} of shape {described.shape}: {error}"
        ) from error


def array_over(
    descriptor: bytes, kind: Kind | None, memory: memoryview, offset: int, size: int
) -> NDArray[np.generic]:
    """A new array over ``size`` bytes of ``memory``, which it keeps alive: the value, if that is to
    be a numpy array, otherwise its bytes.

    Raises:
        UnsupportedValueError: the dtype is not available here.
        CorruptObjectError: descriptor and bytes disagree.
    """
    dtype, shape, expected = _as_array(descriptor, kind)
    if dtype is None:
        if not size:
            return np.empty(0, np.uint8)
        return np.frombuffer(memory, np.uint8, size, offset)
    if expected != size:
        raise CorruptObjectError(f"{size} bytes do not make a {dtype} of shape {shape}")
    return np.ndarray(shape, dtype, memory, offset) if size else np.empty(shape, dtype)


@lru_cache(maxsize=4096)
def _as_array(
    descriptor: bytes, kind: Kind | None
) -> tuple[np.dtype[np.generic] | None, tuple[int, ...], int]:
    """dtype, shape and size in bytes of a value to return as numpy array; None: as another kind."""
    described = read_descriptor(descriptor)
    if (kind or described.kind) != "numpy" or described.kind == "bytes":
        return None, (), 0
    dtype = _numpy_dtype(described.dtype)
    return dtype, described.shape, math.prod(described.shape) * dtype.itemsize


def described_as(
    shape: int | Sequence[int], dtype: object, kind: Literal["torch", "numpy"]
) -> tuple[bytes, int]:
    """The descriptor and the payload bytes of a value of this shape and dtype.

    Args:
        dtype: a ``torch.dtype`` or torch's name of one, or anything that ``numpy.dtype`` takes.

    Raises:
        UnsupportedValueError: no such dtype here.
    """
    sizes = (shape,) if isinstance(shape, int) else tuple(int(size) for size in shape)
    if min(sizes, default=0) < 0:
        raise InvalidArgumentError(f"the sizes of a shape must not be negative: {sizes}")
    if kind == "torch":
        module = _import_torch()
        found = dtype if isinstance(dtype, module.dtype) else getattr(module, str(dtype), None)
        if not isinstance(found, module.dtype):
            raise UnsupportedValueError(f"torch has no dtype {dtype}")
        item = int(getattr(found, "itemsize"))  # noqa: B009 - to a checker it is an object
        return _describe("torch", _torch_name(found), sizes), math.prod(sizes) * item
    numpy_dtype = _numpy_dtype(dtype) if isinstance(dtype, str) else np.dtype(dtype)  # type: ignore[call-overload]
    size = math.prod(sizes) * int(numpy_dtype.itemsize)
    return _describe("numpy", _numpy_name(numpy_dtype), sizes), size


def check_dtype(descriptor: bytes, expected: str) -> None:
    """Raises BufferMismatchError: the object holds another dtype than the buffer."""
    stored = read_descriptor(descriptor).dtype
    if expected and stored and expected != stored:
        raise BufferMismatchError(
            f"the object holds {stored}, the buffer {expected}",
            advice="Pass a buffer of the stored dtype, or of uint8 for the raw bytes.",
            stored=stored,
            expected=expected,
        )


def _decode_tensor(described: Described, data: Bytes1D) -> torch.Tensor:
    module = _import_torch()
    dtype = getattr(module, described.dtype, None)
    if not isinstance(dtype, module.dtype):
        raise UnsupportedValueError(f"this torch has no dtype {described.dtype}")
    flat = module.from_numpy(data) if data.size else module.empty(0, dtype=module.uint8)
    tensor: torch.Tensor = flat.view(dtype).reshape(described.shape)
    return tensor


def _numpy_dtype(name: str) -> np.dtype[np.generic]:
    try:
        return np.dtype(name)
    except TypeError:
        pass
    try:
        import ml_dtypes

        dtype: np.dtype[np.generic] = np.dtype(getattr(ml_dtypes, name))
        return dtype
    except (ImportError, AttributeError):
        raise UnsupportedValueError(
            f"numpy has no dtype {name} here",
            advice='Install ml_dtypes, or get(key, kind="torch") or kind="bytes".',
        ) from None


def _import_torch() -> ModuleType:
    try:
        import torch
    except ImportError:
        raise UnsupportedValueError(
            "this needs torch, which is not installed here",
            advice='pip install torch; or ask for kind="numpy" or kind="bytes".',
        ) from None
    return torch


def _torch_of(value: object) -> ModuleType | None:
    """torch, if ``value`` is one of its tensors; without importing it."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and isinstance(value, torch.Tensor) else None
