"""Puts and gets of torch tensors in the format of Mooncake's client: a header of 304 bytes, then
the tensor's bytes.

``get`` returns the same bytes as Mooncake's, and ``put_tensor_from`` can put a buffer filled by
``get_tensor_into``. ``*_with_tp`` store the slices of a tensor as separate objects.

Only the calls that make a tensor import torch, because most engines use none of them.
"""

from __future__ import annotations

import inspect
import math
import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

from kvstore.client.values import Storable, encode
from kvstore.connectors.mooncake.mooncake_types import Code, ReplicateConfig
from kvstore.connectors.mooncake.objects import Found, ObjectAccess
from kvstore.errors import KVStoreError

if TYPE_CHECKING:
    import torch

_HEADER: Final = struct.Struct("<4sHHiiQQQ8q8q136x")
"""The header: magic, version, bytes of the header, dtype, dimensions, layout (0: complete), offset
and bytes of the payload, the shape, and the shape of the complete tensor, which is the same."""

_MAGIC: Final = b"NOOM"
_VERSION: Final = 1
_DIMENSIONS_MAX: Final = 8
_DTYPES: Final = (
    "float32", "float64", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64",
    "bool", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2",
)  # fmt: skip
"""The dtypes, in the order of Mooncake's numbers."""

_ELEMENT: Final = {
    "keys": "key", "base_keys": "key", "tensors_list": "tensor", "buffer_ptrs": "buffer_ptr",
    "sizes": "size",
}  # fmt: skip
"""The name of the parameter for one element, by name of the parameter for the list."""

Configured = ReplicateConfig | None


def encoded(tensor: Any) -> Storable | Code:
    """Return header and payload of a tensor. The payload of a contiguous CPU tensor aliases it."""
    if not _is_tensor(tensor):
        return Code.INVALID_PARAMS
    try:
        parts = cast("list[memoryview]", encode(tensor).parts)
    except KVStoreError:  # for example a sparse tensor
        return Code.INVALID_PARAMS
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in _DTYPES or tensor.ndim > _DIMENSIONS_MAX:
        return Code.INVALID_PARAMS
    shape = [*tensor.shape, *[-1] * (_DIMENSIONS_MAX - tensor.ndim)]
    header = _HEADER.pack(
        _MAGIC, _VERSION, _HEADER.size, _DTYPES.index(dtype), tensor.ndim, 0,
        _HEADER.size, sum(map(len, parts)), *shape, *shape,
    )  # fmt: skip
    return [memoryview(header), *parts]


def decoded(data: memoryview) -> torch.Tensor | None:
    """Return the tensor encoded in ``data``, over the same memory, or None."""
    import torch

    if len(data) < _HEADER.size:
        return None
    magic, version, _, number, ndim, _, start, size, *shapes = _HEADER.unpack_from(data)
    if (magic, version, start) != (_MAGIC, _VERSION, _HEADER.size) or start + size != len(data):
        return None
    if not (0 <= number < len(_DTYPES) and 0 <= ndim <= _DIMENSIONS_MAX):
        return None
    dtype, shape = getattr(torch, _DTYPES[number], None), shapes[:ndim]
    if dtype is None or min(shape, default=0) < 0 or size != math.prod(shape) * dtype.itemsize:
        return None
    if not size:
        try:
            return torch.empty(shape, dtype=dtype, device="cpu")
        except RuntimeError:  # no bytes, but its other dimensions overflow
            return None
    return torch.frombuffer(data, dtype=dtype, offset=start).reshape(shape)


def _of_one(batch: Callable[..., list[Any]]) -> Callable[..., Any]:
    """Make the method for one key from the method for many keys. Each list among its parameters
    becomes one element, with the name in the singular."""
    many = inspect.signature(batch)
    one = many.replace(
        parameters=[parameter.replace(name=_ELEMENT.get(name, name), annotation=Any)
                    for name, parameter in many.parameters.items()],
        return_annotation=Any,
    )  # fmt: skip
    is_list = [name in _ELEMENT for name in many.parameters]

    def method(*given: Any, **named: Any) -> Any:
        bound = one.bind(*given, **named)
        bound.apply_defaults()
        values = zip(bound.arguments.values(), is_list, strict=True)
        return batch(*([value] if listed else value for value, listed in values))[0]

    method.__name__ = batch.__name__.removeprefix("batch_")
    method.__signature__ = one  # type: ignore[attr-defined]
    return method


