"""What the benchmark computes from what it measured."""

from __future__ import annotations

import pytest

from bench import vllm_miss
from bench.page import ResultsTable
from bench.vllm import as_json, comparisons, find_problems, parts_of
from bench.vllm_rounds import (
    HIT,
    KINDS,
    MANNERS,
    MISS,
    Measured,
    RoundsPlan,
    Samples,
    p90,
)
from kvstore.demo_vllm.scenario import full_blocks, memory_mib, prompt
from kvstore.demo_vllm.tiny import BLOCK_TOKENS, TEXT_TOKENS

PLAN = RoundsPlan(prompts=2, prompt_tokens=300, rounds=2, at_once=4, new_tokens=1, seed=0)


def measured(*systems: str) -> Measured:
    """The first system takes 100 ms and 1 s, the second 200 ms and 2 s, and so on."""
    samples = {
        name: {
            kind: Samples(
                first_token_ms=[[100.0 * number] * 2] * 2,
                seconds=[1.0 * number] * 2,
                token_ms=[[10.0 * number, 30.0 * number]] * 2,
                cached_tokens=[6 * 256 if kind == HIT else 0] * 2,
            )
            for kind in KINDS
        }
        for number, name in enumerate(systems, 1)
    }
    return Measured(plan=PLAN, systems=list(systems), samples=samples)


def test_every_round_and_phase_has_prompts_of_its_own() -> None:
    rounds = range(PLAN.rounds + 1)
    prompts = [
        tuple(ids) for number in rounds for manner in MANNERS
        for ids in PLAN.ids(number, manner)
    ]  # fmt: skip
    assert len(prompts) == len(set(prompts)) == PLAN.prompts_in_all
    assert len({ids[:BLOCK_TOKENS] for ids in prompts}) == len(prompts), "no block in common"
    running = {tuple(PLAN.running_ids(number, kind)) for number in rounds for kind in KINDS}
    assert len(running) == len(rounds) * len(KINDS)


def test_prompts_are_text_and_the_same_every_time() -> None:
    ids = prompt(1, 2, 500)
    assert ids == prompt(1, 2, 500)
    assert len(ids) == 500
    assert set(ids) <= set(TEXT_TOKENS)


@pytest.mark.parametrize(
    ("tokens", "blocks"), [(BLOCK_TOKENS, 0), (BLOCK_TOKENS + 1, 1), (1500, 11), (1408, 10)]
)
def test_a_token_is_left_to_compute(tokens: int, blocks: int) -> None:
    assert full_blocks(tokens) == blocks


def test_a_node_has_room_for_every_block() -> None:
    assert memory_mib(5, 1500) >= 5 * 11 * 2, "a block is 2 MiB"


def test_a_ratio_for_each_round() -> None:
    ratios = measured("none", "kvstore").ratios("kvstore", "none", MISS)
    assert {name: each.median for name, each in ratios.items()} == {
        "first_token": 2.0, "requests_per_second": 0.5, "per_token": 2.0,
    }  # fmt: skip


def test_the_running_request_has_a_mean_and_a_longest_pause_in_each_round() -> None:
    found = measured("none")
    assert found.per_token_ms("none", HIT) == [20.0, 20.0]
    assert found.longest_pause_ms("none", HIT) == [30.0, 30.0]


def test_what_was_found_of_what_could_be() -> None:
    found = measured("none", "kvstore")
    assert found.found("kvstore", HIT) == 1
    assert found.found("kvstore", MISS) == 0
    assert find_problems(as_json(found)) == []
    found.samples["kvstore"][HIT].cached_tokens[0] = 0
    assert find_problems(as_json(found)) == ["kvstore found 50.0% on a hit"]


def test_ours_is_compared_with_theirs_and_each_with_none() -> None:
    assert comparisons(measured("none", "kvstore", "mooncake")) == [
        (HIT, "kvstore", "mooncake"),
        (HIT, "kvstore", "none"),
        (HIT, "mooncake", "none"),
        (MISS, "kvstore", "none"),
        (MISS, "mooncake", "none"),
    ]
    assert comparisons(measured("kvstore")) == []


def test_the_report_has_a_row_for_each_system_and_kind() -> None:
    report = as_json(measured("none", "kvstore"))
    assert [(row["system"], row["kind"]) for row in report["rows"]] == [
        ("none", MISS), ("none", HIT), ("kvstore", MISS), ("kvstore", HIT),
    ]  # fmt: skip
    assert report["rows"][0]["requests_per_second"]["median"] == 2
    assert report["rows"][0]["prompt_tokens_per_second"]["median"] == 600
    assert len(report["ratios"]) == 2
    table = parts_of(report)[2]
    assert isinstance(table, ResultsTable)
    assert table.lines[0][:5] == (MISS, "none", "100.0 ms", "100.0 ms", "2.00")


def test_p90() -> None:
    values = [float(number) for number in range(1, 11)]
    assert p90(values) == 9
    assert p90([3.0]) == 3


def test_a_cost_is_a_ratio_within_a_round() -> None:
    seconds = {"with the store": [1.0, 3.3], "without": [1.0, 3.0], "without again": [2.0, 3.0]}
    plan = {"rounds": 2, "prompts": 3, "prompt_tokens": 300}
    told, table = vllm_miss.parts_of({"plan": plan, "seconds": seconds})
    assert told == "2 rounds of 3 prompts of 300 tokens, all to one engine"
    assert isinstance(table, ResultsTable)
    assert [row[2] for row in table.lines] == [
        "1.0500 (1.000 to 1.100)", "1.0000 (1.000 to 1.000)", "1.5000 (1.000 to 2.000)"
    ]  # fmt: skip


def test_where_a_median_lies() -> None:
    """Between the 41st and the 61st of 100 values, and between all of a few."""
    assert vllm_miss.within([float(n) for n in range(99, -1, -1)]) == (40.0, 60.0)
    assert vllm_miss.within([2.0, 1.0, 3.0]) == (1.0, 3.0)
    assert vllm_miss.within([1.0]) == (1.0, 1.0)
