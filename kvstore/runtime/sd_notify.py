"""What a server tells the program that supervises it: systemd's protocol of ``Type=notify``."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Final

SOCKET_VARIABLE: Final = "NOTIFY_SOCKET"
SEND_S: Final = 1.0
"""How long a supervisor that does not read may hold us up."""

EXTENDED_S: Final = 60
"""How long a start counts as alive after each sign of progress."""


def ready(status: str) -> None:
    """Says that the server serves from now on. ``status``: for people, on one line."""
    _tell("READY=1", f"STATUS={status}")


def still_starting(status: str) -> None:
    """Says that the start makes progress: the supervisor's patience begins anew."""
    _tell(f"STATUS={status}", f"EXTEND_TIMEOUT_USEC={EXTENDED_S * 1_000_000}")


def stopping() -> None:
    """Says that the server ends, because it was told to."""
    _tell("STOPPING=1")


def _tell(*lines: str) -> None:
    """Does nothing without a supervisor that listens."""
    address = os.environ.get(SOCKET_VARIABLE, "")
    if not address.startswith(("/", "@")):
        return
    if address.startswith("@"):  # the abstract namespace
        address = "\0" + address[1:]
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to,
    ):
        to.settimeout(SEND_S)
        to.sendto("\n".join(lines).encode(errors="replace"), address)
