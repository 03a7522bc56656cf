"""Places in an etcd, as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import InvalidArgumentError
from kvstore.runtime.addresses import EtcdPlace, parse_etcd, shown_place


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("etcd://a", EtcdPlace(("a:2379",))),
        ("a:1,b:2", EtcdPlace(("a:1", "b:2"))),
        ("etcd://a:1;b:2", EtcdPlace(("a:1", "b:2"))),  # as Mooncake's users write it
        ("etcd://[::1]:1,[::2]/my/cluster/", EtcdPlace(("[::1]:1", "[::2]:2379"), "my/cluster")),
        ("etcd://a/p?ca=/f/ca.pem", EtcdPlace(("a:2379",), "p", ca="/f/ca.pem")),
        (
            "etcd://a?ca=ca&cert=c&key=k",
            EtcdPlace(("a:2379",), ca="ca", cert="c", key="k"),
        ),
        ("etcd://me:p%40ss@a", EtcdPlace(("a:2379",), user="me", password="p@ss")),
    ],
)
def test_places(text: str, place: EtcdPlace) -> None:
    assert parse_etcd(text) == place


@pytest.mark.parametrize(
    "text",
    ["etcd://", "etcd://a:x", "etcd://a,", "etcd://a?cafile=x", "etcd://a?cert=c&key=k",
     "etcd://a?ca=c&cert=c", "etcd://@a", "http://a:1", f"etcd://a/{'p' * 200}"],
)  # fmt: skip
def test_what_is_no_place(text: str) -> None:
    with pytest.raises(InvalidArgumentError):
        parse_etcd(text)


def test_a_password_is_not_shown() -> None:
    text = "etcd://me:secret@a:1/p?ca=f"
    assert shown_place(text) == "etcd://a:1/p"
    with pytest.raises(InvalidArgumentError) as caught:
        parse_etcd("etcd://me:secret@a:1?nothing=f")
    assert "secret" not in str(caught.value)
    assert shown_place("a:1,b:2") == "a:1,b:2"


WORDS = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), min_size=1, max_size=9)


@given(
    prefix=WORDS.filter(lambda text: not set(text) & set("/?")),
    user=st.just("") | WORDS,
    password=WORDS,
    ca=st.just("") | WORDS,
    cert=st.just("") | WORDS,
)
def test_a_place_reads_back(prefix: str, user: str, password: str, ca: str, cert: str) -> None:
    place = EtcdPlace(("a:1", "[::1]:2"), prefix, ca)
    if ca and cert:
        place = place._replace(cert=cert, key=cert)
    if user:
        place = place._replace(user=user, password=password)
    assert parse_etcd(str(place)) == place
