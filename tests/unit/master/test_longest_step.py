"""No step of the master's loop takes long, whatever is asked at its bounds and whatever is there.

Work is counted, not timed: lines of the state's sources that a step runs, of which a millisecond is
some 20,000 as they are and 80,000 compiled. It must be bounded, and not grow with what is there,
except for the walk up a chain (``Forest.is_reachable``), which is not counted.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

from kvstore import calls
from kvstore.calls import HintAction
from kvstore.limits import (
    BATCH_KEYS_MAX,
    BLOCKS_MAX,
    CHAINS_MAX,
    CLAIMS_PER_MESSAGE_MAX,
    PIN_KEYS_MAX,
    PUT_KEYS_MAX,
    RELEASED_MAX,
    REPLICAS_MAX,
    Key,
    Namespace,
)
from kvstore.master.state import (
    background_sweep,
    drain_scan,
    leases,
    memory_pool,
    removals,
    repair_queue,
)
from kvstore.master.state.inventory import Claim
from kvstore.master.state.rules import MasterRules
from kvstore.master.state.traffic import CLIENTS_MAX, SPACES_MAX, TIPS_MAX, Caller
from kvstore.master.state.views import chains, operator_queries
from kvstore.memory.header import EXTENT_ALIGN, SUPERBLOCK_BYTES
from kvstore.wire.request_chunking import CHUNKINGS
from tests.unit.master.cluster import BEFORE, EPOCH, NAMESPACE, Cluster

LINES_MAX = 300_000
"""4 ms compiled."""

WALK = ("is_reachable", "lost", "complete")
"""The walk up a chain, and what it asks of each record."""

RING_LINES_MAX = 1_200_000
"""Of the one loop that asks for a ring, whose six lines take 26 ns compiled."""

if not background_sweep.__file__.endswith(".py"):
    pytest.skip("what is compiled has no lines to count", allow_module_level=True)


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """The most lines that a step runs, by its name. A step is what is called from outside of the
    state."""
    steps: Counter[str] = Counter()
    depth = lines = 0

    def inside(frame: FrameType, event: str, _: object) -> Any:
        nonlocal depth, lines
        lines += event == "line"
        if event == "return":
            depth -= 1
            if not depth:
                name = frame.f_code.co_qualname
                steps[name] = max(steps[name], lines)
        return inside

    def called(frame: FrameType, event: str, _: object) -> Any:
        nonlocal depth, lines
        code = frame.f_code
        if "master/state" not in code.co_filename or code.co_name in WALK:
            return None
        lines = lines if depth else 0
        depth += 1
        return inside

    before = sys.gettrace()
    sys.settrace(called)
    try:
        yield steps
    finally:
        sys.settrace(before)


class World(Cluster):
    """``count`` objects in a chain of that length, as many namespaces of one object, on two
    nodes."""

    def __init__(self, count: int) -> None:
        blocks = 4 * (count + BATCH_KEYS_MAX)
        super().__init__({"one": blocks, "two": blocks}, MasterRules(waiting_puts_max=256))
        self.count = count
        self.keys = [Key(b"k%07d" % index) for index in range(max(count, BATCH_KEYS_MAX))]
        for start in range(0, count, PUT_KEYS_MAX):
            above = f"k{start - 1:07}" if start else None
            some = self.keys[start : min(start + PUT_KEYS_MAX, count)]
            self.put_small([key.decode() for key in some], above)
        for index in range(count):
            self.put_small("x", namespace=Namespace(f"s{index}"))
        self.work()

    @property
    def tip(self) -> str:
        return self.keys[self.count - 1].decode()

    def put_small(self, names: Iterable[str], parent: str | None = None, **given: Any) -> None:
        self.put(names, size=1, parent=parent, **given)

    def tokens(self, letter: str, count: int) -> list[int]:
        """Of so many puts under way."""
        names = [f"{letter}{index:07}" for index in range(count)]
        return list(self.start(names, size=1, chain=False).tokens)

    def placements(self, keys: list[Key]) -> calls.Placements:
        return self.state.asking.lookup(self.now_ms, calls.Lookup(NAMESPACE, keys)).placements

    def ask(self, request: calls.Request) -> Counter[str]:
        """All pieces, and all the work that follows."""
        cut = CHUNKINGS.get(type(request))
        is_large = cut is not None and cut.is_large(request)
        with counted() as steps:
            for piece in cut.chunks(request) if cut is not None and is_large else [request]:
                self.state.steps[type(piece)](self.now_ms, piece)
                self.work()
            self.state.tick(self.now_ms)
        return steps


def keys_below(letter: bytes, world: World) -> calls.PutStart:
    keys = [Key(letter + b"%07d" % index) for index in range(PUT_KEYS_MAX)]
    return calls.PutStart(
        NAMESPACE, keys, [1] * PUT_KEYS_MAX, Key(world.tip.encode()), True, 1, False, 5_000, "h"
    )


def scan(world: World) -> calls.Request:
    """Keys that are no chain of the forest."""
    keys = world.keys[: min(world.count, BATCH_KEYS_MAX)]
    return calls.MatchPrefix([NAMESPACE], [*keys[::2], *keys[1::2]], True)


def put_below_missing(world: World) -> calls.Request:
    """Each has a child already, so each link might close a ring."""
    request = keys_below(b"m", world)
    for index, key in enumerate(request.keys):
        world.put_small([f"c{index:07}"], key.decode())
    world.put_small("ab")
    world.remove_later("a")  # a break
    return request


def commit(world: World) -> calls.Request:
    token = world.allocate(1)
    tip = Key(world.tip.encode())
    return calls.Commit(EPOCH, token, NAMESPACE, Key(b"committed"), tip, 1, False)


def renew(world: World) -> calls.Request:
    keys = world.keys[:BATCH_KEYS_MAX]
    found = world.placements(keys)
    uuids = [world.state.pool.segments[each].offer.uuid for each in found.segments]
    tokens = list(range(BATCH_KEYS_MAX))
    return calls.Renew(
        NAMESPACE, keys, found.epochs, found.counters, EPOCH, tokens, uuids, found.offsets
    )


def release(world: World) -> calls.Request:
    """Of objects that evictions have passed over while they were leased."""
    for start in range(0, world.count, BATCH_KEYS_MAX):
        keys = world.keys[start : start + BATCH_KEYS_MAX]
        world.ask(calls.Lookup(NAMESPACE, keys, 1 + start))
    for segment in world.state.pool.segments.values():
        world.state.pool.candidates[segment].queues[1].peek(world.now_ms, 1 << 20)
    return calls.Release(range(1, 1 + RELEASED_MAX))


def pin(world: World) -> calls.Pin:
    """Of which the last keeps as many ancestors as there are."""
    return calls.Pin(NAMESPACE, world.keys[world.count - PIN_KEYS_MAX : world.count][::-1], 1_000)


def unpin(world: World) -> calls.Request:
    request = pin(world)
    world.ask(request)
    return calls.Unpin(NAMESPACE, request.keys)


def hint(world: World) -> calls.Request:
    """Each releases as many blocks as there are."""
    keys = pin(world).keys
    return calls.Hint(NAMESPACE, keys, [HintAction.RELEASE] * len(keys), [0] * len(keys))


def report_corrupt(world: World) -> calls.Request:
    keys = world.keys[:BATCH_KEYS_MAX]
    found = world.placements(keys)
    uuids = [world.offers["one"][0].uuid] * len(keys)
    return calls.ReportCorrupt(NAMESPACE, keys, found.epochs, found.counters, uuids)


def traffic(world: World) -> calls.Request:
    """Of as many namespaces and clients as are remembered, all in use."""
    known = world.state.traffic
    for number in range(2 * SPACES_MAX):
        name = Namespace(f"n{number}")
        for client in range(2 * CLIENTS_MAX):
            known.caller = Caller(f"c{client} a")
            known.writer_row(0, name)
            known.record_query(0, name, world.keys[client:], 0, 0)
    return calls.Traffic()


def chains_of_one(world: World) -> calls.Request:
    """Of a chain that is as long as there are objects, and of as many tips and forks as count."""
    for index in range(0, world.count, max(1, world.count // (2 * chains.BRANCHES_MAX))):
        world.put_small([f"f{index:07}"], world.keys[index].decode())
    for key in world.keys[: min(world.count, 2 * TIPS_MAX)]:
        world.state.traffic.record_query(0, NAMESPACE, [key], 1, -1, key)
    return calls.Chains(NAMESPACE)


def chains_of_all(world: World) -> calls.Request:
    for number in range(world.count):
        for _ in range(2):
            space = Namespace(f"s{number}")
            world.state.traffic.record_query(0, space, [Key(b"x")], 1, -1, Key(b"x"))
    return calls.Chains()


def drain(world: World) -> calls.Request:
    world.tokens("d", 4 * PUT_KEYS_MAX)
    return calls.Drain("one", calls.DrainStep.BEGIN)


def start_moves(world: World) -> calls.Request:
    return calls.StartMoves("one", 0, PUT_KEYS_MAX, 1 << 40, evict_up_to=world.drain("one").began)


def start_repairs(world: World) -> calls.Request:
    """Of many objects that lack a replica, and of whole chains."""
    for start in range(0, 2 * PUT_KEYS_MAX, PUT_KEYS_MAX):
        names = [f"l{index:07}" for index in range(start, start + PUT_KEYS_MAX)]
        world.put_small(names, world.tip, replicas=3)
    world.join("three", 1 << 18)
    world.after(1_500)
    return calls.StartMoves("one", 0, BATCH_KEYS_MAX, 1 << 40, repair=True)


def last(world: World, count: int) -> list[Key]:
    return world.keys[world.count - count : world.count]


BOUNDS: dict[str, Callable[[World], calls.Request]] = {
    "match": lambda world: calls.MatchPrefix([NAMESPACE] * 4, world.keys[:BATCH_KEYS_MAX], True),
    "scan": scan,
    "lookup": lambda world: calls.Lookup(NAMESPACE, world.keys[:BATCH_KEYS_MAX]),
    "exists": lambda world: calls.Exists(NAMESPACE, world.keys[:BATCH_KEYS_MAX], True),
    "renew": renew,
    "pin": pin,
    "unpin": unpin,
    "hint": hint,
    "remove": lambda world: calls.Remove(NAMESPACE, world.keys[:BATCH_KEYS_MAX]),
    "put_start": lambda world: keys_below(b"p", world)._replace(replicas=REPLICAS_MAX),
    "put_below_missing": put_below_missing,
    "put_end": lambda world: calls.PutEnd(EPOCH, world.tokens("e", 4 * PUT_KEYS_MAX)),
    "put_revoke": lambda world: calls.PutRevoke(EPOCH, world.tokens("r", 4 * PUT_KEYS_MAX), True),
    "allocate": lambda _: calls.Allocate(NAMESPACE, 1, 0, "h"),
    "commit": commit,
    "release": release,
    "remove_first": lambda world: calls.Remove(NAMESPACE, world.keys[:1]),
    "report_corrupt": report_corrupt,
    "clear": lambda _: calls.Clear(NAMESPACE, BATCH_KEYS_MAX),
    "clear_all": lambda _: calls.Clear("", BATCH_KEYS_MAX),
    "describe": lambda _: calls.DescribeSegments([1, 2] * BATCH_KEYS_MAX),
    "report_failure": lambda _: calls.ReportFailure([1, 2] * 512, epoch=EPOCH),
    "status": lambda _: calls.Status(),
    "traffic": traffic,
    "chains_of_one": chains_of_one,
    "chains_of_all": chains_of_all,
    "chains_of_blocks": lambda world: calls.Chains(NAMESPACE, last(world, CHAINS_MAX)),
    "blocks": lambda world: calls.Blocks(NAMESPACE, last(world, BLOCKS_MAX), BLOCKS_MAX),
    "listed": lambda _: calls.ListObjects("", b"nothing begins so", 0, BATCH_KEYS_MAX),
    "stat": lambda world: calls.StatObject(NAMESPACE, world.keys[world.count - 1]),
    "drain": drain,
    "start_moves": start_moves,
    "start_repairs": start_repairs,
}
GROWING = ("match", "scan", "lookup", "exists", "renew", "pin", "unpin", "remove")
"""Their requests are larger in a larger world."""

SLICES = [
    (removals, "HIDE_STEPS"), (background_sweep, "SWEEP_STEPS"),
    (memory_pool, "SETTLE_STEPS"), (operator_queries, "LIST_STEPS_MAX"),
    (operator_queries, "STATUS_ROWS_MAX"), (operator_queries, "TRAFFIC_ROWS_MAX"),
    (chains, "STEPS"), (chains, "LOOKS"), (drain_scan, "STEPS_MAX"), (drain_scan, "LINE_MAX"),
    (repair_queue, "SCAN_STEPS"), (leases, "RELEASED_PER_STEP"),
]  # fmt: skip
"""Made so small that what is there would show."""


@pytest.mark.slow
@pytest.mark.parametrize("name", BOUNDS)
def test_the_longest_step_is_bounded(name: str) -> None:
    world = World(2_000)
    steps = world.ask(BOUNDS[name](world))
    assert max(steps.values()) < (RING_LINES_MAX if name == "put_below_missing" else LINES_MAX)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in BOUNDS if name not in GROWING])
def test_the_longest_step_does_not_grow_with_what_is_there(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, constant in SLICES:
        monkeypatch.setattr(module, constant, 200)
    few, many = (world.ask(BOUNDS[name](world)) for world in (World(600), World(2_400)))
    assert max(many.values()) < 1.5 * max(few.values()) + 5_000, (many, few)


def test_what_a_node_says_is_taken_in_by_short_steps() -> None:
    """A whole message of claims each of which hangs below the one before, backwards."""
    world = World(600)
    world.kill("one")
    world.join("one", again=True, tells=False)
    keys = [Key(b"q%07d" % index) for index in range(CLAIMS_PER_MESSAGE_MAX)]
    claims = [
        Claim((NAMESPACE, key), above, 1, BEFORE, SUPERBLOCK_BYTES + at * 4 * EXTENT_ALIGN)
        for at, (key, above) in enumerate(zip(keys[::-1], [*keys[-2::-1], None], strict=True))
    ]
    with counted() as steps:
        world.tell("one", *claims)
    assert world.state.counters["recovered_objects"] == CLAIMS_PER_MESSAGE_MAX
    assert max(steps.values()) < LINES_MAX, steps


def test_waiting_puts_and_expired_ones_are_served_by_short_steps() -> None:
    world = World(600)
    for number in range(8):
        world.tokens(f"w{number}-", PUT_KEYS_MAX)
    with counted() as steps:
        for ms in (31_000, *[50] * 10):
            world.now_ms += ms
            for name in world.sessions:
                world.say(name, calls.NodeHeartbeat(1))
            world.state.tick(world.now_ms)
            world.work()
    assert world.state.counters["expired_puts"] == 8 * PUT_KEYS_MAX
    assert max(steps.values()) < LINES_MAX, steps
