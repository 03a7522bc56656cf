"""What ``make demo-vllm`` prints, of servers that are not there."""

from __future__ import annotations

import json
import re
import signal
from typing import Any, Self

import pytest
from click.testing import CliRunner

from kvstore.demo.processes import ChildError
from kvstore.demo_vllm import __main__ as demo
from kvstore.demo_vllm.requests import Completion

TOKENS = 600
BLOCKS = 4
PROMPTS = 2


class Fleet:
    """Answers as a prefiller and a decoder that share a store."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cached_tokens = BLOCKS * 128
        self.other_tokens: list[int] = []
        """Where not empty: what is generated with the prompt from the store."""
        self.handlers: dict[int, Any] = {}
        monkeypatch.setattr(signal, "signal", self.handlers.__setitem__)
        monkeypatch.setattr(demo, "Children", lambda *args, **named: FakeChildren())
        monkeypatch.setattr(demo, "start", lambda *args: demo.RunningFleet("proxy", "decoder"))
        monkeypatch.setattr(demo, "forget", lambda address: None)
        monkeypatch.setattr(demo, "complete", self.complete)
        counted = {"loaded_requests": 11.0, "hit_tokens": 5632.0}
        monkeypatch.setattr(demo, "counters", lambda address: counted)

    def complete(
        self, address: str, ids: list[int], tokens: int, *, params: object = None
    ) -> Completion:
        computed = list(range(tokens))
        if params == {"no_load": True}:
            return Completion(tokens=computed, cached_tokens=0, first_token_ms=80.0, total_ms=90.0)
        found = self.other_tokens or computed
        return Completion(
            tokens=found, cached_tokens=self.cached_tokens, first_token_ms=20.0, total_ms=30.0
        )


class FakeChildren:
    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Fleet:
    return Fleet(monkeypatch)


def output(*arguments: str) -> tuple[int, list[str]]:
    sizes = [f"--prompts={PROMPTS}", f"--prompt-tokens={TOKENS}"]
    result = CliRunner().invoke(demo.main, [*sizes, *arguments], env={"COLUMNS": "120"})
    return result.exit_code, result.stdout.splitlines()


@pytest.mark.usefixtures("fleet")
def test_a_row_for_each_prompt_and_what_it_comes_to() -> None:
    status, lines = output()
    assert status == 0
    table = "\n".join(lines)
    for number in range(1, PROMPTS + 1):
        row = rf"│ {number} │ +{TOKENS} │ +{BLOCKS} of {BLOCKS} │ +yes │ +20 ms │ +80 ms │ +20 ms │"
        assert re.search(row, table), table
    assert "11 requests that loaded 5632 tokens" in table
    assert lines[-1] == (
        f"demo: {PROMPTS} prompts, tokens identical, all {PROMPTS * BLOCKS} full blocks found,"
        " time to first token 80 ms -> 20 ms (4.0x)"
    )


@pytest.mark.usefixtures("fleet")
def test_one_line_of_json() -> None:
    status, lines = output("--json")
    (line,) = lines
    report = json.loads(line)
    assert (status, report["ok"]) == (0, True)
    assert [each["blocks_found"] for each in report["prompts"]] == [BLOCKS] * PROMPTS


def test_blocks_that_were_not_found_fail_it(fleet: Fleet) -> None:
    fleet.cached_tokens = 3 * 128
    status, lines = output()
    assert status == 1
    assert lines[-1] == (
        "demo: FAILED: prompt 1: 3 of 4 blocks found, prompt 2: 3 of 4 blocks found"
    )


def test_other_tokens_fail_it(fleet: Fleet) -> None:
    fleet.other_tokens = [7] * 16
    status, lines = output()
    assert status == 1
    assert lines[-1] == "demo: FAILED: prompt 1: tokens differ, prompt 2: tokens differ"
    assert "NO" in "\n".join(lines)


def test_what_did_not_start_is_named(monkeypatch: pytest.MonkeyPatch, fleet: Fleet) -> None:
    def fails(*args: object) -> demo.RunningFleet:
        raise ChildError("prefiller (pid 7) ended with status 1\nits last words")

    monkeypatch.setattr(demo, "start", fails)
    status, lines = output()
    assert status == 1
    assert lines[-1] == "demo: FAILED: prefiller (pid 7) ended with status 1"


def test_every_signal_that_ends_it_interrupts_it(
    monkeypatch: pytest.MonkeyPatch, fleet: Fleet
) -> None:
    def interrupted(*args: object) -> demo.RunningFleet:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "start", interrupted)
    assert output() == (130, ["demo: interrupted"])
    ends = dict.fromkeys((signal.SIGTERM, signal.SIGHUP), signal.default_int_handler)
    assert fleet.handlers == ends
