"""The proxy of the guides, vLLM's ``toy_proxy_server.py``, before two engines of this store.

It is in Mooncake's wheel, as ``vllm_v1_proxy_server``. It sends the same request to both engines,
with fields of other connectors that this one has to leave alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from examples.fleet import MODEL, forget
from examples.tiny import BLOCK_TOKENS
from tests.e2e.engines.conftest import prompt
from tests.e2e.engines.fleet import Fleet, Process, ask
from tests.e2e.engines.preloaded import ForkServer
from tests.support.cluster import Cluster

Body = dict[str, Any]

TOY_PROXY = "mooncake.vllm_v1_proxy_server"


class Pair(NamedTuple):
    """The addresses of a decoder, and of the proxy before it and a prefiller."""

    decoder: str
    toy_proxy: str


@pytest.fixture(scope="module")
def pair(
    preloaded: ForkServer, llama: Path, shared: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    directory = tmp_path_factory.mktemp("pair")
    fleet = Fleet(preloaded, llama, shared.address, directory)
    prefiller, decoder = (fleet.engine(role) for role in ("kv_producer", "kv_consumer"))
    flags = [*_place("prefiller", prefiller), *_place("decoder", decoder)]
    fleet.proxy = Process(preloaded, TOY_PROXY, flags, directory / "proxy.log", "/healthcheck")
    try:
        for each in (prefiller, decoder, fleet.proxy):
            each.ready()
        yield Pair(decoder.address, fleet.proxy.address)
    finally:
        fleet.close()


def _place(role: str, engine: Process) -> list[str]:
    return [f"--{role}-host", "127.0.0.1", f"--{role}-port", str(engine.port)]


@pytest.mark.parametrize("is_chat", [False, True], ids=["completions", "chat"])
def test_the_decoder_finds_what_the_prefiller_computed(pair: Pair, is_chat: bool) -> None:
    """The proxy hands on what the prefiller says of itself: the decoder waits for its blocks."""
    path, body = _chat() if is_chat else _completion()
    answer = _ask(pair.toy_proxy, path, body)
    assert _cached(answer) == 4 * BLOCK_TOKENS
    forget(pair.decoder)
    alone = _ask(pair.decoder, path, {**body, "kv_transfer_params": {"no_load": True}})
    assert _cached(alone) == 0
    assert _said(answer) == _said(alone)


def _completion() -> tuple[str, Body]:
    ids = prompt("a completion")
    return "/v1/completions", {
        "model": MODEL, "prompt": ids, "max_tokens": 8, "temperature": 0, "ignore_eos": True,
    }  # fmt: skip


def _chat() -> tuple[str, Body]:
    """Streamed, with the fields that a proxy has to take out for the prefiller."""
    message = {"role": "user", "content": ("What is a cache? " * 100)[:600]}
    return "/v1/chat/completions", {
        "model": MODEL, "messages": [message], "temperature": 0, "ignore_eos": True,
        "max_completion_tokens": 8, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip


def _ask(address: str, path: str, body: Body, headers: dict[str, str] | None = None) -> str:
    status, text = ask(address, "POST", path, body, headers)
    assert status == 200, text
    return text


def _events(answer: str) -> list[Body]:
    """The parts of an answer, which is streamed or not."""
    if not answer.startswith("data: "):
        return [json.loads(answer)]
    lines = [line[6:] for line in answer.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def _said(answer: str) -> str:
    choices = [choice for event in _events(answer) for choice in event["choices"]]
    return "".join(
        each.get("text") or each.get("delta", {}).get("content") or "" for each in choices
    )


def _cached(answer: str) -> int:
    """Tokens of the prompt that the decoder did not compute."""
    details = _events(answer)[-1]["usage"]["prompt_tokens_details"] or {}
    return int(details.get("cached_tokens") or 0)
