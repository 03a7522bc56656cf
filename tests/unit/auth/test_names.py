"""Names of other authorities."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.auth.identity import identity
from kvstore.auth.names import identity_by, load_names
from kvstore.errors import ConfigError, InvalidArgumentError

DECODE = "spiffe://prod/ns/llm/sa/decode"


@pytest.fixture
def names(tmp_path: Path) -> Path:
    path = tmp_path / "names.toml"
    path.write_text(f'"{DECODE}" = "kvstore:engine/decode?read=a/*&write=a/*"\n')
    return path


def test_a_name_stands_for_an_identity(names: Path) -> None:
    known = load_names(str(names))
    who = identity("decode", ["engine"], reads=["a/*"], writes=["a/*"])
    assert identity_by([DECODE], known) == who._replace(other=DECODE)
    assert identity_by([DECODE], known).certified == DECODE
    assert who.certified == "kvstore:decode"
    assert load_names("") == {}


def test_an_own_name_counts_more(names: Path) -> None:
    known = load_names(str(names))
    assert identity_by([DECODE, "kvstore:observer/o"], known) == identity("o", ["observer"])


def test_a_name_that_is_not_known_is_nobody(names: Path) -> None:
    for given in (["spiffe://prod/ns/llm/sa/decode2"], [DECODE.upper()], []):
        with pytest.raises(InvalidArgumentError, match="names 0 identities"):
            identity_by(given, load_names(str(names)))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = ", "is no TOML"),
        ('"spiffe://a" = 3', "no name of another authority"),
        ('"spiffe://a" = "kvstore:king/x"', "no role"),
        ('"kvstore:engine/e" = "kvstore:admin/x"', "no name of another authority"),
    ],
)
def test_what_is_wrong_is_said(names: Path, text: str, says: str) -> None:
    names.write_text(text)
    with pytest.raises(ConfigError, match=says) as caught:
        load_names(str(names))
    assert caught.value.fields["key"] == "auth_names"


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_names(str(tmp_path / "none"))
