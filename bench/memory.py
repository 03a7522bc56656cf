"""Compares the ways to allocate memory: ``python -m bench.memory``.

The ways take turns, one round to warm up and several that count, so that a busy machine slows all
of them; each cell is a median. Ways that this host does not offer are left out, with the reason.
Per way and round:

* *start*: a segment is reserved, as when a node starts, from memory that had other uses before (the
  kernel may have to move pages to make huge ones); *again*: the same, immediately after;
* *map*: the page tables of another mapping are filled, as in a client when it first meets the node;
* *first touch*: 64 MiB are read from a mapping whose page tables are still empty;
* *read*, *write*: 64 MiB in pieces of 4 KiB at random places, which shows the cost of TLB misses,
  and in pieces of 1 MiB;
  *map*, *first touch*, *read* and *write* count the thread's processor time, which a busy machine
  distorts less; *again cpu* is the processor time of all threads in *again*;
* *put*, *get*: through a real master and node by shared memory, 64 objects of 1 MiB at a time.
"""

from __future__ import annotations

import mmap
import os
import random
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import click

from bench.page import ResultsTable, bar, show
from kvstore.bench.ours import own_master
from kvstore.bench.timing import timed
from kvstore.cli.options import CONTEXT, debug_option, json_option, run
from kvstore.cli.show import print_json
from kvstore.config import ClientConfig, parse_size
from kvstore.errors import InvalidArgumentError, KVStoreError
from kvstore.memory.pages import POPULATE_READ, populate
from kvstore.memory.segment import NodeSegment
from kvstore.memory.taking import MemoryOptions
from kvstore.process.children import Child

if TYPE_CHECKING:
    from kvstore import Client

GIB = 1 << 30
WORK_BYTES = 64 << 20
MEMORY_BYTES_MIN = 256 << 20
BATCH = 64
TIMEOUT_SECONDS = 600.0
"""Time-out of the batches of a row, more than they take."""
BATCHES = 20
"""Batches per put and get row: enough for a median, and few enough for the pool."""


WAYS = {
    "4 KiB pages, 1 thread": MemoryOptions(huge_pages="off", threads=1),
    "4 KiB pages": MemoryOptions(huge_pages="off"),
    "4 KiB pages, NUMA node 0": MemoryOptions(huge_pages="off", numa_node=0),
    "transparent, 1 thread": MemoryOptions(huge_pages="transparent", threads=1),
    "transparent": MemoryOptions(huge_pages="transparent"),
    "reserved": MemoryOptions(huge_pages="reserved"),
}

COLUMNS = {
    "start_ms_per_gib": "start ms/GiB",
    "again_ms_per_gib": "again ms/GiB",
    "again_cpu_ms_per_gib": "again cpu ms/GiB",
    "map_ms_per_gib": "map ms/GiB",
    "first_touch_gb_per_s": "first touch GB/s",
    "first_touch_faults": "faults",
    "read_4kib_gb_per_s": "read 4 KiB GB/s",
    "write_4kib_gb_per_s": "write 4 KiB GB/s",
    "read_1mib_gb_per_s": "read 1 MiB GB/s",
    "write_1mib_gb_per_s": "write 1 MiB GB/s",
    "faults": "faults",
    "put_gb_per_s": "put GB/s",
    "get_gb_per_s": "get GB/s",
}


@click.command(context_settings=CONTEXT)
@click.option("--memory", default="2GiB", show_default=True, help="Size of each segment.")
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True)
@json_option
@debug_option
def command(memory: str, rounds: int, as_json: bool) -> None:
    """Measure what huge pages, threads, locking and NUMA binding gain on this machine."""
    size = parse_size(memory)
    if size < MEMORY_BYTES_MIN:
        what = f"--memory {memory} is too little to measure"
        raise InvalidArgumentError(what, advice="Give it 256MiB or more.")
    found: dict[str, list[dict[str, float]]] = {}
    ways = list(WAYS)
    with bar((rounds + 1) * len(WAYS)) as progress:
        for number in range(-1, rounds):
            for name in list(ways):
                progress(f"round {number + 1} of {rounds}: {name}", 1)
                try:
                    row = measure(WAYS[name], size)
                except KVStoreError as error:
                    ways.remove(name)
                    click.echo(f"left out: {name}: {error}", err=True)
                else:
                    if number >= 0:  # not the first round, in which a virtual machine gets memory
                        found.setdefault(name, []).append(row)
    rows = {
        name: {key: round(statistics.median(s[key] for s in samples), 3) for key in COLUMNS}
        for name, samples in found.items()
    }
    if as_json:
        for name, row in rows.items():
            print_json({"way": name, "rounds": rounds, "segment_bytes": size, **row})
        return
    lines = [
        (title, *(f"{row[key]:,.1f}" for row in rows.values())) for key, title in COLUMNS.items()
    ]
    show([ResultsTable(("", *rows), lines)])