class TensorMethods:
    """Methods of the store that put and get tensors. ``_of_one`` makes the method for a single key
    from each method for many keys.

    A put takes a tensor on any device, and copies it before it returns; a get returns it in CPU
    memory. Dtypes and shapes that the header cannot describe are INVALID_PARAMS. ``put`` keeps an
    existing value, ``upsert`` replaces it; ``pub`` is ``put`` with a configuration.
    """

    _objects: ObjectAccess

    def batch_put_tensor(
        self, keys: Sequence[str], tensors_list: Sequence[Any], config: Configured = None
    ) -> list[int]:
        """Return per key 0 or a code."""
        return self._objects.put(keys, [encoded(tensor) for tensor in tensors_list], config)

    def batch_upsert_tensor(
        self, keys: Sequence[str], tensors_list: Sequence[Any], config: Configured = None
    ) -> list[int]:
        values = [encoded(tensor) for tensor in tensors_list]
        return self._objects.put(keys, values, config, overwrite=True)

    batch_pub_tensor = batch_put_tensor
    batch_upsert_pub_tensor = batch_upsert_tensor
    put_tensor = pub_tensor = _of_one(batch_put_tensor)
    upsert_tensor = upsert_pub_tensor = _of_one(batch_upsert_tensor)

    # --- registered memory: header and payload, ``size`` bytes in total ---------------------

    def batch_put_tensor_from(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        """Return per key 0 or a code; INVALID_PARAMS for memory that does not hold a tensor."""
        return self._objects.put(keys, self._registered_ranges(buffer_ptrs, sizes), None)

    def batch_upsert_tensor_from(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        return self._objects.put(
            keys, self._registered_ranges(buffer_ptrs, sizes), None, overwrite=True
        )

    put_tensor_from = _of_one(batch_put_tensor_from)
    upsert_tensor_from = _of_one(batch_upsert_tensor_from)

    def _registered_ranges(self, pointers: Sequence[int], sizes: Sequence[int]) -> list[Found]:
        return [
            Code.INVALID_PARAMS if _tensor_in(memory) is None else memory
            for memory in self._objects.memories_of(pointers, sizes)
        ]

    def batch_get_tensor(self, keys: Sequence[str]) -> list[Any]:
        """Return per key a new tensor; None on a miss, an error, or a value that is no tensor."""
        handles = self._objects.handles(keys)
        return [None if handle is None else decoded(handle.data) for handle in handles]

    def batch_get_tensor_into(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> list[Any]:
        """Return per key a tensor over registered memory, which also holds the header; or None as
        for ``batch_get_tensor``. Only codes if the lists differ in length."""
        if not len(keys) == len(buffer_ptrs) == len(sizes):
            return [Code.INVALID_PARAMS] * len(keys)
        memories = self._objects.memories_of(buffer_ptrs, sizes)
        read = self._objects.get_into(keys, memories)
        return [
            None if isinstance(memory, Code) or size < 0 else _tensor_in(memory, size)
            for memory, size in zip(memories, read, strict=True)
        ]

    get_tensor = _of_one(batch_get_tensor)
    get_tensor_into = _of_one(batch_get_tensor_into)

    # --- slices: that of rank R of key K has the key K_tp_R -----------------------------------

    def batch_put_tensor_with_tp(
        self,
        base_keys: Sequence[str],
        tensors_list: Sequence[Any],
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> list[int]:
        return self.batch_pub_tensor_with_tp(
            base_keys, tensors_list, None, tp_rank, tp_size, split_dim
        )

    def batch_pub_tensor_with_tp(
        self,
        base_keys: Sequence[str],
        tensors_list: Sequence[Any],
        config: Configured = None,
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> list[int]:
        """Put the slices of all ranks, whatever ``tp_rank`` is. Return per tensor 0 or a code:
        INVALID_PARAMS if dimension ``split_dim`` is not a multiple of ``tp_size``."""
        del tp_rank
        if len(base_keys) != len(tensors_list):
            return [Code.INVALID_PARAMS] * len(base_keys)
        codes = []
        for key, tensor in zip(base_keys, tensors_list, strict=True):
            slices = _slices(tensor, tp_size, split_dim)
            names = [_name_of_slice(key, rank, tp_size) for rank in range(len(slices))]
            put = self.batch_put_tensor(names, slices, config) if key else []
            codes.append(
                next((code for code in put if code), Code.OK if put else Code.INVALID_PARAMS)
            )
        return codes

    def batch_put_tensor_with_tp_from(
        self,
        base_keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> list[int]:
        """As ``batch_put_tensor_with_tp``, for complete tensors in registered memory."""
        tensors = [_tensor_in(memory) for memory in self._objects.memories_of(buffer_ptrs, sizes)]
        return self.batch_put_tensor_with_tp(base_keys, tensors, tp_rank, tp_size, split_dim)

    def batch_get_tensor_with_tp(
        self, base_keys: Sequence[str], tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0
    ) -> list[Any]:
        """Return per key the slice of this rank, or None."""
        del split_dim
        return self.batch_get_tensor([_name_of_slice(key, tp_rank, tp_size) for key in base_keys])

    def batch_get_tensor_with_tp_into(
        self,
        base_keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> list[Any]:
        del split_dim
        keys = [_name_of_slice(key, tp_rank, tp_size) for key in base_keys]
        return self.batch_get_tensor_into(keys, buffer_ptrs, sizes)

    put_tensor_with_tp = _of_one(batch_put_tensor_with_tp)
    pub_tensor_with_tp = _of_one(batch_pub_tensor_with_tp)
    put_tensor_with_tp_from = _of_one(batch_put_tensor_with_tp_from)
    get_tensor_with_tp = _of_one(batch_get_tensor_with_tp)
    get_tensor_with_tp_into = _of_one(batch_get_tensor_with_tp_into)


def _is_tensor(value: object) -> bool:
    """Return whether this is a torch tensor, without importing torch."""
    return type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "dtype")


def _tensor_in(memory: Found, size: int | None = None) -> torch.Tensor | None:
    """Return the tensor in the first ``size`` bytes of memory at one address, or None."""
    if isinstance(memory, Code) or len(memory) != 1:
        return None
    return decoded(memory[0][:size])


def _slices(tensor: Any, count: int, dim: int) -> Sequence[Any]:
    """Return equal parts of a tensor along a dimension; empty if it is not divisible."""
    if count <= 1:
        return [tensor]
    if not _is_tensor(tensor) or not 0 <= dim < tensor.ndim or tensor.shape[dim] % count:
        return []
    parts: Sequence[Any] = tensor.chunk(count, dim)
    return parts


def _name_of_slice(key: str, rank: int, size: int) -> str:
    return f"{key}_tp_{rank}" if size > 1 else key
