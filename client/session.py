"""What ``Client`` and ``AsyncClient`` have in common: everything but the way they wait."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from kvstore.children import Child, start_node
from kvstore.client.movers import Movers
from kvstore.client.operations import Operations
from kvstore.client.placements import PlacementCache, SegmentTable
from kvstore.client.steps import Context
from kvstore.client.views import Ask, Views
from kvstore.config import ClientConfig, load
from kvstore.host import address_towards, host_id
from kvstore.transport.mooncake.engine import EngineSettings
from kvstore.transport.mooncake.transport import MooncakeTransport


class ClientStats(NamedTuple):
    """What a client did since it was made."""

    counters: Mapping[str, int]
    """Events by name: ``stale_reads``, ``checksum_mismatches``, ``failed_transfers`` and so on."""
    placements: int
    """Leased objects whose place is remembered."""
    views: int
    """Views and allocations alive."""
    epoch: int
    """Of the master that was last joined; 0 before."""


def read_config(
    master: str | None,
    memory: int | str | None,
    config: ClientConfig | None,
    settings: Mapping[str, object],
) -> ClientConfig:
    """As the clients' constructors say. Raises ConfigError."""
    if config is not None:
        return config
    return load(ClientConfig, {"master": master, "memory": memory, **settings})


class Session:
    """One client's memory: what it knows, which transports it has, what it holds."""

    def __init__(self, config: ClientConfig, ask: Ask) -> None:
        """``ask`` puts the questions of the thread that renews leases."""
        self.config = config
        self.host = host_id()
        self.name = config.name or f"{socket.gethostname()}-{os.getpid()}"
        self.movers = Movers(config.transports, self._engine if config.protocol else None)
        margin_s = config.lease_margin_ms / 1000
        self.views = Views(ask, lease_margin_s=margin_s, watch=self.movers.watch)
        self.context = Context(
            clock=time.monotonic,
            host=self.host,
            segments=SegmentTable(),
            placements=PlacementCache(config.placements_max),
            lease_margin_s=margin_s,
            verify_payload=config.verify == "payload",
            counters={},
            failover_s=config.timeout_ms / 3000,
        )
        self.operations = Operations(config, self.context, self.movers, self.views)
        self.children: list[Child] = []

    def _engine(self) -> MooncakeTransport:
        config = self.config
        return MooncakeTransport(
            EngineSettings(config.protocol, config.device_name, config.metadata_server),
            host=lambda: address_towards(config.master),
            buffer_bytes=config.engine_buffer,
        )

    def contribute(self, join: Callable[[float], object]) -> None:
        """Start the node that serves ``config.memory``, if there is to be one. Blocks.

        ``join`` the master by a deadline comes first: where there is none, that is told before
        any memory is taken.
        """
        if self.config.memory:
            join(time.monotonic() + self.config.timeout_ms / 1000)
            master = self.config.master
            node = start_node(
                master=master,
                memory=self.config.memory,
                host=address_towards(master),
                protocol=self.config.protocol,
                device_name=self.config.device_name,
                metadata_server=self.config.metadata_server,
            )
            self.children.append(node)

    def stats(self, epoch: int) -> ClientStats:
        context = self.context
        return ClientStats(dict(context.counters), len(context.placements), len(self.views), epoch)

    def close(self) -> None:
        """After the stub is closed. Blocks until threads and children have ended."""
        self.movers.close()
        for child in self.children:
            child.stop()
