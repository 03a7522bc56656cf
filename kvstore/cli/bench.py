"""``kvstore bench``: what the store costs on this machine, one row per kind of work.

Client, master and node are three processes, as in production. The client's memory is allocated
and touched before anything is timed, the pool is written through once (a page touched for the first
time costs ten times a copy), and each call is timed alone. Fields and work are those of Mooncake's
rows in its own comparison script, so that the two can be put side by side:

* ``put``, ``get``: from and into the caller's memory. Every ``get`` asks the master where the
  object is: this client remembers no placements.
* ``get_again``: the same object under a live lease, for which the client asks nobody.
* ``get_view``: without copying, shared memory only. The row's bytes are those that can be read.
* ``exist``: is each of these keys there?
* ``match_prefix``: how much of this chain is there? All of it is.
* ``memcpy``: the same bytes copied inside this process: what no store can beat by copying.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.live import Live
from rich.table import Table

from kvstore.calls import PutOutcome
from kvstore.children import Child, start_node
from kvstore.cli.options import CONTEXT, debug_option, json_option
from kvstore.cli.show import size_text
from kvstore.config import TRANSPORTS, ClientConfig, load, parse_size
from kvstore.errors import InternalError, InvalidArgumentError, NoSpaceError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvstore import Client

    Bytes = NDArray[np.uint8]

SIZES = (4096, 65536, 1 << 20, 4 << 20)
BATCH = 64
EXIST_BATCHES = (1, 64, 1024, 8192)
MATCH_BATCHES = (1024, 8192)
CHAIN_BLOCKS = max(*EXIST_BATCHES, *MATCH_BATCHES)
CHAIN_BLOCK_BYTES = 4096

POOL_BYTES_MIN = 1 << 30
LEASE_MS = 1_000
"""Of our own master. Between two rows the bench waits for leases to end, so that memory is free."""

SETTLE_SECONDS = 60.0

NAMESPACE = "kvstore-bench"
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
            master = stack.enter_context(_own_store(pool))
        for mode in modes:
            shower = _Shower(mode, wanted, show)
            with _clients(master, mode) as (plain, caching):
                Measurement(plain, caching, seconds, pool, shower).run(mode)
        measure_memcpy(seconds, _Shower("none", wanted, show))


# --- the work ----------------------------------------------------------------------------------


class Measurement:
    """All rows of one transport. ``plain`` remembers no placements, ``caching`` does."""

    def __init__(
        self,
        plain: Client,
        caching: Client,
        seconds: float,
        pool: int,
        shower: _Shower,
    ) -> None:
        self.plain = plain
        self.caching = caching
        self.seconds = seconds
        self.pool = pool
        self.shower = shower
        self.source, self.target = _scratch()

    def run(self, mode: str) -> None:
        self.clear()
        self.warm()
        for size in SIZES:
            self.singles(size, views=mode == "shm")
            self.batches(size, views=mode == "shm")
        self.again()
        self.exist()
        self.match()
        self.clear()

    def warm(self) -> None:
        """Touch the whole pool once, so that no row pays for first-touch page faults."""
        block = self.source[: 1 << 20]
        with contextlib.suppress(NoSpaceError):  # somebody else's objects may be there
            for number in range(self.pool * 9 // 10 >> 20):
                self.plain.put(f"warm{number}", block, namespace=NAMESPACE, wait_ms=0)
        self.clear()

    def singles(self, size: int, *, views: bool) -> None:
        if not self.shower.wants(("put", "get", "get_view"), size, 1):
            return
        room = self.pool // 2 // size
        keys = [f"s{size}-{number}".encode() for number in range(min(2000, room))]
        source, target = self.source[:size], self.target[:size]
        plain, namespace = self.plain, NAMESPACE

        samples = timed(
            lambda i: plain.put(keys[i], source, namespace=namespace),
            self.seconds,
            len(keys),
            stored,
        )
        self.shower.row("put", size, 1, samples)
        present = keys[: len(samples)]

        samples = timed(
            lambda i: plain.get_into([present[i % len(present)]], [target], namespace=namespace),
            self.seconds,
            2000,
            all_there,
        )
        self.shower.row("get", size, 1, samples)
        same_bytes(target, source)

        if views:
            samples = timed(
                lambda i: plain.get(present[i % len(present)], namespace=namespace, copy=False),
                self.seconds,
                2000,
                not_none,
            )
            self.shower.row("get_view", size, 1, samples)
        self.clear()

    def batches(self, size: int, *, views: bool) -> None:
        if not self.shower.wants(("put", "get", "get_view"), size, BATCH):
            return
        rounds = max(1, min(20, self.pool // 2 // size // BATCH))
        names = [[f"b{size}-{r}-{i}".encode() for i in range(BATCH)] for r in range(rounds)]
        sources = self._pieces(self.source, size)
        targets = self._pieces(self.target, size)
        plain, namespace = self.plain, NAMESPACE
        pairs = [list(zip(some, sources, strict=True)) for some in names]

        samples = timed(
            lambda i: plain.put_many(pairs[i], namespace=namespace), self.seconds, rounds, stored
        )
        self.shower.row("put", size, BATCH, samples)
        present = names[: len(samples)]

        samples = timed(
            lambda i: plain.get_into(present[i % len(present)], targets, namespace=namespace),
            self.seconds,
            200,
            all_there,
        )
        self.shower.row("get", size, BATCH, samples)
        for source, target in zip(sources, targets, strict=True):
            same_bytes(target, source)

        if views:
            samples = timed(
                lambda i: plain.get_many(
                    present[i % len(present)], namespace=namespace, copy=False
                ),
                self.seconds,
                200,
                not_none,
            )
            self.shower.row("get_view", size, BATCH, samples)
        self.clear()

    def again(self) -> None:
        size = SIZES[0]
        if not self.shower.wants(("get_again",), size, 1):
            return
        target = self.target[:size]
        caching = self.caching
        caching.put(b"again", self.source[:size], namespace=NAMESPACE)
        samples = timed(
            lambda i: caching.get_into([b"again"], [target], namespace=NAMESPACE),
            self.seconds,
            20_000,
            all_there,
        )
        self.shower.row("get_again", size, 1, samples)

    def exist(self) -> None:
        if not self.shower.wants(("exist",), 0, *EXIST_BATCHES):
            return
        keys = [f"chain-{i:06d}-0123456789abcdef".encode() for i in range(CHAIN_BLOCKS)]
        block = self.source[:CHAIN_BLOCK_BYTES]
        for start in range(0, CHAIN_BLOCKS, 1024):
            some = [(key, block) for key in keys[start : start + 1024]]
            stored(self.plain.put_many(some, namespace=NAMESPACE))
        for batch in EXIST_BATCHES:
            self.shower.row("exist", 0, batch, self._time_exist(keys[:batch]))

    def _time_exist(self, keys: list[bytes]) -> list[float]:
        return timed(
            lambda _: self.plain.exists_many(keys, namespace=NAMESPACE),
            self.seconds,
            5000,
            all_there,
        )

    def match(self) -> None:
        if not self.shower.wants(("match_prefix",), 0, *MATCH_BATCHES):
            return
        hashes = [hashlib.sha256(str(i).encode()).digest() for i in range(CHAIN_BLOCKS)]
        block = self.source[:CHAIN_BLOCK_BYTES]
        self.plain.put_chain(hashes, [block] * len(hashes), namespace=NAMESPACE)
        for batch in MATCH_BATCHES:
            self.shower.row("match_prefix", 0, batch, self._time_match(hashes[:batch]))

    def _time_match(self, hashes: list[bytes]) -> list[float]:
        def check(matched: Any) -> None:
            _require(matched == len(hashes), "of the chain was not matched")

        return timed(
            lambda _: self.plain.match_prefix(hashes, namespace=NAMESPACE),
            self.seconds,
            5000,
            check,
        )

    def clear(self) -> None:
        """Remove what was put, and wait until nobody's lease keeps its memory any more."""
        self.plain.clear(NAMESPACE)
        end = time.monotonic() + SETTLE_SECONDS
        while self._used() > self.pool // 20 and time.monotonic() < end:
            time.sleep(0.05)

    def _used(self) -> int:
        nodes = self.plain.status().nodes
        return sum(segment.used for node in nodes for segment in node.segments)

    def _pieces(self, memory: Bytes, size: int) -> list[Any]:
        return [memory[i * size : (i + 1) * size] for i in range(BATCH)]


