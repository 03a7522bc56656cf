"""Finds the stream on which a caller computes: a call comes after the work that it has there.

torch keeps the current stream per thread. ``AsyncClient`` makes its calls in other threads, so it
takes the caller's streams along.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def current_stream(number: int) -> int:
    """The handle of the stream of a CUDA device on which this thread computes; 0: the default
    one."""
    torch = _torch()
    return int(torch.cuda.current_stream(number).cuda_stream) if torch is not None else 0


def current_device() -> int:
    """The number of the CUDA device on which this thread computes."""
    torch = _torch()
    return int(torch.cuda.current_device()) if torch is not None else 0


def current_streams() -> list[torch.cuda.Stream]:
    """The streams of all devices on which this thread computes; none if torch does not use CUDA."""
    torch = _torch()
    if torch is None:
        return []
    return [torch.cuda.current_stream(number) for number in range(torch.cuda.device_count())]


@contextmanager
def computing_on(streams: Sequence[int | torch.cuda.Stream]) -> Iterator[None]:
    """Lets this thread compute on these streams, at most one of each device. So what torch has to
    do for a call, such as making a tensor contiguous, comes after the caller's own work.

    Args:
        streams: of torch, or handles of streams on torch's current device.
    """
    torch = _torch()
    if torch is None:
        yield
        return
    with ExitStack() as stack:
        for stream in streams:
            if isinstance(stream, int):
                if not stream:
                    stream = torch.cuda.default_stream()
                else:
                    stream = torch.cuda.ExternalStream(stream)
            stack.enter_context(torch.cuda.stream(stream))
        yield


def handle_of(stream: int | torch.cuda.Stream | None) -> int | None:
    """The driver's handle of a stream."""
    if stream is None or isinstance(stream, int):
        return stream
    return int(stream.cuda_stream)


def _torch() -> Any:
    """torch, if it is imported and has begun to use CUDA."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_initialized() else None
