"""One vLLM engine in a process of its own, told what to do by JSON lines, and its handle for tests.

``python -m tests.e2e.engines.engine`` reads its arguments, then one command per line, from stdin
and answers each with one line on stdout. vLLM's own words go to stderr, which the test keeps.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self, cast

from examples import fleet as servers
from tests.e2e.engines.preloaded import ForkServer

ROOT = Path(__file__).parents[3]
START_S = 180.0
ANSWER_S = 120.0


def transfer_config(
    master: str, role: str = "kv_both", *, policy: str = "recompute", **extra: Any
) -> dict[str, object]:
    """As ``servers.transfer_config``, for any policy."""
    transfer = servers.transfer_config(master, role, **extra)
    return {**transfer, "kv_load_failure_policy": policy}


class Engine:
    """The handle. ``close`` ends it, whatever happened to it."""

    def __init__(
        self, preloaded: ForkServer, model: Path, transfer: dict[str, object] | None,
        **arguments: object,
    ) -> None:  # fmt: skip
        """
        Args:
            transfer: see ``transfer_config``; None: without a connector.
            arguments: more of ``vllm.LLM``; "environ": more environment variables.
        """
        self.log: list[str] = []
        environ = cast(dict[str, str], arguments.pop("environ", {}))
        commands, self._commands = _pipe("w")
        self._said, answers = _pipe("r")
        self._errors, errors = _pipe("r")
        theirs = (commands, answers, errors)
        try:
            self._process = preloaded.start(__spec__.name, [], theirs, environ)
        finally:
            for fd in theirs:
                os.close(fd)
        self._reader = threading.Thread(target=self._read_log, name="engine-log")
        self._reader.start()
        self._answers: list[str] = []
        try:
            said = self._ask({"model": str(model), "transfer": transfer, **arguments}, START_S)
            assert said == {"ready": True}, said
        except BaseException:
            self.close()
            raise

    def generate(
        self,
        prompts: list[list[int]],
        *,
        tokens: int = 8,
        params: Mapping[str, object] | None = None,
    ) -> list[Result]:
        """Greedy; all prompts at once."""
        answer = self._ask(
            {"do": "generate", "prompts": prompts, "tokens": tokens, "params": params}
        )
        return [Result(each) for each in answer]

    def reset(self, *, store: bool = False) -> bool:
        """Forget the engine's own prefix cache and, if told so, what the store has of the model."""
        return bool(self._ask({"do": "reset", "store": store}))

    def metrics(self) -> dict[str, float]:
        """Those of the connector, without their prefix."""
        return dict(self._ask({"do": "metrics"}))

    def events(self) -> list[dict[str, Any]]:
        """KV events of the store that were published since the last time."""
        return list(self._ask({"do": "events"}))

    def saved(self) -> None:
        """Wait until nothing is pinned."""
        self._ask({"do": "saved"})

    def stream(
        self,
        running: list[int],
        new: list[list[int]],
        *,
        pid: int = 0,
        signal: signal.Signals = signal.SIGSTOP,
    ) -> Stream:
        """One long generation, during which new prompts come one after the other.

        Args:
            pid: of a process that gets this signal once the stream runs; 0: of none.
        """
        command = {"do": "stream", "running": running, "new": new, "pid": pid, "signal": signal}
        return Stream(**self._ask(command))

    def kill_before_load(self, pid: int) -> None:
        """``kill -9`` this process when the next load begins."""
        self._ask({"do": "kill_before_load", "pid": pid})

    def run(self, code: str, seconds: float = ANSWER_S) -> Any:
        """Run Python where ``llm``, vLLM's ``core`` and its ``connector`` are; what it leaves in
        ``result`` is returned."""
        return self._ask({"do": "run", "code": textwrap.dedent(code)}, seconds)

    def kill(self) -> None:
        """-9, the engine and all of its processes."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        process = self._process
        try:
            self._commands.close()
            process.wait(30)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        try:
            os.killpg(process.pid, signal.SIGKILL)  # what it left behind
        except ProcessLookupError:
            pass
        self._reader.join()
        self._said.close()
        self._errors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _ask(self, command: dict[str, object], seconds: float = ANSWER_S) -> Any:
        timer = threading.Timer(seconds, os.killpg, (self._process.pid, signal.SIGKILL))
        timer.start()
        try:
            self._commands.write(json.dumps(command) + "\n")
            self._commands.flush()
            line = self._said.readline()
        finally:
            timer.cancel()
            timer.join()
        if not line:
            self._reader.join(10)  # until the log ends, unless a child keeps it open
        assert line, "the engine has died, or did not answer in time:\n" + "".join(self.log[-60:])
        return json.loads(line)

    def _read_log(self) -> None:
        for line in self._errors:
            self.log.append(line)


def _pipe(mode: str) -> tuple[Any, Any]:
    """Its reading and its writing end, of which one is ours: the text file with this mode."""
    reading, writing = os.pipe()
    if mode == "r":
        return open(reading), writing
    return reading, open(writing, "w")


class Stream(NamedTuple):
    """Times of ``Engine.stream``."""

    worst_gap_s: float
    """Between two tokens of the running stream."""
    first_token_s: list[float]
    """Of each new prompt."""
    cached: list[int]


class Result:
    """Of one prompt."""

    def __init__(self, answer: dict[str, Any]) -> None:
        self.tokens: list[int] = answer["tokens"]
        self.cached: int = answer["cached"]
        """Tokens of the prompt that were not computed."""
        self.params: dict[str, Any] | None = answer["params"]
        self.reason: str | None = answer["reason"]
        """Why it ended: length, or error."""

    @property
    def stored_tokens(self) -> int:
        """What its parameters report; they have the key of the last block, too."""
        assert self.params is not None
        assert self.params.keys() == {"stored_tokens", "tip"}
        stored: int = self.params["stored_tokens"]
        return stored

    def __repr__(self) -> str:
        return f"Result(cached={self.cached}, tokens={self.tokens})"


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever vLLM prints is no answer of ours
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    given = json.loads(sys.stdin.readline())
    import msgspec
    from vllm import LLM, SamplingParams
    from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch

    if given.get("tensor_parallel_size", 1) == 1:
        given["distributed_executor_backend"] = "uni"
    llm = LLM(
        model=given.pop("model"), kv_transfer_config=given.pop("transfer"),
        **{"dtype": "float32", "max_model_len": 2048} | given,
        enforce_eager=True, gpu_memory_utilization=0.1, disable_log_stats=False,
    )  # fmt: skip
    core = llm.llm_engine.engine_core.engine_core
    told: list[Any] = []
    publisher = core.scheduler.kv_event_publisher
    wire, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(KVEventBatch)
    publisher.publish = lambda batch: told.extend(decoder.decode(wire.encode(batch)).events)
    shared = ("STORAGE", "REMOTE", "kvstore")

    def answer(value: object) -> None:
        print(json.dumps(value), file=out, flush=True)

    answer({"ready": True})
    for line in sys.stdin:
        command = json.loads(line)
        connector = core.scheduler.connector
        match command["do"]:
            case "generate":
                extra = {"kv_transfer_params": command["params"]} if command["params"] else None
                sampling = SamplingParams(
                    temperature=0, max_tokens=command["tokens"], ignore_eos=True, extra_args=extra
                )
                prompts = [{"prompt_token_ids": ids} for ids in command["prompts"]]
                outputs = llm.generate(prompts, sampling, use_tqdm=False)
                answer(
                    [
                        {
                            "tokens": list(each.outputs[0].token_ids),
                            "cached": each.num_cached_tokens or 0,
                            "params": each.kv_transfer_params,
                            "reason": each.outputs[0].finish_reason,
                        }
                        for each in outputs
                    ]
                )
            case "reset":
                answer(llm.reset_prefix_cache(reset_connector=command["store"]))
            case "saved":
                half = getattr(connector, "_decisions", None)  # none of a MultiConnector's own
                while half.has_pinned if half else connector.has_pending_push_work():
                    if half:  # steps go on, however long a save takes
                        half._last_pinned = time.monotonic()
                    llm.llm_engine.step()
                answer(True)
            case "stream":
                answer(_stream(llm.llm_engine, SamplingParams, command))
            case "run":
                names: dict[str, Any] = {"llm": llm, "core": core, "connector": connector}
                exec(command["code"], names)
                answer(names.get("result"))
            case "kill_before_load":
                _kill_before_load(command["pid"])
                answer(True)
            case "metrics":
                found = {
                    each.name.removeprefix("vllm:kvstore_"): getattr(each, "value", None)
                    for each in llm.get_metrics()
                    if each.name.startswith("vllm:kvstore_")
                }
                answer({name: value for name, value in found.items() if value is not None})
            case "events":
                answer(
                    [
                        {"kind": type(each).__name__, "keys": len(each.block_hashes)}
                        for each in told
                        if isinstance(each, BlockStored | BlockRemoved)
                        and (each.medium, each.locality, each.ownership) == shared
                    ]
                )
                told.clear()
    core.shutdown()
    out.flush()
    os._exit(0)  # what the interpreter has still to do takes three seconds and is no test of ours


def _stream(engine: Any, sampling: Any, command: dict[str, Any]) -> dict[str, Any]:
    def add(name: str, ids: list[int], tokens: int) -> None:
        params = sampling(temperature=0, max_tokens=tokens, ignore_eos=True)
        engine.add_request(name, {"prompt_token_ids": ids}, params)
        asked[name] = time.monotonic()

    asked: dict[str, float] = {}
    first: dict[str, float] = {}
    cached: dict[str, int] = {}
    worst = last = 0.0
    number = 0
    add("running", command["running"], 400)
    waiting = list(enumerate(command["new"]))
    while engine.has_unfinished_requests():
        for output in engine.step():
            now = time.monotonic()
            name = output.request_id
            if name != "running":
                if name not in first and output.outputs[0].token_ids:
                    first[name] = now - asked[name]
                    cached[name] = output.num_cached_tokens or 0
                continue
            number += 1
            if number > 50:  # it runs evenly
                worst = max(worst, now - last)
            last = now
            if number == 50 and command["pid"]:
                os.kill(command["pid"], command["signal"])
            if number >= 60 and number % 30 == 0 and waiting:
                index, ids = waiting.pop(0)
                add(f"new-{index}", ids, 1)
    names = [f"new-{index}" for index in range(len(command["new"]))]
    return {
        "worst_gap_s": worst,
        "first_token_s": [first[name] for name in names],
        "cached": [cached[name] for name in names],
    }


def _kill_before_load(pid: int) -> None:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    worker = get_kv_transfer_group()._worker
    load = worker.load

    def wrapped(orders: Any) -> None:
        if orders.loads:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        load(orders)

    worker.load = wrapped


if __name__ == "__main__":
    main()
