"""The MAC of capabilities, and how they are made: by the compiled steps and by those in Python."""

from __future__ import annotations

import random
import struct
from typing import Any

import pytest

from kvstore import native
from kvstore.limits import Key
from kvstore.memory.header import HEADER_BYTES
from kvstore.native import pure_python
from kvstore.native.interface import CAPABILITY_BYTES, HEADER_MAC_BYTES, WIPE_TABLE_BYTES
from kvstore.runtime import tcp_protocol as protocol

VECTORS = """
    a3817f04ba25a8e66df67214c7550293 da87c1d86b99af44347659119b22fc45
    8177228da4a45dc7fca38bdef60affe4 9c70b60c5267a94e5f33b6b02985ed51
    f88164c12d9c8faf7d0f6e7c7bcd5579 1368875980776f8854527a07690e9627
    14eeca338b208613485ea0308fd7a15e a1f1ebbed8dbc153c0b84aa61ff08239
    3b62a9ba6258f5610f83e264f31497b4 264499060ad9baabc47f8b02bb6d71ed
    00110dc378146956c95447d3f3d0fbba 0151c568386b6677a2b4dc6f81e5dc18
    d626b266905ef35882634df68532c125 9869e247e9c08b10d029934fc4b952f7
    31fcefac66d7de9c7ec7485fe4494902 5493e99933b0a8117e08ec0f97cfc3d9
    6ee2a4ca67b054bbfd3315bf85230577 473d06e8738db89854c066c47ae47740
    a426e5e423bf4885294da481feaef723 78017731cf65fab074d5208952512eb1
    9e25fc833f2290733e9344a5e83839eb 568e495abe525a218a2214cd3e071d12
    4a29b54552d16b9a469c10528eff0aae c9d184ddd5a9f5e0cf8ce29a9abf691c
    2db479ae78bd50d8882a8a178a6132ad 8ece5f042d5e447b5051b9eacb8d8f6f
    9c0b53b4b3c307e87eaee08678141f66 abf248af69a6eae4bfd3eb2f129eeb94
    0664da1668574b88b935f3027358aef4 aa4b9dc4bf337de90cd4fd3c467c6ab7
    ea5c7f471faf6bde2b1ad7d4686d2287 2939b0183223fafc1723de4f52c43d35
    7c3956ca5eeafc3e363e9d556546eb68 77c6077146f01c32b6b69d5f4ea9ffcf
    37a6986cb8847edf0925f0f1309b54de a705f0e69da9a8f907241a2e923c8cc8
    3dc47d1f29c448461e9e76ed904f6711 0d62bf01e6fc0e1a0d3c4751c5d3692b
    8c03468bca7c669ee4fd5e084bbee7b5 528a5bb93baf2c9c4473cce5d0d22bd9
    df6a301e95c95dad97ae0cc8c6913bd8 801189902c857f39e73591285e70b6db
    e617346ac9c231bb3650ae34ccca0c5b 27d93437efb721aa401821dcec5adf89
    89237d9ded9c5e78d8b1c9b166cc7342 4a6d8091bf5e7d651189fa94a250b14c
    0e33f96055e7ae893ffc0e3dcf492902 e61c432b720b19d18ec8d84bdc63151b
    f7e5aef549f782cf379055a608269b16 438d030fd0b7a54fa837f2ad201a6403
    a590d3ee4fbf04e3247e0d27f286423f 5fe2c1a172fe93c4b15cd37caef9f538
    2c97325cbd06b36eb2133dd08b3a017c 92c814227a6bca949ff0659f002ad39e
    dce850110bd8328cfbd50841d6911d87 67f14984c7da791248e32bb5922583da
    1938f2cf72d54ee97e94166fa91d2a36 74481e9646ed49fe0f6224301604698e
    57fca5de98a9d6d8006438d0583d8a1d 9fecde1cefdc1cbed4763674d9575359
    e3040c00eb28f15366ca73cbd872e740 7697009a6a831dfecca91c5993670f7a
    5853542321f567a005d547a4f04759bd 5150d1772f50834a503e069a973fbd7c
"""
"""``vectors_sip128`` of https://github.com/veorq/SipHash: under the key 00 01 .. 0f, the MAC of the
first bytes of 00 01 02 .., of none of them to 63. OpenSSL 3.0 gives the same."""

KEY = bytes(range(16))


