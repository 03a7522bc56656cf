"""The transports of a client, and which of them serves a segment: the first that reaches it."""

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
    SegmentGoneError,
    without_frames,
)
from kvstore.memory.process_memory import address_of
from kvstore.runtime.cancellation import CancelToken, current
from kvstore.runtime.tasks import CLOSE_S, Job, ThreadPool, join_all, start_thread
from kvstore.security.data_port_tls import ClientTls
from kvstore.transport import tcp_client
from kvstore.transport.base import Transport
from kvstore.transport.common import invalid_range, segment_gone
from kvstore.transport.device import DeviceTransport
from kvstore.transport.shm import ShmTransport
from kvstore.transport.tcp import TcpTransport

if TYPE_CHECKING:
    from kvstore.transport.mooncake.transport import MooncakeTransport

log = logging.getLogger("kvstore.client")

SWEEP_S = 1.0
"""How often the client drops mappings and connections whose segments are gone."""

SEGMENTS_AT_ONCE = 8
"""Nodes with which one batch exchanges bytes in parallel."""


class TransportSelector:
    """Moves the bytes of transfers. Threads: any."""

    def __init__(
        self,
        names: Sequence[str],
        engine: Callable[[], MooncakeTransport] | None = None,
        client_number: int = 0,
        *,
        tls: Callable[[], ClientTls | None] = lambda: None,
    ) -> None:
        """
        Args:
            engine: makes the transport "mooncake"; None: this client has none.
            client_number: as ``Context.client_number``.
            tls: our identity, for nodes that encrypt; None: we have none. Asked again in the child
                of a fork.

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
        made = (each for name in self._names for each in kinds[name]())
        self._transports: list[Transport] = [each for each in made if each is not None]
        self.devices = ClientDevices()
        self.registered = RegisteredBuffers()
        self.moved: dict[str, int] = {}
        self.read_bytes: dict[str, int] = {}
        """Bytes read, by transport."""
        self._workers = ThreadPool("kvstore-move", SEGMENTS_AT_ONCE)
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._sweeping: threading.Thread | None = None

    def move(self, transfers: Sequence[Transfer], deadline: float) -> list[KVStoreError | None]:
        """Carries out all transfers, those of different nodes in parallel; one result each.

        However it ends, the caller's memory is not touched afterwards. The ``current`` stop of this
        thread cuts them short.
        """
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
        """As ``Transport.readonly_memory``."""
        if self._sweeping is None:
            self._start_sweeping()
        for transport in self._transports:
            if transport.maps and transport.can_reach(segment):
                return transport.readonly_memory(segment)
        return None

    def memory(self, segment: SegmentInfo) -> memoryview:
        """All of a segment that is in this address space.

        Raises:
            SegmentGoneError: it was unmounted, or mounted anew.
        """
        for transport in self._transports:
            if transport.maps and transport.can_reach(segment):
                try:
                    return transport.memory(segment)
                except SegmentGoneError:
                    transport.forget(segment)
                    raise
        raise segment_gone(segment)

    def view(self, segment: SegmentInfo, offset: int, length: int) -> memoryview | None:
        """The segment's own memory to write to, or None where it is not mapped here so.

        Raises:
            SegmentGoneError: it was unmounted, or mounted anew.
            InvalidRangeError
        """
        if not any(each.maps and each.can_write(segment) for each in self._transports):
            return None
        memory = self.memory(segment)
        if offset + length > len(memory):
            raise invalid_range(offset, length, len(memory))
        return memory[offset : offset + length]

    def watch(self, segment: SegmentInfo) -> Mounted:
        """A function that says whether a segment, seen by ``view``, is still mounted as it was."""
        for transport in self._transports:
            if (mounted := transport.mount_checker(segment)) is not None:
                return mounted
        return lambda: False  # it was unmounted since

    def is_on(self, segment: SegmentInfo, device: Device) -> bool:
        """Whether the segment is in this device's memory, and a ``DeviceTransport`` reaches it."""
        for transport in self._transports:
            if isinstance(transport, DeviceTransport) and transport.can_reach(segment):
                if self._sweeping is None:
                    self._start_sweeping()
                return transport.is_on(segment, device)
        return False

    @property
    def not_mapped(self) -> dict[str, str]:
        """As ``ClientStats.not_mapped``."""
        mapping = [each for each in self._transports if isinstance(each, ShmTransport)]
        return {node: why for each in mapping for node, why in list(each.not_mapped.items())}

    def register(self, memory: memoryview) -> None:
        """As ``Client.register``; transports other than the engine's need nothing."""
        self.registered.add(memory)
        try:
            if self._engine is not None:
                self._engine.register(memory)
        except BaseException:
            self.registered.take(address_of(memory))
            raise

    def unregister(self, memory: memoryview | int) -> None:
        """As ``Client.unregister``."""
        if isinstance(memory, int):
            whole = self.registered.take(memory)
        else:  # unknown memory is passed on: a transfer that was given up may still write to it
            whole = self.registered.take(address_of(memory)) or memory
        if whole is not None and self._engine is not None:
            self._engine.unregister(whole)

    def reset_after_fork(self, client_number: int) -> None:
        """As ``forks.watch`` has it. The child's transfer engine starts when it is needed."""
        for transport in self._transports:
            transport.close_after_fork()
        fork_support.leak_deliberately((self._engine, self._workers, self.devices))
        self._make(client_number)

    def drop_connections(self) -> None:
        """Called after a foreign exception has cut a call: the next calls connect anew."""
        for transport in self._transports:
            transport.drop_connections()

    def close(self) -> None:
        """Idempotent. Waits for ``CLOSE_S`` at most, twice."""
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
                return ClosedError("the call was cancelled", settled=error.fields.get("settled", 0))
            # A caller's deadline says nothing about the segment, which other calls are using.
            if isinstance(error, SegmentGoneError | NodeUnreachableError):
                for transport in self._transports:
                    transport.forget(segment)
            if isinstance(error, DeadlineExceededError) and is_final:
                error.fields["final"] = 1  # no time is left to go elsewhere
            return without_frames(error)  # its frames keep memory that is to be unmapped
        names = ", ".join(transport.name for transport in self._transports)
        return NodeUnreachableError(
            f"none of the transports ({names}) reaches node {segment.node} "
            f"({segment.address or segment.host})",
            advice="Add tcp to the transports, or run on the node's host.",
            node=segment.node,
            address=segment.address,
            tried=0,
            settled=1,
        )

    def _start_sweeping(self) -> None:
        if not self._closing.is_set():
            start_thread("kvstore-sweep", self._sweep_forever)

    def _sweep_forever(self) -> None:
        """Drops old mappings regularly. Memory of a restarted node stays allocated as long as a
        client maps it, and a client may make no call for hours."""
        with self._lock:
            if self._sweeping is not None:  # several callers have started it
                return
            self._sweeping = threading.current_thread()
        while not self._closing.wait(SWEEP_S):
            for sweep in (*(each.sweep for each in self._transports), self.devices.sweep):
                try:
                    sweep()
                except Exception:  # a bug; the next round goes on
                    log.exception("sweep_broken part=%s", sweep.__qualname__)

    def _move_stoppable(
        self, transfer: Transfer, deadline: float, stop: CancelToken
    ) -> KVStoreError | None:
        with stop.here():
            if stop.is_set:
                return ClosedError("the call was cancelled", settled=1)
            return self._move_one(transfer, deadline)


def _wait_or_cancel(jobs: Sequence[Job[KVStoreError | None]], stop: CancelToken) -> None:
    """Returns when no transfer touches the caller's memory any more, even if a signal raises."""
    while not (stop.is_set and all(job.is_done for job in jobs)):
        try:
            stop.set()
            for job in jobs:
                job.cancel()
            for job in jobs:
                job.wait()
        except BaseException:  # noqa: BLE001, S110  # the first one is being raised
            pass
