"""The command ``python -m bench.vllm_hit``: how long a hit takes inside an engine, from the
scheduler's question to the moment at which all blocks are in the engine's cache.

Time to first token contains much that no store changes: HTTP, the tokens that are computed after
the hit. So the engines here run in this program's children without HTTP, and two calls are timed:
the first ``get_num_new_matched_tokens`` of a request, and the end of its load in the connector's
thread. Compared are this store's connector, and vLLM's built-in one for Mooncake with this store
behind it (``kvstore.mooncake``), over the same transport. The offloading tier is not: its worker
side in vLLM refuses CPUs.

Every engine ends before the next one starts; they take turns.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click

from bench import page
from bench.page import Advance, Found, ResultsTable
from bench.vllm import MEMORY_MORE, PACKAGES, STOP_SECONDS
from kvstore.demo.processes import Children
from kvstore.demo_vllm import servers
from kvstore.demo_vllm.scenario import HIDDEN, LAYERS, full_blocks, memory_mib, prompt
from kvstore.demo_vllm.tiny import BLOCK_TOKENS

OURS, BUILT_IN = SYSTEMS = ("kvstore", "built-in")
BUILT_IN_WORKER: Final = "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.worker"
PROMPT_TOKENS: Final = 1_500
ENGINE_SECONDS: Final = 300.0
EXAMPLE = """\b
Examples:
  python -m bench.vllm_hit
  python -m bench.vllm_hit --transport shm --turns 1
"""


@click.command(epilog=EXAMPLE)
@click.option(
    "--turns", type=click.IntRange(1, 20), default=3, show_default=True,
    help="How often each engine is started.",
)  # fmt: skip
@click.option(
    "--prompts", type=click.IntRange(1, 50), default=8, show_default=True,
    help="Prompts of 1,500 tokens, each found ten times in a turn.",
)  # fmt: skip
@click.option(
    "--transport", type=click.Choice(["tcp", "shm"]), default="tcp", show_default=True,
    help="Between engines and store.",
)  # fmt: skip
def main(turns: int, prompts: int, transport: str) -> None:
    """Measure a hit inside an engine: from the scheduler's question to the last block in place.

    The last line begins with "bench:".
    """
    found = page.measured(
        lambda progress: run(turns, prompts, transport, progress), turns * len(SYSTEMS), PACKAGES
    )
    page.show(parts_of(found))
    click.echo(f"bench: {turns} turns of {prompts} prompts by {transport}")


def run(turns: int, prompts: int, transport: str, progress: Advance) -> Found:
    """
    Raises:
        ChildError: a process did not start, or an engine failed.
    """
    servers.require("vllm", "transformers")
    memory = int(memory_mib(len(SYSTEMS) * prompts, PROMPT_TOKENS) * MEMORY_MORE)
    milliseconds: dict[str, list[list[float]]] = {system: [] for system in SYSTEMS}
    with Children(servers.environment(), stop_seconds=STOP_SECONDS) as children:
        model = servers.make_model(children, seed=0, hidden=HIDDEN, layers=LAYERS)
        master = servers.start_store(children, memory)
        for turn in range(turns):
            for system in SYSTEMS:
                progress(f"turn {turn + 1} of {turns}: {system}", 1)
                arguments = (system, str(model), master, transport, str(prompts))
                engine = children.start(f"{system}-{turn}", "bench.vllm_hit", "engine", *arguments)
                said = children.result(engine, ENGINE_SECONDS)
                milliseconds[system].append(json.loads(said.splitlines()[-1]))
    return {"ms": milliseconds}


def parts_of(found: Found) -> list[str | ResultsTable]:
    rows = []
    for system, turns in found["ms"].items():
        each = sorted(ms for turn in turns for ms in turn)
        p99s = [_percentile(sorted(turn), 99) for turn in turns]
        rows.append((
            system, str(len(each)), f"{_percentile(each, 50):.2f} ms",
            f"{_percentile(each, 99):.2f} ms ({min(p99s):.2f} to {max(p99s):.2f})",
        ))  # fmt: skip
    return [
        f"From the scheduler's question to the last of {full_blocks(PROMPT_TOKENS)} blocks",
        ResultsTable(("", "hits", "p50", "p99 (of the turns)"), rows, (0,)),
    ]


def _percentile(ordered: list[float], percent: int) -> float:
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


# --- an engine -----------------------------------------------------------------------------------


def engine(system: str, model: str, master: str, transport: str, prompts: str) -> None:
    """Prints the milliseconds of each hit, as a JSON list."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is no result
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    transfer = _built_in(master, transport) if system == BUILT_IN else servers.transfer_config(
        master, "kv_both", transports=[transport]
    )  # fmt: skip
    vllm: Any = importlib.import_module("vllm")
    llm = vllm.LLM(
        model=model, kv_transfer_config=transfer, dtype="float32", max_model_len=2048,
        enforce_eager=True, distributed_executor_backend="uni",
    )  # fmt: skip
    hits = _watch(llm.llm_engine.engine_core.engine_core.scheduler.connector, system)
    asked = [{"prompt_token_ids": prompt(0, n, PROMPT_TOKENS)} for n in range(int(prompts))]
    one = vllm.SamplingParams(temperature=0, max_tokens=1)
    stored = full_blocks(PROMPT_TOKENS) * BLOCK_TOKENS
    for round_number in range(12):  # the first stores, the second warms up
        for each in asked:
            deadline = time.monotonic() + servers.READY_SECONDS
            while True:
                while not llm.reset_prefix_cache():
                    llm.llm_engine.step()
                cached = _answer(llm.llm_engine, each, one)
                if not round_number or cached == stored:
                    break
                assert time.monotonic() < deadline, f"{cached} tokens found"
                hits.clear()  # not stored yet
        if round_number < 2:
            hits.clear()
    print(json.dumps(hits), file=out, flush=True)
    os._exit(0)  # the engine has nothing to clean up that its parent does not


