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
    put_wait_ms: Milliseconds = Field(
        default=1_000,
        ge=0,
        le=600_000,
        description="How long a put waits for room when everything is leased; less than "
        "--timeout-ms. 0 gives up at once.",
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
        if self.put_wait_ms >= self.timeout_ms and "put_wait_ms" in self.model_fields_set:
            raise RefusedValueError(
                f"is {self.put_wait_ms}, and must be less than timeout_ms ({self.timeout_ms})",
                "Otherwise the put times out before the master can say how much space is missing.",
                key="put_wait_ms",
            )
        if self.transports == ("mooncake",) and not self.protocol:
            raise RefusedValueError(
                "must be given when mooncake is the only transport", "Say tcp or rdma.",
                key="protocol",
            )  # fmt: skip
        return self
