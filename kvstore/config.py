"""Settings of every kind of process, and the one place that reads them.

A value comes from, first found wins:

1. a flag of the command line, or an argument in a program (``--lease-ms``, ``lease_ms=``);
2. the environment: ``KVSTORE_MASTER_LEASE_MS``, ``KVSTORE_NODE_MEMORY``, ``KVSTORE_CLIENT_LANE``;
   where clients, nodes and proxies find the master is ``KVSTORE_MASTER`` for all of them;
3. a TOML file with the sections ``[master]``, ``[node]``, ``[client]``, ``[connector]`` and
   ``[proxy]``: the one that ``--config`` or ``KVSTORE_CONFIG`` names, else ``./kvstore.toml``,
   else ``~/.config/kvstore/kvstore.toml``; files are never merged, and an empty name means none;
4. the default written here.

What is unknown, misspelt, unreadable or out of range is refused with ``ConfigError``, which names
the setting, where it was found and the nearest right spelling: a setting that is silently ignored
is found out in production. The description of a field is its comment and its ``--help`` text.

This module imports pydantic, not pydantic-settings: what the latter adds (reading the variables
and the file) cannot say where a value came from nor refuse an unknown ``KVSTORE_*`` variable, and
costs each import of ``kvstore.Client`` 40 ms.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal, NamedTuple, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from kvstore.addresses import (
    ETCD_PREFIX,
    ETCD_SCHEME,
    EtcdPlace,
    checked_etcd,
    join_address,
    parse_etcd,
    split_address,
)
from kvstore.errors import ConfigError, InvalidArgumentError
from kvstore.limits import REPLICAS_MAX, check_namespace

PREFIX = "KVSTORE_"
CONFIG_VARIABLE = "KVSTORE_CONFIG"
MASTER_VARIABLE = "KVSTORE_MASTER"
NATIVE_VARIABLE = "KVSTORE_NATIVE"
"""No setting: ``kvstore.native`` looks at it."""

DEFAULT_PORT = 50001
"""Where Mooncake's master listens, too: its users' firewalls already let it through."""

P2P = "P2PHANDSHAKE"
METADATA_KINDS = ("etcd", "http", "https", "redis")
MASTER_HELP = (
    "Where the master is; several, when one may take over from another, are separated by commas. "
    f"Port {DEFAULT_PORT} when only a host is given. Or where in an etcd it is announced: "
    "etcd://HOST:2379,HOST:2379/PREFIX?ca=FILE."
)

MEMORY_BYTES_MIN = 1 << 20
MEMORY_BYTES_MAX = 1 << 46

TRANSPORTS = ("shm", "tcp")
"""Those that are always there."""

TRANSPORTS_KNOWN = ("shm", "mooncake", "tcp")
"""The best first. ``mooncake`` counts where both ends name a protocol for it."""

_UNITS: dict[str, int] = {"": 1, "b": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgt", start=1)
    for suffix, base in (("ib", 1024), ("i", 1024), ("b", 1000))
}

# Kubernetes and Docker announce a service called "kvstore" to every container beside it in
# variables of these forms (KVSTORE_MASTER_PORT=tcp://10.0.0.7:50001). They are nobody's mistake.
_SERVICE_VARIABLE = re.compile(
    r"\w+_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
_SERVICE_VALUE = re.compile(r"(tcp|udp|sctp)://")


# --- values ------------------------------------------------------------------------------------


def parse_size(value: int | str) -> int:
    """Bytes: ``4096``, ``"2GiB"``, ``"512 MiB"``, ``"1.5GiB"``, ``"2GB"`` (decimal).

    Raises:
        InvalidArgumentError: no size, or one whose unit may mean two things (``2G``).
    """
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 0:
            raise InvalidArgumentError(f"a size is not negative, this one is {value}")
        return value
    found = re.fullmatch(r"(\d+)(?:\.(\d{1,3}))?\s*([a-z]*)", str(value).strip().lower(), re.ASCII)
    whole, fraction, unit = found.groups(default="") if found else ("", "", "")
    if found and unit in ("k", "m", "g", "t"):
        number, letter = str(value).strip()[: -len(unit)].strip(), unit.upper()
        raise InvalidArgumentError(
            f"{value!r} could be binary or decimal",
            advice=f"Write {number}{letter}iB or {number}{letter}B.",
        )
    if not found or unit not in _UNITS:
        raise InvalidArgumentError(
            f"{value!r} is not a size", advice="Write it like 2GiB, 512MiB or 4096 (bytes)."
        )
    return int(whole) * _UNITS[unit] + int(fraction or 0) * _UNITS[unit] // int(
        "1" + "0" * len(fraction)
    )


def format_size(size: int) -> str:
    """``parse_size`` backwards, in the largest binary unit that divides it: ``2GiB``, ``4097``."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        factor = _UNITS[unit.lower()]
        if size and size % factor == 0:
            return f"{size // factor}{unit}"
    return str(size)


