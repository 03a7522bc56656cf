"""Block hashes, compared with what vLLM 0.32 computed (``hash_block_tokens``, no seed set)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvstore.calls.fleet_records import FleetRecord, parse
from kvstore.limits import BATCH_KEYS_MAX
from kvstore.proxy.records import ALGORITHMS, StoredPrefix, block_hashes, is_usable, keys, serving

TOKENS = [0, 1, 255, 256, 65535, 65536, 151643, 2**31 - 1, 7, 7, 7, 7, 128000, 3, 2, 1]

NONE_HASH = {
    "sha256": "066b1e8987e027138e98701c46128929378935f9b6cd1549105ae6b4f0d71198",
    "sha256_cbor": "9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0",
}
CHAIN = {
    "sha256": [
        "a7ab9b12ccc55769f9c3ea86f7a77c7dde78ab2d4fa304d2deaacb9423bdbead",
        "6a79a81b8c90c9636985196834c27e170e047337bfafd7f306148cae5d789e19",
        "16b8555a0f80e6c42b12be5bfec33322c1fc7277468dba76544f0dbc28db5216",
        "0a48ae94bbe672ef299833108c22fa70eadc03b3d4e720855ca7b6c499ab3661",
    ],
    "sha256_cbor": [
        "b1ac390bff20d6275259815c49d96f738c51110687e2577c76f48499adfe310d",
        "8fc2a29cc7445fc3ee5a232fde1eb7da94fcfee73a960380064a5b68d9548220",
        "491295d3f29c7b524a65195f280ccac4881c9e98f81f708128056b4e86a11bf0",
        "ac815edd739f5443c9595d89b3d08cd46a36daf76ae0753fbc714e2f926075ca",
    ],
}
"""Of TOKENS in blocks of 4."""

SALT = "alice's"
SALTED = {
    "sha256": [
        "0ae4a8f4b1482cde198be6ce06e8be7a05b8250495807eaa28209f814a792720",
        "89ed855baa058a4cb435a318666788effa8f4598532cd78d09c882e9dbb3d135",
        "efaacea45a25d8e734d1ac99e5a721414444c4c6fa2c067c964346a619168586",
        "a123a396e32ce83159c80b67ec9d34818ea26295210cccd5d289a64a282845e7",
    ],
    "sha256_cbor": [
        "64216f565a85c2c3addc484b680e5fdc37ad7007b014e12817ee7fbaff114fce",
        "f4797b7c9d27c6a3f2436e5fc1c99ac3a5591f88b457b73513e3d2741805a3d1",
        "b45dc622ddf0ab2473c806817ca0ec7ef092ac300495442ca0cb1439c4beb064",
        "6911a0a029bf1b174ce66610f64ff36bd00f8f4d82373ea074bb5bcd1921a778",
    ],
}
"""The same blocks with SALT (``generate_block_hash_extra_keys``)."""

LAST_OF_32_BLOCKS = {
    "sha256": "eb4d29dc8631d29ef5a276086810bce9634ada258c42c4e30e78c97f5122b020",
    "sha256_cbor": "8a10bb5502400dfb7d7a06cc0b606673b7da277878e6fd7eb81b772d4138da35",
}
"""Of 0 to 4095 in blocks of 128."""

ONE_LARGE_BLOCK = {
    "sha256": "4b5cf7c1af162450fb1aa2c1295874da0e30c8c689cb2c29f7a2c2c216305ee0",
    "sha256_cbor": "c3e290750a2d07e07d3d720c92eace6252543c71244cccc390245dd5bc8d276a",
}
"""Of 0 to 32767: pickle writes what is longer than 64 KiB in frames."""


def hashed(
    tokens: Any, algorithm: str, *, size: int, blocks_max: int = 999, salt: str = ""
) -> list[str]:
    none_hash = bytes.fromhex(NONE_HASH[algorithm])
    found = block_hashes(
        tokens, block_size=size, none_hash=none_hash, algorithm=algorithm, blocks_max=blocks_max,
        salt=salt,
    )  # fmt: skip
    return [each.hex() for each in found]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_hashes_are_those_of_vllm(algorithm: str) -> None:
    assert hashed(TOKENS, algorithm, size=4) == CHAIN[algorithm]
    assert hashed(TOKENS, algorithm, size=4, salt=SALT) == SALTED[algorithm]
    assert hashed(range(4096), algorithm, size=128)[-1] == LAST_OF_32_BLOCKS[algorithm]
    assert hashed(range(32768), algorithm, size=32768) == [ONE_LARGE_BLOCK[algorithm]]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_only_full_blocks_and_no_more_than_asked_for(algorithm: str) -> None:
    assert hashed(TOKENS[:-1], algorithm, size=4) == CHAIN[algorithm][:3]
    assert hashed(TOKENS, algorithm, size=4, blocks_max=2) == CHAIN[algorithm][:2]
    assert hashed(TOKENS[:3], algorithm, size=4) == []


# --- records -----------------------------------------------------------------------------------


def record(**more: Any) -> dict[str, Any]:
    return {
        "format": 1, "models": ["m", "alias"], "fingerprint": "f", "namespaces": ["a", "b"],
        "block_size": 8, "hash_block_size": 4, "hash_algorithm": "sha256",
        "none_hash": NONE_HASH["sha256"], "description": {"dtype": "bfloat16"}, **more,
    }  # fmt: skip


def parsed(**more: Any) -> FleetRecord | None:
    found = parse(json.dumps(record(**more)).encode())
    return found if found is not None and is_usable(found) else None


def test_a_record_names_the_keys_of_a_prompt() -> None:
    found = parsed()
    assert found is not None
    assert sorted(found.models) == ["alias", "m"]
    assert found.namespaces == ("a", "b")
    assert [key.hex() for key in keys(found, TOKENS)] == CHAIN["sha256"][
        1::2
    ]  # the last hash of each two
    assert [key.hex() for key in keys(found, TOKENS, SALT)] == SALTED["sha256"][1::2]
    assert [key.hex() for key in keys(found, TOKENS[:15])] == CHAIN["sha256"][1:2]
    assert list(keys(found, TOKENS[:7])) == []


def test_no_more_keys_than_one_question_may_have() -> None:
    found = parsed(block_size=2, hash_block_size=1)
    assert found is not None
    assert len(list(keys(found, range(2 * BATCH_KEYS_MAX + 10)))) == BATCH_KEYS_MAX


def test_an_algorithm_that_differs_between_processes_is_passed_over() -> None:
    assert parsed(hash_algorithm="xxhash") is None


@pytest.mark.parametrize(
    "more",
    [
        {"format": 2}, {"models": [7]}, {"namespaces": [""]}, {"namespaces": ["n"] * 257},
        {"block_size": 6}, {"block_size": 0}, {"hash_block_size": True}, {"hash_algorithm": []},
        {"none_hash": "xyz"}, {"none_hash": None},
    ],
)  # fmt: skip
def test_what_is_no_record(more: dict[str, Any]) -> None:
    assert parsed(**more) is None


def test_the_record_that_serves_a_model_is_the_latest() -> None:
    one, other = parsed(), parsed(models=["m", "n"])
    assert one is not None
    assert other is not None
    assert serving([one, other], "m") is one
    assert serving([one, other], "n") is other
    assert serving([one, other], "adapter") is None
    now = one._replace(announced=2.0)
    assert serving([one, other._replace(announced=1.0), now], "m") is now


@pytest.mark.parametrize(
    ("tokens", "blocks", "missing"),
    [
        (8, 0, 0),  # the last token is the decoder's own, so no full block is left
        (9, 0, 8), (16, 1, 0), (17, 2, 0), (100, 99, 0), (100, 0, 96),
    ],
)  # fmt: skip
def test_what_a_prefiller_could_add(tokens: int, blocks: int, missing: int) -> None:
    assert StoredPrefix(blocks, block_size=8).missing_tokens(tokens) == missing
