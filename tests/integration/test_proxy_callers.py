"""What a proxy does for its callers: HTTPS on its port, and a cache of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.proxy.cache_salts import CacheSalts
from tests.support.engines import World, play, tokens_of

BODY = {"model": "m", "prompt": "a prompt of five words", "stream": True}


# --- whose cache it is ------------------------------------------------------------------------

SECRET = "0123456789abcdef-secret"
SALTS = CacheSalts("authorization", SECRET)


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}"}


def salt(name: str, own: object = None) -> object:
    return SALTS.salted(f"Bearer {name}", {"cache_salt": own})["cache_salt"]


@pytest.fixture
def secret(tmp_path: Path) -> str:
    path = tmp_path / "secret"
    path.touch(0o600)
    path.write_text(SECRET)
    return str(path)


def test_every_engine_is_sent_the_salt_of_the_caller(tmp_path: Path, secret: str) -> None:
    async def scenario(w: World) -> None:
        for name, own in (("a", None), ("a", "s"), ("b", None), ("b", salt("a")), ("b", 7)):
            given = {} if own is None else {"cache_salt": own}
            assert (await w.complete(headers=bearer(name), **given))[0] == 200
            [render] = w.prefillers[0].renders + w.decoders[0].renders
            for call in (render, *w.prefillers[0].calls, *w.decoders[0].calls):
                assert call.body["cache_salt"] == salt(name, own)
                assert call.headers["Authorization"] == f"Bearer {name}"
            assert w.decoders[0].calls[0].body["prompt"] == tokens_of(render.body["prompt"])
            for engine in (*w.prefillers, *w.decoders):
                engine.calls.clear()
                engine.renders.clear()

    play(tmp_path, scenario, cache_salt_from="authorization", cache_salt_secret_file=secret)


def test_what_is_not_rendered_is_salted_too(tmp_path: Path, secret: str) -> None:
    """A body that is otherwise passed on as it is."""

    async def scenario(w: World) -> None:
        twice = b'{"model": "m", "prompt": ["a", "b"], "cache_salt": "x", "cache_salt": "y"}'
        async with w.http.post(
            w.url + "/v1/completions", data=twice, headers=bearer("a")
        ) as answer:
            assert answer.status == 200
        [call] = w.decoders[0].calls
        assert call.raw.count(b"cache_salt") == 1
        assert call.body["cache_salt"] == salt("a", "y")
        async with w.http.post(
            w.url + "/v1/chat/completions",
            json={"model": "m", "messages": [{"role": "user", "content": "one two"}]},
            headers=bearer("a"),
        ) as answer:
            assert answer.status == 200
        assert w.decoders[0].calls[-1].body["cache_salt"] == salt("a")

    play(
        tmp_path, scenario, prefill=0, cache_salt_from="Authorization",
        cache_salt_secret_file=secret,
    )  # fmt: skip


def test_without_the_header_a_request_is_refused(tmp_path: Path, secret: str) -> None:
    async def scenario(w: World) -> None:
        for path in ("/v1/completions", "/v1/chat/completions"):
            async with w.http.post(w.url + path, json=BODY, headers=bearer("a")) as answer:
                assert answer.status == 401
                assert (await answer.json())["error"]["type"] == "authentication_error"
                assert answer.headers["WWW-Authenticate"] == "Bearer"
        assert not w.decoders[0].calls + w.decoders[0].renders + w.prefillers[0].renders
        assert (await w.healthz())[0] == 200
        assert await w.metric('kvstore_proxy_requests_total{route="chat",status="401"}') == 1
        assert (await w.complete(headers={"X-User": "u"}))[0] == 200
        # Of the other requests with prompts, engines take the salt of responses alone.
        for path, code in (("/v1/responses", 200), ("/v1/messages", 404)):
            async with w.http.post(w.url + path, json=BODY, headers={"X-User": "u"}) as answer:
                assert answer.status == code
        assert w.decoders[0].calls[-1].url == "/v1/responses"
        assert w.decoders[0].calls[-1].body["cache_salt"]

    play(tmp_path, scenario, cache_salt_from="x-user", cache_salt_secret_file=secret)
