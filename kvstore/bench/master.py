"""``kvstore bench --master-scale N``: what N objects cost the master.

Real clients call a real master process; only the node is simulated (``kvstore.bench.virtual``). Two
things are measured:

* ``master_memory``: growth of the master's resident memory, per object.
* ``master_pause``: the longest time that a one-key ``exists`` waits, seen from a client on the
  lane: while the master is idle (timers, the collector), and while other clients put, match and
  remove batches. The first measurement, without objects, shows what the machine itself adds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.progress import Progress

from kvstore.bench import virtual
from kvstore.bench.cases import Row, Sheet
from kvstore.bench.ours import own_master
from kvstore.texts import size_text

if TYPE_CHECKING:
    from kvstore.client.calling.stub import MasterStub

PROBE_SECONDS: Final = 10.0
SETTLE_SECONDS: Final = 1.0
"""Time for the load to start up before pauses are measured."""


def _cells(row: Row) -> tuple[str]:
    if row["op"] == "master_memory":
        return (
            f"{row['objects']:,} objects: {row['bytes_per_object']:.0f} bytes of master memory "
            f"each ({size_text(row['resident_bytes'])} resident), put at "
            f"{row['put_per_second']:,.0f}/s",
        )
    return (
        f"{row['objects']:,} objects, {row['during']}: longest pause {row['longest_ms']:.1f} ms, "
        f"99.9 % within {row['p999_ms']:.2f} ms, half within {row['p50_us']:.0f} µs",
    )


SHEET: Final = Sheet((), ("",), _cells)


def measure(objects: int, *, quiet: bool, probe_seconds: float = PROBE_SECONDS) -> Iterator[Row]:
    """Rows of memory and of pauses, at ``objects`` objects. A row's ``during`` is ``idle``, or what
    other clients do at the same time."""

    def probe(count: int, during: str) -> Row:
        found = virtual.pauses(stub, virtual.chain(0)[0], lambda seconds: seconds > probe_seconds)
        row = {"system": "kvstore", "op": "master_pause", "objects": count, "during": during}
        return row | found

    room = objects + virtual.CHAIN_BLOCKS
    with (
        own_master() as (address, pid),
        virtual.virtual_node(address, room),
        virtual.stub_of(address) as stub,
    ):
        yield probe(0, "idle")
        before = virtual.resident(pid)
        start = time.perf_counter()
        chains = _fill(stub, objects, quiet=quiet)
        seconds = time.perf_counter() - start
        after = virtual.resident(pid)
        yield {
            "system": "kvstore", "op": "master_memory", "objects": objects,
            "bytes_per_object": round((after - before) / objects, 1), "resident_bytes": after,
            "put_per_second": round(objects / seconds, 1),
        }  # fmt: skip
        yield probe(objects, "idle")
        with virtual.load(address, virtual.MIX, chains):
            time.sleep(SETTLE_SECONDS)
            yield probe(objects, "put, match and remove in batches")


def _fill(stub: MasterStub, objects: int, *, quiet: bool) -> int:
    """Puts ``objects`` objects in chains; returns the number of chains."""
    console = Console(stderr=True)
    off = quiet or not console.is_terminal
    chains = -(-objects // virtual.CHAIN_BLOCKS)
    with Progress(console=console, disable=off, transient=True) as progress:
        task = progress.add_task("putting", total=objects)
        for number in range(chains):
            left = objects - number * virtual.CHAIN_BLOCKS
            keys = virtual.chain(number, min(left, virtual.CHAIN_BLOCKS))
            virtual.put_chain(stub, keys)
            progress.advance(task, len(keys))
    return chains
