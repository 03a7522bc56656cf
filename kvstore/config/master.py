"""A master's settings."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field, model_validator

from kvstore.config.base import at_least
from kvstore.config.http import HttpConfig
from kvstore.config.values import (
    DEFAULT_PORT,
    HTTP_PORT,
    Advertise,
    As,
    Bytes,
    Cluster,
    Count,
    DataEncryption,
    Etcd,
    File,
    Host,
    Label,
    Limit,
    LogFormat,
    LogLevel,
    Microseconds,
    Milliseconds,
    Name,
    Port,
    RefusedValueError,
    Secret,
    Share,
    check_encryption,
)
from kvstore.errors import InvalidArgumentError
from kvstore.network.addresses import ETCD_PREFIX, EtcdPlace, checked_etcd, parse_etcd

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
    put_deadline_ms: Milliseconds = Field(
        default=30_000,
        ge=1_000,
        le=600_000,
        description="How long a writer has between put_start and put_end, 1 s to 10 min: enough "
        "for gigabytes over a slow network. Memory of a writer that died is unused that long.",
    )
    quarantine_ms: Milliseconds = Field(
        default=20_000,
        ge=0,
        le=600_000,
        description="How long memory of an expired put stays unused after its deadline, because "
        "a write may land late: what a socket may hold up for 10 s reaches a node that is stopped "
        "for less than --dead-ms. At least --dead-ms.",
    )
    beat_ms: Milliseconds = Field(
        default=500,
        ge=10,
        le=60_000,
        description="How often nodes say that they are alive: two a second cost nothing.",
    )
    suspect_ms: Milliseconds = Field(
        default=2_000,
        ge=20,
        le=600_000,
        description="Silence after which a node is not chosen for new objects: four lost beats; "
        "at least twice --beat-ms.",
    )
    dead_ms: Milliseconds = Field(
        default=6_000,
        ge=30,
        le=600_000,
        description="Silence after which a node's objects are gone from every answer: longer "
        "than a stall of a busy host, more than --suspect-ms.",
    )
    waiting_puts_max: Count = Field(
        default=256,
        ge=0,
        le=65_536,
        description="Puts that may wait for room at the same time; further ones fail at once. Each "
        "waits with its whole batch in memory.",
    )
    pending_puts_max: Count = Field(
        default=65_536,
        ge=1,
        le=16_777_216,
        description="Objects between put_start and put_end at once: four full batches, some "
        "300 bytes of master memory each.",
    )
    gather_ms: Milliseconds = Field(
        default=3_000,
        ge=0,
        le=60_000,
        description="How long after a restart a get that would be a miss waits for nodes to report "
        "what they hold; 4 GiB in 100,000 objects take about two seconds. 0: no waiting.",
    )
    repair_after_ms: Milliseconds = Field(
        default=30_000,
        ge=0,
        le=86_400_000,
        description="How long after a node's death an object that was put with several replicas "
        "gets another one: a node that is only started again comes back with its own. At least "
        "--lease-ms.",
    )
    repair_bytes_per_s: Limit = Field(
        default=256 << 20,
        ge=0,
        le=1 << 40,
        description="How much may be copied to restore replicas, in the whole cluster: a quarter "
        "of a 10 Gbit/s network. 0: replicas are not restored.",
    )
    repair_bytes_max: Limit = Field(
        default=256 << 20,
        ge=1 << 20,
        le=1 << 40,
        description="How much of that may be under way at once, at least one object.",
    )
    repair_copies_max: Count = Field(
        default=512,
        ge=1,
        le=65_536,
        description="Objects that may be copied at once to restore replicas.",
    )
    put_wait_max_ms: Milliseconds = Field(
        default=30_000,
        ge=0,
        le=600_000,
        description="The longest that a put may ask to wait for room: three default leases.",
    )
    pinned_max: Share = Field(
        default=0.5,
        ge=0.0,
        le=1.0,
        description="Share of the pool's memory that the pins of one namespace may hold: pinned "
        "objects are not evicted for puts. 0: pins are refused.",
    )
    pinned_all_max: Share = Field(
        default=0.75,
        ge=0.0,
        le=1.0,
        description="Share of the pool's memory that the pins of all namespaces together may hold; "
        "the rest stays for puts. No less than --pinned-max.",
    )
    tenants: File = Field(
        default="",
        description="File (TOML) that divides the store among tenants, by patterns of namespaces: "
        "what each is guaranteed, and what it may have at most. It is read again when it changes. "
        "Empty: there are no tenants. docs/security.md has an example.",
    )
    lane_spin_us: Microseconds = Field(
        default=200,
        ge=0,
        le=10_000,
        description="How long the loop polls after a hot call before it sleeps: saves a wake-up "
        "between the calls of one engine step, at the cost of that much processor time.",
    )
    connections_max: Count = Field(
        default=1_024,
        ge=1,
        le=65_536,
        description="Connections on the lane at once, and as many on the gRPC port; the limit of "
        "descriptors is raised for them as far as it can be. With identities one of them has at "
        "most half of the lane's.",
    )
    etcd: Etcd = Field(
        default="",
        description="Members of the etcd through which several masters elect the one that leads; "
        "empty: this is the only master.",
    )
    etcd_prefix: Name = Field(
        default="",
        description="Under which key in the etcd the masters of this cluster meet; empty: "
        f"{ETCD_PREFIX}. Each cluster needs its own.",
    )
    etcd_ca: File = Field(
        default="",
        description="File with the certificates (PEM) that etcd's own is checked against; empty: "
        "no TLS.",
    )
    etcd_cert: File = Field(
        default="", description="File with our certificate (PEM), where etcd asks for one."
    )
    etcd_key: File = Field(default="", description="File with its key (PEM).")
    etcd_user: Label = Field(
        default="", description="The user to log in to etcd as; empty: no log-in."
    )
    etcd_password: Secret = Field(
        default="",
        description="The password of --etcd-user. Better given as a variable: flags can be read by "
        "every user of the host.",
    )
    etcd_lease_ms: Milliseconds = Field(
        default=3_000,
        ge=2_000,
        le=60_000,
        description="How long etcd waits for a leader that is silent before another one may lead; "
        "whole seconds, 2 s to 1 min. Longer than any stall of a healthy host.",
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
        if not self.etcd:
            return None
        place = parse_etcd(self.etcd)
        return checked_etcd(
            EtcdPlace(
                place.endpoints,
                prefix=self.etcd_prefix.strip("/") or place.prefix,
                ca=self.etcd_ca or place.ca,
                cert=self.etcd_cert or place.cert,
                key=self.etcd_key or place.key,
                user=self.etcd_user or place.user,
                password=self.etcd_password or place.password,
            )
        )

    @model_validator(mode="after")
    def _rules(self) -> MasterConfig:
        try:
            parse_etcd(str(self.etcd_place or "etcd://nobody"))
        except InvalidArgumentError as error:
            raise RefusedValueError(error.message, error.advice, key="etcd") from error
        at_least(self, "suspect_ms", 2 * self.beat_ms, "2 * beat_ms", "one late beat is no sign")
        at_least(self, "dead_ms", self.suspect_ms + 1, "suspect_ms + 1", "suspect comes first")
        at_least(
            self,
            "quarantine_ms",
            self.dead_ms,
            "dead_ms",
            "bytes on their way to a stopped node land before it counts as dead, "
            "and must not land in memory that has been given to someone else",
        )
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
