"""The settings of clients, connectors of engines and the proxy."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from kvstore.config.base import Config
from kvstore.config.setting_types import (
    DEFAULT_PORT,
    P2P,
    TRANSPORTS_KNOWN,
    Addresses,
    AdminToken,
    Affinity,
    AuthFile,
    Bytes,
    Cluster,
    Count,
    DataEncryption,
    Devices,
    EngineProtocol,
    File,
    HeaderName,
    Host,
    InvalidSettingError,
    Label,
    LogFormat,
    LogLevel,
    Master,
    MetadataServer,
    Milliseconds,
    Name,
    NamespaceName,
    OptionalMaster,
    Port,
    Tenant,
    Transports,
    Unauthenticated,
    Verify,
    check_encryption,
    check_engine,
)
from kvstore.limits import REPLICAS_MAX


class StoreSettings(Config):
    """Settings that say which store is used, and how bytes move to and from it."""

    master: Master = f"127.0.0.1:{DEFAULT_PORT}"
    cluster: Cluster = ""
    auth: AuthFile = ""
    tenant: Tenant = ""
    transports: Transports = Field(
        default=TRANSPORTS_KNOWN,
        description="Ways to move bytes, the best first; the first that reaches a segment is "
        "taken. shm works on the node's own host only.",
    )
    protocol: EngineProtocol = Field(
        default="",
        description="Move bytes by Mooncake's transfer engine (pip install "
        "mooncake-transfer-engine-non-cuda) "
        "where the node has it, too, over this protocol; empty: without it.",
    )
    device_name: Devices = ""
    metadata_server: MetadataServer = P2P
    engine_unauthenticated: Unauthenticated = False
    data_encryption: DataEncryption = Field(
        default="off",
        description="tls: over tcp use only nodes that encrypt their data ports, and encrypt the "
        "memory that this process pools; needs auth. off: as each node says, in plain or encrypted "
        "(TLS 1.3). Memory of this host is mapped in any case.",
    )
    verify: Verify = Field(
        default="payload",
        description="What a get checks before it returns. header: the header alone; payload: also "
        "the payload's checksum, which is computed during the copy; all: also that of views, for "
        "which they are read once.",
    )
    replicas: Count = Field(
        default=1,
        ge=1,
        le=REPLICAS_MAX,
        description=f"Copies on distinct nodes, 1 to {REPLICAS_MAX}: what is lost can be computed "
        "again, so one.",
    )
    memory: Bytes = Field(
        default=0, description="Memory that this process also pools (2GiB); 0 contributes none."
    )

    @model_validator(mode="after")
    def _store_rules(self) -> Self:
        check_engine(self.auth, self.protocol, unauthenticated=self.engine_unauthenticated)
        check_encryption(self.data_encryption, self.auth, protocol=self.protocol)
        return self


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
            raise InvalidSettingError(
                "must be given when mooncake is the only transport", "Say tcp or rdma.",
                key="protocol",
            )  # fmt: skip
        return self


class ConnectorConfig(StoreSettings):
    """Settings of the connector of an inference engine (vLLM: ``kv_connector_extra_config``)."""

    section = "connector"

    memory: Bytes = Field(
        default=0,
        description="Memory that each worker pools (4GiB), served by a child process; 0: none.",
    )
    save_decode: bool = Field(
        default=True,
        description="Store the blocks of generated tokens, too, and on engines of kv_role "
        "kv_consumer: the next turn of a conversation finds them, on whichever engine it lands.",
    )
    model_id: Label = Field(
        default="",
        description="A name for the weights, in place of a digest of what the engine has "
        "loaded. Engines share blocks only when it is equal: give equal names to equal weights.",
    )
    lookup_deadline_ms: Milliseconds = Field(
        default=20,
        ge=1,
        le=10_000,
        description="How long a request waits to learn what the store has, before that counts as "
        "nothing. Other requests go on meanwhile.",
    )
    pin_timeout_ms: Milliseconds = Field(
        default=60_000,
        ge=100,
        le=3_600_000,
        description="How long a block may wait to be saved, and be kept from other use for it; "
        "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT (seconds) sets it, too.",
    )
    shares_named_media: bool = Field(
        default=False,
        description="Load and save blocks of requests that name an image, sound or video "
        "(multi_modal_uuids) instead of letting vLLM hash it: if clients give equal names only to "
        "equal contents, on all engines and for ever.",
    )
    tp_shards: Count = Field(
        default=0,
        ge=0,
        le=1_024,
        description="Store the KV heads of a block in so many shards, so that engines of other "
        "tensor-parallel sizes find them: a number that all their sizes divide, the same in all. "
        "0: engines of one size share.",
    )
    block_tokens: Count = Field(
        default=0,
        ge=0,
        le=65_536,
        description="Store each block as objects of so many tokens, under the keys of an engine "
        "with such blocks, so that engines of other block sizes find them: a number that divides "
        "all their block sizes. 0: one object each.",
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
            raise InvalidSettingError(
                "needs a secret",
                "Give --cache-salt-secret-file: the same for every proxy. To make one: "
                "openssl rand -hex 32 > FILE; chmod 600 FILE",
                key="cache_salt_from",
            )
        if self.cache_salt_secret_file and not self.cache_salt_from:
            raise InvalidSettingError(
                "is missing beside its secret",
                "Give --cache-salt-from authorization, or another header.",
                key="cache_salt_from",
            )
        return self
