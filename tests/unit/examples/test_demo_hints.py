"""What ``make demo-hints`` sends and prints, of servers that are not there."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from examples import demo_hints as demo
from examples import fleet as fleets
from examples.demo_hints import AGENT_TOKENS, TURN_TOKENS, Turn, make_schedule
from examples.fleet import POSITIONS, Completion
from tests.unit.examples.test_demo_vllm import FakeChildren

SIZES = ("--agents=2", "--turns=3", "--pause=0.1")
FOUND = {True: 256, False: 128}
"""Tokens that an agent finds, with a hint and without."""


class Fleet:
    """Answers as an engine behind a proxy, at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[tuple[int, Mapping[str, str]]] = []
        server = SimpleNamespace(address="server")
        monkeypatch.setattr(demo, "Children", lambda *args, **named: FakeChildren())
        monkeypatch.setattr(demo, "require_modules", lambda *args: None)
        monkeypatch.setattr(demo, "make_model", lambda *args, **named: Path())
        monkeypatch.setattr(
            demo, "start_store", lambda *args, **named: SimpleNamespace(address=str)
        )
        monkeypatch.setattr(demo, "start_engine", lambda *args: server)
        monkeypatch.setattr(fleets, "engine_ready", lambda *args: None)
        monkeypatch.setattr(fleets, "start_proxy", lambda *args: server)
        monkeypatch.setattr(demo, "forget", lambda address: None)
        monkeypatch.setattr(demo, "complete", self.complete)
        self.is_better = True

    def complete(
        self, address: str, ids: list[int], tokens: int, *, headers: Mapping[str, str] | None = None
    ) -> Completion:
        if headers is not None:  # not the first request of an engine
            self.sent.append((len(ids), headers))
        cached = FOUND[bool(headers) and self.is_better]
        return Completion(tokens=[7], cached_tokens=cached, first_token_ms=len(ids) / 10)


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Fleet:
    return Fleet(monkeypatch)


def output(*arguments: str) -> tuple[int, list[str]]:
    result = CliRunner().invoke(demo.main, [*SIZES, *arguments], env={"COLUMNS": "120"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    return result.exit_code, result.stdout.splitlines()


def test_agents_wait_for_their_tools_and_chats_end() -> None:
    schedule = make_schedule(3, agents=2, turns=30, pause_s=4.0)
    assert schedule == sorted(make_schedule(3, agents=2, turns=30, pause_s=4.0))
    sessions: dict[str, list[Turn]] = {}
    for turn in schedule:
        sessions.setdefault(turn.session, []).append(turn)
        assert turn.prompt_tokens < POSITIONS
    agents = [turns for name, turns in sessions.items() if name.startswith("agent-")]
    chats = [turns for name, turns in sessions.items() if name.startswith("chat-")]
    assert [len(turns) for turns in agents] == [30, 30]
    assert len(chats) > 60
    for turns in agents + chats:
        assert turns == sorted(turns, key=lambda turn: turn.prompt_tokens)
        assert turns[-1].hint == "end"
        assert {turn.hint for turn in turns[:-1]} <= {"tool_wait=4" if turns[0].is_agent else ""}
    assert agents[0][29].prompt_tokens == AGENT_TOKENS + 29 * TURN_TOKENS


def test_the_same_requests_with_and_without_hints(fleet: Fleet) -> None:
    status, lines = output()
    assert status == 0
    half = len(fleet.sent) // 2
    assert [tokens for tokens, _ in fleet.sent[:half]] == [
        tokens for tokens, _ in fleet.sent[half:]
    ]
    assert not any(headers for _, headers in fleet.sent[:half])
    agents = [given for _, given in fleet.sent[half:] if given["X-KV-Session"] == "agent-0"]
    assert [given["X-KV-Hint"] for given in agents] == ["tool_wait=0.1", "tool_wait=0.1", "end"]
    assert re.fullmatch(
        r"demo: agents found 42 % -> 84 % of their prompt tokens, time to first token 30 ms -> 30"
        r" ms",
        lines[-1],
    )
    assert "with hints" in "\n".join(lines)


def test_hints_that_bring_nothing_fail_it(fleet: Fleet) -> None:
    fleet.is_better = False
    status, lines = output("--json")
    report: dict[str, Any] = json.loads(lines[-1])
    assert (status, report["ok"], len(lines)) == (1, False, 1)
    assert report["summary"].startswith("demo: FAILED: agents found 42 % -> 42 %")
    assert report["results"]["with hints"]["agents"]["p50_ms"] == 30.4
