"""The two processes with an engine: ``python -m kvstore.demo.worker MASTER SCENARIO ROLE``.

Each prints what it did as one line of JSON; times are wall-clock milliseconds. The demonstration
starts them one after the other, so the producer has ended when the consumer starts: reused blocks
can only come from the store.
"""

from __future__ import annotations

import json
import os
import sys
import time

import click
import torch

from kvstore import Client
from kvstore.demo.engine import Engine, block_hashes
from kvstore.demo.model import KVMemory, build_decoder, fingerprint
from kvstore.demo.scenario import BLOCK_TOKENS, KV_BYTES_PER_TOKEN, NEW_TOKENS, TIMED_RUNS, prompt


def produce(engine: Engine, tokens: list[int]) -> dict[str, object]:
    """Compute a prompt and put its blocks."""
    generation = engine.generate(tokens, 1, reuse=False)
    start = time.perf_counter()
    blocks = engine.save(tokens)
    return {
        "namespace": engine.namespace,
        "blocks_stored": blocks,
        "stored_bytes": blocks * BLOCK_TOKENS * KV_BYTES_PER_TOKEN,
        "prefill_ms": generation.first_token_ms,
        "put_ms": (time.perf_counter() - start) * 1e3,
    }


def consume(engine: Engine, tokens: list[int]) -> dict[str, object]:
    """Continue a prompt, both from its stored prefix and computing it all. Never puts a block."""
    # The first run of each way gives the tokens, and warms caches and allocators. The times come
    # from the later runs, which alternate, so that a busy machine slows both ways alike.
    reused, computed = (engine.generate(tokens, NEW_TOKENS, reuse=reuse) for reuse in (True, False))
    times_ms: dict[bool, list[float]] = {True: [], False: []}
    blocks = reused.blocks_reused
    for _ in range(TIMED_RUNS):
        for reuse, times in times_ms.items():
            run = engine.generate(tokens, 1, reuse=reuse)
            times.append(run.first_token_ms)
            if reuse:
                blocks = min(blocks, run.blocks_reused)
    best_two = computed.logits.topk(2).values
    return {
        "blocks_asked": len(block_hashes(tokens[:-1])),
        "blocks_reused": blocks,
        "moved_bytes": blocks * BLOCK_TOKENS * KV_BYTES_PER_TOKEN,
        "tokens_computed": computed.tokens,
        "tokens_reused": reused.tokens,
        "first_token_computed_ms": times_ms[False],
        "first_token_reused_ms": times_ms[True],
        "logit_difference_max": float((computed.logits - reused.logits).abs().max()),
        # The least distance of a chosen token's logit from the second best. If it is larger than
        # twice the difference, rounding cannot change a token.
        "logit_lead_min": float((best_two[:, 0] - best_two[:, 1]).min()),
    }


def main(master: str, scenario_json: str, role: str) -> None:
    scenario = json.loads(scenario_json)
    tokens = prompt(role, scenario["prefix_tokens"], scenario["seed"])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build_decoder(scenario["seed"])  # drawn on the CPU: equal weights everywhere
    torch.nn.Module.to(model, device)
    memory = KVMemory(len(tokens) + NEW_TOKENS, device)
    with Client(master, transports=(scenario["transport"],)) as client:
        engine = Engine(model, memory, client, fingerprint(model, scenario["seed"]))
        report = produce(engine, tokens) if role == "producer" else consume(engine, tokens)
    who = {"pid": os.getpid(), "device": device, "prompt_tokens": len(tokens)}
    click.echo(json.dumps(who | report))


if __name__ == "__main__":
    main(*sys.argv[1:])
