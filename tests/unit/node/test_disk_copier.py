"""The order in which a node carries out what its master asks of its disks."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

from kvstore.calls import CopyOutcome, MasterCopy, MasterWipe, NodeCopied
from kvstore.memory.disk_file import DiskFile
from kvstore.memory.medium import Medium
from kvstore.node.disk_copier import DiskCopier

MEMORY, DISK = bytes(16), bytes([1]) * 16


class HangingDisk:
    """A disk that wipes, reads and writes when ``may_go_on`` is set."""

    def __init__(self) -> None:
        self.uuid = DISK
        self.node, self.path = "one", "/disk"
        self.threads = ThreadPoolExecutor(4)
        self.may_go_on = threading.Event()
        self.done: list[str] = []

    def wipe(self, *_: object) -> None:
        self._do("wipe")

    def write_behind(self, *_: object) -> CopyOutcome:
        return self._do("write")

    def bring(self, *_: object) -> CopyOutcome:
        return self._do("bring")

    def abandon(self, target: int, *, abandoned: bool = True) -> None:
        self.done.append(f"{'abandoned' if abandoned else 'not abandoned'} {target}")

    def keep_removal_watermark(self, *_: object) -> None:
        pass

    def _do(self, what: str) -> CopyOutcome:
        assert self.may_go_on.wait(10)
        self.done.append(what)
        return CopyOutcome.DONE


def order(source: bytes, target: bytes, token: int) -> MasterCopy:
    return MasterCopy(source, target, [token], [4096], [8192], [5_000], [1], [7])


def started() -> tuple[HangingDisk, DiskCopier]:
    disk = HangingDisk()
    memory = cast(Any, type("Memory", (), {"uuid": MEMORY, "size": 1 << 30}))
    return disk, DiskCopier(cast(Medium, memory), [cast(DiskFile, disk)])


def test_a_fence_waits_for_orders_that_wait_for_a_wipe() -> None:
    asyncio.run(fence())


async def fence() -> None:
    """A write of the term before would be of another object's extent in the next one."""
    disk, copier = started()
    wiping = asyncio.create_task(
        copier.wipe(cast(DiskFile, disk), MasterWipe(1, DISK, [16_384], [1], [6]))
    )
    await asyncio.sleep(0)
    write = copier.copy(order(MEMORY, DISK, 1))
    assert write is not None
    writing = asyncio.create_task(cast(Any, write))
    idle = asyncio.create_task(copier.idle())
    await asyncio.sleep(0.05)
    assert not idle.done()
    disk.may_go_on.set()
    await asyncio.gather(idle, wiping, writing)
    assert disk.done == ["wipe", "write"]
    assert await copier.next_done() == NodeCopied((1,), (CopyOutcome.DONE,))


def test_a_copy_to_memory_begins_at_once_and_can_be_abandoned() -> None:
    asyncio.run(abandon())


async def abandon() -> None:
    disk, copier = started()
    assert copier.copy(order(DISK, MEMORY, 1)) is None
    assert copier.abandon(MEMORY, [4096]) == []
    [copy] = copier.abandon(MEMORY, [4096, 8192])
    assert disk.done == ["abandoned 8192"]
    disk.may_go_on.set()
    await asyncio.wait([copy])
    await copier.idle()
    assert copier.abandon(MEMORY, [8192]) == []


def test_finished_writes_are_reported_together_and_a_fault_is_that_of_one_object() -> None:
    asyncio.run(report())


async def report() -> None:
    disk, copier = started()
    faulty = cast(Any, disk)

    def write_behind(*given: int) -> CopyOutcome:
        if given[1] == 2:
            raise OSError("worn out")
        return disk._do("write")

    faulty.write_behind = write_behind
    disk.may_go_on.set()
    numbers = [1, 2, 3]
    writes = MasterCopy(MEMORY, DISK, numbers, numbers, numbers, numbers, numbers, numbers)
    write = copier.copy(writes)
    assert write is not None
    await write
    outcomes = (CopyOutcome.DONE, CopyOutcome.FAILED, CopyOutcome.DONE)
    assert await copier.next_done() == NodeCopied((1, 2, 3), outcomes)
    disk.threads.shutdown()
