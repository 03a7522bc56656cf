"""Carries out a master's orders for the disks of a node: copies, and wipes.

Copies run in the threads of their disk. A wipe waits for the copies to the extents that it wipes,
and later writes to the disk wait for it. Nothing waits for another disk, and wipes of memory only
for what is brought to the same extents.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence

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

    async def copy(self, order: MasterCopy) -> None:
        """Begin the copies of an order, those to a disk after its earlier wipes."""
        disk = self._disks.get(order.to_uuid)
        if disk is not None:
            async with self._ordered[disk.uuid]:
                self._begin(order, disk, disk.write_behind)
            return
        disk = self._disks.get(order.from_uuid)
        if disk is not None and order.to_uuid == self._memory.uuid:
            self._begin(order, disk, disk.bring)

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

    async def wait_for(self, uuid: bytes, offsets: Iterable[int]) -> None:
        """Wait for the running copies to these extents."""
        if self._copies:
            copies = [self._copies.get((uuid, offset)) for offset in offsets]
            running = [copy for copy in copies if copy is not None]
            if running:
                await asyncio.wait(running)

    async def wipe(self, disk: DiskFile, request: MasterWipe) -> None:
        """Wipe extents of a disk. Raises OSError: the disk failed."""
        async with self._ordered[disk.uuid]:
            await self.wait_for(disk.uuid, request.offsets)
            wiping = asyncio.get_running_loop().run_in_executor(
                None, disk.wipe, request.offsets, request.epochs, request.counters
            )
            await asyncio.shield(wiping)
            await asyncio.to_thread(disk.keep_removal_watermark, request.removal_watermark)

    async def idle(self) -> None:
        """Wait until nothing is copied any more."""
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
