"""The settings of masters and nodes."""

from __future__ import annotations

import re
from typing import Annotated, Final, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from kvstore.config.base import Config
from kvstore.config.setting_types import (
    DATA_PORT,
    DATA_PORTS,
    DEFAULT_PORT,
    HTTP_PORT,
    MEMORY_BYTES_MIN,
    NODE_HTTP_PORT,
    P2P,
    Advertise,
    AuthFile,
    Bytes,
    CliType,
    Cluster,
    Count,
    DataEncryption,
    Devices,
    EngineProtocol,
    Etcd,
    File,
    Group,
    Host,
    HttpReads,
    HugePages,
    InvalidSettingError,
    LogFormat,
    LogLevel,
    Master,
    MetadataServer,
    Milliseconds,
    Name,
    OnOffAuto,
    OptionalHost,
    Port,
    Share,
    ShmClients,
    Unauthenticated,
    check_encryption,
    check_engine,
)
from kvstore.runtime.addresses import EtcdPlace, parse_etcd

EVICTION_POLICIES: Final = {
    "lru": "kvstore.master.state.eviction:LruPolicy",
    "s3-fifo": "kvstore.master.state.s3_fifo:S3FifoPolicy",
}

_NAME_OF_A_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]{0,252})")


class HttpConfig(Config):
    """The settings of a server: its port for HTTP, and who may use it and its other ports."""

    auth: AuthFile = ""
    auth_revoked: File = Field(
        default="",
        description="File with the numbers of revoked identities, which kvstore auth revoke "
        "writes. It is looked at once a second.",
    )

    http_token_file: File = Field(
        default="",
        description="File with a token. Over HTTP, requests that change something or fetch bytes "
        "need it (Authorization: Bearer TOKEN). Empty: such requests are answered from loopback "
        "only.",
    )
    http_reads: HttpReads = Field(
        default="all",
        description="Who may read status, metrics and the dashboard over HTTP: all, or requests "
        "with the token. /healthz and /readyz answer all.",
    )
    http_cert: File = Field(
        default="",
        description="Serve HTTPS instead of HTTP, with the certificate chain in this file (PEM). "
        "Replaced files are used from the next connection on.",
    )
    http_key: File = Field(
        default="", description="File with the key of --http-cert (PEM, no passphrase)."
    )

    @model_validator(mode="after")
    def _http_rules(self) -> Self:
        if self.http_reads == "token" and not self.http_token_file:
            raise InvalidSettingError(
                "is token, and there is none", "Give --http-token-file.", key="http_reads"
            )
        if bool(self.http_cert) != bool(self.http_key):
            raise InvalidSettingError(
                "is missing",
                "Give --http-cert and --http-key, or none of both.",
                key="http_key" if self.http_cert else "http_cert",
            )
        return self


