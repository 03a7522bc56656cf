"""``/api/v1`` for prefixes: the most used chains, the blocks of a branch, the location of keys.

Read-only: takes no lease, and looking at a block does not count as a use of it.
"""

from __future__ import annotations

import heapq
import json
import re
import time
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Final

from pydantic import BaseModel, Field

from kvstore import calls
from kvstore.client.async_client import AsyncClient
from kvstore.console.api.lookups import TIMEOUT_MS, NodesOf, QueryThrottle
from kvstore.console.api.schemas import Hex, KeyText, Shape, shaped
from kvstore.errors import InvalidArgumentError, InvalidKeyError
from kvstore.http.operations import ApiRequest, HexKey, endpoint
from kvstore.limits import BLOCKS_MAX, CHAINS_MAX, DEFAULT_NAMESPACE, Key, Namespace, check_key
from kvstore.runtime.formatting import HEX, key_from_text
from kvstore.security.impersonation import check_acting, impersonated
from kvstore.security.permissions import visible_status

CHAINS_PATH: Final = "/api/v1/chains"
BLOCKS_PATH: Final = "/api/v1/blocks"
FIND_PATH: Final = "/api/v1/find"

FRESH_S: Final = 1.0
"""Seconds for which a reply about chains is reused."""

KEPT_MAX: Final = 64

FIND_KEYS_MAX: Final = 1_024
FIND_NAMESPACES_MAX: Final = 300
"""Namespaces of one search: the largest ones if the request names none."""

FIND_SHOWN: Final = 20
"""Namespaces in a response: those with the longest stored prefix of the keys."""


class ChainsRequest(ApiRequest):
    """A query for the most used chains."""

    namespace: str = Field(
        default="", description="Empty: the last ones in which clients put or looked up."
    )
    key: list[HexKey] = Field(
        default=[],
        max_length=CHAINS_MAX,
        description="The chains that end at these blocks instead; in hexadecimal.",
    )
    count: int = Field(
        default=0, ge=0, le=CHAINS_MAX, description=f"Chains; 0: {CHAINS_MAX}, which is the most."
    )


class BlocksRequest(ApiRequest):
    """A query for the blocks of a branch."""

    key: list[HexKey] = Field(default=[], max_length=BLOCKS_MAX, description="In hexadecimal.")
    namespace: str = DEFAULT_NAMESPACE
    above: int = Field(
        default=0, ge=0, le=BLOCKS_MAX, description="Blocks above the last key that are told, too."
    )


@shaped(calls.Branch, without=("segments", "replicas"))
class BranchResponse(Shape):
    """A run of blocks, each of which is the parent of the next one."""

    first: KeyText = Field(description="Key of the first block, as kvstore ls shows it.")
    last: KeyText = Field(description="Key of the last block, as kvstore ls shows it.")
    key: Hex = Field(description="Key of the last block, in hexadecimal.")
    nodes: dict[str, int] = Field(description="Replicas by node, where most of them are.")


@shaped(calls.ChainsReply, without=("epoch",))
class ChainsResponse(Shape):
    """The most matched and most recently used chains; each branch follows its parent branch."""

    branches: list[BranchResponse]


@shaped(calls.BlockStatus, without=("segments",))
class BlockResponse(Shape):
    text: KeyText = Field(description="The key as kvstore ls shows it.")
    nodes: list[str]


class BlocksResponse(BaseModel):
    """A block and its ancestors."""

    blocks: list[BlockResponse]


class FindRequest(ApiRequest):
    """A search for blocks by key."""

    text: str = Field(
        max_length=1 << 20,
        description="Keys: in hexadecimal, with 0x or hex: or without, or as kvstore ls shows "
        "them; between them white space or commas, or a list in JSON.",
    )
    namespaces: list[str] | None = Field(
        default=None,
        min_length=1,
        max_length=FIND_NAMESPACES_MAX,
        description=f"Without it: the {FIND_NAMESPACES_MAX} largest ones.",
    )


class NamespaceHits(BaseModel):
    namespace: str
    found: int = Field(description="Keys that are stored.")
    leading: int = Field(description="Keys that are stored, from the first on.")
    chain: bool = Field(description="Whether each stored block continues the one before it.")
    blocks: list[BlockResponse] = Field(description="One per key.")


class FindResponse(BaseModel):
    """The namespaces that have any of the keys, those with the longest prefix first."""

    keys: int
    searched: int = Field(description="Namespaces.")
    found_in: list[NamespaceHits]
    others: int = Field(description="Further namespaces that have some.")


