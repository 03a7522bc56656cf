"""What a proxy does for its callers: HTTPS on its port."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

import aiohttp
import pytest

from tests.support.engines import PROXY, Held, World, event, play
from tests.support.http import certificate
from tests.support.processes import Server

BODY = {"model": "m", "prompt": "a prompt of five words", "stream": True}


def test_over_tls_with_a_certificate_that_is_renewed(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "first")
    other_cert, other_key = certificate(tmp_path, "second")
    first, second = (ssl.create_default_context(cafile=each) for each in (cert, other_cert))

    async def scenario(w: World) -> None:
        assert "; https; prefill" in w.greeting
        url = w.url.replace("http://", "https://")

        async def health(trusting: ssl.SSLContext) -> int:
            # Each time a connection of its own: an open one keeps its certificate.
            async with (
                aiohttp.ClientSession() as http,
                http.get(url + "/healthz", ssl=trusting) as answer,
            ):
                return answer.status

        held = w.decoders[0].answer = Held(event("first"))
        async with w.http.post(url + "/v1/completions", json=BODY, ssl=first) as answer:
            assert await answer.content.readuntil(b"\n\n") == event("first")
            held.go_on.set()
            assert (await answer.content.read()).endswith(b"data: [DONE]\n\n")
        assert await health(first) == 200
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await health(second)
        with pytest.raises(aiohttp.ClientError):
            await w.healthz()  # plain HTTP

        os.replace(other_cert, cert)  # half of a renewal: the pair before it serves on
        assert await health(first) == 200
        os.replace(other_key, key)
        assert await health(second) == 200

    play(tmp_path, scenario, http_cert=cert, http_key=key)


def test_a_client_that_leaves_over_tls_stops_the_decoder(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "first")
    trusting = ssl.create_default_context(cafile=cert)

    async def scenario(w: World) -> None:
        url = w.url.replace("http://", "https://")
        held = w.decoders[0].answer = Held(event("first"))
        async with w.http.post(url + "/v1/completions", json=BODY, ssl=trusting) as answer:
            await answer.content.readuntil(b"\n\n")
            assert answer.connection is not None
            assert answer.connection.transport is not None
            answer.connection.transport.abort()
        await held.cancelled.wait()

    play(tmp_path, scenario, http_cert=cert, http_key=key)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--http-cert", os.devnull], "http_key is missing"),
        (["--http-cert", os.devnull, "--http-key", os.devnull], "are no certificate and key"),
    ],
)
def test_files_that_are_of_no_use_are_told_in_one_line(
    tmp_path: Path, flags: list[str], said: str
) -> None:
    server = Server(PROXY, ["--port", "0", *flags], log=tmp_path / "proxy.log")
    try:
        assert server.wait() == 2
        assert said in server.errors
        assert "Traceback" not in server.errors
    finally:
        server.close()
