"""Every message survives the wire; whatever else comes in, only typed errors come out."""

from __future__ import annotations

import typing
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import calls
from kvstore.errors import (
    BatchTooLargeError,
    DuplicateKeyError,
    InvalidArgumentError,
    InvalidKeyError,
    ProtocolError,
    UsageError,
)
from kvstore.limits import BATCH_KEYS_MAX, Key, Namespace
from kvstore.v1 import admin_pb2, client_pb2, common_pb2, node_pb2
from kvstore.wire import messages, node_messages
from kvstore.wire.messages import BY_WIRE_NAME, CALLS, RpcMethod
from tests.support.wire_values import MASTER_MESSAGES, NODE_MESSAGES, REPLIES, REQUESTS

NAMESPACE = Namespace("default")
ROWS = list(CALLS.values())
NAMES = [row.name for row in ROWS]
# There are some eighty of these tests, so each draws fewer examples than the profile says.
few = settings(max_examples=max(settings().max_examples // 4, 10))
by_row = pytest.mark.parametrize("row", ROWS, ids=NAMES)


def test_the_table_holds_every_request() -> None:
    assert set(CALLS) == set(typing.get_args(calls.Request))
    assert {row.wire_name.decode() for row in BY_WIRE_NAME.values()} == set(NAMES)


@by_row
@few
@given(data=st.data())
def test_a_request_comes_out_as_it_went_in(row: RpcMethod[Any, Any], data: st.DataObject) -> None:
    request = data.draw(REQUESTS[row.request])
    assert messages.decode_request(row, messages.encode_request(request)) == request


@by_row
@few
@given(data=st.data())
def test_a_reply_comes_out_as_it_went_in(row: RpcMethod[Any, Any], data: st.DataObject) -> None:
    reply = data.draw(REPLIES[row.reply])
    assert messages.decode_reply(row, row.encode_reply(reply)) == reply


@pytest.mark.parametrize("kind", NODE_MESSAGES, ids=lambda kind: kind.__name__)
@few
@given(data=st.data())
def test_a_node_message_comes_out_as_it_went_in(kind: type, data: st.DataObject) -> None:
    message = data.draw(NODE_MESSAGES[kind])
    encoded = node_messages.encode_node_message(message)
    assert node_messages.decode_node_message(encoded) == message


@pytest.mark.parametrize("kind", MASTER_MESSAGES, ids=lambda kind: kind.__name__)
@few
@given(data=st.data())
def test_a_master_message_comes_out_as_it_went_in(kind: type, data: st.DataObject) -> None:
    message = data.draw(MASTER_MESSAGES[kind])
    encoded = node_messages.encode_master_message(message)
    assert node_messages.decode_master_message(encoded) == message


# --- hostile bytes -----------------------------------------------------------------------------


def mangled(data: st.DataObject, valid: bytes) -> bytes:
    """``valid`` with some bytes changed, cut out or put in."""
    mutable = bytearray(valid)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(mutable)))
        cut = data.draw(st.integers(0, 3))
        mutable[at : at + cut] = data.draw(st.binary(max_size=4))
    return bytes(mutable)


@by_row
@few
@given(garbage=st.binary(max_size=200))
def test_random_bytes_are_refused_or_valid(row: RpcMethod[Any, Any], garbage: bytes) -> None:
    only_typed_errors(lambda: messages.decode_request(row, garbage))
    only_typed_errors(lambda: messages.decode_reply(row, garbage))


@by_row
@few
@given(data=st.data())
def test_mangled_requests_are_refused_or_valid(
    row: RpcMethod[Any, Any], data: st.DataObject
) -> None:
    valid = messages.encode_request(data.draw(REQUESTS[row.request]))
    only_typed_errors(lambda: messages.decode_request(row, mangled(data, valid)))


@given(data=st.data())
def test_mangled_stream_messages_are_refused_or_valid(data: st.DataObject) -> None:
    node = data.draw(st.one_of(*NODE_MESSAGES.values()))
    encoded = mangled(data, node_messages.encode_node_message(node))
    only_typed_errors(lambda: node_messages.decode_node_message(encoded))
    master = data.draw(st.one_of(*MASTER_MESSAGES.values()))
    encoded = mangled(data, node_messages.encode_master_message(master))
    only_typed_errors(lambda: node_messages.decode_master_message(encoded))


