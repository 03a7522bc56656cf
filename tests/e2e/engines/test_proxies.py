"""The proxies in guides before two engines of this store.

Each sends the same request to both engines, with fields of other connectors that this one has to
leave alone. vLLM's ``toy_proxy_server.py`` is in Mooncake's wheel, as ``vllm_v1_proxy_server``, and
is run. Of the others, which no wheel has, the requests are sent.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from examples.fleet import MODEL, forget
from examples.tiny import BLOCK_TOKENS
from tests.e2e.engines.conftest import prompt
from tests.e2e.engines.fleet import Fleet, Process, ask
from tests.e2e.engines.preloaded import Preloaded
from tests.support.cluster import Cluster
from tests.support.waiting import until

Body = dict[str, Any]

PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
TOY_PROXY = "mooncake.vllm_v1_proxy_server"
STORED_S = 30.0
"""A decoder that is told nothing finds what is stored by then: the second time at the latest."""
SHORT = "San Francisco is a"
"""The prompt of the guides."""


class Pair(NamedTuple):
    """The addresses of a prefiller, a decoder, and the toy proxy before them."""

    prefiller: str
    decoder: str
    toy_proxy: str


@pytest.fixture(scope="module")
def pair(
    preloaded: Preloaded, llama: Path, shared: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    directory = tmp_path_factory.mktemp("pair")
    fleet = Fleet(preloaded, llama, shared.address, directory)
    prefiller, decoder = (fleet.engine(role) for role in ("kv_producer", "kv_consumer"))
    flags = [*_place("prefiller", prefiller), *_place("decoder", decoder)]
    fleet.proxy = Process(preloaded, TOY_PROXY, flags, directory / "proxy.log", "/healthcheck")
    try:
        for each in (prefiller, decoder, fleet.proxy):
            each.ready()
        yield Pair(prefiller.address, decoder.address, fleet.proxy.address)
    finally:
        fleet.close()


def _place(role: str, engine: Process) -> list[str]:
    return [f"--{role}-host", "127.0.0.1", f"--{role}-port", str(engine.port)]


# --- what the proxies send --------------------------------------------------------------------


def toy_proxy_server(pair: Pair, path: str, body: Body) -> str:
    """The program itself. The decoder is sent the parameters of the prefiller's answer."""
    return _ask(pair.toy_proxy, path, body)


def disagg_proxy_demo(pair: Pair, path: str, body: Body) -> str:
    """vLLM's, as the older ``disagg_prefill_proxy_server.py``: neither engine is told anything, and
    an answer that is to be streamed is, by the prefiller too."""
    _ask(pair.prefiller, path, _shortest(body))
    return _ask(pair.decoder, path, body)


def mooncake_connector_proxy(pair: Pair, path: str, body: Body) -> str:
    """vLLM's: it asks both engines at once. The program itself first asks a server that the
    prefiller of ``MooncakeConnector`` opens, and without one answers 503."""
    headers = _headers()
    transfer = {"transfer_id": f"xfer-{headers['X-Request-Id']}"}
    sent = {**_shortest(body), "stream": False, "kv_transfer_params": {**PREFILL, **transfer}}
    sent.pop("stream_options", None)
    remote = {
        "do_remote_decode": False, "do_remote_prefill": True, "remote_engine_id": "engine-0",
        "remote_bootstrap_addr": "http://127.0.0.1:8998", **transfer,
    }  # fmt: skip
    with ThreadPoolExecutor(1) as pool:
        prefill = pool.submit(
            _ask, pair.prefiller, path, sent, {**headers, "X-data-parallel-rank": "0"}
        )
        answer = _ask(pair.decoder, path, {**body, "kv_transfer_params": remote}, headers)
        prefill.result()
    return answer


GuidesProxy = Callable[[Pair, str, Body], str]
PROXIES = (toy_proxy_server, disagg_proxy_demo, mooncake_connector_proxy)
each_proxy = pytest.mark.parametrize("proxy", PROXIES, ids=lambda proxy: proxy.__name__)


# --- what is found ----------------------------------------------------------------------------


@each_proxy
@pytest.mark.parametrize("is_chat", [False, True], ids=["completions", "chat"])
def test_the_decoder_finds_what_the_prefiller_computed(
    pair: Pair, proxy: GuidesProxy, is_chat: bool
) -> None:
    seed = f"{proxy.__name__} {is_chat}"
    path, body = _chat(seed) if is_chat else _completion(seed)
    answers: list[str] = []

    def finds_all() -> bool:
        forget(pair.decoder)
        answers.append(proxy(pair, path, body))
        return _cached(answers[-1]) == 4 * BLOCK_TOKENS

    until(finds_all, within_s=STORED_S)
    if proxy is toy_proxy_server:
        assert len(answers) == 1, "the decoder waits for what the prefiller is storing"
    forget(pair.decoder)
    alone = _ask(pair.decoder, path, {**body, "kv_transfer_params": {"no_load": True}})
    assert _cached(alone) == 0
    assert [_said(each) for each in answers] == [_said(alone)] * len(answers)


@each_proxy
def test_a_prompt_that_is_shorter_than_a_block_is_answered(pair: Pair, proxy: GuidesProxy) -> None:
    path, body = _completion("")
    answer = proxy(pair, path, {**body, "prompt": SHORT})
    assert _cached(answer) == 0
    assert _said(answer) == _said(_ask(pair.decoder, path, {**body, "prompt": SHORT}))


# --- details ----------------------------------------------------------------------------------


def _completion(seed: str) -> tuple[str, Body]:
    ids = prompt(seed)
    return "/v1/completions", {
        "model": MODEL, "prompt": ids, "max_tokens": 8, "temperature": 0, "ignore_eos": True,
    }  # fmt: skip


def _chat(seed: str) -> tuple[str, Body]:
    """Streamed, with the fields that a proxy has to take out for the prefiller."""
    message = {"role": "user", "content": (seed + " what is a cache? ") * 100}
    message["content"] = message["content"][:600]
    return "/v1/chat/completions", {
        "model": MODEL, "messages": [message], "temperature": 0, "ignore_eos": True,
        "max_completion_tokens": 8, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip


def _shortest(body: Body) -> Body:
    """The request for an answer of one token."""
    limits = {"max_tokens", *({"max_completion_tokens"} & body.keys())}
    return {**body, **dict.fromkeys(limits, 1)}


def _headers() -> dict[str, str]:
    """The programs read the key from the environment, and send what is not there, too."""
    return {"Authorization": "Bearer None", "X-Request-Id": str(uuid.uuid4())}


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
