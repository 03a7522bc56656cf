"""Which stream a caller computes on: work that it queued there comes before its call.

torch keeps the current stream per thread. ``AsyncClient`` makes its calls in other threads, so it
takes the caller's streams along.
"""

from __future__ import annotations

import sys
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch

_carried: Final[ContextVar[tuple[int, ...] | None]] = ContextVar("kvstore_streams", default=None)
"""The handle of the caller's stream, by number of the device; None: this thread is the caller's."""


def current_stream(number: int) -> int:
    """The handle of the caller's stream on a CUDA device; 0: the default one."""
    carried = _carried.get()
    if carried is not None:
        return carried[number] if number < len(carried) else 0
    torch = _torch()
    return int(torch.cuda.current_stream(number).cuda_stream) if torch is not None else 0


def carry() -> None:
    """Called in the caller's thread, within the context in which its call will run."""
    torch = _torch()
    if torch is not None:
        numbers = range(torch.cuda.device_count())
        _carried.set(tuple(int(torch.cuda.current_stream(each).cuda_stream) for each in numbers))


def handle_of(stream: int | torch.cuda.Stream | None) -> int | None:
    """The driver's handle of a stream."""
    if stream is None or isinstance(stream, int):
        return stream
    return int(stream.cuda_stream)


def _torch() -> Any:
    """torch, if it is imported and has begun to use CUDA."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_initialized() else None
