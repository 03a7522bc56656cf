"""The node's end of the transfer engine: its registered segment, and its fence.

Access is one-sided: the node checks no request. But the engine checks that every byte is in
registered memory. So each generation of a segment is registered at a new address, in a separate
mapping:

fence: unregister ─► no new access ─► the old addresses hold no memory ─► register at new ones

From then on the engine rejects the old address, and a tcp transfer in progress fails in the kernel,
before the node joins a master again. Old addresses stay reserved until the process ends.

Over tcp the engine's server waits forever, so bytes of a stopped client could arrive at any later
time. The node therefore closes connections without traffic for ``STALL_S``, as ``tcp_server`` does.
Clients use a shorter time (``transport``).
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import socket
import struct
import threading
from typing import Final

from kvstore.calls import EngineAddress
from kvstore.errors import InternalError
from kvstore.memory.medium import Medium
from kvstore.memory.pages import POPULATE_READ, map_at, populate
from kvstore.runtime.descriptors import sockets
from kvstore.transport.mooncake.engine import (
    EngineSettings,
    TransferEngine,
    address_of_map,
)

STALL_S: Final = 6.0
"""Maximum time without traffic. A node may be stopped for as long again (``dead_ms``), and what it
then reads still arrives within the master's quarantine (docs/decisions/fencing.md)."""

SWEEP_S: Final = 0.5

_TCP_INFO: Final = struct.Struct("@44xI4xI")  # tcpi_last_data_sent and tcpi_last_data_recv
_PROT_NONE, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS, _MAP_NORESERVE = 0, 2, 0x10, 0x20, 0x4000

log = logging.getLogger("kvstore.mooncake")


class EngineServer:
    """Serves one segment, until ``close``. Threads: any; ``fence`` and ``close`` one at a time."""

    def __init__(self, segment: Medium, settings: EngineSettings, host: str) -> None:
        """Register the segment.

        Args:
            segment: the caller's, closed after this.
            host: as clients reach this node.

        Raises:
            TransferEngineError: the engine cannot serve the segment.
        """
        self._segment = segment
        self._mapped: list[mmap.mmap] = []
        """The last mapping is registered; earlier ones only reserve their addresses."""
        self._closing = threading.Event()
        self._sweeper: threading.Thread | None = None
        self._engine = TransferEngine(settings, host)
        try:
            self._register()
        except BaseException:
            self._engine.close()
            raise
        if self._engine.data_ports:
            self._sweeper = threading.Thread(
                target=self._sweep_forever, name="kvstore-engine-sweep", daemon=True
            )
            self._sweeper.start()

    @property
    def address(self) -> EngineAddress:
        """The address for clients; each ``fence`` changes it."""
        return self._engine.address_of(address_of_map(self._mapped[-1]))

    def fence(self) -> None:
        """Revoke the present address and get a new one; no peer can touch the segment by the old
        one.

        Raises:
            InternalError, TransferEngineError: the node must not join.
        """
        old = self._mapped[-1]
        if not self._engine.unregister(address_of_map(old)):
            raise InternalError("the transfer engine does not release the segment")
        _take_memory_away(old)
        self._register()

    def close(self) -> None:
        self._closing.set()
        if self._sweeper is not None:
            self._sweeper.join()
        self._engine.close()
        # Mappings that are still referenced stay until the process ends.
        while self._mapped:
            with contextlib.suppress(BufferError):
                self._mapped.pop().close()

    def _register(self) -> None:
        mapped = mmap.mmap(self._segment.fd, self._segment.size)
        populate(mapped, 0, len(mapped), POPULATE_READ)
        self._engine.register(address_of_map(mapped), len(mapped))
        self._mapped.append(mapped)

    def _sweep_forever(self) -> None:
        while not self._closing.wait(SWEEP_S):
            try:
                cut = sum(map(self._close_if_stalled, sockets()))
            except Exception as error:  # noqa: BLE001  # the next sweep may succeed
                log.warning("event=engine_sweep_failed error=%r", error)
                continue
            if cut:
                log.debug("event=engine_connections_cut count=%d", cut)

    def _close_if_stalled(self, sock: socket.socket) -> bool:
        try:
            if sock.family not in (socket.AF_INET, socket.AF_INET6):
                return False
            if sock.getsockname()[1] not in self._engine.data_ports:
                return False
            sock.getpeername()  # a listening socket has none
            info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
            sent_ms, received_ms = _TCP_INFO.unpack(info)
            if min(sent_ms, received_ms) < STALL_S * 1000:
                return False
            sock.shutdown(socket.SHUT_RDWR)
        except OSError:  # it has ended
            return False
        return True


def _take_memory_away(mapped: mmap.mmap) -> None:
    """Replace a mapping by an inaccessible one, which reserves its addresses."""
    flags = _MAP_PRIVATE | _MAP_FIXED | _MAP_ANONYMOUS | _MAP_NORESERVE
    try:
        map_at(address_of_map(mapped), len(mapped), _PROT_NONE, flags, -1)
    except OSError as error:
        raise InternalError(f"the old mapping stays: errno {error.errno}") from None
