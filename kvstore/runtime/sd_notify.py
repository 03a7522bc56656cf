"""Notifications to a supervisor: systemd's protocol of ``Type=notify``."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Final

SOCKET_VARIABLE: Final = "NOTIFY_SOCKET"
SEND_S: Final = 1.0
"""Maximum delay by a supervisor that does not read."""

EXTENDED_S: Final = 60.0
"""Extension of the start timeout after each sign of progress."""


def ready(status: str) -> None:
    """Notify that the server serves. ``status``: for people, on one line."""
    _tell("READY=1", f"STATUS={status}")


def still_starting(status: str, extended_s: float = EXTENDED_S) -> None:
    """Notify progress of the start, which extends the supervisor's timeout."""
    _tell(f"STATUS={status}", f"EXTEND_TIMEOUT_USEC={extended_s * 1_000_000:.0f}")


def stopping() -> None:
    """Notify that the server stops as requested."""
    _tell("STOPPING=1")


def _tell(*lines: str) -> None:
    """Send lines to the supervisor, if there is one."""
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
