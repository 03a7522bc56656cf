"""The command ``kvstore-node``."""

from __future__ import annotations

from typing import NoReturn

import click

from kvstore.cli.options import run
from kvstore.cli.servers import serves
from kvstore.config import NodeConfig
from kvstore.runtime.child_process import ParentLink

EXAMPLE = """\b
Examples:
  kvstore-node --memory 4GiB                next to the master, on the same host
  kvstore-node --master 10.0.0.7:50001 --host 10.0.0.8 --memory 100GiB
"""


@serves(
    NodeConfig, EXAMPLE, "Run a node, which adds memory of this host to the pool and serves it."
)
@click.option(
    "--keep-orphaned",
    is_flag=True,
    hidden=True,
    help="For the node of a master: leave the memory in /dev/shm when the parent is killed.",
)
def command(config: NodeConfig, parent: ParentLink, *, keep_orphaned: bool) -> int:
    # After the settings: a typo is reported at once.
    from kvstore.client.repair import Repairer
    from kvstore.node.main import run as serve

    return serve(config, parent, keep_orphaned=keep_orphaned, repairs=Repairer)


def main() -> NoReturn:
    run(command, "kvstore-node")


if __name__ == "__main__":
    main()
