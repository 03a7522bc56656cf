"""Operations on keys over HTTP: match, exists, details of one object, remove, pin and unpin.

Keys are bytes, so they travel in hexadecimal. Payloads do not pass through HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Final, TypeVar

from aiohttp import web
from pydantic import BaseModel, Field

from kvstore import calls
from kvstore.client.async_client import AsyncClient
from kvstore.console.api.schemas import KeyText, Shape, shaped
from kvstore.http.operations import ApiRequest, HexKey, endpoint
from kvstore.limits import BATCH_KEYS_MAX, DEFAULT_NAMESPACE, NAMESPACES_MAX, PIN_MS_MAX

MATCH_PATH: Final = "/api/v1/match"
EXISTS_PATH: Final = "/api/v1/exists"
STAT_PATH: Final = "/api/v1/stat"
REMOVE_PATH: Final = "/api/v1/remove"
PIN_PATH: Final = "/api/v1/pin"
UNPIN_PATH: Final = "/api/v1/unpin"

TIMEOUT_MS: Final = 2_000
"""Timeout of a call to the store."""

SHARE: Final = 0.2
"""The share of time that may go into expensive queries, if one takes under half a second."""

REST_S: Final = 2.0
"""The longest pause between two of them."""

ResultT = TypeVar("ResultT")

NodesOf = Callable[[Iterable[int]], Awaitable[Mapping[int, str]]]
"""Returns the names of the nodes of these segments, by segment; others may be among them."""


class QueryThrottle:
    """Expensive queries: one at a time, then a pause, whoever asks. Use it in one event loop."""

    def __init__(self) -> None:
        self.lock: Final = asyncio.Lock()
        """Held by the caller of ``run``."""
        self._rest_until = 0.0

    async def run(self, call: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """Calls, after a pause. Raises what the call raises."""
        await asyncio.sleep(self._rest_until - time.monotonic())
        started = time.monotonic()
        try:
            return await call()
        finally:
            ended = time.monotonic()
            self._rest_until = ended + min(REST_S, (ended - started) * (1 / SHARE - 1))


class MatchRequest(ApiRequest):
    """How many of these keys, from the first on, are stored?"""

    keys: list[HexKey] = Field(
        max_length=BATCH_KEYS_MAX, description="Of a chain, from its root; in hexadecimal."
    )
    namespaces: list[str] = Field(
        default=[DEFAULT_NAMESPACE],
        min_length=1,
        max_length=NAMESPACES_MAX,
        description="Where to look; each has an answer of its own.",
    )


class ObjectRequest(ApiRequest):
    """Which object."""

    key: HexKey = Field(description="In hexadecimal.")
    namespace: str = DEFAULT_NAMESPACE


class KeysRequest(ApiRequest):
    """Which objects."""

    keys: list[HexKey] = Field(max_length=BATCH_KEYS_MAX, description="In hexadecimal.")
    namespace: str = DEFAULT_NAMESPACE


class PinRequest(KeysRequest):
    """Which objects to keep from eviction, and for how long."""

    seconds: float = Field(gt=0, le=PIN_MS_MAX / 1000, description="From now on.")


class NamespaceMatch(BaseModel):
    """Of one namespace."""

    namespace: str
    matched: int = Field(description="Leading keys that are stored; they are leased by this.")
    being_written: int = Field(description="Keys after those that are being written now.")
    nodes: list[str] = Field(description="Nodes that hold the last matched block.")


class MatchResponse(BaseModel):
    matches: list[NamespaceMatch]


class ExistsResponse(BaseModel):
    exists: list[bool] = Field(description="Per key.")


class RemoveResponse(BaseModel):
    removed: list[bool] = Field(description="Per key: whether there was such an object.")


class PinResponse(BaseModel):
    pinned: list[bool] = Field(description="Per key: whether it is there, and pinned now.")


class UnpinResponse(BaseModel):
    unpinned: list[bool] = Field(description="Per key: whether it was pinned.")


class ReplicaLocation(BaseModel):
    node: str
    segment: int
    offset: int


@shaped(calls.ObjectRow)
@shaped(calls.ObjectDetail, without=("row", "placements", "epoch"))
class StatResponse(Shape):
    """One object."""

    text: KeyText = Field(description="The key as kvstore ls shows it.")
    parent: str | None = Field(description="Its key, in hexadecimal.")
    version: str
    replicas: list[ReplicaLocation]


class LookupsAPI:
    """Answers programs by asking the master as a client. Use it in one event loop."""

    def __init__(self, client: AsyncClient, nodes_of: NodesOf) -> None:
        self._client = client
        self._nodes_of = nodes_of

    @endpoint("POST", MATCH_PATH, {200: "In each namespace."})
    async def _match(self, asked: MatchRequest) -> MatchResponse:
        """The longest stored prefix."""
        found = await self._client.matches(
            asked.keys, namespaces=asked.namespaces, timeout_ms=TIMEOUT_MS
        )
        segments = [
            await self._segments(namespace, asked.keys[match.matched - 1]) if match.matched else []
            for namespace, match in zip(asked.namespaces, found, strict=True)
        ]
        names = await self._nodes_of(chain.from_iterable(segments))
        return MatchResponse(
            matches=[
                NamespaceMatch(
                    namespace=namespace,
                    matched=match.matched,
                    being_written=match.being_written,
                    nodes=[names[each] for each in holding if each in names],
                )
                for namespace, match, holding in zip(asked.namespaces, found, segments, strict=True)
            ]
        )

    @endpoint("POST", EXISTS_PATH, {200: "Per key."})
    async def _exists(self, asked: KeysRequest) -> ExistsResponse:
        """What is stored."""
        found = await self._client.exists_many(
            asked.keys, namespace=asked.namespace, timeout_ms=TIMEOUT_MS
        )
        return ExistsResponse(exists=found)

    @endpoint("GET", STAT_PATH, {200: "What is known of it.", 404: "No such object."})
    async def _stat(self, asked: ObjectRequest) -> StatResponse:
        """One object."""
        found = await self._client.stat(asked.key, namespace=asked.namespace, timeout_ms=TIMEOUT_MS)
        if found is None or found.detail.row is None:
            raise web.HTTPNotFound(text="no such object\n")
        detail, row = found.detail, found.detail.row
        names = await self._nodes_of(detail.placements.segments)
        places = zip(detail.placements.segments, detail.placements.offsets, strict=True)
        told = {
            "text": row.key,
            "parent": detail.parent.hex() or None,
            "version": f"{detail.version.epoch}.{detail.version.counter}",
            "replicas": [
                ReplicaLocation(node=names.get(segment, ""), segment=segment, offset=offset)
                for segment, offset in places
            ],
        }
        return StatResponse.model_validate(detail._asdict() | row._asdict() | told)

    @endpoint("POST", REMOVE_PATH, {200: "Done."}, is_trusted=True)
    async def _remove(self, asked: KeysRequest) -> RemoveResponse:
        """Remove objects."""
        removed = await self._client.remove_many(asked.keys, namespace=asked.namespace)
        return RemoveResponse(removed=removed)

    @endpoint(
        "POST", PIN_PATH, {200: "Done.", 507: "Pins hold their share of the pool."},
        is_trusted=True,
    )  # fmt: skip
    async def _pin(self, asked: PinRequest) -> PinResponse:
        """Keep objects, and those before them in their chains, from eviction."""
        pinned = await self._client.pin(asked.keys, asked.seconds, namespace=asked.namespace)
        return PinResponse(pinned=pinned)

    @endpoint("POST", UNPIN_PATH, {200: "Done."}, is_trusted=True)
    async def _unpin(self, asked: KeysRequest) -> UnpinResponse:
        """End the pins of objects."""
        unpinned = await self._client.unpin(asked.keys, namespace=asked.namespace)
        return UnpinResponse(unpinned=unpinned)

    async def _segments(self, namespace: str, key: bytes) -> Sequence[int]:
        """The segments that hold replicas of the object."""
        found = await self._client.stat(key, namespace=namespace, timeout_ms=TIMEOUT_MS)
        return [] if found is None else found.detail.placements.segments
