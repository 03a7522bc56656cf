"""The simulated node: the rules of ``kvstore.node.agent`` and of the data server."""

from __future__ import annotations

from typing import Any, cast

from kvstore.calls import (
    MasterAccepted,
    MasterClaimsAck,
    MasterHeartbeat,
    MasterMessage,
    MasterWipe,
    NodeHeartbeat,
    NodeJoin,
    NodeLeave,
    NodeWipeDone,
    SegmentOffer,
)
from kvstore.client.flows import copy_objects
from kvstore.errors import KVStoreError, SegmentUnmountedError, UnavailableError
from kvstore.limits import CLAIMS_UNANSWERED_MAX, PROTOCOL_VERSION
from kvstore.node import inventory
from kvstore.wire.node_messages import decode_master_message, encode_node_message
from kvstore.wire.status import decode_error
from tests.simulation.client import Client
from tests.simulation.memory import Memory
from tests.simulation.network import BrokenStreamError, End, Network
from tests.simulation.oracle import Oracle
from tests.simulation.scheduler import MS, SECOND, Process, Task, TimedOutError

BACKOFF_US = (10 * MS, 20 * MS, 40 * MS, 100 * MS, 200 * MS)
JOIN_TIMEOUT_US = SECOND
PIECE_US = (5, 200)
"""Between two pieces of a read that the data server sends."""
SCAN_US = (500, 20 * MS)
CLAIMS_PER_MESSAGE = 4


LEAVE_US = 200 * MS
"""From the leave message, until the master has heard it, to the end of the process."""