def _size(value: object) -> object:
    if isinstance(value, int | str) and not isinstance(value, bool):
        try:
            return parse_size(value)
        except InvalidArgumentError as error:
            raise _RefusedError(error.message, error.advice) from error
    return value


def _number(value: object) -> object:
    if isinstance(value, bool):
        raise _RefusedError("is true or false, not a number")
    return value


def _memory(value: int) -> int:
    if value and not MEMORY_BYTES_MIN <= value <= MEMORY_BYTES_MAX:
        bounds = f"{format_size(MEMORY_BYTES_MIN)} to {format_size(MEMORY_BYTES_MAX)}"
        raise _RefusedError(f"must be 0 or {bounds}")
    return value


def _master(value: str) -> str:
    if value.strip().startswith(ETCD_SCHEME):
        try:
            return str(parse_etcd(value))
        except InvalidArgumentError as error:
            raise _RefusedError(error.message, error.advice) from error
    places = []
    for place in value.split(","):
        try:
            host, port = split_address(place, default_port=DEFAULT_PORT)
        except InvalidArgumentError as error:
            raise _RefusedError(error.message, error.advice) from error
        if not port:
            raise _RefusedError("must name a port: nobody can connect to port 0")
        places.append(join_address(host, port))
    return ",".join(places)


def _etcd(value: str) -> str:
    """Members of an etcd, or a whole place in it; as the latter."""
    if not value.strip():
        return ""
    try:
        return str(parse_etcd(value))
    except InvalidArgumentError as error:
        raise _RefusedError(error.message, error.advice) from error


def _optional_master(value: str) -> str:
    return _master(value) if value.strip() else ""


def _addresses(value: object) -> object:
    """Words between commas or blanks; a flag that was given several times is a tuple of those."""
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value):
        return value
    found = []
    for word in (word for each in value for word in each.replace(",", " ").split()):
        try:
            host, port = split_address(word)
        except InvalidArgumentError as error:
            raise _RefusedError(error.message, error.advice) from error
        if not port:
            raise _RefusedError("must name a port: nobody can connect to port 0")
        found.append(join_address(host, port))
    if len(set(found)) != len(found):
        raise _RefusedError("must name each once")
    return tuple(found)


def _advertise(value: str) -> str:
    if value:
        try:
            split_address(value, default_port=0)
        except InvalidArgumentError as error:
            raise _RefusedError(error.message, error.advice) from error
    return value


def _name(value: str) -> str:
    if len(value.encode()) > 128 or not value.isprintable():
        raise _RefusedError("must be printable text of at most 128 bytes")
    return value


def _namespace(value: str) -> str:
    try:
        return check_namespace(value)
    except InvalidArgumentError as error:
        raise _RefusedError(error.message, error.advice) from error


def _words(value: object) -> object:
    return tuple(word.strip() for word in value.split(",")) if isinstance(value, str) else value


def _transports(value: tuple[str, ...]) -> tuple[str, ...]:
    unknown = [name for name in value if name not in TRANSPORTS_KNOWN]
    if unknown or not value or len(set(value)) != len(value):
        raise _RefusedError(f"must name each once, of: {', '.join(TRANSPORTS_KNOWN)}")
    return value


def _metadata_server(value: str) -> str:
    kind, separator, place = value.partition("://")
    if value == P2P or (separator and place and kind in METADATA_KINDS):
        return value
    raise _RefusedError(
        "names no metadata server",
        f"Write {P2P}, or one of: {', '.join(f'{each}://HOST:PORT' for each in METADATA_KINDS)}.",
    )


def _device_name(value: str) -> str:
    if value and not all(re.fullmatch(r"[\w.:-]+", each, re.ASCII) for each in value.split(",")):
        raise _RefusedError("must be names of cards, separated by commas", "As in: mlx5_0,mlx5_1.")
    return value


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


