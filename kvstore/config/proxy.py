"""The proxy's settings."""

from __future__ import annotations

from typing import Annotated, Self

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
    HttpCert,
    HttpKey,
    HttpToken,
    Limit,
    LogFormat,
    LogLevel,
    Milliseconds,
    OptionalMaster,
    Port,
    RefusedValueError,
    Tenant,
    check_https,
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
    http_cert: HttpCert = ""
    http_key: HttpKey = ""
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
    affinity_slack: Count = Field(
        default=4,
        ge=0,
        le=65_536,
        description="How many more requests than the least busy engine the one that --affinity "
        "prefers may have: waiting for a few takes less time than loading a prefix.",
    )
    affinity_blocks_max: Count = Field(
        default=131_072,
        ge=1,
        le=16_777_216,
        description="Blocks of 64 tokens that --affinity remembers, the latest ones: eight "
        "million tokens, some 20 MiB.",
    )
    retries: Count = Field(
        default=2,
        ge=0,
        le=64,
        description="How many other decoders are tried when one fails before its first byte.",
    )
    inflight_max: Count = Field(
        default=1_024,
        ge=1,
        le=1_048_576,
        description="Requests at once, each with its body in memory; further ones get 503 with "
        "Retry-After. As many as some decoders run together.",
    )
    body_max: Annotated[Limit, Field(ge=1_024, le=1 << 30)] = Field(
        default=32 << 20,
        description="The largest request body: a million token ids are 8 MiB; images take more.",
    )
    body_timeout_ms: Milliseconds = Field(
        default=60_000,
        ge=1,
        le=86_400_000,
        description="How long a request's body may take: the largest one at 5 Mbit/s. As many "
        "bodies as requests may be on their way; the slowest gives way to one more.",
    )
    connect_timeout_ms: Milliseconds = Field(
        default=2_000,
        ge=1,
        le=600_000,
        description="How long a connection to an engine may take: time for two lost SYNs.",
    )
    render_timeout_ms: Milliseconds = Field(
        default=5_000,
        ge=1,
        le=600_000,
        description="How long an engine may take to make token ids of a prompt; without them "
        "the request goes on, and is tokenized twice.",
    )
    prefill_timeout_ms: Milliseconds = Field(
        default=30_000,
        ge=1,
        le=3_600_000,
        description="How long one prefiller may take; one other is tried, then the decoder "
        "computes the prompt. More than your longest prompt takes.",
    )
    first_byte_timeout_ms: Milliseconds = Field(
        default=600_000,
        ge=1,
        le=86_400_000,
        description="How long a decoder may take until its first byte, which without streaming is "
        "the whole answer: as long as OpenAI's own clients wait.",
    )
    idle_timeout_ms: Milliseconds = Field(
        default=120_000,
        ge=1,
        le=86_400_000,
        description="The longest silence within an answer, of either side.",
    )
    lookup_timeout_ms: Milliseconds = Field(
        default=20,
        ge=1,
        le=10_000,
        description="How long to wait for the store to say what it holds: a small part of what "
        "the shortest prefill takes.",
    )
    health_interval_ms: Milliseconds = Field(
        default=1_000,
        ge=10,
        le=3_600_000,
        description="How often the proxy asks each engine for its health.",
    )
    health_timeout_ms: Milliseconds = Field(
        default=1_000,
        ge=1,
        le=600_000,
        description="Silence after which such a question counts as failed; two failures in a "
        "row make an engine unhealthy.",
    )
    breaker_failures: Count = Field(
        default=5,
        ge=1,
        le=1_000_000,
        description="Failed requests in a row after which an engine gets none for a while, even if "
        "its health checks succeed.",
    )
    breaker_open_ms: Milliseconds = Field(
        default=5_000,
        ge=1,
        le=3_600_000,
        description="How long such an engine gets no requests; then one request tests it.",
    )
    grace_ms: Milliseconds = Field(
        default=30_000,
        ge=0,
        le=3_600_000,
        description="How long requests under way may take when the proxy is asked to stop: as "
        "long as Kubernetes waits before it kills.",
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
    cache_salt_secret: HttpToken = Field(
        default="",
        repr=False,
        description="The secret of --cache-salt-secret-file itself; only as a variable, or in the "
        "file.",
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
        check_https(self.http_cert, self.http_key)
        if self.cache_salt_secret and self.cache_salt_secret_file:
            raise RefusedValueError(
                "is given beside KVSTORE_PROXY_CACHE_SALT_SECRET",
                "Drop one of both.",
                key="cache_salt_secret_file",
            )
        has_secret = bool(self.cache_salt_secret or self.cache_salt_secret_file)
        if self.cache_salt_from and not has_secret:
            raise RefusedValueError(
                "needs a secret",
                "Give --cache-salt-secret-file, or KVSTORE_PROXY_CACHE_SALT_SECRET: the same for "
                "every proxy. To make one: openssl rand -hex 32 > FILE; chmod 600 FILE",
                key="cache_salt_from",
            )
        if has_secret and not self.cache_salt_from:
            raise RefusedValueError(
                "is missing beside its secret",
                "Give --cache-salt-from authorization, or another header.",
                key="cache_salt_from",
            )
        return self
