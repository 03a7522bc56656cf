"""Any message of a node: the decoder refuses it with a typed error, or the state handles it."""

from __future__ import annotations

import contextlib
import tracemalloc
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvstore import calls
from kvstore.calls import Version
from kvstore.errors import KVStoreError
from kvstore.limits import PROTOCOL_VERSION, Key, Namespace
from kvstore.master.state.master_state import MasterState
from kvstore.memory.header import EXTENT_ALIGN, SUPERBLOCK_BYTES
from kvstore.v1 import client_pb2, common_pb2, node_pb2
from kvstore.wire.node_messages import decode_node_message
from tests.support.invariants import check_invariants
from tests.support.wire_values import SIXTEEN

EPOCH = 5
BLOCKS = 8
SMALL = st.integers(0, 3)
U64 = st.integers(0, 2**64 - 1)
NUMBER = SMALL | U64
KEY = st.sampled_from([b"a", b"b", b"c", b"d", b""])
NAMESPACE = st.sampled_from(["n", "m", "", "x" * 200])
OFFSET = st.integers(0, BLOCKS + 1).map(lambda n: SUPERBLOCK_BYTES + n * 4 * EXTENT_ALIGN) | U64
SEGMENT_BYTES = (
    st.just(SUPERBLOCK_BYTES + BLOCKS * 4 * EXTENT_ALIGN) | st.sampled_from([1, 1 << 48]) | U64
)
NAME = st.sampled_from(["one", "two", "", "\n"])


@st.composite
def column(draw: st.DrawFn, rows: int, values: st.SearchStrategy[int]) -> common_pb2.Column:
    rows = draw(st.just(rows) | SMALL)
    if draw(st.booleans()):
        return common_pb2.Column(repeats=rows, same=draw(values))
    packed = b"".join(draw(values).to_bytes(8, "little") for _ in range(rows))
    return common_pb2.Column(values=packed)


@st.composite
def keys(draw: st.DrawFn, rows: int) -> common_pb2.Keys:
    drawn = [draw(KEY) for _ in range(draw(st.just(rows) | SMALL))]
    if draw(st.booleans()):
        return common_pb2.Keys(data=b"".join(drawn), size=draw(st.integers(0, 2)))
    return common_pb2.Keys(data=b"".join(drawn), sizes=[len(key) for key in drawn])


@st.composite
def claims(draw: st.DrawFn) -> node_pb2.NodeMessage:
    rows = draw(st.integers(0, 5))
    has_parent = bytes(draw(st.integers(0, 1)) for _ in range(rows))
    return node_pb2.NodeMessage(
        claims=common_pb2.NodeClaims(
            segment=draw(SMALL),
            first=draw(st.booleans()),
            last=draw(st.booleans()),
            namespaces=draw(st.lists(NAMESPACE, max_size=3)),
            namespace_of=draw(column(rows, SMALL)),
            keys=draw(keys(rows)),
            has_parent=has_parent,
            parents=draw(keys(sum(has_parent))),
            sizes=draw(column(rows, st.sampled_from([0, 1, 3 * EXTENT_ALIGN]) | U64)),
            epochs=draw(column(rows, st.integers(3, 6) | U64)),
            counters=draw(column(rows, NUMBER)),
            offsets=draw(column(rows, OFFSET)),
        )
    )


@st.composite
def offers(draw: st.DrawFn) -> node_pb2.SegmentOffer:
    return node_pb2.SegmentOffer(
        size=draw(SEGMENT_BYTES),
        uuid=draw(st.sampled_from([b"1" * 16, b"2" * 16]) | SIXTEEN),
        shm_name=draw(st.sampled_from(["kv", "", "../x"])),
        address=draw(st.sampled_from(["h:1", ""])),
        token=bytes(16),
        seed=draw(U64),
        generation=draw(SMALL),
        fresh=draw(st.booleans()),
        removal_watermark=client_pb2.Version(
                epoch=draw(st.integers(3, 6) | U64), counter=draw(NUMBER)
            ),
    )  # fmt: skip