class _RefusedError(ValueError):
    """A value that is not allowed; pydantic hands it through to ``_config_error``."""

    def __init__(self, message: str, advice: str = "", *, key: str = "") -> None:
        super().__init__(message)
        self.advice = advice
        self.key = key
        """Of a rule between fields: the one to blame."""


class _As(NamedTuple):
    """Metadata of a type: what ``--help`` calls its values."""

    metavar: str
    many: bool = False
    """Whether the flag may be given several times."""


Bytes = Annotated[int, _As("SIZE"), BeforeValidator(_size), AfterValidator(_memory)]
Milliseconds = Annotated[int, _As("MS"), BeforeValidator(_number)]
Share = Annotated[float, _As("SHARE")]
Text = Annotated[str, _As("TEXT")]
Microseconds = Annotated[int, _As("US"), BeforeValidator(_number)]
Count = Annotated[int, _As("N"), BeforeValidator(_number)]
Port = Annotated[int, _As("PORT"), BeforeValidator(_number), Field(ge=0, le=65535)]
Host = Annotated[str, _As("HOST"), Field(min_length=1)]
Master = Annotated[str, _As("HOST:PORT,..."), AfterValidator(_master)]
OptionalMaster = Annotated[str, _As("HOST:PORT,..."), AfterValidator(_optional_master)]
Etcd = Annotated[str, _As("HOST:PORT,..."), AfterValidator(_etcd)]
Addresses = Annotated[tuple[str, ...], _As("HOST:PORT,...", many=True), BeforeValidator(_addresses)]
Limit = Annotated[int, _As("SIZE"), BeforeValidator(_size)]
Advertise = Annotated[str, _As("HOST[:PORT]"), AfterValidator(_advertise)]
Name = Annotated[str, _As("NAME"), AfterValidator(_name)]
NamespaceName = Annotated[str, _As("NAME"), AfterValidator(_namespace)]
Transports = Annotated[
    tuple[str, ...], _As("NAME,..."), BeforeValidator(_words), AfterValidator(_transports)
]
LogLevel = Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(_lower)]
Verify = Annotated[Literal["header", "payload", "all"], BeforeValidator(_lower)]
HugePages = Annotated[Literal["auto", "off", "transparent", "reserved"], BeforeValidator(_lower)]
LockMemory = Annotated[Literal["auto", "off", "on"], BeforeValidator(_lower)]
Affinity = Annotated[Literal["none", "prefix"], BeforeValidator(_lower)]
Secret = Annotated[str, _As("TEXT")]
EngineProtocol = Annotated[Literal["", "tcp", "rdma"], _As("tcp|rdma"), BeforeValidator(_lower)]
Devices = Annotated[
    str,
    _As("NAME,..."),
    AfterValidator(_device_name),
    Field(description="The RDMA cards that the engine may use (mlx5_0,mlx5_1); empty: all."),
]
MetadataServer = Annotated[
    str,
    _As("URL"),
    AfterValidator(_metadata_server),
    Field(
        description="Where engines find each other: P2PHANDSHAKE needs no server; or "
        "etcd://HOST:PORT, http://HOST:PORT/metadata. Equal on all ends."
    ),
]
MoversProtocol = Annotated[
    EngineProtocol,
    Field(
        description="Move bytes by Mooncake's transfer engine (pip install kvstore[mooncake]) "
        "where the node has it, too, over this protocol; empty: without it."
    ),
]
EngineBuffer = Annotated[
    Bytes,
    Field(
        ge=MEMORY_BYTES_MIN,
        description="Memory registered with the transfer engine, through which bytes pass that "
        "are not registered themselves: enough for a few transfers at once.",
    ),
]


# --- the kinds ---------------------------------------------------------------------------------


