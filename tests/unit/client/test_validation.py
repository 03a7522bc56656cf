"""What a program passes to a client, checked."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from kvstore.calls import PutOutcome
from kvstore.client.validation import check_integer, check_integers, duration_ms, flag, sequence
from kvstore.errors import BatchTooLargeError, InvalidArgumentError, InvalidKeyError
from kvstore.limits import check_key, check_keys, check_namespace

WEEK_MS = 604_800_000


@pytest.mark.parametrize(
    ("given", "milliseconds"),
    [
        (60, 60_000),
        (0.0001, 1),
        (1.0005, 1_001),
        (np.int64(5), 5_000),
        (np.float32(1.5), 1_500),
        ("250ms", 250),
        ("60s", 60_000),
        (" 1.5 h ", 5_400_000),
        ("5min", 300_000),
        ("5m", 300_000),
        ("7d", WEEK_MS),
        (timedelta(seconds=1.5), 1_500),
    ],
)
def test_durations(given: Any, milliseconds: int) -> None:
    assert duration_ms("ttl", given, WEEK_MS) == milliseconds


@pytest.mark.parametrize(
    "given",
    ["60", "", "1w", "h", "-1s", "1,5h", "1e3s", "\u0665s", 0, -1, True, float("nan"), float("inf"),
     604_801, "8d", timedelta(0), timedelta(days=-1), b"60s", np.array([1]), [1], object(),
     1 << 2000],
)  # fmt: skip
def test_no_durations(given: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="ttl is"):
        duration_ms("ttl", given, WEEK_MS)


def test_whole_numbers() -> None:
    assert type(check_integer("n", np.int64(5), 0, 9)) is int
    for given in (
        True,
        np.bool_(True),
        1.0,
        "5",
        None,
        b"5",
        [5],
        np.array([5]),
        -1,
        10,
        1 << 5000,
    ):
        with pytest.raises(InvalidArgumentError, match="n is"):
            check_integer("n", given, 0, 9)
    with pytest.raises(InvalidArgumentError, match=r"whole number of bytes, not '5' \(str\)"):
        check_integer("n", "5", 0, 9, "bytes")
    assert check_integers("n", [1, 2], 0, 9) == [1, 2]
    assert check_integers("n", np.array([1, 2]), 0, 9) == [1, 2]
    for several in ([1, 10], [-1], [1, None], 5, "12"):
        with pytest.raises(InvalidArgumentError):
            check_integers("n", several, 0, 9)


def test_flags() -> None:
    assert [flag("f", each) for each in (True, False, 1, 0, np.bool_(True), np.int8(0))] == [
        True, False, True, False, True, False,
    ]  # fmt: skip
    wrong: tuple[Any, ...] = ("no", "", None, 2, -1, 1.0, [], np.array([True, False]))
    for given in wrong:
        with pytest.raises(InvalidArgumentError, match="f is True or False"):
            flag("f", given)


def test_sequences() -> None:
    assert sequence("keys", (each for each in "ab")) == ["a", "b"]
    assert sequence("keys", ["a"]) == ["a"]
    for given in ("ab", b"ab", bytearray(b"ab"), memoryview(b"ab"), 5, None, np.array(5)):
        with pytest.raises(InvalidArgumentError):
            sequence("keys", given)
    with pytest.raises(BatchTooLargeError):
        sequence("keys", iter(lambda: "x", None), 100)


def test_keys_are_the_bytes_that_they_hold() -> None:
    class Text(str):
        __slots__ = ()

        def encode(self, encoding: str = "", errors: str = "") -> bytes:
            return b"other"

    class Data(bytes):
        def __getitem__(self, _: object) -> Any:
            return b"other"

    for given in (Text("key"), Data(b"key"), np.str_("key"), np.bytes_(b"key")):
        assert check_key(given) == b"key"
        assert type(check_key(given)) is bytes
        assert type(check_namespace(str(given)) if isinstance(given, str) else "") is str
    for bad in ("\udcff", "a\ud800b"):
        with pytest.raises(InvalidKeyError, match="valid Unicode"):
            check_key(bad)
        with pytest.raises(InvalidKeyError, match="valid Unicode"):
            check_keys(["fine", bad], distinct=False)


def test_an_outcome_is_a_word() -> None:
    assert str(PutOutcome.STORED) == f"{PutOutcome.STORED}" == "stored"
    assert f"{PutOutcome.BEING_WRITTEN:>14}" == " being_written"
    assert int(PutOutcome.STORED) == 4
