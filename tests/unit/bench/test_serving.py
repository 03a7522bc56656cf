"""What the serving benchmark computes from what it measured."""

from __future__ import annotations

import pytest

from bench import agentic
from bench.page import Found, ResultsTable
from bench.serving import QUICK, ServingPlan
from bench.serving_page import FIGURES, SHAPES, comparisons, find_problems, page_of
from bench.vllm_systems import KVSTORE, MOONCAKE, NONE
from kvstore.bench.timing import Spread
from kvstore.demo_vllm.servers import POSITIONS
from kvstore.demo_vllm.tiny import BLOCK_TOKENS

PLAN: Found = {"prompts": 6, "rounds": 2}
MODEL: Found = {
    "hidden": 128, "layers": 2, "cache_blocks": 40, "block_tokens": 128, "new_tokens": 16,
    "prefixes": 2,
}  # fmt: skip


def measured(cached_tokens: int = 500, differing: int = 0) -> Found:
    """Without a store each figure is 1 and 3 in two rounds, with one 2 and 9."""
    rows = [
        {
            "shape": shape, "tokens": 512, "rate": 2.0, "system": name,
            "runs": [dict.fromkeys(FIGURES, value) for value in values],
        }
        for shape in SHAPES
        for name, values in ((NONE, (1.0, 3.0)), (KVSTORE, (2.0, 9.0)))
    ]  # fmt: skip
    turn = {"first_token_ms": [10.0, 30.0, 20.0], "prompt_tokens": 1000}
    sessions = {
        "turns": 1, "sessions": 3, "possible": 0.8, "differing": differing,
        "systems": {
            NONE: [turn | {"cached_tokens": 0}], KVSTORE: [turn | {"cached_tokens": cached_tokens}]
        },
    }  # fmt: skip
    return {
        "machine": {"cores": 2}, "plan": PLAN, "model": MODEL, "rows": rows, "sessions": sessions
    }  # fmt: skip


def test_the_tables_have_medians_and_ratios_within_a_round() -> None:
    tables = [part for part in page_of(measured()).parts if isinstance(part, ResultsTable)]
    figures, ratios, *_, sessions, of_turns, behind = tables
    assert [line[2] for line in figures.lines] == [NONE, KVSTORE]
    assert figures.columns[3:6] == ("requests", "duration, s", "req/s")
    assert figures.lines[1][3:6] == ("6", "5.50", "5.50")
    assert figures.lines[1][8] == "6 / 6 / 6"
    assert ratios.lines == [("512", "2/s", f"{KVSTORE} / {NONE}", *["2.50 (2.00 to 3.00)"] * 4)]
    assert sessions.lines[1] == (KVSTORE, "50.0%", "20", "30")
    assert behind.lines[2] == (SHAPES[0], "512", "2/s", NONE, "median TPOT", "2.50 (2.00 to 3.00)")
    assert len(behind.lines) == len(SHAPES) * 3, "more req/s is better"
    assert of_turns.lines == [(f"{KVSTORE} / {NONE}", "1.00 (1.00 to 1.00)")]


def test_ours_is_compared_with_theirs_and_each_with_none() -> None:
    assert comparisons([NONE, KVSTORE, MOONCAKE]) == [
        (KVSTORE, MOONCAKE), (KVSTORE, NONE), (MOONCAKE, NONE)
    ]  # fmt: skip
    assert comparisons([MOONCAKE]) == []


def test_numbers_are_invalid_where_nothing_was_found_or_answers_differ() -> None:
    assert find_problems(measured()) == []
    assert find_problems(measured(cached_tokens=0)) == [f"{KVSTORE} found nothing in the sessions"]
    assert find_problems(measured(differing=2)) == ["2 turns differ between systems"]


@pytest.mark.parametrize("plan", [ServingPlan(), QUICK])
def test_a_session_fits_into_a_prompt_and_changes_engines(plan: ServingPlan) -> None:
    turns = plan.turns * (agentic.SAID + agentic.TOOL)
    assert agentic.COMMON + agentic.FIRST + turns <= POSITIONS
    assert plan.sessions % 2


def test_the_workload_keeps_its_proportions() -> None:
    published = (20_000, 10_000, 2_048, 900)
    scales = [theirs / ours for theirs, ours in zip(published, agentic.TOKENS, strict=True)]
    assert max(scales) / min(scales) < 1.03


def test_what_can_be_found_of_two_sessions_of_two_turns() -> None:
    """The second session finds two blocks of the common part; each second turn the four of its
    first prompt and of the answer, of which the last token was not computed."""
    assert 510 < 4 * BLOCK_TOKENS <= 510 + 15 - 1
    blocks = 2 + 2 * 4
    assert agentic._possible(2, 2) == pytest.approx(blocks * BLOCK_TOKENS / (2 * (510 + 560)))


def test_every_round_has_every_kind_after_a_short_one() -> None:
    plan = ServingPlan(rounds=2, tokens=(100, 200), rates=(1.0,))
    rounds = [number for number, _ in plan.every]
    assert rounds == [0] * 2 + [1] * 4 + [2] * 4
    assert {kind.tokens for number, kind in plan.every if not number} == {200}


def test_ratio_of_turns() -> None:
    above, below = ([{"first_token_ms": each}] for each in ([1.0, 2.0, 9.0], [4.0, 4.0, 4.0]))
    assert agentic.ratio(above, below) == Spread(0.5, 0.5, 0.5)
