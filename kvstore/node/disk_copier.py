"""Carries out a master's orders for the disks of a node: copies, and wipes.

Copies run in the threads of their disk. A wipe waits for the copies to the extents that it wipes,
and later writes to the disk wait for it. Nothing waits for another disk. The wipe of an extent in
memory is reported when nothing is brought there any more, which delays no other wipe.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from typing import NamedTuple

from kvstore.calls import CopyOutcome, MasterCopy, MasterWipe, NodeCopied, Version
from kvstore.limits import BATCH_KEYS_MAX
from kvstore.memory.disk_file import THREADS, DiskFile
from kvstore.memory.medium import Medium

log = logging.getLogger("kvstore.node")

Copy = Callable[[Medium, int, int, int, Version], CopyOutcome]
Outcome = CopyOutcome | Exception

WRITTEN_SHIFT = 2
"""A thread writes a quarter of that before it wakes the event loop, which takes 0.2 ms."""
REPORT_S = 0.03
REPORTED_BYTES_MAX = 16 << 20
REPORTED_SHIFT = 6
"""Finished writes are reported together: so many bytes (at most a 64th of the memory, a quarter of
what may be on its way), or what has ended within ``REPORT_S``. An order and a report of their own
cost the master and the node 0.7 ms of processor time."""
BROUGHT_S = 0.005
"""The same for what is brought: a query waits for all objects of its order, or for some of them."""

FAILURES_LOGGED = 10
"""Errors of one disk that are logged, of each thousand."""


class Row(NamedTuple):
    token: int
    source: int
    target: int
    size: int
    version: Version


class DiskCopier:
    """See the module. Use it in one event loop's thread."""

    def __init__(self, memory: Medium, disks: Sequence[DiskFile]) -> None:
        self._memory = memory
        self._disks = {disk.uuid: disk for disk in disks}
        self._copies: dict[tuple[bytes, int], asyncio.Future[list[Outcome]]] = {}
        """Running copies, by their target."""
        self._ordered: dict[bytes, asyncio.Lock] = {uuid: asyncio.Lock() for uuid in self._disks}
        self._done: list[tuple[int, int]] = []
        """Tokens and outcomes to report."""
        self._done_bytes = 0
        self._reported_bytes = min(REPORTED_BYTES_MAX, memory.size >> REPORTED_SHIFT)
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
        to_memory = order.to_uuid == self._memory.uuid
        part = sum(order.sizes) // THREADS if to_memory else self._reported_bytes >> WRITTEN_SHIFT
        parts = list(_parts(order, part))
        done_parts = 0
        for rows in parts:
            copy = loop.run_in_executor(disk.threads, _copy, run, self._memory, rows)
            places = [(order.to_uuid, row.target) for row in rows]
            self._copies.update(dict.fromkeys(places, copy))

            def on_done(
                copy: asyncio.Future[list[Outcome]],
                rows: list[Row] = rows,
                places: list[tuple[bytes, int]] = places,
            ) -> None:
                nonlocal done_parts
                done_parts += 1
                for row, place, outcome in zip(rows, places, copy.result(), strict=True):
                    if self._copies.get(place) is copy:
                        del self._copies[place]
                        if to_memory:
                            for each in self._disks.values():
                                each.abandon(row.target, abandoned=False)
                    if isinstance(outcome, Exception):
                        self._log(disk, outcome)
                        outcome = CopyOutcome.FAILED
                    self._done.append((row.token, int(outcome)))
                    self._done_bytes += row.size
                is_complete = to_memory and done_parts == len(parts)
                if is_complete or self._done_bytes >= self._reported_bytes:
                    self._has_done.set()
                elif len(self._done) == len(rows) or (to_memory and done_parts == 1):
                    loop.call_later(BROUGHT_S if to_memory else REPORT_S, self._has_done.set)

            copy.add_done_callback(on_done)

    def _log(self, disk: DiskFile, error: Exception) -> None:
        self._failures += 1
        if self._failures % 1_000 <= FAILURES_LOGGED:
            log.error("disk_error node=%s path=%s reason=%s", disk.node, disk.path, error)

    def running(self, uuid: bytes, offsets: Iterable[int]) -> list[asyncio.Future[list[Outcome]]]:
        """List the running copies to these extents."""
        copies = [self._copies.get((uuid, offset)) for offset in offsets] if self._copies else []
        return [copy for copy in copies if copy is not None]

    def abandon(self, uuid: bytes, offsets: Sequence[int]) -> list[asyncio.Future[list[Outcome]]]:
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
        while not self._done or not self._has_done.is_set():
            self._has_done.clear()
            await self._has_done.wait()
        done, self._done = self._done[:BATCH_KEYS_MAX], self._done[BATCH_KEYS_MAX:]
        if not self._done:
            self._done_bytes = 0
            self._has_done.clear()
        tokens, outcomes = zip(*done, strict=True)
        return NodeCopied(tokens, outcomes)

    def forget_done(self) -> None:
        """Drop what was not reported: the node has joined another term."""
        self._done, self._done_bytes = [], 0
        self._has_done.clear()


def _parts(order: MasterCopy, size: int) -> Iterator[list[Row]]:
    """Split an order's rows into parts of at least ``size`` bytes, but the last one."""
    rows: list[Row] = []
    total = 0
    for token, source, target, row_size, epoch, counter in zip(*order[2:], strict=True):
        rows.append(Row(token, source, target, row_size, Version(epoch, counter)))
        total += row_size
        if total >= size:
            yield rows
            rows, total = [], 0
    if rows:
        yield rows


def _copy(run: Copy, memory: Medium, rows: Sequence[Row]) -> list[Outcome]:
    """Runs in a thread of the disk."""
    outcomes: list[Outcome] = []
    for row in rows:
        try:
            outcomes.append(run(memory, row.source, row.target, row.size, row.version))
        except Exception as error:  # noqa: BLE001  # a fault of one copy, of any kind
            outcomes.append(error)
    return outcomes