class MasterConfig(HttpConfig):
    """The settings of a ``kvstore-master``."""

    section = "master"

    host: Host = Field(
        default="127.0.0.1",
        description="Address to listen on. Loopback until you say otherwise, because a host "
        "that reaches the master can read and write the cache. :: is every interface, 0.0.0.0 "
        "those with IPv4.",
    )
    port: Port = Field(
        default=DEFAULT_PORT, description="TCP port of the gRPC service; 0 takes any."
    )
    cluster: Cluster = ""
    lane_port: Port = Field(
        default=0,
        description="TCP port of the lane, the fast carrier of the hot calls; 0 takes the port "
        "after --port, or any when that is 0.",
    )
    http_port: Port = Field(
        default=HTTP_PORT,
        description="TCP port for HTTP: health, metrics (Prometheus) and a dashboard. If it is "
        f"taken and not asked for, the next free one up to {HTTP_PORT + 15}; 0 serves none.",
    )
    http_names: Annotated[str, CliType("NAME,...")] = Field(
        default="",
        description="Names, separated by commas, by which browsers and programs may reach the page "
        "and /api, beside addresses, localhost, --host, --advertise and this host's name. Others "
        "are refused: a web page could point a name of its own at this address.",
    )
    events: Annotated[str, CliType("on|ADDRESS,...")] = Field(
        default="",
        description="Publish which objects become visible and which are gone: 'on': over HTTP; "
        "'tcp://*:5557': by ZeroMQ, too, in vLLM's format; 'tcp://*:5557,tcp://*:5558': with "
        "replay at the second address. Empty: no events.",
    )
    memory: Bytes = Field(
        default=0,
        description="Memory that this process also pools (2GiB), so that one command is a whole "
        "store; 0 leaves that to nodes.",
    )
    data_encryption: DataEncryption = "off"
    keep: bool = Field(
        default=False,
        description="Leave --memory in /dev/shm at a clean stop, for the next start on the same "
        "port. A master that was killed leaves it anyway.",
    )
    lease_ms: Milliseconds = Field(
        default=10_000,
        ge=1_000,
        le=600_000,
        description="How long found objects keep their bytes if the client does not release them, "
        "1 s to 10 min. Clients release them after the read.",
    )
    dead_ms: Milliseconds = Field(
        default=6_000,
        ge=120,
        le=600_000,
        description="Silence after which a node's objects are gone from every answer: longer "
        "than a stall of a busy host. After a third of it the node is not chosen for new objects.",
    )
    pinned_max: Share = Field(
        default=0.5,
        ge=0.0,
        le=1.0,
        description="Share of the pool's memory that the pins of one namespace may hold: pinned "
        "objects are not evicted for puts. 0: pins are refused.",
    )
    eviction: Literal["lru", "s3-fifo"] = Field(
        default="lru",
        description="Which objects are evicted first: lru, the least recently used; s3-fifo, new "
        "ones that are not used twice soon, where most objects are never used again.",
    )
    tenants: File = Field(
        default="",
        description="File (TOML) that divides the store among tenants, by patterns of namespaces: "
        "what each is guaranteed, and what it may have at most. It is read again when it changes. "
        "Empty: there are no tenants. docs/security.md has an example.",
    )
    etcd: Etcd = Field(
        default="",
        description="Members of the etcd through which several masters elect the one that leads; "
        "or, with all that it needs: etcd://USER:PASSWORD@HOST:2379,HOST:2379/PREFIX"
        "?ca=FILE&cert=FILE&key=FILE (with a password better as a variable: flags can be read by "
        "every user of the host). Each cluster needs a prefix of its own. Empty: this is the only "
        "master.",
    )
    advertise: Advertise = Field(
        default="",
        description="The address that this master announces when it leads, if that is not --host "
        "and --port; empty: those. Clients and nodes must reach it there.",
    )
    log_level: LogLevel = Field(default="info", description="The least serious messages to log.")
    log_format: LogFormat = "text"

    @property
    def lane_port_wanted(self) -> int:
        """The port that the lane is to listen on; 0 takes any."""
        return self.lane_port or (self.port + 1 if self.port else 0)

    @property
    def http_names_given(self) -> list[str]:
        return [name.strip() for name in self.http_names.split(",") if name.strip()]

    @property
    def events_at(self) -> str:
        """Where events are published by ZeroMQ, and replayed; empty: only HTTP serves them."""
        return "" if self.events == "on" else self.events

    @property
    def etcd_place(self) -> EtcdPlace | None:
        """Where the masters meet; None for a single one."""
        return parse_etcd(self.etcd) if self.etcd else None

    @model_validator(mode="after")
    def _rules(self) -> MasterConfig:
        check_encryption(self.data_encryption, self.auth)
        if self.auth and self.events_at:
            raise InvalidSettingError(
                f"is {self.events!r}, and ZeroMQ authenticates nobody",
                "With --auth give 'on': events over HTTP.",
                key="events",
            )
        if self.events and not self.http_port:
            raise InvalidSettingError("needs a port for HTTP", "Drop --http-port 0.", key="events")
        addresses = self.events_at.split(",") if self.events_at else []
        if len(addresses) > 2 or not all("://" in each for each in addresses):
            raise InvalidSettingError(
                f"is {self.events!r}",
                "Give 'on', or one or two addresses of ZeroMQ such as tcp://*:5557.",
                key="events",
            )
        for name in self.http_names_given:
            if not _NAME_OF_A_HOST.fullmatch(name):
                raise InvalidSettingError(
                    f"has {name!r}, which is no name of a host",
                    "Give names without port: kv.example.com,kv",
                    key="http_names",
                )
        if self.port and self.lane_port == self.port:
            raise InvalidSettingError(
                f"is {self.port}, the same as port",
                "Give the lane a port of its own.",
                key="lane_port",
            )
        if "http_port" in self.model_fields_set and self.http_port:
            taken = {self.port: "gRPC", self.lane_port_wanted: "the lane"}
            if role := taken.get(self.http_port):
                raise InvalidSettingError(
                    f"is {self.http_port}, which is the port for {role}",
                    "Give HTTP a port of its own, or 0 for none.",
                    key="http_port",
                )
        if self.port == 65_535 and not self.lane_port:
            raise InvalidSettingError(
                "must be given, there is no port after 65535", key="lane_port"
            )
        return self


def _device(value: str) -> str:
    if value and not re.fullmatch(r"[a-z]+:\d{1,3}", value, re.ASCII):
        raise InvalidSettingError("must name a device", "As in: cuda:0.")
    return value


