"""Both RPC servers of one service, started and stopped together."""

from __future__ import annotations

import secrets
from typing import NamedTuple

from kvstore.errors import StartupError
from kvstore.master.authorizer import Access
from kvstore.master.dispatcher import Dispatcher, RpcService
from kvstore.master.grpc_server import (
    CONNECTIONS_MAX,
    GrpcServer,
    startup_error,
    try_bind,
)
from kvstore.master.lane_server import LaneServer, LaneSettings
from kvstore.master.open_access import OpenAccess
from kvstore.runtime.addresses import join_address


class ListenAddresses(NamedTuple):
    """The addresses of this master. ``JoinReply`` has those of the lane and of HTTP."""

    host: str
    port: int
    lane_port: int
    """0: no lane."""
    lane_unix: str
    lane_token: bytes
    http_port: int = 0
    """0: no HTTP."""
    has_events: bool = False
    """Whether HTTP serves events."""


class RpcServers:
    """gRPC and the lane, which both hand their calls to one service.

    ``bind`` takes the ports and returns them; then give them to the service, and call ``start``.
    Use this class in the loop that runs the service.
    """

    def __init__(
        self,
        service: RpcService,
        *,
        lane_settings: LaneSettings | None = None,
        grpc_connections_max: int = CONNECTIONS_MAX,
        access: Access | None = None,
    ) -> None:
        """``access``: authenticates the peers; by default none."""
        self.dispatcher = Dispatcher(service)
        token = secrets.token_bytes(16)
        access = access or OpenAccess()
        self.lane = LaneServer(self.dispatcher, token, lane_settings, access)
        self.grpc = GrpcServer(
            self.dispatcher, token, connections_max=grpc_connections_max, access=access
        )

    async def bind(self, host: str, port: int, lane_port: int) -> ListenAddresses:
        """Takes ``host:port``, ``host:lane_port`` and a Unix socket.

        Port 0 takes any. An empty host is every interface.

        Raises:
            AddressInUseError, StartupError: nothing is bound then.
        """
        try:
            await self.lane.bind(host, lane_port)
        except OSError as error:
            await self.lane.stop()
            # Another master has both ports. The one that was asked for is named then.
            if port and (asked := try_bind(host, port)) is not None:
                raise asked from error
            raise startup_error(
                join_address(host or "::", lane_port), lane_port, error,
                "the lane", "--port, which the lane's follows, or --lane-port",
            ) from error  # fmt: skip
        try:
            await self.grpc.bind(host, port)
        except StartupError:
            await self.lane.stop()
            raise
        return ListenAddresses(
            host, self.grpc.port, self.lane.port, self.lane.unix, self.lane.token
        )

    def switch_service(self, service: RpcService, endpoints: ListenAddresses) -> ListenAddresses:
        """From now on ``service`` answers. Clients that had joined before must join again: the lane
        is cut, and there is a new token."""
        token = secrets.token_bytes(16)
        self.lane.token = self.grpc.token = token
        self.dispatcher.service = service
        self.lane.drop_connections()
        return endpoints._replace(lane_token=token)

    async def start(self) -> None:
        """Serves, until ``stop``."""
        await self.lane.start()
        await self.grpc.start()

    async def stop(self, grace_s: float = 0.0) -> None:
        """Cuts the lane at once and gRPC's calls after ``grace_s``. Idempotent."""
        await self.lane.stop()
        await self.grpc.stop(grace_s)

    def counters(self) -> dict[str, int]:
        """Counters for the status: calls and errors by name, and those of the lane."""
        counted = {
            "lane_connections": self.lane.stats.accepted,
            "lane_refused": self.lane.stats.rejected,
            "lane_stalled": self.lane.stats.stalled,
        }
        for name, stats in self.dispatcher.stats.items():
            if stats.count:
                counted[f"calls_{name}"] = stats.count
                counted[f"call_us_{name}"] = int(stats.us.total)
            if stats.errors:
                counted[f"errors_{name}"] = stats.errors
        return counted
