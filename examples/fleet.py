"""A model, vLLM engines and a proxy, and requests to them.

All processes listen only on the loopback interface. All files (models, logs, sockets) are in the
directory of the ``Children``, which is removed at the end. ``kvstore.bench.processes`` starts the
store.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.tiny import BLOCK_TOKENS, TEXT_TOKENS
from kvstore.bench import processes
from kvstore.bench.processes import ChildError, Children, Program, free_port

HOST = "127.0.0.1"
MODEL = "tiny"
"""The engines' name for the model."""
REQUEST_SECONDS = 120.0
RESET_SECONDS = 20.0
COUNTERS = "vllm:kvstore_"
SERVE = "vllm.entrypoints.openai.api_server"
"""The module behind ``vllm serve``. That command itself does not find vLLM's build for CPUs,
because that package has another name."""
CONNECTOR = "MooncakeStoreConnector"
"""kvstore's connector under the name of vLLM's own, as in a deployment that changes one line."""
CONNECTOR_MODULE = "kvstore.connectors.vllm"
POSITIONS = 2048
"""``--max-model-len``: the limit of the tokens of prompt and answer together."""

READY_SECONDS = 30.0
MODEL_SECONDS = 120.0
ENGINE_SECONDS = 600.0
"""Timeout of the start of several engines at once: six take 140 s on two idle cores."""


@dataclass(frozen=True)
class Server:
    child: Program
    address: str


def environment() -> dict[str, str]:
    """Return this process's environment without variables of kvstore and Mooncake, and with those
    that a small engine needs."""
    return processes.environment(
        HF_HUB_OFFLINE="1",
        TRANSFORMERS_OFFLINE="1",
        PYTHONUNBUFFERED="1",
        VLLM_NO_USAGE_STATS="1",
        VLLM_CPU_KVCACHE_SPACE="1",  # GiB
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_SERVER_DEV_MODE="1",  # for POST /reset_prefix_cache
        VLLM_HOST_IP=HOST,
        OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", "2"),
    )


def transfer_config(master: str, role: str, **extra: object) -> dict[str, object]:
    """Return the value of ``--kv-transfer-config`` for kvstore's connector.

    Args:
        role: ``kv_producer``, ``kv_consumer`` or ``kv_both``.
        extra: more settings. The timeout of lookups, and with it the wait for writers, is far
            longer than usual, because several engines share a few cores here.
    """
    return {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_role": role,
        "kv_connector_extra_config": {"master": master, "lookup_deadline_ms": 2_000, **extra},
    }


def make_model(
    children: Children, *, seed: int, hidden: int, layers: int, kind: str = "plain"
) -> Path:
    """Create a random model in the directory of the children; return its directory."""
    directory = children.directory / "model"
    sizes = {"--seed": seed, "--hidden": hidden, "--layers": layers, "--kind": kind}
    options = [word for name, value in sizes.items() for word in (name, str(value))]
    job = children.start("model", "examples.tiny", str(directory), *options)
    children.result(job, MODEL_SECONDS)
    return directory


