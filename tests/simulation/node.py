"""The simulated node: the rules of ``kvstore.node.agent`` and of the data server."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, cast

from kvstore.calls import (
    CopyOutcome,
    DiskLimits,
    MasterAccepted,
    MasterClaimsAck,
    MasterCopy,
    MasterHeartbeat,
    MasterMessage,
    MasterWipe,
    NodeCopied,
    NodeHeartbeat,
    NodeJoin,
    NodeLeave,
    NodeWipeDone,
    SegmentOffer,
    Version,
)
from kvstore.client.flows import copy_objects
from kvstore.errors import KVStoreError, SegmentUnmountedError, UnavailableError
from kvstore.limits import CLAIMS_UNANSWERED_MAX, PROTOCOL_VERSION
from kvstore.memory.header import HEADER_BYTES, extent_bytes
from kvstore.node import inventory
from kvstore.wire.node_messages import decode_master_message, encode_node_message
from kvstore.wire.status import decode_error
from tests.simulation.client import Client
from tests.simulation.disk import SimDisk
from tests.simulation.memory import Memory
from tests.simulation.network import BrokenStreamError, End, Network
from tests.simulation.oracle import Oracle
from tests.simulation.scheduler import MS, SECOND, Future, Process, Task, TimedOutError

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
        disk: SimDisk | None = None, disk_attached: bool = False,
    ) -> None:  # fmt: skip
        """``attached``, ``disk_attached``: it is that of a process of before."""
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
        self._untold: list[int] = []
        """Numbers of the offers of which the master does not know all that they hold."""
        self.disk = disk
        self._fresh_disk = not disk_attached
        self._disk_failed = False
        self._copies: dict[tuple[bytes, int], Future[None]] = {}
        """Copies between memory and disk, by their target."""
        self._copied: list[tuple[int, int]] = []
        self._last_order: Future[None] | None = None
        """Of those for the disk, which are carried out one after the other."""
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
                await self._fence_all()
                continue
            except KVStoreError as error:
                self._turn += 1
                self._oracle.note(f"{self.name} session ended: {error.message}")
            except (BrokenStreamError, TimedOutError) as error:
                self._turn += 1
                self._oracle.note(f"{self.name} session ended: {type(error).__name__}")
            if self._disk_failed:
                self._disk_failed, self._epoch = False, 0
                await self._fence_all()
                continue
            if self._unanswered:
                self._fresh = self._fresh_disk = self._unanswered = False
                await self._fence_all()
            lasted_us = self.process.scheduler.now_us - started_us
            failures = failures + 1 if lasted_us < SECOND // 5 else 1
            await self.process.sleep(BACKOFF_US[min(failures, len(BACKOFF_US)) - 1])

    async def _fence_all(self) -> None:
        """As ``NodeAgent``: once nothing is copied any more."""
        if self._last_order is not None:
            await self._last_order
        while self._copies:
            await next(iter(self._copies.values()))
        self._copied = []
        self._fence()

    def _fence(self) -> None:
        if self.disk is not None:
            self.disk.bump_generation()
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
            offers = [offer]
            if (disk := self.disk) is not None:
                offers.append(SegmentOffer(
                    size=disk.size, uuid=disk.uuid, shm_name="", address="", token=disk.token,
                    seed=disk.seed, generation=disk.generation, fresh=self._fresh_disk,
                    removal_watermark=disk.mark, medium="disk", is_opaque=True,
                    disk=DiskLimits(0, 0),
                ))  # fmt: skip
            kept_epoch = memory.epoch if disk is None else max(memory.epoch, disk.epoch)
            join = NodeJoin(
                self.name, self.process.host, PROTOCOL_VERSION, self._epoch, offers,
                highest_epoch=max(kept_epoch, self._epoch_max),
            )  # fmt: skip
            link.send(encode_node_message(join))
            self._unanswered = self._epoch == 0
            accepted = self._decoded(await link.receive(JOIN_TIMEOUT_US))
            assert isinstance(accepted, MasterAccepted)
            if accepted.epoch < self._epoch_max:
                self._unanswered = True
                raise UnavailableError(f"epoch {accepted.epoch} is over")
            self._epoch_max = accepted.epoch
            for kept in filter(None, (memory, disk)):
                kept.epoch = max(kept.epoch, accepted.epoch)
            resumed = self._epoch == accepted.epoch
            self._epoch = accepted.epoch
            if not resumed:
                self._untold = [number for number, each in enumerate(offers) if not each.fresh]
            self._fresh = self._fresh_disk = self._unanswered = False
            self._report_copied()
            self._oracle.note(f"{self.name} joined epoch={accepted.epoch} resumed={resumed}")
            await self.process.reached("node: joined")
            beating = self.process.spawn("beat", self._beat(link, accepted.heartbeat_ms))
            telling = self.process.spawn("tell", self._tell(link))
            while True:
                message = self._decoded(await link.receive(accepted.dead_ms * MS))
                if self._disk_failed:
                    raise SegmentUnmountedError("the disk has failed")
                if isinstance(message, MasterCopy):
                    self._on_copy(message)
                elif isinstance(message, MasterWipe) and message.uuid != memory.uuid:
                    self._in_order(
                        "wipe disk", partial(self._wipe_disk, link, message, self._epoch)
                    )
                elif isinstance(message, MasterWipe) and (late := self._abandon(message)):
                    self._wipe(message)
                    self.process.spawn("late wipe", self._wipe_late(link, message, late))
                elif isinstance(message, MasterWipe):
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

    def _wipe(self, message: MasterWipe, epoch: int = 0) -> None:
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
            self._oracle.wiped(self.memory, message, epoch or self._epoch)

    # --- the disk -----------------------------------------------------------------------------

    def _in_order(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """As the lock of ``DiskCopier``."""
        before, ended = self._last_order, Future[None]()
        self._last_order = ended

        async def run() -> None:
            if before is not None:
                await before
            await work()
            ended.set(None)

        self.process.spawn(name, run())

    def _on_copy(self, order: MasterCopy) -> None:
        disk = self.disk
        if disk is None:
            return
        if order.to_uuid == disk.uuid:
            self._in_order("write disk", lambda: self._begin_writes(disk, order))
        elif order.from_uuid == disk.uuid and order.to_uuid == self.memory.uuid:
            self._begin(disk, order)

    async def _begin_writes(self, disk: SimDisk, order: MasterCopy) -> None:
        self._begin(disk, order)

    def _begin(self, disk: SimDisk, order: MasterCopy) -> None:
        for token, source, target, size, epoch, counter in zip(
            order.tokens, order.from_offsets, order.to_offsets, order.sizes, order.epochs,
            order.counters, strict=True,
        ):  # fmt: skip
            place = order.to_uuid, target
            self._copies[place] = Future()
            version = Version(epoch, counter)
            copying = self._copy_object(disk, place, token, source, size, version)
            self.process.spawn("copy", copying)

    async def _copy_object(
        self, disk: SimDisk, place: tuple[bytes, int], token: int, source: int, size: int,
        version: Version,
    ) -> None:  # fmt: skip
        random, target = self.process.scheduler.random, place[1]
        await self.process.sleep(random.randint(*disk.delay_us))
        outcome = CopyOutcome.FAILED
        try:
            if place[0] == disk.uuid:
                outcome = disk.write_behind(self.memory, source, target, size, version)
                self._oracle.written_behind(disk, version)
                await self.process.reached("node: written to its disk, before it says so")
            else:
                length = extent_bytes(size)
                self._oracle.bring(self.memory, target, length, version)
                start = target + HEADER_BYTES
                self.memory.memory[start : start + size // 2] = random.randbytes(size // 2)
                await self.process.sleep(random.randint(*disk.delay_us))
                self._oracle.bring(self.memory, target, length, version)
                outcome = disk.bring(self.memory, source, target, size, version)
                await self.process.reached("node: brought from its disk, before it says so")
        except OSError:
            self._oracle.count("disk_errors")
        self._oracle.note(f"{self.name} copied v{version.epoch}.{version.counter} {outcome.name}")
        verb = "wrote" if place[0] == disk.uuid else "brought"
        self._oracle.count(f"disk_{verb}:{outcome.name.lower()}")
        disk.abandon(target, abandoned=False)
        self._copied.append((token, int(outcome)))
        self._copies.pop(place).set(None)
        self._report_copied()

    def _report_copied(self) -> None:
        if self._copied and self._link is not None and self._epoch:
            tokens, outcomes = zip(*self._copied, strict=True)
            try:
                self._link.send(encode_node_message(NodeCopied(tokens, outcomes)))
            except BrokenStreamError:
                return
            self._copied = []

    def _running(self, request: MasterWipe) -> list[Future[None]]:
        places = [(request.uuid, offset) for offset in request.offsets]
        return [self._copies[place] for place in places if place in self._copies]

    def _abandon(self, request: MasterWipe) -> list[Future[None]]:
        for offset in request.offsets:
            if self.disk is not None and (request.uuid, offset) in self._copies:
                self.disk.abandon(offset)
        return self._running(request)

    async def _wipe_late(self, link: End, request: MasterWipe, late: list[Future[None]]) -> None:
        epoch = self._epoch
        for copy in late:
            await copy
        self._wipe(request, epoch)
        self._say(link, NodeWipeDone(request.wipe_seq))

    async def _wipe_disk(self, link: End, request: MasterWipe, epoch: int) -> None:
        for copy in self._running(request):
            await copy
        disk = self.disk
        if disk is None or disk.uuid != request.uuid:
            return
        await self.process.sleep(self.process.scheduler.random.randint(*disk.delay_us))
        try:
            disk.wipe(request.offsets, request.epochs, request.counters)
        except OSError:
            self._oracle.note(f"{self.name} loses its disk")
            self._oracle.count("disk_lost")
            self.disk, self._disk_failed = None, True
            link.close()
            return
        disk.mark = max(disk.mark, request.removal_watermark)
        self._oracle.wiped(disk, request, epoch)
        await self.process.reached("node: wiped its disk, before it says so")
        self._say(link, NodeWipeDone(request.wipe_seq))

    @staticmethod
    def _say(link: End, message: NodeWipeDone) -> None:
        try:
            link.send(encode_node_message(message))
        except BrokenStreamError:
            pass

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
        self._unanswered_claims = 0
        while self._untold:
            if not await self._tell_of(link, self._untold[0]):
                return
            del self._untold[0]

    async def _tell_of(self, link: End, number: int) -> bool:
        segment = cast(Any, self.memory)
        random = self.process.scheduler.random
        await self.process.sleep(random.randint(*SCAN_US))
        if number:
            found = [] if self.disk is None else inventory.sort_for_report(self.disk.found())
        else:
            found = inventory.build_inventory(segment, self._given_up)
            self._given_up = set()
        sent = 0
        first = True
        while first or sent < len(found):
            await self.process.sleep(random.randint(*PIECE_US))
            chunk = found[sent : sent + CLAIMS_PER_MESSAGE]
            sent += len(chunk)
            await self.process.reached("node: in the middle of its inventory")
            if self._unverified and self.verifies and not number:
                chunk = inventory.verified(segment, chunk)
            while self._unanswered_claims >= CLAIMS_UNANSWERED_MAX:
                await self.process.sleep(MS)
            last = sent == len(found)
            self._unanswered_claims += 1
            try:
                message = inventory.claims(number, chunk, first=first, last=last)
                link.send(encode_node_message(message))
            except BrokenStreamError:
                return False
            first = False
        while self._unanswered_claims:
            await self.process.sleep(MS)
        if not number:
            self._unverified = False
        self._oracle.note(f"{self.name} told {len(found)} objects of {number}")
        return True

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
