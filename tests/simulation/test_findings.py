"""Bugs that the simulation has found, each as the shortest story that shows it.

A story that is marked ``xfail`` is an open bug: its fix removes the mark here, and its rules from
``known.py``. The story stays as a regression test.
"""

from __future__ import annotations

from typing import Any, cast

from kvstore import calls
from kvstore.calls import PutOutcome
from kvstore.client.flows import writing
from kvstore.client.flows.placements import PlacementCache, SegmentTable
from kvstore.client.flows.steps import Ask, Context
from kvstore.client.flows.writing import Items, PutOptions
from kvstore.client.leases.read_leases import ReadLeases
from kvstore.client.values import encode_all
from kvstore.limits import PROTOCOL_VERSION, Key, Namespace
from kvstore.master.state.effects import Answer, Later, Send
from kvstore.master.state.liveness import LivenessRules
from kvstore.master.state.master_state import MasterState
from kvstore.master.state.rules import MasterRules
from kvstore.memory.header import SUPERBLOCK_BYTES, extent_bytes

RULES = MasterRules(
    lease_ms=2_000,
    put_deadline_ms=6_000,
    quarantine_ms=2_000,
    liveness=LivenessRules(suspect_ms=400, dead_ms=1_200),
)
A = Namespace("a")
SIZE = 7 << 10
"""Of a payload; its extent is 8 KiB."""


def joined(state: MasterState, now_ms: int, *, session: int, fresh: bool, objects: int = 1,
           name: str = "n") -> None:  # fmt: skip
    """A node, with room for so many objects."""
    offer = calls.SegmentOffer(
        size=SUPERBLOCK_BYTES + objects * extent_bytes(SIZE), uuid=name.encode() * 16, shm_name="",
        address=f"{name}:1", token=b"t" * 16, seed=1, generation=1, fresh=fresh,
    )  # fmt: skip
    state.nodes.joined(now_ms, session, calls.NodeJoin(name, "h", PROTOCOL_VERSION, 0, [offer]))


def new_state(*, objects: int = 1) -> MasterState:
    state = MasterState(epoch=1, rules=RULES)
    joined(state, 0, session=1, fresh=True, objects=objects)
    return state


def put_start(state: MasterState, now_ms: int, *keys: bytes, parent: bytes | None = None,
              chain: bool = False) -> calls.Grants | Later:  # fmt: skip
    names = [Key(key) for key in keys]
    above = None if parent is None else Key(parent)
    request = calls.PutStart(A, names, [SIZE] * len(names), above, chain, 1, False, 100, "h")
    return state.putting.put_start(now_ms, request)


def stored(state: MasterState, now_ms: int, *keys: bytes, chain: bool = False) -> None:
    grants: object = put_start(state, now_ms, *keys, chain=chain)
    if isinstance(grants, Later):  # until what was removed there is wiped
        ticket = grants.ticket
        orders = [e.message for e in state.take_effects() if isinstance(e, Send)]
        for order in orders:
            if isinstance(order, calls.MasterWipe):
                state.nodes.said(now_ms, 1, calls.NodeWiped(order.order))
        answers = [e for e in state.take_effects() if isinstance(e, Answer) and e.ticket == ticket]
        (grants,) = (answer.result for answer in answers)
    assert isinstance(grants, calls.Grants)
    state.putting.put_end(now_ms, calls.PutEnd(1, grants.tokens))


def test_1_a_join_whose_answer_was_lost_has_given_out_memory() -> None:
    """The node never heard that it had joined: it says that it is fresh, and has not fenced."""
    state = new_state()
    assert isinstance(put_start(state, 10, b"k"), calls.Grants)
    state.nodes.stream_broken(1)
    joined(state, 20, session=2, fresh=True)
    assert isinstance(put_start(state, 30, b"other"), Later), "two writers, one extent"


def test_2_a_second_removal_waits_for_the_wiping_of_the_first() -> None:
    """Idempotent calls are sent again when a connection breaks: this is one removal, too."""
    state = new_state()
    stored(state, 10, b"k")
    assert isinstance(state.removing.remove(20, calls.Remove(A, [Key(b"k")])), Later)
    assert isinstance(state.removing.remove(30, calls.Remove(A, [Key(b"k")])), Later)


