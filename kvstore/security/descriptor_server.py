"""Passing of file descriptors of the node's memory to authenticated clients on its host.

``kvstore.memory.shared_descriptors`` defines the access of a descriptor. A peer costs one task that
ends within ``PEER_S``; if there are too many, the oldest is preempted."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import os
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from kvstore.memory.medium import Medium
from kvstore.memory.shm_entries import socket_name, unlink_entry, unlink_own
from kvstore.runtime.host import SHM_DIRECTORY
from kvstore.runtime.limiter import Limiter
from kvstore.security import descriptor_protocol as protocol
from kvstore.security.descriptor_protocol import DescriptorStatus

log = logging.getLogger("kvstore.node")

PEERS_MAX: Final = 64
"""Concurrent peers. A correct one stays for less than a millisecond."""

PEER_S: Final = 2.0
"""Timeout of a peer's hello."""

BACKLOG: Final = 128

ACCEPT_AGAIN_S: Final = 0.1
"""Pause after a failed accept: there is no free file descriptor."""


class DescriptorServer:
    """Create it, run ``serving`` in an event loop, then ``close``. Threads: one."""

    def __init__(self, segment: Medium, *, group: int = -1, needs_all: bool = False) -> None:
        """Bind the socket; peers wait until it serves.

        Args:
            segment: owned by the caller until after ``close``.
            group: id of a group whose members may connect, besides the own user and root; -1: none.
            needs_all: as ``descriptor_protocol.access``.

        Raises:
            OSError: the socket cannot be created, or the memory cannot be opened again.
        """
        self.handed = 0
        """File descriptors passed since the start."""
        self.refused = 0
        """Refused peers."""
        self._segment = segment
        self._needs_all = needs_all
        self._peers = Limiter[asyncio.Task[None]]("handover", PEERS_MAX)
        self._again: asyncio.TimerHandle | None = None
        self._shared = segment.share()
        self.name: Final = socket_name(segment.shm_name)
        """Entry in ``/dev/shm``. It is ours while we own the segment of that name."""
        self._path = f"{SHM_DIRECTORY}/{self.name}"
        try:
            self._listener = _listening(self._path, group)
        except BaseException:
            self._shared.close()
            raise
        log.info("descriptor_server_started socket=%s", self.name)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        loop.add_reader(self._listener, self._accept)
        try:
            yield
        finally:
            loop.remove_reader(self._listener)
            if self._again is not None:
                self._again.cancel()
            peers = list(self._peers)
            for peer in peers:
                peer.cancel()
            await asyncio.gather(*peers, return_exceptions=True)

    def close(self) -> None:
        """Close the socket, not while ``serving``. Passed file descriptors stay valid."""
        unlink_own(self._path)
        self._listener.close()
        self._shared.close()

    def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno == errno.ECONNABORTED:
                return
            log.warning("descriptor_accept_failed error=%s", error)
            loop.remove_reader(self._listener)
            self._again = loop.call_later(
                ACCEPT_AGAIN_S, loop.add_reader, self._listener, self._accept
            )
            return
        sock.setblocking(False)
        peer = loop.create_task(self._serve(sock))
        self._peers.wait(peer, peer.cancel)
        peer.add_done_callback(functools.partial(self._served, sock))

    def _served(self, sock: socket.socket, peer: asyncio.Task[None]) -> None:
        self._peers.release(peer)
        sock.close()  # a task that is cancelled before its first step has not closed it

    async def _serve(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError):  # also TimeoutError; or the peer has disconnected
            nonce = secrets.token_bytes(protocol.NONCE_BYTES)
            sock.send(protocol.pack_greeting(DescriptorStatus.OK, nonce))
            async with asyncio.timeout(PEER_S):
                raw = await asyncio.get_running_loop().sock_recv(sock, protocol.HELLO_BYTES + 1)
            status, key, writes = self._authorize(raw, nonce)
            if status is DescriptorStatus.OK:
                fd = self._shared.to_write if writes else self._shared.to_read
                socket.send_fds(sock, [protocol.pack_answer(status, key, raw)], [fd])
                self.handed += 1
            else:
                self.refused += 1
                log.warning(
                    "descriptor_request_refused status=%s count=%d", status.name, self.refused
                )
                sock.send(protocol.pack_answer(status))

    def _authorize(self, raw: bytes, nonce: bytes) -> tuple[DescriptorStatus, bytes, bool]:
        """Return the status for a hello, the peer's key, and whether it may write."""
        segment = self._segment
        hello = protocol.unpack_hello(raw)
        if hello is None:
            return DescriptorStatus.BAD_REQUEST, b"", False
        uuid, generation, holder, rights, _ = hello
        if uuid != segment.uuid or generation != segment.generation:
            return DescriptorStatus.UNMOUNTED, b"", False
        key = protocol.map_key(segment.token, uuid, generation, holder, rights)
        if not protocol.is_proven(raw, key, nonce):
            return DescriptorStatus.DENIED, b"", False
        status, writes = protocol.access(rights, needs_all=self._needs_all)
        return status, key, writes


def _listening(path: str, group: int) -> socket.socket:
    """Return a socket to which the own user, and the members of ``group`` unless that is -1, may
    connect. Replaces one that a killed process has left. Raises OSError."""
    unlink_entry(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.setblocking(False)
        os.fchmod(listener.fileno(), 0o600)  # the mode of the entry created by ``bind``
        listener.bind(path)
        try:
            if group >= 0:
                os.chown(path, -1, group)
                os.chmod(path, 0o660)
            listener.listen(BACKLOG)
            return listener
        except BaseException:
            unlink_entry(path)
            raise
    except BaseException:
        listener.close()
        raise
