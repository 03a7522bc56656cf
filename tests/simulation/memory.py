"""A segment of simulated processes: real bytes and a real superblock, but no system calls.

Like shared memory it outlives the process that made it: processes that have it mapped can read and
write it, until the last one unmaps it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random
from typing import Any, cast

from kvstore.calls import NO_VERSION
from kvstore.memory.header import GENERATION_OFFSET, Header, Superblock, pack_superblock
from kvstore.memory.segment import OwnedSegment


class Memory:
    """One mounted segment's bytes."""

    def __init__(self, node: str, host: str, size: int, random: Random) -> None:
        self.node = node
        self.host = host
        self.size = size
        self.uuid = random.randbytes(16)
        self.seed = random.getrandbits(64)
        self.token = random.randbytes(16)
        self.header_filter = None
        """Any header, as where nodes have no key of stamps."""
        self.shm_name = f"kvstore.{node}"
        self.mark = NO_VERSION
        self.epoch = 0
        """The highest that its node has joined."""
        self.linked = True
        """Whether ``/dev/shm`` still has it under that name."""
        self.memory = memoryview(bytearray(random.randbytes(size)))  # nobody zeroes a pool
        packed = pack_superblock(Superblock(self.uuid, node, size, self.seed, 1))
        self.memory[: len(packed)] = packed
        self._generation = self.memory[GENERATION_OFFSET : GENERATION_OFFSET + 8].cast("Q")

    @property
    def generation(self) -> int:
        return self._generation[0]

    def bump_generation(self) -> None:
        self._generation[0] += 1

    def close(self) -> None:
        """As a node that stops cleanly does."""
        self._generation[0] = 0
        self.linked = False

    def sign(self, offset: int, header: Header) -> bytes:
        """No stamp."""
        del offset, header
        return b""

    def scan(self) -> Iterator[tuple[int, Header]]:
        """As ``OwnedSegment.scan``."""
        return OwnedSegment.scan(cast(Any, self))

    def checksum(self, offset: int, length: int) -> int:
        """As ``OwnedSegment.checksum``."""
        return OwnedSegment.checksum(cast(Any, self), offset, length)

    def wipe(self, offsets: Sequence[int], epochs: Sequence[int], counters: Sequence[int]) -> None:
        """The production rule, which needs nothing of the system."""
        OwnedSegment.wipe(cast(Any, self), offsets, epochs, counters)