class Config(BaseModel):
    """What all have in common: frozen, keyword-only, checked when built.

    Raises (all of them, when built):
        ConfigError: an unknown name, or a value out of its range; ``fields["key"]`` names it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    section: ClassVar[str]

    def __init__(self, /, **values: object) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise _config_error(type(self), error) from None


class MasterConfig(Config):
    """A ``kvstore-master``."""

    section = "master"

    host: Host = Field(
        default="127.0.0.1",
        description="Address to listen on. Loopback until you say otherwise, because whoever "
        "reaches the master can read and write the cache; 0.0.0.0 is every interface.",
    )
    port: Port = Field(
        default=DEFAULT_PORT, description="TCP port of the gRPC service; 0 takes any."
    )
    lane_port: Port = Field(
        default=0,
        description="TCP port of the lane, the fast carrier of the hot calls; 0 takes the port "
        "after --port, or any when that is 0.",
    )
    memory: Bytes = Field(
        default=0,
        description="Memory that this process also pools (2GiB), so that one command is a whole "
        "store; 0 leaves that to nodes.",
    )
    lease_ms: Milliseconds = Field(
        default=10_000,
        ge=1_000,
        le=600_000,
        description="How long found objects keep their bytes, 1 s to 10 min. Long enough to read "
        "gigabytes, short enough that a full pool makes room in seconds.",
    )
    put_deadline_ms: Milliseconds = Field(
        default=30_000,
        ge=1_000,
        le=600_000,
        description="How long a writer has between put_start and put_end, 1 s to 10 min: a batch "
        "of gigabytes over a slow network; memory of a writer that died is lost so long.",
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
        description="Puts that may wait for room at once; the next one is told at once that "
        "there is none. Each waits with its whole batch in memory.",
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
        description="After a restart: what would be a miss waits up to so long for nodes to tell "
        "what they hold; 4 GiB in 100,000 objects take about two seconds. 0: it is a miss at once.",
    )
    put_wait_max_ms: Milliseconds = Field(
        default=30_000,
        ge=0,
        le=600_000,
        description="The longest that a put may ask to wait for room: three default leases.",
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
        description="Connections on the lane at once: below the usual limit of descriptors.",
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
    etcd_ca: Text = Field(
        default="",
        description="File with the certificates (PEM) that etcd's own is checked against; empty: "
        "no TLS.",
    )
    etcd_cert: Text = Field(
        default="", description="File with our certificate (PEM), where etcd asks for one."
    )
    etcd_key: Text = Field(default="", description="File with its key (PEM).")
    etcd_user: Text = Field(default="", description="Whom to log in to etcd as; empty: nobody.")
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
        description="Where this master says that it is when it leads, if that differs from --host "
        "and --port; empty: those. Clients and nodes must reach it there.",
    )
    log_level: LogLevel = Field(default="info", description="The least serious messages to log.")

    @property
    def lane_port_wanted(self) -> int:
        """The port that the lane is to listen on; 0 takes any."""
        return self.lane_port or (self.port + 1 if self.port else 0)

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
            raise _RefusedError(error.message, error.advice, key="etcd") from error
        _at_least(self, "suspect_ms", 2 * self.beat_ms, "2 * beat_ms", "one late beat is no sign")
        _at_least(self, "dead_ms", self.suspect_ms + 1, "suspect_ms + 1", "suspect comes first")
        _at_least(
            self,
            "quarantine_ms",
            self.dead_ms,
            "dead_ms",
            "bytes on their way to a stopped node land before it counts as dead, "
            "and must not land in memory that has been given to someone else",
        )
        if self.port and self.lane_port == self.port:
            raise _RefusedError(
                f"is {self.port}, which is port, too", "Give the lane its own.", key="lane_port"
            )
        if self.port == 65_535 and not self.lane_port:
            raise _RefusedError("must be given, there is no port after 65535", key="lane_port")
        return self


class NodeConfig(Config):
    """A ``kvstore-node``."""

    section = "node"

    master: Master = Field(
        default=f"127.0.0.1:{DEFAULT_PORT}",
        description=MASTER_HELP,
    )
    name: Name = Field(
        default="",
        description="The node's name, unique in the cluster; empty takes the host's name, and "
        "-2, -3, ... after it where that is taken.",
    )
    host: Host = Field(
        default="127.0.0.1",
        description="Address to serve the memory on. Loopback until you say otherwise; set it "
        "(or --advertise) to an address that clients on other hosts can reach.",
    )
    port: Port = Field(default=0, description="TCP port to serve the memory on; 0 takes any.")
    advertise: Advertise = Field(
        default="",
        description="What clients are told to connect to, where that differs from --host and "
        "--port (behind NAT, or with --host 0.0.0.0); empty: those.",
    )
    memory: Annotated[Bytes, Field(ge=MEMORY_BYTES_MIN)] = Field(
        default=1 << 30,
        description="Memory to pool, in /dev/shm, taken at start: small enough for a laptop, "
        "set it to what the host can spare.",
    )
    huge_pages: HugePages = Field(
        default="auto",
        description="auto: huge pages where /dev/shm gives them (mount option huge=advise), which "
        "makes starting and first reads many times faster; transparent: those, or do not start; "
        "reserved: those of a hugetlbfs (sysctl vm.nr_hugepages), or do not start; off: none.",
    )
    numa_node: Annotated[Count, Field(ge=-1, le=1_023)] = Field(
        default=-1,
        description="Take the memory from this NUMA node and serve it by its processors; -1: as "
        "the kernel likes. One kvstore-node per NUMA node uses all of a host.",
    )
    lock_memory: LockMemory = Field(
        default="auto",
        description="Keep the memory from being swapped out. auto: where the limit of locked "
        "memory (ulimit -l) allows it; on: do not start where it does not; off: never.",
    )
    keep: bool = Field(
        default=False,
        description="Leave the memory in /dev/shm at a clean stop, for the next start of this node "
        "(upgrades). What was killed leaves it anyway.",
    )
    discard: bool = Field(
        default=False,
        description="Throw away the memory that an earlier start of this node has left, instead of "
        "serving what it holds.",
    )
    connections_max: Count = Field(
        default=256,
        ge=1,
        le=65_536,
        description="Data connections at once: 64 clients with 4 streams each; more are refused.",
    )
    protocol: EngineProtocol = Field(
        default="",
        description="Also serve the memory by Mooncake's transfer engine (pip install "
        "kvstore[mooncake]), over this protocol; empty: without it.",
    )
    device_name: Devices = ""
    metadata_server: MetadataServer = P2P
    log_level: LogLevel = Field(default="info", description="The least serious messages to log.")


class ClientConfig(Config):
    """A ``Client``, and with it every command of ``kvstore``."""

    section = "client"

    master: Master = Field(
        default=f"127.0.0.1:{DEFAULT_PORT}",
        description=MASTER_HELP,
    )
    timeout_ms: Milliseconds = Field(
        default=10_000,
        ge=1,
        le=3_600_000,
        description="The longest that one call may take, retries included: a cache that is "
        "slower than this is better missed.",
    )
    transports: Transports = Field(
        default=TRANSPORTS_KNOWN,
        description="Ways to move bytes, the best first; the first that reaches a segment is "
        "taken. shm works on the node's own host only.",
    )
    namespace: NamespaceName = Field(
        default="default", description="Whom to share with, where a call does not say."
    )
    replicas: Count = Field(
        default=1,
        ge=1,
        le=REPLICAS_MAX,
        description=f"Copies on distinct nodes, 1 to {REPLICAS_MAX}: what is lost can be computed "
        "again, so one.",
    )
    put_wait_ms: Milliseconds = Field(
        default=1_000,
        ge=0,
        le=600_000,
        description="How long a put waits for room when everything is leased; less than "
        "--timeout-ms. 0 gives up at once.",
    )
    verify: Verify = Field(
        default="payload",
        description="What a get checks before it returns: the header alone; or the payload's "
        "checksum, too, which is computed while copying; or (all) also that of views, which are "
        "read once for it.",
    )
    lease_margin_ms: Milliseconds = Field(
        default=200,
        ge=0,
        le=500,
        description="How much earlier than promised a lease counts as over, for clocks that run "
        "at different speeds; at most half of the shortest lease.",
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
    spin_us: Microseconds = Field(
        default=300,
        ge=0,
        le=10_000,
        description="How long a hot call polls for its answer before it sleeps: most come within "
        "that, and waking up takes as long again.",
    )
    name: Name = Field(
        default="",
        description="What the master's log calls this client; empty: host name and process id.",
    )
    memory: Bytes = Field(
        default=0, description="Memory that this process also pools (2GiB); 0 contributes none."
    )
    protocol: MoversProtocol = ""
    device_name: Devices = ""
    metadata_server: MetadataServer = P2P
    engine_buffer: EngineBuffer = 64 << 20

    @model_validator(mode="after")
    def _rules(self) -> ClientConfig:
        if self.put_wait_ms >= self.timeout_ms and "put_wait_ms" in self.model_fields_set:
            raise _RefusedError(
                f"is {self.put_wait_ms}, and must be less than timeout_ms ({self.timeout_ms})",
                "Otherwise the put times out before it is told how much room is missing.",
                key="put_wait_ms",
            )
        if self.transports == ("mooncake",) and not self.protocol:
            raise _RefusedError(
                "must be given when mooncake is the only transport", "Say tcp or rdma.",
                key="protocol",
            )  # fmt: skip
        return self


class ConnectorConfig(Config):
    """The connector of an inference engine (``kv_connector_extra_config`` of vLLM)."""

    section = "connector"

    master: Master = Field(
        default=f"127.0.0.1:{DEFAULT_PORT}",
        description="Where the master is, as of a client.",
    )
    memory: Bytes = Field(
        default=0,
        description="Memory that each worker pools (4GiB), served by a child process; 0: none.",
    )
    transports: Transports = Field(
        default=TRANSPORTS_KNOWN, description="Ways to move bytes, the best first."
    )
    protocol: MoversProtocol = ""
    device_name: Devices = ""
    metadata_server: MetadataServer = P2P
    engine_buffer: EngineBuffer = 64 << 20
    verify: Verify = Field(
        default="payload", description="What is checked of loaded blocks, as of a client."
    )
    replicas: Count = Field(
        default=1, ge=1, le=REPLICAS_MAX, description="Copies of saved blocks, on distinct nodes."
    )
    save_decode: bool = Field(
        default=False,
        description="Store the blocks of generated tokens, too: the next turn of a conversation "
        "finds them, on whichever engine it lands.",
    )
    model_id: Text = Field(
        default="",
        description="What the weights are called; empty: name and revision, or, of a local "
        "directory, its files. Engines share blocks only when it is equal.",
    )
    lookup_deadline_ms: Milliseconds = Field(
        default=20,
        ge=1,
        le=10_000,
        description="How long a request waits to learn what the store has, before that counts as "
        "nothing. Other requests go on meanwhile.",
    )
    writers_wait_ms: Milliseconds = Field(
        default=500,
        ge=0,
        le=60_000,
        description="How long a request waits for blocks that another engine is writing at this "
        "moment, instead of computing them again.",
    )
    transfer_timeout_ms: Milliseconds = Field(
        default=5_000,
        ge=10,
        le=600_000,
        description="The longest that loading the blocks of one request, or saving those of one "
        "step, may take.",
    )
    pin_timeout_ms: Milliseconds = Field(
        default=60_000,
        ge=100,
        le=3_600_000,
        description="How long a block may wait to be saved, and be kept from other use for it; "
        "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT (seconds) sets it, too.",
    )
    pinned_max: Share = Field(
        default=0.5,
        ge=0.0,
        le=1.0,
        description="Share of the engine's blocks that may be waiting to be saved; beyond, "
        "blocks are not saved.",
    )


class ProxyConfig(Config):
    """A ``kvstore-proxy``."""

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
        "asks nobody who he is; 0.0.0.0 is every interface.",
    )
    port: Port = Field(default=8_000, description="TCP port to listen on; 0 takes any.")
    master: OptionalMaster = Field(
        default="",
        description="The store's master, to ask whether it holds a prompt already; empty asks "
        f"nobody, and every long prompt goes to a prefiller. Port {DEFAULT_PORT} when only a host "
        "is given.",
    )
    prefill_threshold: Count = Field(
        default=256,
        ge=0,
        le=16_777_216,
        description="Tokens below which a prompt, or what the store lacks of it, is left to the "
        "decoder: so few ride along in a decoding step, which waits for weights and not for "
        "arithmetic, and cost it less than the way over a prefiller and the store.",
    )
    affinity: Affinity = Field(
        default="none",
        description="none: the engine with the fewest requests; prefix: rather the one that "
        "lately had the longest beginning of this prompt.",
    )
    affinity_slack: Count = Field(
        default=4,
        ge=0,
        le=65_536,
        description="How many more requests than the least busy engine the one preferred by "
        "--affinity may have: a few wait shorter than a prefix takes to load.",
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
        description="Requests at once; the next one is told to come back (503, Retry-After): "
        "what some decoders run together, each with its body in memory.",
    )
    body_max: Annotated[Limit, Field(ge=1_024, le=1 << 30)] = Field(
        default=32 << 20,
        description="The largest request body: a million token ids are 8 MiB; images take more.",
    )
    connect_timeout_ms: Milliseconds = Field(
        default=2_000,
        ge=1,
        le=600_000,
        description="How long a connection to an engine may take: two lost SYNs.",
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
        description="How long a decoder may take until its first byte, which without streaming "
        "is the whole answer: what OpenAI's own clients wait.",
    )
    idle_timeout_ms: Milliseconds = Field(
        default=120_000,
        ge=1,
        le=86_400_000,
        description="The longest silence within a body or an answer, of either side.",
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
        description="How often each engine is asked whether it is well.",
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
        description="Failed requests in a row after which an engine gets none for a while, "
        "although it says that it is well.",
    )
    breaker_open_ms: Milliseconds = Field(
        default=5_000,
        ge=1,
        le=3_600_000,
        description="How long that is; then one request tries whether it works again.",
    )
    grace_ms: Milliseconds = Field(
        default=30_000,
        ge=0,
        le=3_600_000,
        description="What requests under way get to end when the proxy is asked to stop: what "
        "Kubernetes waits before it kills.",
    )
    admin_token: Secret = Field(
        default="",
        description="Lets others than this host change the instances, by 'Authorization: Bearer "
        "TEXT'. Better given as a variable: flags can be read by every user of the host.",
    )
    log_level: LogLevel = Field(default="info", description="The least serious messages to log.")


KINDS: tuple[type[Config], ...] = (
    MasterConfig,
    NodeConfig,
    ClientConfig,
    ConnectorConfig,
    ProxyConfig,
)

ConfigT = TypeVar("ConfigT", bound=Config)


def _at_least(config: Config, key: str, least: int, meaning: str, reason: str) -> None:
    value = getattr(config, key)
    if value < least:
        raise _RefusedError(
            f"is {value}, and must be at least {meaning} ({least})",
            f"The reason: {reason}.",
            key=key,
        )


# --- reading -----------------------------------------------------------------------------------


class Setting(NamedTuple):
    """One field, as the command line, the environment and the documentation need it."""

    key: str
    flag: str
    variables: tuple[str, ...]
    metavar: str
    """Empty for a switch."""
    default: str
    help: str
    many: bool = False
    """Whether the flag may be given several times."""


def settings(kind: type[Config]) -> list[Setting]:
    """The settings of a kind, in the order of their definition."""
    found = []
    for key, field in kind.model_fields.items():
        shown = next((item for item in field.metadata if isinstance(item, _As)), _As(""))
        metavar = shown.metavar
        if not metavar and field.annotation is not bool:
            metavar = "|".join(getattr(field.annotation, "__args__", ()))
        found.append(
            Setting(
                key=key,
                flag="--" + key.replace("_", "-"),
                variables=_variables(kind, key),
                metavar=metavar,
                default=_default_text(field.default, metavar),
                help=field.description or "",
                many=shown.many,
            )
        )
    return found


def load(
    kind: type[ConfigT],
    arguments: Mapping[str, object] | None = None,
    *,
    config_path: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] | None = None,
    origin: str = "argument {key}",
) -> ConfigT:
    """The configuration of one process, from all its sources.

    Args:
        arguments: values given by flags or by a program; ``None`` values count as not given.
        config_path: the TOML file; an empty string: none; ``None``: ``KVSTORE_CONFIG`` or one
            of the default places.
        environ: instead of ``os.environ``.
        origin: how errors call the source of ``arguments``; ``{key}`` and ``{flag}`` stand for
            the field.

    Raises:
        ConfigError: an unknown name, an unreadable file, a value out of its range. Its fields:
            ``key``, ``origin`` and, where one is near, ``nearest``.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, object] = {}
    origins: dict[str, str] = {}

    for key, value, where in _from_file(kind, config_path, environ):
        values[key], origins[key] = value, where
    for key, value, where in _from_environment(kind, environ):
        values[key], origins[key] = value, where
    for key, value in (arguments or {}).items():
        if value is not None:
            values[key] = value
            origins[key] = origin.format(key=key, flag="--" + key.replace("_", "-"))
    try:
        return kind(**values)
    except ConfigError as error:
        where = origins.get(str(error.fields.get("key", "")), "default")
        fields = {**error.fields, "origin": where}
        raise ConfigError(
            f"{error.message} (from {where})", advice=error.advice, **fields
        ) from None


