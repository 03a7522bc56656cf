"""Blocks between a cache and a store: a real one, none, and one that holds up whoever asks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import pytest
import torch

import kvstore
from kvstore.calls import PutOutcome
from kvstore.config import ConnectorConfig
from kvstore.connectors.vllm.groups import NULL_BLOCK, Groups
from kvstore.connectors.vllm.messages import (
    LoadCommand,
    Run,
    SaveCommand,
    SaveResult,
    TransferCommands,
    TransferReport,
    UnfinishedTransfers,
    namespace,
)
from kvstore.connectors.vllm.worker import worker_side as module
from kvstore.connectors.vllm.worker.pages import CPUPages, Mark, Pages, inspect_caches
from kvstore.connectors.vllm.worker.worker_side import (
    TRANSFER_TIMEOUT_MS,
    WorkerSide,
    client_config,
)
from kvstore.errors import DeadlineExceededError, NoSpaceError
from tests.support.wait import until
from tests.unit.connectors.test_pages import Config, Group

GROUPS = Groups(hash_block_tokens=4, scheduler_block_tokens=8, block_tokens={0: 4, 1: 8})
BLOCKS = 600
LONG_S = 20.0
NOWHERE = "127.0.0.1:1"
"""Nobody listens there."""


class Cache:
    """Two layers of the first group, one of the second, each block with bytes of its own."""

    def __init__(self, seed: int, *, second: bool = True) -> None:
        generator = torch.Generator().manual_seed(seed)
        names = ["a", "b", "c"][: 3 if second else 2]
        self.layers = {
            name: torch.randint(0, 255, (BLOCKS, 2, 8), dtype=torch.uint8, generator=generator)
            for name in names
        }
        config: Any = Config([Group(["a", "b"]), Group(["c"])], BLOCKS)
        self.pages = CPUPages(inspect_caches(self.layers, config))

    def block(self, group: int, block_id: int) -> bytes:
        names = ("a", "b") if group == 0 else ("c",)
        return b"".join(self.layers[name][block_id].numpy().tobytes() for name in names)


class Held(CPUPages):
    """Pages that are lent only when it is said: all, or those of one group."""

    def __init__(self, cache: Cache, group: int | None = None) -> None:
        self.layout, self.block_bytes = cache.pages.layout, cache.pages.block_bytes
        self._memory, self._pages = cache.pages._memory, cache.pages._pages
        self.group = group
        self.asked = threading.Event()
        self.go_on = threading.Event()

    def blocks(
        self, group: int, block_ids: Sequence[int], after: Mark, each: int = 1
    ) -> list[list[memoryview]]:
        if self.group in (None, group):
            self.asked.set()
            assert self.go_on.wait(LONG_S)
        return super().blocks(group, block_ids, after, each)


@pytest.fixture(scope="module")
def pool() -> Iterator[kvstore.Client]:
    with kvstore.Client.embedded("32MiB") as client:
        client.put(b"first", b"so that every connection is there")
        client.match_prefix([b"first"])
        client.clear("default")
        yield client


@pytest.fixture
def store(pool: kvstore.Client) -> Iterator[kvstore.Client]:
    yield pool
    for group in (0, 1):
        pool.clear(namespace("f", group, "p0t0"))


Start = Callable[..., WorkerSide]


@pytest.fixture
def start(pool: kvstore.Client, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    started: list[WorkerSide] = []

    def start(
        pages: Pages, *, master: str = "", saves: bool = True,
        timeout_ms: int = TRANSFER_TIMEOUT_MS, **settings: Any,
    ) -> WorkerSide:  # fmt: skip
        monkeypatch.setattr(module, "TRANSFER_TIMEOUT_MS", timeout_ms)
        config = ConnectorConfig(master=master or pool.config.master, **settings)
        client = kvstore.Client(config=client_config(config, timeout_ms))
        started.append(WorkerSide(config, GROUPS, client, {"p0t0": pages}, saves=saves))
        return started[-1]

    yield start
    for each in started:
        each.close()


def test_blocks_of_a_tenant_are_in_its_namespaces(store: kvstore.Client, start: Start) -> None:
    theirs = namespace("f", 0, "p0t0", tenant="acme")
    try:
        assert save(start(Cache(1).pages, tenant="acme"), run(0, [1, 2]))
        assert store.match_prefix([b"k0", b"k1"], namespace=theirs) == 2
        assert store.match_prefix([b"k0", b"k1"], namespace=namespace("f", 0, "p0t0")) == 0
        for tenant, hits in (("acme", True), ("globex", False), ("", False)):
            report, _ = load(start(Cache(2).pages, tenant=tenant), run(0, [1, 2]))
            assert (report is None or not report.failed_loads) == hits, tenant
    finally:
        store.clear(theirs)


def run(group: int, block_ids: list[int], *, first: int = 0, name: str = "k") -> Run:
    keys = [f"{name}{first + index}".encode() for index in range(len(block_ids))]
    parent = f"{name}{first - 1}".encode() if first else None
    return Run(group, keys, block_ids, first, parent)


def reports(worker: WorkerSide, number: int) -> dict[int, SaveResult]:
    """Of so many saves."""
    ended: dict[int, SaveResult] = {}

    def ready() -> bool:
        report = worker.take_report()
        ended.update(report.saves if report else {})
        return len(ended) >= number

    until(ready)
    return ended


def save(worker: WorkerSide, *runs: Run) -> bool:
    worker.save(TransferCommands("f", [], [SaveCommand(1, list(runs))], "1"))
    return reports(worker, 1) == {1: SaveResult(1, 1)}


def load(
    worker: WorkerSide, *runs: Run, draft: str = "1"
) -> tuple[TransferReport | None, set[int]]:
    """What is reported beyond its arrival, and the bad blocks."""
    worker.begin(TransferCommands("f", [LoadCommand("r", list(runs))], [], draft))
    arrived: set[str] = set()
    failed: set[str] = set()

    def ready() -> bool:
        now = worker.take_arrived()
        arrived.update(now[0])
        failed.update(now[1])
        return bool(arrived)

    until(ready)
    report = worker.take_report()
    assert arrived == {"r"}
    assert failed == ({"r"} if report else set())
    return report, worker.take_bad_blocks()


# --- there and back -------------------------------------------------------------------------------


def test_what_one_engine_saves_another_loads_byte_by_byte(
    start: Start, store: kvstore.Client
) -> None:
    ours, theirs = Cache(1), Cache(2)
    untouched = theirs.block(0, 5), theirs.block(1, 5)
    assert save(start(ours.pages), run(0, [3, 1, 4, 9]), run(1, [2, 6]))
    assert load(start(theirs.pages), run(0, [10, 11, 12, 13]), run(1, [20, 21])) == (None, set())
    for here, there in ((3, 10), (1, 11), (4, 12), (9, 13)):
        assert theirs.block(0, there) == ours.block(0, here)
    for here, there in ((2, 20), (6, 21)):
        assert theirs.block(1, there) == ours.block(1, here)
    assert (theirs.block(0, 5), theirs.block(1, 5)) == untouched
    names = [namespace("f", group, "p0t0") for group in (0, 1)]
    keys = [b"k0", b"k1", b"k2", b"k3", b"k4"]
    assert [match[:2] for match in store.matches(keys, namespaces=names)] == [(4, 0), (2, 0)]


def drafted(start: Start, cache: Cache) -> WorkerSide:
    """A worker whose layers "b" and "c" are a draft model's: a half of the first group, and all
    that it has of the second."""
    split: list[CPUPages] = []
    for names in (["a"], ["b", "c"]):
        config: Any = Config([Group(["a", "b"]), Group(["c"])], BLOCKS)
        split.append(CPUPages(inspect_caches({each: cache.layers[each] for each in names}, config)))
    worker = start(split[0])
    worker.divide({"p0t0": split[0]}, {"p0t0": split[1]})
    return worker


def halves(cache: Cache, *block_ids: int) -> list[tuple[bytes, bytes]]:
    """What the model and its draft model have of these blocks."""
    a, b = cache.layers["a"].numpy(), cache.layers["b"].numpy()
    return [(a[each].tobytes(), b[each].tobytes()) for each in block_ids]


def test_blocks_are_loaded_without_a_draft_models_pages_if_the_store_has_none(
    start: Start, store: kvstore.Client
) -> None:
    ours, theirs = Cache(1, second=False), Cache(2)
    config: Any = Config([Group(["a"])], BLOCKS)
    bare = start(CPUPages(inspect_caches({"a": ours.layers["a"]}, config)))
    assert save(bare, run(0, [1, 2]))

    zeros = bytes(16)
    before = halves(theirs, 1, 8)
    worker = drafted(start, theirs)
    assert load(worker, run(0, [6, 7])) == (None, set())
    model = [mine for mine, _ in halves(ours, 1, 2)]
    assert halves(theirs, 6, 7) == [(each, zeros) for each in model]
    assert halves(theirs, 1, 8) == before


def test_the_pages_of_another_draft_model_are_not_loaded(
    start: Start, store: kvstore.Client
) -> None:
    ours, theirs = Cache(1), Cache(2)
    assert save(drafted(start, ours), run(0, [1]))
    assert load(drafted(start, theirs), run(0, [4]), draft="2") == (None, set())
    [(mine, _)] = halves(ours, 1)
    assert halves(theirs, 4) == [(mine, bytes(16))]
    store.clear(namespace("f", 0, "p0t0.draft-1"))


def test_what_a_failed_load_did_not_fill_is_the_models_and_the_draft_models_to_compute(
    start: Start, store: kvstore.Client
) -> None:
    ours, theirs = Cache(1), Cache(2)
    worker = drafted(start, ours)
    assert save(worker, run(0, [1]))
    before = halves(theirs, 5)
    reader = drafted(start, theirs)
    assert load(reader, run(0, [4, 5])) == (TransferReport(failed_loads={"r": 4}), {5})
    assert halves(theirs, 4) == halves(ours, 1)
    assert halves(theirs, 5) == before
    assert save(reader, run(0, [4, 5]))
    name = namespace("f", 0, "p0t0.draft-1")
    assert store.exists_many([b"k0", b"k1"], namespace=name) == [True, True]
    store.clear(name)


def test_several_blocks_are_one_object_of_which_a_part_is_loaded(
    start: Start, store: kvstore.Client
) -> None:
    ours, theirs = Cache(1), Cache(2)
    whole = Run(0, [b"k3"], [3, 1, 4, 9], 0, None, 4)
    assert save(start(ours.pages), whole)
    untouched = theirs.block(0, 12), theirs.block(0, NULL_BLOCK)
    part = whole._replace(block_ids=[NULL_BLOCK, 10, 11, NULL_BLOCK])
    reader = start(theirs.pages)
    assert load(reader, part) == (None, set())
    assert [theirs.block(0, each) for each in (10, 11)] == [ours.block(0, each) for each in (1, 4)]
    assert (theirs.block(0, 12), theirs.block(0, NULL_BLOCK)) == untouched
    missing = Run(0, [b"k3", b"k7"], [NULL_BLOCK, *range(10, 17)], 0, None, 4)
    report, bad = load(reader, missing)
    assert (report, bad) == (TransferReport(failed_loads={"r": 16}), {13, 14, 15, 16})


def test_more_blocks_than_one_exchange_takes(start: Start, store: kvstore.Client) -> None:
    ours, theirs = Cache(1), Cache(2)
    number = 2 * module.RUN_BLOCKS_MAX + 3
    assert save(start(ours.pages), run(0, list(range(1, number + 1))))
    blocks = list(range(number, 0, -1))
    assert load(start(theirs.pages), run(0, blocks)) == (None, set())
    assert all(
        theirs.block(0, block) == ours.block(0, index + 1) for index, block in enumerate(blocks)
    )
    name = namespace("f", 0, "p0t0")
    keys = [b"k%d" % index for index in range(number)]
    assert store.match_prefix(keys, namespace=name) == number


def test_other_fingerprints_and_parts_see_nothing(start: Start, store: kvstore.Client) -> None:
    cache = Cache(1)
    worker = start(cache.pages)
    assert save(worker, run(0, [1]))
    worker.begin(TransferCommands("g", [LoadCommand("r", [run(0, [2])])], []))
    until(lambda: bool(worker.take_bad_blocks()))


def test_what_was_done_is_counted(start: Start, store: kvstore.Client) -> None:
    worker = start(Cache(1).pages)
    assert worker.take_stats() is None
    save(worker, run(0, [1, 2]))
    load(worker, run(0, [3, 4]))
    stats = worker.take_stats()
    assert stats is not None
    assert stats.data["save_blocks"] == stats.data["load_blocks"] == 2
    assert stats.data["save_bytes"] == stats.data["load_bytes"] == 2 * 2 * 16
    assert len(stats.data["save_us"]) == len(stats.data["load_us"]) == 1
    assert stats.data["load_bytes_shm"] == stats.data["load_bytes"], "where they came from"
    assert "save_failures" not in stats.data
    assert worker.take_stats() is None
    load(worker, run(0, [3]))
    again = worker.take_stats()
    assert again is not None
    assert again.data["load_bytes_shm"] == again.data["load_bytes"] == 2 * 16


# --- what is missing ------------------------------------------------------------------------------


def test_a_missing_block_makes_those_after_it_bad(start: Start, store: kvstore.Client) -> None:
    ours, theirs = Cache(1), Cache(2)
    assert save(start(ours.pages), run(0, [1, 2, 3, 4]))
    store.remove(b"k2", namespace=namespace("f", 0, "p0t0"))
    worker = start(theirs.pages)
    report, bad = load(worker, run(0, [11, 12, 13, 14]))
    assert report == TransferReport(failed_loads={"r": 2 * 4})
    assert bad == {13, 14}
    assert theirs.block(0, 11) == ours.block(0, 1)
    stats = worker.take_stats()
    assert stats is not None
    assert stats.data["load_failures"] == 1


def test_the_worst_group_says_how_many_tokens_are_good(start: Start, store: kvstore.Client) -> None:
    cache = Cache(1)
    worker = start(cache.pages)
    assert save(worker, run(0, [1, 2, 3]), run(1, [4]))
    runs = [run(0, [11, 12, 13, 14]), run(1, [15, 16])]
    for ordered in (runs, runs[::-1]):
        report, bad = load(worker, *ordered)
        assert report == TransferReport(failed_loads={"r": 8})
        assert bad == {14, 16}


def test_groups_that_a_worker_holds_no_layers_of_are_others_business(
    start: Start, store: kvstore.Client
) -> None:
    ours, theirs = Cache(1, second=False), Cache(2, second=False)
    assert save(start(ours.pages), run(0, [1, 2]), run(1, [3]))
    assert load(start(theirs.pages), run(0, [5, 6]), run(1, [7])) == (None, set())
    assert theirs.block(0, 6) == ours.block(0, 2)


def test_a_store_that_is_full_is_asked_again(
    start: Start, store: kvstore.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = start(Cache(1).pages)

    def full(*_: object, **__: object) -> NoReturn:
        raise NoSpaceError("full")

    with monkeypatch.context() as context:
        context.setattr(worker._client, "put_chain", full)
        for _ in range(5):
            assert not save(worker, run(0, [1]))
    assert save(worker, run(0, [1]))


# --- a store that is not there --------------------------------------------------------------------


def test_without_a_master_every_order_is_reported(start: Start) -> None:
    worker = start(Cache(1).pages, master=NOWHERE, timeout_ms=50)
    orders = TransferCommands("f", [], [])
    orders.loads = [LoadCommand(f"r{index}", [run(0, [index + 1])]) for index in range(8)]
    orders.saves = [SaveCommand(index, [run(0, [index + 1])]) for index in range(8)]
    worker.begin(orders)
    worker.save(orders)
    arrived: set[str] = set()
    failed: set[str] = set()
    report = TransferReport()

    def ready() -> bool:
        if (more := worker.take_report()) is not None:
            report.aggregate(more)
        for of_all, now in zip((arrived, failed), worker.take_arrived(), strict=True):
            of_all |= now
        return len(arrived) == len(report.saves) == 8

    until(ready)
    assert failed == arrived
    assert report.failed_loads == dict.fromkeys(arrived, 0)
    assert set(report.saves.values()) == {SaveResult(1, 0)}
    assert worker.take_bad_blocks() == set(range(1, 9))
    stats = worker.take_stats()
    assert stats is not None
    counted = {name: stats.data[name] for name in ("load_failures", "save_failures")}
    assert counted == {"load_failures": 8, "save_failures": 8}
    assert stats.data["breaker_opened"] == 2  # that of loads, and that of saves


# --- saves that are not done ----------------------------------------------------------------------


def test_a_rank_with_the_bytes_of_another_reports_at_once(
    start: Start, store: kvstore.Client
) -> None:
    worker = start(Cache(1).pages, saves=False)
    worker.save(
        TransferCommands("f", [], [SaveCommand(1, [run(0, [1])]), SaveCommand(2, [run(0, [2])])])
    )
    assert worker.take_report() == TransferReport({1: SaveResult(1, 1), 2: SaveResult(1, 1)})
    assert not store.exists(b"k0", namespace=namespace("f", 0, "p0t0"))


def test_a_save_that_has_waited_too_long_is_dropped(
    start: Start, store: kvstore.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(Cache(1))
    worker = start(held, pin_timeout_ms=60_000)
    worker.save(TransferCommands("f", [], [SaveCommand(1, [run(0, [1])])]))
    assert held.asked.wait(LONG_S)
    now = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now() - 61)  # ordered a minute ago
    worker.save(TransferCommands("f", [], [SaveCommand(2, [run(0, [2], name="late")])]))
    monkeypatch.undo()
    worker.save(TransferCommands("f", [], [SaveCommand(3, [run(0, [3], name="fresh")])]))
    held.go_on.set()
    ended = reports(worker, 3)
    assert ended == {1: SaveResult(1, 1), 2: SaveResult(1, 0), 3: SaveResult(1, 1)}
    name = namespace("f", 0, "p0t0")
    assert store.exists_many([b"k0", b"late0", b"fresh0"], namespace=name) == [True, False, True]


def test_a_save_that_somebody_else_is_writing_does_not_count(
    start: Start, store: kvstore.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows yet whether that one will end well."""
    worker = start(Cache(1).pages)
    outcomes = [PutOutcome.STORED, PutOutcome.BEING_WRITTEN]
    monkeypatch.setattr(worker._client, "put_chain", lambda *_, **__: outcomes)
    assert not save(worker, run(0, [1, 2]))
    monkeypatch.undo()
    assert save(worker, run(0, [1, 2]))


