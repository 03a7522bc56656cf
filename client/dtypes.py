"""The dtypes that a descriptor may name: those whose elements are plain bytes.

Any client may write any descriptor, so a reader looks for its dtype on these lists, and not in the
modules of numpy and torch, which have other things by such names. No dtype here holds pointers.
"""

from __future__ import annotations

import re
from functools import lru_cache
from types import ModuleType
from typing import TYPE_CHECKING, Final

import numpy as np

from kvstore.errors import UnsupportedValueError

if TYPE_CHECKING:
    import torch

_TORCH: Final = frozenset((
    "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64",
    "float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128",
    "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
    "float4_e2m1fn_x2", "qint8", "qint32", "quint8", "quint4x2", "quint2x4",
    "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2",
    "int1", "int2", "int3", "int4", "int5", "int6", "int7",
    "uint1", "uint2", "uint3", "uint4", "uint5", "uint6", "uint7",
))  # fmt: skip
"""All dtypes that torch has."""

_NUMPY: Final = frozenset((
    "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64",
    "float16", "float32", "float64", "float96", "float128",
    "complex64", "complex128", "complex192", "complex256",
))  # fmt: skip

_ML: Final = frozenset((
    "bfloat16", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn",
    "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float6_e2m3fn",
    "float6_e3m2fn", "float4_e2m1fn", "complex32", "bcomplex32",
    "int1", "int2", "int4", "uint1", "uint2", "uint4",
))  # fmt: skip
"""Those that the package ``ml_dtypes`` adds to numpy's."""

_NUMPY_CODE: Final = re.compile(
    r"[<>|=]?(b1|[iu][1248]|f(2|4|8|12|16)|c(8|16|24|32)|[SUV][1-9][0-9]{0,8}"
    r"|[mM]8(\[[0-9]{0,9}(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as|generic)\])?)"
)
"""numpy's type strings: byte orders, texts that are not empty, times. No objects, no records."""

_PLAIN_FORMAT: Final = re.compile(r"([@=<>!^|(),0-9 T{}?cbBhHiIlLqQnNefdgsxwupZ]|:[^:]*:)*")
"""Formats of buffers (PEP 3118) without ``O``, ``P``, ``&`` and ``X``, which are pointers."""


def is_plain(buffer: memoryview) -> bool:
    """Whether the elements of a buffer hold no pointers."""
    return buffer.format == "B" or _PLAIN_FORMAT.fullmatch(buffer.format) is not None


def _is_numpy(name: str) -> bool:
    return name in _NUMPY or name in _ML or _NUMPY_CODE.fullmatch(name) is not None


@lru_cache(maxsize=256)
def numpy_name(dtype: np.dtype[np.generic]) -> str:
    """The name of a dtype in descriptors. Raises UnsupportedValueError: it is not on the lists."""
    # The name where it is unambiguous; the type string for byte orders, strings and times.
    is_named = dtype.isbuiltin == 2 or (dtype.isnative and dtype.kind in "biufc")
    name = dtype.name if is_named else dtype.str
    is_made_up = dtype.hasobject or dtype.names is not None or dtype.subdtype is not None
    if is_made_up or not _is_numpy(name):
        raise UnsupportedValueError(
            f"arrays of {dtype} cannot be stored",
            advice="Put plain numbers: one array per field, no objects.",
        )
    return name


@lru_cache(maxsize=256)
def torch_name(dtype: torch.dtype) -> str:
    """As ``numpy_name``."""
    name = str(dtype).removeprefix("torch.")
    if name not in _TORCH:
        raise UnsupportedValueError(
            f"tensors of {dtype} cannot be stored", advice="Put tensor.view(torch.uint8)."
        )
    return name


def torch_dtype(module: ModuleType, name: object) -> torch.dtype:
    """The dtype of this name in torch, passed as ``module``. Raises UnsupportedValueError."""
    found: torch.dtype | None = getattr(module, str(name), None) if name in _TORCH else None
    if found is None:
        raise UnsupportedValueError(
            f"this torch has no dtype {name!r}", advice='Ask for kind="numpy" or kind="bytes".'
        )
    return found


def numpy_dtype(name: str) -> np.dtype[np.generic]:
    """numpy's dtype of this name or type string. Raises UnsupportedValueError."""
    try:
        if name in _ML:
            import ml_dtypes

            dtype: np.dtype[np.generic] = np.dtype(getattr(ml_dtypes, name))
            return dtype
        if _is_numpy(name):
            return np.dtype(name)
    except (ImportError, AttributeError):  # no ml_dtypes, or an older one
        pass
    except (TypeError, ValueError, OverflowError):  # of another processor, or too long a text
        pass
    raise _no_numpy_dtype(name)


def numpy_dtype_given(dtype: object) -> np.dtype[np.generic]:
    """The dtype that a caller names in any form that numpy takes. Raises UnsupportedValueError."""
    if isinstance(dtype, str) and _is_numpy(dtype):
        return numpy_dtype(dtype)
    try:
        if dtype is not None:  # numpy takes None for float64
            given: np.dtype[np.generic] = np.dtype(dtype)  # type: ignore[call-overload]
            return given
    except (TypeError, ValueError, SyntaxError):
        pass
    raise _no_numpy_dtype(dtype)


def _no_numpy_dtype(dtype: object) -> UnsupportedValueError:
    return UnsupportedValueError(
        f"numpy has no dtype {dtype!r} here",
        advice='Install ml_dtypes, or get(key, kind="torch") or kind="bytes".',
    )
