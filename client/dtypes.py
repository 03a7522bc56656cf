"""Dtypes in descriptors: only those of plain bytes, because any client may write any descriptor."""

from __future__ import annotations

import re
from functools import lru_cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np

from kvstore.errors import UnsupportedValueError

if TYPE_CHECKING:
    import torch

_NAME: Final = re.compile(r"[<>|=]?[A-Za-z]\w{0,30}(\[\d{0,9}[A-Za-z]{1,7}\])?", re.ASCII)
"""Names and type strings of numpy's dtypes, such as ``>i4`` or ``M8[25us]``, but no records."""

_PLAIN_FORMAT: Final = re.compile(r"([@=<>!^|(),0-9 T{}?cbBhHiIlLqQnNefdgsxwupZ]|:[^:]*:)*")
"""Formats of buffers (PEP 3118) without the pointers ``O``, ``P``, ``&`` and ``X``."""


def is_plain(buffer: memoryview) -> bool:
    """Return whether the elements of a buffer hold no pointers."""
    return buffer.format == "B" or _PLAIN_FORMAT.fullmatch(buffer.format) is not None


@lru_cache(maxsize=256)
def numpy_name(dtype: np.dtype[np.generic]) -> str:
    """Return the name of a dtype in descriptors. Raises UnsupportedValueError: there is none."""
    # The name where it is unambiguous; the type string for byte orders, strings and times.
    is_named = dtype.isbuiltin == 2 or (dtype.isnative and dtype.kind in "biufc")
    name = dtype.name if is_named else dtype.str
    try:
        if dtype.names is None and numpy_dtype(name) == dtype:
            return name
    except UnsupportedValueError:
        pass
    raise UnsupportedValueError(
        f"arrays of {dtype} cannot be stored",
        advice="Put plain numbers: one array per field, no objects.",
    )


def torch_name(dtype: torch.dtype) -> str:
    """Return the name of a torch dtype in descriptors. Raises UnsupportedValueError."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(module: ModuleType, name: object) -> torch.dtype:
    """Return the torch dtype of this name. Raises UnsupportedValueError."""
    found = vars(module).get(str(name))
    if not isinstance(found, module.dtype):
        raise UnsupportedValueError(
            f"this torch has no dtype {name!r}", advice='Use kind="numpy" or kind="bytes".'
        )
    return cast("torch.dtype", found)


@lru_cache(maxsize=256)
def numpy_dtype(name: str) -> np.dtype[np.generic]:
    """Return numpy's dtype of this name or type string. Raises UnsupportedValueError."""
    if _NAME.fullmatch(name) is None:
        raise _no_numpy_dtype(name)
    return numpy_dtype_given(name)


def numpy_dtype_given(dtype: object) -> np.dtype[np.generic]:
    """Return the dtype for any form that numpy accepts. Raises UnsupportedValueError."""
    try:
        found = _numpy_dtype(dtype)
    except (ImportError, AttributeError):  # no ml_dtypes, or an older one
        pass
    except (TypeError, ValueError, OverflowError, SyntaxError):  # or of another processor
        pass
    else:
        is_plain = not found.hasobject and found.subdtype is None and found.itemsize
        if is_plain and dtype is not None:  # numpy takes None for float64
            return found
    raise _no_numpy_dtype(dtype)


def _numpy_dtype(dtype: Any) -> np.dtype[np.generic]:
    try:
        found: np.dtype[np.generic] = np.dtype(dtype)
    except TypeError:
        if not isinstance(dtype, str):
            raise
        import ml_dtypes  # adds some to numpy's

        found = np.dtype(getattr(ml_dtypes, dtype))
    return found


def _no_numpy_dtype(dtype: object) -> UnsupportedValueError:
    return UnsupportedValueError(
        f"numpy has no dtype {dtype!r} here",
        advice='Install ml_dtypes, or get(key, kind="torch") or kind="bytes".',
    )
