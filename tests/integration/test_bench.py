"""The benchmark on real stores: that it works, not how fast they are."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from bench import growth, growth_master, mooncake, redis
from bench.client import MOONCAKE, OURS, REDIS, ClientProcess, Settings, environment
from bench.page import markdown
from bench.rows import MODES, REDIS_ROWS, SHM, TCP, chosen
from bench.side_by_side import Plan, compare, comparisons, page_of
from kvstore.bench.ours import own_store
from kvstore.bench.session import EXIST, GET, GET_AGAIN, GET_VIEW, MATCH, MEMCPY, PUT
from kvstore.demo.processes import ChildError, Children
from kvstore.limits import BATCH_KEYS_MAX
from tests.support.processes import run_python

GIB = 1 << 30
POOL = 256 << 20
MEMORY = 64 << 16
MISSING = mooncake.missing()
NO_REDIS = redis.missing()
CI = bool(os.environ.get("CI"))

peer = pytest.mark.skipif(MISSING is not None and not CI, reason=MISSING or "")
"""Continuous integration has it: there, its absence is a failure."""
beside_redis = pytest.mark.skipif(NO_REDIS is not None and not CI, reason=NO_REDIS or "")
roomy = pytest.mark.skipif(shutil.disk_usage("/dev/shm").free < 2 * GIB, reason="/dev/shm is small")


@pytest.fixture
def children() -> Iterator[Children]:
    with Children(environment()) as found:
        yield found


def client(children: Children, system: str, mode: str, address: str) -> ClientProcess:
    return ClientProcess(
        children, f"{system}-{mode}", Settings(system, mode, address, POOL, MEMORY)
    )


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
        one = client(children, OURS, mode, store.address)
        do(one, (PUT, GET, GET_VIEW, GET_AGAIN, EXIST, MATCH, MEMCPY))
        one.close()


@roomy
@peer
def test_every_operation_on_mooncake(children: Children) -> None:
    servers = mooncake.start(children, POOL)
    for mode, address in ((SHM, servers.storage), (TCP, servers.master)):
        one = client(children, MOONCAKE, mode, address)
        do(one, (PUT, GET, EXIST, MEMCPY))
        one.close()


@beside_redis
def test_every_operation_on_redis(children: Children) -> None:
    server = redis.start(children)
    for mode in (SHM, TCP):
        one = client(children, REDIS, mode, server.at(mode))
        do(one, (PUT, GET, EXIST, MATCH, MEMCPY))
        assert one.measure(PUT, 1 << 20, 1, 0.01), "the other packer"
        assert one.measure(GET, 1 << 20, 1, 0.01), "compares what was put"
        one.close()


@roomy
@beside_redis
def test_redis_side_by_side() -> None:
    """One row of each path; the page has no share of a master for Redis, which has none."""
    rows = chosen(["get/tcp/512B", "match_prefix/shm/-/64"], REDIS_ROWS)
    found = compare(rows, Plan(rounds=1, seconds=0.01, pool_bytes=POOL), lambda what, steps: None)
    assert [each.row for each in comparisons(found)] == rows
    assert found["idle_percent"].keys() == {OURS, REDIS}
    for each in comparisons(found):
        assert each.theirs_processor_us[0].keys() == {"client", "storage"}
        assert min(each.theirs_processor_us[0].values()) > 0
    page = page_of(found)
    assert (page.name, page.command) == ("redis", "make bench-redis")
    text = markdown(page, {**found, "machine": {"cpu": "A", "cores": 2, "memory_gib": 8,
                                                "kernel": "6.1"}, "load": [0.0, 0.0]})  # fmt: skip
    assert "| work | path | ours | Redis |" in text
    assert "Mooncake" not in text


@roomy
@peer
def test_a_session_warms_what_others_leave_of_mooncakes_memory(children: Children) -> None:
    """Mooncake evicts in the background: a put of a quick client finds no memory."""
    servers = mooncake.start(children, POOL // 16)
    one = client(children, MOONCAKE, TCP, servers.master)  # warms as if all of POOL were there
    assert one.measure(PUT, 4096, 1, 0.01)
    one.close()


@roomy
@peer
def test_both_side_by_side() -> None:
    rows = chosen(["get_again", "put/tcp/4KiB/1", "exist/tcp/-/64"])
    said: list[str] = []
    plan = Plan(rounds=2, seconds=0.01, pool_bytes=POOL)
    found = compare(rows, plan, lambda what, steps: said.extend([what] * steps))
    assert [each.row for each in comparisons(found)] == rows
    for each in comparisons(found):
        assert len(each.ours_us) == len(each.theirs_us) == 2
        assert each.ratio.smallest > 0
        for shares in (*each.ours_processor_us, *each.theirs_processor_us):
            assert shares.keys() == {"client", "master", "storage"}
            assert shares["client"] > 0
        if each.row.op == EXIST:
            assert all(shares["master"] > 0 for shares in each.ours_processor_us)
    assert len(said) == 2 * len(rows)
    assert all(len(values) == 4 for values in found["idle_percent"].values())


def test_a_client_that_cannot_start_says_why(children: Children) -> None:
    with pytest.raises(ChildError, match="there is no system nobody's"):
        client(children, "nobody's", TCP, "127.0.0.1:1")


def test_an_impossible_row_is_an_error_and_not_the_end(children: Children) -> None:
    with own_store(64 << 20) as store:
        one = client(children, OURS, TCP, store.address)
        with pytest.raises(ChildError, match="nonsense"):
            one.measure("nonsense", 4096, 1, 0.01)
        assert one.measure(PUT, 4096, 1, 0.01)
        one.close()


def test_a_page_and_a_picture_are_drawn_again(tmp_path: Path) -> None:
    row = {
        "id": "get_again/shm/4KiB/1", "ours_us": [10.0], "theirs_us": [90.0], "memcpy_us": [],
        "ours_processor_us": [{"client": 8.0, "master": 2.0, "storage": 0.0}],
        "theirs_processor_us": [{"client": 5.0, "master": 5.0, "storage": 5.0}],
    }  # fmt: skip
    found = {
        "machine": {"cpu": "A", "cores": 2, "memory_gib": 8, "kernel": "6.1"}, "load": [0.1, 0.2],
        "rounds": 1, "seconds": 0.5, "pool_bytes": GIB, "idle_percent": {}, "rows": [row],
    }  # fmt: skip
    (tmp_path / "found.json").write_text(json.dumps(found))
    command = [
        sys.executable, "-m", "bench", "--redraw", str(tmp_path / "found.json"),
        "--out", str(tmp_path / "out"),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert "1 of 1 goals are met" in done.stdout.decode()
    out = tmp_path / "out"
    assert "9.00" in (out / "mooncake.md").read_text()
    assert json.loads((out / "mooncake.json").read_text())["rows"][0]["met"] is True
    assert (out / "mooncake.png").read_bytes().startswith(b"\x89PNG")


@roomy
def test_clients_at_once() -> None:
    found = growth.measure_clients((1, 2), 1, 0.05, lambda what, steps: None)
    assert [(each["work"], each["clients"]) for each in found] == [
        (title, count) for title, *_ in growth.KINDS for count in (1, 2)
    ]
    for each in found:
        assert each["per_second"] > 0
        assert 0 < each["slowest_part"] <= 1


def test_a_master_as_it_fills() -> None:
    done = 0

    def progress(what: str, steps: int) -> None:
        nonlocal done
        done += steps

    sizes = (1_024, 4_096)
    found = growth_master.measure(sizes, 0.02, progress)
    assert done == growth_master.steps(sizes)
    for size, each in zip(sizes, found, strict=True):
        assert each["objects"] >= size
        assert all(eviction["evicted"] >= size // 4 for eviction in each["evictions"])
        assert min(each["call_us"].values()) > 0
        assert each["longest_step_us"] > 0


def test_chains_beyond_one_call() -> None:
    sizes = (16, 2 * BATCH_KEYS_MAX)
    found = growth.measure_chains(sizes, 0.02, lambda what, steps: None)
    assert [(each["blocks"], each["requests"]) for each in found] == [
        (16, 1),
        (2 * BATCH_KEYS_MAX, 2),
    ]
    assert min(each["call_us"] for each in found) > 0


def test_a_page_of_growth(tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "bench.growth", "--parts", "chains", "--quick",
        "--out", str(tmp_path),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert "131,072" in (tmp_path / "growth.md").read_text()
    assert len(json.loads((tmp_path / "growth.json").read_text())["chains"]) == 8
    assert (tmp_path / "growth.png").read_bytes().startswith(b"\x89PNG")


@roomy
def test_restarts_lose_nothing() -> None:
    size, once = ["--memory", "64MiB", "--objects", "1200"], ["--rounds", "1", "--lease-ms", "1000"]
    done = run_python("-m", "bench.restarts", "--json", *size, *once, within_s=120)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["killed"] for row in rows] == ["master", "node"]
    for row in rows:
        assert (row["objects"], row["lost"], row["wrong"]) == (1_200, 0, 0)
        assert row["first_get_s"] <= row["all_s"] <= row["put_s"]


def test_what_capabilities_cost() -> None:
    done = run_python("-m", "bench.capabilities", "--json", "--rounds", "1", "--calls", "1")
    rows = json.loads(done.stdout)
    assert {"mac", "seal 64", "read 64, token", "read 64, capabilities"} <= rows.keys()
    assert all(ns > 0 for ns in rows.values())
