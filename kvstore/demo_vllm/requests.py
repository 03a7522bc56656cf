"""HTTP to an engine or to the proxy, and an engine's counters.

Every failure is a ``RequestError``.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Generator, Mapping
from contextlib import closing
from dataclasses import dataclass
from threading import Event
from typing import Any

MODEL = "tiny"
"""The engines' name for the model."""
REQUEST_SECONDS = 120.0
RESET_SECONDS = 20.0
COUNTERS = "vllm:kvstore_"


class RequestError(Exception):
    """A server did not answer, or its answer is wrong."""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One answer to a prompt."""

    tokens: list[int]
    cached_tokens: int
    """Tokens of the prompt that the answering engine did not compute."""
    first_token_ms: float
    """Milliseconds from sending the request to the first token."""
    total_ms: float


def complete(
    address: str, prompt: list[int], tokens: int, *, params: Mapping[str, object] | None = None
) -> Completion:
    """Request a streamed answer of greedy tokens, over a new connection.

    Args:
        prompt: token ids.
        tokens: how many to generate.
        params: ``kv_transfer_params`` of the request.

    Raises:
        RequestError: no answer, a status that is not 200, or an answer without tokens.
    """
    body = _body(prompt, tokens)
    if params is not None:
        body["kv_transfer_params"] = dict(params)
    found: list[int] = []
    cached = 0
    first = 0.0
    start = time.perf_counter()
    with closing(_stream(address, body)) as events:
        for event in events:
            if ids := _tokens(event):
                found += ids
                first = first or (time.perf_counter() - start) * 1e3
            if usage := event.get("usage"):
                details = usage.get("prompt_tokens_details") or {}
                cached = details.get("cached_tokens") or 0
    if not found:
        raise RequestError(f"{address} answered without a token")
    total_ms = (time.perf_counter() - start) * 1e3
    return Completion(
        tokens=found, cached_tokens=cached, first_token_ms=first, total_ms=total_ms
    )  # fmt: skip


def token_times(
    address: str, prompt: list[int], tokens: int, stop: Event, started: Event
) -> list[float]:
    """The times at which the tokens of a streamed answer arrived, by ``time.perf_counter``.

    Args:
        stop: when set, ends the request at its next token.
        started: is set at the first token, and when the request has ended.

    Raises:
        RequestError: as for ``complete``.
    """
    times: list[float] = []
    try:
        with closing(_stream(address, _body(prompt, tokens))) as events:
            for event in events:
                times += [time.perf_counter()] * len(_tokens(event))
                if times:
                    started.set()
                if stop.is_set():
                    break
    finally:
        started.set()
    return times


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
    """The connector's counters and gauges by name without the prefix, added up over engines."""
    found: dict[str, float] = {}
    for line in ask(address, "GET", "/metrics").splitlines():
        if line.startswith(COUNTERS):
            name, _, value = line.rpartition(" ")
            name = name.partition("{")[0].removeprefix(COUNTERS).removesuffix("_total")
            found[name] = found.get(name, 0.0) + float(value)
    return found


def ask(address: str, method: str, path: str) -> str:
    """Send a request without a body, and return the text of the answer.

    Raises:
        RequestError: no answer, or a status that is not 200.
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


def _body(prompt: list[int], tokens: int) -> dict[str, object]:
    """The body of a request for greedy tokens, streamed."""
    return {
        "model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0,
        "ignore_eos": True, "return_token_ids": True, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip


def _tokens(event: dict[str, Any]) -> list[int]:
    """The token ids of a streamed event."""
    return [each for choice in event.get("choices") or () for each in choice.get("token_ids") or ()]


def _stream(address: str, body: dict[str, object]) -> Generator[dict[str, Any]]:
    """Yields the JSON of each server-sent event. Closing the generator ends the request."""
    connection = http.client.HTTPConnection(address, timeout=REQUEST_SECONDS)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        if answer.status != 200:
            raise RequestError(f"{address} answered {answer.status}: {answer.read(500)!r}")
        for line in answer:
            if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                event = json.loads(line[6:])
                if "error" in event:
                    raise RequestError(f"{address}: {event['error']}")
                yield event
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise RequestError(f"{address}: {type(error).__name__}: {error}") from error
    finally:
        connection.close()
