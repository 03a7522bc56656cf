"""Transport over tcp: the client's end of ``tcp_protocol``, with a pool of connections.

A connection serves one call at a time and returns to the pool after success. After an error it is
reset, so that unsent bytes do not leave this host. Sent bytes may still arrive, so a write's error
names the connection, and the node closes it before the extent is wiped.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Final, TypeVar

from kvstore.calls import SegmentInfo
from kvstore.errors import ClosedError
from kvstore.memory.header import HEADER_BYTES
from kvstore.native.interface import ReadRow, WriteRow
from kvstore.runtime.cancellation import CancelToken, current
from kvstore.runtime.clock import uptime
from kvstore.runtime.tcp_protocol import RANGES_MAX
from kvstore.security.data_port_tls import ClientTls
from kvstore.transport.base import Transport
from kvstore.transport.common import RangeCopy, check_moves, deadline_exceeded
from kvstore.transport.tcp_client import STALL_S, ClientConnection

CONNECTIONS_MAX: Final = 8
"""Connections per segment. One stream saturates a core; more help several threads."""

CHECK_INTERVAL_S: Final = 0.1
"""Interval in which a call that waits for a connection checks whether the transport was closed."""

ItemT = TypeVar("ItemT")
RowT = TypeVar("RowT", ReadRow, WriteRow)

_PoolKey = tuple[str, bytes, int, int, bytes]


class _Connections:
    """Connections to one mount of one segment; guarded by the transport's lock."""

    def __init__(self) -> None:
        self.idle: list[ClientConnection] = []
        """The last one was used most recently, and is used next; nodes close old ones."""
        self.in_use: set[ClientConnection] = set()
        self.waiting = 0
        self.returned: SimpleQueue[None] = SimpleQueue()


