"""Values that say what they are: each way of being wrong is told from the others."""

from __future__ import annotations

import numpy as np
import pytest

from tests.soak import values

KEY = b"key"
SIZES = (64, 65, 127, 128, 1_000, 100_003)


def made(version: int = 7, size: int = 1_000, *, key: bytes = KEY) -> bytearray:
    return bytearray(values.make("ns", key, version, 1, size).tobytes())


@pytest.mark.parametrize("size", SIZES)
def test_a_whole_value_is_of_its_version(size: int) -> None:
    assert values.look("ns", KEY, bytes(made(size=size))) == values.ObservedValue(7, "")
    assert values.look("ns", KEY, np.frombuffer(made(size=size), np.uint8)).problem == ""


@pytest.mark.parametrize("size", SIZES)
def test_a_value_of_two_versions_is_torn(size: int) -> None:
    if size < 128:
        return
    torn = made(7, size)
    torn[-40:] = made(8, size)[-40:]
    assert values.look("ns", KEY, torn).problem == "torn"


def test_what_another_key_has_is_foreign() -> None:
    assert values.look("ns", KEY, made(key=b"other")).problem == "foreign"
    assert values.look("other", KEY, made()).problem == "foreign"


def test_what_is_no_value_is_garbage() -> None:
    assert values.look("ns", KEY, bytes(1_000)).problem == "garbage"
    assert values.look("ns", KEY, b"x" * 63).problem == "garbage"


def test_inverted_bytes_are_known_as_such() -> None:
    flipped = made()
    for at in (8, 300, 301, 900):
        flipped[at] ^= 0xFF
        seen = values.look("ns", KEY, flipped)
        assert (seen.problem, seen.version, seen.flipped) == ("torn", 7, True)
    flipped[500] ^= 0x0F
    assert not values.look("ns", KEY, flipped).flipped


def test_a_canary_says_where_it_was_touched() -> None:
    memory = np.empty(1_000, np.uint8)
    values.canary(memory, 3)
    assert not values.touched(memory, 3)
    memory[40:50] ^= 1
    assert values.touched(memory, 3) == "10 of 1000 bytes changed, from 40 to 49"
