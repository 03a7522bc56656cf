"""The planner: what it reads, that it replays on the master's own state, and what it prints."""

from __future__ import annotations

import gzip
import json
import os
import random
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvstore.calls import HintAction
from kvstore.cli.main import cli
from kvstore.errors import InternalError, InvalidArgumentError
from kvstore.master.state.eviction import LruPolicy
from kvstore.planner.hint_model import HintModel
from kvstore.planner.plan import BEST, Plan, knee_of, run_plan
from kvstore.planner.replay import Replay, best_hits, next_uses_of
from kvstore.planner.traces import Trace, load_trace

SEED = 11


def conversations(path: Path, count: int = 60, turns: int = 5) -> Path:
    """Chats that take turns at random; each turn is one full block longer, and half ends early."""
    dice = random.Random(SEED)
    left = {chat: dice.choice([1, turns]) for chat in range(count)}
    said: dict[int, list[int]] = {chat: [0] for chat in left}
    rows: list[dict[str, Any]] = []
    number = 0
    while left:
        chat = dice.choice(list(left)[:12])
        said[chat] += range(number := number + 1_000, number + 3)
        partial = number + 500
        ids = [*said[chat], partial]
        rows.append({"timestamp": len(rows) * 900, "input_length": 512 * len(said[chat]) + 9,
                     "hash_ids": ids})  # fmt: skip
        left[chat] -= 1
        if not left[chat]:
            del left[chat]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return load_trace(conversations(tmp_path_factory.mktemp("traces") / "chats.jsonl"))


def test_both_formats_are_read_and_the_block_that_is_not_full_is_no_tip(tmp_path: Path) -> None:
    mooncake = tmp_path / "m.jsonl.gz"
    rows: list[dict[str, Any]] = [
        {"timestamp": 5, "input_length": 1100, "hash_ids": [1, 2, 3]},
        {"timestamp": 9, "input_length": 1024, "hash_ids": [1, 9]},
        {"timestamp": 9, "input_length": 512, "hash_ids": [9]},
    ]
    mooncake.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    read = load_trace(mooncake)
    assert read.chains == [[0, 1, 2], [0, 3], [4]], "a block below another one is another block"
    assert read.tips == [1, 1, 0]
    recorded = tmp_path / "r.jsonl"
    recorded.write_text('{"t": 5, "n": ["a", "b"], "k": ["0a", "0b"], "z": 100}\n')
    read = load_trace(recorded)
    assert (read.chains, read.tips, read.namespaces) == ([[0, 1]], [1], ["a"])
    assert read.block_bytes == 200, "of both namespaces"


@pytest.mark.parametrize("text", ["", "{}\n", "[1]\n", '{"hash_ids": 5, "timestamp": 1}\n', "x\n"])
def test_what_is_no_trace_is_refused_with_its_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(InvalidArgumentError, match=r"bad\.jsonl"):
        load_trace(path)


def test_memory_for_all_finds_all_that_comes_again(trace: Trace) -> None:
    again = trace.accesses - trace.blocks
    assert Replay(trace, trace.blocks, LruPolicy).run() == again
    uses = next_uses_of(trace)
    assert best_hits(trace, uses, trace.blocks) == again
    assert best_hits(trace, uses, 1) <= best_hits(trace, uses, 30) <= again


def test_hints_help_and_lies_cost_nothing(trace: Trace) -> None:
    def hits(knowledge: Any, right: float = 1.0, wrong: float = 0.0) -> int:
        hints = HintModel(knowledge, right, wrong)
        return Replay(trace, 40, LruPolicy, hints, next_uses=uses).run()

    uses = next_uses_of(trace)

    plain = hits("")
    assert hits("goes on") > 1.2 * plain
    assert hits("over") > 1.1 * plain
    assert hits("all") >= 0.98 * plain
    assert best_hits(trace, uses, 40) >= hits("goes on")


def test_recorded_hints_are_replayed_when_they_were_given(tmp_path: Path) -> None:
    path = tmp_path / "recorded.jsonl"
    rows: list[dict[str, Any]] = [{"t": 0, "n": ["a"], "k": ["k0", "k1"], "z": 100}]
    rows.append({"t": 10, "n": ["a"], "p": "k1", "k": ["made"]})
    rows.append({"t": 20, "n": ["a"], "h": [["made", HintAction.RETAIN, 600_000], ["no", 1, 1]]})
    rows += [{"t": 2_000 * at, "n": ["a"], "k": [f"{at}-0", f"{at}-1"]} for at in range(1, 9)]
    rows.append({"t": 30_000, "n": ["a"], "k": ["k0", "k1"]})
    path.write_text("\n".join(map(json.dumps, rows)))
    trace = load_trace(path)
    assert trace.hints == {0: [(20, "a", 1, HintAction.RETAIN, 600_000)]}
    assert Replay(trace, 8, LruPolicy).run() == 0
    assert Replay(trace, 8, LruPolicy, HintModel("recorded")).run() == 2
    half = next(part for part in map(trace.sample, (0.3, 0.4, 0.5, 0.6)) if part.chains[0] == [0])
    assert half.hints == {0: [(20, "a", 0, HintAction.RETAIN, 600_000)]}, "its sampled ancestor"
    arguments = ["plan", str(path), "--memory", "800B..1600B"]
    shown = CliRunner().invoke(cli, arguments)
    assert "density, recorded" in shown.output


