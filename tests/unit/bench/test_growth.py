"""What is judged of growth, and how it is shown."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from bench import growth_report
from bench.growth_chains import Matched
from bench.growth_clients import Together
from bench.growth_master import Eviction, Filled, Large
from bench.growth_results import Goal, Growth
from kvstore.bench.virtual import Pauses, chain

MACHINE: dict[str, str | int] = {"cpu": "A", "cores": 2, "memory_gib": 8, "kernel": "6.1"}
CALM = Pauses(longest_ms=2.0, p999_ms=1.0, p50_us=50.0, probes=100)


def clients(*totals: float, slowest: float = 0.8) -> list[Together]:
    return [
        Together("get", 1 << number, total, slowest, 10.0) for number, total in enumerate(totals)
    ]


def filled(
    objects: int, *, call_us: float = 100.0, bytes_each: float = 400.0, step_us: int = 5_000
) -> Filled:
    eviction = Eviction("64 new objects at a time", 1000, 0.5, 400.0, CALM)
    large = Large("remove of 16,384 keys", 0.05, CALM)
    return Filled(
        objects, bytes_each, 100_000, {"exist 1": call_us}, CALM, CALM, [eviction], [large], step_us
    )


def verdicts(growth: Growth) -> list[bool]:
    return [goal.met for goal in growth.goals()]


@pytest.mark.parametrize(
    ("totals", "met"),
    [((100, 150, 140, 136), True), ((100, 150, 134), False), ((100, 89), False), ((100, 90), True)],
)
def test_a_total_does_not_fall(totals: tuple[float, ...], met: bool) -> None:
    assert verdicts(Growth(clients=clients(*totals))) == [met, True]


def test_no_client_starves() -> None:
    assert verdicts(Growth(clients=clients(100, 100, slowest=0.49))) == [True, False]


@pytest.mark.parametrize(
    ("last", "met"),
    [
        (filled(10_000_000, call_us=200.0), [True, True, True, True]),
        (filled(10_000_000, call_us=201.0), [False, True, True, True]),
        (filled(10_000_000, bytes_each=801.0), [True, False, True, True]),
        (filled(10_000_000, step_us=10_000), [True, True, True, False]),
    ],
)
def test_a_master_stays_as_it_is(last: Filled, met: list[bool]) -> None:
    assert verdicts(Growth(master=[filled(1_000_000), last])) == met


@pytest.mark.parametrize(("search_us", "met"), [(8.4, True), (8.6, False)])
def test_a_search_grows_with_the_logarithm(search_us: float, met: bool) -> None:
    rows = [Matched(16, 1.0, 50.0, 1), Matched(131_072, search_us, 9_000.0, 8)]
    [goal] = Growth(chains=rows).goals()
    assert goal.met is met
    assert "4.2 times" in goal.what, "17 doublings instead of 4"


def test_nothing_is_judged_that_was_not_measured() -> None:
    assert Growth().goals() == []
    assert Growth(chains=[Matched(16, 1.0, 50.0, 1)]).goals() == []


def whole() -> Growth:
    return Growth(
        clients=clients(100, 120),
        master=[filled(10_000), filled(1_000_000)],
        chains=[Matched(16, 1.0, 50.0, 1), Matched(131_072, 4.0, 9_000.0, 8)],
        load=(0.25, 0.5),
        machine=MACHINE,
    )


def test_json_there_and_back() -> None:
    before = whole()
    after = Growth.from_json(json.loads(json.dumps(before.as_json())))
    assert after == before
    assert growth_report.as_markdown(after) == growth_report.as_markdown(before)


def test_the_page_says_everything(capsys: pytest.CaptureFixture[str]) -> None:
    page = growth_report.as_markdown(whole(), picture="growth.png")
    growth_report.show(whole(), Console(width=200))
    out = capsys.readouterr().out
    for title in ("Clients at once", "A master with many", "Pauses and", "Chains", "Goals"):
        assert f"## {title}" in page
        assert title in out
    assert "2 cores" in page
    assert "1,000 in 0.50 s" in page
    assert "growth.png" in page
    for goal in whole().goals():
        assert isinstance(goal, Goal)
        assert goal.what in page


def test_parts_that_were_not_measured_have_no_table() -> None:
    page = growth_report.as_markdown(Growth(clients=clients(1, 2), machine=MACHINE))
    assert "Clients at once" in page
    assert "Chains" not in page


def test_chains_have_keys_of_their_own() -> None:
    keys = chain(1, 3) + chain(2, 3) + chain(1 << 42, 3)
    assert len(set(keys)) == 9
    assert {len(key) for key in keys} == {32}
    assert chain(1, 2) == chain(1, 3)[:2]