def test_3_a_removal_is_not_acknowledged_while_a_lease_on_a_dead_node_lives() -> None:
    """The node is cut off from the master only; who has a lease still reads there."""
    state = new_state()
    stored(state, 10, b"k")
    state.nodes.said(1_000, 1, calls.NodeBeat(1))
    state.asking.lookup(1_900, calls.Lookup(A, [Key(b"k")]))
    joined(state, 1_900, session=2, fresh=True, name="m")
    assert isinstance(state.removing.remove(1_901, calls.Remove(A, [Key(b"k")])), Later)
    state.tick(2_300)  # the node has been silent for 1,300 ms; the lease lives until 3,900
    effects = state.take_effects()
    marks = [e.message for e in effects if isinstance(e, Send) and e.session == 2]
    for order in marks:
        assert isinstance(order, calls.MasterWipe)
        state.nodes.said(2_300, 2, calls.NodeWiped(order.order))
    assert not any(isinstance(effect, Answer) for effect in [*effects, *state.take_effects()])
    state.nodes.said(3_200, 2, calls.NodeBeat(1))
    state.tick(3_901)
    assert any(isinstance(effect, Answer) for effect in state.take_effects())


def test_4_a_grant_of_one_master_is_not_written_where_the_next_one_says() -> None:
    """The master dies between put_start and describe_segments; ids begin at 1 in each epoch."""
    context = Context(
        clock=lambda: 0.0, host="h", segments=SegmentTable(lambda: 0.0),
        placements=PlacementCache(0, lambda: 0.0), lease_margin_s=0.1, verify_payload=True,
        counters={}, pool=cast(Any, None), views=cast(Any, None), leases=ReadLeases(0),
    )  # fmt: skip
    items = Items([Key(b"k")], *encode_all([b"value"]))
    flow = writing.write(context, items, PutOptions(namespace=A))
    assert isinstance(next(flow), Ask)
    step = flow.send(calls.Grants(1, 6_000, bytes([PutOutcome.WRITE]), 1, [1], [1], [4096]))
    assert isinstance(step, Ask)
    assert isinstance(step.request, calls.DescribeSegments)
    of_the_next_master = calls.SegmentInfo(
        1, "other", "h", 1 << 20, b"v" * 16, "", "n:1", b"t" * 16, 1, 2
    )
    step = flow.send(calls.Segments(2, [of_the_next_master]))
    assert isinstance(step, Ask), "writes an old grant to a segment of the new epoch"


def test_6_what_an_allocation_was_promised_outlives_its_node_s_rejoining() -> None:
    """Its owner computes into mapped memory, which no fence stops, for as long as its deadline."""
    state = new_state()
    grants = state.putting.allocate(10, calls.Allocate(A, SIZE, 0, "h"))  # ours until 6,010
    assert isinstance(grants, calls.Grants)
    state.tick(1_300)  # silent, so dead
    joined(state, 1_400, session=2, fresh=False)
    state.nodes.said(2_400, 2, calls.NodeBeat(1))
    state.nodes.said(3_400, 2, calls.NodeBeat(2))
    assert isinstance(put_start(state, 3_500, b"other"), Later), "two writers, one extent"


def test_7_a_committed_allocation_is_leased_to_who_committed_it() -> None:
    """Until the reply is there (and the renewal after it) its owner believes in its memory."""
    state = new_state()
    grants = state.putting.allocate(10, calls.Allocate(A, SIZE, 0, "h"))
    assert isinstance(grants, calls.Grants)
    state.putting.commit(20, calls.Commit(1, grants.tokens[0], A, Key(b"k"), None, SIZE, False))
    assert isinstance(put_start(state, 30, b"other"), Later), "evicted under its owner's hands"


def test_8_a_match_does_not_count_over_a_gap() -> None:
    """6 is put again as a root; 7 keeps the depth that it had below it, and 5 is never probed."""
    state = new_state(objects=10)
    chain = [b"%d" % index for index in range(8)]
    stored(state, 10, *chain, chain=True)
    state.removing.remove(20, calls.Remove(A, [Key(b"5"), Key(b"6")]))
    stored(state, 30, b"6")
    matched = state.asking.match_prefix(
        40, calls.MatchPrefix([A], [Key(key) for key in chain], False)
    )
    assert matched.matches[0].matched == 5


def test_9_the_next_tick_is_due_when_a_lease_has_ended_already() -> None:
    state = new_state()
    stored(state, 10, b"k")
    state.asking.lookup(20, calls.Lookup(A, [Key(b"k")]))  # until 2,020
    assert isinstance(state.putting.put_start(
        100, calls.PutStart(A, [Key(b"other")], [SIZE], None, False, 1, False, 5_000, "h")
    ), Later)  # fmt: skip
    for number in range(1, 5):
        state.nodes.said(number * 500, 1, calls.NodeBeat(number))
    state.tick(2_010)
    due_ms = state.next_tick_ms(2_030)  # the shell was busy for a moment
    assert due_ms is not None
    assert due_ms <= 2_030