def only_typed_errors(decode: Any) -> None:
    try:
        decode()
    except (UsageError, ProtocolError):
        pass


# --- bounds ------------------------------------------------------------------------------------

Keys = common_pb2.Keys
Column = common_pb2.Column
Placements = common_pb2.Placements


def exists(**keys: Any) -> client_pb2.ExistsRequest:
    return client_pb2.ExistsRequest(namespace="n", keys=Keys(**keys))


def put_start(**fields: Any) -> client_pb2.PutStartRequest:
    valid: dict[str, Any] = {
        "namespace": "n",
        "keys": Keys(data=b"abcd", size=2),
        "sizes": Column(repeats=2, same=5),
        "replicas": 1,
    }
    return client_pb2.PutStartRequest(**{**valid, **fields})


LONG, SIZE_MAX, WAIT_MAX, TTL_MAX = Key(b"k" * 256), 1 << 48, 3_600_000, 604_800_000
AVOIDED = (bytes(16),) * 64
AT_THEIR_BOUNDS: tuple[calls.Request, ...] = (
    calls.Join("c" * 255, "h" * 255, 2**32 - 1, "n" * 255, 2**64 - 1),
    calls.MatchPrefix(
        [Namespace("n" * 128)] * 256, [LONG] * BATCH_KEYS_MAX, True, [Namespace("s" * 128)] * 256,
        2**64 - 1, [2**64 - 1] * 256,
    ),
    calls.PutStart(
        NAMESPACE, [Key(number.to_bytes(2, "big")) for number in range(512)], [SIZE_MAX] * 512,
        LONG, True, 8, False, WAIT_MAX, "h" * 255, AVOIDED, True, 2**64 - 1, TTL_MAX,
    ),
    calls.PutEnd(2**64 - 1, [2**64 - 1] * BATCH_KEYS_MAX),
    calls.PutRevoke(1, [2] * BATCH_KEYS_MAX, False, [3] * 64),
    calls.Allocate(NAMESPACE, SIZE_MAX, WAIT_MAX, "h", AVOIDED, True, 1),
    calls.Commit(1, 2, NAMESPACE, LONG, LONG, SIZE_MAX, True, TTL_MAX, True, SIZE_MAX, "h", True),
    calls.Pin(NAMESPACE, [LONG] * 512, 86_400_000),
    calls.Chains("", [LONG] * 128, 128),
    calls.Blocks(NAMESPACE, [LONG] * 256, 256),
    calls.Clear("", BATCH_KEYS_MAX),
    calls.ListObjects("", bytes(256), 1, BATCH_KEYS_MAX),
    calls.StartMoves("n", 0, BATCH_KEYS_MAX, SIZE_MAX, AVOIDED, 1),
)  # fmt: skip


@pytest.mark.parametrize("request_", AT_THEIR_BOUNDS, ids=lambda each: type(each).__name__)
def test_what_is_at_a_bound_is_taken(request_: calls.Request) -> None:
    row = CALLS[type(request_)]
    assert messages.decode_request(row, messages.encode_request(request_)) == request_


