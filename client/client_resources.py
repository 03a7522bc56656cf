"""Resources of a client: its location cache, transports, views and child processes."""

from __future__ import annotations

import os
import re
import secrets
import socket
import sys
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple

from kvstore.client import fork_support
from kvstore.client.flows.location_cache import PlacementCache, SegmentTable
from kvstore.client.flows.steps import Context
from kvstore.client.leases.grants_ahead import GrantsAhead
from kvstore.client.leases.read_leases import ReadLeases
from kvstore.client.leases.views import ViewManager
from kvstore.client.rpc.stub import MasterStub
from kvstore.client.transport_selector import TransportSelector
from kvstore.config import ClientConfig
from kvstore.runtime import descriptors
from kvstore.runtime.child_process import Child, start_node
from kvstore.runtime.clock import uptime
from kvstore.runtime.host import address_towards, host_id
from kvstore.runtime.tasks import Job, start_from_finalizer, uninterrupted
from kvstore.security.data_port_tls import ClientTls

if TYPE_CHECKING:
    from kvstore.transport.mooncake.transport import MooncakeTransport

UNUSED_S: Final = 0.5
"""Interval in which a dropped client checks whether its last view is dropped."""


LEASE_MARGIN_S: Final = 0.2
"""Subtracted from each lease for clock drift: a fifth of the shortest lease."""

CLOSING_S: Final = 0.2

PROGRAM_MAX: Final = 32


def program() -> str:
    """Return a name of this process for operators: its script or command."""
    path = sys.argv[0] if getattr(sys, "argv", None) else ""
    folder, name = os.path.split(path)
    if name == "__main__.py":
        name = os.path.basename(folder)  # python -m PACKAGE
    name = re.sub(r"[^A-Za-z0-9._-]", "-", name.removesuffix(".py"))[:PROGRAM_MAX]
    return "python" if name in ("", "-c", "-m") else name


class MasterHTTP(NamedTuple):
    """The HTTP endpoint of a master, as reported when this client joined it."""

    host: str
    address: str
    """``host:port``; empty: HTTP is disabled."""
    has_events: bool
    """Whether it serves events (``kvstore.client.sse_client``)."""


class ClientStats(NamedTuple):
    counters: Mapping[str, int]
    """Events by name: ``stale_reads``, ``checksum_mismatches``, ``failed_transfers`` and so on."""
    placements: int
    """Leased objects in the location cache."""
    views: int
    epoch: int
    """Epoch of the last joined master; 0 before the first."""
    transports: Mapping[str, int]
    """Transfers (of a batch of objects, from or to one segment) by transport."""
    read_bytes: Mapping[str, int]
    """Bytes of objects, or of ranges of them, read by each transport."""
    contacted: bool = False
    not_mapped: Mapping[str, str] = MappingProxyType({})
    """Reasons why nodes of this host are not mapped, by node; another transport is used instead."""


