"""``python -m kvstore.cli.web``: the child that a master starts to serve HTTP. Not for users."""

from __future__ import annotations

import asyncio
import os
import socket
import sys

import click

from kvstore.config import HTTP_TOKEN_VARIABLE
from kvstore.process import dumps, logs
from kvstore.process.children import ParentLink
from kvstore.process.watched_files import watching


@click.command()
@click.option("--parent-fd", type=int, required=True)
@click.option("--listener", type=int, required=True, help="The bound socket.")
@click.option("--channel", type=int, required=True, help="The socket to the parent.")
@click.option("--master", required=True)
@click.option("--events", is_flag=True, help="The parent sends its events.")
@click.option("--events-at", default="")
@click.option("--names", default="", help="By which browsers may reach it, besides addresses.")
@click.option("--reads", default="all")
@click.option("--cert", default="")
@click.option("--key", default="")
@click.option("--cluster", default="")
@click.option("--auth", default="", help="The file of the parent's identity.")
@click.option("--demands-encryption", is_flag=True, help="Drains use only nodes that encrypt.")
@click.option("--has-tls", is_flag=True, help="The port shows the parent's identity.")
@click.option("--revoked", default="")
@click.option("--config", default="")
@click.option("--log-level", default="warning")
@click.option("--log-format", default="text")
def command(
    parent_fd: int,
    listener: int,
    channel: int,
    master: str,
    events: bool,
    events_at: str,
    names: str,
    reads: str,
    cert: str,
    key: str,
    cluster: str,
    auth: str,
    demands_encryption: bool,
    has_tls: bool,
    revoked: str,
    config: str,
    log_level: str,
    log_format: str,
) -> None:
    del config  # ``kvstore.process.children`` gives each child the option
    logs.configure(log_level, log_format)
    if auth:
        dumps.hide_memory()
    from kvstore.web.of_master import Served, serve
    from kvstore.web.server.access import Secured

    with ParentLink(parent_fd) as parent, watching():
        asyncio.run(
            serve(
                Served(
                    listener=socket.socket(fileno=listener),
                    channel=socket.socket(fileno=channel),
                    parent=parent,
                    pid=os.getppid(),
                    master=master,
                    cluster=cluster,
                    auth=auth,
                    demands_encryption=demands_encryption,
                    has_events=events,
                    events_at=events_at,
                    names=tuple(names.split(",")) if names else (),
                    secured=Secured(
                        os.environ.pop(HTTP_TOKEN_VARIABLE, ""),
                        reads,
                        cert,
                        key,
                        auth if has_tls else "",
                        revoked,
                    ),
                )
            )
        )
        sys.exit(0)
    sys.exit(1)  # the parent was told why


if __name__ == "__main__":
    command()