class TcpTransport(Transport):
    """Reaches segments whose node has a data server. Threads: any."""

    name: str = "tcp"

    def __init__(
        self,
        client_number: int = 0,
        *,
        connections_max: int = CONNECTIONS_MAX,
        stall_s: float = STALL_S,
        tls: ClientTls | None = None,
    ) -> None:
        """``stall_s``: maximum time without a byte in a call. ``tls``: for nodes that encrypt."""
        self._tls = tls
        self._client_number = client_number
        self._connections_max = connections_max
        self._stall_s = stall_s
        self._pools: dict[_PoolKey, _Connections] = {}
        self._lock = threading.Lock()
        self._closed = False

    def can_reach(self, segment: SegmentInfo) -> bool:
        """As ``Transport.can_reach``; only the first call shows whether the node replies."""
        return bool(segment.address) and not self._closed

    def read(self, segment: SegmentInfo, moves: Sequence[RangeCopy], deadline: float) -> None:
        """As ``Transport.read``; also raises BusyError. ``quiesced`` is always 1."""
        check_moves(segment, moves)
        with self.lend(segment, deadline) as connection:
            for batch in _copy_batches(segment, moves):
                connection.read(batch, deadline)

    def write(self, segment: SegmentInfo, moves: Sequence[RangeCopy], deadline: float) -> None:
        """As ``Transport.write``; also raises BusyError (quiesced)."""
        check_moves(segment, moves)
        with self.lend(segment, deadline) as connection:
            for batch in _copy_batches(segment, moves):
                connection.write(batch, deadline)

    def read_objects(
        self,
        segment: SegmentInfo,
        namespace: str,
        rows: list[ReadRow],
        verify: bool,
        deadline: float,
    ) -> list[bytes | int]:
        done: list[bytes | int] = []
        with self.lend(segment, deadline) as connection:
            for batch in _row_batches(segment, rows, RANGES_MAX):
                done += connection.read_objects(namespace, batch, verify, deadline)
        return done

    def write_objects(
        self, segment: SegmentInfo, namespace: str, rows: list[WriteRow], deadline: float
    ) -> None:
        with self.lend(segment, deadline) as connection:
            for batch in _row_batches(segment, rows, RANGES_MAX // 3):
                connection.write_objects(namespace, batch, deadline)

    def forget(self, segment: SegmentInfo) -> None:
        self._drop([key for key in self._keys() if key[1] == segment.uuid])

    def close(self) -> None:
        with self._lock:
            self._closed = True
            in_use = [connection for pool in self._pools.values() for connection in pool.in_use]
        self._drop(self._keys())
        for connection in in_use:
            connection.interrupt()

    def sweep(self) -> None:
        ended: list[ClientConnection] = []
        with self._lock:
            for key, pool in list(self._pools.items()):
                ended += [each for each in pool.idle if each.has_ended]
                pool.idle = [each for each in pool.idle if each not in ended]
                if not pool.idle and not pool.in_use:
                    del self._pools[key]
        for connection in ended:
            connection.close()

    def drop_connections(self) -> None:
        self._drop(self._keys())

    def close_after_fork(self) -> None:
        for pool in self._pools.values():
            for connection in (*pool.idle, *pool.in_use):
                connection.close_after_fork()

    @contextmanager
    def lend(self, segment: SegmentInfo, deadline: float) -> Iterator[ClientConnection]:
        """Yield a connection for one call. Raises ClosedError, DeadlineExceededError."""
        # With the holder and its key: a client may get another number from the next master.
        key = segment.address, segment.uuid, segment.generation, segment.holder, segment.token
        stop = current()
        pool, connection = self._take(key, segment, deadline, stop)
        is_usable = False
        try:
            if stop is None:
                yield connection
            else:
                with stop.on_cancel(connection.interrupt):
                    yield connection
            is_usable = stop is None or not stop.is_set
        finally:
            self._give_back(key, pool, connection, is_usable=is_usable)

    def _take(
        self, key: _PoolKey, segment: SegmentInfo, deadline: float, stop: CancelToken | None
    ) -> tuple[_Connections, ClientConnection]:
        while True:
            if self._closed:
                raise ClosedError("the transport was closed", quiesced=1)
            if stop is not None:
                stop.check()
            with self._lock:
                pool = self._pools.get(key)
                is_new = pool is None
                if pool is None:
                    pool = self._pools[key] = _Connections()
                connection = self._connection(pool, segment)
                pool.waiting += connection is None
            if connection is not None:
                if is_new:
                    self._drop([e for e in self._keys() if e[1] == segment.uuid and e != key])
                return pool, connection
            remaining = deadline - uptime()
            with suppress(Empty):
                pool.returned.get(timeout=max(0.0, min(remaining, CHECK_INTERVAL_S)))
            with self._lock:
                pool.waiting -= 1
            if remaining <= 0:
                raise deadline_exceeded(segment)

    def _connection(self, pool: _Connections, segment: SegmentInfo) -> ClientConnection | None:
        """Return a free connection, or a new one below the maximum. The caller holds the lock."""
        if pool.idle:
            connection = pool.idle.pop()
        elif len(pool.in_use) < self._connections_max:
            connection = ClientConnection(
                segment, self._client_number, stall_s=self._stall_s, tls=self._tls
            )
        else:
            return None
        pool.in_use.add(connection)
        return connection

    def _give_back(
        self, key: _PoolKey, pool: _Connections, connection: ClientConnection, *, is_usable: bool
    ) -> None:
        with self._lock:
            pool.in_use.discard(connection)
            is_kept = is_usable and not self._closed and self._pools.get(key) is pool
            if is_kept:
                pool.idle.append(connection)
            if pool.waiting:
                pool.returned.put(None)
        if not is_kept:
            connection.close() if is_usable else connection.reset()

    def _keys(self) -> list[_PoolKey]:
        with self._lock:
            return list(self._pools)

    def _drop(self, keys: list[_PoolKey]) -> None:
        with self._lock:
            pools = [pool for key in keys if (pool := self._pools.pop(key, None)) is not None]
            idle = [connection for pool in pools for connection in pool.idle]
            for pool in pools:
                pool.idle.clear()
        for connection in idle:
            connection.close()


def _batches(
    segment: SegmentInfo, items: list[ItemT], lengths: list[int], items_max: int
) -> Iterator[list[ItemT]]:
    """Group items into requests by number, and by the segment's size in bytes."""
    if len(items) <= items_max and sum(lengths) <= segment.size:
        if items:
            yield items
        return
    batch: list[ItemT] = []
    remaining = segment.size
    for item, length in zip(items, lengths, strict=True):
        if batch and (len(batch) == items_max or length > remaining):
            yield batch
            batch = []
            remaining = segment.size
        batch.append(item)
        remaining -= length
    yield batch


def _copy_batches(segment: SegmentInfo, moves: Sequence[RangeCopy]) -> Iterator[list[RangeCopy]]:
    return _batches(segment, list(moves), [len(move.buffer) for move in moves], RANGES_MAX)


def _row_batches(segment: SegmentInfo, rows: list[RowT], rows_max: int) -> Iterator[list[RowT]]:
    return _batches(segment, rows, [row[1] + 2 * HEADER_BYTES for row in rows], rows_max)
