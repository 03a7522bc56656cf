"""What ``make demo-disk`` sends and prints, of servers that are not there."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from examples import demo_disk as demo
from examples import fleet as fleets
from examples.fleet import Completion
from tests.unit.examples.test_demo_vllm import FakeChildren

SIZES = ("--prompts=12", "--prompt-tokens=600")
BLOCKS = 4
"""Full blocks of a prompt."""


class Fleet:
    """Answers as two engines whose store has a node that is killed and started again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, directory: Any) -> None:
        self.nodes: list[list[str]] = []
        """The flags of each start."""
        self.killed = 0
        self.other_tokens: list[int] = []

        children: Any = FakeChildren()
        children.directory = directory
        children.start, children.kill = self.start, self.kill
        children.ready = lambda *args: SimpleNamespace(groups=lambda: ("127.0.0.1:1",))
        children_type: Any = type("Started", (FakeChildren,), {"__enter__": lambda _: children})
        monkeypatch.setattr(demo, "Children", lambda *args: children_type())
        monkeypatch.setattr(demo, "require_modules", lambda *args: None)
        monkeypatch.setattr(demo, "make_model", lambda *args, **named: directory)
        for name in ("wait_until_written", "wait_until_joined", "forget"):
            monkeypatch.setattr(demo, name, lambda address: None)
        engine = SimpleNamespace
        monkeypatch.setattr(fleets, "start_engine", lambda _, name, *more: engine(address=name))
        monkeypatch.setattr(fleets, "engine_ready", lambda *args: None)
        monkeypatch.setattr(demo, "complete", self.complete)

    def start(self, name: str, module: str, *flags: str) -> str:
        if name == "node":
            self.nodes.append([flag for flag in flags if flag.startswith("--disk")])
        return name

    def kill(self, node: str) -> None:
        self.killed += 1

    def complete(self, address: str, ids: list[int], tokens: int) -> Completion:
        has_disk = bool(self.nodes[-1])
        if address == "first":
            return Completion(tokens=ids[:tokens], cached_tokens=0, first_token_ms=90.0)
        cached = 128 * BLOCKS if has_disk else 0
        generated = self.other_tokens or ids[:tokens]
        return Completion(
            tokens=generated, cached_tokens=cached, first_token_ms=20.0 if has_disk else 80.0
        )


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Fleet:
    return Fleet(monkeypatch, tmp_path)


def output(*arguments: str) -> tuple[int, list[str]]:
    result = CliRunner().invoke(demo.main, [*SIZES, *arguments], env={"COLUMNS": "120"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    return result.exit_code, result.stdout.splitlines()


def test_both_phases_without_a_disk_and_with_one(fleet: Fleet) -> None:
    status, lines = output()
    assert status == 0
    assert [len(flags) for flags in fleet.nodes] == [0, 0, 2, 2]
    assert fleet.killed == 4
    assert re.fullmatch(
        r"demo: more than memory 0 % -> 100 % found, time to first token 80 ms -> 20 ms;"
        r" after a power failure 0 % -> 100 % found, time to first token 80 ms -> 20 ms",
        lines[-1],
    )


def test_other_tokens_fail_it(fleet: Fleet) -> None:
    fleet.other_tokens = [7] * 8
    status, lines = output("--json")
    report = json.loads(lines[-1])
    assert (status, report["ok"], len(lines)) == (1, False, 1)
    assert report["summary"].startswith("demo: FAILED: 48 answers differ; more than memory")
    assert [row["found"] for row in report["phases"]] == [0.0, 0.0, 1.0, 1.0]