def test_draining_waits_for_saves_that_have_begun_and_gives_up_the_others(
    start: Start, store: kvstore.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "DRAIN_S", 0.05)
    held = Held(Cache(1))
    worker = start(held)
    saves = [SaveCommand(number, [run(0, [1], name=f"n{number}-")]) for number in range(3)]
    worker.save(TransferCommands("f", [], saves))
    assert held.asked.wait(LONG_S)
    releasing = threading.Timer(0.2, held.go_on.set)
    releasing.start()
    report = TransferReport({0: SaveResult(1, 1), 1: SaveResult(1, 0), 2: SaveResult(1, 0)})
    assert worker.drain() == UnfinishedTransfers(report, set(), set())
    releasing.join()
    assert save(worker, run(0, [2], name="later"))
    assert worker.drain() == UnfinishedTransfers(None, set(), set())


def test_draining_waits_for_loads_that_have_begun_and_gives_up_the_others(
    start: Start, store: kvstore.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "DRAIN_S", 0.05)
    held = Held(Cache(1), group=1)
    worker = start(held)
    held.go_on.set()
    assert save(worker, run(0, [1]), run(1, [1]))
    held.go_on.clear()
    held.asked.clear()
    begun = [
        LoadCommand(f"begun{index}", [run(1, [2 + index])]) for index in range(module.LOAD_THREADS)
    ]
    worker.begin(TransferCommands("f", [*begun, LoadCommand("waits", [run(0, [2])])], []))
    assert held.asked.wait(LONG_S)
    releasing = threading.Timer(0.2, held.go_on.set)
    releasing.start()
    assert worker.drain() == UnfinishedTransfers(TransferReport({}, {"waits": 0}), set(), set())
    releasing.join()
    assert worker._bad_blocks == {2}
    worker.forget_failures()
    assert worker.take_arrived() == ({each.request_id for each in begun} | {"waits"}, set())
    assert worker.take_bad_blocks() == set()
    assert load(worker, run(0, [3])) == (None, set())


