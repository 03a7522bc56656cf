"""How values are written for people."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.limits import KEY_BYTES_MAX
from kvstore.runtime.formatting import duration_text, key_from_text, key_text, size_text


@given(st.binary(min_size=1, max_size=KEY_BYTES_MAX))
def test_a_written_key_reads_back(key: bytes) -> None:
    assert key_from_text(key_text(key)) == key


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (b"greeting", "greeting"),
        ("Grüße".encode(), "Grüße"),
        (b"\x00\xff", "hex:00ff"),
        (b"a b", "hex:612062"),
        (b"hex:00", "hex:6865783a3030"),
        (b"-o", "hex:2d6f"),
    ],
)
def test_only_plain_text_is_written_as_text(key: bytes, text: str) -> None:
    assert key_text(key) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (999 << 20, "999 MiB"),
        (1 << 30, "1.00 GiB"),
        ((1 << 30) - 1, "1.00 GiB"),
        (25 << 30, "25.0 GiB"),
        (3 << 60, "3072 PiB"),
    ],
)
def test_sizes(size: int, text: str) -> None:
    assert size_text(size) == text


@pytest.mark.parametrize(
    ("milliseconds", "text"),
    [
        (0, "0 ms"),
        (999, "999 ms"),
        (12_300, "12.3 s"),
        (250_000, "4 min 10 s"),
        (12_000_000, "3 h 20 min"),
        (439_200_000, "5 d 2 h"),
    ],
)
def test_durations(milliseconds: int, text: str) -> None:
    assert duration_text(milliseconds) == text