REFUSED = {
    "no namespace": (calls.Exists, client_pb2.ExistsRequest(), InvalidArgumentError),
    "long namespace": (calls.Exists,
        client_pb2.ExistsRequest(namespace="n" * 129), InvalidArgumentError),
    "half a key": (calls.Exists, exists(data=b"abc", size=2), InvalidArgumentError),
    "long keys": (calls.Exists, exists(data=b"k" * 600, size=300), InvalidKeyError),
    "an empty key": (calls.Exists, exists(data=b"abc", sizes=[3, 0]), InvalidKeyError),
    "one long key": (calls.Exists, exists(data=b"k" * 260, sizes=[3, 257]), InvalidKeyError),
    "sizes short": (calls.Exists, exists(data=b"abc", sizes=[1, 1]), InvalidArgumentError),
    "sizes beyond": (calls.Exists, exists(data=b"abc", sizes=[2**32 - 1]), InvalidArgumentError),
    "sizes missing": (calls.Exists, exists(data=b"abc"), InvalidArgumentError),
    "too many keys": (calls.Exists,
        exists(data=b"k" * (BATCH_KEYS_MAX + 1), size=1), BatchTooLargeError),
    "too many sizes": (calls.Exists,
        exists(data=b"k" * (BATCH_KEYS_MAX + 1), sizes=[1] * (BATCH_KEYS_MAX + 1)),
        BatchTooLargeError),
    "too many namespaces": (calls.MatchPrefix,
        client_pb2.MatchPrefixRequest(namespaces=["n"] * 257), BatchTooLargeError),
    "a key twice": (calls.PutStart, put_start(keys=Keys(data=b"abab", size=2)), DuplicateKeyError),
    "a key twice, odd sizes": (calls.PutStart,
        put_start(keys=Keys(data=b"abcab", sizes=[2, 1, 2]), sizes=Column(repeats=3, same=5)),
        DuplicateKeyError),
    "sizes of other keys": (calls.PutStart,
        put_start(sizes=Column(repeats=3, same=5)), InvalidArgumentError),
    "huge column": (calls.PutStart,
        put_start(sizes=Column(repeats=2**32 - 1, same=5)), InvalidArgumentError),
    "half a column": (calls.PutStart, put_start(sizes=Column(values=b"x" * 15)), UsageError),
    "absurd size": (calls.PutStart,
        put_start(sizes=Column(repeats=2, same=2**64 - 1)), InvalidArgumentError),
    "one absurd size": (calls.PutStart,
        put_start(sizes=Column(values=bytes(8) + b"\xff" * 8)), InvalidArgumentError),
    "no replicas": (calls.PutStart, put_start(replicas=0), InvalidArgumentError),
    "many replicas": (calls.PutStart, put_start(replicas=9), InvalidArgumentError),
    "waiting for ever": (calls.PutStart, put_start(wait_ms=2**32 - 1), InvalidArgumentError),
    "long parent": (calls.PutStart, put_start(parent=b"p" * 257), InvalidKeyError),
    "many": (calls.PutStart, put_start(avoid_segments=[bytes(16)] * 65), BatchTooLargeError),
    "no uuid": (calls.PutStart, put_start(avoid_segments=[b"short"]), InvalidArgumentError),
    "host of two lines": (calls.PutStart, put_start(host="a\nb"), InvalidArgumentError),
    "no client": (calls.Join, client_pb2.JoinRequest(host="h"), InvalidArgumentError),
    "long client": (calls.Join,
        client_pb2.JoinRequest(client="c" * 256, host="h"), InvalidArgumentError),
    "too many tokens": (calls.PutEnd,
        client_pb2.PutEndRequest(tokens=Column(repeats=BATCH_KEYS_MAX + 1)), InvalidArgumentError),
    "more puts than are granted at once": (calls.PutStart,
        put_start(keys=Keys(data=b"".join(number.to_bytes(2, "big") for number in range(513)),
            size=2), sizes=Column(repeats=513, same=5)), BatchTooLargeError),
    "versions of other keys": (calls.Renew,
        client_pb2.RenewRequest(namespace="n", keys=Keys(data=b"k", size=1)), InvalidArgumentError),
    "places of other keys": (calls.Renew,
        client_pb2.RenewRequest(namespace="n", keys=Keys(data=b"k", size=1),
            epochs=Column(repeats=1), counters=Column(repeats=1), uuids=[bytes(16)]),
        InvalidArgumentError),
    "clearing nothing": (calls.Clear, client_pb2.ClearRequest(), InvalidArgumentError),
    "a page too long": (calls.ListObjects,
        admin_pb2.ListObjectsRequest(limit=BATCH_KEYS_MAX + 1), InvalidArgumentError),
    "too many segments": (calls.DescribeSegments,
        client_pb2.DescribeSegmentsRequest(segment_ids=Column(repeats=BATCH_KEYS_MAX + 1)),
        InvalidArgumentError),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_exceeds_a_bound_is_refused(case: str) -> None:
    request, message, expected = REFUSED[case]
    with pytest.raises(expected):
        messages.decode_request(CALLS[request], message.SerializeToString())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("size", 0),
        ("uuid", b"short"),
        ("token", b"t" * 17),
        ("shm_name", "../../etc/passwd"),
        ("shm_name", "kvstore.a/../.."),
        ("shm_name", "kvstore.a\n"),
        ("shm_name", ".hidden"),
        ("shm_name", "a" * 256),
        ("address", "a\x00b"),
    ],
)
def test_a_bad_offer_is_refused(field: str, value: Any) -> None:
    offer: dict[str, Any] = {"size": 1, "uuid": b"u" * 16, "token": b"t" * 16, field: value}
    join = node_pb2.NodeJoin(name="n", host="h", segments=[node_pb2.SegmentOffer(**offer)])
    with pytest.raises(UsageError):
        node_messages.decode_node_message(node_pb2.NodeMessage(join=join).SerializeToString())


