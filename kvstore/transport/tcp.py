"""Transport over tcp: the client's end of ``tcp_protocol``, with a pool of connections.

A connection serves one call at a time and returns to the pool after success. After any error it is
reset, so that unsent bytes do not leave this host. Bytes that have left it may still land: so a
write's error names the connection, and the node ends it before the extent is wiped.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Final, TypeVar

from kvstore.calls import SegmentInfo
from kvstore.clocks import uptime
from kvstore.errors import ClosedError
from kvstore.memory.header import HEADER_BYTES
from kvstore.native import fast
from kvstore.native.kinds import ReadRow, WriteRow
from kvstore.stopping import Stop, current
from kvstore.transport.base import Move, Transport
from kvstore.transport.pieces import check_moves, deadline_exceeded
from kvstore.transport.tcp_client import STALL_S, ClientConnection
from kvstore.transport.tcp_protocol import RANGES_MAX

CONNECTIONS_MAX: Final = 8
"""Per segment; further calls wait for one. One stream saturates what one core can receive and hash,
so more serve calls from several threads only."""

ItemT = TypeVar("ItemT")
RowT = TypeVar("RowT", ReadRow, WriteRow)

_PoolKey = tuple[str, bytes, int]


class _Pool:
    """Connections to one mount of one segment; guarded by the transport's lock."""

    def __init__(self) -> None:
        self.idle: list[ClientConnection] = []
        """The most recently used one is last, and is used next; the others grow old and are
        dropped."""
        self.lent: set[ClientConnection] = set()


