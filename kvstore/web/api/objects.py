"""Objects over HTTP: get, put, remove, list, pin.

This process holds a whole payload in memory: a get verifies all of it before the first byte leaves,
and a put has all of it before the store hears of it. ``Room`` bounds that memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from typing import Any, Final

from aiohttp import web
from pydantic import BaseModel, Field

from kvstore.calls import ObjectRow, PutOutcome
from kvstore.client.aio import AsyncClient
from kvstore.client.flows.getting import Raw
from kvstore.client.values import Described as Value
from kvstore.errors import BufferMismatchError, BusyError, StaleReadError, ValueTooLargeError
from kvstore.limits import (
    BATCH_KEYS_MAX,
    DEFAULT_NAMESPACE,
    PIN_MS_MAX,
    REPLICAS_MAX,
    TTL_MS_MAX,
)
from kvstore.texts import key_text
from kvstore.web.server.access import HEADERS
from kvstore.web.server.endpoints import (
    BYTES,
    HexKey,
    HexPrefix,
    Question,
    RefusedRequestError,
    endpoint,
)
from kvstore.web.server.serving import writing

PATH: Final = "/api/v1/objects"
LIST_PATH: Final = "/api/v1/objects/list"
REMOVE_PATH: Final = "/api/v1/remove"
PIN_PATH: Final = "/api/v1/pin"
UNPIN_PATH: Final = "/api/v1/unpin"

ROOM_BYTES: Final = 256 << 20
"""Payload bytes in memory at once, and so the largest payload; only HTTP has this bound."""

LEAST_BYTES: Final = 64 << 10
"""What a small payload counts as, for the buffers of its connection."""

WAITING_MAX: Final = 256
ROOM_S: Final = 10.0
"""How many requests wait for memory, and how long, before they are told to come again."""

TRANSFER_S: Final = 10.0
BYTES_PER_S_MIN: Final = 1 << 20
"""A payload may take ``TRANSFER_S``, plus its time at this rate, to come, be put, or leave."""

PIECE_BYTES: Final = 256 << 10
"""Bytes that are handed to a connection at once."""

TIMEOUT_MS: Final = 2_000
"""Timeout of a call to the store that moves no bytes."""

NodesOf = Callable[[Iterable[int]], Awaitable[Mapping[int, str]]]
"""Returns the names of the nodes of these segments, by segment; others may be among them."""

_NO_BYTES: Final = re.compile("bytes=-0+", re.IGNORECASE)
"""A ``Range`` that no object has: the last 0 bytes."""

VERSION: Final = "Kvstore-Version"
DESCRIPTOR: Final = "Kvstore-Descriptor"

_TOO_LARGE: Final = f"More than {ROOM_BYTES} bytes."
_NO_OBJECT: Final = "No such object."


class ObjectQuestion(Question):
    """Which object."""

    key: HexKey = Field(description="In hexadecimal.")
    namespace: str = DEFAULT_NAMESPACE


class PutQuestion(ObjectQuestion):
    """Which object, and how it is kept."""

    parent: HexKey | None = Field(
        default=None, description="Key of the object before it in its chain, in hexadecimal."
    )
    ttl_ms: int | None = Field(
        default=None, ge=1, le=TTL_MS_MAX, description="Time after which it is gone."
    )
    replicas: int | None = Field(default=None, ge=1, le=REPLICAS_MAX)
    overwrite: bool = Field(
        default=False, description="Write a new version even if the key exists."
    )


class ListQuestion(Question):
    """Which objects, and which page of them."""

    namespace: str = Field(default="", description="Empty: all.")
    prefix: HexPrefix = Field(default=b"", description="Of their keys, in hexadecimal.")
    cursor: int = Field(default=0, ge=0, lt=1 << 63, description="0: the first page.")


class RemoveQuestion(Question):
    """Which objects to remove, or to unpin."""

    keys: list[HexKey] = Field(max_length=BATCH_KEYS_MAX, description="In hexadecimal.")
    namespace: str = DEFAULT_NAMESPACE


class PinQuestion(RemoveQuestion):
    """Which objects to keep from eviction, and for how long."""

    seconds: float = Field(gt=0, le=PIN_MS_MAX / 1000, description="From now on.")


class PutAnswer(BaseModel):
    """What became of a put."""

    outcome: str = Field(description="stored, found (it was there already) or being_written.")
    size: int = Field(description="Payload bytes.")


class RemoveAnswer(BaseModel):
    removed: list[bool] = Field(description="Per key: whether there was such an object.")


class PinAnswer(BaseModel):
    pinned: list[bool] = Field(description="Per key: whether it is there, and pinned now.")


class UnpinAnswer(BaseModel):
    unpinned: list[bool] = Field(description="Per key: whether it was pinned.")


class ObjectAnswer(BaseModel):
    """One object."""

    namespace: str
    key: str = Field(description="In hexadecimal.")
    text: str = Field(description="The key as kvstore ls shows it.")
    size: int = Field(description="Payload bytes.")
    replicas: int
    depth: int = Field(description="Ancestors, as far as known.")
    leased_ms: int
    state: str = Field(description="complete, detached or being_written.")


class ListAnswer(BaseModel):
    """One page."""

    objects: list[ObjectAnswer]
    cursor: int = Field(description="Of the next page; 0: there is none.")


class Room:
    """Memory for payloads, given in the order of asking. Use it in one event loop."""

    def __init__(self, size: int) -> None:
        self.free = size
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @contextlib.asynccontextmanager
    async def of(self, size: int) -> AsyncIterator[None]:
        """The block may hold this many bytes. Raises BusyError: they did not come free in time."""
        size = max(size, LEAST_BYTES)
        await self._take(size)
        try:
            yield
        finally:
            self.free += size
            self._give()

    async def _take(self, size: int) -> None:
        if not self._waiting and size <= self.free:
            self.free -= size
            return
        if len(self._waiting) >= WAITING_MAX:
            raise BusyError(f"{WAITING_MAX} requests wait for memory")
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, granted))
        try:
            async with asyncio.timeout(ROOM_S):
                await granted
        except BaseException as error:
            if granted.done() and not granted.cancelled():
                self.free += size
            else:
                self._waiting.remove((size, granted))
            self._give()
            if isinstance(error, TimeoutError):
                raise BusyError(f"other payloads used the memory for {ROOM_S:g} s") from None
            raise

    def _give(self) -> None:
        while self._waiting and self._waiting[0][0] <= self.free:
            size, granted = self._waiting.popleft()
            if granted.cancelled():  # the task that waited for it takes it out of the line
                self._waiting.appendleft((size, granted))
                return
            self.free -= size
            granted.set_result(None)


class ObjectsAPI:
    """Gets, puts, removes, lists and pins as a client of the master. Use it in one event loop."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._room = Room(ROOM_BYTES)

    # --- bytes --------------------------------------------------------------------------------

    @endpoint(
        "GET", PATH,
        {200: "The payload.", 206: "The range of it that was asked for.", 404: _NO_OBJECT,
         413: _TOO_LARGE, 416: "No such range."},
        content=BYTES, is_trusted=True, has_own_bounds=True,
    )  # fmt: skip
    async def _get(self, request: web.Request, asked: ObjectQuestion) -> web.StreamResponse:
        """The bytes of an object, verified. Kvstore-Descriptor says what they are (JSON: kind,
        dtype, shape); Kvstore-Version names the put."""
        for _ in range(2):  # a larger version may have replaced the object after the lookup
            found = await self._client.lookup(
                [asked.key], namespace=asked.namespace, timeout_ms=TIMEOUT_MS
            )
            size = found[0]
            if size is None:
                raise _missing()
            if size > ROOM_BYTES:
                raise RefusedRequestError(
                    413, f"the object has {size} bytes; over HTTP {ROOM_BYTES} can be fetched"
                )
            with contextlib.suppress(BufferMismatchError):
                async with self._room.of(size):
                    raw = await self._client.get_raw(
                        asked.key,
                        namespace=asked.namespace,
                        size_max=size,
                        timeout_ms=int(1000 * _seconds(size)),
                    )
                    if raw is None:
                        raise _missing()
                    return await _send(request, raw)
        raise StaleReadError("the object is being replaced")

    @endpoint(
        "PUT", PATH,
        {201: "Stored by this request.", 200: "It was there already.",
         202: "Another client is writing it at this moment.", 408: "The body was too slow.",
         411: "There is no Content-Length.", 413: _TOO_LARGE,
         507: "The pool is full of leased and pinned objects."},
        is_trusted=True, has_own_bounds=True,
    )  # fmt: skip
    async def _put(self, request: web.Request, asked: PutQuestion) -> tuple[int, PutAnswer]:
        """Store bytes."""
        size = request.content_length
        if size is None:
            raise RefusedRequestError(411, "a put needs a Content-Length")
        if size > ROOM_BYTES:
            raise ValueTooLargeError(f"over HTTP {ROOM_BYTES} bytes can be put, not {size}")
        async with self._room.of(size):
            body = await _body(request, size)
            outcome = await self._client.put(
                asked.key,
                body,
                namespace=asked.namespace,
                parent=asked.parent,
                ttl=None if asked.ttl_ms is None else asked.ttl_ms / 1000,
                replicas=asked.replicas,
                overwrite=asked.overwrite,
                timeout_ms=int(1000 * _seconds(size)),
            )
        status = {PutOutcome.STORED: 201, PutOutcome.BEING_WRITTEN: 202}.get(outcome, 200)
        return status, PutAnswer(outcome=outcome.name.lower(), size=size)

    # --- the rest -----------------------------------------------------------------------------

    @endpoint("DELETE", PATH, {204: "Removed.", 404: _NO_OBJECT}, is_trusted=True)
    async def _delete(self, asked: ObjectQuestion) -> None:
        """Remove an object."""
        if not await self._client.remove(asked.key, namespace=asked.namespace):
            raise _missing()

    @endpoint("POST", REMOVE_PATH, {200: "Done."}, is_trusted=True)
    async def _remove(self, asked: RemoveQuestion) -> RemoveAnswer:
        """Remove objects."""
        removed = await self._client.remove_many(asked.keys, namespace=asked.namespace)
        return RemoveAnswer(removed=removed)

    @endpoint(
        "POST", PIN_PATH, {200: "Done.", 507: "Pins hold their share of the pool."},
        is_trusted=True,
    )  # fmt: skip
    async def _pin(self, asked: PinQuestion) -> PinAnswer:
        """Keep objects, and those before them in their chains, from eviction."""
        pinned = await self._client.pin(asked.keys, asked.seconds, namespace=asked.namespace)
        return PinAnswer(pinned=pinned)

    @endpoint("POST", UNPIN_PATH, {200: "Done."}, is_trusted=True)
    async def _unpin(self, asked: RemoveQuestion) -> UnpinAnswer:
        """End the pins of objects."""
        unpinned = await self._client.unpin(asked.keys, namespace=asked.namespace)
        return UnpinAnswer(unpinned=unpinned)

    @endpoint("GET", LIST_PATH, {200: "One page."})
    async def _list(self, asked: ListQuestion) -> ListAnswer:
        """Objects, a page of up to 1,000 at a time."""
        page = await self._client.list_page(
            asked.namespace, asked.prefix, asked.cursor, timeout_ms=TIMEOUT_MS
        )
        return ListAnswer(
            objects=[ObjectAnswer(**fields_of(each)) for each in page.objects],
            cursor=page.next_cursor,
        )


