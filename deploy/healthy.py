"""The health check of a container: exits with 0 if the master, node or proxy in it is healthy.

It finds that process, reads the settings that it was started with, and asks ``/healthz`` of its own
port, over TLS if the process serves that. So it needs no certificate, whatever the settings are.
"""

from __future__ import annotations

import http.client
import ssl
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import click

from kvstore.cli import master, node, proxy
from kvstore.config import MasterConfig, NodeConfig, ProxyConfig, load

TIMEOUT_S: Final = 2.0

Kind = type[MasterConfig] | type[NodeConfig] | type[ProxyConfig]

PROGRAMS: Final[dict[str, tuple[click.Command, Kind]]] = {
    "kvstore-master": (master.command, MasterConfig),
    "kvstore-node": (node.command, NodeConfig),
    "kvstore-proxy": (proxy.command, ProxyConfig),
}
MODULES: Final = {f"kvstore.cli.{name.removeprefix('kvstore-')}": name for name in PROGRAMS}

EVERYWHERE: Final = ("0.0.0.0", "::", "")
"""Hosts of a process that listens on all addresses, also on loopback."""


class Place(NamedTuple):
    host: str
    port: int
    has_tls: bool


def main() -> int | str:
    """For ``sys.exit``."""
    words = next(servers(), None)
    if words is None:
        return "no master, node or proxy runs here"
    where = place(words)
    return 0 if where is None or is_healthy(where) else f"{words[0]}: no 200 from {where}"


def servers() -> Iterator[list[str]]:
    """The commands of the servers in this container, the oldest first, without their children."""
    numbers = sorted(int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit())
    for number in numbers:
        try:
            raw = Path(f"/proc/{number}/cmdline").read_bytes()
        except OSError:
            continue
        words = server_in([each.decode(errors="replace") for each in raw.split(b"\0")[:-1]])
        if words and not any(each.startswith("--parent-fd") for each in words):
            yield words


def server_in(command: list[str]) -> list[str]:
    """The server that a command line starts, and its arguments; empty: it starts none."""
    for at, word in enumerate(command[:4]):
        name = MODULES.get(word) if at and command[at - 1] == "-m" else Path(word).name
        if name in PROGRAMS:
            return [name, *command[at + 1 :]]
    return []


def place(words: list[str]) -> Place | None:
    """Where this server answers; None: it was told to serve no HTTP.

    Raises:
        click.ClickException, ConfigError: the server cannot have started with these words.
    """
    command, kind = PROGRAMS[words[0]]
    given = dict(command.make_context(words[0], words[1:]).params)
    path = given.pop("config_path")
    known = {name: value for name, value in given.items() if name in kind.model_fields}
    config: MasterConfig | NodeConfig | ProxyConfig = load(kind, known, config_path=path)
    host = config.host if config.host not in EVERYWHERE else "127.0.0.1"
    if isinstance(config, ProxyConfig):
        return Place(host, config.port, has_tls=False)
    if not config.http_port:
        return None
    return Place(host, config.http_port, has_tls=bool(config.auth or config.http_cert))


def is_healthy(where: Place) -> bool:
    """Asks this container itself, whatever web proxy its environment names."""
    if where.has_tls:
        # It asks itself, and says nothing that is secret.
        unverified = ssl.create_default_context()
        unverified.check_hostname = False
        unverified.verify_mode = ssl.CERT_NONE
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            where.host, where.port, timeout=TIMEOUT_S, context=unverified
        )
    else:
        connection = http.client.HTTPConnection(where.host, where.port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):  # refused, too late, or no HTTP
        return False
    finally:
        connection.close()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except click.ClickException as error:
        sys.exit(error.format_message())
