"""What the kernel copies, by Triton's interpreter; and what its compiler makes of it for a GPU."""

from __future__ import annotations

import importlib.util
import re
from types import ModuleType

import numpy as np
import pytest
import torch
import triton
from hypothesis import given
from hypothesis import strategies as st
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvstore.device import kernel
from kvstore.device.driver import PAGE_ALIGNMENT

INTERPRET = "TRITON_INTERPRET"
ROOM = 1 << 12
"""Of a page and what is beside it."""


@pytest.fixture(scope="module")
def interpreted() -> ModuleType:
    """The module once more, whose kernel runs in the interpreter."""
    spec = importlib.util.spec_from_file_location("interpreted_kernel", kernel.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as variables:
        variables.setenv(INTERPRET, "1")
        spec.loader.exec_module(module)
    return module


@given(
    sizes=st.lists(st.integers(1, ROOM // PAGE_ALIGNMENT), min_size=1, max_size=12),
    programs=st.integers(1, 14),
    words=st.sampled_from([16, 64, 1_024]),
    seed=st.integers(0, 1_000),
)
def test_every_page_is_copied_and_nothing_beside_it(
    interpreted: ModuleType, sizes: list[int], programs: int, words: int, seed: int
) -> None:
    chance = np.random.default_rng(seed)
    count = len(sizes)
    source = chance.integers(0, 256, count * ROOM, np.uint8)
    to = np.full(count * ROOM, 255, np.uint8)
    starts, others = (ROOM * chance.permutation(count) for _ in range(2))
    lengths = PAGE_ALIGNMENT * np.array(sizes)
    expected = to.copy()
    for into, out_of, size in zip(starts, others, lengths, strict=True):
        expected[into : into + size] = source[out_of : out_of + size]
    rows = np.stack([to.ctypes.data + starts, source.ctypes.data + others, lengths])
    interpreted.copy_pages[(programs,)](torch.from_numpy(rows), count, WORDS=words)
    assert np.array_equal(to, expected)


@pytest.mark.parametrize("generation", [80, 90, 100])
def test_each_thread_moves_16_bytes_at_a_time_and_reads_four_before_it_writes(
    generation: int,
) -> None:
    """Compiled for a GPU that need not be here: A100, H100, B200."""
    described = ASTSource(
        fn=kernel.copy_pages,
        signature={"rows": "*i64", "count": "i32", "WORDS": "constexpr"},
        constexprs={"WORDS": kernel.TILE_WORDS},
        attrs={(0,): [["tt.divisibility", 16]]},
    )
    target = GPUTarget("cuda", generation, 32)
    made = triton.compile(described, target=target, options=kernel.OPTIONS)
    assert made.asm["cubin"]
    moves = re.findall(r"@%p\d+ (ld|st)\.global\.v2\.b64", made.asm["ptx"])  # within the page
    assert moves == 4 * ["ld"] + 4 * ["st"]
