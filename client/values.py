"""Conversion of values (torch tensors, numpy arrays, bytes) to bytes and back.

The header of each object has a descriptor: JSON of at most ``DESCRIPTOR_BYTES_MAX`` bytes,
``{"kind": "torch", "dtype": "bfloat16", "shape": [2, 8]}``, readable in other languages. torch is
optional and imported only for tensors.

Any client may write any descriptor, so readers trust none: the dtype must be plain (``dtypes``),
and the shape must fit the payload. An object without a valid value can still be read as bytes.
"""

from __future__ import annotations

import contextlib
import json
import math
import operator
import sys
from collections.abc import Iterable, Sequence
from functools import lru_cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Protocol, Union, cast

import numpy as np
from numpy.typing import NDArray

from kvstore.client.dtypes import (
    is_plain,
    numpy_dtype,
    numpy_dtype_given,
    numpy_name,
    torch_dtype,
    torch_name,
)
from kvstore.device.memory import DeviceMemory
from kvstore.errors import (
    BufferMismatchError,
    CorruptObjectError,
    InvalidArgumentError,
    UnsupportedValueError,
)
from kvstore.memory.header import DESCRIPTOR_BYTES_MAX
from kvstore.native import steps

if TYPE_CHECKING:
    import torch
    from typing_extensions import Buffer as ReadableBuffer

    from kvstore.client.devices import ClientDevices
    from kvstore.device.device import Device

Kind = Literal["torch", "numpy", "bytes"]
Value = Union["torch.Tensor", NDArray[np.generic], bytes]
"""Values that ``get`` returns: the kind that was put."""


class SupportsDLPack(Protocol):
    """An array of another library, such as JAX."""

    def __dlpack__(self, *, stream: Any = None) -> Any: ...
    def __dlpack_device__(self) -> Any: ...


_Part = Union[Value, "ReadableBuffer", "DeviceMemory"]
Storable = Union[_Part, SupportsDLPack, Sequence[_Part]]
"""Values that ``put`` accepts. Buffers (``bytearray``, ``memoryview``, ``mmap``) come back as
``bytes``, arrays of other libraries as numpy's or torch's. A list is a gather list: its buffers and
arrays of ``uint8`` are concatenated, and come back as one ``bytes``."""
View = Union[Value, memoryview]
"""Values of ``copy=False``: bytes come as a read-only memoryview."""
Buffer = Union["torch.Tensor", NDArray[np.generic], bytearray, memoryview, "DeviceMemory"]
"""Memory that ``get_into`` fills: contiguous and writable."""
Bytes1D = NDArray[np.uint8]
Payload = Union[list[memoryview], "DeviceMemory"]
"""The bytes of one value, or memory to fill: non-empty parts of host memory, or device memory."""


UNREADABLE = (CorruptObjectError, UnsupportedValueError)
Unreadable = CorruptObjectError | UnsupportedValueError
Found = Union[View, None, Unreadable]
"""A value, a miss (None), or the reason why there is no value."""


class ValueDescription(NamedTuple):
    kind: Kind
    dtype: str
    """Name in torch or numpy (``bfloat16``, ``float8_e4m3fn``, ``<M8[ns]``); "" for bytes."""
    shape: tuple[int, ...]


class EncodedValue(NamedTuple):
    """A value as bytes, which alias it if it is contiguous and its memory supported."""

    descriptor: bytes
    parts: Payload


class EncodedBatch(NamedTuple):
    sizes: list[int]
    parts: list[Payload]
    """All in host memory, or all on one device; an empty value has no parts."""
    descriptors: list[bytes]
    device: Device | None = None


_DIMENSIONS_MAX: Final = 64


def encode_all(values: Sequence[Storable], on_devices: ClientDevices | None = None) -> EncodedBatch:
    """Encode values, in place if all are on one of ``on_devices``. Raises as ``encode``."""
    sizes: list[int] = []
    parts: list[Payload] = []
    descriptors: list[bytes] = []
    devices: set[Device] = set()
    for value, view in zip(values, steps.flat_views(np.ndarray, values, False), strict=True):
        if view is not None:  # usual for engines
            size = len(view)
            sizes.append(size)
            parts.append([view])
            descriptors.append(_flat_array(size))
            continue
        descriptor, own = encode(value, on_devices)
        descriptors.append(descriptor)
        parts.append(own)
        if isinstance(own, list):
            sizes.append(sum(map(len, own)))
        else:
            devices.add(own.device)
            sizes.append(own.nbytes)
    if devices and (len(devices) > 1 or any(isinstance(part, list) and part for part in parts)):
        return encode_all(values)
    return EncodedBatch(sizes, parts, descriptors, devices.pop() if devices else None)


