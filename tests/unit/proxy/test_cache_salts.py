"""Which salt a request gets: the caller's own, whatever it sends."""

from __future__ import annotations

import hashlib
import hmac
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as running
from hypothesis import strategies as st
from multidict import CIMultiDict, CIMultiDictProxy

from kvstore.config import ProxyConfig, load
from kvstore.errors import ConfigError
from kvstore.proxy.cache_salts import CacheSalts, salts_by

SECRET = "0123456789abcdef-secret"
SALTS = CacheSalts("authorization", SECRET)

texts = st.text(max_size=20)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)


def salt(caller: str, **body: Any) -> Any:
    return SALTS.salted(caller, {"prompt": "p", **body})["cache_salt"]


def test_the_salt_is_a_mac_of_caller_and_own_salt() -> None:
    said = b'["Bearer a", null]'
    assert salt("Bearer a") == hmac.new(SECRET.encode(), said, hashlib.sha256).hexdigest()
    assert SALTS.salted("Bearer a", {"prompt": "p"}) == {
        "prompt": "p", "cache_salt": salt("Bearer a"),
    }  # fmt: skip
    assert (
        salt("Bearer a") == CacheSalts("authorization", SECRET).salted("Bearer a", {})["cache_salt"]
    )
    assert salt("Bearer a") != CacheSalts("authorization", SECRET + "x").salted("Bearer a", {})


@running(max_examples=50)
@given(st.tuples(texts, values), st.tuples(texts, values))
def test_only_equal_callers_with_equal_salts_share(one: Any, other: Any) -> None:
    are_equal = json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
    assert (salt(one[0], cache_salt=one[1]) == salt(other[0], cache_salt=other[1])) is are_equal


def test_no_salt_of_its_own_gives_a_caller_the_salt_of_another() -> None:
    wanted = salt("Bearer a")
    for own in (wanted, '["Bearer a", null]', ["Bearer a"], 'null]["Bearer a"'):
        assert salt("Bearer b", cache_salt=own) != wanted


@pytest.mark.parametrize(
    ("headers", "caller"),
    [
        ([("Authorization", "Bearer a")], "Bearer a"),
        ([("AUTHORIZATION", "Bearer a")], "Bearer a"),
        ([("Authorization", "")], None),
        ([("X-User", "a")], None),
        ([], None),
        ([("Authorization", "Bearer a"), ("authorization", "Bearer b")], None),
        ([("Authorization", "Bearer a"), ("authorization", "Bearer a")], None),
    ],
)
def test_who_calls_is_in_one_header(headers: list[tuple[str, str]], caller: str | None) -> None:
    assert SALTS.caller(CIMultiDictProxy(CIMultiDict(headers))) == caller


# --- settings ---------------------------------------------------------------------------------


def secret_file(directory: Path, text: str = SECRET, mode: int = 0o600) -> str:
    path = directory / "secret"
    path.write_text(text + "\n")
    path.chmod(mode)
    return str(path)


def test_the_secret_is_in_a_file(tmp_path: Path) -> None:
    config = load(
        ProxyConfig,
        {"cache_salt_from": "Authorization", "cache_salt_secret_file": secret_file(tmp_path)},
        environ={},
    )
    salts = salts_by(config)
    assert salts is not None
    assert salts.salted("c", {}) == SALTS.salted("c", {})
    assert SECRET not in repr(config)
    assert salts_by(load(ProxyConfig, environ={})) is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"cache_salt_from": "authorization"}, "requires a secret"),
        ({"cache_salt_secret_file": "f"}, "cache_salt_from is required"),
        ({"cache_salt_from": "a b", "cache_salt_secret_file": "f"}, "not the name of a header"),
    ],
)
def test_settings_that_are_no_use(given: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load(ProxyConfig, given, environ={})


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        ("", 0o600, "holds no token"),
        ("short-secret", 0o600, "16 to 256"),
        (SECRET, 0o604, "every user of this host may read"),
        (None, 0o600, "cannot be read"),
    ],
)
def test_a_file_that_is_of_no_use(tmp_path: Path, text: str | None, mode: int, said: str) -> None:
    path = str(tmp_path / "none") if text is None else secret_file(tmp_path, text, mode)
    config = ProxyConfig(cache_salt_from="a", cache_salt_secret_file=path)
    with pytest.raises(ConfigError, match=said) as raised:
        salts_by(config)
    assert raised.value.fields["key"] == "cache_salt_secret_file"
    assert SECRET not in str(raised.value)
