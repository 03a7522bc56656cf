"""Settings of masters and nodes."""

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
    Limit,
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
    "lru": "kvstore.master.state.eviction:lru",
    "density": "kvstore.master.state.density:density",
}

_NAME_OF_A_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]{0,252})")


class HttpConfig(Config):
    """Settings of a server's HTTP port, and of access to all of its ports."""

    auth: AuthFile = ""
    auth_revoked: File = Field(
        default="",
        description="File with the numbers of revoked identities, written by kvstore auth "
        "revoke. It is checked once a second.",
    )

    http_token_file: File = Field(
        default="",
        description="File with a token, required for HTTP requests that change something or "
        "fetch bytes (Authorization: Bearer TOKEN). Empty: such requests are accepted from "
        "loopback only.",
    )
    http_reads: HttpReads = Field(
        default="all",
        description="Access to status, metrics and the dashboard over HTTP: all, or requests "
        "with the token. /healthz and /readyz are open.",
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
                "is token, but no token is configured", "Give --http-token-file.", key="http_reads"
            )
        if bool(self.http_cert) != bool(self.http_key):
            raise InvalidSettingError(
                "is missing",
                "Give --http-cert and --http-key, or none of both.",
                key="http_key" if self.http_cert else "http_cert",
            )
        return self


class MasterConfig(HttpConfig):
    """Settings of a ``kvstore-master``."""

    section = "master"

    host: Host = Field(
        default="127.0.0.1",
        description="Address to listen on. Listens on loopback by default: any host that can "
        "connect can read and write the cache. :: is every interface, 0.0.0.0 those with IPv4.",
    )
    port: Port = Field(
        default=DEFAULT_PORT, description="TCP port of the gRPC service; 0 takes any."
    )
    cluster: Cluster = ""
    lane_port: Port = Field(
        default=0,
        description="TCP port of the lane, the low-latency RPC protocol; 0 takes the port after "
        "--port, or any when that is 0.",
    )
    http_port: Port = Field(
        default=HTTP_PORT,
        description="TCP port for HTTP: health, metrics (Prometheus) and a dashboard. If the "
        f"default is in use, the next free one up to {HTTP_PORT + 15}; 0: no HTTP.",
    )
    http_names: Annotated[str, CliType("NAME,...")] = Field(
        default="",
        description="Host names, separated by commas, that HTTP requests may use, in addition "
        "to addresses, localhost, --host, --advertise and this host's name (protects against "
        "DNS rebinding).",
    )
    events: Annotated[str, CliType("on|ADDRESS,...")] = Field(
        default="",
        description="Publish object events (objects stored and removed). 'on': over HTTP; "
        "'tcp://*:5557': also by ZeroMQ, in vLLM's format; 'tcp://*:5557,tcp://*:5558': with "
        "replay at the second address. Empty: no events.",
    )
    memory: Bytes = Field(
        default=0,
        description="Memory that this process also pools (2GiB), so that one command is a "
        "complete store; 0: none.",
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
        description="Lease of found objects unless the client releases them earlier, 1 s to 10 "
        "min. Clients release them after the read.",
    )
    dead_ms: Milliseconds = Field(
        default=6_000,
        ge=120,
        le=600_000,
        description="Silence after which the objects of a node count as missing: longer than a "
        "stall of a busy host. After a third of it the node gets no new objects.",
    )
    pinned_max: Share = Field(
        default=0.5,
        ge=0.0,
        le=1.0,
        description="Fraction of the pool that the pins of one namespace may protect from "
        "eviction. 0: pins are refused.",
    )
    eviction: Literal["density", "lru"] = Field(
        default="density",
        description="Which objects are evicted first: density, those that promise the fewest hits "
        "per second of memory, as learned; lru, the least recently used. kvstore plan "
        "compares them on a trace of your requests.",
    )
    record: File = Field(
        default="",
        description="File for a trace of the requests (hashes, sizes and times, no contents), for "
        "kvstore plan. Empty: none.",
    )
    record_bytes: Bytes = Field(
        default=1 << 30,
        ge=1 << 20,
        description="Bytes that --record keeps: half of them in FILE, the older ones in FILE.1.",
    )
    tenants: File = Field(
        default="",
        description="File (TOML) with tenants: patterns of namespaces, guarantees and limits. "
        "It is read again when it changes. Empty: no tenants. docs/security.md has an example.",
    )
    etcd: Etcd = Field(
        default="",
        description="Members of the etcd in which several masters elect a leader; or the "
        "complete form: "
        "etcd://USER:PASSWORD@HOST:2379,HOST:2379/PREFIX?ca=FILE&cert=FILE&key=FILE (pass a "
        "password in the environment: every user of the host can read flags). Each cluster "
        "needs its own prefix. Empty: single master.",
    )
    advertise: Advertise = Field(
        default="",
        description="Address that this master announces as leader, if it differs from --host "
        "and --port. Clients and nodes must be able to connect to it.",
    )
    log_level: LogLevel = Field(default="info", description="The least serious messages to log.")
    log_format: LogFormat = "text"

    @property
    def lane_port_wanted(self) -> int:
        """The listening port of the lane; 0 takes any."""
        return self.lane_port or (self.port + 1 if self.port else 0)

    @property
    def http_names_given(self) -> list[str]:
        return [name.strip() for name in self.http_names.split(",") if name.strip()]

    @property
    def events_at(self) -> str:
        """Addresses for ZeroMQ events and their replay; empty: HTTP only."""
        return "" if self.events == "on" else self.events

    @property
    def etcd_place(self) -> EtcdPlace | None:
        """The etcd for leader election; None for a single master."""
        return parse_etcd(self.etcd) if self.etcd else None

    @model_validator(mode="after")
    def _rules(self) -> MasterConfig:
        check_encryption(self.data_encryption, self.auth)
        if self.auth and self.events_at:
            raise InvalidSettingError(
                f"= {self.events!r} cannot be combined with --auth: ZeroMQ cannot authenticate "
                "subscribers",
                "Use --events on (HTTP).",
                key="events",
            )
        if self.events and not self.http_port:
            raise InvalidSettingError("needs a port for HTTP", "Drop --http-port 0.", key="events")
        addresses = self.events_at.split(",") if self.events_at else []
        if len(addresses) > 2 or not all("://" in address for address in addresses):
            raise InvalidSettingError(
                f"is {self.events!r}",
                "Give 'on', or one or two addresses of ZeroMQ such as tcp://*:5557.",
                key="events",
            )
        for name in self.http_names_given:
            if not _NAME_OF_A_HOST.fullmatch(name):
                raise InvalidSettingError(
                    f"has {name!r}, which is not a host name",
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
            taken = {self.port: "gRPC", self.lane_port_wanted: "clients (--lane-port)"}
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
        description="The node's name, unique in the cluster. Default: the host's name, with -2, "
        "-3, ... appended if it is in use.",
    )
    host: OptionalHost = Field(
        default="",
        description="Address to serve the memory on; empty: this host's own on the route to the "
        "master, which is loopback for a master on loopback. :: is every interface, 0.0.0.0 "
        "those with IPv4.",
    )
    port: Port = Field(
        default=DATA_PORT,
        description="TCP port to serve the memory on; 0 takes any. Default: a free one of "
        f"{DATA_PORT} to {DATA_PORT + DATA_PORTS - 1} (several nodes on a host), or any.",
    )
    http_port: Port = Field(
        default=NODE_HTTP_PORT,
        description="TCP port for HTTP: health and metrics (Prometheus). If the default is in "
        f"use, the next free one up to {NODE_HTTP_PORT + 15}; 0: no HTTP, as in nodes started by "
        "a master or client.",
    )
    advertise: Advertise = Field(
        default="",
        description="Address for clients, if it differs from --host and --port (behind NAT). "
        "Default: those, and with --host :: or 0.0.0.0 this host's own address on the route to "
        "the master.",
    )
    memory: Annotated[Bytes, Field(ge=MEMORY_BYTES_MIN)] = Field(
        default=1 << 30,
        description="Memory to pool, in /dev/shm, reserved at start.",
    )
    device: Annotated[str, CliType("DEVICE"), AfterValidator(_device)] = Field(
        default="",
        description="Pool memory of this device, in CUDA's numbering for this process: cuda:0. "
        "It is lost when the process ends. Empty: host memory.",
    )
    disk: Annotated[str, CliType("DIRECTORY,...")] = Field(
        default="",
        description="Directories on local disks, separated by commas. Objects that are evicted "
        "from memory are written to a file in one of them, and return when they are asked for; "
        "empty: none.",
    )
    disk_size: Bytes = Field(
        default=0, description="Size of the file in each --disk, reserved at the first start."
    )
    disk_write_rate: Limit = Field(
        default=0, description="Bytes a second that are written to each disk; 0: no limit."
    )
    disk_writes_per_day: Annotated[Share, Field(ge=0, le=1_000)] = Field(
        default=3,
        description="How often a day each file may be overwritten, on average after it has been "
        "filled once. If this is too little, objects that are over or were used least are not "
        "written. 0: no limit.",
    )
    huge_pages: HugePages = Field(
        default="auto",
        description="auto: huge pages if /dev/shm provides them (mount option huge=advise), "
        "which makes starting and first reads many times faster; transparent: require those; "
        "reserved: require those of a hugetlbfs (sysctl vm.nr_hugepages); off: none.",
    )
    numa_node: Annotated[Count, Field(ge=-1, le=1_023)] = Field(
        default=-1,
        description="Allocate the memory on this NUMA node and serve it by its processors; -1: "
        "the kernel chooses. Run one kvstore-node per NUMA node to use all of a host.",
    )
    shm_group: Group = Field(
        default="",
        description="Group whose members may map the memory: their clients on this host read "
        "without a copy. Without --auth they may write to it; with it, as their identities may. "
        "Empty: only this user; others use tcp.",
    )
    shm_clients: ShmClients = Field(
        default="members",
        description="Identities of this user, or of --shm-group, that may map the memory, which "
        "exposes all namespaces. members: those that may read some namespace; all-namespaces: "
        "those that may read all; others use tcp. Requires --auth.",
    )
    keep: OnOffAuto = Field(
        default=None,
        description="Leave the memory in /dev/shm at a clean stop, for the next start of this "
        "node. auto: on for a node with --name, else off. A node that was killed, or failed to "
        "start, leaves its memory; a drained one leaves nothing.",
    )
    adopt: bool = Field(
        default=False,
        description="Take over memory of this name and its objects from another cluster, for "
        "example after a change of the cluster's name or address.",
    )
    discard: bool = Field(
        default=False,
        description="Discard the memory that an earlier start of this node has left, instead of "
        "serving its objects.",
    )
    protocol: EngineProtocol = Field(
        default="",
        description="Also serve the memory by Mooncake's transfer engine (pip install "
        "mooncake-transfer-engine-non-cuda), over this protocol; empty: no transfer engine.",
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
                "requires authentication",
                "Give --auth, or leave out --shm-clients.",
                key="shm_clients",
            )
        if bool(self.disk) != bool(self.disk_size):
            raise InvalidSettingError(
                "--disk and --disk-size require each other",
                "Give both: --disk /nvme/kvstore --disk-size 1TiB",
                key="disk",
            )
        if self.device:
            if self.shm_clients != "members":
                raise InvalidSettingError(
                    "cannot be combined with --device, whose memory is opened by name",
                    key="shm_clients",
                )
            for key, why in (
                ("keep", "memory of a device cannot be kept"),
                ("disk", "objects are written to disks from host memory"),
                ("protocol", "the transfer engine does not serve memory of a device"),
            ):
                if getattr(self, key):
                    raise InvalidSettingError(f"cannot be combined with --device: {why}", key=key)
        return self

    @property
    def passes_descriptors(self) -> bool:
        """Whether authenticated clients get file descriptors of the memory."""
        return bool(self.auth) and not self.device

    @property
    def keeps(self) -> bool:
        """Whether a clean stop leaves the memory. By default only with a name, under which the next
        start finds it; device memory ends with the process."""
        return bool(self.name and not self.device) if self.keep is None else self.keep
