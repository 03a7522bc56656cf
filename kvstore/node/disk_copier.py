"""Carries out a master's orders for the disks of a node: copies, and wipes.

Copies run in the threads of their disk. A wipe waits for the copies to the extents that it wipes,
and later writes to the disk wait for it. Nothing waits for another disk. The wipe of an extent in
memory is reported when nothing is brought there any more, which delays no other wipe.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence

from kvstore.calls import CopyOutcome, MasterCopy, MasterWipe, NodeCopied, Version
from kvstore.limits import BATCH_KEYS_MAX
from kvstore.memory.disk_file import DiskFile
from kvstore.memory.medium import Medium

log = logging.getLogger("kvstore.node")

Copy = Callable[[Medium, int, int, int, Version], CopyOutcome]

FAILURES_LOGGED = 10
"""Errors of one disk that are logged, of each thousand."""


class DiskCopier:
    """See the module. Use it in one event loop's thread."""

    def __init__(self, memory: Medium, disks: Sequence[DiskFile]) -> None:
        self._memory = memory
        self._disks = {disk.uuid: disk for disk in disks}
        self._copies: dict[tuple[bytes, int], asyncio.Future[CopyOutcome]] = {}
        """Running copies, by their target."""
        self._ordered: dict[bytes, asyncio.Lock] = {uuid: asyncio.Lock() for uuid in self._disks}
        self._done: list[tuple[int, int]] = []
        """Tokens and outcomes to report."""
        self._has_done = asyncio.Event()
        self._failures = 0

    def disk(self, uuid: bytes) -> DiskFile | None:
        return self._disks.get(uuid)

    def copy(self, order: MasterCopy) -> Coroutine[None, None, None] | None:
        """Begin the copies of an order to memory. Return what begins those to a disk, after its
        earlier wipes."""
        disk = self._disks.get(order.to_uuid)
        if disk is not None:
            return self._write(order, disk)
        disk = self._disks.get(order.from_uuid)
        if disk is not None and order.to_uuid == self._memory.uuid:
            self._begin(order, disk, disk.bring)
        return None

    async def _write(self, order: MasterCopy, disk: DiskFile) -> None:
        async with self._ordered[disk.uuid]:
            self._begin(order, disk, disk.write_behind)

    def _begin(self, order: MasterCopy, disk: DiskFile, run: Copy) -> None:
        loop = asyncio.get_running_loop()
        for row in zip(
            order.tokens, order.from_offsets, order.to_offsets, order.sizes, order.epochs,
            order.counters, strict=True,
        ):  # fmt: skip
            token, source, target, size, epoch, counter = row
            place = order.to_uuid, target
            copy = loop.run_in_executor(
                disk.threads, run, self._memory, source, target, size, Version(epoch, counter)
            )
            self._copies[place] = copy

            def on_done(
                copy: asyncio.Future[CopyOutcome],
                token: int = token,
                place: tuple[bytes, int] = place,
            ) -> None:
                if self._copies.get(place) is copy:
                    del self._copies[place]
                    if place[0] == self._memory.uuid:
                        for each in self._disks.values():
                            each.abandon(place[1], abandoned=False)
                self._done.append((token, int(self._outcome(copy, disk))))
                self._has_done.set()

            copy.add_done_callback(on_done)

    def _outcome(self, copy: asyncio.Future[CopyOutcome], disk: DiskFile) -> CopyOutcome:
        error = copy.exception()
        if error is None:
            return copy.result()
        self._failures += 1
        if self._failures % 1_000 <= FAILURES_LOGGED:
            log.error("disk_error node=%s path=%s reason=%s", disk.node, disk.path, error)
        return CopyOutcome.FAILED

    def running(self, uuid: bytes, offsets: Iterable[int]) -> list[asyncio.Future[CopyOutcome]]:
        """List the running copies to these extents."""
        copies = [self._copies.get((uuid, offset)) for offset in offsets] if self._copies else []
        return [copy for copy in copies if copy is not None]

    def abandon(self, uuid: bytes, offsets: Sequence[int]) -> list[asyncio.Future[CopyOutcome]]:
        """Have the running copies to these extents of memory leave no header. Return them."""
        for offset in offsets if self._copies else ():
            if (uuid, offset) in self._copies:
                for disk in self._disks.values():
                    disk.abandon(offset)
        return self.running(uuid, offsets)

    async def wipe(self, disk: DiskFile, request: MasterWipe) -> None:
        """Wipe extents of a disk. Raises OSError: the disk failed."""
        async with self._ordered[disk.uuid]:
            if copies := self.running(disk.uuid, request.offsets):
                await asyncio.wait(copies)
            wiping = asyncio.get_running_loop().run_in_executor(
                None, disk.wipe, request.offsets, request.epochs, request.counters
            )
            await asyncio.shield(wiping)
            await asyncio.to_thread(disk.keep_removal_watermark, request.removal_watermark)

    async def idle(self) -> None:
        """Wait until nothing is copied any more, and no order waits for an earlier one."""
        for ordered in self._ordered.values():
            async with ordered:
                pass
        while self._copies:
            await asyncio.wait(list(self._copies.values()))

    async def next_done(self) -> NodeCopied:
        """Wait for finished copies, and take their report."""
        await self._has_done.wait()
        done, self._done = self._done[:BATCH_KEYS_MAX], self._done[BATCH_KEYS_MAX:]
        if not self._done:
            self._has_done.clear()
        tokens, outcomes = zip(*done, strict=True)
        return NodeCopied(tokens, outcomes)

    def forget_done(self) -> None:
        """Drop what was not reported: the node has joined another term."""
        self._done = []
        self._has_done.clear()