def start_engine(
    children: Children,
    name: str,
    model: Path,
    transfer: Mapping[str, object] | None,
    *,
    options: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Server:
    """Start a vLLM server; ``engine_ready`` waits for it.

    Args:
        transfer: value of ``--kv-transfer-config``; None: without a connector.
        options: more options of the server; they override those of ``engine_arguments``.
        environ: variables that are added to the environment of the children.
    """
    port = free_port()
    arguments = [*engine_arguments(model, transfer), *options, "--port", str(port)]
    child = children.start(name, SERVE, *arguments, environment=environ)
    return Server(child, f"{HOST}:{port}")


def engine_arguments(model: Path, transfer: Mapping[str, object] | None) -> list[str]:
    """Return the arguments of ``SERVE``, without its port, for a small engine among several."""
    arguments = [
        "--model", str(model), "--served-model-name", MODEL, "--dtype", "float32",
        "--max-model-len", str(POSITIONS), "--enforce-eager", "--gpu-memory-utilization", "0.1",
        "--enable-prompt-tokens-details", "--host", HOST,
    ]  # fmt: skip
    if transfer is not None:
        arguments += ["--kv-transfer-config", json.dumps(transfer)]
    return arguments


def proxy_arguments(master: str, prefill: Sequence[str], decode: Sequence[str]) -> list[str]:
    """Return the arguments of ``kvstore-proxy``, without its port, from addresses."""
    return ["--master", master, "--prefill", ",".join(prefill), "--decode", ",".join(decode)]


def engine_ready(children: Children, engine: Server) -> None:
    children.ready(engine.child, r"Application startup complete", ENGINE_SECONDS)


def start_proxy(
    children: Children, master: str, prefill: Sequence[str], decode: Sequence[str]
) -> Server:
    """Start a proxy, and wait until it serves.

    Args:
        master: empty: the proxy does not use a store.
        prefill: addresses; empty: the decoders do all the work, in turn.
        decode: addresses.
    """
    port = free_port()
    arguments = [*proxy_arguments(master, prefill, decode), "--port", str(port)]
    child = children.start("proxy", "kvstore.cli.proxy", *arguments)
    children.ready(child, r"^kvstore-proxy .*listening on", READY_SECONDS)
    return Server(child, f"{HOST}:{port}")


def prompt(seed: int, name: object, tokens: int) -> list[int]:
    """Return token ids of random bytes: equal arguments give equal ids, other seeds or names do
    not."""
    chance = random.Random(f"{seed} {name}")  # noqa: S311  reproducible, no secret
    return chance.choices(TEXT_TOKENS, k=tokens)


def full_blocks(tokens: int, block_tokens: int = BLOCK_TOKENS) -> int:
    """Return the number of blocks that can be found. The last token is always computed."""
    return (tokens - 1) // block_tokens


class RequestError(ChildError):
    """A server did not answer, or sent a wrong response."""


@dataclass(frozen=True, kw_only=True)
class Completion:
    tokens: list[int]
    cached_tokens: int
    """Tokens of the prompt that the answering engine did not compute."""
    first_token_ms: float
    """Milliseconds from sending the request to the first token."""


def complete(
    address: str, prompt: list[int], tokens: int, *, params: Mapping[str, object] | None = None,
    headers: Mapping[str, str] | None = None,
) -> Completion:  # fmt: skip
    """Request a streamed completion of greedy tokens, over a new connection.

    Args:
        prompt: token ids.
        tokens: number of tokens to generate.
        params: ``kv_transfer_params`` of the request.
        headers: more headers of the request.

    Raises:
        RequestError: no response, a status that is not 200, or no tokens.
    """
    body: dict[str, object] = {
        "model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0,
        "ignore_eos": True, "return_token_ids": True, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    if params is not None:
        body["kv_transfer_params"] = dict(params)
    found: list[int] = []
    cached = 0
    first = 0.0
    start = time.perf_counter()
    with closing(_stream(address, body, headers or {})) as events:
        for event in events:
            for choice in event.get("choices") or ():
                found += choice.get("token_ids") or ()
            if found and not first:
                first = (time.perf_counter() - start) * 1e3
            if usage := event.get("usage"):
                details = usage.get("prompt_tokens_details") or {}
                cached = details.get("cached_tokens") or 0
    if not found:
        raise RequestError(f"{address} answered without a token")
    return Completion(tokens=found, cached_tokens=cached, first_token_ms=first)


def forget(address: str) -> None:
    """Empty an engine's own prefix cache. The store keeps its blocks.

    Raises:
        RequestError: the engine still holds blocks after ``RESET_SECONDS``, or did not answer.
    """
    deadline = time.monotonic() + RESET_SECONDS
    while not json.loads(ask(address, "POST", "/reset_prefix_cache")).get("success"):
        if time.monotonic() > deadline:
            raise RequestError(f"{address} does not empty its prefix cache: blocks are in use")
        time.sleep(0.05)


def counters(address: str) -> dict[str, float]:
    """Return the connector's counters and gauges by name without the prefix, summed over
    engines."""
    found: dict[str, float] = {}
    for line in ask(address, "GET", "/metrics").splitlines():
        if line.startswith(COUNTERS):
            name, _, value = line.rpartition(" ")
            name = name.partition("{")[0].removeprefix(COUNTERS).removesuffix("_total")
            found[name] = found.get(name, 0.0) + float(value)
    return found


def ask(address: str, method: str, path: str) -> str:
    """Send a request without a body, and return the text of the response.

    Raises:
        RequestError: no response, or a status that is not 200.
    """
    with _answer(address, method, path) as answer:
        return answer.read().decode(errors="replace")


def _stream(
    address: str, body: dict[str, object], headers: Mapping[str, str]
) -> Generator[dict[str, Any]]:
    """Yield the JSON of each server-sent event. Closing the generator ends the request."""
    with _answer(address, "POST", "/v1/completions", json.dumps(body), headers) as answer:
        for line in answer:
            if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                event = json.loads(line[6:])
                if "error" in event:
                    raise RequestError(f"{address}: {event['error']}")
                yield event


@contextmanager
def _answer(
    address: str, method: str, path: str, body: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Iterator[http.client.HTTPResponse]:  # fmt: skip
    """Return the response to a request over a new connection. Raises RequestError, also for the
    block."""
    connection = http.client.HTTPConnection(address, timeout=REQUEST_SECONDS)
    try:
        headers = {"Content-Type": "application/json", **(headers or {})}
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        if answer.status != 200:
            raise RequestError(f"{address}{path} answered {answer.status}: {answer.read(500)!r}")
        yield answer
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise RequestError(f"{address}{path}: {type(error).__name__}: {error}") from error
    finally:
        connection.close()
