"""Translation of flags of the proxies in the guides of vLLM and Mooncake to ``kvstore-proxy``.

Supports the flags of ``toy_proxy_server.py`` (vLLM; ``vllm_v1_proxy_server.py`` of Mooncake has the
same), ``disagg_proxy_demo.py`` (vLLM) and ``mooncake_connector_proxy.py`` (vLLM).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Final

import click

EXAMPLE: Final = (
    "kvstore-proxy --prefiller-hosts 10.0.0.1 10.0.0.2 --prefiller-ports 8100 8100 "
    "--decoder-host 10.0.0.3 --decoder-port 8200"
)

ROWS: Final = (
    ("--prefiller-host, --prefiller-hosts HOST...", "With the ports, the prefillers; localhost."),
    ("--prefiller-port, --prefiller-ports PORT...", "One for each host; 8100."),
    ("--decoder-host, --decoder-hosts HOST...", "With the ports, the decoders; localhost."),
    ("--decoder-port, --decoder-ports PORT...", "One for each host; 8200."),
    ("-p, --prefill HOST:PORT... | URL [PORT]", "The port of a bootstrap server is not needed."),
    ("-d, --decode HOST:PORT... | URL...", "As --prefill."),
)
"""Lines of ``--help``."""

IGNORED: Final = {
    "--model": "each engine says which models it serves",
    "--scheduling": "the engine with the fewest requests is next, of equals in turn",
    "--roundrobin": "the engine with the fewest requests is next, of equals in turn",
    "--generator_on_p_node": "the decoder answers",
}
"""Reasons why a flag has no effect, by flag."""

_SCHEME: Final = "http://"
_SWITCHES: Final = ("--roundrobin", "--generator_on_p_node")
_PORTS: Final = {"prefiller": "8100", "decoder": "8200"}
"""Default ports of the toy proxy."""


def translate_arguments(arguments: Sequence[str]) -> list[str]:
    """Translate the command line to flags of ``kvstore-proxy``; other arguments are unchanged.
    Prints one line on stderr for each ignored flag.

    Raises:
        click.UsageError: a flag without a value; different numbers of hosts and ports.
    """
    try:
        given, others = _parser().parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise click.UsageError(str(error)) from None
    for flag, reason in IGNORED.items():
        if getattr(given, flag.strip("-")):
            click.echo(f"kvstore-proxy: {flag} has no effect: {reason}", err=True)
    prefill, decode = _named(given.prefill), _named(given.decode)
    if any(
        (given.prefiller_hosts, given.prefiller_ports, given.decoder_hosts, given.decoder_ports)
    ):
        prefill = prefill or _paired(given, "prefiller")
        decode = decode or _paired(given, "decoder")
    return [
        *others,
        *(word for url in prefill for word in ("--prefill", url)),
        *(word for url in decode for word in ("--decode", url)),
    ]


def format_flags(formatter: click.HelpFormatter) -> None:
    """Write the flags and an example as a group of ``--help``."""
    with formatter.section("Flags of the proxies in guides of vLLM and Mooncake"):
        formatter.write_dl([*ROWS, (", ".join(IGNORED), "Ignored.")])
        formatter.write_paragraph()
        formatter.write_text(f"Example: {EXAMPLE}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--prefill", "-p", nargs="+", action="append")
    parser.add_argument("--decode", "-d", nargs="+", action="append")
    for role in _PORTS:
        parser.add_argument(f"--{role}-hosts", f"--{role}-host", nargs="+")
        parser.add_argument(f"--{role}-ports", f"--{role}-port", nargs="+")
    for flag in IGNORED:
        if flag in _SWITCHES:
            parser.add_argument(flag, action="store_true")
        else:
            parser.add_argument(flag, *(["-m"] if flag == "--model" else []))
    return parser


def _named(given: list[list[str]] | None) -> list[str]:
    """Return the engines of ``--prefill`` or ``--decode``. A number, or ``none``, is the bootstrap
    port of the preceding engine."""
    words = [word for several in given or [] for url in several for word in url.split(",")]
    return [_address(word) for word in words if not word.isdigit() and word.lower() != "none"]


def _address(word: str) -> str:
    """Return ``HOST:PORT`` of a URL, whose default port is 80. Other words are unchanged."""
    if not word.startswith(_SCHEME):
        return word
    place = word.removeprefix(_SCHEME).rstrip("/")
    return place if place.rpartition(":")[2].isdigit() else f"{place}:80"


def _paired(given: argparse.Namespace, role: str) -> list[str]:
    hosts = getattr(given, f"{role}_hosts") or ["localhost"]
    ports = getattr(given, f"{role}_ports") or [_PORTS[role]]
    if len(hosts) != len(ports):
        raise click.UsageError(
            f"--{role}-hosts has {len(hosts)} values and --{role}-ports {len(ports)}: name a port "
            "for each host"
        )
    return [_joined(host, port) for host, port in zip(hosts, ports)]


def _joined(host: str, port: str) -> str:
    is_ipv6 = ":" in host and not host.startswith("[")
    return f"[{host}]:{port}" if is_ipv6 else f"{host}:{port}"
