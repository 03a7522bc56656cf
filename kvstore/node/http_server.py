"""A node's health and metrics over HTTP, first while it reserves its memory, then in the agent's
loop, which moves no bytes. Slow to import, so nodes without an HTTP port do not."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from typing import Final

from kvstore._version import __version__
from kvstore.http import exposition
from kvstore.http.access_control import access_control
from kvstore.http.exposition import Rows
from kvstore.http.families import NODE
from kvstore.http.ports import HttpSecurity
from kvstore.http.serving import ProcessStatus, Readiness, serving
from kvstore.memory.medium import Medium
from kvstore.node.agent import NodeAgent
from kvstore.node.startup_progress import StartupProgress
from kvstore.runtime.tasks import start_thread
from kvstore.runtime.watched_files import refused_files
from kvstore.security.credentials import Credentials
from kvstore.security.descriptor_server import DescriptorServer
from kvstore.transport.tcp_server import DataServer

STOP_S: Final = 5.0
"""How long ``serve_startup`` waits for its thread."""


class NodeHttpServer:
    """Serves on ``listener``, which the caller closes."""

    def __init__(self, listener: socket.socket, secured: HttpSecurity) -> None:
        self._listener = listener
        self._secured = secured
        self._access = access_control(secured, None)

    @contextlib.contextmanager
    def serve_startup(self, starting: StartupProgress) -> Iterator[None]:
        """Serve in a thread, inside the block. Afterwards requests wait in the kernel until the
        node's loop serves them."""
        same = self._listener.dup()
        loop = asyncio.new_event_loop()
        stopped = asyncio.Event()

        async def serve() -> None:
            answers = _startup_status(starting)
            async with serving(same, answers, access=self._access, secured=self._secured):
                await stopped.wait()

        def run() -> None:
            with contextlib.closing(loop):
                loop.run_until_complete(serve())

        thread = start_thread("kvstore-starting", run)
        try:
            yield
        finally:
            with contextlib.suppress(RuntimeError):  # it has died, and the log says why
                loop.call_soon_threadsafe(stopped.set)
            thread.join(STOP_S)

    def serve(
        self, agent: NodeAgent, segment: Medium, server: DataServer,
        descriptor_server: DescriptorServer | None, credentials: Credentials | None,
    ) -> AbstractAsyncContextManager[None]:  # fmt: skip
        """Serve in the running loop, inside the block.

        Args:
            descriptor_server: hands out descriptors of the memory; None: nothing does.
            credentials: the node's identity; None: no authentication.
        """

        async def readiness() -> Readiness:
            if agent.is_joined:
                return Readiness(True, "joined")
            return Readiness(False, "looks for a master to join")

        async def page() -> bytes:
            until = None if credentials is None else credentials.validity().until
            values = _values(agent, segment, server, descriptor_server)
            values |= exposition.of_identity("node", until)
            return exposition.page(NODE, values, pid=os.getpid())

        return serving(
            self._listener, ProcessStatus(readiness, page),
            access=self._access, secured=self._secured,
        )  # fmt: skip


def _startup_status(starting: StartupProgress) -> ProcessStatus:
    async def readiness() -> Readiness:
        return Readiness(False, starting.text)

    async def page() -> bytes:
        rows: dict[str, Rows] = {
            "kvstore_node_joined": {(): 0},
            "kvstore_node_memory_bytes": {(): starting.done},
            **exposition.of_log("node"),
        }
        return exposition.page(NODE, rows, pid=os.getpid())

    return ProcessStatus(readiness, page)


def _values(
    agent: NodeAgent,
    segment: Medium,
    server: DataServer,
    descriptor_server: DescriptorServer | None,
) -> dict[str, Rows]:
    counted = server.counters()
    cluster = segment.owner.cluster
    return {
        "kvstore_node_info": {(__version__, cluster, segment.node): 1},
        "kvstore_node_joined": {(): int(agent.is_joined)},
        "kvstore_node_memory_bytes": {(): segment.size},
        "kvstore_node_connections": {(): server.connections},
        "kvstore_node_connections_total": {(): counted.connections},
        "kvstore_node_refused_connections_total": {
            ("busy",): counted.refused_busy,
            ("hello",): counted.refused_hellos,
        },
        "kvstore_node_bad_requests_total": {(): counted.bad_requests},
        "kvstore_node_refused_capabilities_total": {(): counted.refused_capabilities},
        "kvstore_node_descriptors_sent_total": {}
        if descriptor_server is None
        else {(): descriptor_server.handed},
        "kvstore_node_descriptor_requests_refused_total": {}
        if descriptor_server is None
        else {(): descriptor_server.refused},
        "kvstore_node_stalls_total": {(): counted.stalls},
        "kvstore_node_requests_total": {("read",): counted.reads, ("write",): counted.writes},
        "kvstore_node_moved_bytes_total": {
            ("read",): counted.read_bytes,
            ("write",): counted.written_bytes,
        },
        **exposition.of_log("node"),
        **exposition.of_files("node", refused_files()),
    }
