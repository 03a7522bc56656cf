"""What is written from annotations; that all calls survive the wire is in test_messages.py."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import pytest

from kvstore import calls
from kvstore.calls.field_constraints import IntRange, NameOrEmpty
from kvstore.errors import BatchTooLargeError, InvalidArgumentError
from kvstore.limits import Key, Namespace
from kvstore.v1 import admin_pb2, client_pb2, node_pb2
from kvstore.wire.codec import codec, decoder, encoder

LOOKUP = client_pb2.LookupRequest


class NotInTheMessage(NamedTuple):
    namespace: Namespace
    colour: str


class OfAnotherType(NamedTuple):
    namespace: float


class Bounded(NamedTuple):
    """As ``calls.MasterAccepted``."""

    epoch: Annotated[int, IntRange(3, 5)]
    cluster: NameOrEmpty = ""


@pytest.mark.parametrize("kind", [NotInTheMessage, OfAnotherType])
def test_a_class_that_does_not_fit_its_message_is_refused_at_once(kind: type) -> None:
    with pytest.raises(TypeError, match=kind.__name__):
        codec(kind, LOOKUP.DESCRIPTOR)


@pytest.mark.parametrize(("epoch", "fits"), [(2, False), (3, True), (5, True), (6, False)])
def test_a_bound_is_kept_by_who_decodes(epoch: int, fits: bool) -> None:
    data = encoder(Bounded, node_pb2.MasterAccepted)(Bounded(epoch))
    decode = decoder(Bounded, node_pb2.MasterAccepted)
    if fits:
        assert decode(data) == Bounded(epoch)
    else:
        with pytest.raises(InvalidArgumentError, match="epoch is 3 to 5"):
            decode(data)


def test_rows_are_bounded_where_a_field_says_so() -> None:
    many = [calls.NamespaceStatus(f"n{number}", 1, 2) for number in range(20_000)]
    status = calls.ClusterStatus(1, "v", 2, [], many, [], departed=[], tenants=[])
    data = encoder(calls.ClusterStatus, admin_pb2.ClusterStatus)(status)
    assert decoder(calls.ClusterStatus, admin_pb2.ClusterStatus)(data) == status
    data = client_pb2.MatchPrefixRequest(namespaces=["n"] * 20_000).SerializeToString()
    with pytest.raises(BatchTooLargeError, match="namespaces: 20000 in one call"):
        decoder(calls.MatchPrefix, client_pb2.MatchPrefixRequest)(data)


def test_a_field_of_a_later_release_is_ignored() -> None:
    value = calls.Lookup(Namespace("n"), [Key(b"k")])
    later = client_pb2.SegmentInfo(certified="a field of number 16").SerializeToString()
    data = encoder(calls.Lookup, LOOKUP)(value) + later
    assert decoder(calls.Lookup, LOOKUP)(data) == value
