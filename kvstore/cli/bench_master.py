"""``kvstore bench --master-scale N``: what N objects cost the master.

Real clients call a real master process; only the node is simulated (``kvstore.bench.virtual``). Two
things are measured:

* ``master_memory``: growth of the master's resident memory, per object.
* ``master_pause``: the longest time that a one-key ``exists`` waits, seen from a client on the
  lane: while the master is idle (timers, the collector), and while other clients put, match and
  remove batches. The first measurement, without objects, shows what the machine itself adds.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.progress import Progress

from kvstore.bench import virtual
from kvstore.bench.ours import own_master
from kvstore.texts import size_text

if TYPE_CHECKING:
    from kvstore.client.calling.stub import MasterStub

PROBE_SECONDS = 10.0
SETTLE_SECONDS = 1.0
"""Time for the load to start up, which is not measured."""


@dataclass(frozen=True, kw_only=True)
class MemoryRow:
    system: str = "kvstore"
    op: str = "master_memory"
    objects: int
    bytes_per_object: float
    resident_bytes: int
    put_per_second: float


@dataclass(frozen=True, kw_only=True)
class PauseRow:
    system: str = "kvstore"
    op: str = "master_pause"
    objects: int
    during: str
    """``idle``, or what other clients do at the same time."""
    longest_ms: float
    p999_ms: float
    p50_us: float
    probes: int


def measure_master(objects: int, *, as_json: bool, probe_seconds: float = PROBE_SECONDS) -> None:
    """Runs the benchmark, and prints each row as soon as it is measured."""

    def show(row: MemoryRow | PauseRow) -> None:
        if as_json:
            click.echo(json.dumps(asdict(row)))
        elif isinstance(row, MemoryRow):
            click.echo(
                f"{row.objects:,} objects: {row.bytes_per_object:.0f} bytes of master memory each "
                f"({size_text(row.resident_bytes)} resident), put at {row.put_per_second:,.0f}/s"
            )
        else:
            click.echo(
                f"{row.objects:,} objects, {row.during}: longest pause {row.longest_ms:.1f} ms, "
                f"99.9 % within {row.p999_ms:.2f} ms, half within {row.p50_us:.0f} µs"
            )

    def probe(count: int, during: str) -> PauseRow:
        found = virtual.pauses(stub, virtual.chain(0)[0], lambda seconds: seconds > probe_seconds)
        return PauseRow(objects=count, during=during, **found._asdict())

    room = objects + virtual.CHAIN_BLOCKS
    with (
        own_master() as (address, pid),
        virtual.virtual_node(address, room),
        virtual.stub_of(address) as stub,
    ):
        show(probe(0, "idle"))
        before = virtual.resident(pid)
        start = time.perf_counter()
        chains = _fill(stub, objects, quiet=as_json)
        seconds = time.perf_counter() - start
        after = virtual.resident(pid)
        show(
            MemoryRow(
                objects=objects,
                bytes_per_object=round((after - before) / objects, 1),
                resident_bytes=after,
                put_per_second=round(objects / seconds, 1),
            )
        )
        show(probe(objects, "idle"))
        with virtual.load(address, virtual.MIX, chains):
            time.sleep(SETTLE_SECONDS)
            show(probe(objects, "put, match and remove in batches"))


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