def _from_environment(
    kind: type[Config], environ: Mapping[str, str]
) -> Iterable[tuple[str, object, str]]:
    known = {
        variable: (other, key)
        for other in KINDS
        for key in other.model_fields
        for variable in _variables(other, key)
    }
    for variable, value in environ.items():
        if not variable.startswith(PREFIX) or variable in (CONFIG_VARIABLE, NATIVE_VARIABLE):
            continue
        if _SERVICE_VARIABLE.fullmatch(variable) or _SERVICE_VALUE.match(value):
            continue
        if variable not in known and variable != MASTER_VARIABLE:
            raise _unknown(variable, "the environment", [*known, CONFIG_VARIABLE])
    for key in kind.model_fields:
        for variable in _variables(kind, key):
            if variable in environ and not _SERVICE_VALUE.match(environ[variable]):
                yield key, environ[variable], variable
                break


def _variables(kind: type[Config], key: str) -> tuple[str, ...]:
    """The environment variables of a field, the one that wins first."""
    own = f"{PREFIX}{kind.section.upper()}_{key.upper()}"
    return (own, MASTER_VARIABLE) if key == "master" else (own,)


def _from_file(
    kind: type[Config],
    config_path: str | os.PathLike[str] | None,
    environ: Mapping[str, str],
) -> Iterable[tuple[str, object, str]]:
    path = _file_to_read(config_path, environ)
    if path is None:
        return
    sections = _read_toml(path)
    for name, section in sections.items():
        other = next((other for other in KINDS if other.section == name), None)
        if other is None:
            raise _unknown(f"[{name}]", str(path), [f"[{other.section}]" for other in KINDS])
        if not isinstance(section, dict):
            raise ConfigError(
                f"{name} in {path} is a value, not a section",
                advice=f"Sections are written [{name}], the settings on the lines below.",
                key=name,
                origin=str(path),
            )
        for key in section:  # also of the sections for others: the file is one
            if key not in other.model_fields:
                raise _unknown(key, f"{path} [{name}]", list(other.model_fields))
        if other is kind:
            for key, value in section.items():
                yield key, value, f"{path} [{name}] {key}"


