"""Engines for the tests of the proxy: small HTTP servers in the test's own event loop, which answer
as vLLM does, remember what they were asked, and fail where a test says so.

``play`` runs one scenario: engines, a real ``kvstore-proxy`` between them and a client, and at the
end everything is stopped as its users would.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import aiohttp
from aiohttp import web
from multidict import CIMultiDictProxy

from tests.support.processes import STOP_S, Server, flags_of

PROXY: Final = "kvstore.cli.proxy"
SCENARIO_S: Final = 60.0

QUICK: Final = {"prefill_threshold": 4}
"""Of a proxy, for tests with short prompts."""

QUICK_CONSTANTS: Final = {
    "kvstore.proxy.health:INTERVAL_S": 0.05,
    "kvstore.proxy.engine:CONNECT_TIMEOUT_S": 5.0,
}
"""Of a proxy, for tests that wait for a health check."""


class Call(NamedTuple):
    """What an engine was asked."""

    method: str
    url: str
    headers: CIMultiDictProxy[str]
    body: dict[str, Any]
    raw: bytes

    @property
    def request_id(self) -> str:
        return self.headers["X-Request-Id"]

    @property
    def params(self) -> dict[str, Any]:
        found: dict[str, Any] = self.body.get("kv_transfer_params") or {}
        return found


Answer = Callable[[web.Request, Call], Awaitable[web.StreamResponse]]


def tokens_of(text: str) -> list[int]:
    """One per word, as our engines tokenize: its length."""
    return [len(word) for word in text.split()]


def event(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"text": text}]}).encode() + b"\n\n"


async def events(request: web.Request) -> web.StreamResponse:
    """A stream that has begun, with no event in it yet."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    return response


async def answer_in_full(request: web.Request, call: Call) -> web.StreamResponse:
    """A few words, as a stream where that was asked for."""
    if not call.body.get("stream"):
        return web.json_response({"choices": [{"text": "one two"}], "from": request.host})
    response = await events(request)
    for word in ("one", "two"):
        await response.write(event(word))
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


def status(code: int) -> Answer:
    async def answer(_request: web.Request, _call: Call) -> web.StreamResponse:
        return web.json_response({"error": {"message": f"says {code}"}}, status=code)

    return answer


def stored(tokens: int) -> Answer:
    """A prefiller that says how much it is storing."""

    async def answer(_request: web.Request, _call: Call) -> web.StreamResponse:
        params = {"stored_tokens": tokens, "remote_port": 7}
        return web.json_response({"choices": [], "kv_transfer_params": params})

    return answer


async def hang_up(request: web.Request, _call: Call) -> web.StreamResponse:
    """The connection ends before the first byte."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


class BlockedAnswer:
    """An answer that stops after ``before`` until the test lets it go on."""

    def __init__(self, *before: bytes) -> None:
        self.before = before
        self.began = asyncio.Event()
        self.go_on = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.breaks = False
        """Whether going on means that the connection ends."""

    async def __call__(self, request: web.Request, call: Call) -> web.StreamResponse:
        try:
            response = await events(request) if self.before else None
            for piece in self.before:
                assert response is not None
                await response.write(piece)
            self.began.set()
            await self.go_on.wait()
            if self.breaks:
                return await hang_up(request, call)
            if response is None:
                return await answer_in_full(request, call)
            await response.write(event("last") + b"data: [DONE]\n\n")
            await response.write_eof()
            return response
        except (asyncio.CancelledError, ConnectionError):
            self.cancelled.set()
            raise


class Engine:
    """One engine; ``answer`` is what it does with a request for text."""

    def __init__(self) -> None:
        self.answer: Answer = answer_in_full
        self.calls: list[Call] = []
        self.renders: list[Call] = []
        self.render_status = 200
        self.health_status = 200
        self.address = ""
        self._runner: web.AppRunner | None = None

    async def start(self, port: int = 0) -> None:
        app = web.Application(client_max_size=1 << 26)
        for path in ("/v1/completions", "/v1/chat/completions"):
            app.router.add_post(path, self._text)
            app.router.add_post(path + "/render", self._render)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_route("*", "/{path:.*}", self._text)
        self._runner = web.AppRunner(
            app, handler_cancellation=True, shutdown_timeout=0.1, access_log=None
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", port).start()
        self.address = f"127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        """Nobody listens at its address any more."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _text(self, request: web.Request) -> web.StreamResponse:
        call = await _call(request)
        self.calls.append(call)
        return await self.answer(request, call)

    async def _render(self, request: web.Request) -> web.StreamResponse:
        call = await _call(request)
        self.renders.append(call)
        if self.render_status != 200:
            return web.json_response({"detail": "Not Found"}, status=self.render_status)
        if "messages" in call.body:
            text = " ".join(message["content"] for message in call.body["messages"])
            return web.json_response({"token_ids": tokens_of(text), "features": None})
        return web.json_response([{"token_ids": tokens_of(call.body["prompt"])}])

    async def _health(self, _request: web.Request) -> web.StreamResponse:
        return web.Response(status=self.health_status)

    async def _models(self, _request: web.Request) -> web.StreamResponse:
        return web.json_response({"object": "list", "data": [{"id": "m"}]})


