"""A kernel that copies many small pages at once, in Triton.

Copy engines take a fixed time for each copy, in which they could move some tens of KiB, so pages of
a few KiB leave most of the bus unused. A kernel has as many copies under way as it has programs,
and reads and writes page-locked memory of the host where it is. It takes units on which an engine
computes meanwhile: few of them, because it waits for the bus.
"""

# mypy: allow-untyped-calls, allow-untyped-decorators
# Triton is not installed where the types are checked.

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
import triton
import triton.language as tl

from kvstore.device.driver import Numbers

PROGRAMS: Final = 64
"""Programs at once, each on one page after another: on half of the units of a large GPU, with a
sixteenth of what such a unit can run. With ``TILE_WORDS`` words each, they have several times the
bytes under way that a bus carries in the time of one access."""

TILE_WORDS: Final = 1024
"""Words of 8 bytes that a program reads before it writes: 16 bytes, four times, by 128 threads."""

OPTIONS: Final[dict[str, Any]] = {"num_warps": 128 // 32, "enable_fp_fusion": False}
"""Options of Triton's compiler: warps of 32 threads per program, and no fusion of floating-point
operations, because there are none; that avoids a warning."""


@triton.jit(do_not_specialize=["count"])
def copy_pages(rows, count, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Copies pages between memory that the device reaches: its own, or page-locked.

    Args:
        rows: (3, count) int64, contiguous, on the device: the addresses to copy to, those to copy
            from, and the sizes in bytes. All are multiples of 16.
        count: the number of pages.
        WORDS: words of 8 bytes per step, a power of two: see ``TILE_WORDS``.
    """
    for page in range(tl.program_id(0), count, tl.num_programs(0)):
        to, source = tl.load(rows + page), tl.load(rows + count + page)
        size = tl.load(rows + 2 * count + page)
        # Triton must know that these are multiples of 16 bytes, or each thread moves 8 at a time.
        into = tl.multiple_of(to.to(tl.pointer_type(tl.int64)), 16)
        out_of = tl.multiple_of(source.to(tl.pointer_type(tl.int64)), 16)
        words = tl.multiple_of(size // 8, 2)
        for begin in range(0, words, WORDS):
            at = begin + tl.arange(0, WORDS)
            is_inside = at < words
            tl.store(into + at, tl.load(out_of + at, mask=is_inside), mask=is_inside)


def queue(device: str, stream: int, to: Numbers, source: Numbers, sizes: Numbers) -> None:
    """Queues the kernel on a stream of a device, and does not wait. The first call in a process
    compiles it, or finds it where Triton keeps what it has compiled.

    Args:
        device: as torch names it.
        stream: the driver's handle.
        to: multiples of 16, as are ``source`` and ``sizes``.

    Raises:
        Exception: as Triton and torch raise them: there is no compiler, or the device has failed.
            Nothing is queued that writes to the memory.
    """
    # Leaving the stream makes the previous stream current again. If that were of another device,
    # torch would make a context there. The device is chosen first: torch undoes that without one.
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.ExternalStream(stream, device)):
        # The rows come from page-locked memory, so that the host does not wait for the stream.
        # torch reuses the memory of neither tensor until the stream has passed this point.
        rows = torch.from_numpy(np.stack([to, source, sizes])).pin_memory()
        rows = rows.to(device, non_blocking=True)
        launch = copy_pages[(min(PROGRAMS, len(sizes)),)]
        launch(rows, len(sizes), WORDS=TILE_WORDS, **OPTIONS)