def _file_to_read(
    config_path: str | os.PathLike[str] | None, environ: Mapping[str, str]
) -> Path | None:
    named = environ.get(CONFIG_VARIABLE) if config_path is None else os.fspath(config_path)
    if named is not None:
        return Path(named).expanduser() if named else None
    places = [Path("kvstore.toml")]
    home = environ.get("XDG_CONFIG_HOME") or (
        environ.get("HOME", "") and environ["HOME"] + "/.config"
    )
    if home:
        places.append(Path(home) / "kvstore" / "kvstore.toml")
    return next((place for place in places if os.path.lexists(place)), None)


def _read_toml(path: Path) -> dict[str, object]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        reason = error.strerror or str(error)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        reason = f"not valid TOML: {error}"
    raise ConfigError(
        f"cannot read the configuration {path}: {reason}",
        advice="Name another with --config, or none with --config ''.",
        key=str(path),
        origin=str(path),
    )


def _config_error(kind: type[Config], error: ValidationError) -> ConfigError:
    """The first of pydantic's complaints, in our words."""
    first = error.errors(include_url=False)[0]
    key = str(first["loc"][0]) if first["loc"] else ""
    context = first.get("ctx", {})
    advice = ""
    match first["type"]:
        case "extra_forbidden":
            return _unknown(key, "", list(kind.model_fields))
        case "value_error" if isinstance(context["error"], _RefusedError):
            refused = context["error"]
            key, what, advice = refused.key or key, str(refused), refused.advice
        case "greater_than_equal":
            what = f"must be at least {context['ge']}"
        case "less_than_equal":
            what = f"must be at most {context['le']}"
        case "string_too_short":
            what = "must not be empty"
        case "literal_error":
            what = f"must be {context['expected']}"
        case "int_parsing" | "int_from_float" | "int_type":
            what = "must be a whole number"
        case "bool_parsing" | "bool_type":
            what = "must be true or false"
        case "string_type":
            what = "must be text"
        case _:
            what = str(first["msg"])
    given = "" if not first["loc"] else f" = {first['input']!r}"
    return ConfigError(
        f"{key}{given}: {what}" if given else f"{key} {what}", advice=advice, key=key
    )


def _unknown(key: str, origin: str, known: list[str]) -> ConfigError:
    import difflib  # only for the message: 5 ms that no correct start should pay

    fields: dict[str, str] = {"key": key} | ({"origin": origin} if origin else {})
    near = difflib.get_close_matches(key, known, n=1)
    if near:
        fields["nearest"] = near[0]
    return ConfigError(
        f"there is no setting {key}" + (f" ({origin})" if origin else ""),
        advice=f"Did you mean {near[0]}?" if near else f"There are: {', '.join(known)}.",
        **fields,
    )


def _default_text(default: object, metavar: str) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    if metavar == "SIZE" and isinstance(default, int):
        return format_size(default)
    return ",".join(default) if isinstance(default, tuple) else str(default)
