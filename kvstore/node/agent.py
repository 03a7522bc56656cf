"""What a node says to its master: I am here with this memory, I am alive, that is wiped.

    create segment, serve it ──► join ──► tell what is there, beat … ──► leave
                                  ▲  ▲      │ stream broken, or the master is silent
                                  │  └──────┤ resume: the master knows us still
                                  └─ fence ◄┘ refused: a new master, or we counted as dead

*Fencing* ends whatever an older grant may still write: the segment's generation grows, which stops
writers through shared memory and turns away their data connections, the open ones are closed, and a
transfer engine has the segment at another address from then on.
Only then does the node join anew, and tells what its memory holds (``kvstore.node.inventory``); the
master gives out no space on it before it knows all, and the leases that its predecessor promised
have ended.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

from kvstore.calls import (
    MasterAccepted,
    MasterBeat,
    MasterClaimed,
    MasterMessage,
    MasterWipe,
    NodeBeat,
    NodeJoin,
    NodeLeave,
    NodeMessage,
    NodeWiped,
    SegmentOffer,
)
from kvstore.errors import (
    DrainedError,
    KVStoreError,
    ProtocolError,
    SegmentGoneError,
    UnavailableError,
)
from kvstore.limits import CLAIMS_UNANSWERED_MAX, PROTOCOL_VERSION
from kvstore.memory.segment import Segment
from kvstore.node import inventory
from kvstore.node.masters import Masters
from kvstore.transport.mooncake.server import EngineServer
from kvstore.transport.tcp_server import DataServer
from kvstore.wire.node_stream import NodeStream

log = logging.getLogger("kvstore.node")

BACKOFF_S: Final = (0.05, 0.1, 0.2)
"""Pauses between attempts to reach a master; the last one is repeated. A master that was started
again waits for us that long (``JOINING_MS``), and a little longer."""

PAUSE_SEVERAL_S: Final = 0.25
"""The longest pause where there are several masters, one of which will lead within seconds."""

SILENCE_SEVERAL_S: Final = 2.0
"""How long one of several masters may be silent before the others are asked: it may have been
stopped. If it leads still, the stream is resumed."""

CONNECT_SEVERAL_S: Final = 1.0
"""How long connecting to one of several masters may take."""

JOIN_TIMEOUT_S: Final = 5.0
LEAVE_TIMEOUT_S: Final = 1.0


class NodeAgent:
    """Keeps one segment joined to a master, until it is told to stop. One loop's thread only."""

    def __init__(
        self,
        *,
        name: str,
        host: str,
        master: str,
        segment: Segment,
        server: DataServer,
        address: str,
        engine: EngineServer | None = None,
        joined: Callable[[MasterAccepted], None] = lambda accepted: None,
        waiting: Callable[[KVStoreError], None] = lambda error: None,
    ) -> None:
        """
        Args:
            name: unique among the master's nodes.
            host: ``kvstore.host.host_id()``.
            master: ``host:port``; or several places where it may be, separated by commas, which
                are tried in turn; or ``etcd://...``, which says where it is.
            segment: owned by the caller, who closes it after ``run``.
            server: serves ``segment``; the caller's, too.
            address: where clients find ``server``.
            engine: serves ``segment``, too; the caller's.
            joined: told of each join that is not a mere resumption.
            waiting: told when the master is not reachable, once per outage.
        """
        self._name = name
        self._host = host
        self._masters = Masters(master)
        self._segment = segment
        self._server = server
        self._address = address
        self._engine = engine
        self._joined = joined
        self._waiting = waiting
        self._epoch = 0
        """Of the master that we can resume with; 0: join anew."""
        self._epoch_max = 0
        """The highest that we have joined: nobody before that is our master any more."""
        self._fresh = not segment.attached
        """Nobody was ever given an extent of our segment."""
        self._unverified = segment.attached
        """Its bytes may have changed while nobody served it."""
        self._known = False
        """Some master has accepted us."""
        self._untold = False
        """The master that we have joined does not know all that our memory holds."""
        self._unanswered = False
        """A join was sent, and whether a master has accepted it, and grants, is not known."""
        self.drained = False
        """Whether ``run`` ended because what the node held is elsewhere now."""
        self._stopping = asyncio.Event()
        self._sending = asyncio.Lock()
        """A stream takes one message at a time: beats, answers and the goodbye share it."""

    def stop(self) -> None:
        """Let ``run`` say goodbye and return, within ``LEAVE_TIMEOUT_S``."""
        self._stopping.set()

    async def run(self) -> None:
        """Until ``stop``, or until the master says that the node was drained.

        Raises:
            NodeNameTakenError, ProtocolError, InvalidArgumentError: the master refused the first
                join, and would always.
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
                if failures == 0 and not at_once:
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
            await self._stopped_within(min(pause, PAUSE_SEVERAL_S) if several else pause)

    def _fence(self) -> None:
        self._segment.bump_generation()
        self._server.fence()
        if self._engine is not None:
            self._engine.fence()
        log.info("node_fenced node=%s generation=%d", self._name, self._segment.generation)

    async def _session(self, master: str) -> None:
        """One stream, from join to its end.

        Raises:
            SegmentGoneError: what we held is forgotten; fence, then join anew.
            KVStoreError: the stream broke, or we were refused.
        """
        segment = self._segment
        async with NodeStream(master) as link:
            await link.connect(CONNECT_SEVERAL_S if self._masters.several else JOIN_TIMEOUT_S)
            offer = SegmentOffer(
                size=segment.size,
                uuid=segment.uuid,
                shm_name=segment.shm_name,
                address=self._address,
                token=segment.token,
                seed=segment.seed,
                generation=segment.generation,
                fresh=self._fresh,
                mark=segment.mark,
                engine=None if self._engine is None else self._engine.address,
            )
            join = NodeJoin(self._name, self._host, PROTOCOL_VERSION, self._epoch, [offer])
            accepted = await self._answer_to(link, join)
            if not isinstance(accepted, MasterAccepted):
                raise ProtocolError(f"the master answered a join with {accepted!r:.80}")
            if accepted.epoch < self._epoch_max:
                # It may have granted something meanwhile, and is not to have it.
                self._fresh, self._unanswered = False, True
                raise UnavailableError(
                    f"the master at {master} has epoch {accepted.epoch}, and we have joined one "
                    f"of epoch {self._epoch_max} before",
                    advice="Its time is over. Of a single master the clock was put back.",
                )
            self._epoch_max = accepted.epoch
            self._masters.joined()
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
            beating = asyncio.create_task(self._beat(link, accepted))
            reading = asyncio.create_task(self._listen(link, answers, silence_s))
            telling = asyncio.create_task(self._tell(link, answers))
            stopping = asyncio.create_task(self._stopping.wait())
            tasks = (beating, reading, telling, stopping)
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                if stopping.done():
                    reading.cancel()
                    telling.cancel()
                    await self._leave(link)
                    return
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            for task in (reading, beating, telling):
                if task.done() and not task.cancelled() and task.exception() is not None:
                    raise task.exception() or AssertionError
        raise UnavailableError("the master closed the stream")

    async def _answer_to(self, link: NodeStream, join: NodeJoin) -> MasterMessage:
        """What the master says to it. When it says nothing, it may have joined us all the same, and
        grants what we do not know of: then we are not fresh, and ``run`` fences."""
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
        """Say goodbye, and wait until the master has heard it."""
        try:
            async with asyncio.timeout(LEAVE_TIMEOUT_S):
                await self._send(link, NodeLeave())
                await link.done_sending()
                while True:
                    await link.receive()
        except (KVStoreError, TimeoutError) as error:
            log.debug("node_left node=%s stream_ended_by=%r", self._name, error)

    async def _beat(self, link: NodeStream, accepted: MasterAccepted) -> None:
        number = 0
        while True:
            number += 1
            await self._send(link, NodeBeat(number))
            await asyncio.sleep(accepted.beat_ms / 1000)

    async def _tell(self, link: NodeStream, answers: asyncio.Semaphore) -> None:
        """What our memory holds, if the master has to be told; then nothing, for ever."""
        if self._untold:
            started = time.monotonic()
            found = await asyncio.to_thread(inventory.take, self._segment)
            rows = inventory.ROWS_PER_MESSAGE
            told = 0
            for start in range(0, max(1, len(found)), rows):
                chunk = found[start : start + rows]
                last = start + rows >= len(found)
                if self._unverified:
                    chunk = await asyncio.to_thread(inventory.verified, self._segment, chunk)
                told += len(chunk)
                await answers.acquire()
                await self._send(link, inventory.claims(0, chunk, first=not start, last=last))
            for _ in range(CLAIMS_UNANSWERED_MAX):
                await answers.acquire()
            self._untold = self._unverified = False
            log.info(
                "inventory_told node=%s objects=%d corrupt=%d seconds=%.2f",
                self._name,
                told,
                len(found) - told,
                time.monotonic() - started,
            )
        await asyncio.Event().wait()

    async def _listen(self, link: NodeStream, answers: asyncio.Semaphore, silence_s: float) -> None:
        """Do what the master says; it echoes each beat, so silence means that it is not there."""
        while True:
            try:
                message = await asyncio.wait_for(link.receive(), silence_s)
            except TimeoutError:
                raise UnavailableError(
                    f"the master has been silent for {silence_s:.0f} s"
                ) from None
            match message:
                case MasterBeat():
                    pass
                case MasterClaimed():
                    answers.release()
                case MasterWipe(order, uuid, offsets, epochs, counters, mark):
                    if uuid == self._segment.uuid:
                        self._segment.wipe(offsets, epochs, counters)
                        self._segment.keep_mark(mark)
                    await self._send(link, NodeWiped(order))
                case _:
                    raise ProtocolError(f"unexpected {type(message).__name__} from the master")

    async def _stopped_within(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._stopping.wait(), seconds)
        except TimeoutError:
            return