def measure_memcpy(seconds: float, shower: _Shower) -> None:
    """What a put costs at least: the source in cache, the target elsewhere each time."""
    source, target = _scratch()

    def time_copies(size: int, batch: int) -> list[float]:
        slots = len(target) // size

        def copy(index: int) -> None:
            for number in range(batch):
                at = (index * batch + number) % slots * size
                target[at : at + size] = source[number * size : (number + 1) * size]

        return timed(copy, seconds, 2000, ignored)

    for size in SIZES:
        for batch in (1, BATCH):
            if shower.wants(("memcpy",), size, batch):
                shower.row("memcpy", size, batch, time_copies(size, batch))


def _scratch() -> tuple[Bytes, Bytes]:
    """The caller's memory: random bytes to put, and as much to get into; all of it touched."""
    import numpy as np

    source = np.random.default_rng(0).integers(0, 255, BATCH * max(SIZES), dtype=np.uint8)
    return source, np.full_like(source, 1)


def timed(
    call: Callable[[int], Any], seconds: float, limit: int, check: Callable[[Any], None]
) -> list[float]:
    """Seconds of each call: as many as fit into ``seconds``, at least 3, at most ``limit``."""
    samples = []
    end = time.perf_counter() + seconds
    index = 0
    while index < limit and (index < 3 or time.perf_counter() < end):
        start = time.perf_counter()
        result = call(index)
        samples.append(time.perf_counter() - start)
        check(result)
        del result  # a view holds its lease for as long as it lives
        index += 1
    return samples


