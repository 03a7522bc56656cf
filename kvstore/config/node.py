"""A node's settings."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from kvstore.config.http import HttpConfig
from kvstore.config.values import (
    DATA_PORT,
    DATA_PORTS,
    DEFAULT_PORT,
    MASTER_HELP,
    MEMORY_BYTES_MIN,
    NODE_HTTP_PORT,
    P2P,
    Advertise,
    As,
    Bytes,
    Cluster,
    Count,
    DataEncryption,
    Devices,
    EngineProtocol,
    Group,
    HugePages,
    LogFormat,
    LogLevel,
    Master,
    MetadataServer,
    Name,
    OnOffAuto,
    OptionalHost,
    Port,
    RefusedValueError,
    ShmClients,
    Unauthenticated,
    check_encryption,
    check_engine,
)


def _device(value: str) -> str:
    if value and not re.fullmatch(r"[a-z]+:\d{1,3}", value, re.ASCII):
        raise RefusedValueError("must name a device", "As in: cuda:0.")
    return value


class NodeConfig(HttpConfig):
    """The settings of a ``kvstore-node``."""

    section = "node"

    master: Master = Field(
        default=f"127.0.0.1:{DEFAULT_PORT}",
        description=MASTER_HELP,
    )
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
    device: Annotated[str, As("DEVICE"), AfterValidator(_device)] = Field(
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
            raise RefusedValueError(
                "needs identities, to know what a client may read",
                "Give --auth, or leave out --shm-clients.",
                key="shm_clients",
            )
        if self.device:
            if self.shm_clients != "members":
                raise RefusedValueError(
                    "does not go with --device: its memory is opened by name", key="shm_clients"
                )
            for key, why in (
                ("keep", "memory of a device cannot be kept"),
                ("protocol", "the transfer engine does not serve memory of a device"),
            ):
                if getattr(self, key):
                    raise RefusedValueError(f"does not go with --device: {why}", key=key)
        return self

    @property
    def hands_over(self) -> bool:
        """Whether clients with an identity get descriptors of the memory."""
        return bool(self.auth) and not self.device

    @property
    def keeps(self) -> bool:
        """Whether a clean stop leaves the memory. By default only a node with a name does, because
        a later start might not find it otherwise; memory of a device is gone with the process."""
        return bool(self.name and not self.device) if self.keep is None else self.keep