def test_a_sample_is_a_trace_and_finds_about_the_same(tmp_path: Path) -> None:
    large = load_trace(conversations(tmp_path / "large.jsonl", 1_000))
    whole, part = (
        run_plan(large, Plan([400 << 20], 1 << 20, ["lru"], rate=rate))[0].hits for rate in (1, 0.3)
    )
    assert part["lru"] == pytest.approx(whole["lru"], abs=0.05)
    assert part[BEST] == pytest.approx(whole[BEST], abs=0.05)


def test_auto_samples_only_what_a_sample_predicts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.planner.plan.SAMPLED_BLOCKS", 100)
    path = conversations(tmp_path / "chats.jsonl")
    arguments = ["--json", "plan", str(path), "--memory", "80MiB", "--block-bytes", "1MiB"]
    blocks = load_trace(path).blocks
    lru = ["--eviction", "lru"]
    for more, rate in ((lru, 100 / blocks), ([], 1), ([*lru, "--hints", "1"], 1)):
        shown = CliRunner().invoke(cli, [*arguments, "--sample", "auto", *more])
        assert json.loads(shown.output)["rate"] == rate


def test_the_command_prints_a_table_and_a_knee(tmp_path: Path) -> None:
    path = conversations(tmp_path / "chats.jsonl")
    arguments = ["plan", str(path), "--memory", "20MiB,40MiB..80MiB", "--block-bytes", "1MiB"]
    shown = CliRunner().invoke(cli, [*arguments, "--hints", "0.9"])
    assert shown.exit_code == 0, shown.output
    for text in ("20.0 MiB", "80.0 MiB", "density, goes on", "density, soon", "soon: only", "best",
                 "90 % of"):  # fmt: skip
        assert text in shown.output
    told = CliRunner().invoke(cli, ["--json", *arguments])
    rows = json.loads(told.output)["rows"]
    assert [row["blocks"] for row in rows] == [20, 40, 80]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--memory", "80MiB..20MiB"], "no range of sizes"),
        (["--memory", "20MiB", "--eviction", "fifo"], "no policy 'fifo'"),
        (["--memory", "20MiB", "--block-bytes", "1MiB", "--hints", "2"], "--hints is RIGHT"),
        (["--memory", "20MiB", "--block-bytes", "1MiB", "--sample", "0"], "--sample is auto"),
        (["--memory", "20MiB"], "give --block-bytes"),
        (["--memory", "20MiB", "--block-bytes", "1GiB"], "holds no block"),
    ],
)
def test_what_cannot_be_planned_is_refused(tmp_path: Path, arguments: list[str], text: str) -> None:
    path = conversations(tmp_path / "chats.jsonl", 3)
    shown = CliRunner().invoke(cli, ["plan", str(path), *arguments])
    assert shown.exit_code != 0
    assert text in shown.output or text in str(shown.exception)


def test_the_knee_is_the_first_size_with_nine_tenths_of_the_hits(trace: Trace) -> None:
    rows = run_plan(trace, Plan([20, 40, 80, 160], 1, ["lru"]))
    knee = knee_of(rows, "lru")
    assert knee.hits["lru"] >= 0.9 * rows[-1].hits["lru"]
    assert all(row.hits["lru"] < 0.9 * rows[-1].hits["lru"] for row in rows[: rows.index(knee)])


def die(_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_is_killed_ends_the_replay(
    trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.planner.plan._replay", die)
    with pytest.raises(InternalError, match="was killed"):
        run_plan(trace, Plan([20, 40], 1, ["lru"]))


def test_a_disk_finds_what_its_size_in_memory_would_find(trace: Trace, tmp_path: Path) -> None:
    lru = Plan([40 << 20], 1 << 20, ["lru"])
    [without] = run_plan(trace, lru)
    [row] = run_plan(trace, replace(lru, disk_bytes=400 << 20))
    [larger] = run_plan(trace, replace(lru, memory_bytes=[440 << 20]))
    assert row.hits["lru"] > 1.5 * without.hits["lru"]
    assert row.hits["lru"] >= 0.95 * larger.hits["lru"]
    assert row.writes_per_day["lru"] > 0
    path = conversations(tmp_path / "chats.jsonl")
    arguments = ["plan", str(path), "--memory", "40MiB", "--block-bytes", "1MiB"]
    shown = CliRunner().invoke(cli, [*arguments, "--disk", "400MiB", "--disk-writes-per-day", "9"])
    assert shown.exit_code == 0, shown.output
    assert "disks are overwritten" in shown.output
