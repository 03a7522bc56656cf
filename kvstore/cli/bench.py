"""``kvstore bench``: benchmarks of ``kvstore.bench`` on this machine."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from kvstore.cli.invocation import CONNECTION, client_config
from kvstore.cli.options import (
    Duration,
    command,
    config_options,
    confirm,
    debug_option,
    given_anywhere,
    json_option,
)
from kvstore.config import TRANSPORTS, ClientConfig, load, parse_size
from kvstore.errors import InvalidArgumentError, NoSpaceError, StartupError
from kvstore.runtime.addresses import shown_place
from kvstore.runtime.formatting import size_text

if TYPE_CHECKING:
    from kvstore.bench.rows import ComparisonCase

POOL_BYTES_MIN = 1 << 30
FREE_PART = 0.9
"""The fraction of a running store's free memory that the benchmark uses: some may be fragmented."""

USED = ("auth", "cluster")
"""Settings for the benchmark of a running store."""

ENGINE_SETTINGS = ("protocol", "device_name", "metadata_server")
"""Settings of the transfer engine, shared by client and node."""

COLUMNS = ("size", "batch", "per second", "GB/s", "p50 µs", "p99 µs", "processor µs")

EXAMPLE = """\b
Examples:
  kvstore bench
  kvstore bench --transport shm --rows 'get*,put/*/1MiB' --json
  kvstore bench --master 10.0.0.7:50001 --transport tcp
  KVSTORE_CLIENT_PROTOCOL=rdma kvstore bench --transport mooncake
"""


@command(epilog=EXAMPLE, help="Run benchmarks on this machine.")
@click.option("--transport", type=click.Choice([*TRANSPORTS, "both", "mooncake"]), default="both",
              show_default=True, help="Transport of the bytes; both is shm, then tcp.")  # fmt: skip
@click.option("--seconds", metavar="DURATION", type=Duration(min=0.01), default=1.5,
              show_default=True, help="Time per row.")  # fmt: skip
@click.option("--rows", "patterns", metavar="PATTERN,...", default="*", show_default=True,
              help="Only these rows, as OP/TRANSPORT/SIZE/BATCH or a prefix: 'get*', 'put/*/1MiB'."
              )  # fmt: skip
@click.option("--memory", metavar="SIZE", default="1GiB", show_default=True,
              help="Memory of the started node.")  # fmt: skip
@click.option(
    "--master",
    metavar="HOST:PORT",
    callback=given_anywhere,
    help="Measure this running store instead: writes to its free memory, at most --memory of it.",
)
@click.option("--yes", "-y", is_flag=True, help="Do not ask before a running store is used.")
@config_options(ClientConfig, only=USED, common=USED, helps=CONNECTION)
@json_option
@debug_option
def bench(
    config_path: str | None,
    transport: str,
    seconds: float,
    patterns: str,
    memory: str,
    master: str | None,
    yes: bool,
    as_json: bool | None,
    **given: Any,
) -> None:
    # Here and below, because shell completion of this command should not load numpy and rich.
    from kvstore.bench.rows import choose, rows_of_host

    pool = parse_size(memory)
    if pool < POOL_BYTES_MIN:
        raise InvalidArgumentError(
            f"--memory {memory} is too little for the rows", advice="Give it 1GiB or more."
        )
    try:
        rows = choose(patterns, rows_of_host(TRANSPORTS if transport == "both" else (transport,)))
    except ValueError as error:
        raise InvalidArgumentError(
            f"--rows: {error}",
            advice="Name rows as OP/TRANSPORT/SIZE/BATCH or a prefix; a star stands for anything.",
        ) from None
    options: dict[str, Any] = {}
    node_flags: list[str] = []
    if transport == "mooncake":
        config = load(ClientConfig, {})
        options = {
            "protocol": config.protocol or "tcp", "device_name": config.device_name,
            "metadata_server": config.metadata_server,
        }  # fmt: skip
        node_flags = [f"--{name.replace('_', '-')}={options[name]}" for name in ENGINE_SETTINGS]
    if master:
        config = client_config({**given, "master": master, "memory": 0}, config_path)
        pool = _room_in_use(config, pool, yes=yes, as_json=bool(as_json))
        master, options = config.master, options | {"auth": config.auth, "pool_bytes": pool}
    target = Target(master or None, options, node_flags)
    _show(rows, target, seconds, pool, as_json=bool(as_json))


