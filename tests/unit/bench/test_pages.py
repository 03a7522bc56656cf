"""What is judged of measurements, and the pages about them."""

from __future__ import annotations

import pytest

from bench.tables import ROWS, TABLES
from kvstore.bench.harness import ComparisonPlan, Result, Sample, numbers, page_of
from kvstore.bench.rows import ComparisonCase, choose
from kvstore.bench.session import GET_VIEW, PUT
from kvstore.bench.timing import Spread

MACHINE = {"cpu": "A", "cores": 2, "memory_gib": 8, "kernel": "6.1", "date": "2026-01-02"}
FOUND = {"machine": MACHINE, "load": [0.25, 0.5]}
PLAN = ComparisonPlan(3, 0.5, 1 << 30)
TABLE = TABLES["mooncake"]
[AGAIN] = choose("get_again", ROWS)


def samples(*times_us: float, processor_us: tuple[float, ...] = (8.0, 2.0, 0.0)) -> list[Sample]:
    client, master, storage = processor_us
    shares = {"client": client, "master": master, "storage": storage}
    return [Sample(100, 1e6 / us, us, 2 * us, shares) for us in times_us]


def result(row: ComparisonCase = AGAIN, ours: float = 10.0, theirs: float = 80.0) -> Result:
    found = {
        "kvstore": samples(ours, 2 * ours, ours),
        "Mooncake": samples(theirs, 2 * theirs, theirs, processor_us=(5.0, 5.0, 5.0)),
    }
    return Result(row, found)


def test_a_ratio_is_of_one_round() -> None:
    found = Result(AGAIN, {"kvstore": samples(10, 20, 10), "Mooncake": samples(80, 140, 90)})
    assert found.ratio("Mooncake", lambda each: each.p50_us) == Spread(8.0, 7.0, 9.0)


@pytest.mark.parametrize(("theirs", "met"), [(80.0, True), (79.0, False)])
def test_the_median_decides(theirs: float, met: bool) -> None:
    assert result(theirs=theirs).met is met


def test_the_page_has_a_line_and_its_notes_for_each_row() -> None:
    text = page_of(TABLE, [result(row, theirs=5.0) for row in ROWS], PLAN, FOUND)
    for row in ROWS:
        assert f"| {row.title} [" in text
        for note in row.notes:
            assert note in text
    assert "0 of 28 goals are met" in text
    assert "make bench ARGS='--table mooncake'" in text


def test_a_line_has_times_ratios_and_processor_time() -> None:
    text = page_of(TABLE, [result()], PLAN, FOUND)
    for cell in ("leased, 4 KiB [1]", "8.00", "8.00 to 8.00", "1 of 1 goals are met",
                 "10.0 µs / 20.0 µs", "10.0 µs = 8 + 2 + 0", "15.0 µs = 5 + 5 + 5"):  # fmt: skip
        assert cell in text


def test_a_row_of_kvstore_bench_is_of_one_call_and_its_whole_batch() -> None:
    row = ComparisonCase(op=PUT, mode="shm", size=1_000_000, batch=64)
    assert numbers(row, Sample(3, 500.0, 2000.0, 3000.0, {"client": 1.0, "master": 2.0})) == {
        "system": "kvstore", "mode": "shm", "op": "put", "size_bytes": 1_000_000, "batch": 64,
        "per_second": 32_000.0, "gb_per_second": 32.0, "p50_us": 2000.0, "p99_us": 3000.0,
        "processor_us": 3.0,
    }  # fmt: skip
    view = ComparisonCase(op=GET_VIEW, mode="shm", size=4 << 20, batch=64)
    assert numbers(view, Sample(1, 2500.0, 400.0, 400.0, {}))["gb_per_second"] == 0.0
