"""The benchmark on real stores: that it works, not how fast they are."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence

import pytest

from bench import mooncake, redis
from bench.tables import TABLES
from kvstore.bench.client import ClientProcess, Settings
from kvstore.bench.harness import ComparisonPlan, Result, measure, page_of
from kvstore.bench.kvstore_driver import own_store
from kvstore.bench.processes import ChildError, Children
from kvstore.bench.rows import MODES, SHM, TCP, choose
from kvstore.bench.session import EXIST, GET, GET_AGAIN, GET_VIEW, MATCH, MEMCPY, PUT

GIB = 1 << 30
POOL = 256 << 20
MEMORY = 64 << 16
OURS = "kvstore.bench.kvstore_driver:KVStoreDriver"
MOONCAKE = "bench.mooncake:MooncakeDriver"
REDIS = "bench.redis:RedisDriver"
MISSING = mooncake.missing()
NO_REDIS = redis.missing()
CI = bool(os.environ.get("CI"))

peer = pytest.mark.skipif(MISSING is not None and not CI, reason=MISSING or "")
"""Continuous integration has it: there, its absence is a failure."""
beside_redis = pytest.mark.skipif(NO_REDIS is not None and not CI, reason=NO_REDIS or "")
roomy = pytest.mark.skipif(shutil.disk_usage("/dev/shm").free < 2 * GIB, reason="/dev/shm is small")


@pytest.fixture
def children() -> Iterator[Children]:
    with Children() as found:
        yield found


def client(children: Children, driver: str, mode: str, address: str) -> ClientProcess:
    name = f"{driver.rpartition(':')[2]}-{mode}"
    return ClientProcess(children, name, Settings(driver, {}, mode, address, POOL, MEMORY))


def do(one: ClientProcess, operations: Sequence[str]) -> None:
    """Each operation, of one object and of many; what is got is compared inside."""
    for op in operations:
        size = 0 if op in (EXIST, MATCH) else 4096
        for batch in (1, 64):
            assert len(one.measure(op, size, batch, 0.01)) >= 3, (op, batch)


@roomy
@pytest.mark.parametrize("mode", MODES)
def test_every_operation_on_this_store(children: Children, mode: str) -> None:
    with own_store(POOL) as store:
        one = client(children, OURS, mode, store.address())
        do(one, (PUT, GET, GET_VIEW, GET_AGAIN, EXIST, MATCH, MEMCPY))
        one.close()


@roomy
@peer
def test_every_operation_on_mooncake(children: Children) -> None:
    servers = mooncake.start(children, POOL)
    for mode in MODES:
        one = client(children, MOONCAKE, mode, servers.address(mode))
        do(one, (PUT, GET, EXIST, MEMCPY))
        one.close()


@beside_redis
def test_every_operation_on_redis(children: Children) -> None:
    server = redis.start(children)
    for mode in (SHM, TCP):
        one = client(children, REDIS, mode, server.address(mode))
        do(one, (PUT, GET, EXIST, MATCH, MEMCPY))
        assert one.measure(PUT, 1 << 20, 1, 0.01), "the other packer"
        assert one.measure(GET, 1 << 20, 1, 0.01), "compares what was put"
        one.close()


def measured(table: str, rows: str, rounds: int, said: list[str]) -> list[Result]:
    plan = ComparisonPlan(rounds, 0.01, POOL)
    chosen = choose(rows, TABLES[table].rows)
    results = measure(TABLES[table], chosen, plan, lambda what, steps: said.extend([what] * steps))
    assert [each.row for each in results] == chosen
    assert len(said) == rounds * len(chosen)
    return results


@roomy
@beside_redis
def test_redis_side_by_side() -> None:
    """One row of each path; the page has no share of a master for Redis, which has none."""
    results = measured("redis", "get/tcp/512B,match_prefix/shm/-/64", 1, [])
    for each in results:
        [sample] = each.samples["Redis"]
        assert sample.processor_us.keys() == {"client", "storage"}
        assert min(sample.processor_us.values()) > 0
    machine = {"cpu": "A", "cores": 2, "memory_gib": 8, "kernel": "6.1"}
    found = {"machine": machine, "load": [0.0, 0.0]}
    text = page_of(TABLES["redis"], results, ComparisonPlan(1, 0.01, POOL), found)
    assert "| work | path | kvstore, P50 / P99 | Redis, P50 / P99 |" in text
    assert "Mooncake" not in text


@roomy
@peer
def test_a_session_warms_what_others_leave_of_mooncakes_memory(children: Children) -> None:
    """Mooncake evicts in the background: a put of a quick client finds no memory."""
    servers = mooncake.start(children, POOL // 16)
    one = client(children, MOONCAKE, TCP, servers.address())  # warms as if all of POOL were there
    assert one.measure(PUT, 4096, 1, 0.01)
    one.close()


@roomy
@peer
def test_both_side_by_side() -> None:
    results = measured("mooncake", "get_again,put/tcp/4KiB/1,exist/tcp/-/64", 2, [])
    for each in results:
        for samples in each.samples.values():
            assert len(samples) == 2
            for sample in samples:
                assert 0 < sample.p50_us <= sample.p99_us
                assert sample.processor_us.keys() == {"client", "master", "storage"}
                assert sample.processor_us["client"] > 0
        assert each.ratio("Mooncake", lambda sample: sample.p50_us).smallest > 0


@roomy
@peer
def test_clients_at_once() -> None:
    [two] = measured("clients", "exist/tcp/-/64/2-clients", 1, [])
    assert two.row.clients == 2
    [sample] = two.samples["kvstore"]
    assert sample.calls >= 2 * 2 * 3, "of both clients, in both turns"


def test_a_client_that_cannot_start_says_why(children: Children) -> None:
    with pytest.raises(ChildError, match="No module named 'nowhere'"):
        client(children, "nowhere:Driver", TCP, "127.0.0.1:1")


def test_an_impossible_row_is_an_error_and_not_the_end(children: Children) -> None:
    with own_store(64 << 20) as store:
        one = client(children, OURS, TCP, store.address())
        with pytest.raises(ChildError, match="nonsense"):
            one.measure("nonsense", 4096, 1, 0.01)
        assert one.measure(PUT, 4096, 1, 0.01)
        one.close()