class ClientResources:
    """The state of one client: location cache, transports, views and leases."""

    def __init__(self, config: ClientConfig) -> None:
        descriptors.keep_standard()
        self.config = config
        self.host = host_id()
        self.name = self._new_name()
        client_number = _new_number()
        self.stub = self._new_stub(client_number)
        self.is_closed = False
        self._closing = Job(self._close)
        self.movers = TransportSelector(
            config.transports,
            self._engine if config.protocol else None,
            client_number,
            tls=self._tls,
        )
        leases, ahead = ReadLeases(config.placements_max), GrantsAhead()
        self.views = ViewManager(
            lambda request, seconds: self.stub.call(request, uptime() + seconds),
            lease_margin_s=LEASE_MARGIN_S, returnables=[leases, ahead], watch=self.movers.watch,
        )  # fmt: skip
        self.context = Context(
            clock=uptime,
            host=self.host,
            client_number=client_number,
            segments=SegmentTable(),
            placements=PlacementCache(config.placements_max),
            leases=leases,
            pool=self.movers,
            views=self.views,
            lease_margin_s=LEASE_MARGIN_S,
            verify_payload=config.verify != "header",
            verify_views=config.verify == "all",
            counters={},
            client=self.name,
            here_only=set(config.transports) <= {"shm"},
            failover_s=config.timeout_ms / 3000,
            ahead=ahead,
        )
        self.children: list[Child] = []

    def reset_after_fork(self) -> None:
        """Reset the state in the child of a fork. The child processes stay the parent's."""
        for child in self.children:
            child.close_after_fork()
        fork_support.leak_deliberately(self.children)
        self.children = []
        self.name = self._new_name()
        self.stub.close_after_fork()
        client_number = _new_number()
        self.stub = self._new_stub(client_number)
        self._closing = Job(self._close)
        context = self.context
        context.client = self.name
        context.client_number = client_number
        context.segments = SegmentTable()
        context.placements = PlacementCache(self.config.placements_max)
        context.leases = ReadLeases(self.config.placements_max)
        context.counters = {}
        context.ahead = GrantsAhead()
        self.views.reset_after_fork([context.leases, context.ahead])
        self.movers.reset_after_fork(context.client_number)

    def drop_connections(self) -> None:
        """Reconnect at the next calls, after a foreign exception interrupted a call."""
        self.stub.reset_after_fork()
        self.context.segments = SegmentTable()
        self.context.placements = PlacementCache(self.config.placements_max)
        self.movers.drop_connections()

    def _new_name(self) -> str:
        return self.config.name or f"{program()}-{os.getpid()}@{socket.gethostname()}"

    def _new_stub(self, client_number: int) -> MasterStub:
        config = self.config
        return MasterStub(
            config.master,
            host=self.host,
            name=self.name,
            lane=config.lane,
            cluster=config.cluster,
            auth=config.auth,
            client_number=client_number,
        )

    def _tls(self) -> ClientTls | None:
        credentials = self.stub.credentials
        if credentials is None:
            return None
        return ClientTls(credentials, demands=self.config.data_encryption == "tls")

    def _engine(self) -> MooncakeTransport:
        # Imported late: most clients have no engine, and the import takes time.
        from kvstore.transport.mooncake.engine import EngineSettings
        from kvstore.transport.mooncake.transport import MooncakeTransport

        config = self.config
        return MooncakeTransport(
            EngineSettings(config.protocol, config.device_name, config.metadata_server),
            host=lambda: address_towards(config.master),
        )

    def contribute(self) -> None:
        """Start the node that serves ``config.memory``. Blocks. Joins before it takes memory."""
        if self.config.memory:
            self.stub.join(uptime() + self.config.timeout_ms / 1000)
            master = self.config.master
            node = start_node(
                master=master,
                cluster=self.config.cluster,
                memory=self.config.memory,
                host=address_towards(master),
                protocol=self.config.protocol,
                device_name=self.config.device_name,
                metadata_server=self.config.metadata_server,
                auth=self.config.auth,
                engine_unauthenticated=self.config.engine_unauthenticated,
                data_encryption=self.config.data_encryption,
            )
            self.children.append(node)

    def stats(self) -> ClientStats:
        return ClientStats(
            dict(self.context.counters),
            len(self.context.placements),
            len(self.views),
            self.stub.epoch,
            dict(self.movers.moved),
            dict(self.movers.read_bytes),
            self.stub.contacted,
            self.movers.not_mapped,
        )

    def give_up(self) -> None:
        """Refuse all calls, without closing anything."""
        self.is_closed = True
        self._closing = Job(self._close)
        self._closing.cancel()

    def close(self) -> None:
        """Close everything. Waits a bounded time for threads and children. Idempotent."""
        self.is_closed = True
        if not self._closing.is_done:
            uninterrupted(self._closing.run)
            self._closing.wait()

    def close_from_finalizer(self) -> None:
        """Close a dropped client in a thread, once its last view and allocation are dropped."""
        if not (self.is_closed or sys.is_finalizing()):
            start_from_finalizer("kvstore-close", self._close_when_unused)

    def _close_when_unused(self) -> None:
        while len(self.views) and not self.is_closed:
            time.sleep(UNUSED_S)
        self.close()

    def _close(self) -> None:
        self.views.stop_renewing()
        self.views.give_back_now(CLOSING_S)
        self.stub.close()
        self.views.close()
        self.movers.close()
        for child in self.children:
            child.stop()


def _new_number() -> int:
    return 1 + secrets.randbits(63)
