"""What is judged of measurements, and the pages about them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import growth_page, history, serving_page, side_by_side
from bench.client import MOONCAKE, OURS
from bench.page import Found, markdown, show
from bench.rows import ROWS, Row, chosen
from bench.side_by_side import Comparison, comparisons
from kvstore.bench.session import PUT
from kvstore.bench.timing import Spread
from kvstore.bench.virtual import chain

PUBLISHED = Path(__file__).parents[3] / "docs/benchmarks"
MACHINE = {"cpu": "A", "cores": 2, "memory_gib": 8, "kernel": "6.1", "date": "2026-01-02"}
[COPIED] = chosen(["put/shm/1MiB/64"])
[AGAIN] = chosen(["get_again"])
SHARES = {"client": 8.0, "master": 2.0, "storage": 0.0}
THEIR_SHARES = {"client": 5.0, "master": 5.0, "storage": 5.0}


@pytest.mark.parametrize("name", ["mooncake", "hicache", "redis", "growth", "serving"])
def test_what_is_published_is_written_again_from_its_numbers(name: str) -> None:
    found = json.loads((PUBLISHED / f"{name}.json").read_text())
    pages = {"growth": growth_page.page_of, "serving": serving_page.page_of}
    runs = history.read(PUBLISHED, name)
    page = pages[name](found) if name in pages else side_by_side.page_of(found, runs)
    assert markdown(page, found) == (PUBLISHED / f"{name}.md").read_text()


# --- side by side ------------------------------------------------------------------------------


def measured(*rows: Comparison) -> Found:
    return {
        "machine": MACHINE, "load": [0.25, 0.5], "rounds": 3, "seconds": 0.5,
        "pool_bytes": 1 << 30, "rows": [each.as_json() for each in rows],
        "idle_percent": {OURS: [0.5, 1.5], MOONCAKE: [2.0, 4.0]},
    }  # fmt: skip


def comparison(row: Row = AGAIN) -> Comparison:
    return Comparison(
        row, [10.0, 20.0, 10.0], [80.0, 140.0, 90.0], [], [SHARES] * 3, [THEIR_SHARES] * 3
    )


def test_a_ratio_is_of_one_round() -> None:
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
    assert found.ratio.median == 2.0
    assert found.processor_ratio == Spread(1.5, 1.5, 1.5)


def test_the_sum_of_the_processes_decides() -> None:
    row = Row(op=PUT, mode="shm", size=4096, goal=1.0)
    assert Comparison(row, [1.0], [1.0], [], [SHARES], [THEIR_SHARES]).processor_met
    less = {**THEIR_SHARES, "storage": 4.9}
    assert not Comparison(row, [1.0], [1.0], [], [SHARES], [less]).processor_met
    assert not Comparison(row, [1.0], [1.0]).processor_met, "not measured"


def test_json_there_and_back_without_rows_that_are_gone() -> None:
    before = [comparison(), Comparison(COPIED, [1.0], [2.0], [0.9])]
    found = json.loads(json.dumps(measured(*before)))
    assert found["rows"][0]["ratio"] == {"median": 8.0, "smallest": 7.0, "largest": 9.0}
    assert (found["rows"][0]["goal"], found["rows"][0]["met"]) == (8, True)
    found["rows"].append({**found["rows"][0], "id": "gone/shm/-/1"})
    assert comparisons(found) == before


def test_the_page_has_a_line_and_its_notes_for_each_row() -> None:
    every = [Comparison(row, [10.0], [5.0], [8.0] if row.memcpy_goal else []) for row in ROWS]
    found = measured(*every)
    text = markdown(side_by_side.page_of(found), found)
    for each in ROWS:
        assert f"| {each.title} [" in text
        for note in each.notes:
            assert note in text
    assert "0 of 28 goals are met" in text
    assert "80% of memcpy (goal 80%)" in text
    assert "## Processor time" not in text, "not measured"
    assert "mooncake.png" in text


def test_the_terminal_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    show(side_by_side.page_of(measured(comparison())).parts)
    out = capsys.readouterr().out
    for cell in ("get again, leased, 4 KiB [1]", "8.00", "7.00 to 9.00", "1 of 1 goals are met"):
        assert cell in out
    assert "10.0 µs = 8 + 2 + 0" in out
    assert "15.0 µs = 5 + 5 + 5" in out


# --- growth ------------------------------------------------------------------------------------

CALM = {"longest_ms": 2.0, "p999_ms": 1.0, "p50_us": 50.0, "probes": 100}


def clients(*totals: float, slowest: float = 0.8) -> list[Found]:
    return [
        {"work": "get", "clients": 1 << number, "per_second": total, "slowest_part": slowest,
         "call_us": 10.0}
        for number, total in enumerate(totals)
    ]  # fmt: skip


def filled(
    objects: int, *, call_us: float = 100.0, bytes_each: float = 400.0, step_us: int = 5_000
) -> Found:
    return {
        "objects": objects, "bytes_per_object": bytes_each, "fill_per_second": 100_000,
        "call_us": {"exist 1": call_us}, "idle": CALM, "mixed": CALM, "evictions": [],
        "large": [], "longest_step_us": step_us,
    }  # fmt: skip


def chains(*searches: float) -> list[Found]:
    blocks = (16, 131_072)
    return [
        {"blocks": count, "search_us": us, "call_us": 50.0, "requests": 1}
        for count, us in zip(blocks, searches, strict=False)
    ]


def verdicts(**parts: Any) -> list[bool]:
    whole = {"clients": [], "master": [], "chains": [], **parts}
    return [goal.met for goal in growth_page.goals(whole)]


@pytest.mark.parametrize(
    ("totals", "met"),
    [((100, 150, 140, 136), True), ((100, 150, 134), False), ((100, 89), False), ((100, 90), True)],
)
def test_a_total_does_not_fall(totals: tuple[float, ...], met: bool) -> None:
    assert verdicts(clients=clients(*totals)) == [met, True]


def test_no_client_starves() -> None:
    assert verdicts(clients=clients(100, 100, slowest=0.49)) == [True, False]


@pytest.mark.parametrize(
    ("last", "met"),
    [
        (filled(10_000_000, call_us=200.0), [True, True, True, True]),
        (filled(10_000_000, call_us=201.0), [False, True, True, True]),
        (filled(10_000_000, bytes_each=801.0), [True, False, True, True]),
        (filled(10_000_000, step_us=10_000), [True, True, True, False]),
    ],
)
def test_a_master_stays_as_it_is(last: Found, met: list[bool]) -> None:
    assert verdicts(master=[filled(1_000_000), last]) == met


@pytest.mark.parametrize(("search_us", "met"), [(8.4, True), (8.6, False)])
def test_a_search_grows_with_the_logarithm(search_us: float, met: bool) -> None:
    found = {"clients": [], "master": [], "chains": chains(1.0, search_us)}
    [goal] = growth_page.goals(found)
    assert goal.met is met
    assert "4.2 times" in goal.what, "17 doublings instead of 4"


def test_parts_that_were_not_measured_are_not_judged_and_have_no_table() -> None:
    assert verdicts() == []
    assert verdicts(chains=chains(1.0)) == []
    found = {
        "machine": MACHINE, "load": [0.0, 0.0], "clients": clients(1, 2), "master": [],
        "chains": [],
    }  # fmt: skip
    text = markdown(growth_page.page_of(found), found)
    assert "Clients at once" in text
    assert "Chains" not in text


def test_chains_have_keys_of_their_own() -> None:
    keys = chain(1, 3) + chain(2, 3) + chain(1 << 42, 3)
    assert len(set(keys)) == 9
    assert {len(key) for key in keys} == {32}
    assert chain(1, 2) == chain(1, 3)[:2]
