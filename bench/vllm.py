"""Driver for a vLLM engine: without a store, with this one, with its own on Mooncake.

A put is a new prompt, a get the same prompt again. The engine's own cache holds fewer prompts than
a measurement has, so a get finds those in the store. One token is generated, so a call takes the
time to the first token. The model is a small Llama with random weights.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from bench import mooncake
from examples import fleet
from examples.tiny import BLOCK_TOKENS, HIDDEN, LAYERS, kv_bytes_per_token
from kvstore.bench.client import ClientProcess, Settings
from kvstore.bench.processes import Children, Servers, start_store
from kvstore.bench.rows import ComparisonCase, System
from kvstore.bench.session import GET, PUT, WARM_PIECE, StoreDriver, Work
from kvstore.bench.timing import require

PROMPT_TOKENS: Final = 1_500
BLOCKS: Final = fleet.full_blocks(PROMPT_TOKENS)
PROMPT_BYTES: Final = BLOCKS * BLOCK_TOKENS * kv_bytes_per_token(HIDDEN, LAYERS)
OPTIONS: Final = ("--num-gpu-blocks-override", "60")
"""The engine's own cache: five prompts, fewer than a session reads in turn."""
BUFFER_MIB: Final = 512
"""Mooncake's transfer buffer; its default of 4 GiB is more than a small machine can spare."""
NOTE: Final = (
    "vLLM's built-in connector uses Mooncake in the only way that its users can configure on a CPU:"
    " memory in a process of its own, TCP over loopback. Shared memory is what kvstore uses on one"
    " host by default; `kvstore, TCP` is on equal terms with Mooncake."
)

ROWS: Final = tuple(
    ComparisonCase(
        op=op, mode="loopback", size=PROMPT_BYTES, clients=clients, name=name, notes=(NOTE,)
    )
    for clients in (1, 4)
    for op, name in (
        (PUT, f"first token, new prompt of {PROMPT_TOKENS:,} tokens"),
        (GET, f"first token, the same prompt of {PROMPT_TOKENS:,} tokens"),
    )
)


def missing() -> str | None:
    """Return the reason why vLLM or Mooncake cannot be used here, or None."""
    if importlib.util.find_spec("vllm") is None:
        return "vllm is missing; make bench-vllm installs it"
    return mooncake.missing()


class Driver(StoreDriver):
    """Sends prompts to one engine; an object's key is the name of a prompt. The store evicts."""

    def __init__(self, address: str, mode: str, memory_bytes: int, *, has_store: bool) -> None:
        self.source = self.target = np.ones(memory_bytes, np.uint8)
        self._address = address
        self._has_store = has_store
        self._answers: dict[str, list[int]] = {}

    def work(self, op: str, batches: Sequence[Sequence[str]], size: int) -> Work:
        if size != PROMPT_BYTES:  # memory that is written before is none of the engine's
            return Work(lambda i: None, lambda result: None)
        prompts = [fleet.prompt(0, name, PROMPT_TOKENS) for [name] in batches]

        def call(i: int) -> tuple[str, fleet.Completion]:
            number = i % len(prompts)
            return batches[number][0], fleet.complete(self._address, prompts[number], 1)

        return Work(call, self._store_response if op == PUT else self._check_response)

    def _store_response(self, result: tuple[str, fleet.Completion]) -> None:
        name, answer = result
        self._answers[name] = answer.tokens

    def _check_response(self, result: tuple[str, fleet.Completion]) -> None:
        name, answer = result
        require(answer.tokens == self._answers[name], "led to another token")
        is_found = answer.cached_tokens >= BLOCKS * BLOCK_TOKENS
        require(is_found == self._has_store, "was found, or missed, against expectation")


@contextlib.contextmanager
def _engine(kind: str, pool_bytes: int) -> Iterator[Servers]:
    with Children(fleet.environment()) as children:
        model = fleet.make_model(children, seed=0, hidden=HIDDEN, layers=LAYERS)
        store = Servers({}, {})
        transfer: dict[str, Any] | None = None
        environ = {}
        if kind in ("shm", "tcp"):
            store = start_store(children, pool_bytes)
            transports = ["tcp"] if kind == "tcp" else ["shm", "tcp"]
            transfer = fleet.transfer_config(store.address(), "kv_both", transports=transports)
        elif kind == "mooncake":
            store = mooncake.start(children, pool_bytes)
            # The first touch of a page costs ten times a copy: write all of the memory once.
            driver = "bench.mooncake:MooncakeDriver"
            touch = Settings(driver, {}, "tcp", store.address(), pool_bytes, WARM_PIECE)
            ClientProcess(children, "touch", touch).close()
            config = children.directory / "mooncake.json"
            config.write_text(json.dumps({
                "metadata_server": mooncake.METADATA, "master_server_address": store.address(),
                "protocol": "tcp", "mode": "standalone-store", "global_segment_size": 0,
                "local_buffer_size": f"{BUFFER_MIB}MB",
            }))  # fmt: skip
            transfer = {"kv_connector": fleet.CONNECTOR, "kv_role": "kv_both"}
            environ = {"MOONCAKE_CONFIG_PATH": str(config)}
        engine = fleet.start_engine(
            children, "engine", model, transfer, options=OPTIONS, environ=environ
        )
        fleet.engine_ready(children, engine)
        yield Servers({"tcp": engine.address}, {"engine": engine.child.process.pid, **store.pids})


SYSTEMS: Final = {
    name: System(partial(_engine, kind), "bench.vllm:Driver", {"has_store": kind != "none"})
    for name, kind in (
        ("kvstore", "shm"), ("no store", "none"), ("Mooncake", "mooncake"), ("kvstore, TCP", "tcp"),
    )
}  # fmt: skip
