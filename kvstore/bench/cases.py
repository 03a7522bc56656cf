"""The cases of ``kvstore bench``, and how their rows are shown.

``own``: client, master and node are three processes, as in production. The client's memory is
allocated and touched before anything is timed, the whole pool is written once (the first touch of
a page costs ten times a copy), and each call is timed alone.

* ``put``, ``get``: from and into the caller's memory. Every ``get`` asks the master where the
  object is: this client remembers no placements.
* ``get_again``: a get under a live lease, for which the client does not ask the master.
* ``get_view``: a get without copying, by shared memory only. The row has no GB/s, because no
  byte moves: it counts calls.
* ``exist``: which of these keys exist?
* ``match_prefix``: how much of this chain is stored? All of it is.
* ``memcpy``: a copy of the same bytes inside this process: no store that copies can be faster.

``verify``: what each setting of ``verify`` costs a get. One store, one object of each size, one
client per setting, whose calls alternate, so that noise of the machine affects all alike. Each get
asks the master, as in the other rows.
"""

from __future__ import annotations

import contextlib
import fnmatch
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, get_args

from kvstore.bench.ours import OurDriver
from kvstore.bench.session import (
    BATCH,
    CHAIN_BLOCKS,
    EXIST,
    GET,
    GET_AGAIN,
    GET_VIEW,
    MATCH,
    MEMCPY,
    PUT,
    Session,
)
from kvstore.bench.timing import median_us, memory, percentile, seconds_of, time_memcpy
from kvstore.config import TRANSPORTS, Verify
from kvstore.errors import InvalidArgumentError
from kvstore.texts import shown_text, size_text

if TYPE_CHECKING:
    from kvstore import Client

Row = dict[str, Any]
"""One result, as ``--json`` prints it."""

SIZES: Final = (4096, 65536, 1 << 20, 4 << 20)
EXIST_BATCHES: Final = (1, 64, 1024, CHAIN_BLOCKS)
MATCH_BATCHES: Final = (1024, CHAIN_BLOCKS)

SETTINGS: Final[tuple[str, ...]] = get_args(get_args(Verify)[0])
VERIFY_SIZES: Final = (4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20)
VERIFY_ROUNDS: Final = 400
"""Gets per row; fewer for large values."""
VERIFY_BYTES_MAX: Final = 2 << 30
"""Bytes read per row."""
VERIFY_MEMORY: Final = "256MiB"


class Sheet(NamedTuple):
    """How a table shows the rows of a case, which appear as they are measured."""

    left: tuple[str, ...]
    """Headers of the columns with text; none: the table has no header at all."""
    right: tuple[str, ...]
    """Headers of the columns with numbers."""
    cells: Callable[[Row], Sequence[str]]
    title: str = ""


# --- each kind of call -------------------------------------------------------------------------


def _own_cells(row: Row) -> tuple[str, ...]:
    size, gb = row["size_bytes"], row["gb_per_second"]
    moves = size and row["op"] != GET_VIEW
    return (
        row["mode"], row["op"], size_text(size) if size else "-", str(row["batch"]),
        f"{row['per_second']:,.0f}", f"{gb:.2f}" if moves else "-", f"{row['p50_us']:,.1f}",
        f"{row['p99_us']:,.1f}",
    )  # fmt: skip


OWN: Final = Sheet(
    ("mode", "op"), ("size", "batch", "per second", "GB/s", "p50 µs", "p99 µs"), _own_cells
)


def own(
    address: str,
    modes: Sequence[str],
    pool_bytes: int,
    seconds: float,
    patterns: Sequence[str],
    *,
    auth: str = "",
) -> Iterator[Row]:
    """Measures each kind of call to a store, ``seconds`` per row, and then removes what it put.

    Args:
        patterns: which rows, as ``OP`` or ``OP/SIZE/BATCH``; ``check_patterns`` has checked them.
        auth: as for ``OurDriver``.
    """
    for mode in modes:
        driver = OurDriver(address, mode, BATCH * max(SIZES), pool_bytes=pool_bytes, auth=auth)
        with contextlib.closing(driver):
            driver.clear()
            session = Session(driver, pool_bytes)
            session.warm()
            for op, size, batch in chosen(work_of(mode), patterns):
                yield row_of(mode, op, size, batch, session.measure(op, size, batch, seconds))
            driver.clear()
    source, target = memory(BATCH * max(SIZES))
    for op, size, batch in chosen(COPIES, patterns):
        yield row_of("none", op, size, batch, time_memcpy(source, target, size * batch, seconds))


COPIES: Final = [(MEMCPY, size, batch) for size in SIZES for batch in (1, BATCH)]
"""Operation, size and batch of the rows without a store."""


