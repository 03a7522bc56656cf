"""The types of settings, and their parsers: sizes, addresses, names."""

from __future__ import annotations

import re
from collections.abc import Callable
from ipaddress import ip_address
from typing import Annotated, Literal, NamedTuple, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field

from kvstore.errors import InvalidArgumentError
from kvstore.limits import check_namespace, check_tenant
from kvstore.runtime.addresses import ETCD_SCHEME, join_address, parse_etcd, split_address

DEFAULT_PORT = 50001
"""A master's port, the same as Mooncake's, which users' firewalls already allow."""

DATA_PORT = 50003
"""A node's data port, after the two of a master."""

HTTP_PORT = 50080
"""A master's port for HTTP."""

NODE_HTTP_PORT = 50100
"""A node's port for HTTP."""

DATA_PORTS = 16
"""Ports that a node tries, from ``DATA_PORT`` on: one per NUMA node or GPU."""

P2P = "P2PHANDSHAKE"
METADATA_KINDS = ("etcd", "http", "https", "redis")

MEMORY_BYTES_MIN = 1 << 20
MEMORY_BYTES_MAX = 1 << 46

TRANSPORTS = ("shm", "tcp")
"""The transports that are always available."""

TRANSPORTS_KNOWN = ("shm", "mooncake", "tcp")
"""All transports, in order of preference. ``mooncake`` requires a protocol at both ends."""

_UNITS: dict[str, int] = {"": 1, "b": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgt", start=1)
    for suffix, base in (("ib", 1024), ("i", 1024), ("b", 1000))
}


def parse_size(value: int | str) -> int:
    """Parse a size in bytes: ``4096``, ``"2GiB"``, ``"512 MiB"``, ``"1.5GiB"``, ``"2GB"``
    (decimal).

    Raises:
        InvalidArgumentError: not a size, or one with an ambiguous unit (``2G``).
    """
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 0:
            raise InvalidArgumentError(f"a size must not be negative, this one is {value}")
        return value
    found = re.fullmatch(r"(\d+)(?:\.(\d{1,3}))?\s*([a-z]*)", str(value).strip().lower(), re.ASCII)
    whole, fraction, unit = found.groups(default="") if found else ("", "", "")
    if found and unit in ("k", "m", "g", "t"):
        number, letter = str(value).strip()[: -len(unit)].strip(), unit.upper()
        raise InvalidArgumentError(
            f"the unit of {value!r} may be binary or decimal",
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
    """Return the inverse of ``parse_size``, in the largest binary unit that divides it: ``2GiB``,
    ``4097``."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        factor = _UNITS[unit.lower()]
        if size and size % factor == 0:
            return f"{size // factor}{unit}"
    return str(size)


class InvalidSettingError(ValueError):
    """An invalid value; pydantic passes it to ``config_error``."""

    def __init__(self, message: str, advice: str = "", *, key: str = "") -> None:
        super().__init__(message)
        self.advice = advice
        self.key = key
        """The field to report, for a rule about several fields."""


ValueT = TypeVar("ValueT")
ResultT = TypeVar("ResultT")


def _refusing(check: Callable[[ValueT], ResultT]) -> Callable[[ValueT], ResultT]:
    """Return a pydantic validator from a function that raises InvalidArgumentError."""

    def checked(value: ValueT) -> ResultT:
        try:
            return check(value)
        except InvalidArgumentError as error:
            raise InvalidSettingError(error.message, error.advice) from error

    return checked


@_refusing
def _size(value: object) -> object:
    return parse_size(value) if isinstance(value, int | str) else value


def _number(value: object) -> object:
    if isinstance(value, bool):
        raise InvalidSettingError("is true or false, not a number")
    return value


def _memory(value: int) -> int:
    if value and not MEMORY_BYTES_MIN <= value <= MEMORY_BYTES_MAX:
        bounds = f"{format_size(MEMORY_BYTES_MIN)} to {format_size(MEMORY_BYTES_MAX)}"
        raise InvalidSettingError(f"must be 0 or {bounds}")
    return value


def _place(text: str, default_port: int | None = None) -> str:
    host, port = split_address(text, default_port=default_port)
    if not port:
        raise InvalidSettingError("must name a port: no client can connect to port 0")
    return join_address(host, port)


@_refusing
def _master(value: str) -> str:
    if value.strip().startswith(ETCD_SCHEME):
        return str(parse_etcd(value))
    return ",".join(_place(place, DEFAULT_PORT) for place in value.split(","))


@_refusing
def _etcd(value: str) -> str:
    """Parse members of an etcd or a complete ``etcd://`` location; return the latter."""
    return str(parse_etcd(value)) if value.strip() else ""


def _optional_master(value: str) -> str:
    return _master(value) if value.strip() else ""


@_refusing
def _addresses(value: object) -> object:
    """Split addresses at commas or blanks; a repeated flag is a tuple of texts."""
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, list | tuple) or not all(isinstance(text, str) for text in value):
        return value
    found = [_place(word) for text in value for word in text.replace(",", " ").split()]
    if len(set(found)) != len(found):
        raise InvalidSettingError("must name each once")
    return tuple(found)


