"""``mooncake.store``, over kvstore."""

import sys

from kvstore import __version__
from kvstore.connectors.mooncake import *  # noqa: F403  # all that it has

print(f"mooncake.store is kvstore {__version__}", file=sys.stderr, flush=True)  # noqa: T201  # before any logging
