"""The stream of a node to its master: join, heartbeats, inventory, completed wipes.

    create segment, serve it ──► join ──► report objects, beat …  ──► fence, leave
                                  ▲  ▲      │ stream broken, or the master is silent
                                  │  └──────┤ resume: the master still knows this node
                                  └─ fence ◄┘ refused: a new master, or it declared this node dead

*Fencing* stops all reads, and all writes of older grants: the node raises the segment's generation,
which stops clients that map the memory and rejects new connections of the older generation, closes
open connections, and moves a transfer engine's segment to another address. Only then it leaves, or
joins again and reports its objects (``kvstore.node.inventory``). The master grants no space on the
node before it knows all objects and the leases of the previous master have ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, Final

from kvstore._version import __version__
from kvstore.calls import (
    MasterAccepted,
    MasterClaimsAck,
    MasterCopy,
    MasterHeartbeat,
    MasterMessage,
    MasterWipe,
    NodeHeartbeat,
    NodeJoin,
    NodeLeave,
    NodeWipeDone,
)
from kvstore.errors import (
    DrainedError,
    KVStoreError,
    ProtocolError,
    SegmentUnmountedError,
    UnavailableError,
)
from kvstore.limits import (
    CLAIMS_PER_MESSAGE_MAX,
    CLAIMS_UNANSWERED_MAX,
    PROTOCOL_VERSION,
)
from kvstore.memory.disk_file import HEADERS_PER_STEP, DiskFile
from kvstore.memory.header import SegmentOwner
from kvstore.memory.medium import Medium, is_plausible_epoch
from kvstore.memory.shm_entries import SHM_ENTRY_MISSING
from kvstore.node import inventory
from kvstore.node.disk_copier import DiskCopier
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
"""Pauses between attempts to reach a master; the last is repeated. A restarted master waits longer
for its nodes (``JOINING_MS``)."""

PAUSE_SEVERAL_S: Final = 0.25
"""The longest pause if there are several masters."""

SILENCE_SEVERAL_S: Final = 2.0
"""How long one of several masters may be silent before the node tries the others."""

CONNECT_SEVERAL_S: Final = 1.0
"""How long connecting to one of several masters may take."""

WORKING_S: Final = 5.0
"""The interval of empty messages while a node reads or verifies its memory."""

JOIN_TIMEOUT_S: Final = 5.0
LEAVE_TIMEOUT_S: Final = 1.0


class NodeAgent:
    """Keeps a segment joined to a master until ``stop``. Use it in one event loop's thread."""

    def __init__(
        self, *, name: str, host: str, master: str, segment: Medium, server: DataServer,
        address: str, engine: EngineServer | None = None,
        descriptor_server: DescriptorServer | None = None,
        owner: SegmentOwner | None = None,
        joined: Callable[[MasterAccepted], None] = lambda accepted: None,
        waiting: Callable[[KVStoreError], None] = lambda error: None,
        repair: Callable[[], None] = lambda: None, credentials: Credentials | None = None,
        disks: Sequence[DiskFile] = (),
    ) -> None:  # fmt: skip
        """
        Args:
            name: unique among the master's nodes.
            host: ``kvstore.runtime.host.host_id()``.
            master: ``host:port``; several of them, separated by commas; or ``etcd://...``.
            segment, server, engine, descriptor_server, disks: the caller closes them after ``run``.
            address: of ``server``, for clients.
            owner: the cluster of this node, by its settings.
            joined: called at each join that is not a resumption.
            waiting: called once per outage of the master.
            repair: called when the master requests more replicas of this node's objects.
        """
        self._name = name
        self._host = host
        self._masters = MasterDiscovery(master)
        self._segment = segment
        self._disks = list(disks)
        """Those that have not failed."""
        self._copier = DiskCopier(segment, disks)
        self._late_wipes: set[asyncio.Task[None]] = set()
        """Wipes of memory to which a disk still copies."""
        self._server = server
        self._address = address
        self._engine = engine
        self._descriptor_server = descriptor_server
        self._owner = owner or SegmentOwner()
        self._joined = joined
        self._waiting = waiting
        self._repair = repair
        self._credentials = credentials
        self._epoch = 0
        """The epoch of the master to resume with; 0: join again."""
        self._epoch_max = 0
        """The highest epoch that this node has joined; a master of a lower one is refused."""
        self._reported_waiting = False
        """Whether ``waiting`` was called for this outage."""
        self._fresh = not segment.attached
        """Whether no master has ever granted an extent of the segment."""
        self._fresh_disks = {disk.uuid for disk in disks if not disk.attached}
        self._unverified = segment.attached
        """Whether the segment's bytes may have changed while no node served it."""
        self._shm_entry_missing = False
        """Whether the entry was removed: new clients cannot map the memory."""
        self._known = False
        """Whether a master has accepted this node."""
        self._is_joined = False
        self._unreported: list[int] = []
        """The offered segments, by number, whose objects the joined master does not know yet."""
        self._is_unanswered = False
        """Whether a join had no reply: a master may have accepted it, and may grant extents."""
        self._given_up: set[inventory.Attempt] = set()
        """Abandoned puts whose bytes may still arrive after a wipe request."""
        self._inventory: asyncio.Task[list[inventory.Found]] | None = None
        """Reads or verifies the memory in a thread, which cannot be cancelled."""
        self.drained = False
        """Whether ``run`` ended because the node's objects have been moved elsewhere."""
        self._stopping = asyncio.Event()

    @property
    def is_joined(self) -> bool:
        """Whether a master has accepted this node, and its stream is open."""
        return self._is_joined

    def stop(self) -> None:
        """Ends ``run``, which leaves the master within ``LEAVE_TIMEOUT_S``."""
        self._stopping.set()

    async def run(self) -> None:
        """Runs until ``stop``, or until the node is drained.

        Raises:
            NodeNameTakenError, ClusterMismatchError, ProtocolError, InvalidArgumentError: the
                master rejected the first join, and would reject every other.
        """
        failures = 0
        several = self._masters.several
        while not self._stopping.is_set():
            started = time.monotonic()
            master, at_once = "", False
            try:
                master = await self._masters.find()
                await self._session(master)
            except SegmentUnmountedError as error:
                log.info("node_not_resumed node=%s reason=%s", self._name, error.message)
                self._epoch = 0
                await self._fence_all()
                continue
            except DrainedError:
                log.info("node_drained node=%s", self._name)
                self.drained = True
                return
            except KVStoreError as error:
                if not isinstance(error, UnavailableError) and not self._known:
                    raise
                at_once = self._masters.failed(master, error)
                if not self._reported_waiting and not at_once:
                    self._reported_waiting = True
                    self._waiting(error)
            if self._stopping.is_set():
                return
            if self._is_unanswered:
                self._is_unanswered = False
                await self._fence_all()
            failures = failures + 1 if time.monotonic() - started < 1.0 else 1
            if at_once:
                failures -= 1
                continue
            pause = BACKOFF_S[min(failures, len(BACKOFF_S)) - 1]
            pause = min(pause, PAUSE_SEVERAL_S) if several else pause
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause)

    async def _fence_all(self) -> None:
        """Fence, once nothing is copied between memory and disks any more."""
        await self._copier.idle()
        self._copier.forget_done()
        await asyncio.to_thread(self._fence)

    def _fence(self) -> None:
        for segment in (self._segment, *self._disks):
            segment.bump_generation()
        self._server.fence()
        if self._engine is not None:
            self._engine.fence()
        log.info("node_fenced node=%s generation=%d", self._name, self._segment.generation)

    async def _session(self, master: str) -> None:
        """Runs one stream, from the join to its end.

        Raises:
            SegmentUnmountedError: the master does not know this segment; fence, then join again.
            KVStoreError: the stream ended, or the master rejected the node.
        """
        segment = self._segment
        async with NodeStream(master, self._credentials) as link:
            timeout_s = CONNECT_SEVERAL_S if self._masters.several else JOIN_TIMEOUT_S
            await link.connect(self._name, self._host, timeout_s)
            offer = segment.make_offer()._replace(
                address=self._address,
                fresh=self._fresh,
                engine=None if self._engine is None else self._engine.address,
                descriptor_socket=""
                if self._descriptor_server is None
                else self._descriptor_server.name,
                takes_capabilities=self._server.takes_capabilities,
                encrypts=self._server.encrypts,
            )
            disks = [
                disk.make_offer()._replace(fresh=disk.uuid in self._fresh_disks)
                for disk in self._disks
            ]
            offers = [offer, *disks]
            join = NodeJoin(
                name=self._name, host=self._host, protocol=PROTOCOL_VERSION,
                resume_epoch=self._epoch, segments=offers,
                highest_epoch=max(self._epoch_max, segment.epoch),
                cluster=self._owner.cluster or segment.owner.cluster, version=__version__,
                clock_ms=uptime_ms(),
            )  # fmt: skip
            accepted = await self._reply_to(link, join)
            if not isinstance(accepted, MasterAccepted):
                raise ProtocolError(f"the master answered a join with {accepted!r:.80}")
            if accepted.epoch < self._epoch_max and is_plausible_epoch(self._epoch_max):
                # This master may have granted extents meanwhile; those grants must not hold.
                self._not_fresh(is_unanswered=True)
                raise UnavailableError(
                    f"the master at {master} has epoch {accepted.epoch}, but this node last "
                    f"joined a master with epoch {self._epoch_max}",
                    advice="Another master has taken over, or (older releases) the clock of "
                    f"{master} was set back. Check the clock and kvstore status.",
                )
            self._epoch_max = accepted.epoch
            self._not_fresh()
            owner = self._owner._replace(cluster=accepted.cluster or join.cluster)
            for kept in (segment, *self._disks):
                with self._without_failed(kept):
                    kept.keep_epoch(accepted.epoch)
                    if owner != kept.owner:
                        kept.keep_owner(owner)
            self._masters.joined()
            self._reported_waiting = False
            resumed = self._epoch == accepted.epoch
            self._epoch = accepted.epoch
            self._known = True
            log.info("node_joined node=%s epoch=%d resumed=%s", self._name, accepted.epoch, resumed)
            if not resumed:
                self._unreported = [n for n, each in enumerate(offers) if not each.fresh]
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
            copied = start_task("copied", self._send_copied(link), expected=KVStoreError)
            stopping = asyncio.create_task(self._stopping.wait())
            tasks = (beating, reading, telling, copied, stopping)
            self._is_joined = True
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                if stopping.done():
                    others = (reading, telling, copied)
                    for other in others:
                        other.cancel()
                    await asyncio.wait(others, timeout=LEAVE_TIMEOUT_S)
                    await self._leave(link)
                    return
            finally:
                self._is_joined = False
                ended = (*tasks, *self._late_wipes)
                for task in ended:
                    task.cancel()
                await asyncio.gather(*ended, return_exceptions=True)
                if self._inventory is not None:  # one at a time: it may stamp what it finds
                    await asyncio.wait((self._inventory,))
            for task in (reading, beating, telling, copied):
                if task.done() and not task.cancelled() and task.exception() is not None:
                    raise task.exception() or AssertionError
            if not beating.cancelled():  # the certificate was renewed
                return
        raise UnavailableError("the master closed the stream")

    async def _reply_to(self, link: NodeStream, join: NodeJoin) -> MasterMessage:
        """Sends a join and receives the reply. A master that sent none may have accepted
        it and may grant extents: then the node is not fresh, and ``run`` fences."""
        await link.send(join)
        try:
            async with asyncio.timeout(JOIN_TIMEOUT_S):
                return await link.receive()
        except (UnavailableError, TimeoutError) as error:
            if not join.resume_epoch:
                self._not_fresh(is_unanswered=True)
            if isinstance(error, UnavailableError):
                raise
            raise UnavailableError(
                f"the master has not answered a join for {JOIN_TIMEOUT_S:.0f} s"
            ) from None

    def _not_fresh(self, *, is_unanswered: bool = False) -> None:
        """Called once a master may have granted extents."""
        self._fresh, self._is_unanswered = False, is_unanswered or self._is_unanswered
        self._fresh_disks.clear()

    async def _send_copied(self, link: NodeStream) -> None:
        while True:
            await link.send(await self._copier.next_done())

    async def _leave(self, link: NodeStream) -> None:
        """Fences, then sends the leave message and waits until the master has received it, after
        which a removal waits for no reader of this memory."""
        try:
            async with asyncio.timeout(LEAVE_TIMEOUT_S):
                await self._fence_all()
                await link.send(NodeLeave())
                await link.done_sending()
                while True:
                    await link.receive()
        except (KVStoreError, TimeoutError) as error:
            log.debug("node_left node=%s stream_ended_by=%r", self._name, error)

    async def _send_heartbeat(self, link: NodeStream, accepted: MasterAccepted) -> None:
        """Sends heartbeats until the certificate is renewed, which needs another stream."""
        number = 0
        while not link.is_outdated:
            number += 1
            moved = self._server.counters()
            await link.send(
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
        """Checks whether the entry of the memory was removed; logs it once."""
        if not self._shm_entry_missing and not self._segment.has_entry():
            self._shm_entry_missing = True
            log.error(
                "shm_entry_missing node=%s path=%s: %s",
                self._name,
                self._segment.path,
                SHM_ENTRY_MISSING,
            )
        return self._shm_entry_missing

    async def _send_inventory(self, link: NodeStream, answers: asyncio.Semaphore) -> None:
        """Reports the node's objects, if the master does not know them; then waits forever."""
        while self._unreported:
            number = self._unreported[0]
            started = time.monotonic()
            reported = found = 0
            is_first = True
            chunks = self._disk_chunks(self._disks[number - 1]) if number else self._chunks()
            async for chunk, total, last in chunks:
                await answers.acquire()
                await link.send(inventory.claims(number, chunk, first=is_first, last=last))
                is_first = False
                reported += len(chunk)
                found += total
            for _ in range(CLAIMS_UNANSWERED_MAX):
                await answers.acquire()
            for _ in range(CLAIMS_UNANSWERED_MAX):
                answers.release()
            del self._unreported[0]
            if not number:
                self._unverified = False
            log.info(
                "inventory_reported node=%s medium=%s objects=%d corrupt=%d seconds=%.2f",
                self._name,
                "disk" if number else "memory",
                reported,
                found - reported,
                time.monotonic() - started,
            )
        await asyncio.Event().wait()

    async def _chunks(self) -> AsyncIterator[tuple[list[inventory.Found], int, bool]]:
        """Yields the intact objects of one message, their number before verification, and whether
        it is the last. Yields no objects every ``WORKING_S``: a master drops a silent node."""
        segment, rows = self._segment, CLAIMS_PER_MESSAGE_MAX
        given_up, self._given_up = self._given_up, set()
        looking = asyncio.to_thread(inventory.build_inventory, segment, given_up)
        taking = self._inventory = start_task("inventory", looking)
        while not (await asyncio.wait((taking,), timeout=WORKING_S))[0]:
            yield [], 0, False
        found = taking.result()
        for start in range(0, max(1, len(found)), rows):
            chunk = found[start : start + rows]
            good = chunk
            if self._unverified:
                looking = asyncio.to_thread(inventory.verified, segment, chunk)
                checking = self._inventory = start_task("inventory", looking)
                while not (await asyncio.wait((checking,), timeout=WORKING_S))[0]:
                    yield [], 0, False
                good = checking.result()
            yield good, len(chunk), start + rows >= len(found)

    async def _disk_chunks(
        self, disk: DiskFile
    ) -> AsyncIterator[tuple[list[inventory.Found], int, bool]]:
        """As ``_chunks``, of a disk: what was used last comes first. Payloads are verified when
        they are brought into memory."""
        offsets = await asyncio.to_thread(disk.offsets)
        for start in range(0, max(1, len(offsets)), HEADERS_PER_STEP):
            with self._without_failed(disk):
                headers = await asyncio.to_thread(
                    disk.headers, offsets[start : start + HEADERS_PER_STEP]
                )
            found = inventory.sort_for_report(headers)
            is_end = start + HEADERS_PER_STEP >= len(offsets)
            for at in range(0, max(1, len(found)), CLAIMS_PER_MESSAGE_MAX):
                chunk = found[at : at + CLAIMS_PER_MESSAGE_MAX]
                yield chunk, len(chunk), is_end and at + CLAIMS_PER_MESSAGE_MAX >= len(found)

    async def _process_master_messages(
        self, link: NodeStream, answers: asyncio.Semaphore, silence_s: float
    ) -> None:
        """Processes the master's messages. It echoes heartbeats, so a silent master has ended."""
        tasks: set[asyncio.Task[None]] = set()
        """Orders for disks, each in the order of its messages."""
        while True:
            for task in [each for each in tasks if each.done()]:
                tasks.discard(task)
                if (error := task.exception()) is not None:
                    raise error
            try:
                # Not ``wait_for``: with a message that has just arrived, it ignores a cancellation.
                async with asyncio.timeout(silence_s):
                    message = await link.receive()
            except TimeoutError:
                raise UnavailableError(
                    f"the master has been silent for {silence_s:.0f} s"
                ) from None
            match message:
                case MasterHeartbeat(repair=repair):
                    if repair:
                        self._repair()
                case MasterClaimsAck():
                    answers.release()
                case MasterWipe():
                    if (disk := self._copier.disk(message.uuid)) is not None:
                        wiping = self._wipe_disk(link, disk, message)
                        tasks.add(start_task("wipe", wiping, expected=KVStoreError))
                        continue
                    copies = self._copier.abandon(message.uuid, message.offsets)
                    await self._wipe(message)
                    if copies:
                        wiping = self._wipe_late(link, message, copies)
                        tasks.add(task := start_task("wipe", wiping, expected=KVStoreError))
                        self._late_wipes.add(task)
                        task.add_done_callback(self._late_wipes.discard)
                        continue
                    await link.send(NodeWipeDone(message.wipe_seq))
                case MasterCopy():
                    if (writing := self._copier.copy(message)) is not None:
                        tasks.add(start_task("copy", writing))
                case _:
                    raise ProtocolError(f"unexpected {type(message).__name__} from the master")

    async def _wipe_disk(self, link: NodeStream, disk: DiskFile, request: MasterWipe) -> None:
        with self._without_failed(disk):
            await self._copier.wipe(disk, request)
        await link.send(NodeWipeDone(request.wipe_seq))

    @contextlib.contextmanager
    def _without_failed(self, kept: Medium) -> Iterator[None]:
        """Have the node join again without a disk that fails here. It is not offered any more:
        objects that it cannot wipe, or report, would come back after their removal."""
        try:
            yield
        except OSError as error:
            if kept is self._segment:
                raise
            log.error(  # noqa: TRY400  # not our error
                "disk_failed node=%s path=%s reason=%s", self._name, kept.path, error
            )
            self._disks = [disk for disk in self._disks if disk is not kept]
            raise SegmentUnmountedError(f"{kept.path}: {error}") from error

    async def _wipe_late(
        self, link: NodeStream, request: MasterWipe,
        copies: Sequence[asyncio.Future[Any]],
    ) -> None:  # fmt: skip
        """Report a wipe when the copies to its extents have ended, and what they wrote is zeroed.
        The master repeats the request if the session ends before."""
        await asyncio.wait(copies)
        await self._wipe(request)
        await link.send(NodeWipeDone(request.wipe_seq))

    async def _wipe(self, request: MasterWipe) -> None:
        """Wipes extents. First closes connections on which bytes of abandoned puts may still
        arrive. A writer through shared memory cannot be stopped: its bytes are wiped at the next
        request, or before the node reports to the next master.

        Raises:
            InternalError: a connection did not end. Nothing is wiped; the session is resumed, and
                the master repeats its requests.
        """
        if request.uuid != self._segment.uuid:
            return
        attempts = zip(request.offsets, request.epochs, request.counters, strict=True)
        if request.disconnect_clients:
            self._given_up.update(attempts)
            numbers = request.disconnect_clients, request.disconnect_connections
            writers = list(zip(*numbers, strict=True))
            closed = await asyncio.to_thread(self._server.close_writers, writers)
            log.info("connections_cut node=%s writers=%d cut=%d", self._name, len(writers), closed)
        elif self._given_up:
            self._given_up.difference_update(attempts)
        if request.offsets and self._server.takes_capabilities:
            await self._wipe_and_revoke(request)
        else:
            self._segment.wipe(request.offsets, request.epochs, request.counters)
        self._segment.keep_removal_watermark(request.removal_watermark)

    async def _wipe_and_revoke(self, request: MasterWipe) -> None:
        """Wipes and zeroes extents in a thread, and revokes older capabilities to write to them.

        A cancelled call returns when the thread has ended: after the next request, or in the next
        session, the extents may belong to other objects.
        """
        is_over = threading.Event()

        def run() -> None:
            late = self._server.revoke_writes(request.uuid, request.offsets, request.wipe_seq)
            if late:
                log.warning("writes_revoked node=%s connections=%d", self._name, late)
            self._segment.wipe(request.offsets, request.epochs, request.counters)
            if request.lengths:
                ranges = zip(request.offsets, request.lengths, strict=True)
                self._segment.zero(ranges, is_over.is_set)

        running = start_task("wipe", asyncio.to_thread(run), expected=KVStoreError)
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            is_over.set()
            await asyncio.wait((running,))
            raise
