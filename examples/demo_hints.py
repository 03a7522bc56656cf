"""The command ``python -m examples.demo_hints`` (``make demo-hints``): agents whose tools take
seconds, without hints and with them, through the proxy and a vLLM engine."""

from __future__ import annotations

import dataclasses
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from examples import fleet
from examples.demo_vllm import MIB, step
from examples.fleet import complete, forget, make_model, prompt, start_engine
from examples.tiny import BLOCK_TOKENS, HIDDEN, LAYERS, kv_bytes_per_token
from kvstore.bench.processes import Children, failures_reported, require_modules, start_store
from kvstore.config.servers import EVICTION_POLICIES, MasterConfig

NEW_TOKENS = 2
AGENT_TOKENS = 256
"""Of an agent's first prompt."""
TURN_TOKENS = 48
"""Of an agent's answer and of what its tool returns."""
CHAT_TOKENS = 384
"""Of a chat's first prompt."""
CHAT_TURN_TOKENS = 128
CHAT_TURNS_MAX = 4
CHAT_GOES_ON = 0.5
CHAT_PAUSE_S = 0.6
CHATS_PER_S = 1.2
JITTER = 0.3
"""Pauses differ by this part of their length."""
TURNS_MAX = (fleet.POSITIONS - NEW_TOKENS - AGENT_TOKENS) // TURN_TOKENS
PARTS = ("without hints", "with hints")

EXAMPLE = """\b
Example:
  python -m examples.demo_hints --eviction lru
"""


@dataclasses.dataclass(frozen=True, order=True)
class Turn:
    """A request, and what its client knows when it sends it."""

    due_s: float
    session: str
    prompt_tokens: int
    hint: str
    """The value of ``X-KV-Hint``; empty: none."""

    @property
    def is_agent(self) -> bool:
        return self.session.startswith("agent")


@dataclasses.dataclass(frozen=True)
class TurnResult:
    turn: Turn
    found_tokens: int
    first_token_ms: float
    late_s: float
    """How long after its time it was sent."""


def make_schedule(seed: int, agents: int, turns: int, pause_s: float) -> list[Turn]:
    """Return the requests of some agents, and of chats that come and go until the agents end.

    An agent's tool runs for about ``pause_s`` after each turn but the last. Half of the chats end
    after each turn.
    """
    chance = random.Random(seed)  # noqa: S311  reproducible, no secret
    schedule = []

    def pause(seconds: float) -> float:
        return seconds * chance.uniform(1 - JITTER, 1 + JITTER)

    for agent in range(agents):
        due_s = agent * pause_s / agents
        for number in range(turns):
            hint = f"tool_wait={pause_s:g}" if number < turns - 1 else "end"
            tokens = AGENT_TOKENS + number * TURN_TOKENS
            schedule.append(Turn(due_s, f"agent-{agent}", tokens, hint))
            due_s += pause(pause_s)
    end_s = max(turn.due_s for turn in schedule)
    start_s, chat = chance.expovariate(CHATS_PER_S), 0
    while start_s < end_s:
        number, due_s, goes_on = 0, start_s, True
        while goes_on:
            goes_on = chance.random() < CHAT_GOES_ON and number < CHAT_TURNS_MAX - 1
            tokens = CHAT_TOKENS + number * CHAT_TURN_TOKENS
            hint = "" if goes_on else "end"
            schedule.append(Turn(due_s, f"chat-{chat}", tokens, hint))
            number += 1
            due_s += pause(CHAT_PAUSE_S)
        start_s += chance.expovariate(CHATS_PER_S)
        chat += 1
    return sorted(schedule)