def stored(result: Any) -> None:
    outcomes = result if isinstance(result, Sequence) else [result]
    _require(all(outcome == PutOutcome.STORED for outcome in outcomes), "was not stored")


def all_there(result: Any) -> None:
    _require(all(result), "was not there")


def not_none(result: Any) -> None:
    values = result if isinstance(result, list) else [result]
    _require(all(value is not None for value in values), "was not there")


def same_bytes(target: Bytes, source: Bytes) -> None:
    _require(bool((target == source).all()), "came back with other bytes")


def _require(well: bool, what: str) -> None:
    if not well:
        raise InternalError(
            f"an object {what}", advice="Does something else use this store, or is it too small?"
        )


def ignored(result: Any) -> None:
    pass


# --- what is shown -----------------------------------------------------------------------------


class _Shower:
    """Knows which rows are wanted, and hands each one on as soon as it is measured."""

    def __init__(self, mode: str, patterns: list[str], show: Callable[[Row], None]) -> None:
        self._mode = mode
        self._patterns = [p if "/" in p else f"{p}/*" for p in patterns]
        self._show = show

    def wants(self, operations: Sequence[str], size: int, *batches: int) -> bool:
        names = [f"{op}/{size}/{batch}" for op in operations for batch in batches]
        return any(fnmatch.fnmatchcase(name, p) for name in names for p in self._patterns)

    def row(self, operation: str, size: int, batch: int, samples: list[float]) -> None:
        if not self.wants((operation,), size, batch):
            return
        ordered = sorted(samples)
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
                p50_us=round(statistics.median(ordered) * 1e6, 1),
                p99_us=round(ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))] * 1e6, 1),
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


# --- the store that is measured ----------------------------------------------------------------


@contextlib.contextmanager
def own_master(*flags: str) -> Iterator[tuple[str, int]]:
    """Address and process id of a master that ends with the block."""
    master = Child.start("kvstore.cli.master", "--port", "0", *flags)
    try:
        yield f"127.0.0.1:{master.said['port']}", master.pid
    finally:
        master.stop()


@contextlib.contextmanager
def _own_store(pool: int) -> Iterator[str]:
    with own_master("--lease-ms", str(LEASE_MS)) as (address, _):
        node = start_node(master=address, memory=pool)
        try:
            yield address
        finally:
            node.stop()


@contextlib.contextmanager
def _clients(master: str, mode: str) -> Iterator[tuple[Client, Client]]:
    from kvstore import Client

    plain = ClientConfig(master=master, transports=(mode,), placements_max=0, timeout_ms=60_000)
    caching = ClientConfig(master=master, transports=(mode,), timeout_ms=60_000)
    with Client(config=plain) as first, Client(config=caching) as second:
        yield first, second
