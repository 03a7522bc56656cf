"""The command ``kvstore-master``."""

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
    parent_option,
    run,
    version_option,
)
from kvstore.config import MasterConfig, load
from kvstore.process import dumps, logs
from kvstore.process.children import ParentLink

EXAMPLE = """\b
Examples:
  kvstore-master --memory 2GiB              a whole store on one host
  kvstore-master --host 10.0.0.7            nodes and clients on other hosts, too
  kvstore-master --host 10.0.0.7 --etcd 10.0.1.1:2379      one of several masters
"""


@click.command(
    cls=Command,
    context_settings=CONTEXT,
    epilog=f"{EXAMPLE}\n\n{SOURCES}",
    help="Run the master, which knows all objects and where they are.",
)
@config_options(MasterConfig)
@parent_option
@debug_option
@version_option
def command(config_path: str | None, parent_fd: int | None, **flags: object) -> int:
    with ParentLink(parent_fd) as parent:
        config = load(MasterConfig, flags, config_path=config_path, origin="{flag}")
        logs.configure(config.log_level, config.log_format)
        if config.auth:
            dumps.hide_memory()
        # After the settings: a typo is reported at once.
        from kvstore.master.app import run as serve

        return serve(config, parent)
    return FAILED  # the parent was told why


def main() -> NoReturn:
    run(command, "kvstore-master")


if __name__ == "__main__":
    main()
