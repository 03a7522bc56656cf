"""``python -m kvstore.cli.web``: the child that a master starts to serve HTTP. Not for users."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys

import click

from kvstore.process import dumps, logs
from kvstore.process.children import ParentLink
from kvstore.process.watched_files import watching
from kvstore.web.channel import SERVED


@click.command()
@click.option("--parent-fd", type=int, required=True)
@click.option("--listener", type=int, required=True, help="The bound socket.")
@click.option("--channel", type=int, required=True, help="The socket to the parent.")
@click.option("--config", default="")
@click.option("--log-level", default="warning")
@click.option("--log-format", default="text")
def command(
    parent_fd: int, listener: int, channel: int, config: str, log_level: str, log_format: str
) -> None:
    del config  # ``kvstore.process.children`` gives each child the option
    logs.configure(log_level, log_format)
    given = json.loads(os.environ.pop(SERVED))
    if given["auth"]:
        dumps.hide_memory()
    from kvstore.web.of_master import Served, serve
    from kvstore.web.server.access import Secured

    given["secured"] = Secured(*given["secured"])
    sockets = socket.socket(fileno=listener), socket.socket(fileno=channel)
    with ParentLink(parent_fd) as parent, watching():
        asyncio.run(serve(Served(*sockets, parent, os.getppid(), **given)))
        sys.exit(0)
    sys.exit(1)  # the parent was told why


if __name__ == "__main__":
    command()