def encode(value: Storable, on_devices: ClientDevices | None = None) -> EncodedValue:
    """Return the bytes and the descriptor of a value.

    A tensor is copied if it is not contiguous, or not in CPU memory, unless ``on_devices`` finds
    it. Its gradient history is dropped.

    Raises:
        UnsupportedValueError: a type, layout or dtype whose bytes mean nothing elsewhere.
    """
    torch = _torch_of(value)
    if torch is not None:
        return _encode_tensor(torch, value, on_devices)  # type: ignore[arg-type]
    if isinstance(value, np.ndarray | np.generic):
        _check_subclass(value)
        array = np.asarray(value)
        descriptor = _describe("numpy", numpy_name(array.dtype), array.shape)
        return EncodedValue(descriptor, _parts(_bytes_of(array)))
    if isinstance(value, list | tuple):
        return _encode_list(value, on_devices)
    if isinstance(value, DeviceMemory):
        if on_devices is None:
            raise UnsupportedValueError("a batch mixes DeviceMemory with values in other memory")
        return EncodedValue(_describe("bytes", "", ()), value)
    if hasattr(value, "__dlpack__"):
        return encode(_from_dlpack(value), on_devices)
    with contextlib.suppress(TypeError):
        data = memoryview(value)  # type: ignore[arg-type]
        if not is_plain(data):
            raise UnsupportedValueError(
                f"a memoryview of format {data.format!r} holds pointers",
                advice="Put plain numbers: one array per field, no objects.",
            )
        if not data.c_contiguous:
            data = memoryview(bytes(data))
        return EncodedValue(_describe("bytes", "", ()), _parts(_flat(data)))
    raise UnsupportedValueError(
        f"{type(value).__name__} cannot be stored",
        advice="Put a torch tensor, a numpy array, a buffer such as bytes, a list of buffers, or "
        "np.asarray(value) if its plain numbers are meant.",
        type=type(value).__name__,
    )


def _from_dlpack(value: Any) -> torch.Tensor | NDArray[np.generic]:
    """Return the array over the same memory: numpy's, or torch's if numpy lacks the dtype or the
    device. Raises UnsupportedValueError."""
    try:
        return np.from_dlpack(value)
    except (BufferError, RuntimeError, TypeError, ValueError):
        try:
            return cast("torch.Tensor", import_torch().from_dlpack(value))
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            name = type(value).__name__
            raise UnsupportedValueError(f"{name} cannot be stored: {error}") from error


def _encode_list(values: Sequence[Storable], on_devices: ClientDevices | None) -> EncodedValue:
    encoded = [encode(part, on_devices) for part in values]
    for part in encoded:
        if (dtype := read_descriptor(part.descriptor).dtype) not in ("", "uint8"):
            raise UnsupportedValueError(
                f"a list of arrays of {dtype} is not one value: only its bytes would be stored",
                advice="Put each under its own key (put_many), np.stack(list), or views as uint8.",
            )
    payloads = [part.parts for part in encoded]
    memories = [payload for payload in payloads if isinstance(payload, DeviceMemory)]
    if memories:
        is_mixed = any(isinstance(payload, list) and payload for payload in payloads)
        if not is_mixed and len({memory.device for memory in memories}) == 1:
            return EncodedValue(_describe("bytes", "", ()), DeviceMemory.joined(memories))
        payloads = [encode(part).parts for part in values]
    host = [view for payload in payloads if isinstance(payload, list) for view in payload]
    return EncodedValue(_describe("bytes", "", ()), host)


def all_writable(
    buffers: Sequence[Buffer | Sequence[Buffer]], on_devices: ClientDevices
) -> tuple[list[Payload], list[str]]:
    """Return ``as_writable`` of each, in columns."""
    views = steps.flat_views(np.ndarray, buffers, True)
    if None not in views:  # usual for engines
        return [[view] for view in views], [""] * len(views)  # type: ignore[list-item]
    each = [as_writable(buffer, on_devices) for buffer in buffers]
    return [payload for payload, _ in each], [dtype for _, dtype in each]


