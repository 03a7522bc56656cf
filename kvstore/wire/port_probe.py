"""Identification of the service on a port that was given as a master's.

Master and node have several ports. For a wrong one gRPC's error does not name the service.
"""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Iterable
from typing import Final

from kvstore.config import DEFAULT_PORT
from kvstore.errors import ProtocolError
from kvstore.runtime import resolver
from kvstore.runtime.addresses import ETCD_SCHEME, parse_etcd, shown_place, split_address
from kvstore.runtime.clock import uptime
from kvstore.runtime.host import is_loopback
from kvstore.runtime.tcp_protocol import HELLO_BYTES, STATUS_BYTES, unpack_status
from kvstore.wire.frames import ERROR, FrameReader
from kvstore.wire.status import CLOSED, NO_TLS

ASK_S: Final = 0.5
"""Timeout of a port."""

GRPC: Final = "a gRPC server"
LANE: Final = "the lane of a master"
HTTP: Final = "a port for HTTP, as masters and nodes have one"
DATA: Final = "the data port of a node"
TLS: Final = "a port for TLS"

NO_MASTER: Final = "that is "
"""Prefix of reasons that name the listening service."""

REFUSED: Final = "connection refused"
"""gRPC's text for a port without a listener."""

_STRANGE: Final = ("http/2", "connection reset", "socket closed", "goaway")
"""Parts of gRPC's texts for a port with another protocol, or for a master that is ending."""

_QUESTION: Final = b"GET /healthz HTTP/1.0\r\nX-Asks: %s\r\n\r\n" % b"which port".ljust(
    HELLO_BYTES, b"."
)
"""A request that identifies each of our servers by its response."""

_ANSWER_BYTES: Final = 512
_SETTINGS: Final = 4
_TLS_ALERT: Final = b"\x15\x03"


def identify_service(address: str, timeout_s: float = ASK_S) -> str:
    """Return the service at ``address``, one of the constants above; empty: none, or another
    program. Blocks for ``timeout_s`` at most."""
    until = uptime() + timeout_s
    host, port = split_address(address, default_port=DEFAULT_PORT)
    answer = b""
    is_there = False
    with contextlib.suppress(OSError), resolver.connect(host, port, until) as sock:
        is_there = True
        sock.settimeout(max(until - uptime(), 0.001))
        sock.sendall(_QUESTION)
        answer = sock.recv(_ANSWER_BYTES)
    found = _read(answer)
    return TLS if not found and is_there and _has_tls(host, port, until) else found


def _has_tls(host: str, port: int, until: float) -> bool:
    """Return whether the port answers a TLS handshake; a gRPC port with TLS is silent otherwise."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with contextlib.suppress(OSError), resolver.connect(host, port, until) as sock:
        sock.settimeout(max(until - uptime(), 0.001))
        with context.wrap_socket(sock):
            return True
    return False


def is_protocol_mismatch(details: str) -> bool:
    """Return whether ``details`` of a failed gRPC call may come from a port without gRPC."""
    return any(sign in details.lower() for sign in _STRANGE)


def unreachable_advice(masters: str, reasons: Iterable[str]) -> str:
    """Return the advice for ``masters`` (as given by a user), each of which failed for a reason."""
    reasons = list(reasons)
    if NO_MASTER + TLS in reasons:
        return (
            f"The master at {shown_place(masters)} requires identities: give --auth FILE, or "
            "KVSTORE_AUTH=FILE (kvstore auth issue writes it)"
        )
    if NO_TLS in reasons:
        return (
            f"The master at {shown_place(masters)} has no identities: start it with --auth FILE, "
            "or remove --auth (KVSTORE_AUTH) here"
        )
    if any("certificate" in reason for reason in reasons):
        return (
            "Compare both clocks (timedatectl) and certificates (kvstore auth show FILE), and "
            "issue a wrong one again (kvstore auth issue --force)"
        )
    if any(reason.startswith(NO_MASTER) for reason in reasons):
        return (
            "Clients and nodes need the gRPC port of a master, which it prints when it starts "
            f"({DEFAULT_PORT}, unless --port says otherwise)"
        )
    if reasons and all(reason == REFUSED for reason in reasons):
        return (
            f"No process listens there: start {start_command(masters)}, or name a running master "
            "with --master or KVSTORE_MASTER"
        )
    if CLOSED in reasons:
        return "It may have no free connection, end, or reject our certificate"
    if "connection timed out" in reasons:
        return (
            "Its host has vanished, or the network drops packets, perhaps only large ones: "
            "ping -M do -s 1472 HOST fails if the MTU is wrong on the way"
        )
    return f"kvstore doctor --master {masters} tests the way to it, step by step"


def start_command(masters: str) -> str:
    """Return the command that starts the first of ``masters`` on its host."""
    if masters.startswith(ETCD_SCHEME):
        return f"kvstore-master --etcd {parse_etcd(masters).endpoints[0]}"
    host, port = split_address(masters.partition(",")[0], default_port=DEFAULT_PORT)
    where = "" if is_loopback(host) else f"--host {host} "
    return f"kvstore-master {where}--port {port}"


def _read(answer: bytes) -> str:
    if answer.startswith(b"HTTP/"):
        return HTTP
    if answer.startswith(_TLS_ALERT):
        return TLS
    if answer[:2] == b"\0\0" and answer[3:5] == bytes((_SETTINGS, 0)):
        return GRPC
    if len(answer) == STATUS_BYTES and unpack_status(answer) is not None:
        return DATA
    reader = FrameReader(_ANSWER_BYTES)
    space = reader.space()
    count = min(len(answer), len(space))
    space[:count] = answer[:count]
    reader.received(count)
    with contextlib.suppress(ProtocolError):
        frame = reader.next()
        if frame is not None and frame[:2] == (0, ERROR):
            return LANE
    return ""