def test_a_suspended_worker_begins_no_transfer_until_it_resumes(
    start: Start, store: kvstore.Client
) -> None:
    held = Held(Cache(1))
    worker = start(held)
    worker.save(TransferCommands("f", [], [SaveCommand(0, [run(0, [1])])]))
    assert held.asked.wait(LONG_S)
    releasing = threading.Timer(0.2, held.go_on.set)
    releasing.start()
    worker.suspend()
    worker.suspend()
    assert not worker._saves_left, "the cache is unmapped after this"
    releasing.join()
    assert worker.take_report() == TransferReport({0: SaveResult(1, 1)})
    held.asked.clear()
    assert not save(worker, run(0, [2], name="asleep"))
    report, bad = load(worker, run(0, [3]))
    assert report == TransferReport(failed_loads={"r": 0})
    assert bad == {3}
    assert not held.asked.is_set(), "pages were lent while they were unmapped"
    worker.resume()
    worker.resume()
    assert save(worker, run(0, [2], name="awake"))
    assert load(worker, run(0, [3])) == (None, set())


def test_what_does_not_end_is_told_to_whoever_drains(
    start: Start, store: kvstore.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "DRAIN_S", 0.01)
    pages = Held(Cache(1), group=1)
    worker = start(pages, timeout_ms=50)
    worker.begin(TransferCommands("f", [LoadCommand("r", [run(1, [2])])], []))
    assert worker.drain() == UnfinishedTransfers(None, set(), {"r"})
    pages.go_on.set()
    until(lambda: "r" in worker._arrived)