@click.command(epilog=EXAMPLE)
@click.option(
    "--agents",
    type=click.IntRange(1, 20),
    default=2,
    show_default=True,
    help="Agents that run at the same time.",
)
@click.option(
    "--turns",
    type=click.IntRange(2, TURNS_MAX),
    default=30,
    show_default=True,
    help="Turns of each agent.",
)
@click.option(
    "--pause",
    type=click.FloatRange(0.1, 600),
    default=4.0,
    show_default=True,
    help="Seconds that an agent's tool takes.",
)
@click.option(
    "--pool-tokens",
    type=click.IntRange(2_048, 1_000_000),
    default=3_584,
    show_default=True,
    help="Tokens whose blocks fit into the store.",
)
@click.option(
    "--eviction",
    type=click.Choice([*EVICTION_POLICIES]),
    default=MasterConfig().eviction,
    show_default=True,
    help="The master's policy.",
)
@click.option("--seed", default=0, show_default=True, help="Seed of weights and requests.")
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON instead of text.")
def main(
    agents: int, turns: int, pause: float, pool_tokens: int, eviction: str, seed: int,
    as_json: bool,
) -> None:  # fmt: skip
    """Watch agents wait for their tools, with a store that is too small for all sessions.

    Starts a master, a node, a vLLM server and kvstore-proxy, and sends the requests of some agents
    and of many short chats, each at its time. Then the same again, with the headers X-KV-Session
    and X-KV-Hint. The engine's own prefix cache is emptied before each request, so that all that is
    found comes from the store. Random weights; all servers listen on the loopback interface.

    The last line begins with "demo:". The exit status is 0 only if agents found more with hints.
    """
    console = Console(quiet=as_json, highlight=False)
    schedule = make_schedule(seed, agents, turns, pause)
    results: dict[str, list[TurnResult]] = {}

    def report(summary: str, *, ok: bool = False) -> None:
        rows = {part: summary_row(results[part]) for part in results}
        line = json.dumps({"ok": ok, "summary": summary, "results": rows})
        click.echo(line if as_json else summary)

    with failures_reported("demo", report), Children(fleet.environment()) as children:
        require_modules("`make demo-hints` installs it", "vllm", "aiohttp", "transformers")
        with step(console, "making a model"):
            model = make_model(children, seed=seed, hidden=HIDDEN, layers=LAYERS)
        count = sum(turn.is_agent for turn in schedule)
        console.print(
            f"{agents} agents, {count} turns; {len(schedule) - count} turns of chats, in"
            f" {schedule[-1].due_s:.0f} s; a store for {pool_tokens} tokens, {eviction}\n"
        )
        for part in PARTS:
            results[part] = []
            run(model, console, part, schedule, pool_tokens, eviction, results[part])
    show(results, console)
    without, given = (summary_row(results[part])["agents"] for part in PARTS)
    ok = given["found"] > without["found"]
    change = (
        f"agents found {without['found'] * 100:.0f} % -> {given['found'] * 100:.0f} % of their"
        " prompt tokens, time to first token"
        f" {without['p50_ms']:.0f} ms -> {given['p50_ms']:.0f} ms"
    )
    report(f"demo: {'' if ok else 'FAILED: '}{change}", ok=ok)
    sys.exit(0 if ok else 1)


def run(
    model: Path, console: Console, part: str, schedule: Sequence[Turn], pool_tokens: int,
    eviction: str, results: list[TurnResult],
) -> None:  # fmt: skip
    """Start a store, an engine and a proxy, send all requests, and end them.

    Args:
        results: the results are added to it.
    """
    memory = pool_tokens * kv_bytes_per_token(HIDDEN, LAYERS) * 102 // 100 + MIB // 2
    with Children(fleet.environment()) as children:
        with step(console, f"{part}: starting (half a minute on two cores)"):
            master = start_store(children, memory, flags=("--eviction", eviction)).address()
            transfer = fleet.transfer_config(master, "kv_both")
            engine = start_engine(children, "engine", model, transfer)
            fleet.engine_ready(children, engine)
            proxy = fleet.start_proxy(children, master, [], [engine.address])
        complete(proxy.address, prompt(0, "warming up", 64), NEW_TOKENS)
        start_s = time.monotonic()
        with step(console, f"{part}: {schedule[-1].due_s:.0f} s"):
            for turn in schedule:
                time.sleep(max(0.0, start_s + turn.due_s - time.monotonic()))
                late_s = time.monotonic() - start_s - turn.due_s
                forget(engine.address)
                headers = {"X-KV-Session": turn.session}
                if turn.hint:
                    headers["X-KV-Hint"] = turn.hint
                answer = complete(
                    proxy.address, prompt(1, turn.session, turn.prompt_tokens), NEW_TOKENS,
                    headers=headers if part == "with hints" else {},
                )  # fmt: skip
                results.append(
                    TurnResult(turn, answer.cached_tokens, answer.first_token_ms, late_s)
                )


def summary_row(results: Sequence[TurnResult]) -> dict[str, dict[str, float]]:
    """Return the part of prompt tokens that was found, and times, of agents, chats and all."""
    groups = {
        "agents": [result for result in results if result.turn.is_agent],
        "chats": [result for result in results if not result.turn.is_agent],
        "all": list(results),
    }
    row = {}
    for name, group in groups.items():
        times = sorted(result.first_token_ms for result in group) or [0.0]
        tokens = sum(result.turn.prompt_tokens for result in group)
        row[name] = {
            "found": sum(result.found_tokens for result in group) / max(1, tokens),
            "computed_tokens": tokens - sum(result.found_tokens for result in group),
            "p50_ms": statistics.median(times),
            "p90_ms": times[len(times) * 9 // 10],
            "late_s": max((result.late_s for result in group), default=0.0),
        }
    return row


def show(results: dict[str, list[TurnResult]], console: Console) -> None:
    table = Table(title="prompt tokens found, time to first token", title_justify="left")
    for column in ("", "", "found", "computed", "p50", "p90", "at most late"):
        table.add_column(column, justify="right")
    for part, turns in results.items():
        for name, row in summary_row(turns).items():
            table.add_row(
                part if name == "agents" else "", name, f"{row['found']:.0%}",
                f"{row['computed_tokens']:.0f}", f"{row['p50_ms']:.0f} ms",
                f"{row['p90_ms']:.0f} ms", f"{row['late_s']:.1f} s",
            )  # fmt: skip
    console.print(table)
    console.print(
        f"found     of full blocks of {BLOCK_TOKENS} tokens only; the first turn finds nothing\n"
        "computed  prompt tokens that the engine computed\n"
    )


if __name__ == "__main__":
    main()
