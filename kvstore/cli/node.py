"""The command ``kvstore-node``."""

from __future__ import annotations

from typing import NoReturn

import click

from kvstore.cli.options import (
    CONTEXT,
    FAILED,
    SOURCES,
    Command,
    config_options,
    debug_option,
    orphan_option,
    parent_option,
    run,
    version_option,
)
from kvstore.config import NodeConfig, load
from kvstore.process import dumps, logs
from kvstore.process.children import ParentLink

EXAMPLE = """\b
Examples:
  kvstore-node --memory 4GiB                beside the master, on the same host
  kvstore-node --master 10.0.0.7:50001 --host 10.0.0.8 --memory 100GiB
"""


@click.command(
    cls=Command,
    context_settings=CONTEXT,
    epilog=f"{EXAMPLE}\n\n{SOURCES}",
    help="Run a node, which adds memory of this host to the pool and serves it.",
)
@config_options(NodeConfig)
@parent_option
@orphan_option
@debug_option
@version_option
def command(
    config_path: str | None, parent_fd: int | None, keep_orphaned: bool, **flags: object
) -> int:
    with ParentLink(parent_fd) as parent:
        config = load(NodeConfig, flags, config_path=config_path, origin="{flag}")
        logs.configure(config.log_level, config.log_format)
        if config.auth:
            dumps.hide_memory()
        # After the settings: a typo is reported at once.
        from kvstore.node.app import run as serve
        from kvstore.repairer import Repairer

        return serve(config, parent, keep_orphaned=keep_orphaned, repairs=Repairer.of_node)
    return FAILED  # the parent was told why


def main() -> NoReturn:
    run(command, "kvstore-node")


if __name__ == "__main__":
    main()
