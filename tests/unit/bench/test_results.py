"""Ratios, their spread, whether a goal is met; the report, there and back."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from bench import report
from bench.results import Comparison, Measured
from bench.rows import ROWS, Row, chosen
from bench.worker import MOONCAKE, OURS
from kvstore.bench.session import PUT
from kvstore.bench.timing import Spread

[COPIED] = chosen(["put/shm/1MiB/64"])
[AGAIN] = chosen(["get_again"])
SHARES = {"client": 8.0, "master": 2.0, "storage": 0.0}
THEIR_SHARES = {"client": 5.0, "master": 5.0, "storage": 5.0}


def measured(*comparisons: Comparison) -> Measured:
    return Measured(
        rounds=3,
        seconds=0.5,
        pool_bytes=1 << 30,
        comparisons=list(comparisons),
        idle_percent={OURS: [0.5, 1.5], MOONCAKE: [2.0, 4.0]},
        load=(0.25, 0.5),
        machine={"cpu": "A", "cores": 2, "memory_gib": 8, "kernel": "6.1", "python": "3.11.7",
                 "kvstore": "0.1.0", "numpy": "2.0", "date": "2026-01-02"},
    )  # fmt: skip


def comparison(row: Row = AGAIN) -> Comparison:
    return Comparison(
        row, [10.0, 20.0, 10.0], [80.0, 140.0, 90.0], [], [SHARES] * 3, [THEIR_SHARES] * 3
    )


def test_a_ratio_is_of_one_round() -> None:
    assert comparison().ratios == [8.0, 7.0, 9.0]
    assert comparison().ratio == Spread(8.0, 7.0, 9.0)


@pytest.mark.parametrize(("theirs", "met"), [([80.0, 80.0], True), ([79.0, 79.0], False)])
def test_the_median_decides(theirs: list[float], met: bool) -> None:
    assert Comparison(AGAIN, [10.0, 10.0], theirs).met is met


@pytest.mark.parametrize(("copy", "met"), [(80.0, True), (79.0, False)])
def test_a_copy_must_be_near_one_memcpy_too(copy: float, met: bool) -> None:
    found = Comparison(COPIED, [100.0], [200.0], [copy])
    assert found.memcpy_part == Spread(copy / 100, copy / 100, copy / 100)
    assert found.met is met


def test_samples_go_to_whom_they_belong() -> None:
    found = Comparison(Row(op=PUT, mode="shm", goal=1.0))
    found.add(OURS, 1.0, SHARES)
    found.add(MOONCAKE, 2.0, THEIR_SHARES)
    assert found.ratios == [2.0]
    assert found.processor_ratio == Spread(1.5, 1.5, 1.5)


def test_the_sum_of_the_processes_decides() -> None:
    row = Row(op=PUT, mode="shm", size=4096, goal=1.0)
    assert Comparison(row, [1.0], [1.0], [], [SHARES], [THEIR_SHARES]).processor_met
    less = {**THEIR_SHARES, "storage": 4.9}
    assert not Comparison(row, [1.0], [1.0], [], [SHARES], [less]).processor_met
    assert not Comparison(row, [1.0], [1.0]).processor_met, "not measured"


def test_json_there_and_back() -> None:
    before = measured(comparison(), Comparison(COPIED, [1.0], [2.0], [0.9]))
    text = json.dumps(before.as_json())
    after = Measured.from_json(json.loads(text))
    assert after == before
    assert report.as_markdown(after) == report.as_markdown(before)


def test_json_says_what_it_means() -> None:
    [row] = measured(comparison()).as_json()["rows"]
    assert row["id"] == "get_again/shm/4KiB/1"
    assert row["ratio"] == {"median": 8.0, "smallest": 7.0, "largest": 9.0}
    assert (row["goal"], row["met"]) == (8, True)


def test_rows_that_are_gone_are_left_out() -> None:
    found = measured(comparison()).as_json()
    found["rows"].append({**found["rows"][0], "id": "gone/shm/-/1"})
    assert [each.row for each in Measured.from_json(found).comparisons] == [AGAIN]


def test_the_page_has_a_line_and_its_notes_for_each_row() -> None:
    every = [Comparison(row, [10.0], [5.0], [8.0] if row.memcpy_goal else []) for row in ROWS]
    page = report.as_markdown(measured(*every), picture="mooncake.png")
    for each in ROWS:
        assert f"| {each.title} [" in page
        for note in each.notes:
            assert note in page
    assert "0 of 28 goals are met" in page
    assert "80% of memcpy (goal 80%)" in page
    assert "## Processor time" not in page, "not measured"
    assert "mooncake.png" in page
    page = report.as_markdown(measured(comparison()))
    assert (
        "| get again, leased, 4 KiB | shm | 10.0 µs = 8 + 2 + 0 | 15.0 µs = 5 + 5 + 5 "
        "| 1.50 | 1.50 to 1.50 | 1.5 | met |" in page
    )


def test_the_terminal_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    report.show(measured(comparison()), Console(width=200))
    out = capsys.readouterr().out
    for cell in ("get again, leased, 4 KiB [1]", "8.00", "7.00 to 9.00", "1 of 1 goals are met"):
        assert cell in out
    assert "10.0 µs = 8 + 2 + 0" in out
    assert "15.0 µs = 5 + 5 + 5" in out
