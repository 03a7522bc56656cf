"""Callers of one fleet that share no cache: salts that the proxy makes of their credentials."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from examples import fleet as servers
from examples.fleet import MODEL, forget
from examples.tiny import BLOCK_TOKENS
from tests.e2e.engines.conftest import prompt
from tests.e2e.engines.fleet import Fleet, Process, ask
from tests.e2e.engines.preloaded import ForkServer
from tests.support.cluster import Cluster
from tests.support.wait import until

WHOLE = 4 * BLOCK_TOKENS
Proxy = Callable[[list[Process], list[Process]], Process]


@pytest.fixture(scope="module")
def fleet(
    preloaded: ForkServer, llama: Path, shared: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    fleet = Fleet(preloaded, llama, shared.address, tmp_path_factory.mktemp("fleet"))
    for role in ("kv_producer", "kv_consumer"):
        fleet.engine(role)
    try:
        for each in fleet.engines:
            each.ready()
        yield fleet
    finally:
        fleet.close()


@pytest.fixture
def proxy(fleet: Fleet, preloaded: ForkServer, shared: Cluster, tmp_path: Path) -> Iterator[Proxy]:
    """Starts proxies that all have the same secret."""
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text(secrets.token_hex())
    started: list[Process] = []

    def start(prefill: list[Process], decode: list[Process]) -> Process:
        addresses = [[engine.address for engine in engines] for engines in (prefill, decode)]
        flags = [
            *servers.proxy_arguments(shared.address, *addresses),
            "--cache-salt-from", "authorization", "--cache-salt-secret-file", str(secret),
        ]  # fmt: skip
        log = tmp_path / f"proxy-{len(started)}.log"
        started.append(Process(preloaded, "kvstore.cli.proxy", flags, log, "/healthz"))
        started[-1].ready()
        return started[-1]

    yield start
    for each in started:
        each.close()


def cached(proxy: Process, caller: str, seed: str) -> int:
    """Tokens of the prompt that the decoder did not compute."""
    body = {"model": MODEL, "max_tokens": 1, "ignore_eos": True, "prompt": prompt(seed)}
    headers = {"Authorization": f"Bearer {caller}"}
    status, text = ask(proxy.address, "POST", "/v1/completions", body, headers)
    assert status == 200, text
    details = json.loads(text)["usage"]["prompt_tokens_details"] or {}
    return int(details.get("cached_tokens") or 0)


def outcomes(proxy: Process) -> list[str]:
    """What the proxy's log says of the first hop of each request."""
    return re.findall(r" prefill=(skipped:\w+|\w+)", proxy.log.read_text())


def test_a_caller_finds_its_own_in_the_store_and_no_other_does(fleet: Fleet, proxy: Proxy) -> None:
    prefiller, decoder = fleet.engines
    first, second = (proxy([prefiller], [decoder]) for _ in range(2))
    seed = "in the store"

    def stored() -> bool:
        forget(decoder.address)
        return cached(first, "alice", seed) == WHOLE and outcomes(first)[-1] == "skipped:stored"

    assert cached(first, "alice", seed) == WHOLE  # of what the prefiller has just stored
    until(stored, within_s=30)

    # The other proxy computes the same keys.
    forget(decoder.address)
    until(lambda: knows_models(second))
    assert cached(second, "alice", seed) == WHOLE
    until(lambda: outcomes(second) == ["skipped:stored"])  # is logged behind the answer

    # For another caller the store has nothing, so a prefiller computes the prompt again.
    saved = prefiller.counters()["save_blocks"]
    assert cached(second, "bob", seed) == WHOLE
    until(lambda: len(outcomes(second)) == 2)
    assert outcomes(second)[-1] != "skipped:stored"
    until(lambda: prefiller.counters()["save_blocks"] == saved + 4)
    assert cached(proxy([], [decoder]), "carol", seed) == 0


def knows_models(proxy: Process) -> bool:
    """Whether the proxy knows by now how to look prompts up."""
    return bool(json.loads(ask(proxy.address, "GET", "/healthz")[1])["models_known_in_store"])
