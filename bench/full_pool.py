"""Measures a pool that is full, as a cache is all its life: ``python -m bench.full_pool``.

Each step puts a batch of new objects and reads one that was put some steps earlier, as a decoder
reads what a prefiller has put. Every system must evict for each put. All use their default leases.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np

from bench import mooncake, page, redis
from bench.client import environment
from bench.page import Found, ResultsPage, ResultsTable
from kvstore import Client
from kvstore.bench.ours import NAMESPACE, TIMEOUT_MS, own_store
from kvstore.bench.timing import memory
from kvstore.calls import PutOutcome
from kvstore.demo.processes import Children
from kvstore.errors import NoSpaceError

POOL_BYTES = 512 << 20
BATCH, SIZE = 8, 1 << 20
LAGS = 9, 24
"""How many steps after its put a batch is read: after 14 and 38 % of the pool."""
FILLED = 1.3
"""Parts of the pool that are put before the steps that count."""

Step = Callable[[list[str]], int]
"""Puts or gets the objects of these keys; returns how many were stored or found."""


@contextlib.contextmanager
def _ours() -> Iterator[tuple[Step, Step]]:
    source, target = memory(BATCH * SIZE)
    sources, targets = np.split(source, BATCH), np.split(target, BATCH)
    with (
        own_store(POOL_BYTES, lease_ms=10_000) as store,
        Client(store.address, namespace=NAMESPACE, timeout_ms=TIMEOUT_MS) as client,
    ):
        yield (
            lambda keys: client.put_many(list(zip(keys, sources, strict=True)), partial=True).count(
                PutOutcome.STORED
            ),
            lambda keys: sum(map(bool, client.get_into(keys, targets))),
        )


@contextlib.contextmanager
def _mooncake() -> Iterator[tuple[Step, Step]]:
    with Children(environment()) as children:
        servers = mooncake.start(children, POOL_BYTES)
        driver = mooncake.MooncakeDriver(servers.at("shm"), "shm", BATCH * SIZE)
        store = driver._store
        put, get = (
            [each.ctypes.data + index * SIZE for index in range(BATCH)]
            for each in (driver.source, driver.target)
        )
        sizes = [SIZE] * BATCH
        with contextlib.closing(driver):
            yield (
                lambda keys: store.batch_put_from(keys, put, sizes).count(0),
                lambda keys: sum(size > 0 for size in store.batch_get_into(keys, get, sizes)),
            )


@contextlib.contextmanager
def _redis() -> Iterator[tuple[Step, Step]]:
    with Children(environment()) as children:
        driver = redis.RedisDriver(redis.start(children).at("shm"), "shm", BATCH * SIZE)
        client = driver._large
        client.config_set("maxmemory", POOL_BYTES)
        client.config_set("maxmemory-policy", "allkeys-lru")
        pieces = [driver.source[at * SIZE : (at + 1) * SIZE].data for at in range(BATCH)]
        with contextlib.closing(driver):
            yield (
                lambda keys: BATCH * client.mset(dict(zip(keys, pieces, strict=True))),
                lambda keys: sum(value is not None for value in client.mget(keys)),
            )


SYSTEMS = {"kvstore": _ours, "Mooncake Store": _mooncake, "Redis": _redis}


def _measure(seconds: float, progress: page.Advance) -> Found:
    rows: list[dict[str, Any]] = []
    for name, system in SYSTEMS.items():
        for lag in LAGS:
            progress(f"{name}, read {lag} puts later", 1)
            with system() as (put, get):
                rows.append({"system": name, "lag": lag, **_steps(put, get, lag, seconds)})
    return {"rows": rows}


def _steps(put: Step, get: Step, lag: int, seconds: float) -> dict[str, float]:
    def stored(keys: list[str]) -> int:
        with contextlib.suppress(NoSpaceError):
            return put(keys)
        return 0

    filling = int(FILLED * POOL_BYTES / (BATCH * SIZE))
    batches = [[f"{number}-{index}" for index in range(BATCH)] for number in range(filling)]
    for keys in batches:
        stored(keys)
    times: list[float] = []
    found = refused = 0
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        batches.append([f"{len(batches)}-{index}" for index in range(BATCH)])
        began = time.perf_counter()
        refused += BATCH - stored(batches[-1])
        times.append(time.perf_counter() - began)
        if len(times) > lag:
            found += get(batches[-1 - lag])
    return {
        "found": found / max(1, BATCH * (len(times) - lag)),
        "refused": refused / (BATCH * len(times)),
        "put_us": statistics.median(times) * 1e6,
    }


def _page(found: Found) -> ResultsPage:
    lines = [
        [row["system"], str(row["lag"]), f"{row['found']:.1%}", f"{row['refused']:.1%}",
         f"{row['put_us']:,.0f}"]
        for row in found["rows"]
    ]  # fmt: skip
    return ResultsPage(
        "full-pool", "A full pool", "python -m bench.full_pool --out docs/benchmarks",
        [
            f"Batches of {BATCH} x 1 MiB are put into a full pool of {POOL_BYTES >> 20} MiB, and"
            " each is read a number of puts later, within the host. Leases are the defaults: 10 s"
            " here, 5 s in Mooncake, none in Redis (allkeys-lru).",
            ResultsTable(
                ("system", "read after", "found", "puts refused", "put, us (median)"), lines
            ),
        ],
    )  # fmt: skip


@click.command()
@click.option("--seconds", type=click.FloatRange(min=0.1), default=10.0, show_default=True,
              help="Seconds of each row.")  # fmt: skip
@page.out_option
def main(seconds: float, out: Path | None) -> None:
    """Put into a full pool and read later: what is found, with each system."""
    os.environ.setdefault("GLOG_minloglevel", "3")  # Mooncake's client logs to the terminal
    if reason := mooncake.missing() or redis.missing():
        raise click.ClickException(reason)
    packages = (mooncake.PACKAGE, *redis.PACKAGES)
    steps = len(SYSTEMS) * len(LAGS)
    found = page.measured(lambda progress: _measure(seconds, progress), steps, packages)
    page.publish(_page(found), found, out)


if __name__ == "__main__":
    main()