@_refusing
def _advertise(value: str) -> str:
    value = value.strip()
    if _is_ipv6(value):  # as Kubernetes writes a pod's address
        return f"[{value}]"
    if value:
        split_address(value, default_port=0)
    return value


def _host(value: str) -> str:
    """Return a host without a port. Removes the optional brackets of an IPv6 address."""
    value = value.strip()
    bare = value[1:-1] if value.startswith("[") and value.endswith("]") else value
    if ":" in bare and not _is_ipv6(bare):
        raise InvalidSettingError(
            f"{value!r} is not a host", "Write an address or a name; --port has the port."
        )
    return bare


def _is_ipv6(text: str) -> bool:
    try:
        return ip_address(text.partition("%")[0]).version == 6
    except ValueError:
        return False


def _name(value: str) -> str:
    if len(value.encode()) > 128 or not value.isprintable():
        raise InvalidSettingError("must be printable text of at most 128 bytes")
    return value


def _cluster(value: str) -> str:
    if value and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", value, re.ASCII):
        raise InvalidSettingError(
            "must be 1 to 64 letters, digits, '.', '_' and '-', a letter or digit first"
        )
    return value


def _words(value: object) -> object:
    return tuple(word.strip() for word in value.split(",")) if isinstance(value, str) else value


def _transports(value: tuple[str, ...]) -> tuple[str, ...]:
    unknown = [name for name in value if name not in TRANSPORTS_KNOWN]
    if unknown or not value or len(set(value)) != len(value):
        raise InvalidSettingError(f"must name each once, of: {', '.join(TRANSPORTS_KNOWN)}")
    return value


def _metadata_server(value: str) -> str:
    kind, separator, place = value.partition("://")
    if value == P2P or (separator and place and kind in METADATA_KINDS):
        return value
    raise InvalidSettingError(
        "names no metadata server",
        f"Write {P2P}, or one of: {', '.join(f'{kind}://HOST:PORT' for kind in METADATA_KINDS)}.",
    )


def _device_name(value: str) -> str:
    if value and not all(re.fullmatch(r"[\w.:-]+", text, re.ASCII) for text in value.split(",")):
        raise InvalidSettingError(
            "must be names of cards, separated by commas", "As in: mlx5_0,mlx5_1."
        )
    return value


def check_token(value: str) -> str:
    """Return ``value``. Raises InvalidSettingError, which does not show it."""
    if not re.fullmatch(r"[A-Za-z0-9._~+/-]{16,256}=*", value, re.ASCII):
        raise InvalidSettingError(
            "must be 16 to 256 letters, digits and signs of ._~+/-",
            "Make one: openssl rand -hex 32",
        )
    return value


def _header(value: str) -> str:
    if value and not re.fullmatch(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,128}", value, re.ASCII):
        raise InvalidSettingError("is not the name of a header", "As in: authorization, X-User.")
    return value.lower()


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


class CliType(NamedTuple):
    """Metadata of a type: the name of its values in ``--help``."""

    metavar: str
    many: bool = False
    """Whether the flag may be repeated."""
    is_secret: bool = False
    """Whether errors hide the value."""


