"""Measures how soon cached objects are served after a crash: ``python -m bench.restarts``.

Fills a new master and node with distinct objects. Then each of the two in turn is killed (SIGKILL)
and started again. The times count from the moment when the new process is ready:

* *first get*: until some object is read again, by a client that was running before the restart;
* *all*: until the master reports each object as existing;
* *put*: until a new object is stored, which waits for the leases from before the restart.

Afterwards every object is read and compared.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

import click
import numpy as np
from rich.console import Console
from rich.progress import track

from bench.page import ResultsTable, in_words, machine, show
from kvstore.cli.options import CONTEXT, debug_option, json_option, run
from kvstore.cli.show import print_json
from kvstore.config import ClientConfig, parse_size
from kvstore.demo.processes import free_port
from kvstore.errors import DeadlineExceededError, KVStoreError, NoSpaceError
from kvstore.process.children import Child, start_node

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvstore import Client

NAME = "bench-restarts"
USED_PART = 0.9
"""The part of the node's memory that is filled."""
BATCH = 500
EXISTS_BATCH = 8_192
PAUSE_S = 0.005
TIMEOUT_S = 120.0

Row = dict[str, float]


@click.command(context_settings=CONTEXT)
@click.option("--memory", default="4.5GiB", show_default=True, help="Memory of the node.")
@click.option("--objects", type=click.IntRange(min=1), default=100_000, show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--lease-ms", type=click.IntRange(min=1_000), default=10_000, show_default=True)
@json_option
@debug_option
def command(memory: str, objects: int, rounds: int, lease_ms: int, as_json: bool) -> None:
    """Kill the master and the node of a full store, and measure how soon it serves again."""
    quiet = Console(stderr=True, quiet=as_json)
    with ExitStack() as stack:
        store = RestartedStore(stack, parse_size(memory), objects, lease_ms)
        store.fill(quiet)
        found: list[tuple[str, Row]] = []
        for _ in range(rounds):
            for which in ("master", "node"):
                found.append((which, store.measure(which)))
                quiet.print(f"{which}: {found[-1][1]}", highlight=False)
    if as_json:
        for which, row in found:
            print_json({"killed": which, "objects": objects, "bytes": store.bytes, **row})
        return
    columns = [column.replace("_", " ") for column in found[0][1]]
    lines = [(which, *(f"{value:,.2f}" for value in row.values())) for which, row in found]
    what = f"{objects:,} objects, {store.bytes / (1 << 30):.1f} GiB. {in_words(machine())}"
    show([ResultsTable(("killed", *columns), lines), what])


class RestartedStore:
    """A store whose master and node are killed and started again, and a client of it."""

    def __init__(self, stack: ExitStack, memory: int, objects: int, lease_ms: int) -> None:
        from kvstore import Client

        self._memory, self._objects = memory, objects
        self._size = max(8, int(memory * USED_PART) // objects)
        self.bytes = self._size * objects
        self._noise = np.random.default_rng(0).integers(0, 255, self._size, dtype=np.uint8)
        self._lease_ms = str(lease_ms)
        self._port = str(free_port())
        self._processes: dict[str, Child] = {}
        stack.callback(self._stop)
        for name, start in self._starts().items():
            self._processes[name] = start()
        config = ClientConfig(
            master=f"127.0.0.1:{self._port}", transports=("shm",), placements_max=0,
            timeout_ms=int(TIMEOUT_S * 1000),
        )  # fmt: skip
        self._client: Client = stack.enter_context(Client(config=config))
        self._puts = 0

    def fill(self, console: Console) -> None:
        starts = range(0, self._objects, BATCH)
        for start in track(starts, "filling", console=console, transient=True):
            some = range(start, min(start + BATCH, self._objects))
            self._client.put_many([(_key(number), self._value(number)) for number in some])

    def restart(self, name: str) -> None:
        """Kills the master or the node, and starts it again."""
        os.kill(self._processes[name].pid, signal.SIGKILL)
        self._processes[name].wait()
        self._processes[name] = self._starts()[name]()

    def measure(self, killed: str) -> Row:
        there = 0

        def all_there() -> bool:
            nonlocal there
            while there < self._objects:
                some = range(there, min(there + EXISTS_BATCH, self._objects))
                if not all(self._client.exists_many([_key(number) for number in some])):
                    return False
                there = some.stop
            return True

        self.restart(killed)
        ready = time.monotonic()
        row: Row = {}
        _until(lambda: self._client.get(_key(0)) is not None)
        row["first_get_s"] = time.monotonic() - ready
        _until(all_there)
        row["all_s"] = time.monotonic() - ready
        _until(self._put_one)
        row["put_s"] = time.monotonic() - ready
        row["lost"], row["wrong"] = self._compare()
        return {name: round(value, 3) for name, value in row.items()}

    def _compare(self) -> tuple[int, int]:
        """The number of missing objects, and of objects with other bytes than were put."""
        lost = wrong = 0
        for start in range(0, self._objects, BATCH):
            some = range(start, min(start + BATCH, self._objects))
            values = self._client.get_many([_key(number) for number in some], copy=False)
            for number, value in zip(some, values, strict=True):
                if value is None:
                    lost += 1
                elif not np.array_equal(np.asarray(value), self._value(number)):
                    wrong += 1
        return lost, wrong

    def _put_one(self) -> bool:
        self._puts += 1
        with suppress(NoSpaceError):
            self._client.put(f"new-{self._puts}", b"new")
            return True
        return False

    def _value(self, number: int) -> NDArray[np.uint8]:
        value = self._noise.copy()
        value[:8] = np.frombuffer(number.to_bytes(8, "little"), np.uint8)
        return value

    def _stop(self) -> None:
        for each in reversed(self._processes.values()):
            each.stop()

    def _starts(self) -> dict[str, Callable[[], Child]]:
        return {
            "master": lambda: Child.start(
                "kvstore.cli.master", "--port", self._port, "--lane-port", "0", "--http-port", "0",
                "--lease-ms", self._lease_ms,
            ),
            "node": lambda: start_node(
                master=f"127.0.0.1:{self._port}", memory=self._memory, name=f"{NAME}-{os.getpid()}"
            ),
        }  # fmt: skip


def _key(number: int) -> str:
    return f"{number:032}"


def _until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + TIMEOUT_S
    while True:
        with suppress(KVStoreError):
            if done():
                return
        if time.monotonic() > end:
            raise DeadlineExceededError(f"not served again within {TIMEOUT_S:.0f} s")
        time.sleep(PAUSE_S)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        run(command, "bench restarts")
