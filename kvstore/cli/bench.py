"""``kvstore bench``: measures the store on this machine, one row per kind of work.

Client, master and node are three processes, as in production. The client's memory is allocated
and touched before anything is timed, the whole pool is written once (the first touch of a page
costs ten times a copy), and each call is timed alone. ``kvstore.bench`` does the work, and compares
the store with another one.

* ``put``, ``get``: from and into the caller's memory. Every ``get`` asks the master where the
  object is: this client remembers no placements.
* ``get_again``: the same object under a live lease, for which the client does not ask the master.
* ``get_view``: without copying, shared memory only. The row's bytes are those that can be read.
* ``exist``: which of these keys exist?
* ``match_prefix``: how much of this chain is stored? All of it is.
* ``memcpy``: a copy of the same bytes inside this process: no store that copies can be faster.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import click
from rich.live import Live

from kvstore.bench.driver import EXIST, GET, GET_AGAIN, GET_VIEW, MATCH, MEMCPY, PUT
from kvstore.bench.ours import NAMESPACE, OurDriver, own_store
from kvstore.bench.session import (
    BATCH,
    CHAIN_BLOCKS,
    Session,
    median_us,
    memory,
    percentile,
    time_memcpy,
)
from kvstore.cli.bench_verify import verify_option
from kvstore.cli.options import CONTEXT, agreed, debug_option, json_option
from kvstore.cli.tables import console_of_names, table_of
from kvstore.config import TRANSPORTS, ClientConfig, load, parse_size
from kvstore.errors import InvalidArgumentError, NoSpaceError
from kvstore.network.addresses import shown_place
from kvstore.texts import size_text

SIZES = (4096, 65536, 1 << 20, 4 << 20)
EXIST_BATCHES = (1, 64, 1024, CHAIN_BLOCKS)
MATCH_BATCHES = (1024, CHAIN_BLOCKS)
POOL_BYTES_MIN = 1 << 30
FREE_PART = 0.9
"""The part of a running store's free memory that is used: some of it is fragmented."""

