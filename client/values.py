"""Turns values (torch tensors, numpy arrays, bytes) into bytes and back, dtype and shape intact.

A descriptor travels in the header of each object and says what its bytes are: JSON of at most
``DESCRIPTOR_BYTES_MAX`` bytes, ``{"kind": "torch", "dtype": "bfloat16", "shape": [2, 8]}``, so that
other languages can read it. torch is optional and imported only when a tensor is met.

Any client may write any descriptor, so readers believe nothing that it says: the dtype must be one
of plain bytes (``dtypes``), and the shape must fit the payload. An object of which no value
can be made is still its bytes, for those who ask for bytes.
"""

from __future__ import annotations

import json
import math
import operator
import sys
from collections.abc import Iterable, Sequence
from functools import lru_cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Union, cast

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

if TYPE_CHECKING:
    import torch

    from kvstore.client.devices import ClientDevices
    from kvstore.device.device import Device

Kind = Literal["torch", "numpy", "bytes"]
Value = Union["torch.Tensor", NDArray[np.generic], bytes]
"""What ``get`` returns: the kind that was put."""
Storable = Union[
    Value,
    bytearray,
    memoryview,
    "DeviceMemory",
    Sequence[Union[Value, bytearray, memoryview, "DeviceMemory"]],
]
"""What ``put`` takes. ``bytearray`` and ``memoryview`` come back as ``bytes``. A list is a gather
list: its values are stored one after the other, and come back as one ``bytes``."""
View = Union[Value, memoryview]
"""What ``copy=False`` returns: bytes come as a read-only memoryview."""
Buffer = Union["torch.Tensor", NDArray[np.generic], bytearray, memoryview, "DeviceMemory"]
"""What ``get_into`` fills: contiguous and writable."""
Bytes1D = NDArray[np.uint8]
Payload = Union[list[memoryview], "DeviceMemory"]
"""The bytes of one value, or memory to fill: parts of the host's memory, none of them empty, or
memory of a device."""


UNREADABLE = (CorruptObjectError, UnsupportedValueError)
"""Why no value can be made of an object's bytes here."""
Unreadable = CorruptObjectError | UnsupportedValueError
Found = Union[View, None, Unreadable]
"""A value, a miss, or why there is no value."""


class ValueDescription(NamedTuple):
    """A parsed descriptor."""

    kind: Kind
    dtype: str
    """torch's or numpy's name (``bfloat16``, ``float8_e4m3fn``, ``<M8[ns]``); "" for bytes."""
    shape: tuple[int, ...]


class EncodedValue(NamedTuple):
    """A value as bytes, which alias the value where that is contiguous, and on the CPU or on a
    device that kvstore copies from itself."""

    descriptor: bytes
    parts: Payload


class EncodedBatch(NamedTuple):
    """Values as bytes, a row each."""

    sizes: list[int]
    """In bytes."""
    parts: list[Payload]
    """All are in the host's memory, or all on one device; an empty value has no parts."""
    descriptors: list[bytes]
    device: Device | None = None
    """Where the values are; None: in the host's memory."""


# --- values to bytes ---------------------------------------------------------------------------

_DIMENSIONS_MAX: Final = 64
"""The most dimensions that numpy allows."""
_UINT8 = np.dtype(np.uint8)


def encode_all(values: Sequence[Storable], on_devices: ClientDevices | None = None) -> EncodedBatch:
    """The values as bytes. Raises as ``encode``.

    Args:
        on_devices: leaves values where they are, if all of them are on one device. None: they are
            copied to the host's memory.
    """
    sizes: list[int] = []
    parts: list[Payload] = []
    descriptors: list[bytes] = []
    devices: set[Device] = set()
    for value in values:
        if type(value) is np.ndarray and value.dtype is _UINT8:  # a fast path: what engines put
            data = memoryview(value)  # type: ignore[arg-type]
            size = len(data) if data.ndim == 1 and data.c_contiguous else 0
            if size:
                sizes.append(size)
                parts.append([data])
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
    if devices and (len(devices) > 1 or any(isinstance(each, list) and each for each in parts)):
        return encode_all(values)
    return EncodedBatch(sizes, parts, descriptors, devices.pop() if devices else None)


