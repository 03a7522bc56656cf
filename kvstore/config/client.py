"""A client's settings."""

from __future__ import annotations

from pydantic import Field, model_validator

from kvstore.config.store import StoreSettings
from kvstore.config.values import (
    Count,
    Milliseconds,
    Name,
    NamespaceName,
    RefusedValueError,
)


class ClientConfig(StoreSettings):
    """The settings of a ``Client``, and so of every command of ``kvstore``."""

    section = "client"

    timeout_ms: Milliseconds = Field(
        default=10_000,
        ge=1,
        le=3_600_000,
        description="The longest that one call may take, retries included: a cache that is "
        "slower than this is better missed.",
    )
    namespace: NamespaceName = Field(
        default="default", description="The namespace of calls that name none."
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
    name: Name = Field(
        default="",
        description="What the master's log calls this client; empty: PROGRAM-PID@HOST.",
    )

    @model_validator(mode="after")
    def _rules(self) -> ClientConfig:
        if self.transports == ("mooncake",) and not self.protocol:
            raise RefusedValueError(
                "must be given when mooncake is the only transport", "Say tcp or rdma.",
                key="protocol",
            )  # fmt: skip
        return self
