"""Blocks between a GPU's cache and a real store. The GPU is ``tests.support.fake_device``: what it
was told runs late, in any order that a GPU might choose, so that a missing wait is a wrong byte."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import kvstore
from kvstore.config import ConnectorConfig
from kvstore.connectors.vllm.groups import Groups
from kvstore.connectors.vllm.messages import (
    LoadCommand,
    Run,
    SaveCommand,
    SaveResult,
    TransferCommands,
    TransferReport,
    namespace,
)
from kvstore.connectors.vllm.worker import worker_side as module
from kvstore.connectors.vllm.worker.pages import CUDAPages, inspect_caches
from kvstore.connectors.vllm.worker.worker_side import (
    TRANSFER_TIMEOUT_MS,
    WorkerSide,
    client_config,
)
from kvstore.device import device as device_module
from kvstore.device.driver import Direction
from kvstore.device.drivers import use
from kvstore.errors import DeadlineExceededError, DeviceError
from tests.support.fake_device import COMPUTE, FakeDriver
from tests.support.wait import until
from tests.unit.connectors.vllm_caches import MODELS, Model

NAME = "cuda:0"
BLOCKS = 24
LONG_S = 20.0
PLAIN = MODELS["layer by layer"]

Bytes = NDArray[np.uint8]


class Engine:
    """A worker, its cache, and the kernels that compute it."""

    def __init__(self, master: str, model: Model, seed: int, **settings: Any) -> None:
        self.fake = FakeDriver(NAME, seed=seed)
        use(NAME, self.fake)
        self.random = np.random.default_rng(seed)
        self.caches, config = model.caches(BLOCKS)
        geometry = inspect_caches(self.caches, config)
        for storage in geometry.storages:
            self.fake.memory[storage.data_ptr()] = len(storage)
        tokens = config.kv_cache_groups[0].kv_cache_spec.block_size
        self.layers = [spec.layer_names for spec in config.kv_cache_groups]
        groups = Groups(
            hash_block_tokens=tokens, scheduler_block_tokens=tokens,
            block_tokens=dict.fromkeys(range(len(self.layers)), tokens),
        )  # fmt: skip
        connector = ConnectorConfig(master=master, **settings)
        client = kvstore.Client(config=client_config(connector, module.TRANSFER_TIMEOUT_MS))
        self.device = client.device(NAME)
        self.pages = CUDAPages(geometry, self.device)
        self.worker = WorkerSide(connector, groups, client, {"p0t0": self.pages}, saves=True)

    def close(self) -> None:
        self.fake.held.clear()
        self.fake.forget()
        self.worker.close()

    # --- blocks -----------------------------------------------------------------------------------

    def page(self, layer: str, block: int) -> Bytes:
        """All of a layer's bytes in a block, as they lie there."""
        cache = self.caches[layer]
        parts = cache.shape[0] // BLOCKS
        part = cache[block * parts : (block + 1) * parts]
        size = part.numel() * part.element_size()
        flat = torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage())
        start = part.storage_offset() * part.element_size()
        array: Bytes = flat.numpy()[start : start + size]
        return array

    def block(self, group: int, block: int) -> bytes:
        return b"".join(self.page(layer, block).tobytes() for layer in self.layers[group])

    def kernel(self, group: int, block: int, values: bytes | None = None) -> bytes:
        """Queues a kernel of the compute stream that writes a block; returns what it writes."""
        pages = [self.page(layer, block) for layer in self.layers[group]]
        size = sum(map(len, pages))
        written = np.frombuffer(values or self.random.bytes(size), np.uint8)

        def run() -> None:
            at = 0
            for page in pages:
                page[:] = written[at : at + len(page)]
                at += len(page)

        self.fake.launch(run)
        return written.tobytes()

    # --- steps ------------------------------------------------------------------------------------

    def step(
        self, loads: Sequence[LoadCommand] = (), saves: Sequence[SaveCommand] = (),
        forward: Callable[[], object] = lambda: None,
    ) -> None:  # fmt: skip
        """A step as vLLM calls it: loads are ordered after the forward pass was queued."""
        orders = TransferCommands("f", list(loads), list(saves))
        self.worker.begin(orders)
        forward()
        self.worker.load(orders)
        self.worker.save(orders)

    def arrival(self) -> tuple[TransferReport | None, set[int]]:
        """Of the one load: its failure, and the bad blocks."""
        until(lambda: self.worker.take_arrived()[0] == {"r"})
        return self.worker.take_report(), self.worker.take_bad_blocks()

    def is_stored(self) -> bool:
        """How the one save ends."""
        found: list[SaveResult] = []

        def ended() -> bool:
            report = self.worker.take_report()
            found.extend(report.saves.values() if report else ())
            return bool(found)

        until(ended)
        return found == [SaveResult(1, 1)]