def as_writable(
    buffers: Buffer | Sequence[Buffer], on_devices: ClientDevices
) -> tuple[Payload, str]:
    """As ``writable``; also accepts memory that is all on one device."""
    several = buffers if isinstance(buffers, list | tuple) else [buffers]
    first = several[0] if several else None
    is_elsewhere = _torch_of(first) is not None and first.device.type != "cpu"  # type: ignore[union-attr]
    if not (is_elsewhere or isinstance(first, DeviceMemory)):
        return writable(buffers)
    memories: list[DeviceMemory] = []
    dtypes: set[str] = set()
    for buffer in several:
        memory = buffer if isinstance(buffer, DeviceMemory) else None
        if memory is None and (torch := _torch_of(buffer)) is not None:
            dtype = _fillable_dtype(torch, buffer)  # type: ignore[arg-type]
            dtypes.add("" if dtype == "uint8" else dtype)
            memory = on_devices.memory_of(buffer.detach())  # type: ignore[union-attr]
        if memory is None:
            raise BufferMismatchError("memory of a device goes with no other buffers, or not here")
        memories.append(memory)
    if len(dtypes) > 1 or len({each.device for each in memories}) > 1:
        raise BufferMismatchError("buffers of one value differ in dtype or device")
    return memories[0].joined(memories), dtypes.pop() if dtypes else ""


def writable(buffers: Buffer | Sequence[Buffer]) -> tuple[list[memoryview], str]:
    """Return flat views to fill, and the dtype ("": raw bytes). Raises BufferMismatchError."""
    views: list[memoryview] = []
    dtypes: set[str] = set()
    for buffer in buffers if isinstance(buffers, list | tuple) else [buffers]:
        torch = _torch_of(buffer)
        if torch is not None:
            if buffer.device.type != "cpu":  # type: ignore[union-attr]
                raise BufferMismatchError("a tensor to fill must be in CPU memory here")
            dtype = _fillable_dtype(torch, buffer)  # type: ignore[arg-type]
            view = _bytes_of_tensor(torch, buffer.detach())  # type: ignore[union-attr]
        elif isinstance(buffer, np.ndarray):
            if not buffer.flags.c_contiguous or not buffer.flags.writeable:
                raise BufferMismatchError("a buffer must be contiguous and writable")
            try:
                _check_subclass(buffer)
                dtype, view = numpy_name(buffer.dtype), _bytes_of(buffer)
            except UnsupportedValueError as error:
                raise BufferMismatchError(error.message, advice=error.advice) from None
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
            if not is_plain(raw):
                raise BufferMismatchError(f"a memoryview of format {raw.format!r} holds pointers")
            view, dtype = _flat(raw), ""
        views.append(view)
        dtypes.add("" if dtype in ("uint8", "") else dtype)
    if len(dtypes) > 1:
        raise BufferMismatchError(f"buffers of one value differ in dtype: {sorted(dtypes)}")
    return views, dtypes.pop() if dtypes else ""


def _encode_tensor(
    torch: ModuleType, tensor: torch.Tensor, on_devices: ClientDevices | None
) -> EncodedValue:
    reason = _reject_reason(torch, tensor)
    if reason:
        raise UnsupportedValueError(
            f"a tensor cannot be stored: {reason}",
            advice="Put the dense tensors that it is made of, or value.as_subclass(torch.Tensor).",
            type=type(tensor).__name__,
        )
    descriptor = _describe("torch", torch_name(tensor.dtype), tuple(tensor.shape))
    if tensor.requires_grad:
        tensor = tensor.detach()
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if tensor.device.type != "cpu":
        memory = on_devices.memory_of(tensor) if on_devices is not None else None
        if memory is not None and memory.nbytes:
            return EncodedValue(descriptor, memory)
        tensor = tensor.cpu()
    return EncodedValue(descriptor, _parts(_bytes_of_tensor(torch, tensor)))


def _fillable_dtype(torch: ModuleType, tensor: torch.Tensor) -> str:
    """Return the dtype. Raises BufferMismatchError: the memory is not the tensor's plain values."""
    reason = _reject_reason(torch, tensor)
    if reason or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        raise BufferMismatchError(
            f"a tensor to fill must be dense and contiguous{reason and f': {reason}'}",
            advice="Pass tensor.contiguous(), or get into another tensor and copy.",
        )
    return torch_name(tensor.dtype)


