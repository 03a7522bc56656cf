"""The settings that clients and connectors of engines share: which store, and how to use it."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from kvstore.config.base import Config
from kvstore.config.values import (
    DEFAULT_PORT,
    MASTER_HELP,
    P2P,
    TRANSPORTS_KNOWN,
    AuthFile,
    Bytes,
    Cluster,
    Count,
    DataEncryption,
    DeviceKernel,
    Devices,
    Master,
    MetadataServer,
    MoversProtocol,
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

    master: Master = Field(
        default=f"127.0.0.1:{DEFAULT_PORT}",
        description=MASTER_HELP,
    )
    cluster: Cluster = ""
    auth: AuthFile = ""
    tenant: Tenant = ""
    transports: Transports = Field(
        default=TRANSPORTS_KNOWN,
        description="Ways to move bytes, the best first; the first that reaches a segment is "
        "taken. shm works on the node's own host only.",
    )
    protocol: MoversProtocol = ""
    device_name: Devices = ""
    metadata_server: MetadataServer = P2P
    engine_unauthenticated: Unauthenticated = False
    data_encryption: DataEncryption = Field(
        default="off",
        description="tls: over tcp use only nodes that encrypt their data ports, and encrypt the "
        "memory that this process pools; needs auth. off: as each node says, in plain or encrypted "
        "(TLS 1.3). Memory of this host is mapped in any case.",
    )
    device_kernel: DeviceKernel = 0
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
