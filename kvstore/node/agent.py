"""The stream of a node to its master: join, heartbeats, inventory, completed wipes.

    create segment, serve it ──► join ──► report objects, beat …  ──► fence, leave
                                  ▲  ▲      │ stream broken, or the master is silent
                                  │  └──────┤ resume: the master still knows this node
                                  └─ fence ◄┘ refused: a new master, or it declared this node dead

*Fencing* stops all writes under older grants, and all reads: the node raises the segment's
generation, which stops clients that use shared memory and refuses new data connections of the older
generation; it closes open connections; and it moves a transfer engine's segment to another address.
Only then does the node leave, or join anew and report its objects (``kvstore.node.inventory``). The
master grants no space on the node before it knows all of its objects and the leases of the previous
master have ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Final

from kvstore._version import __version__
from kvstore.calls import (
    MasterAccepted,
    MasterClaimsAck,
    MasterHeartbeat,
    MasterMessage,
    MasterWipe,
    NodeHeartbeat,
    NodeJoin,
    NodeLeave,
    NodeMessage,
    NodeWipeDone,
)
from kvstore.errors import (
    DrainedError,
    KVStoreError,
    ProtocolError,
    SegmentGoneError,
    UnavailableError,
)
from kvstore.limits import (
    CLAIMS_PER_MESSAGE_MAX,
    CLAIMS_UNANSWERED_MAX,
    PROTOCOL_VERSION,
)
from kvstore.memory.header import SegmentOwner
from kvstore.memory.medium import Medium
from kvstore.memory.segment_base import is_plausible_epoch
from kvstore.memory.shm_entries import ENTRY_GONE
from kvstore.node import inventory
from kvstore.node.master_discovery import MasterDiscovery
from kvstore.node.session import NodeStream
from kvstore.runtime.clock import uptime_ms
from kvstore.runtime.tasks import start_task
from kvstore.security.credentials import Credentials
from kvstore.security.descriptor_server import DescriptorServer
from kvstore.transport.mooncake.server import EngineServer
from kvstore.transport.tcp_server import DataServer

log = logging.getLogger("kvstore.node")

BACKOFF_S: Final = (0.05, 0.1, 0.2)
"""Pauses between attempts to reach a master; the last one is repeated. A restarted master waits
somewhat longer than that for its nodes (``JOINING_MS``)."""

PAUSE_SEVERAL_S: Final = 0.25
"""The longest pause if there are several masters, of which one will lead within seconds."""

SILENCE_SEVERAL_S: Final = 2.0
"""How long one of several masters may be silent before the node tries the others. If the silent
master still leads, the stream is resumed."""

CONNECT_SEVERAL_S: Final = 1.0
"""How long connecting to one of several masters may take."""

WORKING_S: Final = 5.0
"""How often a node reports that it is still reading or verifying its memory."""

JOIN_TIMEOUT_S: Final = 5.0
LEAVE_TIMEOUT_S: Final = 1.0


class NodeAgent:
    """Keeps one segment joined to a master until ``stop``. Use it in one event loop's thread."""

    def __init__(
        self,
        *,
        name: str,
        host: str,
        master: str,
        segment: Medium,
        server: DataServer,
        address: str,
        engine: EngineServer | None = None,
        handover: DescriptorServer | None = None,
        owner: SegmentOwner | None = None,
        joined: Callable[[MasterAccepted], None] = lambda accepted: None,
        waiting: Callable[[KVStoreError], None] = lambda error: None,
        repair: Callable[[], None] = lambda: None,
        credentials: Credentials | None = None,
    ) -> None:
        """
        Args:
            name: unique among the master's nodes.
            host: ``kvstore.runtime.host.host_id()``.
            master: ``host:port``; or several addresses, separated by commas, which are tried in
                turn; or ``etcd://...``, which names the leader.
            segment, server, engine, handover: the caller's, who closes them after ``run``.
            address: where clients find ``server``.
            owner: the cluster of this node, as far as its settings say.
            joined: called at each join that is not a resumption.
            waiting: called when the master is not reachable, once per outage.
            repair: called when the master wants more replicas of objects in this node's memory.
        """
        self._name = name
        self._host = host
        self._masters = MasterDiscovery(master)
        self._segment = segment
        self._server = server
        self._address = address
        self._engine = engine
        self._handover = handover
        self._owner = owner or SegmentOwner()
        self._joined = joined
        self._waiting = waiting
        self._repair = repair
        self._credentials = credentials
        self._epoch = 0
        """The epoch of the master to resume with; 0: join anew."""
        self._epoch_max = 0
        """The highest epoch that this node has joined; a master of a lower one is refused."""
        self._told_waiting = False
        """Whether ``waiting`` was called for this outage."""
        self._fresh = not segment.attached
        """Whether no master has ever granted an extent of the segment."""
        self._unverified = segment.attached
        """Whether the segment's bytes may have changed while no node served it."""
        self._entry_gone = False
        """Whether the entry of the segment has been removed: new clients cannot map the memory."""
        self._known = False
        """Whether a master has accepted this node."""
        self._is_joined = False
        self._untold = False
        """Whether the joined master does not know all objects in the segment yet."""
        self._unanswered = False
        """Whether a join had no answer: a master may have accepted it, and may grant extents."""
        self._given_up: set[inventory.Attempt] = set()
        """Puts whose bytes may still arrive although a master has ordered to wipe them."""
        self._looking: asyncio.Task[list[inventory.Found]] | None = None
        """Reads or verifies the memory in a thread, which cannot be cancelled."""
        self.drained = False
        """Whether ``run`` ended because the node's objects have been moved elsewhere."""
        self._stopping = asyncio.Event()
        self._sending = asyncio.Lock()
        """A stream takes one message at a time: beats, answers and the leave message share it."""

    @property
    def is_joined(self) -> bool:
        """Whether a master has this node now, as far as the node knows."""
        return self._is_joined

    def stop(self) -> None:
        """Makes ``run`` leave the master and return, within ``LEAVE_TIMEOUT_S``."""
        self._stopping.set()

    async def run(self) -> None:
        """Runs until ``stop``, or until the master says that the node is drained.

        Raises:
            NodeNameTakenError, ClusterMismatchError, ProtocolError, InvalidArgumentError: the
                master refused the first join, and would refuse every further one.
        """
        failures = 0
        several = self._masters.several
        while not self._stopping.is_set():
            started = time.monotonic()
            master, at_once = "", False
            try:
                master = await self._masters.find()
                await self._session(master)
            except SegmentGoneError as error:
                log.info("node_not_resumed node=%s reason=%s", self._name, error.message)
                self._epoch = 0
                await asyncio.to_thread(self._fence)
                continue
            except DrainedError:
                log.info("node_drained node=%s", self._name)
                self.drained = True
                return
            except KVStoreError as error:
                if not isinstance(error, UnavailableError) and not self._known:
                    raise
                at_once = self._masters.failed(master, error)
                if not self._told_waiting and not at_once:
                    self._told_waiting = True
                    self._waiting(error)
            if self._stopping.is_set():
                return
            if self._unanswered:
                self._unanswered = False
                await asyncio.to_thread(self._fence)
            failures = failures + 1 if time.monotonic() - started < 1.0 else 1
            if at_once:
                failures -= 1
                continue
            pause = BACKOFF_S[min(failures, len(BACKOFF_S)) - 1]
            pause = min(pause, PAUSE_SEVERAL_S) if several else pause
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause)

    def _fence(self) -> None:
        self._segment.bump_generation()
        self._server.fence()
        if self._engine is not None:
            self._engine.fence()
        log.info("node_fenced node=%s generation=%d", self._name, self._segment.generation)

    async def _session(self, master: str) -> None:
        """Runs one stream, from the join to its end.

        Raises:
            SegmentGoneError: the master has forgotten this segment; fence, then join anew.
            KVStoreError: the stream broke, or the master refused the node.
        """
        segment = self._segment
        async with NodeStream(master, self._credentials) as link:
            await link.connect(CONNECT_SEVERAL_S if self._masters.several else JOIN_TIMEOUT_S)
            offer = segment.make_offer()._replace(
                address=self._address,
                fresh=self._fresh,
                engine=None if self._engine is None else self._engine.address,
                descriptor_socket="" if self._handover is None else self._handover.name,
                takes_capabilities=self._server.takes_capabilities,
                encrypts=self._server.encrypts,
            )
            join = NodeJoin(
                name=self._name,
                host=self._host,
                protocol=PROTOCOL_VERSION,
                resume_epoch=self._epoch,
                segments=[offer],
                highest_epoch=max(self._epoch_max, segment.epoch),
                cluster=self._owner.cluster or segment.owner.cluster,
                version=__version__,
                clock_ms=uptime_ms(),
            )
            accepted = await self._reply_to(link, join)
            if not isinstance(accepted, MasterAccepted):
                raise ProtocolError(f"the master answered a join with {accepted!r:.80}")
            if accepted.epoch < self._epoch_max and is_plausible_epoch(self._epoch_max):
                # This master may have granted extents meanwhile; those grants must not hold.
                self._fresh, self._unanswered = False, True
                raise UnavailableError(
                    f"the master at {master} has epoch {accepted.epoch}, and this node "
                    f"has joined one "
                    f"of epoch {self._epoch_max} before",
                    advice="Its time is over.",
                )
            self._epoch_max = accepted.epoch
            segment.keep_epoch(accepted.epoch)
            owner = self._owner._replace(cluster=accepted.cluster or join.cluster)
            if owner != segment.owner:
                segment.keep_owner(owner)
            self._masters.joined()
            self._told_waiting = False
            resumed = self._epoch == accepted.epoch
            self._epoch = accepted.epoch
            self._fresh = False
            self._known = True
            log.info("node_joined node=%s epoch=%d resumed=%s", self._name, accepted.epoch, resumed)
            if not resumed:
                self._untold = not offer.fresh
                self._joined(accepted)
            answers = asyncio.Semaphore(CLAIMS_UNANSWERED_MAX)
            silence_s = accepted.dead_ms / 1000
            if self._masters.several:
                silence_s = min(silence_s, SILENCE_SEVERAL_S)
            beating = start_task(
                "beat", self._send_heartbeat(link, accepted), expected=KVStoreError
            )
            reading = start_task(
                "listen",
                self._process_master_messages(link, answers, silence_s),
                expected=KVStoreError,
            )
            telling = start_task("tell", self._send_inventory(link, answers), expected=KVStoreError)
            stopping = asyncio.create_task(self._stopping.wait())
            tasks = (beating, reading, telling, stopping)
            self._is_joined = True
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                if stopping.done():
                    reading.cancel()
                    telling.cancel()
                    await self._leave(link)
                    return
            finally:
                self._is_joined = False
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                if self._looking is not None:  # one at a time: it may stamp what it finds
                    await asyncio.wait((self._looking,))
            for task in (reading, beating, telling):
                if task.done() and not task.cancelled() and task.exception() is not None:
                    raise task.exception() or AssertionError
        raise UnavailableError("the master closed the stream")

    async def _reply_to(self, link: NodeStream, join: NodeJoin) -> MasterMessage:
        """The master's answer to ``join``. A master that does not answer may have accepted the join
        all the same and may grant extents: then the node is not fresh, and ``run`` fences."""
        await link.send(join)
        try:
            return await asyncio.wait_for(link.receive(), JOIN_TIMEOUT_S)
        except (UnavailableError, TimeoutError) as error:
            if not join.resume_epoch:
                self._fresh, self._unanswered = False, True
            if isinstance(error, UnavailableError):
                raise
            raise UnavailableError(
                f"the master has not answered a join for {JOIN_TIMEOUT_S:.0f} s"
            ) from None

    async def _send(self, link: NodeStream, message: NodeMessage) -> None:
        async with self._sending:
            await link.send(message)

    async def _leave(self, link: NodeStream) -> None:
        """Fences, sends the leave message, and waits until the master has received it. From then
        on a removal waits for no reader of this memory. If fencing fails, no message is sent."""
        try:
            async with asyncio.timeout(LEAVE_TIMEOUT_S):
                await asyncio.to_thread(self._fence)
                await self._send(link, NodeLeave())
                await link.done_sending()
                while True:
                    await link.receive()
        except (KVStoreError, TimeoutError) as error:
            log.debug("node_left node=%s stream_ended_by=%r", self._name, error)

    async def _send_heartbeat(self, link: NodeStream, accepted: MasterAccepted) -> None:
        number = 0
        while True:
            number += 1
            moved = self._server.counters()
            await self._send(
                link,
                NodeHeartbeat(
                    number,
                    self._report_shm_entry_missing(),
                    uptime_ms(),
                    read_bytes=moved.read_bytes,
                    written_bytes=moved.written_bytes,
                ),
            )
            await asyncio.sleep(accepted.heartbeat_ms / 1000)

    def _report_shm_entry_missing(self) -> bool:
        """Looks whether somebody has removed the entry of the memory; logs it once."""
        if not self._entry_gone and not self._segment.has_entry():
            self._entry_gone = True
            log.error(
                "shm_entry_missing node=%s path=%s: %s", self._name, self._segment.path, ENTRY_GONE
            )
        return self._entry_gone

    async def _send_inventory(self, link: NodeStream, answers: asyncio.Semaphore) -> None:
        """Reports the node's objects, if the master needs that; then waits for ever."""
        if self._untold:
            started = time.monotonic()
            told = found = 0
            begun = False
            async for chunk, of, last in self._chunks():
                await answers.acquire()
                await self._send(link, inventory.claims(0, chunk, first=not begun, last=last))
                begun = True
                told += len(chunk)
                found += of
            for _ in range(CLAIMS_UNANSWERED_MAX):
                await answers.acquire()
            self._untold = self._unverified = False
            log.info(
                "inventory_reported node=%s objects=%d corrupt=%d seconds=%.2f",
                self._name,
                told,
                found - told,
                time.monotonic() - started,
            )
        await asyncio.Event().wait()

    async def _chunks(self) -> AsyncIterator[tuple[list[inventory.Found], int, bool]]:
        """Yields the objects of one message, their number in all, and whether this is the last.
        Yields no objects every ``WORKING_S`` while memory is read: a master drops a silent node."""
        segment, rows = self._segment, CLAIMS_PER_MESSAGE_MAX
        given_up, self._given_up = self._given_up, set()
        looking = asyncio.to_thread(inventory.build_inventory, segment, given_up)
        taking = self._looking = start_task("inventory", looking)
        while not (await asyncio.wait((taking,), timeout=WORKING_S))[0]:
            yield [], 0, False
        found = taking.result()
        for start in range(0, max(1, len(found)), rows):
            chunk = found[start : start + rows]
            good = chunk
            if self._unverified:
                looking = asyncio.to_thread(inventory.verified, segment, chunk)
                checking = self._looking = start_task("inventory", looking)
                while not (await asyncio.wait((checking,), timeout=WORKING_S))[0]:
                    yield [], 0, False
                good = checking.result()
            yield good, len(chunk), start + rows >= len(found)

    async def _process_master_messages(
        self, link: NodeStream, answers: asyncio.Semaphore, silence_s: float
    ) -> None:
        """Carries out the master's orders. A master echoes each beat, so a silent one is gone."""
        while True:
            try:
                message = await asyncio.wait_for(link.receive(), silence_s)
            except TimeoutError:
                raise UnavailableError(
                    f"the master has been silent for {silence_s:.0f} s"
                ) from None
            match message:
                case MasterHeartbeat(repair=wanted, rejected_holders=refused):
                    if ended := self._server.reject_holders(refused):
                        log.info("holders_refused node=%s connections=%d", self._name, ended)
                    if self._handover is not None:
                        self._handover.reject_holders(refused)
                    if wanted:
                        self._repair()
                case MasterClaimsAck():
                    answers.release()
                case MasterWipe():
                    await self._wipe(message)
                    await self._send(link, NodeWipeDone(message.wipe_seq))
                case _:
                    raise ProtocolError(f"unexpected {type(message).__name__} from the master")

    async def _wipe(self, order: MasterWipe) -> None:
        """Wipes extents as ordered. Bytes of a put that was given up may still be on their way, so
        the connections that carry them are ended first. A writer through shared memory cannot be
        stopped: what it writes is wiped when the master orders it once more, or before the node
        reports to the next master.

        Raises:
            InternalError: a connection did not end. Nothing is wiped; the session ends and is
                resumed, and then the master repeats its orders.
        """
        if order.uuid != self._segment.uuid:
            return
        attempts = zip(order.offsets, order.epochs, order.counters, strict=True)
        if order.disconnect_clients:
            self._given_up.update(attempts)
            writers = list(zip(order.disconnect_clients, order.disconnect_connections, strict=True))
            cut = await asyncio.to_thread(self._server.close_writers, writers)
            log.info("connections_cut node=%s writers=%d cut=%d", self._name, len(writers), cut)
        elif self._given_up:
            self._given_up.difference_update(attempts)
        if order.offsets and self._server.takes_capabilities:
            await self._wipe_and_revoke(order)
        else:
            self._segment.wipe(order.offsets, order.epochs, order.counters)
        self._segment.keep_removal_watermark(order.removal_watermark)

    async def _wipe_and_revoke(self, order: MasterWipe) -> None:
        """Wipes and zeroes extents as ordered, in a thread. Capabilities from before the order give
        no right to write to them any more.

        A cancelled call returns when the thread has ended: after the next order, or in the next
        session, the extents may belong to other objects.
        """
        is_over = threading.Event()

        def run() -> None:
            late = self._server.revoke_writes(order.uuid, order.offsets, order.wipe_seq)
            if late:
                log.warning("writes_revoked node=%s connections=%d", self._name, late)
            self._segment.wipe(order.offsets, order.epochs, order.counters)
            if order.lengths:
                self._segment.zero(zip(order.offsets, order.lengths, strict=True), is_over.is_set)

        running = start_task("wipe", asyncio.to_thread(run), expected=KVStoreError)
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            is_over.set()
            await asyncio.wait((running,))
            raise