def _reject_reason(torch: ModuleType, tensor: torch.Tensor) -> str:
    """Return the reason why the tensor is not just the numbers in its memory; empty: it is."""
    of: Any = type(tensor)
    if of is not torch.Tensor and of is not torch.nn.Parameter:
        # Parameter classes of engines only record the origin of weights.
        is_wrapper = of.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
        if is_wrapper or not isinstance(tensor, torch.nn.Parameter):
            return f"a {of.__name__} is more than its bytes"
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        return f"its layout is {tensor.layout}, quantized: {tensor.is_quantized}"
    if tensor.is_meta:
        return "a tensor of the device meta has no bytes"
    try:
        count = tensor.numel()
        reach = sum((size - 1) * by for size, by in zip(tensor.shape, tensor.stride(), strict=True))
        end = (tensor.storage_offset() + reach + 1) * tensor.element_size()
        if count and not (tensor.data_ptr() and end <= tensor.untyped_storage().nbytes()):
            return "it has no memory of its own, or less than its shape needs"
    except (RuntimeError, ValueError):  # within torch.func, or a lazy parameter
        return "it has no memory of its own"
    return ""


def _check_subclass(value: NDArray[np.generic] | np.generic) -> None:
    """Raise UnsupportedValueError if a mask, a unit or another meaning would be lost."""
    if isinstance(value, np.ndarray) and type(value) not in (np.ndarray, np.memmap):
        raise UnsupportedValueError(
            f"a {type(value).__name__} is more than its bytes, which are all that would be stored",
            advice="Put what it is made of, or np.asarray(value) if its plain numbers are meant.",
            type=type(value).__name__,
        )


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


def _parts(view: memoryview) -> list[memoryview]:
    return [view] if len(view) else []


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
    if len(descriptor) > DESCRIPTOR_BYTES_MAX or len(shape) > _DIMENSIONS_MAX:
        raise UnsupportedValueError(
            f"a shape of {len(shape)} dimensions does not fit into a header",
            advice="Reshape the tensor to fewer dimensions.",
        )
    return descriptor


@lru_cache(maxsize=4096)
def _flat_array(size: int) -> bytes:
    return _describe("numpy", "uint8", (size,))


_BYTES: Final = ValueDescription("bytes", "", ())
_AS_BYTES: Final = 'Use kind="bytes", or remove the object and put it again.'


@lru_cache(maxsize=4096)
def read_descriptor(descriptor: bytes) -> ValueDescription:
    """Parse a descriptor; its dtype need not exist. Raises CorruptObjectError."""
    try:
        read = json.loads(descriptor)
        kind = read["kind"]
        if kind == "bytes":
            return _BYTES
        dtype, shape = read["dtype"], read["shape"]
        if (
            kind not in ("torch", "numpy")
            or not (isinstance(dtype, str) and dtype.isprintable())
            or not (isinstance(shape, list) and len(shape) <= _DIMENSIONS_MAX)
            or not all(type(size) is int and 0 <= size < 1 << 63 for size in shape)
        ):
            raise ValueError(kind)
        return ValueDescription(kind, dtype, tuple(shape))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptObjectError(
            f"not a descriptor: {descriptor[:64]!r}", advice=_AS_BYTES
        ) from error


def decode(descriptor: bytes, data: Bytes1D, kind: Kind | None = None) -> Value:
    """Return the value over ``data``, which it aliases (``bytes`` are a copy).

    Args:
        kind: kind to return; None: the kind that was put. ``"bytes"`` needs no descriptor.

    Raises:
        UnsupportedValueError: torch, or the dtype, is not available here.
        CorruptObjectError: there is no descriptor, or it does not fit the bytes.
    """
    if kind == "bytes":
        return data.tobytes()
    described = read_descriptor(descriptor)
    requested = kind or described.kind
    if requested == "bytes":
        return data.tobytes()
    if described.kind == "bytes":
        described = ValueDescription("numpy", "uint8", (data.size,))
    if requested == "torch":
        flat = import_torch().from_numpy(data if data.size else np.empty(0, np.uint8))
        return decode_tensor(descriptor, flat)
    dtype = numpy_dtype(described.dtype)
    try:
        return _readable(data.view(dtype).reshape(described.shape))
    except (ValueError, OverflowError) as error:
        raise _disagree(described, data.size) from error


def _disagree(described: ValueDescription, size: int) -> CorruptObjectError:
    return CorruptObjectError(
        f"{size} bytes do not make a {described.dtype} of shape {described.shape}", advice=_AS_BYTES
    )


def _readable(array: NDArray[np.generic]) -> NDArray[np.generic]:
    """Return the array. Raises CorruptObjectError: it holds invalid characters."""
    if array.dtype.kind == "U" and array.size:
        points = np.dtype(np.uint32).newbyteorder(array.dtype.byteorder)
        if int(array.reshape(-1).view(points).max()) > sys.maxunicode:
            raise CorruptObjectError("an array of text holds no text", advice=_AS_BYTES)
    return array


