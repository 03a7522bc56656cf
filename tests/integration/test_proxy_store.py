"""A proxy that asks a real store what it holds before it asks a prefiller."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from aiohttp import web

from kvstore.calls.hint_envelopes import parse_envelope
from kvstore.limits import FLEET_NAMESPACE
from kvstore.proxy.records import block_hashes
from tests.support.certificates import Identities
from tests.support.cluster import Cluster
from tests.support.engines import Call, World, events, play
from tests.support.wait import until

BLOCK = 8
NONE_HASH = bytes(range(32))
NAMESPACES = ["m@group0", "m@group1"]
PROMPT = list(range(100, 141))
"""41 tokens: five full blocks and one token."""

THRESHOLD = 16
ACCEPTED = 'kvstore_proxy_hints_total{action="%s",outcome="accepted"}'
STORED = 'kvstore_proxy_prefill_skipped_total{reason="stored"}'


def record(**more: object) -> bytes:
    value = {
        "format": 1, "models": ["m"], "fingerprint": "f", "namespaces": NAMESPACES,
        "block_size": BLOCK, "hash_block_size": BLOCK // 2, "hash_algorithm": "sha256_cbor",
        "none_hash": NONE_HASH.hex(), "description": {}, **more,
    }  # fmt: skip
    return json.dumps(value).encode()


def put(cluster: Cluster, namespace: str, blocks: int, salt: str = "") -> None:
    """The first blocks of PROMPT; in the second namespace in halves, as of a group of layers with
    smaller blocks."""
    hashes = block_hashes(
        PROMPT, block_size=BLOCK // 2, none_hash=NONE_HASH, algorithm="sha256_cbor", blocks_max=99,
        salt=salt,
    )  # fmt: skip
    chain = list(hashes)[: 2 * blocks]
    if namespace == NAMESPACES[0]:
        chain = chain[1::2]
    cluster.client().put_chain(chain, [b"kv"] * len(chain), namespace=namespace)


async def known(w: World) -> bool:
    found: bool = (await w.healthz())[1]["models_known_in_store"] == ["m"]
    return found


def test_what_the_store_holds_is_not_prefilled_again(tmp_path: Path, cluster: Cluster) -> None:
    async def scenario(w: World) -> None:
        await w.until(lambda: known(w))
        prefiller = w.prefillers[0]

        assert (await w.complete(PROMPT))[0] == 200
        assert len(prefiller.calls) == 1  # nothing is there

        put(cluster, NAMESPACES[0], 5)
        put(cluster, NAMESPACES[1], 3)
        assert (await w.complete(PROMPT))[0] == 200
        assert len(prefiller.calls) == 2  # two blocks are not in every namespace: 16 tokens

        put(cluster, NAMESPACES[1], 4)
        assert (await w.complete(PROMPT))[0] == 200
        assert len(prefiller.calls) == 2  # eight tokens are fewer than the threshold
        assert await w.metric(STORED) == 1
        assert w.decoders[0].calls[-1].params == {}

        # The same tokens under other hashes: the engine would not find them.
        assert (await w.complete(PROMPT, cache_salt="s"))[0] == 200
        assert (await w.complete(PROMPT, model="adapter"))[0] == 200
        assert len(prefiller.calls) == 4
        assert (await w.complete(PROMPT, cache_salt="\ud800"))[0] == 200  # no salt: not looked up
        assert len(prefiller.calls) == 5

        for namespace in NAMESPACES:
            put(cluster, namespace, 5, salt="s")
        assert (await w.complete(PROMPT, cache_salt="s"))[0] == 200
        assert len(prefiller.calls) == 5
        assert (await w.complete(PROMPT, cache_salt="t"))[0] == 200
        assert len(prefiller.calls) == 6

    cluster.start()
    cluster.client().put("f", record(), namespace="vllm-fleet")
    cluster.client().put("broken", b"no record" * 20, namespace="vllm-fleet")
    cluster.client().put("old", record(format=0, models=["n"]), namespace="vllm-fleet")
    play(
        tmp_path, scenario, master=cluster.address, prefill_threshold=THRESHOLD,
        constants={"lookup:TIMEOUT_S": 5.0},
    )  # fmt: skip
    log = (tmp_path / "proxy.log").read_text()
    assert "fleet_read records=1 unusable=1" in log


def test_a_store_that_dies_costs_requests_nothing_but_the_hop(
    tmp_path: Path, cluster: Cluster
) -> None:
    async def scenario(w: World) -> None:
        await w.until(lambda: known(w))
        assert (await w.complete(PROMPT))[0] == 200
        assert not w.prefillers[0].calls
        cluster.master_server.kill()
        for _ in range(5):
            assert (await w.complete(PROMPT))[0] == 200
        assert len(w.prefillers[0].calls) == 5
        assert await w.metric('kvstore_proxy_lookups_total{outcome="failed"}') == 5
        # Three found out, each for as long as a lookup may take; the others did not ask.
        assert await w.metric("kvstore_proxy_lookup_seconds_count") == 4
        await asyncio.to_thread(begin_again)

        async def is_asked_again() -> bool:
            assert (await w.complete(PROMPT))[0] == 200
            return await w.metric(STORED) == 2

        await w.until(is_asked_again)

    def fill() -> None:
        cluster.client().put("f", record(), namespace="vllm-fleet")
        for namespace in NAMESPACES:
            put(cluster, namespace, 5)

    def begin_again() -> None:
        cluster.master()
        until(lambda: cluster.status().nodes)
        fill()

    cluster.start()
    fill()
    play(
        tmp_path, scenario, master=cluster.address, prefill_threshold=THRESHOLD,
        constants={"lookup:TIMEOUT_S": 0.2},
    )  # fmt: skip


def test_hints_of_answers_and_sessions_reach_the_store(tmp_path: Path, cluster: Cluster) -> None:
    called = {"finish_reason": "tool_calls", "delta": {}}

    async def of_tools(request: web.Request, call: Call) -> web.StreamResponse:
        """It ends in a tool's call; without a stream the connector's parameters say the tip."""
        if not call.body.get("stream"):
            params = {"stored_tokens": 16, "tip": tips[0].hex()}
            return web.json_response({"choices": [called], "kv_transfer_params": params})
        response = await events(request)
        await response.write(b"data: " + json.dumps({"choices": [called]}).encode() + b"\n\n")
        await response.write_eof()
        return response

    def hints(action: str) -> int:
        return dict(cluster.status().counters).get(f"hints.{action}.accepted", 0)

    async def counted(action: str, number: int) -> None:
        await asyncio.to_thread(until, lambda: hints(action) == number)

    async def scenario(w: World) -> None:
        await w.until(lambda: known(w))
        decoder = w.decoders[0]

        assert (await w.complete(PROMPT, headers={"X-KV-Session": "plain"}))[0] == 200
        decoder.answer = of_tools
        assert (await w.complete(PROMPT, headers={"X-KV-Session": "agent"}))[0] == 200
        await counted("retain", 2)  # in both namespaces
        async with w.streaming(PROMPT) as response:
            assert b"tool_calls" in await response.read()
        await counted("retain", 4)

        url = f"{w.url}/v1/sessions"
        for session in ("plain", "agent"):
            async with w.http.delete(f"{url}/{session}") as response:
                assert (response.status, (await response.json())["outcome"]) == (200, "accepted")
        async with w.http.delete(f"{url}/agent") as response:
            assert response.status == 404, "it is over"
        assert await asyncio.to_thread(hints, "release") == 4
        assert await w.metric(ACCEPTED % "session_end") == 2

        # What the client says itself is carried out by the decoder's connector.
        await w.complete([*PROMPT, *PROMPT], headers={"X-KV-Hint": "tool_wait=30"})
        (action,) = decoder.calls[-1].params["kv_hint"]["actions"]
        assert (action["action_type"], action["payload"]) == ("tool_wait", {"resume_ms": 30_000})
        parse_envelope(decoder.calls[-1].params["kv_hint"])
        assert "kv_hint" not in w.prefillers[0].calls[-1].params
        status, refused = await w.complete(PROMPT, headers={"X-KV-Hint": "nonsense"})
        assert (status, "tool_wait" in str(refused)) == (400, True)
        await w.complete(PROMPT)
        assert decoder.calls[-1].params == {}
        await counted("retain", 6)  # of the last answer alone

    hashes = block_hashes(
        PROMPT, block_size=BLOCK // 2, none_hash=NONE_HASH, algorithm="sha256_cbor", blocks_max=99
    )
    tips = list(hashes)[9::-2]
    cluster.start()
    cluster.client().put("f", record(), namespace="vllm-fleet")
    for namespace in NAMESPACES:
        put(cluster, namespace, 5)
    play(
        tmp_path, scenario, master=cluster.address, prefill_threshold=THRESHOLD,
        constants={"lookup:TIMEOUT_S": 5.0},
    )  # fmt: skip


@pytest.mark.slow
def test_with_authentication_it_reads_the_fleet_and_the_engines_namespaces(tmp_path: Path) -> None:
    """Its file is for reading only. Without the right ones every prompt goes to a prefiller."""
    identities = Identities(tmp_path)
    reading = [FLEET_NAMESPACE, "m@*"]

    async def whole(w: World) -> None:
        await w.until(lambda: known(w))
        assert (await w.complete(PROMPT))[0] == 200
        assert not w.prefillers[0].calls
        assert await w.metric(STORED) == 1

    async def refused(w: World) -> None:
        await w.until(lambda: known(w))
        for number in range(1, 6):
            assert (await w.complete(PROMPT))[0] == 200
            assert len(w.prefillers[0].calls) == number
        assert w.server.errors.count("lookup_refused model=m") == 1
        assert "may not read namespace 'm@" in w.server.errors

    with Cluster(tmp_path, identities=identities) as cluster:
        cluster.start()
        cluster.client().put("f", record(), namespace=FLEET_NAMESPACE)
        for namespace in NAMESPACES:
            put(cluster, namespace, 5)
        for name, reads, scenario in (
            ("proxy", reading, whole),
            ("fleet", reading[:1], refused),
        ):
            auth = identities.file(name, "engine", reads=reads)
            (tmp_path / f"of-{name}").mkdir()
            play(
                tmp_path / f"of-{name}", scenario, master=cluster.address, auth=auth,
                prefill_threshold=THRESHOLD, constants={"lookup:TIMEOUT_S": 5.0},
            )  # fmt: skip
