"""Hashes of smaller blocks than vLLM's: those of an engine that has such blocks."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from kvstore.connectors.vllm.scheduler.block_hashes import BlockHashes, HashCache, block_hashes

ALGORITHM = "sha256_cbor"
SMALL, LARGE = 4, 12


@pytest.fixture(autouse=True, scope="module")
def none_hash() -> None:
    init_none_hash(get_hash_fn_by_name(ALGORITHM))


def request(tokens: int, size: int, **more: Any) -> Request:
    hasher = get_request_block_hasher(size, get_hash_fn_by_name(ALGORITHM))
    sampling = SamplingParams(max_tokens=1)
    return Request("r", list(range(tokens)), sampling, None, block_hasher=hasher, **more)


def smaller() -> BlockHashes:
    return block_hashes(SMALL, LARGE, ALGORITHM)


def image(at: int, length: int) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(
        data=None, modality="image", identifier="i", mm_position=PlaceholderRange(at, length)
    )


@pytest.mark.parametrize(
    "more",
    [
        {}, {"cache_salt": "salt"}, {"lora_request": LoRARequest("a", 1, "/a")},
        {"mm_features": [image(3, 7), image(11, 20)]},
    ],
    ids=["plain", "salt", "adapter", "images"],
)  # fmt: skip
def test_they_are_those_of_an_engine_with_smaller_blocks(more: dict[str, Any]) -> None:
    for tokens in (3, 4, 11, 12, 41):
        ours, theirs = request(tokens, LARGE, **more), request(tokens, SMALL, **more)
        assert smaller().of(ours, HashCache()) == theirs.block_hashes
        assert smaller().covered(ours) == BlockHashes(SMALL).covered(theirs)


def test_hashes_of_vllm_are_taken_as_they_are() -> None:
    same = request(41, SMALL)
    assert block_hashes(SMALL, SMALL, ALGORITHM).of(same, HashCache()) is same.block_hashes


@given(st.integers(0, 30), st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20)), max_size=6))
def test_they_follow_a_session_that_grows_and_replaces_its_last_tokens(
    tokens: int, inputs: list[tuple[int, int]]
) -> None:
    """As ``Scheduler._update_request_as_session`` does."""
    ours, theirs = request(tokens, LARGE), request(tokens, SMALL)
    hashes, known = smaller(), HashCache()
    for number, (dropped, added) in enumerate(inputs):
        assert hashes.of(ours, known) == theirs.block_hashes
        for each, size in ((ours, LARGE), (theirs, SMALL)):
            kept = max(0, each.num_tokens - dropped)
            del each._all_token_ids[kept:]
            del each.block_hashes[kept // size :]
            each._all_token_ids.extend([1_000 + number] * added)
            each.update_block_hashes()
    assert hashes.of(ours, known) == theirs.block_hashes