def array_over(
    descriptor: bytes, kind: Kind | None, memory: memoryview, offset: int, size: int
) -> NDArray[np.generic]:
    """Return an array over part of ``memory``: the value, or its bytes if it is no numpy array.

    Raises:
        UnsupportedValueError: the dtype is not available here.
        CorruptObjectError: descriptor and bytes disagree.
    """
    dtype, described, expected = _as_array(descriptor, kind)
    if dtype is None:
        if not size:
            return np.empty(0, np.uint8)
        return np.frombuffer(memory, np.uint8, size, offset)
    if expected != size:
        raise _disagree(described, size)
    try:
        if not size:
            return np.empty(described.shape, dtype)
        return _readable(np.ndarray(described.shape, dtype, memory, offset))
    except (ValueError, OverflowError) as error:
        raise _disagree(described, size) from error


@lru_cache(maxsize=4096)
def _as_array(
    descriptor: bytes, kind: Kind | None
) -> tuple[np.dtype[np.generic] | None, ValueDescription, int]:
    """Return dtype (None: no numpy array), description and size in bytes."""
    described = _BYTES if kind == "bytes" else read_descriptor(descriptor)
    if (kind or described.kind) != "numpy" or described.kind == "bytes":
        return None, described, 0
    dtype = numpy_dtype(described.dtype)
    return dtype, described, math.prod(described.shape) * dtype.itemsize


def described_as(
    shape: int | Sequence[int], dtype: object, kind: Literal["torch", "numpy"]
) -> tuple[bytes, int]:
    """Return descriptor and payload bytes of a value of this shape and dtype.

    Args:
        dtype: a ``torch.dtype`` or its name, or anything that ``numpy.dtype`` accepts.

    Raises:
        UnsupportedValueError: no such dtype here.
    """
    try:
        sizes = tuple(map(operator.index, shape if isinstance(shape, Iterable) else (shape,)))
    except TypeError:
        raise InvalidArgumentError(f"a shape is made of whole numbers, not {shape!r}") from None
    if min(sizes, default=0) < 0:
        raise InvalidArgumentError(f"the sizes of a shape must not be negative: {sizes}")
    if kind == "torch":
        module = import_torch()
        is_one = isinstance(dtype, module.dtype)
        found = cast("torch.dtype", dtype) if is_one else torch_dtype(module, dtype)
        return _describe("torch", torch_name(found), sizes), math.prod(sizes) * found.itemsize
    given = numpy_dtype_given(dtype)
    return _describe("numpy", numpy_name(given), sizes), math.prod(sizes) * given.itemsize


def check_dtype(descriptor: bytes, expected: str) -> None:
    """Raise BufferMismatchError if the object's dtype is not the buffer's, or unreadable."""
    try:
        stored = read_descriptor(descriptor).dtype
    except CorruptObjectError:
        stored = "no dtype that can be read"
    if expected and stored and expected != stored:
        raise BufferMismatchError(
            f"the object holds {stored}, the buffer {expected}",
            advice="Pass a buffer of the stored dtype, or of uint8 for the raw bytes.",
            stored=stored,
            expected=expected,
        )


def decode_tensor(descriptor: bytes, flat: torch.Tensor) -> torch.Tensor:
    """Return the tensor over ``flat``, which it aliases; of ``uint8`` if it was put as bytes.

    Args:
        flat: one-dimensional, of ``uint8``, on any device.

    Raises:
        UnsupportedValueError: this torch does not know the dtype.
        CorruptObjectError: descriptor and bytes disagree.
    """
    described = read_descriptor(descriptor)
    if described.kind == "bytes":
        return flat
    module = import_torch()
    dtype = torch_dtype(module, described.dtype)
    try:
        if not flat.numel():
            flat = flat.new_empty(0)  # empty arrays of numpy have other strides
        return flat.view(dtype).reshape(described.shape)
    except (ValueError, RuntimeError, TypeError) as error:
        raise _disagree(described, flat.numel()) from error


def import_torch() -> ModuleType:
    """Import torch. Raises UnsupportedValueError: it is not installed."""
    try:
        import torch
    except ImportError:
        raise UnsupportedValueError(
            "this needs torch, which is not installed here",
            advice='pip install torch; or use kind="numpy" or kind="bytes".',
        ) from None
    return torch


def _torch_of(value: object) -> ModuleType | None:
    """Return torch if ``value`` is one of its tensors, without importing it."""
    torch = sys.modules.get("torch")
    tensor = getattr(torch, "Tensor", None)  # None while another thread imports it
    return torch if tensor is not None and isinstance(value, tensor) else None
