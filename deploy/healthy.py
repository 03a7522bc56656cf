"""Health check of a container: exits with 0 if the master, node or proxy in it is healthy.

Requests ``/healthz`` at each ``HOST:PORT`` of HEALTH_AT, else at the default ports, over HTTP and
HTTPS. One status 200 suffices.
"""

from __future__ import annotations

import http.client
import os
import ssl
import sys
from typing import Final
from urllib.request import HTTPSHandler, ProxyHandler, build_opener

DEFAULT: Final = "127.0.0.1:50080 127.0.0.1:50100 127.0.0.1:8000"
TIMEOUT_S: Final = 2.0


def is_healthy(url: str) -> bool:
    """Request ``url`` in this container. Ignores proxies in the environment, so certificates need
    no check."""
    unverified = ssl.create_default_context()
    unverified.check_hostname = False
    unverified.verify_mode = ssl.CERT_NONE
    opener = build_opener(ProxyHandler({}), HTTPSHandler(context=unverified))
    try:
        opener.open(url, timeout=TIMEOUT_S).close()
    except (OSError, http.client.HTTPException):  # refused, timed out, another status, or no HTTP
        return False
    return True


if __name__ == "__main__":
    places = os.environ.get("HEALTH_AT", DEFAULT).split()
    urls = [f"{scheme}://{place}/healthz" for place in places for scheme in ("http", "https")]
    sys.exit(0 if any(map(is_healthy, urls)) else f"no 200 from {', '.join(urls)}")
