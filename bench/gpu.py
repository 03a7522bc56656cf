"""Measures saves from a GPU to the store, and loads: ``python -m bench.gpu`` (``make bench-gpu``).

* *save* and *load*: a batch of blocks by ``put_chain`` and ``get_into``, beside a plain copy of as
  many bytes, in one piece, between the GPU and page-locked memory. Both take turns, so that a busy
  machine slows both. The store writes and verifies checksums; the plain copy does not.
* *kernel*: the same, where a kernel copies pages that are small (``device_kernel``).
* *memory of the GPU*: the same to and from a node that pools memory of this GPU, beside a plain
  copy within it. Saves carry the bytes to the host once for their checksum; loads verify headers.
* *engine*: how long products of matrices on the compute stream take while another thread saves
  blocks, beside the same products alone; once by the copy engines, once by the kernel.
* *interpreter*: processor time of the thread that saves 1,000 blocks of 64 pages: to describe the
  copies, and in the whole call.

The tests run the benchmark on a fake GPU, which is memory of the host.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click
import numpy as np

from bench import page
from bench.page import Advance, Found, ResultsPage, ResultsTable, verdict
from bench.rows import KIB, MIB, SHM, TCP, size_name
from kvstore.bench.ours import PAUSE_SECONDS, Store, own_store
from kvstore.bench.timing import Spread, require, seconds_of
from kvstore.calls import PutOutcome
from kvstore.device.device import Device
from kvstore.device.drivers import driver_of
from kvstore.device.memory import DeviceMemory, laid_out
from kvstore.device.ring import SLOTS

if TYPE_CHECKING:
    import torch

    from kvstore import Client

DEVICE: Final = "cuda:0"
PACKAGES: Final = ("torch", "numpy")
BATCH_BYTES: Final = 1 << 30
QUICK_BYTES: Final = 128 * MIB
POOL_PARTS: Final = 5
"""Batches that the pool has room for: memory of removed objects is free one lease later."""
SETTLE_SECONDS: Final = 20.0
TCP_PART: Final = 4
"""Batches over tcp are this many times smaller: they take longer."""
SLOWDOWN_GOAL: Final = 0.03
"""The most by which a save may slow an engine's work."""
KERNEL: Final = "shm, kernel"
KERNEL_MAX: Final = 64 * KIB
"""Pages of at most so many bytes are copied by the kernel, in its rows."""
ON_GPU: Final = "memory of the GPU"
PATHS: Final = (SHM, KERNEL, TCP, ON_GPU)
ON_GPU_GOAL: Final = 0.8
EXAMPLE = """\b
Examples:
  python -m bench.gpu
  python -m bench.gpu --rounds 9 --out /tmp/found
  python -m bench.gpu --quick
"""


class Shape(NamedTuple):
    """Blocks of one size, in pages that are apart from each other in the GPU's memory."""

    pages: int
    page: int
    """Bytes of a page."""
    goal: float
    """By shared memory, a plain copy's time divided by the store's should be at least this."""

    @property
    def title(self) -> str:
        return f"{self.pages} x {size_name(self.page, ' ')}"


SHAPES: Final = (
    Shape(pages=1, page=5 * MIB, goal=0.9),  # block first: Llama 3 70B
    Shape(pages=1, page=160 * KIB, goal=0.9),
    Shape(pages=32, page=64 * KIB, goal=0.7),  # a page a layer: Llama 3 8B
    Shape(pages=64, page=8 * KIB, goal=0.5),  # keys and values apart, an eighth of the heads
)


def shapes(path: str) -> list[Shape]:
    """The shapes of blocks that are measured on a path."""
    return [shape for shape in SHAPES if path != KERNEL or shape.page <= KERNEL_MAX]


def row_of(
    way: str, path: str, shape: Shape, blocks: int, ours_ms: list[float], plain_ms: list[float]
) -> Found:
    """The row of one shape of blocks, saved or loaded (``way``) on one path. Each time is that of a
    batch in one round."""
    goal: float | None = ON_GPU_GOAL if path == ON_GPU else shape.goal
    return {
        "way": way, "path": path, "pages": shape.pages, "page_bytes": shape.page, "blocks": blocks,
        "ours_ms": ours_ms, "plain_ms": plain_ms,
        "ratio": Spread.of_ratios(plain_ms, ours_ms)._asdict(),
        "goal": None if path == TCP else goal,  # the socket decides, not the copy
        "gb_per_s": blocks * shape.pages * shape.page / Spread.of(ours_ms).median / 1e6,
    }  # fmt: skip


