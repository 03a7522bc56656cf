"""``make bench-serving`` on two running engines: a row of each shape, and the sessions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import serving, serving_page
from bench.serving import ServingPlan
from bench.vllm_systems import KVSTORE, System
from kvstore.demo.processes import Children
from kvstore.demo_vllm import servers
from tests.e2e.engines.fleet import Fleet
from tests.e2e.engines.preloaded import Preloaded
from tests.support.cluster import Cluster

PLAN = ServingPlan(rounds=1, prompts=2, tokens=(300,), rates=(8.0,), sessions=1, turns=3)


@pytest.fixture
def system(preloaded: Preloaded, store: Cluster, llama: Path, tmp_path: Path) -> Iterator[System]:
    fleet = Fleet(preloaded, llama, store.address, tmp_path)
    engines = [fleet.engine("kv_both") for _ in range(2)]
    for engine in engines:
        engine.ready()
    yield System(KVSTORE, [engine.address for engine in engines], store.address)
    fleet.close()


def test_two_engines_are_measured_by_the_guides_tool_and_by_sessions(
    system: System, llama: Path
) -> None:
    with Children(servers.environment()) as children:
        found = serving.measure(children, [system], llama, PLAN, lambda what, steps: None)
    assert [(row["shape"], len(row["runs"])) for row in found["rows"]] == [
        (shape, 1) for shape in serving_page.SHAPES
    ]
    for [run] in [row["runs"] for row in found["rows"]]:
        assert set(run) == set(serving_page.FIGURES)
        assert run["completed"] == PLAN.prompts
        assert 0 < run["median_ttft_ms"] <= run["p99_ttft_ms"] < 1e3 * run["duration"]
    assert serving_page.find_problems(found) == []
    # Each turn was asked of the engine that had not computed the one before. The fourth block of
    # the first turn ends with tokens that were generated.
    turns = found["sessions"]["systems"][KVSTORE]
    assert [turn["cached_tokens"] for turn in turns] == [0, 512, 512]
