"""The command ``python -m examples.demo_disk`` (``make demo-disk``): more prompts than fit into
memory, and a power failure, without a disk below the memory and with one."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import click
from rich.console import Console
from rich.table import Table

from examples import fleet
from examples.demo_vllm import MIB, PROMPT_TOKENS_MAX, step
from examples.fleet import Completion, complete, forget, full_blocks, make_model, prompt
from examples.tiny import BLOCK_TOKENS, HIDDEN, LAYERS, kv_bytes_per_token
from kvstore.bench.processes import (
    READY_SECONDS,
    ChildError,
    Children,
    Program,
    failures_reported,
    require_modules,
)
from kvstore.client.client import Client

NEW_TOKENS = 8
IN_MEMORY = 0.4
"""The part of all blocks that fits into the memory of the node: a quarter of it must hold a prompt,
since more is not brought at once."""
WRITTEN_SECONDS = 30.0
PARTS = ("without a disk", "with a disk")
PHASES = ("more than memory", "after a power failure")

EXAMPLE = """\b
Example:
  python -m examples.demo_disk --prompts 20
"""


@dataclasses.dataclass(frozen=True)
class Phase:
    """The second engine's answers to all prompts."""

    part: str
    name: str
    prompt_tokens: int
    answers: list[Completion]
    wrong: int
    """Answers that differ from those of the engine that computed the prompts."""

    @property
    def found(self) -> float:
        """The part of the full blocks that was found."""
        blocks = len(self.answers) * full_blocks(self.prompt_tokens)
        return sum(answer.cached_tokens // BLOCK_TOKENS for answer in self.answers) / blocks

    @property
    def first_token_ms(self) -> float:
        return statistics.median(answer.first_token_ms for answer in self.answers)


@click.command(epilog=EXAMPLE)
@click.option(
    "--prompts",
    type=click.IntRange(4, 100),
    default=12,
    show_default=True,
    help="Different prompts.",
)
@click.option(
    "--prompt-tokens",
    type=click.IntRange(300, PROMPT_TOKENS_MAX),
    default=1_500,
    show_default=True,
    help="Tokens in each prompt.",
)
@click.option("--seed", default=0, show_default=True, help="Seed of weights and prompts.")
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON instead of text.")
def main(prompts: int, prompt_tokens: int, seed: int, as_json: bool) -> None:
    """Watch a disk keep what memory cannot hold, and what a power failure leaves.

    Starts a master, a node whose memory holds two fifths of the blocks, and two vLLM servers. The
    first computes all prompts, the second one is asked for them. Then the node is killed, its
    memory is lost, it starts again, and the second engine is asked again. First without a disk,
    then, with other prompts, on a node with --disk. Random weights, the loopback interface.

    The last line begins with "demo:". The exit status is 0 only if all tokens were identical, and
    more was found with the disk, both times.
    """
    console = Console(quiet=as_json, highlight=False)
    phases: list[Phase] = []

    def report(summary: str, *, ok: bool = False) -> None:
        rows = [
            {"part": phase.part, "phase": phase.name, "found": phase.found,
             "first_token_ms": phase.first_token_ms, "wrong": phase.wrong}
            for phase in phases
        ]  # fmt: skip
        click.echo(
            json.dumps({"ok": ok, "summary": summary, "phases": rows}) if as_json else summary
        )

    with failures_reported("demo", report), Children(fleet.environment()) as children:
        require_modules("`make demo-disk` installs it", "vllm", "aiohttp", "transformers")
        run(children, console, prompts, prompt_tokens, seed, phases)
    show(phases, console)
    before, after = phases[: len(PHASES)], phases[len(PHASES) :]
    wrong = sum(phase.wrong for phase in phases)
    is_better = all(disk.found > none.found for none, disk in zip(before, after, strict=True))
    found = "; ".join(
        f"{none.name} {none.found * 100:.0f} % -> {disk.found * 100:.0f} % found, time to first"
        f" token {none.first_token_ms:.0f} ms -> {disk.first_token_ms:.0f} ms"
        for none, disk in zip(before, after, strict=True)
    )
    failed = f"FAILED: {wrong} answers differ; " if wrong else "" if is_better else "FAILED: "
    report(f"demo: {failed}{found}", ok=not failed)
    sys.exit(1 if failed else 0)


def run(
    children: Children, console: Console, prompts: int, prompt_tokens: int, seed: int,
    phases: list[Phase],
) -> None:  # fmt: skip
    """Start all processes, and send all requests.

    Args:
        phases: the results are added to it.
    """
    with step(console, "making a model"):
        model = make_model(children, seed=seed, hidden=HIDDEN, layers=LAYERS)
    block = BLOCK_TOKENS * kv_bytes_per_token(HIDDEN, LAYERS)
    total = prompts * full_blocks(prompt_tokens) * block
    memory = int(IN_MEMORY * total) + MIB
    directory = children.directory / "disk"
    directory.mkdir()
    disk = (f"--disk={directory}", f"--disk-size={2 * total + 64 * MIB}")
    with step(console, "starting a master and two vLLM servers (a minute on two cores)"):
        master = children.start("master", "kvstore.cli.master", "--port=0", "--http-port=0")
        (address,) = children.ready(master, r"listening on (\S+:\d+)", READY_SECONDS).groups()
        transfer = fleet.transfer_config(address, "kv_both")
        transfer["kv_load_failure_policy"] = "recompute"
        engines = [
            fleet.start_engine(children, name, model, transfer) for name in ("first", "second")
        ]
        for engine in engines:
            fleet.engine_ready(children, engine)
    console.print(
        f"{prompts} prompts of {prompt_tokens} tokens, {total // MIB} MiB of blocks; a node with"
        f" {memory // MIB} MiB of memory\n"
    )

    def start_node(part: str) -> Program:
        flags = disk if part == "with a disk" else ()
        node = children.start(
            "node", "kvstore.cli.node", f"--master={address}", f"--memory={memory}",
            f"--name=demo-{os.getpid()}", *flags,
        )  # fmt: skip
        children.ready(node, r"^kvstore-node .+", READY_SECONDS)
        return node

    first, second = (engine.address for engine in engines)
    for number, part in enumerate(PARTS):
        texts = [prompt(seed, f"{number} {index}", prompt_tokens) for index in range(prompts)]
        node = start_node(part)
        with step(console, f"{part}: computing"):
            computed = ask_all(first, texts)
            wait_until_written(address)
        for name in PHASES:
            if name == "after a power failure":
                children.kill(node)
                node = start_node(part)
                wait_until_joined(address)
            with step(console, f"{part}: {name}"):
                answers = ask_all(second, texts)
            wrong = sum(
                one.tokens != other.tokens for one, other in zip(computed, answers, strict=True)
            )
            phases.append(Phase(part, name, prompt_tokens, answers, wrong))
            console.print(f"{part}: {name}: {100 * phases[-1].found:.0f} % found")
        children.kill(node)


def ask_all(address: str, prompts: Sequence[list[int]]) -> list[Completion]:
    """Send the prompts one after the other, each to an engine without a prefix cache of its own."""
    answers = []
    for ids in prompts:
        forget(address)
        answers.append(complete(address, ids, NEW_TOKENS))
    forget(address)  # which waits until all is saved
    return answers


def wait_until_written(master: str) -> None:
    """Wait until the disks' numbers of objects do not change for a second."""
    with Client(master) as client:
        last, since = -1, time.monotonic()

        def is_quiet() -> bool:
            nonlocal last, since
            count = sum(disk.objects for node in client.status().nodes for disk in node.disks)
            if count != last:
                last, since = count, time.monotonic()
            return time.monotonic() - since > 1.0

        _wait_for(is_quiet, "the disk is still being written")


def wait_until_joined(master: str) -> None:
    """Wait until the node has reported all that it has."""
    with Client(master) as client:
        _wait_for(
            lambda: all(
                node.state == "alive" and not any(disk.reports for disk in node.disks)
                for node in client.status().nodes
            ),
            "the node has not joined",
        )


def _wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WRITTEN_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise ChildError(f"{what} after {WRITTEN_SECONDS:.0f} s")
        time.sleep(0.1)


def show(phases: Sequence[Phase], console: Console) -> None:
    table = Table(title="the second engine", title_justify="left")
    for column in ("", "", "found", "time to first token", "identical"):
        table.add_column(column, justify="right")
    for phase in phases:
        table.add_row(
            phase.part if phase.name == PHASES[0] else "", phase.name, f"{phase.found * 100:.0f} %",
            f"{phase.first_token_ms:.0f} ms", "NO" if phase.wrong else "yes",
        )  # fmt: skip
    console.print(table)
    console.print("What was in memory only is lost with it; the disk has what was evicted.\n")


if __name__ == "__main__":
    main()