class Target(NamedTuple):
    """The store under test."""

    master: str | None
    """None: a store started for the benchmark."""
    options: dict[str, Any]
    """Options of the driver."""
    node_flags: list[str]


def _show(
    rows: Sequence[ComparisonCase], target: Target, seconds: float, pool: int, *, as_json: bool
) -> None:
    """Run the rows, and print each as soon as it is measured."""
    from rich.live import Live

    from kvstore.bench.harness import ComparisonPlan, Sample, measure, numbers
    from kvstore.bench.kvstore_driver import own_store
    from kvstore.bench.processes import ChildError, Servers
    from kvstore.bench.rows import System, Table
    from kvstore.cli.tables import console_of_names, table_of

    def start(pool_bytes: int) -> contextlib.AbstractContextManager[Servers]:
        if target.master is not None:
            return contextlib.nullcontext(Servers({"tcp": target.master}, {}))
        return own_store(pool_bytes, target.node_flags)

    shown = table_of("mode", "op", right=COLUMNS)
    fastest: dict[str, float] = {}

    def on_sample(row: ComparisonCase, system: str, sample: Sample) -> None:
        found = numbers(row, sample)
        if as_json:
            click.echo(json.dumps(found))
            return
        if row.op == "get":
            fastest[row.mode] = max(fastest.get(row.mode, 0.0), found["gb_per_second"])
        moves = row.size and row.op != "get_view"
        shown.add_row(
            row.mode, row.op, size_text(row.size) if row.size else "-", str(row.batch),
            f"{found['per_second']:,.0f}", f"{found['gb_per_second']:.2f}" if moves else "-",
            f"{found['p50_us']:,.1f}", f"{found['p99_us']:,.1f}", f"{found['processor_us']:,.1f}",
        )  # fmt: skip

    system = System(start, "kvstore.bench.kvstore_driver:KVStoreDriver", target.options)
    table = Table(name="host", title="", rows=tuple(rows), systems={"kvstore": system})
    live = Live(shown, console=console_of_names(fits=True), vertical_overflow="visible",
                refresh_per_second=2)  # fmt: skip
    try:
        with contextlib.nullcontext() if as_json else live:
            measure(
                table, rows, ComparisonPlan(1, seconds, pool), lambda what, steps: None, on_sample
            )
    except ChildError as error:
        raise StartupError(str(error)) from None
    if fastest:
        rates = (f"{rate:.1f} GB/s by {mode}" for mode, rate in fastest.items())
        click.echo(f"\nThe fastest get copies {', '.join(rates)}.")


# --- a store that is in use ---


def _room_in_use(config: ClientConfig, wanted: int, *, yes: bool, as_json: bool) -> int:
    """Return how much of a running store's memory the benchmark may use, after a confirmation.

    At most the free memory, so that nothing is evicted unless other clients put meanwhile.
    """
    from kvstore import Client
    from kvstore.bench.kvstore_driver import NAMESPACE

    with Client(config=config) as client:
        status = client.status()
    size, free = status.size, status.size - status.used
    there = sum(namespace.objects for namespace in status.namespaces if namespace.name == NAMESPACE)
    shown = shown_place(config.master)
    pool = min(wanted, int(free * FREE_PART))
    if pool < POOL_BYTES_MIN:
        raise NoSpaceError(
            f"{size_text(free)} of {size_text(size)} are free in the store at {shown}; the rows "
            f"need {size_text(POOL_BYTES_MIN / FREE_PART)}, and the benchmark evicts nothing",
            advice="Leave out --master: the benchmark then starts its own store.",
        )
    objects = sum(namespace.objects for namespace in status.namespaces)
    told = (
        f"The store at {shown} holds {objects} objects; "
        f"{size_text(free)} of {size_text(size)} are free. The benchmark fills {size_text(pool)} "
        f"of that with objects of the namespace {NAMESPACE}, and removes all objects of that "
        f"namespace ({there} now) before and after. Other clients are slower meanwhile, and have "
        "less space."
    )
    click.echo(told, err=True)
    confirm("Go on?", yes=yes, as_json=as_json)
    return pool
