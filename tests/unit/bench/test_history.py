"""The last runs of a benchmark: what is kept of them, and what a page says about them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench import history, side_by_side
from bench.__main__ import main
from bench.page import Found, ResultsTable
from bench.rows import ROWS, chosen
from bench.side_by_side import Comparison

DOCS = Path(__file__).parents[3] / "docs"
PUBLISHED = DOCS / "benchmarks"
[AGAIN] = chosen(["get_again"])
[PUT_ONE] = chosen(["put/tcp/4KiB/1"])


def found(cpu: str = "A", *, again_us: float = 90.0, put_us: float = 20.0) -> Found:
    rows = [Comparison(AGAIN, [10.0], [again_us]), Comparison(PUT_ONE, [10.0], [put_us])]
    return {
        "machine": {"cpu": cpu, "cores": 2, "memory_gib": 8, "kernel": "6.1",
                    "commit": f"{cpu}{again_us:g}", "date": "2026-01-02"},
        "load": [0.25, 0.5], "rounds": 1, "seconds": 0.5, "pool_bytes": 1 << 30,
        "idle_percent": {}, "rows": [each.as_json() for each in rows],
    }  # fmt: skip


def run(measured: Found) -> Found:
    return history.entry(measured, side_by_side.comparisons(measured))


def test_a_run_is_its_machine_its_goals_and_its_medians() -> None:
    assert run(found(put_us=5.0)) == {
        "machine": {"cpu": "A", "cores": 2, "commit": "A90", "date": "2026-01-02"},
        "load": [0.25, 0.5], "rounds": 1, "met": 1,
        "rows": {
            AGAIN.id: {"ours_us": 10.0, "theirs_us": 90.0, "ratio": 9.0},
            PUT_ONE.id: {"ours_us": 10.0, "theirs_us": 5.0, "ratio": 0.5},
        },
    }  # fmt: skip


def test_runs_of_other_pages_stay(tmp_path: Path) -> None:
    one, other = run(found("A")), run(found("B"))
    assert history.read(tmp_path, "mooncake") == []
    history.write(tmp_path, "mooncake", [])
    assert not (tmp_path / history.FILE).exists(), "nothing to say"
    history.write(tmp_path, "mooncake", [one])
    history.write(tmp_path, "redis", [other])
    assert history.read(tmp_path, "mooncake") == [one]
    assert history.read(tmp_path, "redis") == [other]


def test_one_run_has_no_range() -> None:
    assert history.parts([run(found())], [AGAIN]) == []


def test_a_page_says_the_range_on_each_kind_of_machine() -> None:
    runs = [run(found("A")), run(found("B", again_us=70.0)), run(found("B", put_us=5.0))]
    assert history.in_short(runs) == (
        "0.50 to 9.00; faster in 1 to 2 of 2 rows, 1 to 2 of 2 goals met;"
        " 3 runs on 2 kinds of machine"
    )
    _, _, listed, _, ranges = history.parts(runs, [AGAIN, PUT_ONE])
    assert isinstance(listed, ResultsTable)
    assert [(line[1], line[5], line[6]) for line in listed.lines] == [
        ("B90", "1 of 2", "1 of 2"), ("B70", "2 of 2", "1 of 2"), ("A90", "2 of 2", "2 of 2"),
    ], "the newest first"  # fmt: skip
    assert isinstance(ranges, ResultsTable)
    assert list(ranges.columns[2:]) == ["B, 2 cores: 2 runs", "A, 2 cores: 1 run"]
    assert [line[2:] for line in ranges.lines] == [
        ("7.00 to 9.00", "9.00"), ("0.50 to 2.00", "2.00"),
    ]  # fmt: skip


def test_a_row_that_is_new_has_no_range_on_old_machines() -> None:
    old = run(found("A"))
    del old["rows"][PUT_ONE.id]
    *_, ranges = history.parts([old, run(found("B"))], [PUT_ONE])
    assert isinstance(ranges, ResultsTable)
    assert ranges.lines[0][2:] == ("2.00", "")


def measure(monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str) -> list[Found]:
    """The runs that are known after a run of the command, which measures nothing."""
    rows = [Comparison(row, [10.0], [20.0]).as_json() for row in ROWS]
    monkeypatch.setattr("bench.mooncake.missing", lambda: None)
    monkeypatch.setattr("bench.page.measured", lambda *_: {**found(), "rows": rows})
    monkeypatch.setattr("bench.picture.draw_comparison", lambda *_: None)
    result = CliRunner().invoke(main, ["--out", str(folder), *arguments])
    assert result.exit_code == 0, result.output
    return history.read(folder, "mooncake")


@pytest.mark.slow  # it draws, and matplotlib is in no quick environment
def test_each_whole_run_is_kept_and_the_oldest_are_dropped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert measure(monkeypatch, tmp_path, "--quick") == [], "short"
    assert measure(monkeypatch, tmp_path, "--rows", "exist") == [], "some rows"
    history.write(tmp_path, "mooncake", [run(found(again_us=us)) for us in range(1, 21)])
    runs = measure(monkeypatch, tmp_path)
    assert len(runs) == history.RUNS_MAX
    assert runs[0] == run(found(again_us=2)), "the oldest is dropped"
    assert len(runs[-1]["rows"]) == len(ROWS)
    assert "20 runs on 1 kind of machine" in (tmp_path / "mooncake.md").read_text()


@pytest.mark.slow  # it draws, and matplotlib is in no quick environment
def test_drawing_again_adds_no_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("bench.picture.draw_comparison", lambda *_: None)
    (tmp_path / "found.json").write_text(json.dumps(found()))
    history.write(tmp_path, "mooncake", [run(found("A")), run(found("B"))])
    out = tmp_path / "out"
    again = ["--redraw", str(tmp_path / "found.json"), "--out", str(out)]
    result = CliRunner().invoke(main, again)
    assert result.exit_code == 0, result.output
    assert len(history.read(out, "mooncake")) == 2
    assert "## Over the last runs" in (out / "mooncake.md").read_text()


@pytest.mark.parametrize("name", json.loads((PUBLISHED / history.FILE).read_text()))
def test_the_newest_run_is_that_of_the_page(name: str) -> None:
    measured = json.loads((PUBLISHED / f"{name}.json").read_text())
    assert run(measured) == history.read(PUBLISHED, name)[-1]
