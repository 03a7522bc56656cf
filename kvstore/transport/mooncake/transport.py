"""The client side of the transfer engine.

The node's data server authorizes transfers, over a tcp connection for each call without payload
(``ClientConnection.handshake``):

- before a call, the server has confirmed segment, generation and token, because a one-sided access
  checks none of them;
- while the connection is open, none of them has changed: a node that fences or dies closes it;
- after a failure the client calls the server again for the reason.

docs/decisions/fencing.md explains the protection against late writes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Final

from kvstore.calls import SegmentInfo
from kvstore.errors import (
    BusyError,
    ClosedError,
    DeadlineExceededError,
    KVStoreError,
    MemoryQuarantinedError,
    NodeUnreachableError,
    TransferEngineError,
)
from kvstore.memory.process_memory import address_of
from kvstore.memory.regions import Region, Regions
from kvstore.runtime.cancellation import current
from kvstore.runtime.clock import uptime
from kvstore.transport.base import Transport
from kvstore.transport.common import RangeCopy, check_moves, deadline_exceeded
from kvstore.transport.mooncake.engine import EngineSettings
from kvstore.transport.mooncake.engine_call import EngineCall, TransferFailedError
from kvstore.transport.mooncake.engine_session import ChunkBuffer, EngineSession
from kvstore.transport.tcp import TcpTransport
from kvstore.transport.tcp_client import ClientConnection

BATCHES_AT_ONCE: Final = 16
"""Concurrent batches, each in a thread of its own; further ones wait."""

IDLE_S: Final = 3.0
"""Maximum idle time of an engine's tcp connection: its node closes those idle for twice as long
(``server.STALL_S``), because it cannot tell them from stopped writers. A new engine takes a
millisecond."""

RETIRED_MAX: Final = 4
"""Engines that wait for their last call; beyond these, calls that need a new one are rejected."""

BROKEN_S: Final = 10.0
"""Pause before an engine that did not start is retried; other transports are used."""

UNREACHED_S: Final = 5.0
"""Pause for an engine that fails although its node replies: a port may be closed."""

COPIES_WAIT_S: Final = 0.5
"""Wait of a failed read for its engine to end, so that the caller's memory is free."""

log = logging.getLogger("kvstore.mooncake")