@pytest.fixture(params=["compiled", "slow"])
def steps(request: pytest.FixtureRequest) -> Any:
    if request.param == "slow":
        return pure_python
    if not native.is_compiled:
        pytest.skip("kvstore.native._native is not built here")
    return native.steps


def test_siphash_is_siphash(steps: Any) -> None:
    assert [steps.siphash(KEY, bytes(range(size))).hex() for size in range(64)] == VECTORS.split()


def mount(key: bytes, generation: int, expires_ms: int) -> bytes:
    return struct.pack("<16sQQ", key, generation, expires_ms)


def test_a_capability_is_of_all_that_it_says(steps: Any) -> None:
    mounts = {7: mount(KEY, 3, 5_000), 8: mount(KEY[::-1], 4, 2**64 - 1)}
    made = steps.issue_capabilities(
        mounts, (7, 8, 9, 7), [4096, 1 << 40, 5, 8192], [0, 100, 1, 2**63], 99, 6, 2
    )
    assert len(made) == 4 * CAPABILITY_BYTES
    expected = b"".join(
        struct.pack("<2Q", expires, 6)
        + pure_python.siphash(key, protocol.pack_capability_input(*said, expires, 6, 2))
        for key, expires, said in (
            (KEY, 5_000, (3, 99, 4096, HEADER_BYTES)),
            (KEY[::-1], 2**64 - 1, (4, 99, 1 << 40, HEADER_BYTES + 100)),
        )
    )
    assert made[:64] == expected
    assert made[64:96] == bytes(32), "a segment without a mount gets none"
    last = pure_python.siphash(
        KEY, protocol.pack_capability_input(3, 99, 8192, HEADER_BYTES + 2**63, 5_000, 6, 2)
    )
    assert made[112:] == last


def test_the_last_order_of_an_extent_counts(steps: Any) -> None:
    """Compiled and in Python they share the table: both write where the other one looks."""
    chance = random.Random(5)
    ours, theirs = (memoryview(bytearray(WIPE_TABLE_BYTES)) for _ in range(2))
    for order in chance.sample(range(1 << 40), 200):
        offsets = [chance.randrange(1 << 48) & -1024 for _ in range(3)] + [4096]
        steps.revoke_writes(ours, offsets, order)
        pure_python.revoke_writes(theirs, offsets, order)
    assert ours == theirs
    assert 500 < sum(map(bool, ours.cast("Q"))) <= 601, "offsets are spread over the table"


# --- stamps --------------------------------------------------------------------------------------


def test_a_stamp_is_of_all_that_a_grant_says(steps: Any) -> None:
    names = ["n", "\u00fc" * 64, "n", "n"]
    keys = [Key(b"k"), Key(b"k" * 256), Key(b"k"), Key(b"nk")]
    versions = [1, 2, 3, 4], [5, 6, 7, 2**64 - 1]
    rows = [7, 8, 9, 7], (4096, 1 << 40, 5, 8192), [0, 100, 1, 2**63], *versions
    made = steps.compute_header_macs({7: KEY, 8: KEY[::-1]}, *rows, names, keys)
    assert len(made) == 4 * HEADER_MAC_BYTES

    def said(row: int) -> bytes:
        name = names[row].encode()
        numbers = struct.pack("<5Q", *(column[row] for column in rows[1:]), len(name))
        return b"KVhead\0\1" + numbers + name + keys[row]

    assert made[:16] == pure_python.siphash(KEY, said(0))
    assert made[16:32] == pure_python.siphash(KEY[::-1], said(1))
    assert made[32:48] == bytes(16), "a segment without a key gets none"
    assert made[48:] == pure_python.siphash(KEY, said(3))


def test_each_field_of_a_header_changes_its_stamp(steps: Any) -> None:
    row: list[Any] = [4096, 100, 1, 2, "ab", Key(b"c")]
    others = [5120, 101, 2, 3, "a", Key(b"bc")]
    rows = [row, *([*row[:at], other, *row[at + 1 :]] for at, other in enumerate(others))]
    rows.append([*row[:4], *others[4:]])  # the same bytes end to end
    made = {steps.compute_header_macs({7: KEY}, [7], *([field] for field in each)) for each in rows}
    made.add(steps.compute_header_macs({7: KEY[::-1]}, [7], *([field] for field in row)))
    assert len(made) == len(rows) + 1