class NodeConfig(HttpConfig):
    """The settings of a ``kvstore-node``."""

    section = "node"

    master: Master = f"127.0.0.1:{DEFAULT_PORT}"
    cluster: Cluster = ""
    name: Name = Field(
        default="",
        description="The node's name, unique in the cluster; empty takes the host's name, and "
        "-2, -3, ... after it where that is taken.",
    )
    host: OptionalHost = Field(
        default="",
        description="Address to serve the memory on; empty: this host's own on the way to the "
        "master, which is loopback beside a master on loopback. :: is every interface, 0.0.0.0 "
        "those with IPv4.",
    )
    port: Port = Field(
        default=DATA_PORT,
        description="TCP port to serve the memory on; 0 takes any. Unless it is given, the next "
        f"free one of {DATA_PORT} to {DATA_PORT + DATA_PORTS - 1} is taken (several nodes on a "
        "host), or any.",
    )
    http_port: Port = Field(
        default=NODE_HTTP_PORT,
        description="TCP port for HTTP: health and metrics (Prometheus). If it is taken and not "
        f"asked for, the next free one up to {NODE_HTTP_PORT + 15}; 0 serves none, as do nodes "
        "that a master or client starts.",
    )
    advertise: Advertise = Field(
        default="",
        description="The address that clients connect to, if that is not --host and --port (behind "
        "NAT); empty: those, and with --host :: or 0.0.0.0 this host's own address on the way to "
        "the master.",
    )
    memory: Annotated[Bytes, Field(ge=MEMORY_BYTES_MIN)] = Field(
        default=1 << 30,
        description="Memory to pool, in /dev/shm, taken at start: small enough for a laptop, "
        "set it to what the host can spare.",
    )
    device: Annotated[str, CliType("DEVICE"), AfterValidator(_device)] = Field(
        default="",
        description="Pool memory of this device, as CUDA numbers it for this process: cuda:0. It "
        "is gone when the process ends. Empty: memory of the host.",
    )
    huge_pages: HugePages = Field(
        default="auto",
        description="auto: huge pages where /dev/shm gives them (mount option huge=advise), which "
        "makes starting and first reads many times faster; transparent: those, or do not start; "
        "reserved: those of a hugetlbfs (sysctl vm.nr_hugepages), or do not start; off: none.",
    )
    numa_node: Annotated[Count, Field(ge=-1, le=1_023)] = Field(
        default=-1,
        description="Take the memory from this NUMA node and serve it by its processors; -1: the "
        "kernel chooses. One kvstore-node per NUMA node uses all of a host.",
    )
    shm_group: Group = Field(
        default="",
        description="Group whose members may map the memory, although they are other users: their "
        "clients on this host read without a copy. Without --auth they may write to it; with it, "
        "as their identities may. Empty: this user alone; others are served by tcp.",
    )
    shm_clients: ShmClients = Field(
        default="members",
        description="Which identities of this user, or of --shm-group, may map the memory, which "
        "shows the bytes of all namespaces: members: those that may read in some namespace; "
        "all-namespaces: those that may read in all of them, and others are served by tcp. Needs "
        "--auth.",
    )
    keep: OnOffAuto = Field(
        default=None,
        description="Leave the memory in /dev/shm at a clean stop, for the next start of this "
        "node. auto: on for a node with --name, else off. A node that was killed, or whose start "
        "failed, leaves what it held; one that was drained leaves nothing.",
    )
    adopt: bool = Field(
        default=False,
        description="Take over memory of this name although another cluster has left it, with "
        "what it holds: for a cluster that has got another name or address.",
    )
    discard: bool = Field(
        default=False,
        description="Throw away the memory that an earlier start of this node has left, instead of "
        "serving what it holds.",
    )
    protocol: EngineProtocol = Field(
        default="",
        description="Also serve the memory by Mooncake's transfer engine (pip install "
        "mooncake-transfer-engine-non-cuda), over this protocol; empty: without it.",
    )
    device_name: Devices = ""
    metadata_server: MetadataServer = P2P
    engine_unauthenticated: Unauthenticated = False
    data_encryption: DataEncryption = "off"
    log_level: LogLevel = Field(default="info", description="The least serious messages to log.")
    log_format: LogFormat = "text"

    @model_validator(mode="after")
    def _rules(self) -> NodeConfig:
        check_engine(self.auth, self.protocol, unauthenticated=self.engine_unauthenticated)
        check_encryption(self.data_encryption, self.auth, protocol=self.protocol)
        if self.shm_clients != "members" and not self.auth:
            raise InvalidSettingError(
                "needs identities, to know what a client may read",
                "Give --auth, or leave out --shm-clients.",
                key="shm_clients",
            )
        if self.device:
            if self.shm_clients != "members":
                raise InvalidSettingError(
                    "does not go with --device: its memory is opened by name", key="shm_clients"
                )
            for key, why in (
                ("keep", "memory of a device cannot be kept"),
                ("protocol", "the transfer engine does not serve memory of a device"),
            ):
                if getattr(self, key):
                    raise InvalidSettingError(f"does not go with --device: {why}", key=key)
        return self

    @property
    def passes_descriptors(self) -> bool:
        """Whether clients with an identity get descriptors of the memory."""
        return bool(self.auth) and not self.device

    @property
    def keeps(self) -> bool:
        """Whether a clean stop leaves the memory. By default only a node with a name does, because
        a later start might not find it otherwise; memory of a device is gone with the process."""
        return bool(self.name and not self.device) if self.keep is None else self.keep
