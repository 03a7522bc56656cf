"""HTTP to an engine or to the proxy, and what an engine counts. Times are wall-clock milliseconds.

Everything that goes wrong is a ``RequestError``.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

MODEL = "tiny"
"""What the engines call the model."""
REQUEST_SECONDS = 120.0
RESET_SECONDS = 20.0
COUNTERS = "vllm:kvstore_"


class RequestError(Exception):
    """A server did not answer, or not as it should."""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One answer."""

    tokens: list[int]
    cached_tokens: int
    """Of the prompt: not computed by the engine that answered."""
    first_token_ms: float
    """From sending the request to the first token."""
    total_ms: float


def complete(
    address: str, prompt: list[int], tokens: int, *, params: Mapping[str, object] | None = None
) -> Completion:
    """Ask for greedy tokens, streamed, over a connection of its own.

    Args:
        prompt: token ids.
        tokens: how many to generate.
        params: ``kv_transfer_params`` of the request.

    Raises:
        RequestError: no answer, one that is not 200, or one without tokens.
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
    connection = http.client.HTTPConnection(address, timeout=REQUEST_SECONDS)
    data = json.dumps(body)
    start = time.perf_counter()
    try:
        connection.request("POST", "/v1/completions", data, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise RequestError(f"{address} answered {answer.status}: {answer.read(500)!r}")
        for event in _events(answer):
            if "error" in event:
                raise RequestError(f"{address}: {event['error']}")
            for choice in event.get("choices") or ():
                found += choice.get("token_ids") or ()
                first = first or (time.perf_counter() - start) * 1e3
            if usage := event.get("usage"):
                details = usage.get("prompt_tokens_details") or {}
                cached = details.get("cached_tokens") or 0
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise RequestError(f"{address}: {type(error).__name__}: {error}") from error
    finally:
        connection.close()
    if not found:
        raise RequestError(f"{address} answered without a token")
    total_ms = (time.perf_counter() - start) * 1e3
    return Completion(
        tokens=found, cached_tokens=cached, first_token_ms=first, total_ms=total_ms
    )  # fmt: skip


def forget(address: str) -> None:
    """Empty an engine's own prefix cache. What the store has stays.

    Raises:
        RequestError: it still holds blocks after ``RESET_SECONDS``, or did not answer.
    """
    deadline = time.monotonic() + RESET_SECONDS
    while not json.loads(ask(address, "POST", "/reset_prefix_cache")).get("success"):
        if time.monotonic() > deadline:
            raise RequestError(f"{address} does not empty its prefix cache: blocks are in use")
        time.sleep(0.05)


def counters(address: str) -> dict[str, float]:
    """The connector's counters and gauges, without their prefix, added up over engines."""
    found: dict[str, float] = {}
    for line in ask(address, "GET", "/metrics").splitlines():
        if line.startswith(COUNTERS):
            name, _, value = line.rpartition(" ")
            name = name.partition("{")[0].removeprefix(COUNTERS).removesuffix("_total")
            found[name] = found.get(name, 0.0) + float(value)
    return found


def ask(address: str, method: str, path: str) -> str:
    """The text of an answer.

    Raises:
        RequestError: none, or one that is not 200.
    """
    connection = http.client.HTTPConnection(address, timeout=REQUEST_SECONDS)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        text = answer.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        raise RequestError(f"{address}{path}: {type(error).__name__}: {error}") from error
    finally:
        connection.close()
    if answer.status != 200:
        raise RequestError(f"{address}{path} answered {answer.status}: {text[:500]}")
    return text


def _events(answer: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON of each server-sent event."""
    for line in answer:
        if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
            yield json.loads(line[6:])
