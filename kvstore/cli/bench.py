"""``kvstore bench``: what the store costs on this machine, one row per kind of work.

Client, master and node are three processes, as in production. The client's memory is allocated
and touched before anything is timed, the pool is written through once (a page touched for the first
time costs ten times a copy), and each call is timed alone; ``kvstore.bench`` does the work, and
compares it with another store.

* ``put``, ``get``: from and into the caller's memory. Every ``get`` asks the master where the
  object is: this client remembers no placements.
* ``get_again``: the same object under a live lease, for which the client asks nobody.
* ``get_view``: without copying, shared memory only. The row's bytes are those that can be read.
* ``exist``: is each of these keys there?
* ``match_prefix``: how much of this chain is there? All of it is.
* ``memcpy``: the same bytes copied inside this process at once: what no store can beat by copying.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import click
from rich.console import Console
from rich.live import Live
from rich.table import Table

from kvstore.bench.driver import EXIST, GET, GET_AGAIN, GET_VIEW, MATCH, MEMCPY, PUT
from kvstore.bench.ours import OurDriver, own_store
from kvstore.bench.session import (
    BATCH,
    CHAIN_BLOCKS,
    Session,
    median_us,
    memory,
    percentile,
    time_memcpy,
)
from kvstore.cli.options import CONTEXT, debug_option, json_option
from kvstore.cli.show import size_text
from kvstore.config import TRANSPORTS, ClientConfig, load, parse_size
from kvstore.errors import InvalidArgumentError

SIZES = (4096, 65536, 1 << 20, 4 << 20)
EXIST_BATCHES = (1, 64, 1024, CHAIN_BLOCKS)
MATCH_BATCHES = (1024, CHAIN_BLOCKS)
POOL_BYTES_MIN = 1 << 30

EXAMPLE = """\b
Examples:
  kvstore bench
  kvstore bench --transport shm --rows 'get*' --json
  kvstore bench --master 10.0.0.7:50001 --transport tcp
  kvstore bench --master-scale 1000000
"""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the result. Times are of one call, whatever its batch."""

    system: str
    mode: str
    op: str
    size_bytes: int
    batch: int
    per_second: float
    gb_per_second: float
    p50_us: float
    p99_us: float


@click.command(context_settings=CONTEXT, epilog=EXAMPLE)
@click.option(
    "--transport",
    type=click.Choice([*TRANSPORTS, "both", "mooncake"]),
    default="both",
    show_default=True,
    help="How the bytes travel; mooncake compares the store with the bare transfer engine.",
)
@click.option("--seconds", type=click.FloatRange(min=0.01), default=1.5, show_default=True,
              help="Time per row.")  # fmt: skip
@click.option("--rows", metavar="PATTERN,...", default="*", show_default=True,
              help="Only these, as OP or OP/SIZE/BATCH: 'get*', 'put/1048576/*'.")  # fmt: skip
@click.option("--memory", default="1GiB", show_default=True, help="Of the node that is started.")
@click.option("--master", metavar="HOST:PORT", help="Measure this running store instead.")
@click.option("--master-scale", type=click.IntRange(min=1), metavar="N",
              help="Measure a master that knows N objects instead: memory and pauses.")  # fmt: skip
@json_option
@debug_option
@click.pass_context
def bench(
    context: click.Context,
    transport: str,
    seconds: float,
    rows: str,
    memory: str,
    master: str | None,
    master_scale: int | None,
    as_json: bool,
) -> None:
    """Measure this machine."""
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
    with contextlib.ExitStack() as stack:
        show = stack.enter_context(_shown(as_json))
        if master is None:
            master = stack.enter_context(own_store(pool)).address
        for mode in modes:
            driver = OurDriver(master, mode, BATCH * max(SIZES))
            with contextlib.closing(driver):
                driver.clear()
                session = Session(driver, pool)
                session.warm()
                measure(session, mode, seconds, _Shower(mode, wanted, show))
                driver.clear()
        measure_memcpy(seconds, _Shower("none", wanted, show))


# --- the work ----------------------------------------------------------------------------------


def measure(
    session: Session, mode: str, seconds: float, shower: _Shower, *, sizes: tuple[int, ...] = SIZES
) -> None:
    """All rows of one transport that are wanted."""
    moving = (PUT, GET, GET_VIEW) if mode == "shm" else (PUT, GET)
    todo = [(op, size, batch) for size in sizes for batch in (1, BATCH) for op in moving]
    todo.append((GET_AGAIN, sizes[0], 1))
    todo += [(EXIST, 0, batch) for batch in EXIST_BATCHES]
    todo += [(MATCH, 0, batch) for batch in MATCH_BATCHES]
    for op, size, batch in todo:
        if shower.wants(op, size, batch):
            shower.row(op, size, batch, session.measure(op, size, batch, seconds))


def measure_memcpy(seconds: float, shower: _Shower) -> None:
    """What a put or a copying get costs at least."""
    source, target = memory(BATCH * max(SIZES))
    for size in SIZES:
        for batch in (1, BATCH):
            if shower.wants(MEMCPY, size, batch):
                samples = time_memcpy(source, target, size * batch, seconds)
                shower.row(MEMCPY, size, batch, samples)


# --- what is shown -----------------------------------------------------------------------------


class _Shower:
    """Knows which rows are wanted, and hands each one on as soon as it is measured."""

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
    table = Table("mode", "op", box=None, pad_edge=False)
    for name in ("size", "batch", "per second", "GB/s", "p50 µs", "p99 µs"):
        table.add_column(name, justify="right")

    def show(row: Row) -> None:
        size = size_text(row.size_bytes) if row.size_bytes else "-"
        speed = f"{row.gb_per_second:.2f}" if row.size_bytes else "-"
        numbers = (f"{row.per_second:,.0f}", speed, f"{row.p50_us:,.1f}", f"{row.p99_us:,.1f}")
        table.add_row(row.mode, row.op, size, str(row.batch), *numbers)

    with Live(table, console=Console(), vertical_overflow="visible", refresh_per_second=2):
        yield show
