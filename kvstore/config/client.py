"""A client's settings."""

from __future__ import annotations

from pydantic import Field, model_validator

from kvstore.config.base import Config
from kvstore.config.values import (
    DEFAULT_PORT,
    MASTER_HELP,
    P2P,
    TRANSPORTS_KNOWN,
    Bytes,
    Cluster,
    Count,
    DeviceKernel,
    DeviceLocked,
    DeviceRing,
    Devices,
    EngineBuffer,
    Master,
    MetadataServer,
    Microseconds,
    Milliseconds,
    MoversProtocol,
    Name,
    NamespaceName,
    RefusedError,
    Transports,
    Verify,
)
from kvstore.limits import REPLICAS_MAX


class ClientConfig(Config):
    """A ``Client``, and with it every command of ``kvstore``."""

    section = "client"

    master: Master = Field(
        default=f"127.0.0.1:{DEFAULT_PORT}",
        description=MASTER_HELP,
    )
    cluster: Cluster = ""
    timeout_ms: Milliseconds = Field(
        default=10_000,
        ge=1,
        le=3_600_000,
        description="The longest that one call may take, retries included: a cache that is "
        "slower than this is better missed.",
    )
    progress_timeout_ms: Milliseconds = Field(
        default=1_000,
        ge=50,
        le=3_600_000,
        description="The longest that a transfer over tcp may move no byte before it is given up "
        "for another node, or a miss.",
    )
    transports: Transports = Field(
        default=TRANSPORTS_KNOWN,
        description="Ways to move bytes, the best first; the first that reaches a segment is "
        "taken. shm works on the node's own host only.",
    )
    namespace: NamespaceName = Field(
        default="default", description="Whom to share with, where a call does not say."
    )
    replicas: Count = Field(
        default=1,
        ge=1,
        le=REPLICAS_MAX,
        description=f"Copies on distinct nodes, 1 to {REPLICAS_MAX}: what is lost can be computed "
        "again, so one.",
    )
    put_wait_ms: Milliseconds = Field(
        default=1_000,
        ge=0,
        le=600_000,
        description="How long a put waits for room when everything is leased; less than "
        "--timeout-ms. 0 gives up at once.",
    )
    verify: Verify = Field(
        default="payload",
        description="What a get checks before it returns: the header alone; or the payload's "
        "checksum, too, which is computed while copying; or (all) also that of views, which are "
        "read once for it.",
    )
    lease_margin_ms: Milliseconds = Field(
        default=200,
        ge=0,
        le=500,
        description="How much earlier than promised a lease counts as over, for clocks that run "
        "at different speeds; at most half of the shortest lease.",
    )
    placements_max: Count = Field(
        default=65_536,
        ge=0,
        le=16_777_216,
        description="Leased objects whose place is remembered, so that getting them again needs "
        "no call: some 20 MiB when full. 0 remembers none.",
    )
    lane: bool = Field(
        default=True, description="Use the lane for hot calls where it is reachable, else gRPC."
    )
    spin_us: Microseconds = Field(
        default=300,
        ge=0,
        le=10_000,
        description="How long a hot call polls for its answer before it sleeps: most come within "
        "that, and waking up takes as long again.",
    )
    name: Name = Field(
        default="",
        description="What the master's log calls this client; empty: host name and process id.",
    )
    memory: Bytes = Field(
        default=0, description="Memory that this process also pools (2GiB); 0 contributes none."
    )
    device_ring: DeviceRing = 64 << 20
    device_locked: DeviceLocked = 1 << 40
    device_kernel: DeviceKernel = 0
    protocol: MoversProtocol = ""
    device_name: Devices = ""
    metadata_server: MetadataServer = P2P
    engine_buffer: EngineBuffer = 64 << 20

    @model_validator(mode="after")
    def _rules(self) -> ClientConfig:
        if self.put_wait_ms >= self.timeout_ms and "put_wait_ms" in self.model_fields_set:
            raise RefusedError(
                f"is {self.put_wait_ms}, and must be less than timeout_ms ({self.timeout_ms})",
                "Otherwise the put times out before the master can say how much space is missing.",
                key="put_wait_ms",
            )
        if self.transports == ("mooncake",) and not self.protocol:
            raise RefusedError(
                "must be given when mooncake is the only transport", "Say tcp or rdma.",
                key="protocol",
            )  # fmt: skip
        return self