EXAMPLE = """\b
Examples:
  kvstore bench
  kvstore bench --transport shm --rows 'get*' --json
  kvstore bench --master 10.0.0.7:50001 --transport tcp
  kvstore bench --master-scale 1000000
"""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the result. Times are per call, whatever its batch."""

    system: str
    mode: str
    op: str
    size_bytes: int
    batch: int
    per_second: float
    gb_per_second: float
    p50_us: float
    p99_us: float


@click.command(context_settings=CONTEXT, epilog=EXAMPLE, help="Measure this machine.")
@click.option(
    "--transport",
    type=click.Choice([*TRANSPORTS, "both", "mooncake"]),
    default="both",
    show_default=True,
    help="Transport of the bytes; mooncake compares the store with the bare transfer engine.",
)
@click.option("--seconds", type=click.FloatRange(min=0.01), default=1.5, show_default=True,
              help="Time per row.")  # fmt: skip
@click.option("--rows", metavar="PATTERN,...", default="*", show_default=True,
              help="Only these rows, as OP or OP/SIZE/BATCH: 'get*', 'put/1048576/*'.")  # fmt: skip
@click.option("--memory", default="1GiB", show_default=True, help="Memory of the started node.")
@click.option(
    "--master",
    metavar="HOST:PORT",
    help="Measure this running store instead: writes to its free memory, at most --memory of it.",
)
@click.option("--yes", "-y", is_flag=True, help="Do not ask before a running store is used.")
@click.option("--master-scale", type=click.IntRange(min=1), metavar="N",
              help="Measure a master that knows N objects instead: memory and pauses.")  # fmt: skip
@json_option
@verify_option
@debug_option
@click.pass_context
def bench(
    context: click.Context,
    transport: str,
    seconds: float,
    rows: str,
    memory: str,
    master: str | None,
    yes: bool,
    master_scale: int | None,
    as_json: bool,
) -> None:
    outer: dict[str, Any] = context.obj or {"as_json": False, "flags": {}}
    as_json = as_json or outer["as_json"]
    master = master or outer["flags"].get("master")
    if master_scale is not None:
        from kvstore.cli.bench_master import measure_master

        measure_master(master_scale, as_json=as_json)
        return
    if transport == "mooncake":
        from kvstore.cli.bench_engine import measure_engine
        from kvstore.transport.mooncake.engine import EngineSettings

        config = load(ClientConfig, {})
        engine = EngineSettings(
            config.protocol or "tcp", config.device_name, config.metadata_server
        )
        measure_engine(seconds, settings=engine, as_json=as_json)
        return
    pool = parse_size(memory)
    if pool < POOL_BYTES_MIN:
        raise InvalidArgumentError(
            f"--memory {memory} is too little for the rows", advice="Give it 1GiB or more."
        )
    modes = TRANSPORTS if transport == "both" else (transport,)
    wanted = [pattern.strip() for pattern in rows.split(",")]
    if master is not None:
        pool = _room_in_use(master, pool, yes=yes, as_json=as_json)
    with contextlib.ExitStack() as stack:
        show = stack.enter_context(_shown(as_json))
        if master is None:
            master = stack.enter_context(own_store(pool)).address
        for mode in modes:
            driver = OurDriver(master, mode, BATCH * max(SIZES), pool_bytes=pool)
            with contextlib.closing(driver):
                driver.clear()
                session = Session(driver, pool)
                session.warm()
                measure(session, mode, seconds, _Shower(mode, wanted, show))
                driver.clear()
        measure_memcpy(seconds, _Shower("none", wanted, show))


# --- a store that is in use ---


def _room_in_use(master: str, wanted: int, *, yes: bool, as_json: bool) -> int:
    """How much of a running store's memory may be used. Tells the user, and asks.

    Never more than is free: the benchmark evicts nothing, unless other clients put meanwhile.
    """
    from kvstore import Client

    with Client(config=ClientConfig(master=master)) as client:
        status = client.status()
    segments = [segment for node in status.nodes for segment in node.segments]
    size = sum(segment.size for segment in segments)
    free = size - sum(segment.used for segment in segments)
    there = sum(each.objects for each in status.namespaces if each.name == NAMESPACE)
    shown = shown_place(master)
    pool = min(wanted, int(free * FREE_PART))
    if pool < POOL_BYTES_MIN:
        raise NoSpaceError(
            f"{size_text(free)} of {size_text(size)} are free in the store at {shown}; the rows "
            f"need {size_text(POOL_BYTES_MIN / FREE_PART)}, and the benchmark evicts nothing",
            advice="Leave out --master: the benchmark then starts its own store.",
        )
    told = (
        f"The store at {shown} holds {sum(each.objects for each in status.namespaces)} objects; "
        f"{size_text(free)} of {size_text(size)} are free. The benchmark fills {size_text(pool)} "
        f"of that with objects of the namespace {NAMESPACE}, and removes all objects of that "
        f"namespace ({there} now) before and after. Other clients are slower meanwhile, and have "
        "less space."
    )
    click.echo(told, err=True)
    agreed("Go on?", yes=yes, as_json=as_json)
    return pool


# --- the work ----------------------------------------------------------------------------------


def measure(
    session: Session, mode: str, seconds: float, shower: _Shower, *, sizes: tuple[int, ...] = SIZES
) -> None:
    """Measures the wanted rows of one transport."""
    moving = (PUT, GET, GET_VIEW) if mode == "shm" else (PUT, GET)
    todo = [(op, size, batch) for size in sizes for batch in (1, BATCH) for op in moving]
    todo.append((GET_AGAIN, sizes[0], 1))
    todo += [(EXIST, 0, batch) for batch in EXIST_BATCHES]
    todo += [(MATCH, 0, batch) for batch in MATCH_BATCHES]
    for op, size, batch in todo:
        if shower.wants(op, size, batch):
            shower.row(op, size, batch, session.measure(op, size, batch, seconds))


def measure_memcpy(seconds: float, shower: _Shower) -> None:
    """Measures the least that a put or a copying get can cost."""
    source, target = memory(BATCH * max(SIZES))
    for size in SIZES:
        for batch in (1, BATCH):
            if shower.wants(MEMCPY, size, batch):
                samples = time_memcpy(source, target, size * batch, seconds)
                shower.row(MEMCPY, size, batch, samples)


# --- output ------------------------------------------------------------------------------------


class _Shower:
    """Knows which rows are wanted, and passes each row on as soon as it is measured."""

    def __init__(self, mode: str, patterns: list[str], show: Callable[[Row], None]) -> None:
        self._mode = mode
        self._patterns = [p if "/" in p else f"{p}/*" for p in patterns]
        self._show = show

    def wants(self, operation: str, size: int, batch: int) -> bool:
        name = f"{operation}/{size}/{batch}"
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self._patterns)

    def row(self, operation: str, size: int, batch: int, samples: list[float]) -> None:
        per_second = batch * len(samples) / sum(samples)
        self._show(
            Row(
                system="kvstore",
                mode=self._mode,
                op=operation,
                size_bytes=size,
                batch=batch,
                per_second=round(per_second, 1),
                gb_per_second=round(per_second * size / 1e9, 3),
                p50_us=round(median_us(samples), 1),
                p99_us=round(percentile(samples, 0.99) * 1e6, 1),
            )
        )


@contextlib.contextmanager
def _shown(as_json: bool) -> Iterator[Callable[[Row], None]]:
    if as_json:
        yield lambda row: click.echo(json.dumps(asdict(row)))
        return
    numbers = ("size", "batch", "per second", "GB/s", "p50 µs", "p99 µs")
    table = table_of("mode", "op", right=numbers)

    def show(row: Row) -> None:
        size = size_text(row.size_bytes) if row.size_bytes else "-"
        speed = f"{row.gb_per_second:.2f}" if row.size_bytes else "-"
        numbers = (f"{row.per_second:,.0f}", speed, f"{row.p50_us:,.1f}", f"{row.p99_us:,.1f}")
        table.add_row(row.mode, row.op, size, str(row.batch), *numbers)

    console = console_of_names(fits=True)
    with Live(table, console=console, vertical_overflow="visible", refresh_per_second=2):
        yield show
