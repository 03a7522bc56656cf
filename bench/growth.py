"""The command ``python -m bench.growth``: measures this store as the work grows.

* *clients*: total throughput of more and more clients, and whether one of them starves;
* *chains*: the time of the master's search in longer and longer chains, and of the whole call;
* *master*: times, memory and pauses of a master with more and more objects (``growth_master``).
"""

from __future__ import annotations

import contextlib
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import click

from bench import growth_master, growth_page, page
from bench.client import OURS, ClientProcess, Settings, environment
from bench.page import Advance, Found
from bench.rows import KIB, MIB, SHM
from kvstore import calls
from kvstore.bench import virtual
from kvstore.bench.ours import TIMEOUT_MS, own_master, own_store
from kvstore.bench.session import EXIST, GET
from kvstore.bench.timing import median_us, require, timed
from kvstore.bench.virtual import NAMESPACE, PUT_AT_ONCE, chain
from kvstore.config import ClientConfig
from kvstore.demo.processes import Children
from kvstore.limits import BATCH_KEYS_MAX, PROTOCOL_VERSION, Key
from kvstore.master.state.master_state import MasterState
from kvstore.memory.header import SUPERBLOCK_BYTES, extent_bytes

PACKAGES: Final = ("numpy", "grpcio")
PARTS: Final = ("clients", "chains", "master")
CLIENTS: Final = (1, 2, 4, 8)
CLIENT_ROUNDS: Final = 3
OBJECTS: Final = (10_000, 1_000_000, 10_000_000)
BLOCKS: Final = (16, 64, 256, 1024, 4096, 16_384, 65_536, 131_072)
QUICK_OBJECTS: Final = (10_000, 100_000)
QUICK_SECONDS: Final = 0.05
POOL_BYTES: Final = 2 << 30
STOP_SECONDS: Final = 20.0
CALLS_MAX: Final = 20_000
KINDS: Final = (
    ("get 4 KiB, shm", GET, 4 * KIB, 1),
    ("get 64 x 1 MiB, shm", GET, MIB, 64),
    ("exist 64 keys", EXIST, 0, 64),
)
"""The kinds of work that every client does: title, operation, object size, batch."""
EXAMPLE = """\b
Examples:
  python -m bench.growth
  python -m bench.growth --parts master --objects 1000000
  python -m bench.growth --redraw docs/benchmarks/growth.json
"""


def _parts(context: click.Context, parameter: click.Parameter, value: str) -> list[str]:
    parts = [part.strip() for part in value.split(",")]
    for part in parts:
        if part not in PARTS:
            raise click.BadParameter(f"{part!r} is not one of {', '.join(PARTS)}")
    return parts


@click.command(epilog=EXAMPLE)
@click.option("--parts", metavar="PART,...", default=",".join(PARTS), show_default=True,
              callback=_parts, help="The parts to measure.")  # fmt: skip
@click.option("--objects", type=click.IntRange(1024), multiple=True, default=OBJECTS,
              show_default=True, help="Number of objects; may be repeated.")  # fmt: skip
@click.option("--seconds", type=click.FloatRange(min=0.01), default=1.0, show_default=True,
              help="Seconds per measurement.")  # fmt: skip
@page.quick_option
@page.out_option
@page.redraw_option
def main(
    parts: list[str],
    objects: tuple[int, ...],
    seconds: float,
    quick: bool,
    out: Path | None,
    redraw: Path | None,
) -> None:
    """Measure this store with more clients, a master with more objects, and longer chains.

    With --out writes growth.md, growth.json and growth.png, which needs matplotlib.
    10 million objects take 4 GB of memory. The exit status is 0 when everything was measured,
    whether or not the goals are met.
    """
    if redraw is not None:
        found = json.loads(redraw.read_text())
    else:
        rounds = 1 if quick else CLIENT_ROUNDS
        if quick:
            objects, seconds = QUICK_OBJECTS, QUICK_SECONDS
        steps = {
            "clients": rounds * len(KINDS) * len(CLIENTS),
            "chains": len(BLOCKS),
            "master": growth_master.steps(objects),
        }

        def measure(progress: Advance) -> Found:
            found: Found = {part: [] for part in ("clients", "master", "chains")}
            if "clients" in parts:
                found["clients"] = measure_clients(CLIENTS, rounds, seconds, progress)
            if "chains" in parts:
                found["chains"] = measure_chains(BLOCKS, seconds, progress)
            if "master" in parts:
                found["master"] = growth_master.measure(objects, seconds, progress)
            return found

        found = page.measured(measure, sum(steps[part] for part in parts), PACKAGES)
    found["goals"] = [each._asdict() for each in growth_page.goals(found)]
    page.publish(growth_page.page_of(found), found, out)


# --- clients -----------------------------------------------------------------------------------


