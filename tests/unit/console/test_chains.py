"""What a pasted text of keys may mean."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.console.api.chains import keys_of
from kvstore.errors import InvalidArgumentError
from kvstore.limits import Key
from kvstore.runtime.formatting import key_text


@pytest.mark.parametrize(
    ("text", "readings"),
    [
        ("9f86", [[b"\x9f\x86"], [b"9f86"]]),
        ("0x9F86, 0Xab", [[b"\x9f\x86", b"\xab"]]),
        ("hex:9f86 plain", [[b"\x9f\x86", b"plain"]]),
        ("9f86 plain", [[b"9f86", b"plain"]]),
        ('["9f86", "a, b c"]', [[b"9f86", b"a, b c"]]),
        ("'9f86';\n \"abcd\"\t", [[b"\x9f\x86", b"\xab\xcd"], [b"9f86", b"abcd"]]),
        ("9f8", [[b"9f8"]]),
        ("שלום", [["שלום".encode()]]),
    ],
)
def test_readings(text: str, readings: list[list[bytes]]) -> None:
    assert keys_of(text) == readings


@given(st.lists(st.binary(min_size=1, max_size=40).map(Key), min_size=1, max_size=5))
def test_what_ls_shows_is_understood(keys: list[Key]) -> None:
    texts = [key_text(key) for key in keys]
    if not any(set(text) & set(",;'\"[") or not text.isascii() for text in texts):
        assert keys in keys_of("\n".join(texts))
    assert keys in keys_of(" ".join(key.hex() for key in keys))


@given(st.text(max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        readings = keys_of(text)
    except InvalidArgumentError:
        return
    assert all(key for keys in readings for key in keys)
    assert len({len(keys) for keys in readings}) == 1
