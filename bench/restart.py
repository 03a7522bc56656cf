"""The command ``python -m bench.restart``: what stores find on their disks after they were killed.

Each store gets objects of three times its memory. Then its storage process is killed, its memory is
removed, and it starts again.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import click

from bench import disk, mooncake
from bench.tables import LRU
from kvstore.bench.client import Settings, open_driver
from kvstore.bench.processes import READY_SECONDS, Children, Program, free_port, start_node
from kvstore.bench.rows import MIB, SHM
from kvstore.bench.session import DISK_PART, GET, PUT, StoreDriver

POOL: Final = 1024 * MIB
BATCH: Final = 16
BATCHES: Final = [
    [f"{number}-{index}" for index in range(BATCH)]
    for number in range(int(DISK_PART * POOL) // MIB // BATCH)
]
PATIENCE_SECONDS: Final = 30.0


class Store(NamedTuple):
    address: str
    start: Callable[[], Program]
    """Starts what is killed, and returns when it listens."""


def _kvstore(children: Children, directory: Path) -> Store:
    ports = ("--port=0", "--http-port=0")
    master = children.start("master", "kvstore.cli.master", *ports, *LRU)
    address = children.ready(master, r"listening on (\S+:\d+)", READY_SECONDS)[1]
    flags = (*disk.disk_flags(directory, POOL), "--name=bench")
    return Store(address, partial(start_node, children, address, POOL, flags))


def _mooncake(children: Children, directory: Path) -> Store:
    _, address = mooncake.start_master(children, directory)
    port = free_port()
    start = partial(mooncake.start_storage, children, address, port, POOL, directory)
    return Store(f"{mooncake.HOST}:{port} {directory}", start)


STORES: Final = {
    "kvstore": (_kvstore, "kvstore.bench.kvstore_driver:KVStoreDriver", 0),
    "Mooncake": (_mooncake, "bench.mooncake:OffloadDriver", 0),
    "Mooncake, after 15 s": (_mooncake, "bench.mooncake:OffloadDriver", 15),
}


class Outcome(NamedTuple):
    first_seconds: float
    """From the start to the end of the first get that found its objects; infinite if none did."""
    older: float
    """The part found of the objects that were on the disk only."""
    found: float
    """The part found of all objects."""


def measure(name: str) -> Outcome:
    make, driver, pause = STORES[name]
    with Children() as children:
        store = make(children, disk.empty_directory(children))
        killed = store.start()
        settings = Settings(driver, {}, SHM, store.address, POOL, BATCH * MIB)
        client = open_driver(settings)
        _put(client)
        client.close()
        children.kill(killed)
        time.sleep(pause)
        begin = time.perf_counter()
        store.start()
        client = open_driver(settings)
        first = _first(client, begin)
        get = client.work(GET, BATCHES, MIB).call
        found = [sum(map(bool, get(number))) / BATCH for number in range(len(BATCHES))]
        client.close()
    older = found[: round(len(found) * (1 - 1 / DISK_PART))]
    return Outcome(first, statistics.mean(older), statistics.mean(found))


def _put(client: StoreDriver) -> None:
    work = client.work(PUT, BATCHES, MIB)
    for number in range(len(BATCHES)):
        work.check(work.call(number))
        client.wait_until_written()


def _first(client: StoreDriver, begin: float) -> float:
    get = client.work(GET, BATCHES, MIB).call
    while time.perf_counter() < begin + PATIENCE_SECONDS:
        if all(get(0)):
            return time.perf_counter() - begin
        time.sleep(0.02)
    return float("inf")


@click.command()
@click.option("--rounds", type=click.IntRange(1, 100), default=3, show_default=True)
def main(rounds: int) -> None:
    """Kill stores with disks, start them again, and count what they find."""
    for name in STORES:
        for _ in range(rounds):
            first, older, found = measure(name)
            click.echo(f"{name}: {first:.1f} s to the first get; found {older:.0%} of what was on"
                       f" the disk only, {found:.0%} of all")  # fmt: skip


if __name__ == "__main__":
    main()
