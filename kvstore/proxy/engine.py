"""HTTP to engines: short requests and long responses, with a timeout for each wait.

A request without a complete response raises ``EngineError``; an engine's own error is a response.
"""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Final, Literal, NamedTuple

import aiohttp

ANSWER_BYTES_MAX: Final = 64 << 20
"""Limit of a buffered response: a rendered prompt of a million tokens is 8 MiB."""

IDLE_CONNECTION_S: Final = 2.0
"""Lifetime of an idle connection. uvicorn closes idle connections after 5 s, and a request sent at
that moment would fail."""

CONNECT_TIMEOUT_S = 2.0
"""Connection timeout: time for two lost SYNs."""

IDLE_TIMEOUT_S = 120.0
"""Maximum silence within a response, of either side."""

LINE_BYTES_MAX: Final = 1 << 16

# Requests uncompressed responses, because compressed ones could not be relayed in chunks.
AS_IT_IS: Final = {"Accept-Encoding": "identity"}

EngineFailure = Literal["refused", "connect", "broken", "timeout"]


class EngineError(Exception):
    """An engine did not answer, or its response ended too early.

    Attributes:
        failure: ``refused``: no process listens there; ``connect``: no connection for another
            reason; ``broken``: the connection ended too early, or the response was not HTTP;
            ``timeout``: the engine took too long.
    """

    def __init__(self, address: str, failure: EngineFailure, detail: str) -> None:
        super().__init__(f"{address}: {failure}: {detail}")
        self.address: Final = address
        self.failure: Final = failure

    @property
    def is_unconnected(self) -> bool:
        """Whether there was no connection, so that the engine has not received the request."""
        return self.failure in ("refused", "connect")


class EngineAnswer(NamedTuple):
    """A complete response of an engine."""

    status: int
    headers: Mapping[str, str]
    data: bytes

    @property
    def is_ok(self) -> bool:
        return 200 <= self.status < 300

    def json(self) -> object:
        """Return the response as JSON; None if it is not JSON."""
        try:
            value: object = json.loads(self.data)
        except (ValueError, RecursionError):
            return None
        return value


class EngineClient:
    """Connections to all engines. Close it with ``close``."""

    def __init__(self) -> None:
        self._session = aiohttp.ClientSession(
            # The proxy limits requests when they arrive; a limit here would only delay them.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_CONNECTION_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            max_line_size=LINE_BYTES_MAX,
            max_field_size=LINE_BYTES_MAX,
        )

    async def close(self) -> None:
        await self._session.close()

    async def post(
        self,
        method: Literal["GET", "POST"],
        address: str,
        path: str,
        *,
        timeout_ms: int,
        headers: Mapping[str, str] | None = None,
        data: bytes | None = None,
    ) -> EngineAnswer:
        """Send a request and read its complete response. Redirections are not followed.

        Raises:
            EngineError: no response in time, or one larger than ``ANSWER_BYTES_MAX``.
        """
        with _errors(address):
            async with (
                asyncio.timeout(timeout_ms / 1000),
                self._session.request(
                    method,
                    f"http://{address}{path}",
                    data=data,
                    headers={**(headers or {}), **AS_IT_IS},
                    allow_redirects=False,
                ) as response,
            ):
                content = bytearray()
                async for piece in response.content.iter_any():
                    content += piece
                    if len(content) > ANSWER_BYTES_MAX:
                        raise EngineError(address, "broken", f"over {ANSWER_BYTES_MAX} bytes")
                return EngineAnswer(response.status, response.headers, bytes(content))

    @asynccontextmanager
    async def stream(
        self,
        method: str,
        address: str,
        path: str,
        *,
        first_byte_timeout_s: float,
        headers: Mapping[str, str],
        data: bytes,
    ) -> AsyncIterator[tuple[aiohttp.ClientResponse, bytes]]:
        """Send a request and wait for the first bytes of its response, which are empty only if all
        of it is; ``rest`` reads the others. Leaving the block before the end of the response closes
        the connection, which stops the engine.

        Raises:
            EngineError: no byte arrived in time, or the connection failed.
        """
        with _errors(address):
            async with asyncio.timeout(first_byte_timeout_s):
                response = await self._session.request(
                    method,
                    f"http://{address}{path}",
                    data=data or None,
                    headers={**headers, **AS_IT_IS},
                    allow_redirects=False,
                )
                try:
                    first = await response.content.readany()
                except BaseException:
                    response.close()
                    raise
        try:
            yield response, first
        finally:
            response.close()  # no effect if the connection has been returned to the pool


async def rest(address: str, response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield the chunks of a response after its first bytes, each as soon as it arrives.

    Raises:
        EngineError: no chunk within the idle timeout, or the connection broke.
    """
    while True:
        with _errors(address):
            async with asyncio.timeout(IDLE_TIMEOUT_S):
                piece = await response.content.readany()
        if not piece:
            return
        yield piece


@contextmanager
def _errors(address: str) -> Iterator[None]:
    try:
        yield
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        reason = getattr(error, "os_error", None)
        refused = isinstance(reason, OSError) and reason.errno == errno.ECONNREFUSED
        raise EngineError(address, "refused" if refused else "connect", _detail(error)) from error
    except TimeoutError as error:
        raise EngineError(address, "timeout", "no answer in time") from error
    except (aiohttp.ClientError, aiohttp.http.HttpProcessingError, OSError) as error:
        raise EngineError(address, "broken", _detail(error)) from error


def _detail(error: BaseException) -> str:
    return f"{type(error).__name__} {error}".strip()
