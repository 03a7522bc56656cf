"""``make demo-vllm`` and ``make bench-vllm`` as their users run them; and what is left of them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.demonstrations import Demonstration
from tests.e2e.engines.preloaded import ENVIRONMENT
from tests.support.processes import children_of, is_running
from tests.support.wait import until

MODULE = "examples.demo_vllm"
PROMPTS = 2
TOKENS = 700
"""Two whole blocks, and a part of one."""
BLOCKS = 2
FOUND = PROMPTS * BLOCKS * 256
"""Tokens."""
SIZES = (f"--prompts={PROMPTS}", f"--prompt-tokens={TOKENS}")
SECONDS = 900

Demonstrate = Callable[..., Demonstration]


@pytest.fixture
def demonstrate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Demonstrate]:
    """Starts demonstrations, which end with the test, and whose temporary files are looked at."""
    # Not pytest's directory: vLLM makes Unix sockets, whose paths have 107 characters at most.
    temporary = Path(tempfile.mkdtemp(prefix="kvd-"))
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setenv("OMP_NUM_THREADS", ENVIRONMENT["OMP_NUM_THREADS"])
    started: list[Demonstration] = []

    def start(
        *arguments: str, module: str = MODULE, sizes: tuple[str, ...] = SIZES
    ) -> Demonstration:
        started.append(Demonstration(module, *sizes, *arguments, seconds=SECONDS))
        return started[-1]

    yield start
    for each in started:
        each.close()
    left = [each.name for each in temporary.iterdir()]
    shutil.rmtree(temporary)
    assert left == []


@pytest.mark.timeout(SECONDS)
def test_a_decoder_finds_what_a_prefiller_computed(demonstrate: Demonstrate) -> None:
    """As JSON, of the model that is recurrent in part; ``unit/examples/test_demo_vllm.py`` has both
    in turn, as text."""
    status, lines, errors = demonstrate("--json", "--seed=3", "--kind=recurrent").output()
    assert status == 0, (lines, errors)
    report = json.loads(lines[-1])
    assert len(lines) == 1
    assert report["ok"]
    assert [(each["model"], each["number"]) for each in report["prompts"]] == [
        ("Qwen3-Next", 1), ("Qwen3-Next", 2),
    ]  # fmt: skip
    for each in report["prompts"]:
        assert each["prompt_tokens"] == TOKENS
        assert each["blocks_found"] == each["blocks"] == BLOCKS
        assert each["identical"]
        assert len(set(each["tokens_found"][0])) > 4, "a loop of few tokens would prove little"
    assert re.fullmatch(
        rf"demo: Qwen3-Next: answers identical, {FOUND} of {PROMPTS * TOKENS} prompt tokens found, "
        r"time to first token \d+ ms -> \d+ ms \(\d+\.\dx\)",
        report["summary"],
    )


@pytest.mark.timeout(SECONDS)
def test_interrupted_while_engines_start_it_leaves_nothing(demonstrate: Demonstrate) -> None:
    """By SIGTERM, which it handles as Python handles SIGINT."""
    demo = demonstrate()
    demo.line(r"^store ")
    # Master, node with its helper, two servers, and the first processes of these.
    family = until(lambda: found if len(found := family_of(demo)) >= 7 else [], within_s=120)
    demo.process.terminate()
    status, lines, _ = demo.output()
    assert (status, lines[-1]) == (128 + signal.SIGINT, "demo: interrupted")
    assert not [pid for pid in family if is_running(pid)]


@pytest.mark.timeout(SECONDS)
def test_an_engine_that_dies_is_named_and_nothing_is_left(demonstrate: Demonstrate) -> None:
    demo = demonstrate()
    demo.line(r"^store ")
    (prefiller,) = until(
        lambda: [pid for pid in children_of(demo.process.pid) if "kv_producer" in command(pid)],
        within_s=60,
    )
    os.kill(prefiller, signal.SIGKILL)
    status, lines, _ = demo.output()
    assert status == 1
    assert re.match(r"demo: FAILED: prefiller \(pid \d+\) ended with status -9", lines[-1])


@pytest.mark.timeout(SECONDS)
def test_the_benchmark_measures_hits_and_misses(demonstrate: Demonstrate, tmp_path: Path) -> None:
    """The driver refuses an answer that was not found, and one with another token."""
    options = ("--table=vllm", "--systems=kvstore,no store", "--rows=get/*/1", "--quick",
               f"--out={tmp_path}")  # fmt: skip
    status, lines, errors = demonstrate(*options, module="bench", sizes=()).output()
    assert status == 0, (lines, errors)
    report = json.loads((tmp_path / "vllm.json").read_text())
    for row in report["rows"]:
        assert row["kvstore"][0]["calls"] >= 6
        assert row["no store"][0]["processor_us"].keys() == {"client", "engine"}


def family_of(demo: Demonstration) -> list[int]:
    """Everything below it. An engine's process renames itself, and loses its environment."""
    found = [demo.process.pid]
    for pid in found:  # grows as it goes
        with contextlib.suppress(OSError):
            found += children_of(pid)
    return found[1:]


def command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""