def fields_of(row: ObjectRow) -> dict[str, Any]:
    """The fields of an ``ObjectAnswer``."""
    return {**row._asdict(), "key": row.key.hex(), "text": key_text(row.key)}


def _seconds(size: int) -> float:
    """How long a payload of this size may take to come, to be put, or to leave."""
    return TRANSFER_S + size / BYTES_PER_S_MIN


def _missing() -> RefusedRequestError:
    return RefusedRequestError(404, "no such object")


async def _body(request: web.Request, size: int) -> bytearray:
    """The body, which must come in time. If the client leaves, this coroutine is cancelled."""
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0
    body, at = bytearray(size), 0
    try:
        async with asyncio.timeout(_seconds(size)):
            async for piece in request.content.iter_any():
                body[at : at + len(piece)] = piece
                at += len(piece)
    except TimeoutError:
        raise RefusedRequestError(
            408, f"the body did not come within {_seconds(size):.0f} s"
        ) from None
    assert at == size, "the parser counts the bytes"
    return body


async def _send(request: web.Request, raw: Raw) -> web.StreamResponse:
    """The payload, or the range of it that was asked for."""
    size = len(raw.data)
    version = f"{raw.version.epoch}.{raw.version.counter}"
    headers = {
        **HEADERS,
        "Content-Type": BYTES,
        "Accept-Ranges": "bytes",
        "ETag": f'"{version}"',
        VERSION: version,
        DESCRIPTOR: _descriptor(raw.described),
    }
    part = slice(0, size)
    if (
        "Range" in request.headers
        and request.headers.get("If-Range", f'"{version}"') == f'"{version}"'
    ):
        with contextlib.suppress(ValueError):  # what is no range of bytes is ignored (RFC 9110)
            start, stop, _ = request.http_range.indices(size)
            if start >= stop or _NO_BYTES.fullmatch(request.headers["Range"]):
                headers["Content-Range"] = f"bytes */{size}"
                return web.Response(
                    status=416,
                    text="no such range\n",
                    headers={
                        name: value for name, value in headers.items() if name != "Content-Type"
                    },
                )
            part = slice(start, stop)
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
    data = raw.data[part]
    response = web.StreamResponse(
        status=206 if "Content-Range" in headers else 200, headers=headers
    )
    response.content_length = len(data)
    await response.prepare(request)
    with writing(request):
        if request.method != "HEAD":
            async with asyncio.timeout(_seconds(len(data))):  # other payloads need the memory
                for start in range(0, len(data), PIECE_BYTES):
                    await response.write(data[start : start + PIECE_BYTES])
        await response.write_eof()
    return response


def _descriptor(value: Value) -> str:
    """The descriptor as JSON, without the control characters that a client may have put there."""
    text = json.dumps({"kind": value.kind, "dtype": value.dtype, "shape": value.shape})
    return text.replace("\x7f", "\\u007f")