def runs(*block_ids: list[int]) -> list[Run]:
    """Of each group, as many blocks as of the others."""
    return [
        Run(group, [b"k%d" % index for index in range(len(blocks))], blocks, 0, None)
        for group, blocks in enumerate(block_ids)
    ]


@pytest.fixture(scope="module")
def pool() -> Iterator[kvstore.Client]:
    with kvstore.Client.embedded("64MiB") as client:
        client.put(b"first", b"so that every connection is there")
        client.match_prefix([b"first"])
        client.clear("default")
        yield client


Start = Callable[..., Engine]


@pytest.fixture
def start(pool: kvstore.Client, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    started: list[Engine] = []

    def start(
        model: Model = PLAIN, seed: int = 1, timeout_ms: int = TRANSFER_TIMEOUT_MS, **settings: Any
    ) -> Engine:
        monkeypatch.setattr(module, "TRANSFER_TIMEOUT_MS", timeout_ms)
        started.append(Engine(pool.config.master, model, seed, **settings))
        return started[-1]

    yield start
    for each in started:
        each.close()
    use(NAME, None)
    clear(pool)


def clear(pool: kvstore.Client) -> None:
    for group in (0, 1):
        pool.clear(namespace("f", group, "p0t0"))


FROM, TO = [5, 2, 3, 9, 20], [20, 7, 8, 1, 4]
FROM_SECOND, TO_SECOND = [6, 10, 11, 12, 21], [9, 10, 2, 22, 3]
"""Of the second group: its blocks are others of the same memory."""


def there_and_back(start: Start, model: Model, seed: int, to: Model | None = None) -> None:
    """One engine computes and saves blocks while it computes others; then it writes others there.
    Another one loads them while it computes, into blocks that its kernels still write to."""
    ours, theirs = start(model, seed), start(to or model, seed + 1)
    groups = len(ours.layers)
    saved = runs(*(FROM, FROM_SECOND)[:groups])
    content = {
        (run.group, key): ours.kernel(run.group, block)
        for run in saved
        for key, block in zip(run.keys, run.block_ids, strict=True)
    }
    used = {block for run in saved for block in run.block_ids}
    others = [block for block in range(BLOCKS) if block not in used]
    ours.step(saves=[SaveCommand(1, saved)])
    for block in others:
        ours.kernel(0, block)
    assert ours.is_stored()
    for run in saved:
        for block in run.block_ids:
            ours.kernel(run.group, block)
    ours.fake.finish()

    loaded = runs(*(TO, TO_SECOND)[:groups])
    used = {block for run in loaded for block in run.block_ids}
    others = [block for block in range(BLOCKS) if block not in used]
    for run in loaded:
        for block in run.block_ids:
            theirs.kernel(run.group, block)  # of the request that had it before
    untouched: dict[int, bytes] = {}
    theirs.step(
        loads=[LoadCommand("r", loaded)],
        forward=lambda: untouched.update({block: theirs.kernel(0, block) for block in others}),
    )
    assert theirs.arrival() == (None, set())
    arrived = {
        (run.group, key): theirs.block(run.group, block)
        for run in loaded
        for key, block in zip(run.keys, run.block_ids, strict=True)
    }
    assert arrived == content
    theirs.fake.finish()
    for run in loaded:  # nothing that was queued came later
        for key, block in zip(run.keys, run.block_ids, strict=True):
            assert theirs.block(run.group, block) == content[run.group, key]
    assert {block: theirs.block(0, block) for block in others} == untouched


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_what_one_engine_saves_another_loads(start: Start, model: Model) -> None:
    there_and_back(start, model, 1)


@pytest.mark.parametrize("heads_first", [False, True])
def test_engines_with_other_orders_of_layers_and_blocks_share(
    start: Start, heads_first: bool, pool: kvstore.Client
) -> None:
    suffix = ", heads first" if heads_first else ""
    one, other = MODELS["layer by layer" + suffix], MODELS["block by block" + suffix]
    there_and_back(start, one, 1, to=other)
    clear(pool)
    there_and_back(start, other, 3, to=one)


def test_a_load_does_not_wait_for_the_step_that_begins(start: Start) -> None:
    engine = start(timeout_ms=2_000)
    content = [engine.kernel(0, block) for block in FROM]
    engine.step(saves=[SaveCommand(1, runs(FROM))])
    assert engine.is_stored()

    def forward() -> None:
        engine.fake.finish()
        engine.fake.held = {COMPUTE}
        engine.kernel(0, 0)

    engine.step(loads=[LoadCommand("r", runs(TO))], forward=forward)
    assert engine.arrival() == (None, set())
    assert [engine.block(0, block) for block in TO] == content


def test_what_is_missing_is_not_written(start: Start, pool: kvstore.Client) -> None:
    engine = start()
    for block in range(BLOCKS):
        engine.kernel(0, block)
    engine.step(saves=[SaveCommand(1, runs(FROM))])
    assert engine.is_stored()
    before = {block: engine.block(0, block) for block in range(BLOCKS)}
    pool.remove(b"k2", namespace=namespace("f", 0, "p0t0"))
    engine.step(loads=[LoadCommand("r", runs(TO))])
    assert engine.arrival() == (TransferReport(failed_loads={"r": 2 * 16}), set(TO[2:]))
    engine.fake.finish()
    for block in range(BLOCKS):
        if block not in (*TO[:2], *TO[3:]):  # bad blocks after the missing one may be filled
            assert engine.block(0, block) == before[block]


def test_a_load_whose_time_is_over_writes_nothing_later(start: Start) -> None:
    engine = start(timeout_ms=300)
    for block in range(BLOCKS):
        engine.kernel(0, block)
    engine.step(saves=[SaveCommand(1, runs(FROM))])
    assert engine.is_stored()
    engine.fake.held = {COMPUTE}
    written = [engine.kernel(0, block) for block in range(BLOCKS)]
    engine.step(loads=[LoadCommand("r", runs(TO))])
    assert engine.arrival() == (TransferReport(failed_loads={"r": 0}), set(TO))
    engine.fake.held.clear()
    engine.fake.finish()
    assert [engine.block(0, block) for block in range(BLOCKS)] == written


def test_a_save_whose_time_is_over_stores_nothing(start: Start, pool: kvstore.Client) -> None:
    engine = start(timeout_ms=300)
    engine.fake.held = {COMPUTE}
    engine.kernel(0, FROM[0])
    engine.step(saves=[SaveCommand(1, runs(FROM))])
    assert not engine.is_stored()
    assert pool.match_prefix([b"k0"], namespace=namespace("f", 0, "p0t0")) == 0


def test_a_worker_that_is_closed_waits_for_copies_under_way(start: Start) -> None:
    engine = start()
    content = [engine.kernel(0, block) for block in FROM]
    engine.step(saves=[SaveCommand(1, runs(FROM))])
    assert engine.is_stored()
    engine.fake.held = {Direction.LOAD}
    engine.step(loads=[LoadCommand("r", runs(TO))])
    until(lambda: bool(engine.fake.copies_left))
    releasing = threading.Timer(0.2, engine.fake.held.clear)
    releasing.start()
    engine.worker.close()
    releasing.join()
    assert not engine.fake.copies_left
    assert [engine.block(0, block) for block in TO] == content
    assert not engine.fake.locked


def test_copies_that_do_not_end_end_the_engine(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their blocks are never reported, and so never used for another request."""
    monkeypatch.setattr(device_module, "COPIES_WAIT_S", 0.5)
    engine = start(timeout_ms=300)
    engine.kernel(0, FROM[0])
    engine.step(saves=[SaveCommand(1, runs(FROM))])
    assert engine.is_stored()
    engine.fake.held = {Direction.LOAD}
    engine.step(loads=[LoadCommand("r", runs(TO))])
    until(lambda: engine.device.has_failed and not engine.worker._loads_left)
    with pytest.raises(DeviceError, match="did not finish"):
        engine.worker.take_arrived()
    with pytest.raises(DeviceError, match="did not finish"):
        engine.worker.begin(TransferCommands("f"))
    engine.fake.held.clear()
    engine.fake.finish()
    engine.device._failed = False  # which keeps page-locked memory for ever
    engine.device.locks._is_kept = False


def test_zeros_are_written_after_what_was_queued_and_to_these_pages_alone(start: Start) -> None:
    engine = start()
    for block in (1, 2, 3):
        engine.kernel(0, block)
    engine.fake.finish()
    kept = engine.block(0, 2)
    engine.kernel(0, 3)
    after = engine.pages.record_event()
    with pytest.raises(DeadlineExceededError):
        engine.pages.zero(0, [1, 3], after, time.monotonic())
    assert any(engine.block(0, 1))
    engine.fake.finish()
    engine.pages.zero(0, [1, 3], after, time.monotonic() + LONG_S)
    assert not any(engine.block(0, 1) + engine.block(0, 3))
    assert engine.block(0, 2) == kept
    with pytest.raises(AssertionError, match="says nothing"):
        engine.pages.zero(0, [1], None, 0.0)
