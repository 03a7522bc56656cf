"""No step of the master's loop takes long, whatever is asked at its bounds and whatever is there.

Work is counted, not timed: lines of the state's sources that a step runs, of which a millisecond is
some 20,000 as they are and 80,000 compiled. It must be bounded, and not grow with what is there.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, cast, get_args

import pytest

from kvstore import calls
from kvstore.limits import (
    BATCH_KEYS_MAX,
    BLOCKS_MAX,
    CHAINS_MAX,
    CLAIMS_PER_MESSAGE_MAX,
    PIN_KEYS_MAX,
    PROTOCOL_VERSION,
    PUT_KEYS_MAX,
    RELEASED_MAX,
    REPLICAS_MAX,
    Key,
    Namespace,
)
from kvstore.master.service import MasterService
from kvstore.master.state import draining, forest, leases, pool, removing, repairing, sweeping
from kvstore.master.state.effects import Send
from kvstore.master.state.master_state import MasterState
from kvstore.master.state.rules import MasterRules
from kvstore.master.state.traffic import CLIENTS_MAX, SPACES_MAX, TIPS_MAX, Caller
from kvstore.master.state.views import chains, report
from kvstore.memory.header import EXTENT_ALIGN, SUPERBLOCK_BYTES, extent_bytes
from kvstore.wire.pieces import CUTS

LINES_MAX = 300_000
"""4 ms compiled."""

RING_LINES_MAX = 1_200_000
"""Of the one loop that asks for a ring, whose six lines take 26 ns compiled."""

EPOCH = 7
SPACE = Namespace("n")

if not sweeping.__file__.endswith(".py"):
    pytest.skip("what is compiled has no lines to count", allow_module_level=True)


class World:
    """A master with ``count`` objects in a chain of that length, as many namespaces of one object,
    and two nodes that wipe at once."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.now_ms = 0
        self.worst = 0
        self.name = ""
        rules = MasterRules(waiting_puts_max=256)
        self.state = MasterState(epoch=EPOCH, rules=rules)
        self.service = MasterService(self.state, clock=lambda: self.now_ms)
        self.orders: list[int] = []
        for number in (1, 2):
            size = SUPERBLOCK_BYTES + 4 * (count + BATCH_KEYS_MAX) * extent_bytes(1)
            self._joins(number, size)
        self.keys = [Key(b"k%07d" % index) for index in range(max(count, BATCH_KEYS_MAX))]
        for start in range(0, count, PUT_KEYS_MAX):
            some = self.keys[start : start + PUT_KEYS_MAX]
            self.put(SPACE, some, parent=self.keys[start - 1] if start else None, chain=True)
        for index in range(count):
            self.put(Namespace(f"s{index}"), [Key(b"x")])
        self.idle()

    def _joins(self, number: int, size: int, *, fresh: bool = True) -> calls.NodeJoin:
        offer = calls.SegmentOffer(
            size, bytes([number]) * 16, "kv", f"h:{number}", bytes(16), 1, 1, fresh
        )
        join = calls.NodeJoin(f"node{number}", "h", PROTOCOL_VERSION, 0, [offer])
        self.state.nodes.joined(self.now_ms, number, join)
        return join

    def put(
        self,
        space: Namespace,
        keys: list[Key],
        *,
        parent: Key | None = None,
        chain: bool = False,
        replicas: int = 1,
    ) -> None:
        sizes = [1] * len(keys)
        request = calls.PutStart(space, keys, sizes, parent, chain, replicas, False, 0, "h")
        grants = self.state.putting.put_start(self.now_ms, request)
        assert isinstance(grants, calls.Grants)
        self.state.putting.put_end(self.now_ms, calls.PutEnd(EPOCH, grants.tokens))

    def start(self, keys: list[Key]) -> list[int]:
        request = calls.PutStart(SPACE, keys, [1] * len(keys), None, False, 1, False, 0, "h")
        grants = self.state.putting.put_start(self.now_ms, request)
        assert isinstance(grants, calls.Grants)
        return list(grants.tokens)

    def placements(self, keys: list[Key]) -> calls.Placements:
        return self.state.asking.lookup(self.now_ms, calls.Lookup(SPACE, keys)).placements

    # --- steps -------------------------------------------------------------------------------

    def counted(self, name: str, step: Callable[[], Any]) -> Any:
        lines = 0

        def local(frame: FrameType, event: str, _: object) -> Any:
            nonlocal lines
            lines += event == "line"
            return local

        def called(frame: FrameType, event: str, _: object) -> Any:
            return local if "master/state" in frame.f_code.co_filename else None

        before = sys.gettrace()
        sys.settrace(called)
        try:
            result = step()
        finally:
            sys.settrace(before)
        if lines > self.worst:
            self.worst, self.name = lines, name
        return result

    def ask(self, request: calls.Request) -> Any:
        """Through the service, all pieces and all work that follows counted one by one."""
        cut = CUTS.get(type(request))
        if cut is not None and cut.is_large(request):
            return cut.joined([self.ask(piece) for piece in cut.pieces(request)])
        name = type(request).__name__
        whole, state = self.service.call, self.state
        inside = 0

        def call(each: calls.Request, caller: Caller | None = None) -> Any:
            nonlocal inside
            inside += 1
            try:
                return whole(each) if inside > 1 else self.counted(name, lambda: whole(each))
            finally:
                inside -= 1

        async def main() -> Any:
            self.service.call = call  # type: ignore[method-assign,assignment]
            self.service._work = lambda: None  # type: ignore[method-assign]
            reply = self.service.call(request)
            if not isinstance(reply, tuple):
                reply = asyncio.ensure_future(cast(Any, reply))
                for _ in range(10_000):
                    if reply.done():
                        break
                    await asyncio.sleep(0)
                    self._wipes(name)
                    if state.has_work:
                        self.counted(f"work of {name}", lambda: state.work(self.now_ms))
                    self.service._settle()
                reply = await asyncio.wait_for(reply, 5)
            return reply

        settle = self.service._carry_out

        def noting() -> None:
            for effect in self.state.effects:
                if isinstance(effect, Send) and isinstance(effect.message, calls.MasterWipe):
                    self.orders.append(effect.message.order)
            settle()

        self.service._carry_out = noting  # type: ignore[method-assign]
        try:
            return asyncio.run(main())
        finally:
            self.service._carry_out = settle  # type: ignore[method-assign]
            self.service.call = whole  # type: ignore[method-assign]
            self.idle(name)

    def _wipes(self, name: str) -> None:
        orders, self.orders = self.orders, []
        for order in orders:
            for session in (1, 2):
                said = calls.NodeWiped(order)
                step = self.state.nodes.said
                self.counted(f"wiped of {name}", lambda: step(self.now_ms, session, said))  # noqa: B023

    def idle(self, name: str = "", ms: int = 0) -> None:
        """Time passes, and all background work is done."""
        state = self.state
        self.now_ms += ms
        for session in (1, 2):
            state.nodes.said(self.now_ms, session, calls.NodeBeat(1))
        for _ in range(100_000):
            self.orders += [
                effect.message.order
                for effect in state.take_effects()
                if isinstance(effect, Send) and isinstance(effect.message, calls.MasterWipe)
            ]
            self._wipes(name)
            if state.effects:
                continue
            if not state.has_work:
                break
            self.counted(f"work after {name}", lambda: state.work(self.now_ms))
        self.counted(f"tick after {name}", lambda: state.tick(self.now_ms))