def check_patterns(modes: Sequence[str], patterns: Sequence[str]) -> None:
    """Raises InvalidArgumentError: a pattern chooses no row of these transports."""
    work = [*(each for mode in modes for each in work_of(mode)), *COPIES]
    for pattern in patterns:
        if chosen(work, [pattern]):
            continue
        rows = chosen(work, [pattern.partition("/")[0]])
        names = ["/".join(map(str, row)) for row in rows] or [row[0] for row in work]
        raise InvalidArgumentError(
            f"--rows {shown_text(pattern, 100)} chooses no row; there are "
            f"{', '.join(dict.fromkeys(names))}",
            advice="Name rows as OP or as OP/SIZE/BATCH; a star stands for anything.",
        )


def work_of(mode: str) -> list[tuple[str, int, int]]:
    """Operation, size and batch of each row of a transport."""
    moving = (PUT, GET, GET_VIEW) if mode == "shm" else (PUT, GET)
    work = [(op, size, batch) for size in SIZES for batch in (1, BATCH) for op in moving]
    work.append((GET_AGAIN, SIZES[0], 1))
    work += [(EXIST, 0, batch) for batch in EXIST_BATCHES]
    return work + [(MATCH, 0, batch) for batch in MATCH_BATCHES]


def chosen(
    work: Sequence[tuple[str, int, int]], patterns: Sequence[str]
) -> list[tuple[str, int, int]]:
    whole = [pattern if "/" in pattern else f"{pattern}/*" for pattern in patterns]
    return [
        each
        for each in work
        if any(fnmatch.fnmatchcase("/".join(map(str, each)), pattern) for pattern in whole)
    ]


def row_of(mode: str, op: str, size: int, batch: int, samples: Sequence[float]) -> Row:
    """Times are per call, whatever its batch. 0 GB/s: the call moves no bytes."""
    per_second = batch * len(samples) / sum(samples)
    moved = 0 if op == GET_VIEW else size
    return {
        "system": "kvstore", "mode": mode, "op": op, "size_bytes": size, "batch": batch,
        "per_second": round(per_second, 1), "gb_per_second": round(per_second * moved / 1e9, 3),
        "p50_us": round(median_us(samples), 1),
        "p99_us": round(percentile(samples, 0.99) * 1e6, 1),
    }  # fmt: skip


# --- what verifying costs ----------------------------------------------------------------------

VERIFY: Final = Sheet(
    ("transport", "get", "object"),
    tuple(f"{setting} µs" for setting in SETTINGS),
    lambda row: (
        row["transport"],
        row["op"],
        size_text(row["size_bytes"]),
        *(f"{us:,.1f}" for us in row["p50_us"].values()),
    ),
)


def verify() -> Iterator[Row]:
    """Medians of one kind of get, by setting. Starts a store of its own; takes half a minute."""
    import numpy as np

    from kvstore import Client

    with contextlib.ExitStack() as stack:
        store = stack.enter_context(Client.embedded(VERIFY_MEMORY))
        for size in VERIFY_SIZES:
            store.put(f"{size}", np.random.default_rng(size).integers(0, 255, size, np.uint8))
        target = np.ones(VERIFY_SIZES[-1], np.uint8)
        for transport in TRANSPORTS:
            clients = {
                setting: stack.enter_context(
                    Client(
                        store.config.master, transports=(transport,), verify=setting,
                        placements_max=0, timeout_ms=60_000,
                    )
                )
                for setting in SETTINGS
            }  # fmt: skip
            for size in VERIFY_SIZES:
                into, key = target[:size], f"{size}"

                def copy(client: Client, key: str = key, into: np.ndarray = into) -> None:
                    assert client.get_into([key], [into]) == [len(into)]

                def view(client: Client, key: str = key) -> None:
                    assert client.get(key, copy=False) is not None

                gets = {"copied": copy} | ({"not copied": view} if transport == "shm" else {})
                for op, get in gets.items():
                    yield {
                        "transport": transport, "op": op, "size_bytes": size,
                        "p50_us": _medians(clients, get, size),
                    }  # fmt: skip


def _medians(
    clients: dict[str, Client], get: Callable[[Client], None], size: int
) -> dict[str, float]:
    took: dict[str, list[float]] = {setting: [] for setting in clients}
    for number in range(min(VERIFY_ROUNDS, VERIFY_BYTES_MAX // size)):
        for setting, client in clients.items():
            seconds = seconds_of(lambda client=client: get(client))  # type: ignore[misc]
            if number >= 5:  # after five gets, mappings and connections exist
                took[setting].append(seconds)
    return {setting: round(statistics.median(each) * 1e6, 1) for setting, each in took.items()}
