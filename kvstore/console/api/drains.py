"""Nodes over HTTP: list and drain them.

A drain copies the objects through this process, as ``kvstore drain`` does through its own. If this
process or the master stops during a drain, the node stays draining, and the next drain request
continues.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from typing import Final

from aiohttp import web
from pydantic import BaseModel, Field

from kvstore import calls
from kvstore.calls import ClusterStatus, NodeStatus
from kvstore.client.async_client import AsyncClient
from kvstore.client.client import Client
from kvstore.client.drain import DrainOutcome, check_room, drain_node
from kvstore.console.api.schemas import NodeDetail, Shape, shaped
from kvstore.errors import BusyError, KVStoreError
from kvstore.http.operations import ApiRequest, endpoint
from kvstore.runtime.tasks import start_task
from kvstore.security.impersonation import check_acting

NODES_PATH: Final = "/api/v1/nodes"
DRAIN_PATH: Final = "/api/v1/nodes/drain"
UNDRAIN_PATH: Final = "/api/v1/nodes/undrain"

DRAINS_MAX: Final = 4
"""Concurrent drains: each has up to 64 MiB of payloads in memory."""

WAIT_S: Final = 60.0
"""Seconds without progress after which a drain stops; also the default of ``kvstore drain``."""


class NodeRequest(ApiRequest):
    """A node's name."""

    node: str = Field(min_length=1, max_length=256, description="Its name.")


class DrainRequest(NodeRequest):
    """The node to drain. Without ``evict`` and ``discard`` nothing is lost: if other nodes have
    less free memory than it uses, the drain does not start."""

    evict: bool = Field(
        default=False,
        description="Objects on other nodes that were used longer ago make room: they are lost.",
    )
    discard: bool = Field(
        default=False,
        description="Let it leave even if objects have no space elsewhere: they are lost.",
    )


@shaped(DrainOutcome, without=("has_departed",))
class DrainResponse(Shape):
    """Progress of a drain. Object counts other than ``moved_bytes`` are known at its end."""

    state: str = Field(
        description="moving; left: the node was empty and has left; kept: objects have no space "
        "elsewhere, so it stays, draining; stopped: by an undrain; failed."
    )
    size: int = Field(description="Bytes that were used on the node when it began.")
    error: str = Field(description="Why it failed; else empty.")


class NodeResponse(NodeDetail):
    drain: DrainResponse | None = Field(
        default=None, description="The last one that this server was asked for."
    )


class NodesResponse(BaseModel):
    nodes: list[NodeResponse]


class _StoppedError(Exception):
    pass


@dataclass(slots=True)
class _RunningDrain:
    outcome: DrainOutcome
    requested: DrainRequest
    state: str = "moving"
    size: int = 0
    error: str = ""
    stopping: threading.Event = field(default_factory=threading.Event)
    client: Client | None = None

    def reported(self, moved_bytes: int, size: int) -> None:
        self.outcome.moved_bytes, self.size = moved_bytes, size
        if self.stopping.is_set():
            raise _StoppedError

    def run(self, connect: Callable[[], Client]) -> None:
        """Block until the drain ends."""
        try:
            with connect() as client:
                self.client = client
                self.outcome = drain_node(
                    client, self.outcome.node, evict=self.requested.evict,
                    discard=self.requested.discard, wait_s=WAIT_S, on_progress=self.reported,
                )  # fmt: skip
            self.state = "left" if self.outcome.has_departed else "kept"
        except _StoppedError:
            self.state = "stopped"
        except KVStoreError as error:
            self.state = "stopped" if self.stopping.is_set() else "failed"
            self.error = "" if self.stopping.is_set() else str(error)
        finally:
            if self.state == "moving":  # only a bug gets here
                self.state, self.error = "failed", "it ended unexpectedly: see the log"

    def response(self) -> DrainResponse:
        told = {"state": self.state, "size": self.size, "error": self.error}
        return DrainResponse.model_validate(asdict(self.outcome) | told)


class NodesAPI:
    """Lists and drains nodes. Use it in one event loop."""

    def __init__(
        self,
        client: AsyncClient,
        status: Callable[[], Awaitable[ClusterStatus]],
        connect: Callable[[], Client],
    ) -> None:
        """
        Args:
            status: returns the cluster's status, possibly cached.
            connect: creates a client for a drain's thread.
        """
        self._client = client
        self._status = status
        self._connect = connect
        self._drains: dict[str, _RunningDrain] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._beginning = asyncio.Lock()
        """Held while a drain starts, so that at most ``DRAINS_MAX`` run."""

    async def close(self) -> None:
        for drain in self._drains.values():
            drain.stopping.set()
            if drain.client is not None:
                await asyncio.to_thread(drain.client.close)
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    @endpoint("GET", NODES_PATH, {200: "All of them."}, is_of_all=True)
    async def _nodes(self) -> NodesResponse:
        """List the nodes."""
        nodes = (await self._status()).nodes
        return NodesResponse(nodes=[_answer(node, self._drains.get(node.name)) for node in nodes])

    @endpoint(
        "GET", DRAIN_PATH,
        {200: "The last drain of this node.", 404: "There was none."},
        is_of_all=True,
    )  # fmt: skip
    async def _progress(self, params: NodeRequest) -> DrainResponse:
        """Get the progress of a drain."""
        drain = self._drains.get(params.node)
        if drain is None:
            raise web.HTTPNotFound(text="no drain of this node is in progress on this server\n")
        return drain.response()

    @endpoint(
        "POST", DRAIN_PATH,
        {202: "It gets nothing new; its objects are being moved.",
         507: "Other nodes have too little free memory. Nothing has begun."},
        is_trusted=True,
    )  # fmt: skip
    async def _drain(self, params: DrainRequest) -> DrainResponse:
        """Move the objects of a node to other nodes, and let the node leave when it is empty.
        Repeated during a drain, it returns the progress and ignores other options."""
        check_acting(calls.Drain(params.node, calls.DrainStep.BEGIN))
        async with self._beginning:
            if params.node not in self._tasks:
                await self._begin(params)
            return self._drains[params.node].response()

    async def _begin(self, params: DrainRequest) -> None:
        """Start draining. After KVStoreError the node is as before."""
        if len(self._tasks) >= DRAINS_MAX:
            raise BusyError(f"{DRAINS_MAX} nodes are being drained")
        if not params.evict and not params.discard:
            check_room(await self._client.status(), params.node)
        await self._client.drain(params.node)
        drain = _RunningDrain(DrainOutcome(params.node), params)
        self._drains[params.node] = drain
        work = start_task("drain", self._work(params.node, drain), expected=KVStoreError)
        self._tasks[params.node] = work

    @endpoint("POST", UNDRAIN_PATH, {204: "Done."}, is_trusted=True)
    async def _undrain(self, params: NodeRequest) -> None:
        """Stop draining a node: it takes new objects again."""
        check_acting(calls.Drain(params.node, calls.DrainStep.UNDO))
        if (task := self._tasks.get(params.node)) is not None:
            self._drains[params.node].stopping.set()
            await asyncio.wait([task])
        await self._client.drain(params.node, undo=True)

    async def _work(self, node: str, drain: _RunningDrain) -> None:
        try:
            await asyncio.to_thread(drain.run, self._connect)
        finally:
            del self._tasks[node]


def _answer(node: NodeStatus, drain: _RunningDrain | None) -> NodeResponse:
    made = NodeResponse.model_validate(node)
    made.drain = None if drain is None else drain.response()
    return made