class Node:
    """One node process. A restart is another one, with another segment of the same name, or with
    the one that is left."""

    fences = True
    verifies = True
    """What it finds in memory that was left."""
    cuts = True
    """Ends the connections that may still carry what it is to wipe."""

    def __init__(
        self, process: Process, network: Network, oracle: Oracle, memory: Memory, piece_bytes: int,
        *, attached: bool = False, masters: tuple[str, ...] = ("master",),
    ) -> None:  # fmt: skip
        """``attached``: the memory is that of a process of before."""
        self.process = process
        self.memory = memory
        self.name = memory.node
        self._network = network
        self._oracle = oracle
        self._piece_bytes = piece_bytes
        self._masters = masters
        self._turn = 0
        self._epoch = 0
        self._epoch_max = 0
        self._fresh = not attached
        self._unverified = attached
        self._untold = False
        """The master does not know all that our memory holds."""
        self._given_up: set[inventory.Attempt] = set()
        self._unanswered_claims = 0
        self._unanswered = False
        """A join was sent, and nobody knows whether the master has accepted it."""
        self._connections: dict[Task[None], End] = {}
        self._link: End | None = None
        self._leaving = False
        self.copier: Client | None = None
        """Copies what the master wants more replicas of."""
        self._copying: Task[None] | None = None
        if attached:
            self._fence()
        process.spawn("agent", self._run())

    def accept(self, port: str, end: End) -> None:
        assert port == "data"
        task = self.process.spawn("data", self._serve(end))
        if not task.ended:
            self._connections[task] = end
            self._connections = {t: e for t, e in self._connections.items() if not t.ended}

    def leave(self) -> None:
        """The first part of a clean stop; ``end`` is the other one, ``LEAVE_US`` later."""
        self._leaving = True
        self._fence()
        if self._link is not None:
            try:
                self._link.send(encode_node_message(NodeLeave()))
            except BrokenStreamError:
                pass

    def end(self) -> None:
        if self.process.alive:
            self.memory.close()
            self.process.kill()

    # --- the agent ----------------------------------------------------------------------------

    async def _run(self) -> None:
        failures = 0
        while not self._leaving:
            started_us = self.process.scheduler.now_us
            try:
                await self._session()
            except SegmentUnmountedError:
                self._epoch = 0
                self._fence()
                continue
            except KVStoreError as error:
                self._turn += 1
                self._oracle.note(f"{self.name} session ended: {error.message}")
            except (BrokenStreamError, TimedOutError) as error:
                self._turn += 1
                self._oracle.note(f"{self.name} session ended: {type(error).__name__}")
            if self._unanswered:
                self._fresh = self._unanswered = False
                self._fence()
            lasted_us = self.process.scheduler.now_us - started_us
            failures = failures + 1 if lasted_us < SECOND // 5 else 1
            await self.process.sleep(BACKOFF_US[min(failures, len(BACKOFF_US)) - 1])

    def _fence(self) -> None:
        if self.fences:
            self.memory.bump_generation()
            connections, self._connections = self._connections, {}
            for task, end in connections.items():
                task.cancel()
                end.close()
        self._oracle.note(f"{self.name} fenced generation={self.memory.generation}")

    async def _session(self) -> None:
        memory = self.memory
        link = self._network.connect(
            self.process, self._masters[self._turn % len(self._masters)], "node"
        )
        self._link = link
        beating: Task[None] | None = None
        telling: Task[None] | None = None
        try:
            offer = SegmentOffer(
                size=memory.size, uuid=memory.uuid, shm_name=memory.shm_name,
                address=f"{self.name}:1", token=memory.token, seed=memory.seed,
                generation=memory.generation, fresh=self._fresh, removal_watermark=memory.mark,
            )  # fmt: skip
            join = NodeJoin(
                self.name, self.process.host, PROTOCOL_VERSION, self._epoch, [offer],
                highest_epoch=max(memory.epoch, self._epoch_max),
            )  # fmt: skip
            link.send(encode_node_message(join))
            self._unanswered = self._epoch == 0
            accepted = self._decoded(await link.receive(JOIN_TIMEOUT_US))
            assert isinstance(accepted, MasterAccepted)
            if accepted.epoch < self._epoch_max:
                self._unanswered = True
                raise UnavailableError(f"epoch {accepted.epoch} is over")
            self._epoch_max = accepted.epoch
            memory.epoch = max(memory.epoch, accepted.epoch)
            resumed = self._epoch == accepted.epoch
            self._epoch = accepted.epoch
            if not resumed:
                self._untold = not self._fresh
            self._fresh = self._unanswered = False
            self._oracle.note(f"{self.name} joined epoch={accepted.epoch} resumed={resumed}")
            await self.process.reached("node: joined")
            beating = self.process.spawn("beat", self._beat(link, accepted.heartbeat_ms))
            telling = self.process.spawn("tell", self._tell(link))
            while True:
                message = self._decoded(await link.receive(accepted.dead_ms * MS))
                if isinstance(message, MasterWipe):
                    await self.process.reached("node: before a wipe")
                    self._wipe(message)
                    await self.process.reached("node: wiped, before it says so")
                    link.send(encode_node_message(NodeWipeDone(message.wipe_seq)))
                elif isinstance(message, MasterClaimsAck):
                    self._unanswered_claims -= 1
                else:
                    assert isinstance(message, MasterHeartbeat)
                    if message.repair and (self._copying is None or self._copying.ended):
                        self._copying = self.process.spawn("repair", self._copy())
        except TimedOutError:
            raise UnavailableError("the master has been silent") from None
        finally:
            link.close()
            for task in (beating, telling):
                if task is not None:
                    task.cancel()

    async def _copy(self) -> None:
        """As ``kvstore.client.repair``."""
        copier = self.copier
        assert copier is not None
        while True:
            try:
                copied = await copier.run(copy_objects.repair_page(copier.context, self.name))
            except KVStoreError as error:
                self._oracle.note(f"{self.name} puts a repair off: {error.message}")
                return
            if copied.objects or copied.failed:
                self._oracle.note(f"{self.name} repaired {copied}")
            if not copied.objects:
                return

    def _wipe(self, message: MasterWipe) -> None:
        if message.uuid == self.memory.uuid:
            if self.cuts:
                self._cut(
                    set(
                        zip(message.disconnect_clients, message.disconnect_connections, strict=True)
                    )
                )
            attempts = set(zip(message.offsets, message.epochs, message.counters, strict=True))
            if message.disconnect_clients:
                self._given_up |= attempts
            else:
                self._given_up -= attempts
            self.memory.wipe(message.offsets, message.epochs, message.counters)
            self.memory.mark = max(self.memory.mark, message.removal_watermark)
            self._oracle.wiped(self.memory, message, self._epoch)

    def _cut(self, writers: set[tuple[int, int]]) -> None:
        for task, end in list(self._connections.items()):
            client, _ = end.writer
            if not end.is_read and not writers.isdisjoint((end.writer, (client, 0), (0, 0))):
                del self._connections[task]
                task.cancel()
                end.close()
                self._oracle.note(f"{self.name} cut {end.name}")
                self._oracle.count("cut")

    async def _tell(self, link: End) -> None:
        if not self._untold:
            return
        self._unanswered_claims = 0
        segment = cast(Any, self.memory)
        random = self.process.scheduler.random
        await self.process.sleep(random.randint(*SCAN_US))
        found = inventory.build_inventory(segment, self._given_up)
        self._given_up = set()
        sent = 0
        first = True
        while first or sent < len(found):
            await self.process.sleep(random.randint(*PIECE_US))
            chunk = found[sent : sent + CLAIMS_PER_MESSAGE]
            sent += len(chunk)
            await self.process.reached("node: in the middle of its inventory")
            if self._unverified and self.verifies:
                chunk = inventory.verified(segment, chunk)
            while self._unanswered_claims >= CLAIMS_UNANSWERED_MAX:
                await self.process.sleep(MS)
            last = sent == len(found)
            self._unanswered_claims += 1
            try:
                message = inventory.claims(0, chunk, first=first, last=last)
                link.send(encode_node_message(message))
            except BrokenStreamError:
                return
            first = False
        while self._unanswered_claims:
            await self.process.sleep(MS)
        self._untold = self._unverified = False
        self._oracle.note(f"{self.name} told {len(found)} objects")

    async def _beat(self, link: End, heartbeat_ms: int) -> None:
        number = 0
        while True:
            number += 1
            try:
                link.send(encode_node_message(NodeHeartbeat(number)))
            except BrokenStreamError:
                return
            await self.process.sleep(heartbeat_ms * MS)

    @staticmethod
    def _decoded(tagged: tuple[str, bytes]) -> MasterMessage:
        """A message; raises the error that the master ends the stream with."""
        kind, data = tagged
        if kind == "error":
            raise decode_error(data)
        return decode_master_message(data)

    # --- the data server ----------------------------------------------------------------------

    async def _serve(self, end: End) -> None:
        """A hello, and one request: ("write", count), then (offset, bytes) pieces; or
        ("read", ranges), answered piece by piece."""
        memory = self.memory
        try:
            uuid, generation, end.writer = await end.receive()
            if uuid != memory.uuid or generation != memory.generation:
                end.send("gone")
                return
            end.send("ok")
            kind, what = await end.receive()
            if kind == "write":
                end.is_written = True
                for _ in range(what):
                    offset, data, version = await end.receive()
                    if generation != memory.generation:
                        end.send("gone")
                        return
                    self._oracle.write(memory, offset, data, version)
                    await self.process.reached("node: a piece written")
                end.is_written = False
                end.send("ok")
                return
            end.is_read = True
            for offset, length in what:
                for start in range(offset, offset + length, self._piece_bytes):
                    size = min(self._piece_bytes, offset + length - start)
                    end.send(bytes(memory.memory[start : start + size]))
                    random = self.process.scheduler.random
                    await self.process.sleep(random.randint(*PIECE_US))
        except BrokenStreamError:
            return