async def _call(request: web.Request) -> Call:
    raw = await request.read()
    return Call(
        request.method, str(request.rel_url), request.headers, json.loads(raw or b"{}"), raw
    )


class World:
    """What a scenario is given."""

    def __init__(self, directory: Path) -> None:
        self.prefillers: list[Engine] = []
        self.decoders: list[Engine] = []
        self._engines: list[Engine] = []
        self._directory = directory
        self._server: Server | None = None
        self._session: aiohttp.ClientSession | None = None
        self.url = ""
        self.greeting = ""

    @property
    def server(self) -> Server:
        assert self._server is not None
        return self._server

    @property
    def http(self) -> aiohttp.ClientSession:
        assert self._session is not None
        return self._session

    async def start(
        self,
        prefill: int,
        decode: int,
        settings: dict[str, Any],
        constants: Mapping[str, object],
    ) -> None:
        self._session = aiohttp.ClientSession()
        self.prefillers = [await self.engine() for _ in range(prefill)]
        self.decoders = [await self.engine() for _ in range(decode)]
        given = {"host": "127.0.0.1", "port": 0} | QUICK | settings
        for role, engines in (("prefill", self.prefillers), ("decode", self.decoders)):
            given.setdefault(role, ",".join(engine.address for engine in engines))
        self._server = Server(
            PROXY, flags_of(given), log=self._directory / "proxy.log",
            constants={**QUICK_CONSTANTS, **constants},
        )  # fmt: skip
        # In a thread: the engines are asked for their health meanwhile.
        said = await asyncio.to_thread(self.server.line, r"listening on (\S+?);")
        self.url, self.greeting = f"http://{said[1]}", said.string

    async def engine(self, port: int = 0) -> Engine:
        """One more, which the proxy does not know."""
        engine = Engine()
        await engine.start(port)
        self._engines.append(engine)
        return engine

    async def stop(self) -> None:
        """As its users do; the proxy's log must be clean."""
        try:
            if self._session is not None:
                await self._session.close()
            if self._server is not None:
                if self.server.process.poll() is None:
                    self.server.process.send_signal(signal.SIGTERM)
                code = await self.ended()
                assert code == 0, self.server.errors
                assert "Traceback" not in self.server.errors, self.server.errors
        finally:
            if self._server is not None:
                self._server.close()
            for engine in self._engines:
                await engine.stop()

    def kill(self) -> None:
        """After a failure: show the proxy's log, and ask nothing more of it."""
        if self._server is not None:
            print(self._server.errors)
            self._server.close()
            self._server = None

    async def ended(self) -> int:
        return await asyncio.to_thread(self.server.wait, within_s=STOP_S)

    # --- asking -------------------------------------------------------------------------------

    async def complete(
        self, prompt: Any = "a prompt of five words", *, headers: Any = None, **more: Any
    ) -> tuple[int, Any]:
        """Status and JSON of one completion."""
        body = {"model": "m", "prompt": prompt, **more}
        async with self.http.post(
            self.url + "/v1/completions", json=body, headers=headers
        ) as response:
            return response.status, await response.json()

    async def chat(self, text: str = "a prompt of five words", **more: Any) -> tuple[int, Any]:
        messages = [{"role": "user", "content": text}]
        body = {"model": "m", "messages": messages, **more}
        async with self.http.post(self.url + "/v1/chat/completions", json=body) as response:
            return response.status, await response.json()

    def streaming(self, prompt: Any = "a prompt of five words", **more: Any) -> Any:
        """To be entered: the response of one streamed completion."""
        body = {"model": "m", "prompt": prompt, "stream": True, **more}
        return self.http.post(self.url + "/v1/completions", json=body)

    @asynccontextmanager
    async def connected(
        self, count: int, first: bytes
    ) -> AsyncIterator[list[asyncio.StreamReader]]:
        """So many connections of other clients, each of which has sent ``first`` and waits."""
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        pairs: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        try:
            for _ in range(count):
                pairs.append(await asyncio.open_connection(host, int(port)))
                pairs[-1][1].write(first)
            yield [reader for reader, _ in pairs]
        finally:
            for _, writer in pairs:
                writer.transport.abort()

    async def healthz(self) -> tuple[int, Any]:
        async with self.http.get(self.url + "/healthz") as response:
            return response.status, await response.json()

    async def state_of(self, engine: Engine) -> dict[str, Any] | None:
        """As the proxy sees it; None: it does not know it."""
        _, told = await self.healthz()
        rows = (row for row in told["instances"] if row["address"] == engine.address)
        return next(rows, None)

    async def until(self, ask: Callable[[], Awaitable[Any]]) -> Any:
        """What ``ask`` says once it is true; the scenario's own time bounds it."""
        while not (answer := await ask()):
            await asyncio.sleep(0.01)
        return answer

    async def logged(self, words: str) -> bool:
        """Whether the proxy's log has them by now: a request is logged after it was answered."""
        return words in self.server.errors

    async def until_healthy(self, engine: Engine, *, healthy: bool = True) -> None:
        async def as_wanted() -> bool:
            state = await self.state_of(engine)
            return state is not None and state["healthy"] == healthy

        await self.until(as_wanted)

    async def admin(self, method: str, path: str = "", **more: Any) -> tuple[int, Any]:
        url = f"{self.url}/admin/instances{path}"
        async with self.http.request(method, url, **more) as response:
            return response.status, await response.json()

    async def metric(self, name: str) -> float:
        """The value of one line of ``/metrics``: a name with its labels."""
        async with self.http.get(self.url + "/metrics") as response:
            text = await response.text()
        lines = (line.rpartition(" ") for line in text.splitlines())
        return next((float(value) for key, _, value in lines if key == name), 0.0)


Scenario = Callable[[World], Awaitable[None]]


def play(
    directory: Path,
    scenario: Scenario,
    *,
    prefill: int = 1,
    decode: int = 1,
    constants: Mapping[str, object] = MappingProxyType({}),
    **settings: Any,
) -> None:
    """Run it; whatever happens, nothing of it is left.

    Args:
        constants: of modules of the proxy, by ``module:NAME`` below ``kvstore.proxy``.
    """
    named = {f"kvstore.proxy.{name}": value for name, value in constants.items()}

    async def run() -> None:
        world = World(directory)
        try:
            await world.start(prefill, decode, settings, named)
            async with asyncio.timeout(SCENARIO_S):
                await scenario(world)
        except BaseException:
            world.kill()
            raise
        finally:
            await world.stop()

    asyncio.run(run())
