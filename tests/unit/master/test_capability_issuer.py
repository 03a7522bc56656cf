"""Which capabilities a master's replies carry: for each extent, of its holder, until a lease or a
deadline on the clock of the extent's node."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from kvstore import calls
from kvstore.calls import DescriptorHandle, MapRight, SegmentInfo
from kvstore.errors import NoSpaceError
from kvstore.limits import Key, Namespace
from kvstore.master.capabilities import SLACK_MS, STAT_MS, CapabilityIssuer
from kvstore.master.service import MasterService
from kvstore.master.state.effects import SendToNode
from kvstore.master.state.master_state import MasterState
from kvstore.master.state.traffic import Caller
from kvstore.memory.header import HEADER_BYTES
from kvstore.native import pure_python
from kvstore.runtime.tcp_protocol import Op, holder_key, pack_capability_input
from kvstore.security.descriptor_protocol import map_key
from kvstore.security.identity import validated_identity
from kvstore.wire.messages import CALLS
from tests.unit.master.test_term import JOIN

SPACE = Namespace("n")
EPOCH, NOW, HOLDER = 7, 1_000, 99
KEYS = [Key(b"a"), Key(b"b")]
ONE, TWO = 5_000_000, 300
"""What the clocks of both nodes show at ``NOW``."""


class Store:
    """A master with two nodes, which wipe at once, at a time that stands still until ``later``."""

    def __init__(self, **of_second: Any) -> None:
        self.state = MasterState(epoch=EPOCH)
        self.now = NOW
        self.service = MasterService(self.state, clock=lambda: self.now)
        self.carried_out: dict[tuple[int, int], int] = {}
        """By segment and offset, the last order that its node has carried out."""
        self._settle = self.service._apply_effects
        self.service._apply_effects = self._wiping  # type: ignore[method-assign]
        self.holder = Caller("holder 127.0.0.1", holder=HOLDER)
        self.offers = [
            JOIN.segments[0]._replace(
                size=64 << 20, uuid=bytes([number]) * 16, token=bytes([number]) * 16,
                generation=number, takes_capabilities=True,
            )
            for number in (1, 2)
        ]  # fmt: skip
        self.offers[1] = self.offers[1]._replace(
            **{name: value for name, value in of_second.items() if name != "clock_ms"}
        )
        clocks = ONE, of_second.get("clock_ms", TWO)
        self.ids = [
            self.state.nodes.on_node_join(
                NOW, session, JOIN._replace(
                    name=f"n{session}", host=f"h{session}", segments=[offer], clock_ms=clock
                )
            ).segment_ids[0]
            for session, (offer, clock) in enumerate(zip(self.offers, clocks, strict=True), 1)
        ]  # fmt: skip

    def _wiping(self) -> None:
        sends = [effect for effect in self.state.effects if isinstance(effect, SendToNode)]
        self._settle()
        for each in sends:
            if isinstance(each.message, calls.MasterWipe):
                for offset in each.message.offsets:
                    place = self.ids[each.session - 1], offset
                    self.carried_out[place] = each.message.wipe_seq
                self.state.nodes.on_node_message(
                    self.now, each.session, calls.NodeWipeDone(each.message.wipe_seq)
                )
        if sends:
            self._wiping()

    def later(self, ms: int) -> None:
        async def main() -> None:
            for session in (1, 2):
                self.state.nodes.on_node_message(self.now, session, calls.NodeHeartbeat(2))
            self.state.tick(self.now)
            self.service._apply_effects()
            await asyncio.sleep(0)

        self.now += ms
        asyncio.run(main())

    def ask(self, request: calls.Request, caller: Caller | None = None) -> Any:
        async def main() -> Any:
            reply = self.service.call(request, caller or self.holder)
            return await reply if isinstance(reply, Awaitable) else reply

        return asyncio.run(main())

    def put(self, sizes: Sequence[int], replicas: int = 1, *, overwrite: bool = False) -> Any:
        keys = KEYS[: len(sizes)]
        request = calls.PutStart(SPACE, keys, sizes, None, False, replicas, overwrite, 0, "h1")
        return self.ask(request)

    def stored(self, sizes: Sequence[int], replicas: int = 1) -> calls.Grants:
        grants: calls.Grants = self.put(sizes, replicas)
        self.ask(calls.PutEnd(EPOCH, grants.tokens))
        return grants

    def made(self, segment: int, offset: int, size: int, for_ms: int, op: Op) -> bytes:
        """The capability that the holder is to get."""
        index = self.ids.index(segment)
        offer, clock = self.offers[index], (ONE, TWO)[index]
        expires = clock + for_ms + SLACK_MS
        order = self.state.common.reclaim.last_order
        said = pack_capability_input(
            offer.generation, HOLDER, offset, HEADER_BYTES + size, expires, order, op
        )
        return struct.pack("<2Q", expires, order) + pure_python.siphash(offer.token, said)

    def all_made(
        self, places: calls.Placements | calls.Grants, sizes: Sequence[int], for_ms: int, op: Op
    ) -> bytes:
        rows = zip(places.segments, places.offsets, sizes, strict=True)
        return b"".join(self.made(*row, for_ms, op) for row in rows)


@pytest.mark.parametrize("replicas", [1, 2])
def test_placements_can_be_read_and_grants_written(replicas: int) -> None:
    store = Store()
    sizes = [5, 70_000]
    grants = store.stored(sizes, replicas)
    each = [size for size in sizes for _ in range(replicas)]
    assert len(grants.segments) == 2 * replicas
    assert grants.capabilities == store.all_made(grants, each, grants.deadline_ms, Op.WRITE)
    found = store.ask(calls.Lookup(SPACE, [KEYS[0], Key(b"missing"), KEYS[1]]))
    places = found.placements
    assert places.capabilities == store.all_made(places, each, found.lease_ms, Op.READ)
    matched = store.ask(calls.MatchPrefix([SPACE, SPACE], KEYS[:1], True))
    for match in matched.matches:
        places = match.placements
        expected = store.all_made(places, each[:replicas], matched.lease_ms, Op.READ)
        assert places.capabilities == expected
    detail = store.ask(calls.StatObject(SPACE, KEYS[1]))
    expected = store.all_made(detail.placements, each[replicas:], STAT_MS - SLACK_MS, Op.READ)
    assert detail.placements.capabilities == expected


def test_an_object_stays_as_long_as_a_stat_lets_its_holder_read() -> None:
    """Otherwise the holder could read the next object in the same memory."""
    store = Store()
    size = 50 << 20
    store.stored([size], 2)
    detail = store.ask(calls.StatObject(SPACE, KEYS[0]))
    assert detail.placements.capabilities
    other = calls.PutStart(SPACE, KEYS[1:], [size], None, False, 2, False, 0, "h1")
    store.later(STAT_MS - 1)
    with pytest.raises(NoSpaceError):
        store.ask(other)
    store.later(1)
    assert store.ask(other).offsets == detail.placements.offsets


def test_only_what_is_granted_can_be_written() -> None:
    store = Store()
    store.stored([5])
    grants = store.put([5, 6])
    assert grants.outcomes == bytes([calls.PutOutcome.FOUND, calls.PutOutcome.WRITE])
    assert grants.capabilities == store.all_made(grants, [6], grants.deadline_ms, Op.WRITE)
    store.ask(calls.PutEnd(EPOCH, grants.tokens))
    assert store.put([5, 6]).capabilities == b""


def test_allocations_are_extended() -> None:
    store = Store()
    grant = store.ask(calls.Allocate(SPACE, 100, 0, "h1"))
    made = store.all_made(grant, [100], grant.deadline_ms, Op.WRITE)
    assert grant.capabilities == made
    tokens = [*grant.tokens, 12345]
    renewed = store.ask(calls.Renew(SPACE, (), (), (), EPOCH, tokens, (), ()))
    assert bytes(renewed.tokens_leased) == b"\1\0"
    assert renewed.capabilities == made + bytes(32)
    assert store.ask(calls.Renew(SPACE, (), (), (), EPOCH, (), (), ())).capabilities == b""


def test_a_copy_is_read_here_and_written_there() -> None:
    store = Store()
    store.stored([5])
    (holding,) = store.ask(calls.Lookup(SPACE, KEYS[:1])).placements.segments
    node = f"n{store.ids.index(holding) + 1}"
    store.ask(calls.Drain(node, calls.DrainStep.BEGIN))
    moves = store.ask(calls.StartMoves(node, 0, 10, 1 << 20))
    assert len(moves.grants.tokens) == 1
    for_ms = moves.grants.deadline_ms
    assert moves.sources.capabilities == store.all_made(moves.sources, [5], for_ms, Op.READ)
    assert moves.grants.capabilities == store.all_made(moves.grants, [5], for_ms, Op.WRITE)


def test_a_reply_that_comes_later_is_sealed() -> None:
    """A put that replaces an object waits until its nodes have wiped what was there."""
    store = Store()
    request = calls.PutStart(SPACE, KEYS[:1], [50 << 20], None, False, 1, False, 1_000, "h1")
    first = store.ask(request)
    second = store.ask(request._replace(keys=KEYS[1:]))
    third = calls.PutStart(SPACE, [Key(b"c")], [50 << 20], None, False, 1, False, 1_000, "h1")

    async def main() -> Any:
        waiting = store.service.call(third, store.holder)
        assert isinstance(waiting, Awaitable)
        store.service.call(calls.PutRevoke(EPOCH, first.tokens, True), store.holder)
        return await asyncio.wait_for(asyncio.ensure_future(waiting), 5)

    grants = asyncio.run(main())
    assert grants.segments == first.segments != second.segments
    assert grants.capabilities == store.all_made(grants, [50 << 20], grants.deadline_ms, Op.WRITE)


def test_segments_are_described_with_the_key_of_the_holder() -> None:
    store = Store()
    described: Sequence[SegmentInfo] = store.ask(calls.DescribeSegments(store.ids)).segments
    for segment, offer in zip(described, store.offers, strict=True):
        assert segment.holder == HOLDER
        assert segment.token == holder_key(offer.token, offer.uuid, offer.generation, HOLDER)
        assert segment.token != offer.token


def test_a_holder_is_told_where_the_memory_is_handed_over_and_its_name_not() -> None:
    store = Store(descriptor_socket="kvstore-shm-2")
    store.holder.identity = validated_identity("e", ["engine"], reads=["n"])
    first, second = store.ask(calls.DescribeSegments(store.ids)).segments
    assert (first.descriptor_socket, first.shm_name) == (None, store.offers[0].shm_name)
    offer = store.offers[1]
    key = map_key(offer.token, offer.uuid, offer.generation, HOLDER, MapRight.READ)
    assert second.descriptor_socket == DescriptorHandle("kvstore-shm-2", MapRight.READ, key)
    assert second.shm_name == ""
    named = store.ask(calls.DescribeSegments(store.ids[1:]), Caller()).segments[0]
    assert named.shm_name == offer.shm_name
    assert named.descriptor_socket == DescriptorHandle("kvstore-shm-2", 0, bytes(16)), (
        "no key without an identity"
    )


def test_who_is_no_holder_gets_what_it_got_before() -> None:
    store = Store()
    grants = store.ask(calls.PutStart(SPACE, KEYS, [1, 2], None, False, 1, False, 0, "h"), Caller())
    assert grants.capabilities == b""
    store.ask(calls.PutEnd(EPOCH, grants.tokens), Caller())
    assert store.ask(calls.Lookup(SPACE, KEYS), Caller()).placements.capabilities == b""
    described = store.ask(calls.DescribeSegments(store.ids), Caller()).segments
    assert [each.token for each in described] == [each.token for each in store.offers]
    assert {each.holder for each in described} == {0}


def test_a_node_without_capabilities_is_described_with_its_token() -> None:
    store = Store(takes_capabilities=False)
    grants = store.put([5], 2)
    of_second = grants.segments.index(store.ids[1])
    both = [grants.capabilities[:32], grants.capabilities[32:]]
    assert both[of_second] == bytes(32)
    assert both[1 - of_second] != bytes(32)
    described = store.ask(calls.DescribeSegments(store.ids[1:])).segments[0]
    assert (described.token, described.holder) == (store.offers[1].token, 0)


def orders_of(column: bytes) -> list[int]:
    """The order that each capability names."""
    return [int.from_bytes(column[at + 8 : at + 16], "little") for at in range(0, len(column), 32)]


def ended_by_put_end(store: Store, grants: calls.Grants) -> None:
    store.ask(calls.PutEnd(EPOCH, grants.tokens))
    store.ask(calls.Remove(SPACE, KEYS[:1]))
    store.later(store.state.rules.lease_ms + 1)


def ended_by_revoke(store: Store, grants: calls.Grants) -> None:
    store.ask(calls.PutRevoke(EPOCH, grants.tokens, True))


def ended_by_deadline(store: Store, grants: calls.Grants) -> None:
    store.later(store.state.rules.put_deadline_ms + 1)
    store.later(store.state.rules.quarantine_ms + 1)


def ended_by_eviction(store: Store, grants: calls.Grants) -> None:
    store.ask(calls.PutEnd(EPOCH, grants.tokens))


@pytest.mark.parametrize(
    "ends", [ended_by_put_end, ended_by_revoke, ended_by_deadline, ended_by_eviction]
)
def test_an_extent_that_is_granted_again_was_called_back(
    ends: Callable[[Store, calls.Grants], None],
) -> None:
    """However its put ended: its node has carried out an order that is later than each capability
    of it, before a capability of the next put is told."""
    store = Store()
    size = 50 << 20
    old: calls.Grants = store.put([size], 2)
    ends(store, old)
    new: calls.Grants = store.ask(
        calls.PutStart(SPACE, [Key(b"z")], [size], None, False, 2, False, 1_000, "h1")
    )
    assert (new.segments, new.offsets) == (old.segments, old.offsets)
    for index, segment in enumerate(new.segments):
        carried_out = store.carried_out[segment, new.offsets[index]]
        assert orders_of(old.capabilities)[index] < carried_out
        assert orders_of(new.capabilities)[index] >= carried_out


def test_a_committed_allocation_cannot_be_written_in_its_free_tail() -> None:
    store = Store()
    grant: calls.Grants = store.ask(calls.Allocate(SPACE, 50 << 20, 0, "h1"))
    place = grant.segments[0], grant.offsets[0]
    commit = calls.Commit(EPOCH, grant.tokens[0], SPACE, KEYS[0], None, 100, False)
    assert store.ask(commit).outcome is calls.PutOutcome.STORED
    assert orders_of(grant.capabilities)[0] < store.carried_out[place]
    found = store.ask(calls.Lookup(SPACE, KEYS[:1]))
    assert list(found.placements.offsets) == list(grant.offsets), "the object stays"


def test_who_is_told_a_lease_can_read_for_longer() -> None:
    """Capabilities to read end when the lease of the state does: until then no other object gets
    the extent. Holders are told a shorter lease, since what they read must come in time."""
    store = Store()
    store.stored([5])
    found = store.ask(calls.Lookup(SPACE, KEYS[:1]))
    assert found.lease_ms == store.state.rules.lease_ms - SLACK_MS
    expires = int.from_bytes(found.placements.capabilities[:8], "little")
    clock = (ONE, TWO)[store.ids.index(found.placements.segments[0])]
    assert expires == clock + store.state.rules.lease_ms
    renewed = store.ask(calls.Renew(SPACE, KEYS[:1], [EPOCH], [1], EPOCH, (), [bytes(16)], [0]))
    assert renewed.lease_ms == store.state.rules.lease_ms - SLACK_MS
    assert store.ask(calls.Lookup(SPACE, KEYS[:1]), Caller()).lease_ms == store.state.rules.lease_ms


# --- stamps --------------------------------------------------------------------------------------

STAMPS = bytes(range(16))


def stamps_of(
    store: Store, grants: Any, sizes: Sequence[int], versions: Sequence[tuple[int, int]],
    keys: Sequence[Key],
) -> bytes:  # fmt: skip
    """Those that a master is to make for the second node, and zeros for the first."""
    replicas = grants.replicas
    rows = zip(sizes, versions, keys, strict=True)
    each = [row for row in rows for _ in range(replicas)]
    mounts = {store.ids[1]: STAMPS}
    places = zip(grants.segments, grants.offsets, strict=True)
    return b"".join(
        pure_python.compute_header_macs(
            mounts, [segment], [at], [size], [epoch], [counter], [SPACE], [key]
        )
        for (segment, at), (size, (epoch, counter), key) in zip(places, each, strict=True)
    )


def test_a_grant_has_a_stamp_where_the_node_wants_one() -> None:
    store = Store(header_mac_key=STAMPS)
    grants = store.put([5, 70_000], 2)
    versions = [(EPOCH, token) for token in grants.tokens]
    assert grants.header_macs == stamps_of(store, grants, [5, 70_000], versions, KEYS)
    zeros = [grants.header_macs[at : at + 16] == bytes(16) for at in range(0, 64, 16)]
    assert zeros == [segment == store.ids[0] for segment in grants.segments]


def test_what_is_found_gets_no_stamp() -> None:
    store = Store(header_mac_key=STAMPS)
    first = store.put([5], 2)
    store.ask(calls.PutEnd(EPOCH, first.tokens))
    grants = store.put([5, 6], 2)
    versions = [(EPOCH, token) for token in grants.tokens]
    assert grants.header_macs == stamps_of(store, grants, [6], versions, KEYS[1:])
    store.ask(calls.PutEnd(EPOCH, grants.tokens))
    assert store.put([5, 6], 2).header_macs == b""


def test_no_client_learns_the_key_of_stamps() -> None:
    store = Store(header_mac_key=STAMPS)
    for caller in (store.holder, Caller()):
        asked = calls.DescribeSegments(store.ids)
        assert STAMPS not in CALLS[type(asked)].encode_reply(store.ask(asked, caller))


def test_a_copy_has_the_stamp_of_its_new_version() -> None:
    store = Store(header_mac_key=STAMPS)
    store.ask(calls.PutEnd(EPOCH, store.put([5]).tokens))
    (holding,) = store.ask(calls.Lookup(SPACE, KEYS[:1])).placements.segments
    assert holding == store.ids[0], "the test needs the copy on the second node"
    store.ask(calls.Drain("n1", calls.DrainStep.BEGIN))
    grants = store.ask(calls.StartMoves("n1", 0, 10, 1 << 20)).grants
    (token,) = grants.tokens
    expected = stamps_of(store, grants, [5], [(EPOCH, token)], KEYS[:1])
    assert grants.header_macs == expected != bytes(16)


def test_what_was_removed_before_the_answer_to_its_commit_gets_no_stamp() -> None:
    """The master ended, in a soak: an object that was removed, and is a parent, has no extent."""
    store = Store(header_mac_key=STAMPS)
    (token,) = store.ask(calls.Allocate(SPACE, 100, 0, "h2")).tokens
    commit = calls.Commit(EPOCH, token, SPACE, KEYS[0], None, 90, False)
    committed = store.ask(commit)
    child = calls.PutStart(SPACE, KEYS[1:2], [5], KEYS[0], True, 1, False, 0, "h1")
    store.ask(calls.PutEnd(EPOCH, store.ask(child).tokens))
    store.ask(calls.Remove(SPACE, KEYS[:1]))
    record = store.state.common.forest.get(SPACE, KEYS[0])
    assert record is not None
    assert (record.epoch, record.counter, record.extents()) == (EPOCH, token, [])
    again = calls.CommitReply(committed.outcome)
    assert CapabilityIssuer(store.state).add_capabilities(NOW, commit, again, store.holder) == again


def test_an_allocation_gets_its_stamp_with_its_key() -> None:
    store = Store(header_mac_key=STAMPS)
    grants = store.ask(calls.Allocate(SPACE, 100, 0, "h2"))
    assert grants.segments == [store.ids[1]]
    (token,) = grants.tokens
    commit = calls.Commit(EPOCH, token, SPACE, KEYS[0], None, 90, False)
    committed = store.ask(commit)
    assert committed.outcome == calls.PutOutcome.STORED
    assert committed.header_mac == stamps_of(store, grants, [90], [(EPOCH, token)], KEYS[:1])
    assert store.ask(commit) == calls.CommitReply(calls.PutOutcome.REFUSED)
    other = store.ask(calls.Allocate(SPACE, 100, 0, "h2"))
    found = store.ask(commit._replace(token=other.tokens[0]))
    assert found == calls.CommitReply(calls.PutOutcome.FOUND), "another version is there"