Bytes = Annotated[int, CliType("SIZE"), BeforeValidator(_size), AfterValidator(_memory)]
Milliseconds = Annotated[int, CliType("MS"), BeforeValidator(_number)]
Share = Annotated[float, CliType("SHARE")]
Label = Annotated[str, CliType("NAME")]
File = Annotated[str, CliType("FILE")]
Count = Annotated[int, CliType("N"), BeforeValidator(_number)]
Port = Annotated[int, CliType("PORT"), BeforeValidator(_number), Field(ge=0, le=65535)]
Host = Annotated[str, CliType("HOST"), Field(min_length=1), AfterValidator(_host)]
OptionalHost = Annotated[str, CliType("HOST"), AfterValidator(_host)]
Master = Annotated[
    str,
    CliType("HOST:PORT,..."),
    AfterValidator(_master),
    Field(
        description="Address of the master; several addresses are separated by commas. Port "
        f"{DEFAULT_PORT} when only a host is given. Or its location in etcd: "
        "etcd://HOST:2379,HOST:2379/PREFIX?ca=FILE."
    ),
]
OptionalMaster = Annotated[str, CliType("HOST:PORT,..."), AfterValidator(_optional_master)]
Etcd = Annotated[str, CliType("HOST:PORT,...", is_secret=True), AfterValidator(_etcd)]
Addresses = Annotated[
    tuple[str, ...], CliType("HOST:PORT,...", many=True), BeforeValidator(_addresses)
]
Limit = Annotated[int, CliType("SIZE"), BeforeValidator(_size)]
Advertise = Annotated[str, CliType("HOST[:PORT]"), AfterValidator(_advertise)]
Name = Annotated[str, CliType("NAME"), AfterValidator(_name)]
Cluster = Annotated[
    str,
    CliType("NAME"),
    AfterValidator(_cluster),
    Field(
        description="Cluster name. Peers and memory of another cluster are rejected. If empty, "
        "the master's address identifies the cluster."
    ),
]
NamespaceName = Annotated[str, CliType("NAME"), AfterValidator(_refusing(check_namespace))]
Tenant = Annotated[
    str,
    CliType("NAME"),
    AfterValidator(_refusing(check_tenant)),
    Field(
        description="Tenant of engines: namespaces chosen by connectors begin with NAME/, and "
        "the proxy and kvstore why read the fleet records of this tenant only, so that the "
        "pattern NAME/* suffices in a tenants file and for an identity. Calls with a namespace "
        "of their own, or the default one, are not changed. Empty: no tenant."
    ),
]
Transports = Annotated[
    tuple[str, ...], CliType("NAME,..."), BeforeValidator(_words), AfterValidator(_transports)
]
LogFormat = Annotated[
    Literal["text", "json"],
    BeforeValidator(_lower),
    Field(
        description="Log format, one event per line: text, as key=value; json, as an object "
        "with these keys."
    ),
]
LogLevel = Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(_lower)]
OnOffAuto = Annotated[
    bool | None, BeforeValidator(lambda value: None if value == "auto" else value)
]
Verify = Annotated[Literal["header", "payload", "all"], BeforeValidator(_lower)]
HugePages = Annotated[Literal["auto", "off", "transparent", "reserved"], BeforeValidator(_lower)]
ShmClients = Annotated[Literal["members", "all-namespaces"], BeforeValidator(_lower)]
Group = Annotated[str, CliType("GROUP")]
Affinity = Annotated[Literal["none", "prefix"], BeforeValidator(_lower)]
HeaderName = Annotated[str, CliType("HEADER"), AfterValidator(_header)]
_Token = Annotated[str, AfterValidator(lambda value: check_token(value) if value else value)]
AdminToken = Annotated[_Token, CliType("TOKEN", is_secret=True)]
AuthFile = Annotated[
    File,
    Field(
        description="File with this process's certificate (kvstore auth issue writes it), or a "
        "folder with tls.key, tls.crt and ca.crt. With it peers are authenticated on every "
        "port, and calls are encrypted between hosts; data traffic with data_encryption. Empty: "
        "no authentication."
    ),
]
Unauthenticated = Annotated[
    bool,
    Field(
        description="With --auth, use the transfer engine anyway: any host that can connect to "
        "its ports may read and write the memory registered with it."
    ),
]


DataEncryption = Annotated[
    Literal["off", "tls"],
    BeforeValidator(_lower),
    Field(
        description="Encryption of data traffic between clients and the memory that this "
        "process pools. tls: TLS 1.3 with certificates of both ends; requires --auth. off: "
        "unencrypted."
    ),
]


def check_encryption(encryption: str, auth: str, *, protocol: str = "") -> None:
    """Raise InvalidSettingError if there is no certificate, or a path without encryption."""
    if encryption == "off":
        return
    if not auth:
        raise InvalidSettingError(
            "is tls, which requires a certificate",
            "Give --auth FILE (kvstore auth issue writes it).",
            key="data_encryption",
        )
    if protocol:
        raise InvalidSettingError(
            "cannot be combined with --protocol: the transfer engine has no encryption",
            "Remove --protocol or --data-encryption.",
            key="data_encryption",
        )


def check_engine(auth: str, protocol: str, *, unauthenticated: bool) -> None:
    """Raise InvalidSettingError if the transfer engine would serve unauthenticated peers."""
    if auth and protocol and not unauthenticated:
        raise InvalidSettingError(
            "cannot be combined with --auth: the transfer engine has no authentication",
            "Remove --protocol, or add --engine-unauthenticated on a trusted network.",
            key="protocol",
        )


HttpReads = Annotated[Literal["all", "token"], BeforeValidator(_lower)]
EngineProtocol = Annotated[Literal["", "tcp", "rdma"], CliType("tcp|rdma"), BeforeValidator(_lower)]
Devices = Annotated[
    str,
    CliType("NAME,..."),
    AfterValidator(_device_name),
    Field(description="The RDMA cards that the engine may use (mlx5_0,mlx5_1); empty: all."),
]
MetadataServer = Annotated[
    str,
    CliType("URL"),
    AfterValidator(_metadata_server),
    Field(
        description="Where engines find each other: P2PHANDSHAKE needs no server; or "
        "etcd://HOST:PORT, http://HOST:PORT/metadata. Equal on all ends."
    ),
]