class MooncakeTransport(Transport):
    """Reaches segments with an engine of the same protocol and metadata server. Threads: any."""

    name: str = "mooncake"

    def __init__(
        self,
        settings: EngineSettings,
        *,
        host: Callable[[], str] = lambda: "127.0.0.1",
        buffer_bytes: int = 64 << 20,
    ) -> None:
        """``host``: returns our address. ``buffer_bytes``: for unregistered memory."""
        self._settings = settings
        self._host = host
        self._buffer_bytes = buffer_bytes
        self._threads = ThreadPoolExecutor(BATCHES_AT_ONCE, "kvstore-engine")
        self._changing = threading.RLock()
        self._session: EngineSession | None = None
        self._retired: list[EngineSession] = []
        self._registered = Regions()
        self._in_doubt: list[tuple[Region, EngineSession]] = []
        """Caller's memory that may be written to until that session has ended."""
        self._tcp = TcpTransport()
        """Connections to data servers, without payload: see the module."""
        self._broken_until = 0.0
        self._has_started = False
        self._unreached: dict[str, float] = {}
        """Engines that failed although their nodes replied, and the time of the next attempt."""
        self._is_closed = False

    def start(self) -> None:
        """Create the engine now. Raises TransferEngineError: it cannot be created."""
        with self._changing:
            if self._session is None:
                self._session = self._new_session(None)
                self._has_started = True

    def can_reach(self, segment: SegmentInfo) -> bool:
        """As ``Transport.can_reach``; creates the engine the first time. Failures are logged."""
        engine = segment.engine
        if (
            engine is None
            or engine.protocol != self._settings.protocol
            or engine.metadata_server != self._settings.metadata_server
            or not segment.address
            or self._is_closed
            or (self._unreached and self._is_unreached(engine.name))
        ):
            return False
        if self._session is not None:
            return True
        with self._changing:
            if uptime() < self._broken_until:
                return False
            if not self._has_started:
                try:
                    self.start()
                except TransferEngineError as error:
                    self._is_broken(error)
                    return False
        return True

    def register(self, buffer: memoryview) -> None:
        """Let transfers use this memory in place. Raises TransferEngineError."""
        one = Region.of(buffer)
        if one.start == one.stop:
            return
        with self._changing:
            if self._session is not None:
                self._session.engine.register(one.start, one.stop - one.start)
            self._registered.add(one)

    def unregister(self, buffer: memoryview) -> None:
        """Unregister memory; returns when no transfer can touch it any more, at most the engine's
        own timeout after an aborted one. Unknown memory is ignored."""
        start = address_of(buffer)
        with self._changing:
            found = self._registered.take(start)
            session = self._session
            doubts = [
                at for region, at in self._in_doubt if region.overlaps(start, start + len(buffer))
            ]
        if found is not None and session is not None:
            session.engine.unregister(start)
        for each_session in doubts:
            each_session.ended.wait()

    def read(self, segment: SegmentInfo, moves: Sequence[RangeCopy], deadline: float) -> None:
        """As ``Transport.read``; ``quiesced`` is always 1.

        Raises:
            BusyError: too many engines are being closed, or as ``TcpTransport``.
            MemoryQuarantinedError: a transfer into registered memory was abandoned, by this call or
                an earlier one, and may still arrive there.
        """
        self._run(segment, moves, deadline, is_write=False)

    def write(self, segment: SegmentInfo, moves: Sequence[RangeCopy], deadline: float) -> None:
        """As ``Transport.write``; also raises BusyError (quiesced)."""
        self._run(segment, moves, deadline, is_write=True)

    def forget(self, segment: SegmentInfo) -> None:
        self._tcp.forget(segment)

    def close(self) -> None:
        """As ``Transport.close``: calls in progress fail within ``CHECK_INTERVAL_S``."""
        with self._changing:
            self._is_closed = True
            session, self._session = self._session, None
        self._tcp.close()
        self._threads.shutdown(wait=False)
        if session is not None:
            session.is_retired = True
            session.leave()

    def sweep(self) -> None:
        self._tcp.sweep()

    def drop_connections(self) -> None:
        self._tcp.drop_connections()

    def close_after_fork(self) -> None:
        """Keep the transport: closing its engine would touch what the parent shares."""
        self._tcp.close_after_fork()

    def _run(
        self, segment: SegmentInfo, moves: Sequence[RangeCopy], deadline: float, *, is_write: bool
    ) -> None:
        if self._is_closed:
            raise ClosedError("the transport was closed", quiesced=1)
        check_moves(segment, moves)
        if not moves:
            return
        if uptime() >= deadline:
            raise deadline_exceeded(segment)
        if not is_write:
            self._check_quarantine(moves)
        with self._tcp.lend(segment, deadline) as witness:
            witness.handshake(deadline)
            self._move(segment, moves, deadline, witness, is_write=is_write)
            if not witness.is_open:  # the node fenced, left, or only closed a connection
                witness.handshake(deadline)

    def _move(
        self,
        segment: SegmentInfo,
        moves: Sequence[RangeCopy],
        deadline: float,
        witness: ClientConnection,
        *,
        is_write: bool,
    ) -> None:
        stop = current()
        with self._acquire_session(segment) as session:
            call = EngineCall(
                session,
                segment,
                deadline,
                is_write=is_write,
                threads=self._threads,
                # The engine's writes to registered memory cannot be interrupted.
                is_closed=lambda: (
                    self._is_closed or (stop is not None and stop.is_set and not self._registered)
                ),
                is_registered=self._is_registered,
            )
            error: KVStoreError | None = None
            try:
                call.run(moves)
            except TransferFailedError:
                error = self._failure_reason(segment, witness, deadline)
            except (DeadlineExceededError, ClosedError) as refused:
                is_late = isinstance(refused, DeadlineExceededError)
                error = deadline_exceeded(segment) if is_late else refused
            except BaseException:  # such as a signal's; the caller stops waiting
                if not is_write:
                    self._quarantine(call.in_doubt, session)
                raise
            finally:
                if not call.is_quiesced:
                    self._retire(session)
        if error is None:
            return
        if call.in_doubt and not is_write and not session.ended.wait(COPIES_WAIT_S):
            self._quarantine(call.in_doubt, session)
            raise MemoryQuarantinedError(
                f"a read from node {segment.node!r} was abandoned, and may still write to the "
                "registered memory it was for",
                advice="Do not use that memory until client.unregister() of it has returned.",
                node=segment.node,
            ) from error
        error.fields["quiesced"] = int(call.is_quiesced or not is_write)
        raise error

    @contextmanager
    def _acquire_session(self, segment: SegmentInfo) -> Iterator[EngineSession]:
        """Yield the present session, or a new one if that must not be used any more."""
        assert segment.engine is not None
        with self._changing:
            session = self._session
            is_tcp = self._settings.protocol == "tcp"
            if session is None or (is_tcp and session.idle_s(segment.engine.name) > IDLE_S):
                if self._is_closed:
                    raise ClosedError("the transport was closed", quiesced=1)
                self._session = None
                try:
                    self._session = self._new_session(session)
                except TransferEngineError as error:
                    raise self._not_made(segment, error) from error
            session = self._session
            assert session is not None
            session.enter()
        try:
            yield session
        finally:
            session.leave()

    def _new_session(self, old: EngineSession | None) -> EngineSession:
        """Return a session to replace ``old``, which ends now or with its last user."""
        self._retired = [call for call in self._retired if not call.ended.is_set()]
        if len(self._retired) >= RETIRED_MAX:
            raise BusyError(
                f"{RETIRED_MAX} transfer engines wait for abandoned transfers",
                advice="Try again in some seconds; look at the nodes: kvstore status",
                quiesced=1,
            )
        if old is not None:
            self._retired.append(old)
            old.leave()
        buffer = ChunkBuffer(self._buffer_bytes)
        try:
            return EngineSession(self._settings, self._host(), buffer, self._registered)
        except BaseException:
            buffer.close()
            raise

    def _not_made(self, segment: SegmentInfo, error: TransferEngineError) -> NodeUnreachableError:
        self._is_broken(error)
        return NodeUnreachableError(
            f"no transfer engine for node {segment.node!r}: {error.message}",
            advice=error.advice,
            node=segment.node,
            quiesced=1,
        )

    def _is_broken(self, error: TransferEngineError) -> None:
        self._broken_until = uptime() + BROKEN_S
        log.error("transfer_engine_not_used error=%s", error)

    def _retire(self, session: EngineSession) -> None:
        """Retire a session after a failed or abandoned transfer: no part of it is used again."""
        with self._changing:
            if session.is_retired:
                return
            session.is_retired = True
            self._retired.append(session)
            if self._session is session:
                self._session = None
        log.info("transfer_engine_retired name=%s", session.engine.name)
        session.leave()

    def _failure_reason(
        self, segment: SegmentInfo, witness: ClientConnection, deadline: float
    ) -> KVStoreError:
        """Return the error for a failed transfer, as the node's data server explains it."""
        try:
            witness.close()
            witness.handshake(deadline)
        except KVStoreError as error:
            return error
        assert segment.engine is not None
        self._unreached[segment.engine.name] = uptime() + UNREACHED_S
        log.warning("transfer_failed node=%s engine=%s", segment.node, segment.engine.name)
        return NodeUnreachableError(
            f"the transfer engine failed to copy bytes of node {segment.node!r}, which replies",
            advice="Check that the engine's own ports are open between the hosts: "
            "docs/transports.md.",
            node=segment.node,
        )

    def _is_unreached(self, name: str) -> bool:
        until = self._unreached.get(name)
        if until is not None and until <= uptime():
            self._unreached.pop(name, None)
            return False
        return until is not None

    def _is_registered(self, start: int, length: int) -> bool:
        return self._registered.holding(start, length) is not None

    def _quarantine(self, buffers: Sequence[memoryview], session: EngineSession) -> None:
        with self._changing:
            self._in_doubt += [(Region.of(buffer), session) for buffer in buffers]

    def _check_quarantine(self, moves: Sequence[RangeCopy]) -> None:
        if not self._in_doubt:
            return
        with self._changing:
            self._in_doubt = [doubt for doubt in self._in_doubt if not doubt[1].ended.is_set()]
            doubts = list(self._in_doubt)
        for copy in moves:
            start = address_of(copy.buffer)
            for region, _ in doubts:
                if region.overlaps(start, start + len(copy.buffer)):
                    raise MemoryQuarantinedError(
                        "an abandoned read may still write to this memory",
                        advice="Do not use it until client.unregister() of it has returned.",
                    )
