"""The command ``kvstore-master``."""

from __future__ import annotations

from typing import NoReturn

from kvstore.cli.options import run
from kvstore.cli.servers import serves
from kvstore.config import MasterConfig
from kvstore.runtime.child_process import ParentLink

EXAMPLE = """\b
Examples:
  kvstore-master --memory 2GiB              a whole store on one host
  kvstore-master --host 10.0.0.7            nodes and clients on other hosts, too
  kvstore-master --host 10.0.0.7 --etcd 10.0.1.1:2379      one of several masters
"""


@serves(MasterConfig, EXAMPLE, "Run the master, which knows all objects and where they are.")
def command(config: MasterConfig, parent: ParentLink) -> int:
    # After the settings: a typo is reported at once.
    from kvstore.master.main import run as serve

    return serve(config, parent)


def main() -> NoReturn:
    run(command, "kvstore-master")


if __name__ == "__main__":
    main()
