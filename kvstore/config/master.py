"""A master's settings."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field, model_validator

from kvstore.config.http import HttpConfig
from kvstore.config.values import (
    DEFAULT_PORT,
    HTTP_PORT,
    Advertise,
    As,
    Bytes,
    Cluster,
    DataEncryption,
    Etcd,
    File,
    Host,
    LogFormat,
    LogLevel,
    Milliseconds,
    Port,
    RefusedValueError,
    Share,
    check_encryption,
)
from kvstore.network.addresses import EtcdPlace, parse_etcd

_NAME_OF_A_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]{0,252})")


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
    http_names: Annotated[str, As("NAME,...")] = Field(
        default="",
        description="Names, separated by commas, by which browsers and programs may reach the page "
        "and /api, beside addresses, localhost, --host, --advertise and this host's name. Others "
        "are refused: a web page could point a name of its own at this address.",
    )
    events: Annotated[str, As("on|ADDRESS,...")] = Field(
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
            raise RefusedValueError(
                f"is {self.events!r}, and ZeroMQ authenticates nobody",
                "With --auth give 'on': events over HTTP.",
                key="events",
            )
        if self.events and not self.http_port:
            raise RefusedValueError("needs a port for HTTP", "Drop --http-port 0.", key="events")
        addresses = self.events_at.split(",") if self.events_at else []
        if len(addresses) > 2 or not all("://" in each for each in addresses):
            raise RefusedValueError(
                f"is {self.events!r}",
                "Give 'on', or one or two addresses of ZeroMQ such as tcp://*:5557.",
                key="events",
            )
        for name in self.http_names_given:
            if not _NAME_OF_A_HOST.fullmatch(name):
                raise RefusedValueError(
                    f"has {name!r}, which is no name of a host",
                    "Give names without port: kv.example.com,kv",
                    key="http_names",
                )
        if self.port and self.lane_port == self.port:
            raise RefusedValueError(
                f"is {self.port}, the same as port",
                "Give the lane a port of its own.",
                key="lane_port",
            )
        if "http_port" in self.model_fields_set and self.http_port:
            taken = {self.port: "gRPC", self.lane_port_wanted: "the lane"}
            if role := taken.get(self.http_port):
                raise RefusedValueError(
                    f"is {self.http_port}, which is the port for {role}",
                    "Give HTTP a port of its own, or 0 for none.",
                    key="http_port",
                )
        if self.port == 65_535 and not self.lane_port:
            raise RefusedValueError("must be given, there is no port after 65535", key="lane_port")
        return self
