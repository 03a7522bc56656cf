"""Mooncake's return codes, enumerations and small classes, as engines use them."""

from __future__ import annotations

import enum
import mmap
import threading
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import (
    ClosedError,
    KVStoreError,
    NoSpaceError,
    PutRefusedError,
    UnavailableError,
    UsageError,
)
from kvstore.memory.process_memory import address_of


class Code(enum.IntEnum):
    """Mooncake's ``ErrorCode``, which its methods return instead of raising."""

    OK = 0
    INTERNAL_ERROR = -1
    NO_AVAILABLE_HANDLE = -200
    """The pool is full. Engines take this code as a sign of memory pressure."""
    INVALID_PARAMS = -600
    OBJECT_NOT_FOUND = -704
    OBJECT_ALREADY_EXISTS = -705
    TRANSFER_FAIL = -800
    RPC_FAIL = -900

    def __repr__(self) -> str:
        return str(self.value)  # engines print lists of codes


_CODES: Final[tuple[tuple[type[KVStoreError], Code], ...]] = (
    (NoSpaceError, Code.NO_AVAILABLE_HANDLE),
    (ClosedError, Code.INVALID_PARAMS),
    (UsageError, Code.INVALID_PARAMS),
    (PutRefusedError, Code.TRANSFER_FAIL),
    (UnavailableError, Code.RPC_FAIL),
)


def code_of(error: KVStoreError) -> Code:
    return next((code for kind, code in _CODES if isinstance(error, kind)), Code.INTERNAL_ERROR)


class ObjectDataType(enum.IntEnum):
    UNKNOWN = 0
    KVCACHE = 1
    TENSOR = 2
    WEIGHT = 3
    SAMPLE = 4
    ACTIVATION = 5
    GRADIENT = 6
    OPTIMIZER_STATE = 7
    METADATA = 8
    GENERAL = 9


class SoftPinAction(enum.IntEnum):
    PRESERVE = 0
    ENABLE = 1
    DISABLE = 2


class ReplicaStatus(enum.IntEnum):
    UNDEFINED = 0
    INITIALIZED = 1
    PROCESSING = 2
    COMPLETE = 3
    REMOVED = 4
    FAILED = 5


@dataclass
class ReplicateConfig:
    """Options of a put. Only the numbers of copies have an effect: the store keeps ``replica_num``
    copies on distinct nodes, or one if that is 0 and another number is not."""

    replica_num: int = 1
    nof_replica_num: int = 0
    dfs_replica_num: int = 0
    soft_pin_action: SoftPinAction = SoftPinAction.PRESERVE
    soft_pin_ttl_ms: int | None = None
    with_soft_pin: bool = False
    with_hard_pin: bool = False
    preferred_segment: str = ""
    preferred_segments: list[str] = field(default_factory=list)
    preferred_nof_segments: list[str] = field(default_factory=list)
    prefer_alloc_in_same_node: bool = False
    data_type: ObjectDataType = ObjectDataType.UNKNOWN
    group_ids: list[str] | None = None
    session_ids: list[str] | None = None


@dataclass
class ExistOptions:
    """Options of ``is_exist``, without effect: all objects are in memory."""

    prefetch_to_memory: bool = False


@dataclass(frozen=True)
class BufferDescriptor:
    size: int
    transport_endpoint: str
    """The name of the node that holds the copy."""
    buffer_address: int = 0
    """Always 0: addresses of nodes mean nothing to a client."""


@dataclass(frozen=True)
class MemoryDescriptor:
    buffer_descriptor: BufferDescriptor


@dataclass(frozen=True)
class ReplicaDescriptor:
    """One complete copy of an object. All copies are in memory."""

    status: ReplicaStatus
    descriptor: MemoryDescriptor

    def is_memory_replica(self) -> bool:
        return True

    def is_disk_replica(self) -> bool:
        return False

    def is_local_disk_replica(self) -> bool:
        return False

    def get_memory_descriptor(self) -> MemoryDescriptor:
        return self.descriptor


class BufferHandle(np.ndarray[Any, np.dtype[np.uint8]]):
    """A value in its own memory, as a writable buffer: ``memoryview(handle)``.

    An array, because before Python 3.12 no other class written in Python can be a buffer. Methods
    have Mooncake's names; ``size`` hides the array's attribute.
    """

    @classmethod
    def of(cls, data: NDArray[np.uint8]) -> BufferHandle:
        return data.view(cls)

    def size(self) -> int:  # type: ignore[override]
        return self.nbytes

    def ptr(self) -> int:
        """Return the address of the first byte; 0 for no bytes."""
        return int(self.ctypes.data) if self.nbytes else 0

    def __bool__(self) -> bool:
        """Return True, as Mooncake's handle does. An array of several elements would raise here."""
        return True

    def __repr__(self) -> str:
        return f"<BufferHandle of {self.nbytes} bytes>"

    __str__ = __repr__


class MooncakeHostMemAllocator:
    """Allocates memory in whole pages for an engine's host pool, by address. Threads: any."""

    def __init__(self) -> None:
        self._held: dict[int, mmap.mmap] = {}
        self._changing = threading.Lock()

    def alloc(self, size: int) -> int:
        """Return the address of ``size`` zeroed bytes; 0: they cannot be allocated."""
        try:
            memory = mmap.mmap(-1, size)
        except (OSError, ValueError, OverflowError):
            return 0
        address = address_of(memoryview(memory))
        with self._changing:
            self._held[address] = memory
        return address

    def free(self, address: int) -> int:
        """Free unused memory. Return 0, or ``Code.INVALID_PARAMS`` for an address not from
        ``alloc``."""
        with self._changing:
            memory = self._held.pop(address, None)
        if memory is None:
            return Code.INVALID_PARAMS
        memory.close()
        return Code.OK


def bind_to_numa_node(node: int) -> None:
    """Do nothing: the kernel places memory where the engine's thread first touches it."""