def match(world: World) -> calls.Request:
    return calls.MatchPrefix([SPACE] * 4, world.keys[:BATCH_KEYS_MAX], True)


def scan(world: World) -> calls.Request:
    """Keys that are no chain of the forest."""
    keys = world.keys[: min(world.count, BATCH_KEYS_MAX)]
    return calls.MatchPrefix([SPACE], [*keys[::2], *keys[1::2]], True)


def lookup(world: World) -> calls.Request:
    return calls.Lookup(SPACE, world.keys[:BATCH_KEYS_MAX])


def exists(world: World) -> calls.Request:
    return calls.Exists(SPACE, world.keys[:BATCH_KEYS_MAX])


def leased_exists(world: World) -> calls.Request:
    return calls.Exists(SPACE, world.keys[:BATCH_KEYS_MAX], True)


def put_start(world: World) -> calls.Request:
    keys = [Key(b"p%07d" % index) for index in range(PUT_KEYS_MAX)]
    return calls.PutStart(
        SPACE,
        keys,
        [1] * PUT_KEYS_MAX,
        world.keys[world.count - 1],
        True,
        REPLICAS_MAX,
        False,
        0,
        "h",
    )


def put_below_missing(world: World) -> calls.Request:
    """Each has a child already, so each link might close a ring."""
    keys = [Key(b"m%07d" % index) for index in range(PUT_KEYS_MAX)]
    for index, key in enumerate(keys):
        world.put(SPACE, [Key(b"c%07d" % index)], parent=key)
    world.put(SPACE, [Key(b"a"), Key(b"b")], chain=True)
    world.state.removing.remove(0, calls.Remove(SPACE, [Key(b"a")]))  # a break
    return calls.PutStart(
        SPACE, keys, [1] * PUT_KEYS_MAX, world.keys[world.count - 1], True, 1, False, 5_000, "h"
    )


