"""The health check of a container: exits with 0 if the master or node in it answers /healthz."""

from __future__ import annotations

import sys
import urllib.request
from typing import Final

PORTS: Final = (50080, 50100)
"""Of a master and of a node. Start them with --host ::, so that they listen on loopback."""


def main() -> int:
    for port in PORTS:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=2.0):
                return 0
        except OSError:  # refused, too late, or no answer of 200
            continue
    return 1


if __name__ == "__main__":
    sys.exit(main())
