"""A ``kvstore-master``, ``kvstore-node`` or ``kvstore`` that speaks other versions of the protocol:
``PROTOCOL=1-2 python -m tests.integration.of_another_release node ...``."""

from __future__ import annotations

import importlib
import os
import sys

from kvstore import limits

lowest, highest = map(int, os.environ["PROTOCOL"].split("-"))
limits.PROTOCOL_MIN, limits.PROTOCOL_VERSION = lowest, highest

if __name__ == "__main__":
    importlib.import_module(f"kvstore.cli.{sys.argv.pop(1)}").main()
