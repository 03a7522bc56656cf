"""The health check of a container: exits with 0 if the master or node in it answers /healthz."""

from __future__ import annotations

import http.client
import sys
from typing import Final

PORTS: Final = (50080, 50100)
"""Of a master and of a node. Start them with --host ::, so that they listen on loopback."""

TIMEOUT_S: Final = 2.0


def main() -> int:
    return 0 if any(map(is_healthy, PORTS)) else 1


def is_healthy(port: int) -> bool:
    """Asks this container itself, whatever web proxy its environment names."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):  # refused, too late, or no HTTP
        return False
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(main())
