"""``kvstore bench``: measures the store on this machine; ``kvstore.bench`` does the work."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from kvstore.cli.invocation import CONNECTION, client_config, given_flags, outer_of
from kvstore.cli.options import (
    CONTEXT,
    Command,
    agreed,
    config_options,
    debug_option,
    json_option,
)
from kvstore.config import TRANSPORTS, ClientConfig, load, parse_size
from kvstore.errors import InvalidArgumentError, NoSpaceError
from kvstore.network.addresses import shown_place
from kvstore.texts import size_text

if TYPE_CHECKING:
    from kvstore.bench import cases

POOL_BYTES_MIN = 1 << 30
FREE_PART = 0.9
"""The part of a running store's free memory that the benchmark uses: some may be fragmented."""

USED = ("auth", "cluster")
"""Settings of a running store that is measured."""

EXAMPLE = """\b
Examples:
  kvstore bench
  kvstore bench --transport shm --rows 'get*' --json
  kvstore bench --master 10.0.0.7:50001 --transport tcp
  kvstore bench --master-scale 1000000
"""


@click.command(
    cls=Command,
    before=("master", *USED),
    context_settings=CONTEXT,
    epilog=EXAMPLE,
    help="Measure this machine.",
)
@click.option(
    "--transport",
    type=click.Choice([*TRANSPORTS, "both", "mooncake"]),
    default="both",
    show_default=True,
    help="Transport of the bytes; mooncake compares the store with the bare transfer engine.",
)
@click.option("--seconds", metavar="SECONDS", type=click.FloatRange(min=0.01), default=1.5,
              show_default=True, help="Time per row.")  # fmt: skip
@click.option("--rows", metavar="PATTERN,...", default="*", show_default=True,
              help="Only these rows, as OP or OP/SIZE/BATCH: 'get*', 'put/1048576/*'.")  # fmt: skip
@click.option(
    "--memory",
    metavar="SIZE",
    default="1GiB",
    show_default=True,
    help="Memory of the started node.",
)
@click.option(
    "--master",
    metavar="HOST:PORT",
    help="Measure this running store instead: writes to its free memory, at most --memory of it.",
)
@click.option("--yes", "-y", is_flag=True, help="Do not ask before a running store is used.")
@click.option("--master-scale", type=click.IntRange(min=1), metavar="N",
              help="Measure a master that knows N objects instead: memory and pauses.")  # fmt: skip
@click.option("--verify", is_flag=True, help="Measure what each setting of verify costs instead.")
@config_options(ClientConfig, only=USED, common=USED, helps=CONNECTION)
@json_option
@debug_option
@click.pass_context
def bench(
    context: click.Context,
    /,
    config_path: str | None,
    transport: str,
    seconds: float,
    rows: str,
    memory: str,
    master: str | None,
    yes: bool,
    master_scale: int | None,
    verify: bool,
    as_json: bool,
    **given: Any,
) -> None:
    # Here, as further below: a shell that completes this command would wait for numpy and rich.
    from kvstore.bench import cases
    from kvstore.bench.ours import own_store

    outer = outer_of(context)
    as_json = as_json or outer["as_json"]
    flags = given_flags(outer, {"master": master, **given})
    master = flags.get("master") or None
    auth = ""  # a store of its own has no identities
    if verify:
        _show(cases.VERIFY, cases.verify(), as_json=as_json)
        return
    if master_scale is not None:
        from kvstore.bench import master as many

        _show(many.SHEET, many.measure(master_scale, quiet=as_json), as_json=as_json)
        return
    if transport == "mooncake":
        from kvstore.bench import engine
        from kvstore.transport.mooncake.engine import EngineSettings

        config = load(ClientConfig, {})
        settings = EngineSettings(
            config.protocol or "tcp", config.device_name, config.metadata_server
        )
        sheet = engine.SHEET._replace(title=f"{engine.SHEET.title} {settings.protocol}")
        _show(sheet, engine.measure(seconds, settings), as_json=as_json)
        return
    pool = parse_size(memory)
    if pool < POOL_BYTES_MIN:
        raise InvalidArgumentError(
            f"--memory {memory} is too little for the rows", advice="Give it 1GiB or more."
        )
    modes = TRANSPORTS if transport == "both" else (transport,)
    patterns = [pattern.strip() for pattern in rows.split(",")]
    cases.check_patterns(modes, patterns)
    if master is not None:
        path = outer["config_path"] if config_path is None else config_path
        config = client_config(flags | {"memory": 0}, path)
        master, auth = config.master, config.auth
        pool = _room_in_use(config, pool, yes=yes, as_json=as_json)
    with contextlib.ExitStack() as stack:
        if master is None:
            master = stack.enter_context(own_store(pool)).address
        rows_of_own = cases.own(master, modes, pool, seconds, patterns, auth=auth)
        _show(cases.OWN, rows_of_own, as_json=as_json)


def _show(sheet: cases.Sheet, rows: Iterator[cases.Row], *, as_json: bool) -> None:
    """Prints each row as soon as it is measured."""
    if as_json:
        for row in rows:
            click.echo(json.dumps(row))
        return
    from rich.live import Live

    from kvstore.cli.tables import console_of_names, table_of

    table = table_of(*sheet.left, right=sheet.right, show_header=bool(sheet.left))
    table.title = sheet.title or None
    console = console_of_names(fits=True)
    with Live(table, console=console, vertical_overflow="visible", refresh_per_second=2):
        for row in rows:
            table.add_row(*sheet.cells(row))


# --- a store that is in use ---


def _room_in_use(config: ClientConfig, wanted: int, *, yes: bool, as_json: bool) -> int:
    """How much of a running store's memory the benchmark may use. Tells the user, and asks.

    Never more than is free: the benchmark evicts nothing, unless other clients put meanwhile.
    """
    from kvstore import Client
    from kvstore.bench.ours import NAMESPACE

    with Client(config=config) as client:
        status = client.status()
    size, free = status.size, status.size - status.used
    there = sum(each.objects for each in status.namespaces if each.name == NAMESPACE)
    shown = shown_place(config.master)
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
