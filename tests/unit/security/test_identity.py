"""Identities, as URIs of certificates, and patterns."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import InvalidArgumentError
from kvstore.security.identity import (
    ALL,
    NODE,
    ROLES,
    check_pattern,
    identity_of,
    matches,
    parse,
    validated_identity,
)

NAMES = st.text(min_size=1, max_size=64).filter(lambda text: text.isprintable() and " " not in text)
BEGINNINGS = st.text(st.characters(exclude_characters="*", codec="utf-8"), max_size=30)
PATTERNS = st.one_of(BEGINNINGS.filter(bool), BEGINNINGS.map(lambda text: f"{text}*"))
SOME = st.lists(PATTERNS, max_size=4).map(tuple)


@settings(max_examples=50)
@given(
    name=NAMES,
    roles=st.sets(st.sampled_from(ROLES), min_size=1),
    reads=SOME,
    writes=SOME,
    nodes=SOME,
    number=st.from_regex(r"[0-9a-f]{1,40}", fullmatch=True) | st.just(""),
)
def test_a_uri_says_all_of_an_identity(
    name: str,
    roles: set[str],
    reads: tuple[str, ...],
    writes: tuple[str, ...],
    nodes: tuple[str, ...],
    number: str,
) -> None:
    who = validated_identity(
        name, roles, reads=reads, writes=writes, nodes=nodes if NODE in roles and nodes else ALL,
        number=number,
    )  # fmt: skip
    assert parse(who.uri) == who
    assert who.uri.isascii()
    assert who.uri.isprintable()
    assert " " not in who.uri


@given(st.text(max_size=80))
def test_any_text_is_an_identity_or_refused(text: str) -> None:
    for uri in (text, f"kvstore:{text}", f"kvstore:engine/{text}", f"kvstore:engine/x?{text}"):
        try:
            found = parse(uri)
        except InvalidArgumentError:
            continue
        assert parse(found.uri) == found


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "spiffe://a/b",
        "kvstore:",
        "kvstore:engine",
        "kvstore:engine/",
        "kvstore:root/x",
        "kvstore:engine+/x",
        "kvstore:engine/a%20b",
        "kvstore:engine/a%0ab",
        "kvstore:engine/%ff",
        "kvstore:engine/x?read=%ff",
        "kvstore:engine/x?read",
        "kvstore:engine/x?read=",
        "kvstore:engine/x?read=*a",
        "kvstore:engine/x?reads=a",
        "kvstore:node/x?node=",
        "kvstore:engine/x?id=1&id=2",
        "kvstore:engine/" + "x" * 65,
        "kvstore:engine/x?" + "&".join(f"read={number}" for number in range(65)),
        "kvstore:engine/x?" + "&".join(f"read={number}" for number in range(300)),
        "kvstore:engine/x?read=" + "x" * 5_000,
    ],
)
def test_what_is_no_identity_is_refused(uri: str) -> None:
    with pytest.raises(InvalidArgumentError):
        parse(uri)


def test_a_blank_pattern_of_nodes_does_not_mean_all() -> None:
    """Was dropped, which left the default: every name."""
    with pytest.raises(InvalidArgumentError, match="no pattern"):
        parse("kvstore:node/x?node=")
    assert parse("kvstore:node/x").may_be_node("any")
    assert not parse("kvstore:node/x?node=host-1").may_be_node("host-2")


def test_a_certificate_names_one_identity() -> None:
    uri = "kvstore:engine/x?read=a"
    assert identity_of(["https://example.org", uri]) == parse(uri)
    for names in ([], ["https://example.org"], [uri, uri], [uri, "kvstore:admin/x"]):
        with pytest.raises(InvalidArgumentError, match="identities"):
            identity_of(names)


@pytest.mark.parametrize(
    ("pattern", "name", "is_so"),
    [
        ("a", "a", True),
        ("a", "ab", False),
        ("a", "", False),
        ("a*", "a", True),
        ("a*", "ab", True),
        ("a*", "b", False),
        ("a/*", "a", False),
        ("a/*", "a/", True),
        ("a/*", "A/b", False),
        ("*", "anything", True),
    ],
)
def test_a_pattern_is_a_name_or_a_beginning(pattern: str, name: str, is_so: bool) -> None:
    check_pattern(pattern)
    assert matches([pattern], name) is is_so
    assert matches(["no", pattern], name) is is_so


@given(BEGINNINGS, st.text(max_size=20))
def test_a_star_takes_every_end(beginning: str, end: str) -> None:
    assert matches([f"{beginning}*"], beginning + end)
    assert matches([beginning], beginning + end) is (not end)


@pytest.mark.parametrize("pattern", ["", "*a", "a*b", "**", "a**", "x" * 129, "é" * 65])
def test_what_is_no_pattern_is_refused(pattern: str) -> None:
    with pytest.raises(InvalidArgumentError):
        check_pattern(pattern)


def test_a_role_or_a_name_that_is_none_is_refused() -> None:
    for roles in ([], ["root"], ["engine", "root"]):
        with pytest.raises(InvalidArgumentError, match="role"):
            validated_identity("x", roles)
    for name in ("", "a b", "a\nb", "x" * 65, "\ud800"):
        with pytest.raises(InvalidArgumentError, match="name"):
            validated_identity(name, ["engine"])


def test_how_it_is_shown() -> None:
    assert validated_identity("x", ["node", "engine"]).display_name == "engine+node x"
