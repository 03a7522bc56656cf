"""``kvstore events``: streams object events."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from kvstore.cli.invocation import Invocation, client_command
from kvstore.cli.json_output import print_json
from kvstore.cli.options import command
from kvstore.config import HTTP_PORT, HTTP_TOKEN_VARIABLE, http_token_given, read_token
from kvstore.errors import KVStoreError
from kvstore.runtime.addresses import join_address
from kvstore.runtime.formatting import key_text, name_text, size_text

if TYPE_CHECKING:
    from kvstore.client.sse_client import StreamEvent

PAUSE_S = 1.0


@command(
    epilog="\b\nExamples:\n  kvstore events --namespace llama\n"
    "  kvstore events --snapshot --json --http 10.0.0.7:50080 --http 10.0.0.8:50080",
    help="Stream object events: objects stored and removed.",
)
@client_command(namespace="Only events of this namespace; without it, of all.")
@click.option(
    "--http",
    "at",
    multiple=True,
    metavar="HOST:PORT",
    help="HTTP of each master, or https://HOST:PORT; without: that of the one that leads.",
)
@click.option(
    "--cacert",
    default="",
    metavar="FILE",
    type=click.Path(),
    help="Use HTTPS, and check the masters' certificates against those in this file (PEM).",
)
@click.option(
    "--http-token-file",
    default="",
    metavar="FILE",
    type=click.Path(),
    help=f"File with the token of the masters' HTTP.  [{HTTP_TOKEN_VARIABLE}: the token itself]",
)
@click.option("--snapshot", is_flag=True, help="Begin with a snapshot of all objects.")
@click.option("--from", "since", default="", metavar="ID", help="Resume after this event.")
def events(
    invocation: Invocation,
    at: tuple[str, ...],
    cacert: str,
    http_token_file: str,
    snapshot: bool,
    since: str,
) -> None:
    from kvstore.client.sse_client import follow  # not for shell completion

    scheme = "https://" if cacert else ""
    places = [place if "://" in place else scheme + place for place in at] or _leaders(
        invocation, scheme
    )
    token = read_token(http_token_file) if http_token_file else http_token_given()
    said = ""

    def failed(why: str) -> None:
        nonlocal said
        if why != said and not invocation.as_json:
            click.echo(f"kvstore: {why}; trying again (--http names other ports)", err=True)
        said = why

    for event in follow(
        places, namespace=invocation.given_namespace or "", snapshot=snapshot, since=since,
        token=token, cacert=cacert, auth=invocation.config.auth, failed=failed,
    ):  # fmt: skip
        said = ""
        if invocation.as_json:
            print_json({"event": event.name, "id": event.position, **event.data})
        else:
            click.echo("\t".join(_cells(event)))
        sys.stdout.flush()


def _leaders(invocation: Invocation, scheme: str) -> Iterator[str]:
    """Yield the HTTP address of the current leader, looked up each time."""
    known = False
    with invocation.client() as client:
        while True:
            try:
                http = client.http()
            except KVStoreError:
                if not known:
                    raise
                time.sleep(PAUSE_S)
                continue
            known = True
            yield scheme + (http.address or join_address(http.host, HTTP_PORT))


def _cells(event: StreamEvent) -> list[str]:
    data = event.data
    if "key" not in data:
        return [event.name, *(str(value) for value in data.values())]
    space: str = data["namespace"]
    cells = [
        event.name,
        name_text(space),
        key_text(bytes.fromhex(data["key"])),
    ]
    if event.name == "stored":
        above = data["parent"]
        cells += [size_text(data["size"]), key_text(bytes.fromhex(above)) if above else "-"]
    return cells
