"""``/api/v1`` for prefixes: the most used chains, and the blocks of a branch.

Read-only: takes no lease, and looking at a block does not count as a use of it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Final

from pydantic import BaseModel, Field

from kvstore import calls
from kvstore.client.async_client import AsyncClient
from kvstore.console.api.lookups import TIMEOUT_MS, NodesOf, QueryThrottle
from kvstore.console.api.schemas import Hex, KeyText, Shape, shaped
from kvstore.http.operations import ApiRequest, HexKey, endpoint
from kvstore.limits import BLOCKS_MAX, CHAINS_MAX, DEFAULT_NAMESPACE, Namespace
from kvstore.security.impersonation import check_acting

CHAINS_PATH: Final = "/api/v1/chains"
BLOCKS_PATH: Final = "/api/v1/blocks"

FRESH_S: Final = 1.0
"""Seconds for which a reply about chains is reused."""

KEPT_MAX: Final = 64


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


def _branch(row: calls.Branch, names: Mapping[int, str]) -> BranchResponse:
    nodes = {node: count for node, count in row.replicas_by_node(names).items() if node}
    return BranchResponse.model_validate(row._asdict() | {"key": row.last, "nodes": nodes})


def _block(row: calls.BlockStatus, names: Mapping[int, str]) -> BlockResponse:
    nodes = dict.fromkeys(names.get(segment, "") for segment in row.segments)
    told = {"text": row.key, "nodes": [node for node in nodes if node]}
    return BlockResponse.model_validate(row._asdict() | told)
