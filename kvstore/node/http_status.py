"""A node's readiness and metrics over HTTP; the agent's loop serves them, and moves no bytes."""

from __future__ import annotations

import os

from kvstore._version import __version__
from kvstore.http import exposition
from kvstore.http.exposition import Rows
from kvstore.http.families import NODE
from kvstore.http.serving import ProcessStatus, Readiness
from kvstore.memory.medium import Medium
from kvstore.node.agent import NodeAgent
from kvstore.runtime.limiter import Limiter
from kvstore.runtime.watched_files import refused_files
from kvstore.security.credentials import Credentials
from kvstore.security.descriptor_server import DescriptorServer
from kvstore.transport.tcp_server import DataServer


def answers_of(
    agent: NodeAgent, segment: Medium, server: DataServer,
    descriptor_server: DescriptorServer | None,
    credentials: Credentials | None, requests: Limiter[object] | None = None,
) -> ProcessStatus:  # fmt: skip
    """
    Args:
        descriptor_server: hands out descriptors of the memory; None: nothing does.
        credentials: the node's identity; None: no authentication.
        requests: that of the port for HTTP; None: it has none.
    """

    async def readiness() -> Readiness:
        if agent.is_joined:
            return Readiness(True, "joined")
        return Readiness(False, "looks for a master to join")

    async def page() -> bytes:
        until = None if credentials is None else credentials.validity().until
        values = _values(agent, segment, server, descriptor_server)
        values |= exposition.of_identity("node", until)
        refused = {} if requests is None else {requests.name: requests.refusals()}
        values |= exposition.of_shares(
            "node", {"data": server.identity_limit_refusals(), **refused}
        )
        return exposition.page(NODE, values, pid=os.getpid())

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
