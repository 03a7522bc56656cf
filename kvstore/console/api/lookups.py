"""Operations on keys over HTTP: match, remove, pin, unpin and hints.

Keys are in hexadecimal. Payloads do not pass through HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from kvstore.calls.hint_envelopes import parse_envelope
from kvstore.client.async_client import AsyncClient
from kvstore.http.operations import ApiRequest, HexKey, endpoint
from kvstore.limits import BATCH_KEYS_MAX, DEFAULT_NAMESPACE, NAMESPACES_MAX, PIN_MS_MAX

MATCH_PATH: Final = "/api/v1/match"
REMOVE_PATH: Final = "/api/v1/remove"
PIN_PATH: Final = "/api/v1/pin"
UNPIN_PATH: Final = "/api/v1/unpin"
HINTS_PATH: Final = "/api/v1/hints"

TIMEOUT_MS: Final = 2_000
"""Timeout of a call to the store."""

SHARE: Final = 0.2
"""Maximum fraction of time spent in expensive queries, if one takes under half a second."""

REST_S: Final = 2.0
"""Maximum pause between two of them."""

ResultT = TypeVar("ResultT")

NamespaceNames = Annotated[list[str], Field(min_length=1, max_length=NAMESPACES_MAX)]

NodesOf = Callable[[Iterable[int]], Awaitable[Mapping[int, str]]]
"""Returns node names by segment; may contain further segments."""


class QueryThrottle:
    """Serializes queries that are expensive for the master. Use it in one event loop."""

    def __init__(self) -> None:
        self.lock: Final = asyncio.Lock()
        """Held by the caller of ``run``."""
        self._rest_until = 0.0

    async def run(self, call: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """Make the call after a pause, and raise its errors."""
        await asyncio.sleep(self._rest_until - time.monotonic())
        started = time.monotonic()
        try:
            return await call()
        finally:
            ended = time.monotonic()
            self._rest_until = ended + min(REST_S, (ended - started) * (1 / SHARE - 1))


class MatchRequest(ApiRequest):
    """Keys of a prefix, from the root on."""

    keys: list[HexKey] = Field(
        max_length=BATCH_KEYS_MAX, description="Of a chain, from its root; in hexadecimal."
    )
    namespaces: NamespaceNames = Field(
        default=[DEFAULT_NAMESPACE], description="Where to look; each has an answer of its own."
    )


class KeysRequest(ApiRequest):
    """Keys of objects."""

    keys: list[HexKey] = Field(max_length=BATCH_KEYS_MAX, description="In hexadecimal.")
    namespace: str = DEFAULT_NAMESPACE


class PinRequest(KeysRequest):
    """Keys of objects to protect from eviction, and the duration."""

    seconds: float = Field(gt=0, le=PIN_MS_MAX / 1000, description="From now on.")


class HintsRequest(ApiRequest):
    """A hint envelope as vLLM, SGLang and Dynamo have it, and where it is carried out."""

    model_config = ConfigDict(extra="ignore")  # fields of later envelopes

    protocol_version: str
    message_id: str
    actions: list[dict[str, Any]] = Field(
        description="Of each: action_id, action_type, action_version, payload."
    )
    key: HexKey | None = Field(
        default=None, description="Last key of the chain that actions without keys are about."
    )
    namespaces: NamespaceNames = Field(
        default=[DEFAULT_NAMESPACE], description="Where each action is carried out."
    )


class NamespaceMatch(BaseModel):
    """The match in one namespace."""

    namespace: str
    matched: int = Field(description="Leading keys that are stored; they are leased by this.")
    being_written: int = Field(description="Keys after those that are being written now.")
    nodes: list[str] = Field(description="Nodes that hold the last matched block.")


class MatchResponse(BaseModel):
    matches: list[NamespaceMatch]


class RemoveResponse(BaseModel):
    removed: list[bool] = Field(description="Per key: whether there was such an object.")


class PinResponse(BaseModel):
    pinned: list[bool] = Field(description="Per key: whether it is there, and pinned now.")


class UnpinResponse(BaseModel):
    unpinned: list[bool] = Field(description="Per key: whether it was pinned.")


class HintResponse(BaseModel):
    action_id: str
    outcome: Literal["accepted", "clipped", "missing", "ignored"]
    reason: str = Field(description="Why it was not carried out as requested; else empty.")
    retained_s: float = Field(description="For how long it is retained or pinned, from now.")


class HintsResponse(BaseModel):
    message_id: str
    actions: list[HintResponse] = Field(description="In the order of the envelope.")


class LookupsAPI:
    """Serves these operations as a client of the master. Use it in one event loop."""

    def __init__(self, client: AsyncClient, nodes_of: NodesOf) -> None:
        self._client = client
        self._nodes_of = nodes_of

    @endpoint("POST", MATCH_PATH, {200: "In each namespace."})
    async def _match(self, params: MatchRequest) -> MatchResponse:
        """Find the longest stored prefix."""
        found = await self._client.matches(
            params.keys, namespaces=params.namespaces, timeout_ms=TIMEOUT_MS
        )
        segments = [
            await self._segments(namespace, params.keys[match.matched - 1]) if match.matched else []
            for namespace, match in zip(params.namespaces, found, strict=True)
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
                for namespace, match, holding in zip(
                    params.namespaces, found, segments, strict=True
                )
            ]
        )

    @endpoint("POST", REMOVE_PATH, {200: "Done."}, is_trusted=True)
    async def _remove(self, params: KeysRequest) -> RemoveResponse:
        """Remove objects."""
        removed = await self._client.remove_many(params.keys, namespace=params.namespace)
        return RemoveResponse(removed=removed)

    @endpoint(
        "POST", PIN_PATH, {200: "Done.", 507: "Pins hold their share of the pool."},
        is_trusted=True,
    )  # fmt: skip
    async def _pin(self, params: PinRequest) -> PinResponse:
        """Protect objects and their ancestors from eviction."""
        pinned = await self._client.pin(params.keys, params.seconds, namespace=params.namespace)
        return PinResponse(pinned=pinned)

    @endpoint("POST", UNPIN_PATH, {200: "Done."}, is_trusted=True)
    async def _unpin(self, params: KeysRequest) -> UnpinResponse:
        """Remove the pins of objects."""
        unpinned = await self._client.unpin(params.keys, namespace=params.namespace)
        return UnpinResponse(unpinned=unpinned)

    @endpoint("POST", HINTS_PATH, {200: "Per action."}, is_trusted=True)
    async def _hints(self, params: HintsRequest) -> HintsResponse:
        """Carry out the actions of a hint envelope."""
        own = () if params.key is None else (params.key,)
        results = await self._client.apply_hints(
            parse_envelope(params), dict.fromkeys(params.namespaces, own), timeout_ms=TIMEOUT_MS
        )
        rows = [result._asdict() | {"outcome": str(result.outcome)} for result in results]
        return HintsResponse.model_validate({"message_id": params.message_id, "actions": rows})

    async def _segments(self, namespace: str, key: bytes) -> Sequence[int]:
        """Return the segments with a replica of the object."""
        found = await self._client.stat(key, namespace=namespace, timeout_ms=TIMEOUT_MS)
        return [] if found is None else found.detail.placements.segments