def slowdown(engine: Found) -> float:
    """How much longer an engine's work takes beside saves, as a part of its time alone."""
    return Spread.of_ratios(engine["beside_ms"], engine["alone_ms"]).median - 1


class GPU:
    """The device as this benchmark uses it: memory, plain copies, an engine's work."""

    name = DEVICE
    note = ""

    def __init__(self) -> None:
        """Raises DeviceError: the GPU cannot be used."""
        import torch

        self.torch = torch
        self.driver = driver_of(self.name)

    @property
    def title(self) -> str:
        """The GPU's name, as its maker calls it."""
        return str(self.torch.cuda.get_device_name(DEVICE))

    def batch_bytes(self, *, quick: bool) -> int:
        return QUICK_BYTES if quick else BATCH_BYTES

    def store_on_it(self, pool_bytes: int) -> AbstractContextManager[Store]:
        """A store whose node pools memory of this GPU."""
        return own_store(pool_bytes, device=self.name)

    def memory(self, size: int) -> torch.Tensor:
        return self.driver.empty(size)

    def page_locked(self, size: int) -> torch.Tensor:
        return self.torch.empty(size, dtype=self.torch.uint8, pin_memory=True)

    def wait(self) -> None:
        self.torch.cuda.synchronize()

    def plain_ms(self, to: torch.Tensor, source: torch.Tensor) -> float:
        self.wait()

        def copy() -> None:
            to.copy_(source, non_blocking=True)
            self.wait()

        return seconds_of(copy) * 1e3

    def products(self) -> Callable[[], float]:
        """A function that multiplies matrices for a while, and returns how many ms it took."""
        matrices = self.torch.randn(2, 4096, 4096, dtype=self.torch.bfloat16, device=DEVICE)
        return self.products_of(matrices, 3_000)

    def products_of(self, matrices: torch.Tensor, count: int) -> Callable[[], float]:
        one, other = matrices
        result = self.torch.empty_like(one)

        def multiply() -> None:
            for _ in range(count):
                self.torch.mm(one, other, out=result)
            self.wait()

        def multiply_ms() -> float:
            self.wait()
            return seconds_of(multiply) * 1e3

        return multiply_ms


