"""The two processes with an engine: ``python -m kvstore.demo.worker MASTER SCENARIO ROLE``.

Each prints its report as one line of JSON. The demonstration starts them one after the other, so
the producer has ended when the consumer starts: reused blocks can only come from the store.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time

import click
import torch

from kvstore import Client
from kvstore.demo.engine import Engine, Generation, block_hashes
from kvstore.demo.model import KVMemory, build_decoder, fingerprint
from kvstore.demo.scenario import (
    BLOCK_TOKENS,
    KV_BYTES_PER_TOKEN,
    NEW_TOKENS,
    TIMED_RUNS,
    Consumed,
    Produced,
    Scenario,
)


def produce(engine: Engine, prompt: list[int]) -> Produced:
    """Compute a prompt and put its blocks."""
    generation = engine.generate(prompt, 1, reuse=False)
    start = time.perf_counter()
    blocks = engine.save(prompt)
    return Produced(
        pid=os.getpid(),
        device=engine.model.device.type,
        namespace=engine.namespace,
        prompt_tokens=len(prompt),
        blocks_stored=blocks,
        stored_bytes=blocks * BLOCK_TOKENS * KV_BYTES_PER_TOKEN,
        prefill_ms=generation.first_token_ms,
        put_ms=(time.perf_counter() - start) * 1e3,
    )


def consume(engine: Engine, prompt: list[int]) -> Consumed:
    """Continue a prompt both ways. Never puts a block."""
    # The first run of each way gives the tokens, and warms caches and allocators. The times come
    # from the later runs, which alternate, so that a busy machine slows both ways alike.
    reused, computed = (engine.generate(prompt, NEW_TOKENS, reuse=reuse) for reuse in (True, False))
    timed: dict[bool, list[Generation]] = {True: [], False: []}
    for _ in range(TIMED_RUNS):
        for reuse, runs in timed.items():
            runs.append(engine.generate(prompt, 1, reuse=reuse))
    blocks = min(generation.blocks_reused for generation in [reused, *timed[True]])
    best_two = computed.logits.topk(2).values
    return Consumed(
        pid=os.getpid(),
        device=engine.model.device.type,
        prompt_tokens=len(prompt),
        blocks_asked=len(block_hashes(prompt[:-1])),
        blocks_reused=blocks,
        moved_bytes=blocks * BLOCK_TOKENS * KV_BYTES_PER_TOKEN,
        tokens_computed=computed.tokens,
        tokens_reused=reused.tokens,
        first_token_computed_ms=[run.first_token_ms for run in timed[False]],
        first_token_reused_ms=[run.first_token_ms for run in timed[True]],
        logit_difference_max=float((computed.logits - reused.logits).abs().max()),
        logit_lead_min=float((best_two[:, 0] - best_two[:, 1]).min()),
    )


def main(master: str, scenario_json: str, role: str) -> None:
    scenario = Scenario(**json.loads(scenario_json))
    prompt = scenario.producer_prompt if role == "producer" else scenario.consumer_prompt
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build_decoder(scenario.seed)  # drawn on the CPU: equal weights everywhere
    torch.nn.Module.to(model, device)
    memory = KVMemory(len(prompt) + NEW_TOKENS, device)
    with Client(master, transports=(scenario.transport,)) as client:
        engine = Engine(model, memory, client, fingerprint(model, scenario.seed))
        report = produce(engine, prompt) if role == "producer" else consume(engine, prompt)
    click.echo(json.dumps(dataclasses.asdict(report)))


if __name__ == "__main__":
    main(*sys.argv[1:])
