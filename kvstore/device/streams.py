"""The streams on which a caller computes; ``AsyncClient`` passes them on to its threads."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def current_stream(number: int) -> int:
    """Return the handle of this thread's current stream on a CUDA device; 0: the default one."""
    torch = _torch()
    return int(torch.cuda.current_stream(number).cuda_stream) if torch is not None else 0


def current_device() -> int:
    """Return the number of this thread's current CUDA device."""
    torch = _torch()
    return int(torch.cuda.current_device()) if torch is not None else 0


def current_streams() -> list[torch.cuda.Stream]:
    """Return this thread's current streams on all devices; none if torch does not use CUDA."""
    torch = _torch()
    if torch is None:
        return []
    return [torch.cuda.current_stream(number) for number in range(torch.cuda.device_count())]


@contextmanager
def computing_on(streams: Sequence[int | torch.cuda.Stream]) -> Iterator[None]:
    """Make these streams (at most one per device) current for this thread, before torch's work."""
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
    """Return the driver's handle of a stream."""
    if stream is None or isinstance(stream, int):
        return stream
    return int(stream.cuda_stream)


def _torch() -> Any:
    """Return torch, if it is imported and has initialised CUDA."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)  # None while another thread imports it
    return torch if cuda is not None and cuda.is_initialized() else None