def put_end(world: World) -> calls.Request:
    keys = [Key(b"e%07d" % index) for index in range(4 * PUT_KEYS_MAX)]
    return calls.PutEnd(EPOCH, world.start(keys))


def put_revoke(world: World) -> calls.Request:
    keys = [Key(b"r%07d" % index) for index in range(4 * PUT_KEYS_MAX)]
    return calls.PutRevoke(EPOCH, world.start(keys), True)


def allocate(world: World) -> calls.Request:
    return calls.Allocate(SPACE, 1, 0, "h")


def commit(world: World) -> calls.Request:
    grants = world.state.putting.allocate(world.now_ms, calls.Allocate(SPACE, 1, 0, "h"))
    assert isinstance(grants, calls.Grants)
    tip = world.keys[world.count - 1]
    return calls.Commit(EPOCH, grants.tokens[0], SPACE, Key(b"committed"), tip, 1, False)


def renew(world: World) -> calls.Request:
    keys = world.keys[:BATCH_KEYS_MAX]
    found = world.placements(keys)
    tokens = list(range(BATCH_KEYS_MAX))
    pool = world.state.pool.segments
    uuids = [pool[each].offer.uuid for each in found.segments]
    return calls.Renew(
        SPACE, keys, found.epochs, found.counters, EPOCH, tokens, uuids, found.offsets
    )


def release(world: World) -> calls.Request:
    """Of objects that evictions have passed over while they were leased."""
    for start in range(0, world.count, BATCH_KEYS_MAX):
        keys = world.keys[start : start + BATCH_KEYS_MAX]
        world.ask(calls.Lookup(SPACE, keys, 1 + start))
    for segment in world.state.pool.segments.values():
        segment.candidates.peek(world.now_ms, 1 << 20)
    return calls.Release(range(1, 1 + RELEASED_MAX))


def pin(world: World) -> calls.Request:
    """Of which the last keeps as many ancestors as there are."""
    return calls.Pin(SPACE, world.keys[world.count - PIN_KEYS_MAX : world.count][::-1], 1_000)


def unpin(world: World) -> calls.Request:
    request = pin(world)
    world.ask(request)
    return calls.Unpin(SPACE, request.keys)  # type: ignore[union-attr]


def remove(world: World) -> calls.Request:
    return calls.Remove(SPACE, world.keys[:BATCH_KEYS_MAX])


def remove_first(world: World) -> calls.Request:
    return calls.Remove(SPACE, world.keys[:1])


def report_corrupt(world: World) -> calls.Request:
    keys = world.keys[:BATCH_KEYS_MAX]
    found = world.placements(keys)
    uuids = [bytes([1]) * 16] * len(keys)
    return calls.ReportCorrupt(SPACE, keys, found.epochs, found.counters, uuids)


