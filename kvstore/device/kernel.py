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
"""At once, each on one page after another: half of the units of a large GPU, a sixteenth of what
such a unit can run. With ``TILE_WORDS`` it puts the bytes on their way that a bus carries in the
time of one access, several times over."""

TILE_WORDS: Final = 1024
"""Of 8 bytes: what a program reads before it writes. Its 128 threads read four times 16 bytes."""

OPTIONS: Final[dict[str, Any]] = {"num_warps": 128 // 32, "enable_fp_fusion": False}
"""Of Triton's compiler: the threads of a program; nothing is computed, which avoids a warning."""


@triton.jit(do_not_specialize=["count"])
def copy_pages(rows, count, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Copies pages between memory that the device reaches: its own, or page-locked.

    Args:
        rows: (3, count) int64, contiguous, on the device: the addresses to copy to, those to copy
            from, and the sizes in bytes. All are multiples of 16.
        count: pages.
        WORDS: of 8 bytes, a power of two: see ``TILE_WORDS``.
    """
    for page in range(tl.program_id(0), count, tl.num_programs(0)):
        to, source = tl.load(rows + page), tl.load(rows + count + page)
        size = tl.load(rows + 2 * count + page)
        # Said to be multiples of 16 bytes, or each thread would move 8 at a time.
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
    # Leaving the stream restores what was current before. If that were of another device, torch
    # would make a context there; so the device is chosen first, which torch undoes without one.
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.ExternalStream(stream, device)):
        # From page-locked memory, so that nothing waits for the stream. torch keeps both tensors
        # from others until the stream has passed here.
        rows = torch.from_numpy(np.stack([to, source, sizes])).pin_memory()
        rows = rows.to(device, non_blocking=True)
        launch = copy_pages[(min(PROGRAMS, len(sizes)),)]
        launch(rows, len(sizes), WORDS=TILE_WORDS, **OPTIONS)