TWO = [Key(b"a"), Key(b"b")]
CORRUPT = calls.ReportCorrupt(Namespace("n"), TWO, [1, 2], [3, 4], [b"u" * 16] * 2)
WIPE = calls.MasterWipe(1, b"u" * 16, [1, 2], [3, 4], [5, 6], calls.NO_VERSION, [7, 8], [9, 10])


@pytest.mark.parametrize("field", ["epochs", "counters", "uuids"])
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_columns_of_a_request_are_of_one_length(field: str, rows: int) -> None:
    changed: dict[str, Any] = {field: (2 * list(getattr(CORRUPT, field)))[:rows]}
    data = messages.encode_request(CORRUPT._replace(**changed))
    with pytest.raises(UsageError, match=f"{field}.*{rows} rows, expected 2"):
        messages.decode_request(CALLS[calls.ReportCorrupt], data)


def test_an_order_has_a_length_for_each_extent_or_none() -> None:
    data = node_messages.encode_master_message(WIPE._replace(lengths=[1]))
    with pytest.raises(ProtocolError, match="different length"):
        node_messages.decode_master_message(data)


@pytest.mark.parametrize("field", ["epochs", "counters", "disconnect_connections"])
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_columns_of_an_order_are_of_one_length(field: str, rows: int) -> None:
    changed: dict[str, Any] = {field: (2 * list(getattr(WIPE, field)))[:rows]}
    data = node_messages.encode_master_message(WIPE._replace(**changed))
    with pytest.raises(ProtocolError, match=f"{field}.*{rows} rows, expected 2"):
        node_messages.decode_master_message(data)


@pytest.mark.parametrize(
    "placements",
    [
        Placements(rows=bytes(32 * (BATCH_KEYS_MAX + 1))),
        Placements(rows=bytes(31)),
        Placements(rows=bytes(24) + b"\1" + bytes(7)),
        Placements(rows=bytes(24) + b"\1" + bytes(7), extents=bytes(32)),
        Placements(rows=bytes(24) + b"\x09" + bytes(7), extents=bytes(9 * 16)),
    ],
    ids=["huge", "half a row", "no extents", "too many extents", "too many replicas"],
)
def test_a_reply_that_contradicts_itself_is_a_protocol_error(
    placements: common_pb2.Placements,
) -> None:
    reply = client_pb2.LookupReply(placements=placements)
    with pytest.raises(ProtocolError):
        messages.decode_reply(CALLS[calls.Lookup], reply.SerializeToString())


@pytest.mark.parametrize(
    "request_",
    [
        calls.Exists(Namespace("lone \ud800 surrogate"), [Key(b"k")]),
        calls.Exists(NAMESPACE, [Key(b"")]),
        calls.Exists(NAMESPACE, [Key(b"k" * 257), Key(b"k")]),
        calls.Exists(NAMESPACE, [Key(b"k")] * (BATCH_KEYS_MAX + 1)),
        calls.PutEnd(1, [-1, 2]),
        calls.PutEnd(1, [2**64]),
        calls.PutEnd(-1, []),
        calls.Clear(NAMESPACE, -1),
        calls.Allocate(NAMESPACE, 2**64, 0, "h"),
        calls.Exists(NAMESPACE, ["text"]),  # type: ignore[list-item]  # what users do
    ],
    ids=repr,
)
def test_what_cannot_be_sent_is_a_usage_error(request_: calls.Request) -> None:
    with pytest.raises(UsageError):
        messages.encode_request(request_)
