"""Limits the number of peers of a bound ZeroMQ socket, and cuts peers that do not read.

libzmq does neither, and keeps what a peer does not read. But it reports the file descriptor of each
connection that it accepts and closes, and these descriptors belong to this process.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import struct
import termios
from typing import Final

import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from kvstore.errors import BusyError
from kvstore.network.limiter import Limiter

log = logging.getLogger("kvstore.web")

HANDSHAKE_MS: Final = 5_000
KEEPALIVE_S: Final = 60

SEND_BYTES: Final = 256 << 10
"""The kernel's buffer for one peer."""

SAID_BYTES_MAX: Final = 1_024
"""Bytes that a peer may send at once: an identity, a topic or a number."""


class Peers:
    """The peers of one socket. Use it in one event loop."""

    def __init__(self, sock: zmq.asyncio.Socket, most: int) -> None:
        """Must be called before ``sock`` is bound."""
        sock.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        sock.set(zmq.MAXMSGSIZE, SAID_BYTES_MAX)
        sock.set(zmq.SNDBUF, SEND_BYTES)
        sock.set(zmq.TCP_KEEPALIVE, 1)  # a host that vanished gives its slot back
        sock.set(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_S)
        self._monitor = sock.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._slots = Limiter[int]("events by ZeroMQ", most)
        self._connected: dict[int, socket.socket] = {}
        """By libzmq's descriptor: our own descriptor of the same connection."""

    def __len__(self) -> int:
        return len(self._connected)

    async def watch(self) -> None:
        """Notes which peers come and go, until it is cancelled."""
        try:
            while True:
                frames = await self._monitor.recv_multipart()
                try:
                    said = parse_monitor_message(frames)
                except RuntimeError as error:  # seen once, under load; others are still watched
                    log.warning("peer_event_not_read error=%r", error)
                    continue
                self._gone(said["value"])
                if said["event"] == zmq.EVENT_ACCEPTED:
                    self._came(said["value"])
        finally:
            for each in list(self._connected):
                self._gone(each)

    def cut_those_behind(self, bytes_min: int) -> int:
        """Cuts each peer for which the kernel still holds ``bytes_min`` or more; returns how many
        were cut. They may connect again."""
        behind = [sock for sock in self._connected.values() if _unsent(sock) >= bytes_min]
        for each in behind:
            _cut(each)
        return len(behind)

    def _came(self, fd: int) -> None:
        try:
            sock = socket.socket(fileno=os.dup(fd))
            peer = sock.getpeername()
        except OSError:
            return  # the peer has left already, and libzmq has closed the descriptor
        self._connected[fd] = sock
        try:
            self._slots.acquire(fd, str(peer[0]) if isinstance(peer, tuple) else "?")
        except BusyError:
            _cut(sock)

    def _gone(self, fd: int) -> None:
        self._slots.release(fd)
        if fd in self._connected:
            self._connected.pop(fd).close()


def _cut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)  # libzmq sees the end, and forgets the peer


def _unsent(sock: socket.socket) -> int:
    """Bytes in the kernel that the other host has not acknowledged."""
    try:
        return int(struct.unpack("i", fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)))[0])
    except OSError:
        return 0
