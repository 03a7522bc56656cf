"""The transports of a client, and which of them serves a segment: the first that reaches it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from kvstore.calls import SegmentInfo
from kvstore.client.leases import Mounted
from kvstore.client.steps import Transfer
from kvstore.errors import ClosedError, KVStoreError, NodeUnreachableError, SegmentGoneError
from kvstore.transport.base import Transport
from kvstore.transport.mooncake.transport import MooncakeTransport
from kvstore.transport.pieces import segment_gone
from kvstore.transport.shm import ShmTransport
from kvstore.transport.tcp import TcpTransport

SEGMENTS_AT_ONCE = 8
"""Nodes that one batch is exchanged with at the same time."""


class Movers:
    """Moves the bytes of transfers. Any thread."""

    def __init__(
        self, names: Sequence[str], engine: Callable[[], MooncakeTransport] | None = None
    ) -> None:
        """
        Args:
            engine: makes the transport "mooncake"; None: it does not count.

        Raises:
            TransferEngineError: there is no engine, and no other transport.
        """
        self._engine = engine() if engine is not None and "mooncake" in names else None
        kinds: dict[str, Callable[[], Transport | None]] = {
            "shm": ShmTransport,
            "mooncake": lambda: self._engine,
            "tcp": TcpTransport,
        }
        made = (kinds[name]() for name in names)
        self._transports: list[Transport] = [each for each in made if each is not None]
        if self._engine is not None and len(self._transports) == 1:
            self._engine.start()
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def move(self, transfers: Sequence[Transfer], deadline: float) -> list[KVStoreError | None]:
        """Carry all of them out, those of several nodes at the same time; one result each."""
        if len(transfers) == 1:
            return [self._move_one(transfers[0], deadline)]
        pool = self._threads()
        try:
            under_way: list[Future[KVStoreError | None]] = [
                pool.submit(self._move_one, transfer, deadline) for transfer in transfers
            ]
        except RuntimeError:  # shut down
            raise ClosedError("the client is closed") from None
        return [future.result() for future in under_way]

    def maps(self, segment: SegmentInfo) -> bool:
        """Whether the segment is in this address space."""
        return any(transport.maps and transport.reaches(segment) for transport in self._transports)

    def memory(self, segment: SegmentInfo) -> memoryview:
        """All of a segment that ``maps`` has said is here.

        Raises:
            SegmentGoneError: it was unmounted, or mounted anew.
        """
        for transport in self._transports:
            if transport.maps and transport.reaches(segment):
                try:
                    return transport.memory(segment)
                except SegmentGoneError:
                    transport.forget(segment)
                    raise
        raise segment_gone(segment)

    def view(self, segment: SegmentInfo, offset: int, length: int) -> memoryview | None:
        """The segment's own memory, or None where it is not in this address space.

        Raises:
            SegmentGoneError: it was unmounted, or mounted anew.
            InvalidRangeError
        """
        for transport in self._transports:
            if transport.reaches(segment):
                try:
                    memory = transport.view(segment, offset, length)
                except SegmentGoneError:
                    transport.forget(segment)
                    raise
                if memory is not None:
                    return memory
        return None

    def watch(self, segment: SegmentInfo) -> Mounted:
        """Whether a segment that ``view`` has shown is mounted as it was, from now on."""
        for transport in self._transports:
            if (mounted := transport.watch(segment)) is not None:
                return mounted
        return lambda: False  # it was unmounted since

    def register(self, buffer: memoryview) -> None:
        """As ``MooncakeTransport.register``; the other transports need it not."""
        for transport in self._transports:
            transport.register(buffer)

    def unregister(self, buffer: memoryview) -> None:
        if self._engine is not None:
            self._engine.unregister(buffer)

    def close(self) -> None:
        for transport in self._transports:
            transport.close()
        if self._pool is not None:
            self._pool.shutdown(wait=True)

    def _move_one(self, transfer: Transfer, deadline: float) -> KVStoreError | None:
        if transfer.deadline is not None:
            deadline = min(deadline, transfer.deadline)
        segment = transfer.segment
        try:
            for transport in self._transports:
                if transport.reaches(segment):
                    if transfer.in_one_go(transport, deadline):
                        return None
                    move = transport.write if transfer.write else transport.read
                    move(segment, transfer.moves, deadline)
                    return None
        except KVStoreError as error:
            for transport in self._transports:
                transport.forget(segment)
            return error
        names = ", ".join(transport.name for transport in self._transports)
        return NodeUnreachableError(
            f"none of the transports ({names}) reaches node {segment.node}",
            advice="Allow tcp among the transports, or run on the node's host.",
            node=segment.node,
            settled=1,
        )

    def _threads(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(SEGMENTS_AT_ONCE, "kvstore-move")
            return self._pool