def clear(world: World) -> calls.Request:
    return calls.Clear(SPACE, BATCH_KEYS_MAX)


def clear_all(world: World) -> calls.Request:
    return calls.Clear("", BATCH_KEYS_MAX)


def describe(world: World) -> calls.Request:
    return calls.DescribeSegments([1, 2] * BATCH_KEYS_MAX)


def report_failure(world: World) -> calls.Request:
    return calls.ReportFailure([1, 2] * 512, epoch=EPOCH)


def status(world: World) -> calls.Request:
    return calls.Status()


def traffic(world: World) -> calls.Request:
    """Of as many namespaces and clients as are remembered, all in use."""
    known = world.state.traffic
    for number in range(2 * SPACES_MAX):
        name = Namespace(f"n{number}")
        for client in range(2 * CLIENTS_MAX):
            known.caller = Caller(f"c{client} a")
            known.puts(0, name)
            known.asked(0, name, world.keys[client:], 1, 0, 0)
    return calls.Traffic()


def chains_of_one(world: World) -> calls.Request:
    """Of a chain that is as long as there are objects, and of as many tips and forks as count."""
    for index in range(0, world.count, max(1, world.count // (2 * chains.BRANCHES_MAX))):
        world.put(SPACE, [Key(b"f%07d" % index)], parent=world.keys[index])
    known = world.state.traffic
    for key in world.keys[: min(world.count, 2 * TIPS_MAX)]:
        known.asked(0, SPACE, [key], 1, 1, -1, key)
    return calls.Chains(SPACE)


def chains_of_all(world: World) -> calls.Request:
    known = world.state.traffic
    for number in range(world.count):
        for _ in range(2):
            known.asked(0, Namespace(f"s{number}"), [Key(b"x")], 1, 1, -1, Key(b"x"))
    return calls.Chains()


def chains_of_blocks(world: World) -> calls.Request:
    return calls.Chains(SPACE, world.keys[world.count - CHAINS_MAX : world.count])


def blocks(world: World) -> calls.Request:
    return calls.Blocks(SPACE, world.keys[world.count - BLOCKS_MAX : world.count], BLOCKS_MAX)


def listed(world: World) -> calls.Request:
    return calls.ListObjects("", b"nothing begins so", 0, BATCH_KEYS_MAX)


def stat(world: World) -> calls.Request:
    return calls.StatObject(SPACE, world.keys[world.count - 1])


def drain(world: World) -> calls.Request:
    world.start([Key(b"d%07d" % index) for index in range(4 * PUT_KEYS_MAX)])
    return calls.Drain("node1", calls.DrainStep.BEGIN)


def start_moves(world: World) -> calls.Request:
    drain = calls.Drain("node1", calls.DrainStep.BEGIN)
    began = world.state.nodes.drain(world.now_ms, drain).began
    return calls.StartMoves("node1", 0, PUT_KEYS_MAX, 1 << 40, evict_up_to=began)


def start_repairs(world: World) -> calls.Request:
    """Of many objects that lack a replica, and of whole chains."""
    for start in range(0, 2 * PUT_KEYS_MAX, PUT_KEYS_MAX):
        keys = [Key(b"l%07d" % index) for index in range(start, start + PUT_KEYS_MAX)]
        world.put(SPACE, keys, parent=world.keys[world.count - 1], chain=True, replicas=3)
    world._joins(3, 1 << 30)
    world.idle("pass", 1_500)
    world.idle("pass")
    return calls.StartMoves("node1", 0, BATCH_KEYS_MAX, 1 << 40, repair=True)


def join(world: World) -> calls.Request:
    return calls.Join("c", "h", PROTOCOL_VERSION)


BOUNDS: list[Callable[[World], calls.Request]] = [
    match, scan, lookup, exists, leased_exists, put_start, put_below_missing, put_end, put_revoke,
    allocate, commit, renew, release, pin, unpin, remove, remove_first, report_corrupt, clear,
    clear_all, describe, report_failure, status, traffic, chains_of_one,
    chains_of_all, chains_of_blocks, blocks, listed, stat, drain, start_moves, start_repairs,
    join,
]  # fmt: skip


SLICES = [
    (forest, "WALK_STEPS"),
    (removing, "HIDE_STEPS"),
    (sweeping, "SWEEP_STEPS"),
    (pool, "SETTLE_STEPS"),
    (report, "LIST_STEPS_MAX"),
    (report, "STATUS_ROWS_MAX"),
    (report, "TRAFFIC_ROWS_MAX"),
    (chains, "STEPS"),
    (chains, "LOOKS"),
    (draining, "STEPS_MAX"),
    (draining, "LINE_MAX"),
    (repairing, "SCAN_STEPS"),
    (repairing, "SORTED_PER_SLICE"),
    (leases, "RELEASED_PER_STEP"),
]
"""Made so small that what is there would show."""


@pytest.mark.slow
def test_every_call_is_here() -> None:
    asked = {type(bound(World(PUT_KEYS_MAX))) for bound in BOUNDS}
    assert asked == set(get_args(calls.Request))


@pytest.mark.slow
@pytest.mark.parametrize("bound", BOUNDS)
def test_the_longest_step_is_bounded(bound: Callable[[World], calls.Request]) -> None:
    world = World(2_000)
    request = bound(world)
    world.worst = 0
    world.ask(request)
    allowed = RING_LINES_MAX if bound is put_below_missing else LINES_MAX
    assert world.worst < allowed, world.name


@pytest.mark.slow
@pytest.mark.parametrize(
    "bound",
    [
        b
        for b in BOUNDS
        if b not in (match, scan, lookup, exists, leased_exists, renew, pin, unpin, remove)
    ],
)
def test_the_longest_step_does_not_grow_with_what_is_there(
    bound: Callable[[World], calls.Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in SLICES:
        monkeypatch.setattr(module, name, 200)
    worlds = World(600), World(2_400)
    for world in worlds:
        request = bound(world)
        world.worst = 0
        world.ask(request)
    few, many = worlds
    assert many.worst < 1.5 * few.worst + 5_000, (many.name, few.name, few.worst)


def test_missing_replicas_are_found_and_granted_by_short_steps() -> None:
    world = World(2_000)
    world.worst = 0
    reply = world.ask(start_repairs(world))
    decoded = reply if isinstance(reply, calls.MovesStarted) else reply[0]
    assert len(decoded.keys) == world.state.rules.repair.copies_max
    assert world.worst < LINES_MAX, world.name


def test_what_a_node_says_is_taken_in_by_short_steps() -> None:
    """A whole message of claims each of which hangs below the one before, backwards."""
    world = World(600)
    world._joins(3, 1 << 42, fresh=False)
    rows = CLAIMS_PER_MESSAGE_MAX
    keys = [Key(b"q%07d" % index) for index in range(rows)]
    claims = calls.NodeClaims(
        0, True, True, [SPACE], [0] * rows, keys[::-1], [*keys[-2::-1], None], [1] * rows,
        [EPOCH - 1] * rows, list(range(rows)),
        [SUPERBLOCK_BYTES + index * 2 * EXTENT_ALIGN * 2 for index in range(rows)],
    )  # fmt: skip
    world.counted("claims", lambda: world.state.nodes.said(0, 3, claims))
    world.idle("claims")
    assert world.state.counters["claimed_objects"] == rows
    assert world.worst < LINES_MAX, world.name


def test_waiting_puts_and_expired_ones_are_served_by_short_steps() -> None:
    world = World(600)
    for start in range(0, 32 * PUT_KEYS_MAX, PUT_KEYS_MAX):
        world.start([Key(b"w%07d" % index) for index in range(start, start + PUT_KEYS_MAX)])
    world.worst = 0
    for ms in (31_000, 50, 50, 30_000, 50, 50):
        world.idle("expiry", ms)
    assert world.worst < LINES_MAX, world.name