def measure(options: MemoryOptions, size: int) -> dict[str, float]:
    """One round of one way."""
    first, start_ms, _ = _started(options, size)
    first.close()
    segment, again_ms, cpu_ms = _started(options, size)
    row = {
        "start_ms_per_gib": start_ms,
        "again_ms_per_gib": again_ms,
        "again_cpu_ms_per_gib": cpu_ms,
    }
    try:
        row |= _raw(segment)
    finally:
        segment.close()
    return row | _stored(options, size)


def _started(options: MemoryOptions, size: int) -> tuple[NodeSegment, float, float]:
    """A new segment, the milliseconds per GiB that making it took, and those of processor time."""
    start, cpu_start = time.perf_counter(), time.process_time()
    segment = NodeSegment.create(f"bench-{os.getpid()}", size, options=options)
    taken, cpu = time.perf_counter() - start, time.process_time() - cpu_start
    return segment, 1000 * taken * GIB / segment.size, 1000 * cpu * GIB / segment.size


def _raw(segment: NodeSegment) -> dict[str, float]:
    row: dict[str, float] = {}
    random_places = random.Random(0)  # noqa: S311 - the same places for every way
    scratch = memoryview(bytearray(b"\1" * WORK_BYTES))

    with _mapped(segment) as memory, memoryview(memory) as view:
        half = segment.size // 2
        faults = _faults()
        start = time.thread_time()
        scratch[:] = view[half : half + WORK_BYTES]
        row["first_touch_gb_per_s"] = WORK_BYTES / 1e9 / (time.thread_time() - start)
        row["first_touch_faults"] = _faults() - faults

    with _mapped(segment) as memory:
        start = time.thread_time()
        populate(memory, 0, segment.size, POPULATE_READ)
        row["map_ms_per_gib"] = 1000 * (time.thread_time() - start) * GIB / segment.size
        faults = _faults()
        with memoryview(memory) as view:
            for label, piece in (("4kib", 4 << 10), ("1mib", 1 << 20)):
                count = WORK_BYTES // piece
                places = [piece * random_places.randrange(segment.size // piece - 1)
                          for _ in range(count)]  # fmt: skip
                target = scratch[:piece]
                start = time.thread_time()
                for place in places:
                    target[:] = view[place : place + piece]
                row[f"read_{label}_gb_per_s"] = WORK_BYTES / 1e9 / (time.thread_time() - start)
                # Writes only behind the superblock; no other process uses the segment.
                start = time.thread_time()
                for place in places:
                    view[place + piece : place + 2 * piece] = target
                row[f"write_{label}_gb_per_s"] = WORK_BYTES / 1e9 / (time.thread_time() - start)
        row["faults"] = _faults() - faults
    return row


@contextmanager
def _mapped(segment: NodeSegment) -> Iterator[mmap.mmap]:
    """The segment mapped as by a client, but with empty page tables."""
    fd = os.open(segment.path, os.O_RDWR | os.O_CLOEXEC)
    try:
        memory = mmap.mmap(fd, segment.size)
    finally:
        os.close(fd)
    with memory:
        yield memory


def _stored(options: MemoryOptions, size: int) -> dict[str, float]:
    import numpy as np

    from kvstore import Client

    source = np.random.default_rng(0).integers(0, 255, (BATCH, 1 << 20), dtype=np.uint8)
    target = np.zeros_like(source)
    with ExitStack() as stack:
        master, _ = stack.enter_context(own_master("--lease-ms", "1000"))
        node = Child.start(
            "kvstore.cli.node", "--master", master, "--memory", str(size),
            "--huge-pages", options.huge_pages,
            "--numa-node", str(options.numa_node),
        )  # fmt: skip
        stack.callback(node.stop)
        config = ClientConfig(master=master, transports=("shm",), placements_max=0)
        client: Client = stack.enter_context(Client(config=config))
        client.put("map it", b"")
        batches = min(BATCHES, size // 2 // WORK_BYTES)
        pairs: list[list[tuple[str, Any]]] = [
            [(f"{batch}-{index}", piece) for index, piece in enumerate(source)]
            for batch in range(batches)
        ]
        put = _median_speed(lambda batch: client.put_many(pairs[batch]), batches)
        keys = [[key for key, _ in some] for some in pairs]
        get = _median_speed(lambda batch: client.get_into(keys[batch], list(target)), batches)
    return {"put_gb_per_s": put, "get_gb_per_s": get}


def _median_speed(call: Callable[[int], object], times: int) -> float:
    return WORK_BYTES / 1e9 / statistics.median(timed(call, TIMEOUT_SECONDS, times))


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        run(command, "bench memory")