@st.composite
def joins(draw: st.DrawFn) -> node_pb2.NodeMessage:
    return node_pb2.NodeMessage(
        join=node_pb2.NodeJoin(
            name=draw(NAME),
            host=draw(NAME),
            protocol=draw(st.just(PROTOCOL_VERSION) | SMALL),
            resume_epoch=draw(st.sampled_from([0, 0, EPOCH])),
            segments=draw(st.lists(offers(), max_size=3)),
        )
    )


MESSAGES = st.binary(max_size=60) | st.one_of(
    claims(),
    claims(),
    joins(),
    st.builds(lambda n: node_pb2.NodeMessage(wipe_done=node_pb2.NodeWipeDone(wipe_seq=n)), NUMBER),
    st.builds(lambda n: node_pb2.NodeMessage(heartbeat=node_pb2.NodeHeartbeat(number=n)), NUMBER),
    st.just(node_pb2.NodeMessage(leave=node_pb2.NodeLeave())),
).map(node_pb2.NodeMessage.SerializeToString)


def took(state: MasterState, now_ms: int, session: int, data: bytes) -> None:
    """As ``MasterService``. Raises whatever is no typed error."""
    with contextlib.suppress(KVStoreError):
        message = decode_node_message(data)
        if state.membership.node_of_session(session) is not None:
            state.nodes.on_node_message(now_ms, session, message)
        elif isinstance(message, calls.NodeJoin):
            state.nodes.on_node_join(now_ms, session, message)
    state.tick(now_ms)
    for _ in range(100):
        if not state.has_work:
            break
        state.work(now_ms)
    else:
        raise AssertionError("the work does not end")
    state.take_effects()
    check_invariants(state)


ASKED = calls.StatObject(Namespace("n"), Key(b"k"))
RETURNS = node_pb2.NodeMessage(
    join=node_pb2.NodeJoin(
        name="one",
        host="h",
        protocol=PROTOCOL_VERSION,
        segments=[
            node_pb2.SegmentOffer(
                size=SUPERBLOCK_BYTES + BLOCKS * 4 * EXTENT_ALIGN, uuid=b"1" * 16, shm_name="kv",
                address="h:1", token=bytes(16),
            )
        ],
    )
).SerializeToString()  # fmt: skip


@given(st.lists(st.tuples(st.integers(1, 2), MESSAGES), max_size=12))
def test_whatever_nodes_say_is_refused_or_taken(said: list[tuple[int, bytes]]) -> None:
    state = MasterState(epoch=EPOCH)
    took(state, 0, 1, RETURNS)
    for now_ms, (session, data) in enumerate(said):
        took(state, now_ms, session, data)


def test_rows_without_a_namespace_are_refused() -> None:
    claim = common_pb2.NodeClaims(
        first=True,
        last=True,
        namespace_of=common_pb2.Column(repeats=1),
        keys=common_pb2.Keys(data=b"a", size=1),
        has_parent=b"\0",
        sizes=common_pb2.Column(repeats=1, same=1),
        epochs=common_pb2.Column(repeats=1, same=EPOCH - 1),
        counters=common_pb2.Column(repeats=1, same=1),
        offsets=common_pb2.Column(repeats=1, same=SUPERBLOCK_BYTES),
    )
    state = MasterState(epoch=EPOCH)
    took(state, 0, 1, RETURNS)
    took(state, 0, 1, node_pb2.NodeMessage(claims=claim).SerializeToString())
    assert not state.counters["recovered_objects"]


def test_what_comes_back_costs_what_it_holds_not_what_it_could() -> None:
    state = MasterState(epoch=EPOCH)
    offer = calls.SegmentOffer(4 << 40, b"1" * 16, "kv", "h:1", bytes(16), 1, 1, False)
    tracemalloc.start()
    try:
        state.nodes.on_node_join(0, 1, calls.NodeJoin("one", "h", PROTOCOL_VERSION, 0, [offer]))
        rows: Any = [0], [Key(b"k")], [None], [3 << 40], [EPOCH - 1], [1], [SUPERBLOCK_BYTES]
        huge = calls.NodeClaims(0, True, True, [Namespace("n")], *rows)
        state.nodes.on_node_message(0, 1, huge)
        while state.has_work:
            state.work(0)
        taken, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert state.counters["recovered_objects"] == 1
    assert peak < 200_000, taken
    assert state.report.stat_object(0, ASKED).version == Version(EPOCH - 1, 1)