def measure_clients(
    counts: Sequence[int], rounds: int, seconds: float, progress: Advance
) -> list[Found]:
    """Measures every kind of work with each number of clients. Each client is a process; all begin
    together. A result has medians over the rounds: objects or keys ``per_second`` of all clients,
    the slowest client's rate over the mean (``slowest_part``), and the time of one call.

    Raises:
        ChildError, KVStoreError: a process failed.
    """
    found: dict[tuple[str, int], list[Found]] = {}
    most = max(counts)
    with (
        own_store(POOL_BYTES) as store,
        Children(environment(), stop_seconds=STOP_SECONDS) as children,
        contextlib.ExitStack() as stack,
    ):
        settings = Settings(OURS, SHM, store.address, POOL_BYTES // most, 64 * MIB)
        clients = []
        for number in range(most):
            progress(f"client {number + 1} of {most} is starting", 0)
            clients.append(ClientProcess(children, f"client-{number}", settings))
            stack.callback(clients[-1].close)
        for number in range(rounds):
            for title, op, size, batch in KINDS:
                for count in counts:
                    progress(f"round {number + 1} of {rounds}: {title}, {count} clients", 1)
                    one = _together(clients[:count], op, size, batch, seconds)
                    found.setdefault((title, count), []).append(one)
    return [
        {"work": work, "clients": count}
        | {name: statistics.median(each[name] for each in some) for name in some[0]}
        for (work, count), some in found.items()
    ]


def _together(
    clients: Sequence[ClientProcess], op: str, size: int, batch: int, seconds: float
) -> dict[str, float]:
    for client in clients:
        client.prepare(op, size, batch, seconds)
    for client in clients:
        client.go()
    samples = [client.samples() for client in clients]
    rates = [len(some) * batch / max(seconds, sum(some)) for some in samples]
    return {
        "per_second": sum(rates),
        "slowest_part": min(rates) / statistics.mean(rates),
        "call_us": median_us([each for some in samples for each in some]),
    }


# --- chains ------------------------------------------------------------------------------------


def measure_chains(sizes: Sequence[int], seconds: float, progress: Advance) -> list[Found]:
    """Measures matches of each length, all on one stored chain of the greatest length.

    ``search_us``: time of the master's state alone, in this process, to find the tip and lease it.
    ``call_us``: time of ``Client.match_prefix``, which checks, sends and decodes every key, and
    searches, in ``requests`` calls to the master.

    Raises:
        KVStoreError: the master failed.
    """
    from kvstore import Client

    keys = chain(0, max(sizes))
    progress("chains: putting the longest", 0)
    state = _state_with(keys)
    found = []
    with (
        own_master() as (address, _),
        virtual.virtual_node(address, 2 * len(keys)),
        virtual.stub_of(address) as stub,
    ):
        virtual.put_chain(stub, keys)
        config = ClientConfig(master=address, namespace=NAMESPACE, timeout_ms=TIMEOUT_MS)
        with Client(config=config) as client:
            for size in sorted(sizes):
                progress(f"a chain of {size:,} blocks", 1)
                some = keys[:size]
                request = calls.MatchPrefix([NAMESPACE], some, False)

                def matched(count: int, size: int = size) -> None:
                    require(count == size, "of the chain was not matched")

                search = timed(
                    lambda _, request=request: state.asking.match_prefix(0, request),  # type: ignore[misc]
                    seconds,
                    CALLS_MAX,
                    lambda answer, matched=matched: matched(answer.matches[0].matched),  # type: ignore[misc]
                )
                call = timed(
                    lambda _, some=some: client.match_prefix(some),  # type: ignore[misc]
                    seconds,
                    CALLS_MAX,
                    matched,
                )
                found.append({
                    "blocks": size, "search_us": round(median_us(search), 2),
                    "call_us": round(median_us(call), 1), "requests": -(-size // BATCH_KEYS_MAX),
                })  # fmt: skip
    return found


def _state_with(keys: list[Key]) -> MasterState:
    """A master's state with the chain of these keys, outside of a master process."""
    state = MasterState(epoch=1)
    size = SUPERBLOCK_BYTES + 2 * len(keys) * extent_bytes(virtual.OBJECT_BYTES)
    offer = calls.SegmentOffer(
        size=size, uuid=bytes(16), shm_name="", address="127.0.0.1:9", token=bytes(16), seed=1,
        generation=1, fresh=True,
    )  # fmt: skip
    state.nodes.joined(0, 1, calls.NodeJoin("bench", virtual.HOST, PROTOCOL_VERSION, 0, [offer]))
    for start in range(0, len(keys), PUT_AT_ONCE):
        parent = keys[start - 1] if start else None
        grants = state.putting.put_start(
            0, virtual.putting(keys[start : start + PUT_AT_ONCE], parent)
        )
        assert isinstance(grants, calls.Grants)
        state.putting.put_end(0, calls.PutEnd(grants.epoch, grants.tokens))
    state.take_effects()
    return state


if __name__ == "__main__":
    main()