class TcpTransport(Transport):
    """To segments whose node has a data server. Threads: any."""

    name: str = "tcp"

    def __init__(
        self,
        client_number: int = 0,
        *,
        connections_max: int = CONNECTIONS_MAX,
        stall_s: float = STALL_S,
    ) -> None:
        """
        Args:
            client_number: of the client that writes; see ``tcp_protocol.Hello``.
            stall_s: the longest that no byte may move while a call waits for a node.
        """
        self._client_number = client_number
        self._connections_max = connections_max
        self._stall_s = stall_s
        self._pools: dict[_PoolKey, _Pool] = {}
        self._changed = threading.Condition()
        self._closed = False

    def reaches(self, segment: SegmentInfo) -> bool:
        """As ``Transport.reaches``; only the first call shows whether the node answers."""
        return bool(segment.address) and not self._closed

    def read(self, segment: SegmentInfo, moves: Sequence[Move], deadline: float) -> None:
        """As ``Transport.read``; also raises BusyError. ``settled`` is always 1."""
        check_moves(segment, moves)
        with self._lend(segment, deadline) as connection:
            for batch in _move_batches(segment, moves):
                connection.read(batch, deadline)

    def write(self, segment: SegmentInfo, moves: Sequence[Move], deadline: float) -> None:
        """As ``Transport.write``; also raises BusyError (settled)."""
        check_moves(segment, moves)
        with self._lend(segment, deadline) as connection:
            for batch in _move_batches(segment, moves):
                connection.write(batch, deadline)

    def read_objects(
        self,
        segment: SegmentInfo,
        namespace: str,
        rows: list[ReadRow],
        verify: bool,
        deadline: float,
    ) -> list[bytes | int] | None:
        """As ``Transport.read_objects``; errors as ``read``."""
        if fast is None:
            return None
        done: list[bytes | int] = []
        with self._lend(segment, deadline) as connection:
            for batch in _row_batches(segment, rows, RANGES_MAX):
                done += connection.read_objects(fast, namespace, batch, verify, deadline)
        return done

    def write_objects(
        self, segment: SegmentInfo, namespace: str, rows: list[WriteRow], deadline: float
    ) -> bool:
        """As ``Transport.write_objects``; errors as ``write``."""
        if fast is None:
            return False
        with self._lend(segment, deadline) as connection:
            for batch in _row_batches(segment, rows, RANGES_MAX // 3):
                connection.write_objects(fast, namespace, batch, deadline)
        return True

    def forget(self, segment: SegmentInfo) -> None:
        """As ``Transport.forget``; calls under way go on and their connections close after them."""
        self._drop([key for key in self._keys() if key[1] == segment.uuid])

    def close(self) -> None:
        """As ``Transport.close``."""
        with self._changed:
            self._closed = True
            lent = [connection for pool in self._pools.values() for connection in pool.lent]
            self._changed.notify_all()
        self._drop(self._keys())
        for connection in lent:
            connection.interrupt()

    def sweep(self) -> None:
        """As ``Transport.sweep``."""
        ended: list[ClientConnection] = []
        with self._changed:
            for key, pool in list(self._pools.items()):
                ended += [each for each in pool.idle if each.has_ended]
                pool.idle = [each for each in pool.idle if each not in ended]
                if not pool.idle and not pool.lent:
                    del self._pools[key]
        for connection in ended:
            connection.close()

    def abandon(self) -> None:
        """As ``Transport.abandon``."""
        for pool in self._pools.values():
            for connection in (*pool.idle, *pool.lent):
                connection.abandon()

    def check_invariants(self) -> None:
        """Raises AssertionError: a bug of ours."""
        with self._changed:
            for pool in self._pools.values():
                assert len(pool.idle) + len(pool.lent) <= self._connections_max
                assert pool.lent.isdisjoint(pool.idle)

    @contextmanager
    def _lend(self, segment: SegmentInfo, deadline: float) -> Iterator[ClientConnection]:
        key = (segment.address, segment.uuid, segment.generation)
        stop = current()
        pool, connection = self._take(key, segment, deadline, stop)
        is_usable = False
        try:
            if stop is None:
                yield connection
            else:
                with stop.wakes(connection.interrupt):
                    yield connection
            is_usable = stop is None or not stop.is_set
        finally:
            self._give_back(key, pool, connection, is_usable=is_usable)

    def _take(
        self, key: _PoolKey, segment: SegmentInfo, deadline: float, stop: Stop | None
    ) -> tuple[_Pool, ClientConnection]:
        waking = nullcontext() if stop is None else stop.wakes(self._wake)
        with waking, self._changed:
            while True:
                if self._closed:
                    raise ClosedError("the transport was closed", settled=1)
                if stop is not None:
                    stop.check()
                pool = self._pools.get(key)
                if pool is None:
                    break
                if pool.idle:
                    connection = pool.idle.pop()
                    pool.lent.add(connection)
                    return pool, connection
                if len(pool.lent) < self._connections_max:
                    break
                remaining = deadline - uptime()
                if remaining <= 0 or not self._changed.wait(remaining):
                    raise deadline_exceeded(segment)
            connection = ClientConnection(segment, self._client_number, stall_s=self._stall_s)
            older = []
            if pool is None:
                older = [other for other in self._pools if other[1] == segment.uuid]
                pool = self._pools[key] = _Pool()
            pool.lent.add(connection)
        self._drop(older)
        return pool, connection

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _give_back(
        self, key: _PoolKey, pool: _Pool, connection: ClientConnection, *, is_usable: bool
    ) -> None:
        with self._changed:
            pool.lent.discard(connection)
            is_kept = is_usable and not self._closed and self._pools.get(key) is pool
            if is_kept:
                pool.idle.append(connection)
            self._changed.notify()
        if not is_kept:
            connection.close() if is_usable else connection.reset()

    def _keys(self) -> list[_PoolKey]:
        with self._changed:
            return list(self._pools)

    def _drop(self, keys: list[_PoolKey]) -> None:
        with self._changed:
            pools = [pool for key in keys if (pool := self._pools.pop(key, None)) is not None]
            idle = [connection for pool in pools for connection in pool.idle]
            for pool in pools:
                pool.idle.clear()
        for connection in idle:
            connection.close()


def _batches(
    segment: SegmentInfo, items: list[ItemT], lengths: list[int], items_max: int
) -> Iterator[list[ItemT]]:
    """Items of these ``lengths`` in requests that a server takes: at most ``items_max`` items, and
    as many bytes as the segment has."""
    if len(items) <= items_max and sum(lengths) <= segment.size:
        if items:
            yield items
        return
    batch: list[ItemT] = []
    room = segment.size
    for item, length in zip(items, lengths, strict=True):
        if batch and (len(batch) == items_max or length > room):
            yield batch
            batch = []
            room = segment.size
        batch.append(item)
        room -= length
    yield batch


def _move_batches(segment: SegmentInfo, moves: Sequence[Move]) -> Iterator[list[Move]]:
    return _batches(segment, list(moves), [len(move.buffer) for move in moves], RANGES_MAX)


def _row_batches(segment: SegmentInfo, rows: list[RowT], rows_max: int) -> Iterator[list[RowT]]:
    return _batches(segment, rows, [row[1] + 2 * HEADER_BYTES for row in rows], rows_max)
