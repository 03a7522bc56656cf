"""The proxy's settings."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from kvstore.config.base import Config
from kvstore.config.values import (
    DEFAULT_PORT,
    Addresses,
    AdminToken,
    Affinity,
    AuthFile,
    Cluster,
    Count,
    File,
    HeaderName,
    Host,
    LogFormat,
    LogLevel,
    Milliseconds,
    OptionalMaster,
    Port,
    RefusedValueError,
    Tenant,
)


class ProxyConfig(Config):
    """The settings of a ``kvstore-proxy``."""

    section = "proxy"

    prefill: Addresses = Field(
        default=(),
        description="Engines that put the KV cache of a prompt into the store before it is "
        "decoded. Without any of them decoders do all the work.",
    )
    decode: Addresses = Field(
        default=(),
        description="Engines that answer. More of both can be added while the proxy runs.",
    )
    host: Host = Field(
        default="127.0.0.1",
        description="Address to listen on. Loopback until you say otherwise, because the proxy "
        "does not authenticate its clients; 0.0.0.0 is every interface.",
    )
    port: Port = Field(default=8_000, description="TCP port to listen on; 0 takes any.")
    master: OptionalMaster = Field(
        default="",
        description="The store's master, to ask whether it holds a prompt already; if "
        f"empty, every long prompt goes to a prefiller. Port {DEFAULT_PORT} when only a host "
        "is given.",
    )
    cluster: Cluster = ""
    auth: AuthFile = ""
    tenant: Tenant = ""
    prefill_threshold: Count = Field(
        default=256,
        ge=0,
        le=16_777_216,
        description="A prompt with fewer tokens, or of which the store lacks fewer, goes to the "
        "decoder alone: so few tokens cost little within a decoding step, which waits for "
        "weights, and less than a prefiller and the store.",
    )
    affinity: Affinity = Field(
        default="none",
        description="none: the engine with the fewest requests; prefix: the one that recently had "
        "the longest prefix of this prompt.",
    )
    prefill_timeout_ms: Milliseconds = Field(
        default=30_000,
        ge=1,
        le=3_600_000,
        description="How long one prefiller may take; one other is tried, then the decoder "
        "computes the prompt. More than your longest prompt takes.",
    )
    admin_token: AdminToken = Field(
        default="",
        repr=False,
        description="Changing the instances needs 'Authorization: Bearer TOKEN', also from this "
        "host; without a token only this host may. Better given as a variable: flags can be read "
        "by every user of the host.",
    )
    cache_salt_from: HeaderName = Field(
        default="",
        description="Header that says who calls (authorization, or one that your gateway sets). "
        "Callers then share no cache with each other: engines are sent a cache_salt made of it and "
        "of --cache-salt-secret-file. A request without it gets 401. Empty: a request has the "
        "cache_salt that it brings.",
    )
    cache_salt_secret_file: File = Field(
        default="",
        description="File with the secret of --cache-salt-from (mode 600, one line), the same for "
        "every proxy before these engines. With a new one no caller finds what it stored before.",
    )
    log_level: LogLevel = Field(default="info", description="The least serious messages to log.")
    log_format: LogFormat = "text"

    @model_validator(mode="after")
    def _rules(self) -> Self:
        if self.cache_salt_from and not self.cache_salt_secret_file:
            raise RefusedValueError(
                "needs a secret",
                "Give --cache-salt-secret-file: the same for every proxy. To make one: "
                "openssl rand -hex 32 > FILE; chmod 600 FILE",
                key="cache_salt_from",
            )
        if self.cache_salt_secret_file and not self.cache_salt_from:
            raise RefusedValueError(
                "is missing beside its secret",
                "Give --cache-salt-from authorization, or another header.",
                key="cache_salt_from",
            )
        return self