def test_a_load_as_a_whole_has_one_time_out(
    start: Start, store: kvstore.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RUN_BLOCKS_MAX", 1)
    worker = start(Cache(1).pages, timeout_ms=2_400)
    given: list[int] = []

    def slow(*_: object, timeout_ms: int, **__: object) -> list[int]:
        given.append(timeout_ms)
        threading.Event().wait(min(1.3, timeout_ms / 1000))
        if timeout_ms < 1_300:
            raise DeadlineExceededError("it hangs")
        return [1]

    monkeypatch.setattr(worker._client, "get_into", slow)
    report, bad = load(worker, run(0, [1, 2, 3, 4, 5, 6]))
    assert report == TransferReport(failed_loads={"r": 4})
    assert bad == {2, 3, 4, 5, 6}
    assert given[1] <= given[0] - 1_299 <= 1_101
    assert len(given) == 2
    assert not worker._guards["load"]._breaker._failures, "the store had too little time"


def test_a_thread_survives_a_bug_and_reports_what_it_did_not_do(
    start: Start, store: kvstore.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = start(Cache(1).pages)

    def broken(runs: object) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(worker, "_ours", broken)
    for _ in range(module.LOAD_THREADS + 1):
        assert load(worker, run(0, [1, 2])) == (TransferReport(failed_loads={"r": 0}), {1, 2})
        assert not save(worker, run(0, [1]))
    monkeypatch.undo()
    assert save(worker, run(0, [1]))


def test_a_load_that_has_waited_too_long_is_not_begun(start: Start, store: kvstore.Client) -> None:
    """Behind others that a dead node held up: its request is computed instead."""
    worker = start(Cache(1).pages)
    assert save(worker, run(0, [1]))
    ordered = time.monotonic() - 6
    worker._loads.put(
        module._QueuedTransfer(LoadCommand("r", [run(0, [1])]), "f", None, ordered, "")
    )
    until(lambda: bool(worker._arrived))
    assert worker.take_arrived() == ({"r"}, {"r"})
    assert worker.take_bad_blocks() == {1}
    assert worker.take_report() == TransferReport({}, {"r": 0})
    assert load(worker, run(0, [1])) == (None, set()), "it is not the store's fault"


def test_one_load_that_is_held_up_does_not_hold_up_others(
    start: Start, store: kvstore.Client
) -> None:
    held = Held(Cache(1), group=1)
    worker = start(held)
    held.go_on.set()
    assert save(worker, run(0, [1]), run(1, [1]))
    held.go_on.clear()
    held.asked.clear()
    worker.begin(TransferCommands("f", [LoadCommand("slow", [run(1, [2])])], []))
    assert held.asked.wait(LONG_S)
    worker.begin(TransferCommands("f", [LoadCommand("quick", [run(0, [2])])], []))
    until(lambda: "quick" in worker._arrived)
    held.go_on.set()
    until(lambda: "slow" in worker._arrived)
    assert worker.take_arrived() == ({"slow", "quick"}, set())


def test_a_bug_in_reading_pages_is_a_save_that_failed(
    start: Start, store: kvstore.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = Held(Cache(1))
    broken.go_on.set()
    monkeypatch.setattr(broken, "_memory", None)
    worker = start(broken)
    assert not save(worker, run(0, [1]))
    monkeypatch.undo()
    assert save(worker, run(0, [1]))


def test_closing_gives_up_what_waits_and_leaves_no_thread(
    start: Start, store: kvstore.Client
) -> None:
    held = Held(Cache(1))
    worker = start(held)
    for number in range(20):
        worker.save(
            TransferCommands("f", [], [SaveCommand(number, [run(0, [1], name=f"n{number}-")])])
        )
    assert held.asked.wait(LONG_S)
    closing = threading.Thread(target=worker.close)
    closing.start()
    held.go_on.set()
    closing.join(LONG_S)
    assert not closing.is_alive()
    report = worker.take_report()
    assert report is not None
    assert report.saves.keys() == {0}
    worker.close()


def test_a_worker_contributes_memory_and_takes_it_back(start: Start) -> None:
    with kvstore.Client.embedded("8MiB") as client:
        before = len(client.status().nodes)
        worker = start(Cache(1).pages, master=client.config.master, memory="8MiB")
        until(lambda: len(client.status().nodes) > before)
        worker.close()
