"""A real proxy between fake engines: who is asked what, and what clients see when engines fail."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

from tests.support.engines import (
    PROXY,
    BlockedAnswer,
    Call,
    World,
    event,
    hang_up,
    play,
    status,
    stored,
    tokens_of,
)
from tests.support.processes import Server

PROMPT = "a prompt of five words"
IDS = tokens_of(PROMPT)


# --- both hops ---------------------------------------------------------------------------------


def test_a_completion_is_rendered_once_prefilled_and_decoded(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        w.prefillers[0].answer = stored(4)
        code, answer = await w.complete(
            max_tokens=50,
            min_tokens=5,
            logprobs=2,
            temperature=0,
            kv_transfer_params={"mine": 1},
            headers={"X-Request-Id": "r-1", "Authorization": "Bearer key"},
        )
        assert (code, answer["choices"]) == (200, [{"text": "one two"}])

        [render] = w.prefillers[0].renders + w.decoders[0].renders
        assert render.body["prompt"] == PROMPT
        [first] = w.prefillers[0].calls
        assert first.body == {
            "model": "m", "prompt": IDS, "temperature": 0, "stream": False, "n": 1,
            "max_tokens": 1, "kv_transfer_params": {"mine": 1},
        }  # fmt: skip
        [second] = w.decoders[0].calls
        assert second.body == {
            "model": "m", "prompt": IDS, "max_tokens": 50, "min_tokens": 5, "logprobs": 2,
            "temperature": 0, "kv_transfer_params": {"mine": 1, "stored_tokens": 4},
        }  # fmt: skip
        assert (first.request_id, second.request_id) == ("r-1-prefill", "r-1")
        for call in (render, first, second):
            assert call.headers["Authorization"] == "Bearer key"

    play(tmp_path, scenario)


def test_a_request_id_is_made_and_told_everywhere(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        body = {"model": "m", "prompt": PROMPT}
        async with w.http.post(
            w.url + "/v1/completions", json=body, headers={"X-Request-Id": "not fit"}
        ) as response:
            made = response.headers["X-Request-Id"]
        assert made not in ("", "not fit")
        assert w.decoders[0].calls[0].request_id == made
        assert w.prefillers[0].calls[0].request_id == f"{made}-prefill"
        await w.until(lambda: w.logged(f"id={made} route=completions status=200 tokens=5"))

    play(tmp_path, scenario)


def test_without_rendering_both_hops_get_the_text(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        engines = [*w.prefillers, *w.decoders]
        for engine in engines:
            engine.render_status = 404
        for _ in range(4):
            assert (await w.complete())[0] == 200
        assert [call.body["prompt"] for call in w.prefillers[0].calls] == [PROMPT] * 4
        raw = w.decoders[0].calls[0].raw
        assert raw == json.dumps({"model": "m", "prompt": PROMPT}).encode()  # byte for byte
        # Each was asked once and not again.
        assert [len(engine.renders) for engine in engines] == [1, 1]

    play(tmp_path, scenario)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"prompt": "too short"}, "short"),
        ({"kv_transfer_params": {"no_load": True}}, "no_load"),
    ],
)
def test_no_prefiller_where_it_would_not_help(
    tmp_path: Path, more: dict[str, object], reason: str
) -> None:
    async def scenario(w: World) -> None:
        assert (await w.complete(**more))[0] == 200
        assert not w.prefillers[0].calls
        assert len(w.decoders[0].calls) == 1
        name = f'kvstore_proxy_prefill_skipped_total{{reason="{reason}"}}'
        assert await w.metric(name) == 1

    play(tmp_path, scenario)


# --- streams -----------------------------------------------------------------------------------


def test_a_stream_is_relayed_piece_by_piece_as_it_comes(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        w.decoders[0].answer = held = BlockedAnswer(event("first"))
        async with w.streaming(stream_options={"include_usage": True}) as response:
            # The decoder has not gone on yet: what came was not held back.
            assert await response.content.readuntil(b"\n\n") == event("first")
            assert response.headers["Content-Type"].startswith("text/event-stream")
            held.go_on.set()
            assert await response.content.read() == event("last") + b"data: [DONE]\n\n"
        assert "stream_options" not in w.prefillers[0].calls[0].body
        assert w.decoders[0].calls[0].body["stream_options"] == {"include_usage": True}

    play(tmp_path, scenario)


def test_a_client_that_leaves_stops_the_decoder(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        w.decoders[0].answer = held = BlockedAnswer(event("first"))
        async with w.streaming() as response:
            await response.content.readuntil(b"\n\n")
            response.close()
        await held.cancelled.wait()
        left = 'kvstore_proxy_requests_total{route="completions",status="499"}'
        await w.until(lambda: w.metric(left))
        assert (await w.healthz())[1]["in_flight"] == 0

    play(tmp_path, scenario)


# --- prefillers that fail ----------------------------------------------------------------------


def test_a_prefiller_that_fails_is_replaced_by_another_one(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        failing, working = w.prefillers
        failing.answer = hang_up
        working.answer = stored(4)
        for _ in range(2):  # whichever is first, one of the two requests meets the failing one
            assert (await w.complete())[0] == 200
        assert len(failing.calls) >= 1
        assert len(working.calls) == 2
        assert [call.params for call in w.decoders[0].calls] == [{"stored_tokens": 4}] * 2

    play(tmp_path, scenario, prefill=2)


def test_a_slow_prefiller_costs_its_time_out_and_no_more(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        w.prefillers[0].answer = held = BlockedAnswer()
        assert (await w.complete())[0] == 200
        assert held.began.is_set()
        await held.cancelled.wait()  # it was told to stop
        await w.until(lambda: w.logged("prefill=failed:"))

    play(tmp_path, scenario, prefill_timeout_ms=100)


@pytest.mark.parametrize(("code", "asked"), [(500, 2), (422, 1)])
def test_prefillers_that_fail_or_refuse_leave_it_to_the_decoder(
    tmp_path: Path, code: int, asked: int
) -> None:
    async def scenario(w: World) -> None:
        for engine in w.prefillers:
            engine.answer = status(code)
        assert (await w.complete())[0] == 200
        assert sum(len(engine.calls) for engine in w.prefillers) == asked
        assert w.decoders[0].calls[0].params == {}

    play(tmp_path, scenario, prefill=3)


# --- decoders that fail ------------------------------------------------------------------------


@pytest.mark.parametrize("failure", [hang_up, status(500), status(503)])
def test_a_decoder_that_fails_before_its_first_byte_is_replaced(
    tmp_path: Path, failure: object
) -> None:
    async def scenario(w: World) -> None:
        failing, working = w.decoders
        failing.answer = failure  # type: ignore[assignment]
        w.prefillers[0].answer = stored(4)
        for _ in range(2):
            assert (await w.complete())[0] == 200
        assert len(failing.calls) >= 1
        assert len(working.calls) == 2
        assert len(w.prefillers[0].calls) == 2  # not again for the second decoder
        assert {call.params["stored_tokens"] for call in working.calls} == {4}

    play(tmp_path, scenario, decode=2)


def test_decoders_that_all_fail_are_tried_so_often_and_the_last_one_tells(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        for engine in w.decoders:
            engine.answer = status(500)
        assert await w.complete() == (500, {"error": {"message": "says 500"}})
        assert sum(len(engine.calls) for engine in w.decoders) == 3  # of four
        for engine in w.decoders:
            engine.answer = hang_up
        code, answer = await w.complete()
        assert (code, answer["error"]["type"]) == (502, "upstream_error")

    play(tmp_path, scenario, decode=4)


def test_a_stream_that_breaks_ends_with_an_event_that_says_so(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        for engine in w.decoders:
            engine.answer = held = BlockedAnswer(event("first"), b'data: {"half')
            held.breaks = True
            held.go_on.set()
        async with w.streaming() as response:
            *_, half, last, nothing = (await response.content.read()).split(b"\n\n")
        assert (half, nothing) == (b'data: {"half', b"")
        error = json.loads(last.removeprefix(b"data: "))["error"]
        assert (error["type"], error["code"]) == ("upstream_error", 502)
        assert sum(len(engine.calls) for engine in w.decoders) == 1  # nobody began again
        broken = 'kvstore_proxy_requests_total{route="completions",status="502"}'
        await w.until(lambda: w.metric(broken))

    play(tmp_path, scenario, decode=2)


def test_an_answer_that_breaks_and_is_no_stream_does_not_look_whole(tmp_path: Path) -> None:
    async def half(request: web.Request, _call: Call) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        await response.write(b'{"choices": ')
        return await hang_up(request, _call)

    async def scenario(w: World) -> None:
        w.decoders[0].answer = half
        body = {"model": "m", "prompt": PROMPT}
        async with w.http.post(w.url + "/v1/completions", json=body) as response:
            assert response.status == 200
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.read()

    play(tmp_path, scenario)


def test_a_stream_that_falls_silent_ends_with_an_event_that_says_so(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        w.decoders[0].answer = held = BlockedAnswer(event("first"))
        async with w.streaming() as response:
            *_, last, _ = (await response.content.read()).split(b"\n\n")
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == 504
        await held.cancelled.wait()

    play(tmp_path, scenario, constants={"engine:IDLE_TIMEOUT_S": 0.2})


def test_a_decoder_without_a_first_byte_is_waited_for_so_long(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        for engine in w.decoders:
            engine.answer = BlockedAnswer()
        code, answer = await w.complete()
        assert (code, answer["error"]["code"]) == (504, 504)
        assert sum(len(engine.calls) for engine in w.decoders) == 1  # not twice as long

    play(tmp_path, scenario, decode=2, constants={"decode:FIRST_BYTE_TIMEOUT_S": 0.2})


def test_a_prefix_goes_where_it_went_before(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        prompts = {start: [start] * 64 for start in (1, 2)}
        for start in (1, 2, 2, 1, 1, 2):
            assert (await w.complete([*prompts[start], *range(70)]))[0] == 200
        for engine in (*w.prefillers, *w.decoders):
            assert len(engine.calls) == 3
            assert len({call.body["prompt"][0] for call in engine.calls}) == 1

    play(tmp_path, scenario, prefill=2, decode=2, affinity="prefix")


# --- instances that come and go ----------------------------------------------------------------


def test_an_instance_is_added_and_removed_while_the_proxy_runs(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        new = await w.engine()
        row = {"role": "decode", "address": new.address}
        code, told = await w.admin("POST", json=row)
        assert (code, told["healthy"], told["role"]) == (201, True, "decode")
        assert (await w.admin("POST", json=row))[0] == 200  # it is there already
        assert (await w.complete())[0] == 200
        assert len(new.calls) == 1
        assert (await w.admin("POST", f"/{new.address}/drain"))[0] == 202
        assert (await w.admin("GET"))[1] == {"instances": []}
        assert (await w.admin("POST", json=row))[0] == 201
        code, told = await w.admin("DELETE", f"/{new.address}")
        assert (code, len(told["instances"])) == (200, 1)
        assert (await w.complete())[0] == 503
        assert (await w.admin("DELETE", f"/{new.address}"))[0] == 404
        assert (await w.admin("GET"))[1] == {"instances": []}

    play(tmp_path, scenario, prefill=0, decode=0)


@pytest.mark.parametrize(
    "body", ["", "[]", '{"role": "cook", "address": "a:1"}', '{"role": "decode", "address": "a"}']
)
def test_what_is_no_instance(tmp_path: Path, body: str) -> None:
    async def scenario(w: World) -> None:
        code, told = await w.admin("POST", data=body)
        assert (code, told["error"]["type"]) == (400, "invalid_request_error")
        assert (await w.admin("GET"))[1] == {"instances": []}

    play(tmp_path, scenario, prefill=0, decode=0)


# --- bounds ------------------------------------------------------------------------------------


def test_beyond_the_bound_clients_are_told_to_come_back(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        w.decoders[0].answer = held = BlockedAnswer(event("first"))
        async with w.streaming() as response:
            await response.content.readuntil(b"\n\n")
            async with w.streaming() as second:
                assert (second.status, second.headers["Retry-After"]) == (503, "1")
                assert "X-Request-Id" in second.headers
            held.go_on.set()
            await response.content.read()
        async with w.streaming() as third:
            assert third.status == 200
        assert len(w.decoders[0].calls) == 2

    play(tmp_path, scenario, constants={"serving:INFLIGHT_MAX": 1})


def test_a_body_that_is_too_large_or_no_json_is_refused(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        code, answer = await w.complete("x" * 2_000)
        assert (code, answer["error"]["code"]) == (413, 413)
        for data in (b"", b"{", b"[1]", b"\xff"):
            async with w.http.post(w.url + "/v1/completions", data=data) as response:
                assert response.status == 400
        assert not w.decoders[0].calls

    play(tmp_path, scenario, constants={"serving:BODY_BYTES_MAX": 1_024})


def test_a_body_that_does_not_come_is_not_waited_for(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        host, _, port = w.url.removeprefix("http://").rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
        assert b" 408 " in await reader.readline()
        writer.close()
        await writer.wait_closed()

    play(tmp_path, scenario, constants={"serving:BODY_TIMEOUT_S": 0.2})


SLOW_BODY = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{"


@pytest.mark.parametrize("first", [SLOW_BODY, b""], ids=["body", "idle"])
def test_requests_are_answered_beside_many_that_do_not_come(tmp_path: Path, first: bytes) -> None:
    async def scenario(w: World) -> None:
        async with w.connected(1_100, first):
            for _ in range(20):
                async with aiohttp.ClientSession() as session:  # a new connection each
                    body = {"model": "m", "prompt": PROMPT}
                    async with session.post(w.url + "/v1/completions", json=body) as response:
                        assert response.status == 200
        assert len(w.decoders[0].calls) == 20

    play(tmp_path, scenario)


def test_the_body_that_has_been_coming_longest_gives_way(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        async with w.connected(3, SLOW_BODY) as (oldest, *others):
            assert b" 503 " in await oldest.readline()
            assert (await w.complete())[0] == 200
            assert b" 503 " in await others[0].readline()

    play(tmp_path, scenario, constants={"serving:INFLIGHT_MAX": 2})


# --- busy engines ------------------------------------------------------------------------------


def test_when_nobody_listens_at_any_decoder_nothing_is_computed(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        [gone] = w.decoders
        port = int(gone.address.rpartition(":")[2])
        await gone.stop()
        await w.until_healthy(gone, healthy=False)
        assert (await w.healthz())[1]["status"] == "no decoder"
        body = {"model": "m", "prompt": PROMPT}
        async with w.http.post(w.url + "/v1/completions", json=body) as response:
            assert (response.status, response.headers["Retry-After"]) == (503, "1")
        assert not w.prefillers[0].calls
        await gone.start(port)
        await w.until_healthy(gone)
        assert (await w.complete())[0] == 200

    play(tmp_path, scenario)


# --- operators ---------------------------------------------------------------------------------


def test_models_health_metrics_and_the_first_line(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        assert w.decoders[0].address in w.greeting
        assert w.prefillers[0].address in w.greeting
        assert "this host only" in w.greeting
        async with w.http.get(w.url + "/v1/models") as response:
            assert (await response.json())["data"] == [{"id": "m"}]
        code, told = await w.healthz()
        assert (code, told["status"], len(told["instances"])) == (200, "ok", 2)
        await w.complete()
        assert await w.metric('kvstore_proxy_requests_total{route="completions",status="200"}') == 1
        at = f'{{instance="{w.decoders[0].address}",role="decode"}}'
        assert await w.metric(f"kvstore_proxy_instance_healthy{at}") == 1
        assert await w.metric('kvstore_proxy_prefill_seconds_count{outcome="done"}') == 1
        assert await w.metric('kvstore_proxy_first_byte_seconds_count{route="completions"}') == 1

    play(tmp_path, scenario)


def test_requests_of_other_apis_reach_a_decoder_unchanged(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        bad, good = w.decoders
        bad.answer = hang_up
        for method, path, body in (
            ("POST", "/v1/messages?beta=true", b'{"model": "m",  "max_tokens": 1}'),
            ("DELETE", "/v1/responses/r%2F1", b""),
            ("OPTIONS", "/v1/chat/completions", b""),
        ):
            headers = {"X-Api-Key": "k", "Content-Type": "application/json"}
            async with w.http.request(
                method, URL(w.url + path, encoded=True), data=body or None, headers=headers
            ) as response:
                assert response.status == 200
            call = good.calls[-1]
            assert (call.method, call.url, call.raw) == (method, path, body)
            assert call.headers["X-Api-Key"] == "k"
        assert not w.prefillers[0].calls + w.prefillers[0].renders
        # Only /v1/: engines do not ask for keys elsewhere.
        calls = len(bad.calls + good.calls)
        for path in ("/reset_prefix_cache", "/v1/%2e%2e/reset_prefix_cache"):
            async with w.http.post(URL(w.url + path, encoded=True)) as response:
                assert response.status == 404
                assert "/v1/" in (await response.json())["error"]["message"]
        assert len(bad.calls + good.calls) == calls

    play(tmp_path, scenario, decode=2)


def test_sigterm_ends_what_runs_and_takes_nothing_new(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        w.decoders[0].answer = held = BlockedAnswer(event("first"))
        async with w.streaming() as response:
            await response.content.readuntil(b"\n\n")
            await asyncio.gather(w.healthz(), w.healthz())  # two connections that stay open
            w.server.process.send_signal(signal.SIGTERM)
            await w.until(lambda: _refuses(w))
            assert w.server.process.poll() is None
            assert (await w.complete())[0] == 503  # on a connection that is still there
            assert (await w.healthz())[1]["status"] == "stopping"
            held.go_on.set()
            assert (await response.content.read()).endswith(b"data: [DONE]\n\n")
        assert await w.ended() == 0

    async def _refuses(w: World) -> bool:
        try:
            async with aiohttp.ClientSession() as session, session.get(w.url + "/healthz"):
                return False
        except aiohttp.ClientConnectorError:
            return True

    play(tmp_path, scenario)


def test_sigterm_does_not_wait_longer_than_the_grace(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        w.decoders[0].answer = held = BlockedAnswer(event("first"))
        async with w.streaming() as response:
            await response.content.readuntil(b"\n\n")
            w.server.process.send_signal(signal.SIGTERM)
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.content.read()
        assert await w.ended() == 0
        await held.cancelled.wait()

    play(tmp_path, scenario, constants={"main:GRACE_S": 0.1})


def test_a_port_in_use_is_told_in_one_line(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        port = w.url.rpartition(":")[2]
        second = Server(PROXY, ["--port", port], log=tmp_path / "second.log")
        try:
            assert await asyncio.to_thread(second.wait) == 1
            assert f"port {port} for HTTP is taken on 127.0.0.1" in second.errors
            assert "Traceback" not in second.errors
        finally:
            second.close()

    play(tmp_path, scenario, prefill=0, decode=0)
