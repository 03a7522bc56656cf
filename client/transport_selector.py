"""The transport selector: each segment is served by the first transport that reaches it."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvstore.calls import SegmentInfo
from kvstore.client import fork_support
from kvstore.client.devices import ClientDevices
from kvstore.client.flows.steps import Transfer
from kvstore.client.leases.lease_table import Mounted
from kvstore.client.registered_memory import RegisteredBuffers
from kvstore.device import staging_ring
from kvstore.device.device import Device
from kvstore.errors import (
    ClosedError,
    DeadlineExceededError,
    KVStoreError,
    NodeUnreachableError,
    SegmentUnmountedError,
    without_frames,
)
from kvstore.memory.process_memory import address_of
from kvstore.runtime.cancellation import CancelToken, current
from kvstore.runtime.tasks import CLOSE_S, Job, ThreadPool, join_all, start_thread
from kvstore.security.data_port_tls import ClientTls
from kvstore.transport import tcp_client
from kvstore.transport.base import Transport
from kvstore.transport.common import invalid_range, segment_unmounted
from kvstore.transport.device import DeviceTransport
from kvstore.transport.shm import ShmTransport
from kvstore.transport.tcp import TcpTransport

if TYPE_CHECKING:
    from kvstore.transport.mooncake.transport import MooncakeTransport

log = logging.getLogger("kvstore.client")

SWEEP_S = 1.0
"""Interval in which mappings and connections of departed segments are dropped."""

SEGMENTS_AT_ONCE = 8
"""Nodes with which one batch exchanges bytes in parallel."""


class TransportSelector:
    """The transports of one client. Threads: any."""

    def __init__(
        self,
        names: Sequence[str],
        engine: Callable[[], MooncakeTransport] | None = None,
        client_number: int = 0,
        *,
        tls: Callable[[], ClientTls | None] = lambda: None,
    ) -> None:
        """Create the transports.

        Args:
            engine: creates the transport "mooncake"; None: unavailable.
            client_number: as ``Context.client_number``.
            tls: returns our identity for nodes that encrypt, or None; called again after a fork.

        Raises:
            TransferEngineError: there is no engine, and no other transport.
        """
        self._names = names
        self._new_engine = engine if "mooncake" in names else None
        self._new_tls = tls
        self._make(client_number)
        if self._engine is not None and len(self._transports) == 1:
            self._engine.start()

    def _make(self, client_number: int) -> None:
        self._engine = None if self._new_engine is None else self._new_engine()
        kinds: dict[str, Callable[[], Sequence[Transport | None]]] = {
            "shm": lambda: (ShmTransport(), DeviceTransport(staging_ring.RING_BYTES)),
            "mooncake": lambda: (self._engine,),
            "tcp": lambda: (
                TcpTransport(client_number, stall_s=tcp_client.STALL_S, tls=self._new_tls()),
            ),
        }
        made = (transport for name in self._names for transport in kinds[name]())
        self._transports: list[Transport] = [
            transport for transport in made if transport is not None
        ]
        self.devices = ClientDevices()
        self.registered = RegisteredBuffers()
        self.moved: dict[str, int] = {}
        self.read_bytes: dict[str, int] = {}
        self._workers = ThreadPool("kvstore-move", SEGMENTS_AT_ONCE)
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._sweeping: threading.Thread | None = None

    def move(self, transfers: Sequence[Transfer], deadline: float) -> list[KVStoreError | None]:
        """Run all transfers, those of nodes in parallel; one result each. The thread's
        ``CancelToken`` aborts them. The caller's memory is not touched afterwards."""
        if len(transfers) == 1:
            return [self._move_one(transfers[0], deadline)]
        stop = current() or CancelToken()
        jobs = [
            Job(functools.partial(self._move_stoppable, transfer, deadline, stop))
            for transfer in transfers
        ]
        try:
            for job in jobs:
                self._workers.begin(job)
            return [job.result() for job in jobs]
        except BaseException:
            _wait_or_cancel(jobs, stop)
            raise

    def readonly_memory(self, segment: SegmentInfo) -> memoryview | None:
        if self._sweeping is None:
            self._start_sweeping()
        for transport in self._transports:
            if transport.maps and transport.can_reach(segment):
                return transport.readonly_memory(segment)
        return None

    def memory(self, segment: SegmentInfo) -> memoryview:
        """Return the mapped memory of a segment. Raises SegmentUnmountedError."""
        for transport in self._transports:
            if transport.maps and transport.can_reach(segment):
                try:
                    return transport.memory(segment)
                except SegmentUnmountedError:
                    transport.forget(segment)
                    raise
        raise segment_unmounted(segment)

    def view(self, segment: SegmentInfo, offset: int, length: int) -> memoryview | None:
        """Return writable memory, or None. Raises SegmentUnmountedError, InvalidRangeError."""
        if not any(
            transport.maps and transport.can_write(segment) for transport in self._transports
        ):
            return None
        memory = self.memory(segment)
        if offset + length > len(memory):
            raise invalid_range(offset, length, len(memory))
        return memory[offset : offset + length]

    def watch(self, segment: SegmentInfo) -> Mounted:
        """Return a function that checks whether the mount of a segment is unchanged."""
        for transport in self._transports:
            if (mounted := transport.mount_checker(segment)) is not None:
                return mounted
        return lambda: False  # it was unmounted meanwhile

    def is_on(self, segment: SegmentInfo, device: Device) -> bool:
        """Return whether a ``DeviceTransport`` reaches the segment."""
        for transport in self._transports:
            if isinstance(transport, DeviceTransport) and transport.can_reach(segment):
                if self._sweeping is None:
                    self._start_sweeping()
                return transport.is_on(segment, device)
        return False

    @property
    def not_mapped(self) -> dict[str, str]:
        mapping = [
            transport for transport in self._transports if isinstance(transport, ShmTransport)
        ]
        return {
            node: reason
            for transport in mapping
            for node, reason in list(transport.not_mapped.items())
        }

    def register(self, memory: memoryview) -> None:
        """As ``Client.register``; only the transfer engine needs it."""
        self.registered.add(memory)
        try:
            if self._engine is not None:
                self._engine.register(memory)
        except BaseException:
            self.registered.take(address_of(memory))
            raise

    def unregister(self, memory: memoryview | int) -> None:
        if isinstance(memory, int):
            whole = self.registered.take(memory)
        else:  # unknown memory is passed on: an aborted transfer may still write to it
            whole = self.registered.take(address_of(memory)) or memory
        if whole is not None and self._engine is not None:
            self._engine.unregister(whole)

    def reset_after_fork(self, client_number: int) -> None:
        """Reset in the child of a fork. The child's transfer engine starts on demand."""
        for transport in self._transports:
            transport.close_after_fork()
        fork_support.leak_deliberately((self._engine, self._workers, self.devices))
        self._make(client_number)

    def drop_connections(self) -> None:
        """Reconnect at the next calls, after a foreign exception interrupted a call."""
        for transport in self._transports:
            transport.drop_connections()

    def close(self) -> None:
        """Close all transports. Idempotent. Waits for ``CLOSE_S`` at most, twice."""
        with self._lock:
            self._closing.set()
        if self._sweeping is not None:
            join_all([self._sweeping], CLOSE_S)
        for transport in self._transports:
            transport.close()
        self._workers.close(CLOSE_S)
        self.devices.close()

    def _move_one(self, transfer: Transfer, deadline: float) -> KVStoreError | None:
        is_final = True
        if transfer.deadline is not None and transfer.deadline < deadline:
            deadline, is_final = transfer.deadline, False
        segment = transfer.segment
        if self._sweeping is None:
            self._start_sweeping()
        try:
            for transport in self._transports:
                if transport.can_write(segment) if transfer.write else transport.can_reach(segment):
                    self.moved[transport.name] = self.moved.get(transport.name, 0) + 1
                    transfer.run(transport, deadline)
                    if not transfer.write:
                        before = self.read_bytes.get(transport.name, 0)
                        self.read_bytes[transport.name] = before + transfer.size()
                    return None
        except KVStoreError as error:
            stop = current()
            if stop is not None and stop.is_set:  # the caller cancelled; the node did not fail
                return ClosedError(
                    "the call was cancelled", quiesced=error.fields.get("quiesced", 0)
                )
            # A caller's deadline is no sign of a bad segment, which other calls are using.
            if isinstance(error, SegmentUnmountedError | NodeUnreachableError):
                for transport in self._transports:
                    transport.forget(segment)
            if isinstance(error, DeadlineExceededError) and is_final:
                error.fields["final"] = 1  # no time is left for another node
            return without_frames(error)  # its frames keep memory that is to be unmapped
        names = ", ".join(transport.name for transport in self._transports)
        return NodeUnreachableError(
            f"none of the transports ({names}) reaches node {segment.node} "
            f"({segment.address or segment.host})",
            advice="Add tcp to the transports, or run on the node's host.",
            node=segment.node,
            address=segment.address,
            tried=0,
            quiesced=1,
        )

    def _start_sweeping(self) -> None:
        if not self._closing.is_set():
            start_thread("kvstore-sweep", self._sweep_forever)

    def _sweep_forever(self) -> None:
        """Drop old mappings, which keep memory of restarted nodes allocated."""
        with self._lock:
            if self._sweeping is not None:  # several callers have started it
                return
            self._sweeping = threading.current_thread()
        while not self._closing.wait(SWEEP_S):
            for sweep in (*(transport.sweep for transport in self._transports), self.devices.sweep):
                try:
                    sweep()
                except Exception:  # a bug; the next round continues
                    log.exception("sweep_broken part=%s", sweep.__qualname__)

    def _move_stoppable(
        self, transfer: Transfer, deadline: float, stop: CancelToken
    ) -> KVStoreError | None:
        with stop.here():
            if stop.is_set:
                return ClosedError("the call was cancelled", quiesced=1)
            return self._move_one(transfer, deadline)


def _wait_or_cancel(jobs: Sequence[Job[KVStoreError | None]], stop: CancelToken) -> None:
    """Wait until no transfer touches the caller's memory, even if a signal raises."""
    while not (stop.is_set and all(job.is_done for job in jobs)):
        try:
            stop.set()
            for job in jobs:
                job.cancel()
            for job in jobs:
                job.wait()
        except BaseException:  # noqa: BLE001, S110  # the first one is being raised
            pass
