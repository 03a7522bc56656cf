"""Settings of clients, connectors and the proxy."""

from __future__ import annotations

from typing import Final, Self

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
    """Settings of the store and of data transfers."""

    master: Master = f"127.0.0.1:{DEFAULT_PORT}"
    cluster: Cluster = ""
    auth: AuthFile = ""
    tenant: Tenant = ""
    transports: Transports = Field(
        default=TRANSPORTS_KNOWN,
        description="Transports, in order of preference; the first that reaches a segment is "
        "used. shm works on the node's host only.",
    )
    protocol: EngineProtocol = Field(
        default="",
        description="Use Mooncake's transfer engine (pip install "
        "mooncake-transfer-engine-non-cuda) with nodes that have it, over this protocol; empty: "
        "no transfer engine.",
    )
    device_name: Devices = ""
    metadata_server: MetadataServer = P2P
    engine_unauthenticated: Unauthenticated = False
    data_encryption: DataEncryption = Field(
        default="off",
        description="tls: over tcp use only nodes that encrypt their data ports, and encrypt "
        "the memory that this process pools; requires auth. off: encryption is chosen by each "
        "node. Shared memory on this host is still mapped.",
    )
    verify: Verify = Field(
        default="payload",
        description="Checks of a get. header: the header; payload: also the payload's checksum, "
        "computed during the copy; all: also that of views, which are read once for it.",
    )
    replicas: Count = Field(
        default=1,
        ge=1,
        le=REPLICAS_MAX,
        description=f"Copies on distinct nodes, 1 to {REPLICAS_MAX}.",
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
    """Settings of a ``Client``, and of every command of ``kvstore``."""

    section = "client"

    timeout_ms: Milliseconds = Field(
        default=10_000,
        ge=1,
        le=3_600_000,
        description="Timeout of one call, retries included.",
    )
    namespace: NamespaceName = Field(default="default", description="Default namespace of calls.")
    placements_max: Count = Field(
        default=65_536,
        ge=0,
        le=16_777_216,
        description="Size of the location cache: leased objects that can be read again without "
        "a call, some 20 MiB when full. 0: no cache.",
    )
    lane: bool = Field(
        default=True, description="Use the lane for frequent calls if it is reachable, else gRPC."
    )
    name: Name = Field(
        default="",
        description="Client name in the master's log; empty: PROGRAM-PID@HOST.",
    )

    @model_validator(mode="after")
    def _rules(self) -> ClientConfig:
        if self.transports == ("mooncake",) and not self.protocol:
            raise InvalidSettingError(
                "must be given when mooncake is the only transport", "Give tcp or rdma.",
                key="protocol",
            )  # fmt: skip
        return self


OBJECT_BYTES_MAX: Final = 3 << 20
"""Of objects of several blocks, where their number is chosen. Not a power of two, as blocks often
are: with the layers of a draft model the number stays the same."""

OBJECT_TOKENS_MAX: Final = 64
"""As ``OBJECT_BYTES_MAX``: prompts that share a beginning find it in whole objects, and longer ones
are no fewer puts where prompts are short (docs/vllm.md)."""


def choose_blocks_per_object(block_tokens: int, block_bytes: int) -> int:
    """Return ``ConnectorConfig.blocks_per_object``, a power of two, for blocks of this size."""
    count = min(OBJECT_TOKENS_MAX // block_tokens, OBJECT_BYTES_MAX // max(1, block_bytes))
    return 1 << max(0, count.bit_length() - 1)


class ConnectorConfig(StoreSettings):
    """Settings of the connector of an inference engine (vLLM: ``kv_connector_extra_config``)."""

    section = "connector"

    memory: Bytes = Field(
        default=0,
        description="Memory that each worker pools (4GiB), served by a child process; 0: none.",
    )
    save_decode: bool = Field(
        default=True,
        description="Also store the blocks of generated tokens, including on engines of kv_role "
        "kv_consumer, so that the next turn of a conversation can load them on any engine.",
    )
    model_id: Label = Field(
        default="",
        description="Name of the weights, instead of a digest of the loaded ones. Engines share "
        "blocks only if it is equal: give equal names to equal weights.",
    )
    lookup_deadline_ms: Milliseconds = Field(
        default=20,
        ge=1,
        le=10_000,
        description="Timeout of a request's lookup, after which it counts as a miss. Other "
        "requests are not delayed.",
    )
    load_if_faster: bool = Field(
        default=True,
        description="Compute stored tokens where loading them takes longer, as measured on this "
        "engine: from slow disks or networks.",
    )
    pin_timeout_ms: Milliseconds = Field(
        default=60_000,
        ge=100,
        le=3_600_000,
        description="Maximum time that a block may wait to be saved, without other use.",
    )
    shares_named_media: bool = Field(
        default=False,
        description="Load and save blocks of requests that name an image, sound or video "
        "(multi_modal_uuids) instead of letting vLLM hash it. Requires that all clients of all "
        "engines permanently use equal names only for equal contents.",
    )
    tp_shards: Count = Field(
        default=0,
        ge=0,
        le=1_024,
        description="Number of shards for the KV heads of a block, with which engines of other "
        "tensor-parallel sizes can load them: a number divisible by all their sizes, equal in "
        "all. 0: engines of one size share.",
    )
    blocks_per_object: Count = Field(
        default=0,
        ge=0,
        le=64,
        description="Consecutive blocks that are stored as one object, equal in all engines that "
        "share: the master's work and memory fall by this factor. A prompt finds whole objects, "
        "and the end of an earlier one by block. 0: objects of up to 64 tokens and 3 MiB; 1 with "
        "recurrent layers or sliding windows.",
    )


class ProxyConfig(Config):
    """The settings of a ``kvstore-proxy``."""

    section = "proxy"

    prefill: Addresses = Field(
        default=(),
        description="Prefill engines, which store the KV cache of a prompt before decoding. "
        "Without any, decoders compute prompts.",
    )
    decode: Addresses = Field(
        default=(),
        description="Decode engines. More of both can be added while the proxy runs.",
    )
    host: Host = Field(
        default="127.0.0.1",
        description="Address to listen on. Listens on loopback by default, because the proxy "
        "does not authenticate its clients; 0.0.0.0 is every interface.",
    )
    port: Port = Field(default=8_000, description="TCP port to listen on; 0 takes any.")
    master: OptionalMaster = Field(
        default="",
        description="The store's master, for lookups of prompts; if empty, every long prompt is "
        f"sent to a prefiller. Port {DEFAULT_PORT} when only a host is given.",
    )
    cluster: Cluster = ""
    auth: AuthFile = ""
    tenant: Tenant = ""
    prefill_threshold: Count = Field(
        default=256,
        ge=0,
        le=16_777_216,
        description="Prompts with fewer tokens, or fewer missing in the store, are sent to the "
        "decoder alone, where so few tokens cost less than a prefiller and the store.",
    )
    affinity: Affinity = Field(
        default="none",
        description="none: the engine with the fewest requests; prefix: the one that recently "
        "had the longest prefix of the prompt.",
    )
    prefill_timeout_ms: Milliseconds = Field(
        default=30_000,
        ge=1,
        le=3_600_000,
        description="Timeout of one prefiller; one other is tried, then the decoder computes "
        "the prompt. Should exceed the time of the longest prompt.",
    )
    admin_token: AdminToken = Field(
        default="",
        repr=False,
        description="Token for changes of the instances ('Authorization: Bearer TOKEN'), also "
        "from this host; without it only this host may change them. Pass it in the environment: "
        "every user of the host can read flags.",
    )
    cache_salt_from: HeaderName = Field(
        default="",
        description="Header that identifies the caller (authorization, or one that your gateway "
        "sets), for cache isolation: engines receive a cache_salt derived from it and "
        "--cache-salt-secret-file. A request without it gets 401. Empty: cache_salt is passed "
        "on unchanged.",
    )
    cache_salt_secret_file: File = Field(
        default="",
        description="File with the secret of --cache-salt-from (mode 600, one line), equal for "
        "all proxies of these engines. With a new one no caller finds earlier blocks.",
    )
    log_level: LogLevel = Field(default="info", description="The least serious messages to log.")
    log_format: LogFormat = "text"

    @model_validator(mode="after")
    def _rules(self) -> Self:
        if self.cache_salt_from and not self.cache_salt_secret_file:
            raise InvalidSettingError(
                "requires a secret",
                "Give --cache-salt-secret-file: the same for every proxy. To make one: "
                "openssl rand -hex 32 > FILE; chmod 600 FILE",
                key="cache_salt_from",
            )
        if self.cache_salt_secret_file and not self.cache_salt_from:
            raise InvalidSettingError(
                "is required with --cache-salt-secret-file",
                "Give --cache-salt-from authorization, or another header.",
                key="cache_salt_from",
            )
        return self