def encode(value: Storable, on_devices: ClientDevices | None = None) -> EncodedValue:
    """The bytes of a value, and the descriptor that says what they are.

    A tensor that is not contiguous is copied once, and so is one that is not in CPU memory, unless
    ``on_devices`` finds it. Its gradient history is left behind.

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
    if isinstance(value, bytes | bytearray | memoryview):
        data = memoryview(value)
        if not is_plain(data):
            raise UnsupportedValueError(
                f"a memoryview of format {data.format!r} holds pointers",
                advice="Put plain numbers: one array per field, no objects.",
            )
        if not data.c_contiguous:
            data = memoryview(bytes(data))
        return EncodedValue(_describe("bytes", "", ()), _parts(_flat(data)))
    if isinstance(value, list | tuple):
        return _encode_list(value, on_devices)
    if isinstance(value, DeviceMemory):
        if on_devices is None:
            raise UnsupportedValueError("a batch mixes DeviceMemory with values in other memory")
        return EncodedValue(_describe("bytes", "", ()), value)
    raise UnsupportedValueError(
        f"{type(value).__name__} cannot be stored",
        advice="Put a torch tensor, a numpy array, bytes, or a list of those.",
        type=type(value).__name__,
    )


def _encode_list(values: Sequence[Storable], on_devices: ClientDevices | None) -> EncodedValue:
    payloads = [encode(part, on_devices).parts for part in values]
    memories = [each for each in payloads if isinstance(each, DeviceMemory)]
    if memories:
        is_mixed = any(isinstance(each, list) and each for each in payloads)
        if not is_mixed and len({memory.device for memory in memories}) == 1:
            return EncodedValue(_describe("bytes", "", ()), DeviceMemory.joined(memories))
        payloads = [encode(part).parts for part in values]
    host = [view for each in payloads if isinstance(each, list) for view in each]
    return EncodedValue(_describe("bytes", "", ()), host)


def as_writable(
    buffers: Buffer | Sequence[Buffer], on_devices: ClientDevices
) -> tuple[Payload, str]:
    """As ``writable``; also takes memory that is all on one device."""
    if type(buffers) is np.ndarray and buffers.dtype is _UINT8:  # as in ``encode_all``
        data = memoryview(buffers)  # type: ignore[arg-type]
        if data.ndim == 1 and data.c_contiguous and not data.readonly and data:
            return [data], ""
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
    """Caller's memory to fill, as flat views, and the dtype it expects ("" for raw bytes).

    Raises:
        BufferMismatchError: not contiguous, read-only, not in CPU memory, or mixed dtypes.
    """
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
    why = _reject_reason(torch, tensor)
    if why:
        raise UnsupportedValueError(
            f"a tensor cannot be stored: {why}",
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
    """Raises BufferMismatchError: the tensor's memory is not its plain values in their order."""
    why = _reject_reason(torch, tensor)
    if why or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        raise BufferMismatchError(
            f"a tensor to fill must be dense and contiguous{why and f': {why}'}",
            advice="Pass tensor.contiguous(), or get into another tensor and copy.",
        )
    return torch_name(tensor.dtype)


def _reject_reason(torch: ModuleType, tensor: torch.Tensor) -> str:
    """Why the tensor is not just the numbers in its memory; empty: it is."""
    of: Any = type(tensor)
    if of is not torch.Tensor and of is not torch.nn.Parameter:
        # An engine's own classes of parameters say where weights come from, and no more.
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
    """Raises UnsupportedValueError: a mask, a unit or another meaning would be lost."""
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


# --- bytes to values ---------------------------------------------------------------------------

_BYTES: Final = ValueDescription("bytes", "", ())
_AS_BYTES: Final = 'Ask for kind="bytes", or remove the object and put it again.'


@lru_cache(maxsize=4096)
def read_descriptor(descriptor: bytes) -> ValueDescription:
    """What a descriptor says; its dtype need not exist.

    Raises:
        CorruptObjectError: not a descriptor of this format.
    """
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
    """The value whose bytes are ``data``, which it aliases (``bytes`` are a copy).

    Args:
        kind: what to return; None: the kind that was put. ``"bytes"`` needs no descriptor.

    Raises:
        UnsupportedValueError: torch, or the dtype, is not available here.
        CorruptObjectError: there is no descriptor, or it and the bytes disagree.
    """
    if kind == "bytes":
        return data.tobytes()
    described = read_descriptor(descriptor)
    wanted = kind or described.kind
    if wanted == "bytes":
        return data.tobytes()
    if described.kind == "bytes":
        described = ValueDescription("numpy", "uint8", (data.size,))
    if wanted == "torch":
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
    """The array. Raises CorruptObjectError: it holds numbers that are no characters."""
    if array.dtype.kind == "U" and array.size:
        points = np.dtype(np.uint32).newbyteorder(array.dtype.byteorder)
        if int(array.reshape(-1).view(points).max()) > sys.maxunicode:
            raise CorruptObjectError("an array of text holds no text", advice=_AS_BYTES)
    return array


def array_over(
    descriptor: bytes, kind: Kind | None, memory: memoryview, offset: int, size: int
) -> NDArray[np.generic]:
    """A new array over ``size`` bytes of ``memory``, which it keeps alive: the value, if that is to
    be a numpy array, otherwise its bytes.

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
    """The dtype, what the descriptor says, and the size in bytes; dtype None: no numpy array."""
    described = _BYTES if kind == "bytes" else read_descriptor(descriptor)
    if (kind or described.kind) != "numpy" or described.kind == "bytes":
        return None, described, 0
    dtype = numpy_dtype(described.dtype)
    return dtype, described, math.prod(described.shape) * dtype.itemsize


def described_as(
    shape: int | Sequence[int], dtype: object, kind: Literal["torch", "numpy"]
) -> tuple[bytes, int]:
    """The descriptor and the payload bytes of a value of this shape and dtype.

    Args:
        dtype: a ``torch.dtype`` or torch's name of one, or anything that ``numpy.dtype`` takes.

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
    """Raises BufferMismatchError: the object holds another dtype than the buffer, or one that
    cannot be read."""
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
    """The tensor whose bytes are in ``flat``, which it aliases. A value put as bytes is
    a tensor of ``uint8``.

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
    """Raises UnsupportedValueError: it is not installed."""
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
