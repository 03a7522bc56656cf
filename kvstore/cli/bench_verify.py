"""``kvstore bench --verify``: what each setting of ``verify`` costs a get on this machine.

One store, one object of each size, one client per setting. The clients' calls alternate, so that
noise of the machine affects all settings alike. Each get asks the master, as in the other rows.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final, get_args

import click

if TYPE_CHECKING:
    from kvstore import Client

SIZES: Final = (4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20)
ROUNDS: Final = 400
"""Gets per row; fewer for large values."""
BYTES_MAX: Final = 2 << 30
"""Bytes read per row."""
MEMORY: Final = "256MiB"


@dataclass(frozen=True, kw_only=True)
class Row:
    """Medians of one kind of get in µs, by setting; None: the setting does not affect that kind."""

    transport: str
    op: str
    size_bytes: int
    p50_us: dict[str, float]


def measure() -> Iterator[Row]:
    """Yields the rows. Starts a store of its own; takes half a minute."""
    import numpy as np

    from kvstore import Client
    from kvstore.config import TRANSPORTS, Verify

    settings: tuple[str, ...] = get_args(get_args(Verify)[0])
    with ExitStack() as stack:
        store = stack.enter_context(Client.embedded(MEMORY))
        for size in SIZES:
            store.put(f"{size}", np.random.default_rng(size).integers(0, 255, size, np.uint8))
        target = np.ones(SIZES[-1], np.uint8)
        for transport in TRANSPORTS:
            clients = {
                setting: stack.enter_context(
                    Client(
                        store.config.master,
                        transports=(transport,),
                        verify=setting,
                        placements_max=0,
                        timeout_ms=60_000,
                    )
                )
                for setting in settings
            }
            for size in SIZES:
                into = target[:size]
                key = f"{size}"

                def copy(client: Client, key: str = key, into: np.ndarray = into) -> None:
                    assert client.get_into([key], [into]) == [len(into)]

                def view(client: Client, key: str = key) -> None:
                    assert client.get(key, copy=False) is not None

                yield Row(
                    transport=transport,
                    op="copied",
                    size_bytes=size,
                    p50_us=_medians(clients, copy, size),
                )
                if transport == "shm":
                    yield Row(
                        transport=transport, op="not copied", size_bytes=size,
                        p50_us=_medians(clients, view, size),
                    )  # fmt: skip


def _medians(
    clients: dict[str, Client], get: Callable[[Client], None], size: int
) -> dict[str, float]:
    took: dict[str, list[float]] = {setting: [] for setting in clients}
    for number in range(min(ROUNDS, BYTES_MAX // size)):
        for setting, client in clients.items():
            started = time.perf_counter()
            get(client)
            if number >= 5:  # by then mappings and connections exist
                took[setting].append(time.perf_counter() - started)
    return {setting: round(statistics.median(each) * 1e6, 1) for setting, each in took.items()}


def _run(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if not wanted:
        return
    as_json = bool(context.params.get("as_json"))
    for number, row in enumerate(measure()):
        if as_json:
            click.echo(json.dumps(asdict(row)))
            continue
        if not number:
            click.echo(f"{'':24}" + "".join(f"{setting:>12}" for setting in row.p50_us) + "  (µs)")
        name = f"{row.transport} {row.op} {row.size_bytes >> 10} KiB"
        click.echo(f"{name:24}" + "".join(f"{us:12,.1f}" for us in row.p50_us.values()))
    context.exit()


verify_option = click.option(
    "--verify",
    is_flag=True,
    expose_value=False,
    callback=_run,
    help="Measure what each setting of verify costs instead.",
)