class GpuBlocks:
    """A batch of blocks in a cache in which the pages of one layer lie together."""

    def __init__(self, gpu: GPU, device: Device, shape: Shape, batch_bytes: int) -> None:
        self.shape = shape
        block_bytes = shape.pages * shape.page
        self.count = max(2, min(1_000, batch_bytes // block_bytes))
        self.size = self.count * block_bytes
        self.tensor = gpu.memory(self.size)
        self._device = device
        self._order = np.random.default_rng(1).permutation(self.count)

    def values(self) -> list[DeviceMemory]:
        """The blocks in random order, so that no two of them can be copied as one."""
        pages, page = self.shape.pages, self.shape.page
        starts = self.tensor.data_ptr() + np.arange(pages, dtype=np.int64) * page * self.count
        sizes = np.full(pages, page, np.int64)
        size = pages * page
        return [
            DeviceMemory(self._device, starts + block * page, sizes, (), self.tensor, size)
            for block in self._order.tolist()
        ]


def measure(gpu: GPU, rounds: int, batch_bytes: int, progress: Advance) -> Found:
    """Measures all rows.

    Raises:
        KVStoreError: a process failed, or the GPU.
    """
    found: Found = {
        "rounds": rounds, "note": gpu.note, "rows": [], "engine": {}, "describe_ms": [],
        "call_ms": [], "page_locked_mib": {},
    }  # fmt: skip
    size = batch_bytes + 2 * max(shape.pages * shape.page for shape in SHAPES)
    pool_bytes = POOL_PARTS * batch_bytes + 64 * MIB
    with own_store(pool_bytes) as store:
        locked = gpu.page_locked(size)
        for path in (SHM, KERNEL, TCP):
            with _client(store.address, path) as client:
                _rows(gpu, client, found, path, locked, batch_bytes, progress)
                if path != TCP:
                    progress(f"engine, {path}", 1)
                    found["engine"][path] = _beside_an_engine(gpu, client, rounds, batch_bytes)
                if path == SHM:
                    progress("interpreter", 1)
                    _interpreter(gpu, client, found, batch_bytes)
                device = client.device(gpu.name)
                ring = device.ring.slot_bytes * SLOTS
                found["page_locked_mib"][path] = (device.locks.locked_bytes + ring) / MIB
        del locked
    with gpu.store_on_it(pool_bytes) as store, _client(store.address, ON_GPU) as client:
        _rows(gpu, client, found, ON_GPU, gpu.memory(size), batch_bytes, progress)
    found["slowdown"] = {path: slowdown(each) for path, each in found["engine"].items()}
    return found | {"slowdown_goal": SLOWDOWN_GOAL}


def _rows(
    gpu: GPU,
    client: Client,
    found: Found,
    path: str,
    beside: torch.Tensor,
    batch_bytes: int,
    progress: Advance,
) -> None:
    """Measures all shapes on one path. ``beside``: memory for the plain copies."""
    size = batch_bytes // TCP_PART if path == TCP else batch_bytes
    for shape in shapes(path):
        progress(f"{shape.title}, {path}", 1)
        blocks = GpuBlocks(gpu, client.device(gpu.name), shape, size)
        saves, loads = _save_and_load(gpu, client, blocks, beside[: blocks.size], found["rounds"])
        for way, (ours_ms, plain_ms) in (("save", saves), ("load", loads)):
            found["rows"].append(row_of(way, path, shape, blocks.count, ours_ms, plain_ms))


def steps() -> int:
    return sum(len(shapes(path)) for path in PATHS) + 3


Times = tuple[list[float], list[float]]
"""Milliseconds that the store and plain copies took, one number for each round."""


def _save_and_load(
    gpu: GPU, client: Client, blocks: GpuBlocks, plain: torch.Tensor, rounds: int
) -> tuple[Times, Times]:
    saves: Times = ([], [])
    loads: Times = ([], [])
    values = blocks.values()
    for number in range(-POOL_PARTS, rounds):  # the first rounds page-lock the pool's memory
        keys = _keys(blocks.count)
        _wait_for_room(client, blocks.size)
        gpu.wait()
        start = time.perf_counter()
        stored = client.put_chain(keys, values)
        saved = time.perf_counter()
        sizes = client.get_into(keys, values)
        loaded = time.perf_counter()
        require(all(outcome == PutOutcome.STORED for outcome in stored), "was not stored")
        require(all(sizes), "was not there")
        client.remove_many(keys)
        if number >= 0:
            saves[0].append((saved - start) * 1e3)
            loads[0].append((loaded - saved) * 1e3)
            saves[1].append(gpu.plain_ms(plain, blocks.tensor))
            loads[1].append(gpu.plain_ms(blocks.tensor, plain))
    return saves, loads


def _beside_an_engine(gpu: GPU, client: Client, rounds: int, batch_bytes: int) -> Found:
    found: Found = {"alone_ms": [], "beside_ms": [], "saved_blocks": 0}
    blocks = GpuBlocks(gpu, client.device(gpu.name), SHAPES[2], 2 * batch_bytes)
    values = blocks.values()
    multiply = gpu.products()
    multiply()
    stop = threading.Event()

    def save() -> None:
        while not stop.is_set():
            keys = _keys(blocks.count)
            _wait_for_room(client, blocks.size)
            client.put_chain(keys, values)
            client.remove_many(keys)
            found["saved_blocks"] += blocks.count

    for _ in range(rounds):
        found["alone_ms"].append(multiply())
        stop.clear()
        saving = threading.Thread(target=save)
        saving.start()
        try:
            found["beside_ms"].append(multiply())
        finally:
            stop.set()
            saving.join()
    return found


def _interpreter(gpu: GPU, client: Client, found: Found, batch_bytes: int) -> None:
    blocks = GpuBlocks(gpu, client.device(gpu.name), SHAPES[3], batch_bytes)
    for _ in range(found["rounds"]):
        start = time.thread_time()
        values = blocks.values()
        laid_out(values, [4096 + place * blocks.size for place in range(blocks.count)])
        described = time.thread_time()
        keys = _keys(blocks.count)
        _wait_for_room(client, blocks.size)
        begun = time.thread_time()
        client.put_chain(keys, values)
        found["describe_ms"].append((described - start) * 1e3)
        found["call_ms"].append((time.thread_time() - begun) * 1e3)
        client.remove_many(keys)


_numbers = itertools.count()


def _keys(count: int) -> list[bytes]:
    number = next(_numbers)
    return [b"%d/%d" % (number, index) for index in range(count)]


def _wait_for_room(client: Client, size: int) -> None:
    """Waits until memory of removed objects is free, so that no put has to wait for it."""
    end = time.monotonic() + SETTLE_SECONDS
    while time.monotonic() < end:
        segments = [each for node in client.status().nodes for each in node.segments]
        if sum(each.size - each.used for each in segments) >= 2 * size:
            return
        time.sleep(PAUSE_SECONDS)


@contextlib.contextmanager
def _client(address: str, path: str) -> Iterator[Client]:
    from kvstore import Client

    settings: dict[str, Any] = {"transports": (TCP if path == TCP else SHM,)}
    if path in (KERNEL, ON_GPU):
        settings["device_kernel"] = KERNEL_MAX
    if path == ON_GPU:
        settings["verify"] = "header"
    with Client(address, namespace="bench-gpu", timeout_ms=60_000, **settings) as client:
        yield client


# --- output ------------------------------------------------------------------------------------

COLUMNS: Final = (
    "way", "path", "block", "blocks", "GB/s", "plain copy / ours", "rounds", "goal", "",
)  # fmt: skip
LEFT: Final = (0, 1, 2, 8)


def cells_of(row: Found) -> tuple[str, ...]:
    """One line of the table, in the order of ``COLUMNS``."""
    ratio, goal = Spread(**row["ratio"]), row["goal"]
    title = Shape(row["pages"], row["page_bytes"], 0).title
    return (
        row["way"], row["path"], title, f"{row['blocks']:,}", f"{row['gb_per_s']:.1f}",
        f"{ratio.median:.2f}", ratio.range, "" if goal is None else f"{goal:g}",
        "" if goal is None else verdict(ratio.median >= goal),
    )  # fmt: skip


def sentences(found: Found) -> list[str]:
    """The sentences below the table."""
    locked = "; ".join(f"{path}: {mib:,.0f} MiB" for path, mib in found["page_locked_mib"].items())
    return [
        *([found["note"]] if found["note"] else []),
        *[
            f"An engine's products of matrices beside saves by {path} ({each['saved_blocks']:,}"
            f" blocks in {found['rounds']} rounds) take {slowdown(each):+.1%} of their time more"
            f" (goal at most {SLOWDOWN_GOAL:.0%}: {verdict(slowdown(each) <= SLOWDOWN_GOAL)})."
            for path, each in found["engine"].items()
        ],
        f"The thread that saves up to 1,000 blocks of {SHAPES[3].title} spends"
        f" {Spread.of(found['describe_ms']).median:.1f} ms on describing the copies, and"
        f" {Spread.of(found['call_ms']).median:.1f} ms in the call, checksums included.",
        f"Page-locked at most, by path: {locked}.",
    ]


def page_of(found: Found) -> ResultsPage:
    table = ResultsTable(COLUMNS, [cells_of(row) for row in found["rows"]], LEFT)
    beside = "\n".join(f"* {sentence}" for sentence in sentences(found))
    return ResultsPage("gpu", "A GPU and the store", "make bench-gpu", [table, beside])


@click.command(epilog=EXAMPLE)
@click.option("--rounds", type=click.IntRange(1, 1000), default=7, show_default=True,
              help="Rounds of each row.")  # fmt: skip
@page.quick_option
@page.out_option
@click.pass_obj
def main(new_gpu: Callable[[], GPU] | None, rounds: int, quick: bool, out: Path | None) -> None:
    """Measure saves and loads between a GPU and the store, beside plain copies.

    Needs torch, and the GPU cuda:0. With --out writes gpu.md and gpu.json. The exit status is 0
    when everything was measured, whether or not the goals are met.
    """
    if importlib.util.find_spec("torch") is None:
        raise click.ClickException("torch is not installed: pip install torch")

    def run(progress: Advance) -> Found:
        gpu = (new_gpu or GPU)()
        found = measure(gpu, 1 if quick else rounds, gpu.batch_bytes(quick=quick), progress)
        return found | {"gpu": gpu.title}

    found = page.measured(run, steps(), PACKAGES)
    found["machine"]["gpu"] = found.pop("gpu")
    page.publish(page_of(found), found, out)


if __name__ == "__main__":
    main()
