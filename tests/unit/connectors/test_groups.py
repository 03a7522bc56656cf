"""Which blocks make up how many tokens, and the unbroken runs of them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.connectors.vllm.groups import NULL_BLOCK, Groups
from kvstore.connectors.vllm.messages import Run

HYBRID = Groups(hash_block_tokens=16, scheduler_block_tokens=96, block_tokens={0: 16, 2: 32, 3: 48})


def hashes(number: int) -> list[bytes]:
    return [b"h%d" % index for index in range(number)]


def runs(
    groups: Groups, tables: Sequence[Sequence[int]], tokens: int,
    *, first: dict[int, int] | None = None, known: int = 100,
) -> list[Run]:  # fmt: skip
    starts = {group: (first or {}).get(group, 0) * size for group, size in groups.chains.items()}
    return list(groups.runs(hashes(known), tables, starts, tokens, tokens))


def test_a_block_of_several_hash_blocks_has_the_hash_at_its_end() -> None:
    assert HYBRID.keys(0, hashes(3)) == [b"h0", b"h1", b"h2"]
    assert HYBRID.keys(2, hashes(5)) == [b"h1", b"h3"]
    assert HYBRID.keys(3, hashes(5)) == [b"h2"]
    assert HYBRID.keys(3, hashes(2)) == []


def test_what_is_aligned_ends_where_blocks_of_all_groups_end() -> None:
    assert [HYBRID.aligned(tokens) for tokens in (0, 95, 96, 97, 200)] == [0, 0, 96, 96, 192]


def test_hash_blocks_are_usually_as_large_as_all_blocks_allow() -> None:
    assert HYBRID.usual_hash_tokens == 16


def test_blocks_that_are_no_multiple_of_hash_blocks_are_refused() -> None:
    with pytest.raises(AssertionError, match="group 1: 24"):
        Groups(hash_block_tokens=16, scheduler_block_tokens=48, block_tokens={0: 16, 1: 24})
    with pytest.raises(AssertionError, match="group 0: 32"):
        Groups(hash_block_tokens=16, scheduler_block_tokens=48, block_tokens={0: 32})


@given(
    steps=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    tables=st.lists(st.lists(st.integers(0, 3), max_size=12), min_size=3, max_size=3),
    first=st.lists(st.integers(0, 14), min_size=3, max_size=3),
    tokens=st.integers(0, 120),
    known=st.integers(0, 30),
)
def test_runs_cover_the_blocks_that_are_not_null_and_each_knows_its_parent(
    steps: list[int], tables: list[list[int]], first: list[int], tokens: int, known: int
) -> None:
    sizes = {group: 4 * step for group, step in enumerate(steps)}
    groups = Groups(hash_block_tokens=4, scheduler_block_tokens=48, block_tokens=sizes)
    starts = dict(enumerate(first))
    found = runs(groups, tables, tokens, first=starts, known=known)
    assert [run.group for run in found] == sorted(run.group for run in found)
    for group, size in sizes.items():
        keys = groups.keys(group, hashes(known))
        end = min(tokens // size, len(tables[group]), len(keys))
        expected = [
            (index, keys[index], tables[group][index])
            for index in range(starts[group], end)
            if tables[group][index] != NULL_BLOCK
        ]
        covered = [
            (run.first + offset, key, block)
            for run in found
            if run.group == group
            for offset, (key, block) in enumerate(zip(run.keys, run.block_ids, strict=True))
        ]
        assert covered == expected
        for run in found:
            if run.group == group:
                assert run.keys
                assert run.parent == (keys[run.first - 1] if run.first else None)
                after = run.first + len(run.keys)  # it was not cut short
                assert after == end or tables[group][after] == NULL_BLOCK
