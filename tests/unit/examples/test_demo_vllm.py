"""What ``make demo-vllm`` prints, of servers that are not there."""

from __future__ import annotations

import json
import re
import signal
from typing import Any, Self

import pytest
from click.testing import CliRunner

from examples import demo_vllm as demo
from examples.demo_vllm import LLAMA, QWEN, Model
from examples.fleet import Completion
from kvstore.bench.processes import ChildError

TOKENS = 600
PROMPTS = 2
BLOCKS = {LLAMA.name: 4, QWEN.name: 2}


class Fleet:
    """Answers as a prefiller and a decoder that share a store."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cached_tokens = 4 * 128
        self.other_tokens: list[int] = []
        """Where not empty: what is generated with the prompt from the store."""
        self.started: list[tuple[str, int]] = []
        """The models of the acts, and for how many prompts."""
        self.handlers: dict[int, Any] = {}
        monkeypatch.setattr(signal, "signal", self.handlers.__setitem__)
        monkeypatch.setattr(demo, "Children", lambda *args, **named: FakeChildren())
        monkeypatch.setattr(demo, "start", self.start)
        monkeypatch.setattr(demo, "forget", lambda address: None)
        monkeypatch.setattr(demo, "complete", self.complete)
        counted = {"loaded_requests": 11.0, "hit_tokens": 5632.0, "hit_states": 7.0}
        monkeypatch.setattr(demo, "counters", lambda address: counted)

    def start(
        self, children: object, console: object, model: Model, prompts: int, *sizes: int
    ) -> demo.RunningFleet:
        self.started.append((model.name, prompts))
        return demo.RunningFleet(model, "proxy", "decoder")

    def complete(
        self, address: str, ids: list[int], tokens: int, *, params: object = None
    ) -> Completion:
        computed = list(range(tokens))
        if params == {"no_load": True}:
            return Completion(tokens=computed, cached_tokens=0, first_token_ms=80.0)
        found = self.other_tokens or computed
        return Completion(tokens=found, cached_tokens=self.cached_tokens, first_token_ms=20.0)


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


def test_a_row_for_each_prompt_of_both_models_and_what_it_comes_to(fleet: Fleet) -> None:
    status, lines = output()
    assert status == 0
    assert fleet.started == [(name, PROMPTS + 1) for name in BLOCKS], "one more, to warm up"
    table = "\n".join(lines)
    for name, blocks in BLOCKS.items():
        assert f"{name}: time to first token" in table
        for number in range(1, PROMPTS + 1):
            row = (
                rf"│ {number} │ +{TOKENS} │ +{blocks} of {blocks} │ +yes │ +20 ms │ +80 ms │ +20 ms"
            )
            assert re.search(row, table), table
    assert "11 requests that loaded 5632 tokens\nand 7 states" in table
    said = "answers identical, 1024 of 1200 prompt tokens found, time to first token 80 ms -> 20 ms"
    assert lines[-1] == f"demo: Llama: {said} (4.0x); Qwen3-Next: {said} (4.0x)"


@pytest.mark.parametrize("model", [LLAMA, QWEN], ids=lambda model: model.kind)
def test_one_model_alone(fleet: Fleet, model: Model) -> None:
    status, lines = output(f"--kind={model.kind}")
    assert status == 0
    assert fleet.started == [(model.name, PROMPTS + 1)]
    assert re.fullmatch(rf"demo: {model.name}: answers [^;]*", lines[-1])


@pytest.mark.usefixtures("fleet")
def test_one_line_of_json() -> None:
    status, lines = output("--json")
    (line,) = lines
    report = json.loads(line)
    assert (status, report["ok"]) == (0, True)
    assert [(each["model"], each["blocks_found"]) for each in report["prompts"]] == [
        (name, blocks) for name, blocks in BLOCKS.items() for _ in range(PROMPTS)
    ]


def test_blocks_that_were_not_found_fail_it(fleet: Fleet) -> None:
    fleet.cached_tokens = 3 * 128
    status, lines = output()
    assert status == 1
    found = {LLAMA.name: "3 of 4", QWEN.name: "1 of 2"}
    said = [
        f"{name} prompt {number}: {blocks} blocks found"
        for name, blocks in found.items()
        for number in (1, 2)
    ]
    assert lines[-1] == f"demo: FAILED: {', '.join(said)}"


def test_other_tokens_fail_it(fleet: Fleet) -> None:
    fleet.other_tokens = [7] * 16
    status, lines = output("--kind=plain")
    assert status == 1
    assert lines[-1] == "demo: FAILED: Llama prompt 1: tokens differ, Llama prompt 2: tokens differ"
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
    ends = dict.fromkeys((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), signal.default_int_handler)
    assert fleet.handlers == ends