def _answer(engine: Any, asked: dict[str, list[int]], sampling: Any) -> int | None:
    """How many tokens of a prompt were found. As vLLM's servers do, an engine that computes nothing
    in a step sleeps for a millisecond, and leaves the interpreter to the connector's threads."""
    engine.add_request(str(time.monotonic_ns()), asked, sampling)
    while True:
        if answers := engine.step():
            cached: int | None = answers[0].num_cached_tokens
            return cached
        time.sleep(0.001)


def _built_in(master: str, transport: str) -> dict[str, object]:
    """Puts this store in the place of Mooncake's; the settings of vLLM's connector for it."""
    import kvstore.mooncake

    os.environ["KVSTORE_CLIENT_TRANSPORTS"] = transport
    kvstore.mooncake.install()
    config = Path(os.environ["TMPDIR"]) / "mooncake.json"
    config.write_text(json.dumps({
        "metadata_server": "P2PHANDSHAKE", "master_server_address": master, "protocol": "tcp",
        "mode": "standalone-store", "global_segment_size": 0, "local_buffer_size": "64MB",
    }))  # fmt: skip
    os.environ["MOONCAKE_CONFIG_PATH"] = str(config)
    return {"kv_connector": servers.CONNECTOR, "kv_role": "kv_both"}


def _watch(connector: Any, system: str) -> list[float]:
    """The list to which each hit adds its milliseconds."""
    hits: list[float] = []
    asked: dict[str, float] = {}
    ask = connector.get_num_new_matched_tokens

    def asks(request: Any, computed: int) -> Any:
        asked.setdefault(request.request_id, time.perf_counter())
        return ask(request, computed)

    def ended(request_id: str) -> None:
        hits.append((time.perf_counter() - asked[request_id]) * 1e3)

    connector.get_num_new_matched_tokens = asks
    if system == BUILT_IN:
        worker: Any = importlib.import_module(BUILT_IN_WORKER)
        thread = worker.KVCacheStoreRecvingThread
        thread.set_finished_request = _after(ended, thread.set_finished_request, lambda name: name)
    else:
        from kvstore.connectors.vllm.worker import WorkerSide

        side: Any = WorkerSide
        side._load_ended = _after(ended, side._load_ended, lambda load: load.request_id)
    return hits


def _after(
    ended: Callable[[str], None], method: Callable[..., Any], name_of: Callable[[Any], str]
) -> Callable[..., Any]:
    def told(self: Any, what: Any) -> Any:
        ended(name_of(what))
        return method(self, what)

    return told


if __name__ == "__main__":
    if sys.argv[1:2] == ["engine"]:
        engine(*sys.argv[2:])
    else:
        main()