class ChainsAPI:
    """Serves these operations as a client of the master. Use it in one event loop."""

    def __init__(self, client: AsyncClient, nodes_of: NodesOf) -> None:
        self._client = client
        self._nodes_of = nodes_of
        self._throttle = QueryThrottle()
        self._kept: dict[tuple[str | None, int], tuple[float, calls.ChainsReply]] = {}
        """Replies by namespace and count, each with its expiry."""

    @endpoint("GET", CHAINS_PATH, {200: "Each branch after the one that it continues."})
    async def _chains(self, params: ChainsRequest) -> ChainsResponse:
        """List the most used chains."""
        found = await self._query(params.namespace or None, params.key, params.count)
        nodes = await self._nodes_of(chain.from_iterable(row.segments for row in found.branches))
        branches = [_branch(row, nodes) for row in found.branches]
        return ChainsResponse.model_validate(found._asdict() | {"branches": branches})

    async def _query(
        self, namespace: str | None, keys: Sequence[bytes], count: int
    ) -> calls.ChainsReply:
        """Request chains from the master: one call at a time, then a pause."""
        check_acting(calls.Chains(Namespace(namespace or "")))
        async with self._throttle.lock:
            until, answer = self._kept.get((namespace, count), (0.0, None))
            if answer is not None and not keys and time.monotonic() < until:
                return answer
            found = await self._throttle.run(
                lambda: self._client.chains(
                    namespace, keys=keys, count=count, timeout_ms=TIMEOUT_MS
                )
            )
            if not keys:
                self._kept.pop((namespace, count), None)
                while len(self._kept) >= KEPT_MAX:
                    del self._kept[next(iter(self._kept))]
                self._kept[namespace, count] = time.monotonic() + FRESH_S, found
            return found

    @endpoint("GET", BLOCKS_PATH, {200: "One per key, then those above the last one."})
    async def _blocks(self, params: BlocksRequest) -> BlocksResponse:
        """Get a block and its ancestors."""
        found = await self._client.blocks(
            params.key, above=params.above, namespace=params.namespace, timeout_ms=TIMEOUT_MS
        )
        nodes = await self._nodes_of(chain.from_iterable(row.segments for row in found))
        return BlocksResponse(blocks=[_block(match_, nodes) for match_ in found])

    @endpoint("POST", FIND_PATH, {200: "By namespace."})
    async def _find(self, params: FindRequest) -> FindResponse:
        """Find the namespaces and nodes that store given blocks."""
        readings = keys_of(params.text)
        names: Sequence[str] = params.namespaces or ()
        if not names:
            status = await self._client.status(timeout_ms=TIMEOUT_MS)
            status = visible_status(impersonated(), status)
            largest = heapq.nlargest(
                FIND_NAMESPACES_MAX, status.namespaces, key=lambda row: (row.size, row.name)
            )
            names = [row.name for row in largest]
        found: list[tuple[str, Sequence[calls.BlockStatus]]] = []
        for name in dict.fromkeys(names):
            for keys in readings:
                rows = await self._rows(name, keys)
                if any(map(_is_there, rows)):
                    found.append((name, rows))
                    break
        every = chain.from_iterable(rows for _, rows in found)
        nodes = await self._nodes_of(chain.from_iterable(row.segments for row in every))
        told = [_found_in(name, rows, nodes) for name, rows in found]
        told.sort(key=lambda each: (-each.leading, -each.found, each.namespace))
        return FindResponse(
            keys=len(readings[0]),
            searched=len(names),
            found_in=told[:FIND_SHOWN],
            others=len(told[FIND_SHOWN:]),
        )

    async def _rows(self, namespace: str, keys: Sequence[Key]) -> Sequence[calls.BlockStatus]:
        rows: list[calls.BlockStatus] = []
        for start in range(0, len(keys), BLOCKS_MAX):
            rows += await self._client.blocks(
                keys[start : start + BLOCKS_MAX], namespace=namespace, timeout_ms=TIMEOUT_MS
            )
        return rows


def _is_there(row: calls.BlockStatus) -> bool:
    return row.state in ("complete", "on_disk")


def _found_in(
    namespace: str, rows: Sequence[calls.BlockStatus], nodes: Mapping[int, str]
) -> NamespaceHits:
    there = [_is_there(row) for row in rows]
    pairs = zip(rows, rows[1:], there, there[1:])
    return NamespaceHits(
        namespace=namespace,
        found=sum(there),
        leading=(*there, False).index(False),
        chain=all(
            below.parent == above.key for above, below, first, second in pairs if first and second
        ),
        blocks=[_block(row, nodes) for row in rows],
    )


def keys_of(text: str) -> list[list[Key]]:
    """Parse the keys in a text: one reading, or two if plain text could be hexadecimal.

    Raises:
        InvalidArgumentError: no keys, too many, or an invalid one.
    """
    text = text.strip()
    if text.startswith("["):
        try:
            words = json.loads(text)
        except (ValueError, RecursionError):
            raise InvalidArgumentError("this begins like a list in JSON, and is none") from None
        if not all(isinstance(word, str) for word in words):
            raise InvalidArgumentError("a key in JSON is a text")
    else:
        words = [word for part in re.split(r"[\s,;]+", text) if (word := part.strip("\"'"))]
    if not 0 < len(words) <= FIND_KEYS_MAX:
        raise InvalidArgumentError(f"give 1 to {FIND_KEYS_MAX} keys, not {len(words)}")
    readings: list[list[Key]] = []
    for reading in (_as_hex, _as_shown):
        try:
            keys = [reading(word) for word in words]
        except (InvalidKeyError, ValueError):
            continue
        if keys not in readings:
            readings.append(keys)
    if not readings:
        raise InvalidArgumentError(
            "invalid keys in the input. Give hexadecimal keys, or keys as printed by kvstore ls."
        )
    return readings


def _as_hex(word: str) -> Key:
    """Raises ValueError, InvalidKeyError."""
    return check_key(bytes.fromhex(word.removeprefix(HEX).removeprefix("0x").removeprefix("0X")))


def _as_shown(word: str) -> Key:
    """Raises ValueError, InvalidKeyError."""
    return _as_hex(word) if word[:2] in ("0x", "0X") else key_from_text(word)


def _branch(row: calls.Branch, names: Mapping[int, str]) -> BranchResponse:
    nodes = {node: count for node, count in row.replicas_by_node(names).items() if node}
    return BranchResponse.model_validate(row._asdict() | {"key": row.last, "nodes": nodes})


def _block(row: calls.BlockStatus, names: Mapping[int, str]) -> BlockResponse:
    nodes = dict.fromkeys(names.get(segment, "") for segment in row.segments)
    told = {"text": row.key, "nodes": [node for node in nodes if node]}
    return BlockResponse.model_validate(row._asdict() | told)
