"""What one call reads: its objects in columns, and the memory that gets their payloads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple, TypeVar, cast

import numpy as np

from kvstore.client.flows.device_io import DeviceReads
from kvstore.client.flows.location_cache import LeasedLocation, Replica
from kvstore.client.flows.object_transfers import ObjectReads
from kvstore.client.values import (
    UNREADABLE,
    Bytes1D,
    Found,
    Kind,
    Payload,
    Unreadable,
    decode,
    decode_tensor,
)
from kvstore.device.memory import memory_of
from kvstore.errors import BufferMismatchError
from kvstore.limits import Key, Namespace
from kvstore.native.interface import ReadRow
from kvstore.runtime.formatting import key_text

if TYPE_CHECKING:
    import torch

    from kvstore.device.device import Device

RowT = TypeVar("RowT")


class CorruptReplica(NamedTuple):
    """A location where a read under a lease found other bytes than the object's."""

    key: Key
    placed: LeasedLocation
    replica: Replica


class ReadGroup(NamedTuple):
    """Objects to read from one segment, in columns."""

    numbers: Sequence[int]
    """Their positions in ``ReadTargets``."""
    placed: Sequence[LeasedLocation]
    replicas: Sequence[Replica]


class ReadTargets:
    """The objects that one call reads, in columns, and what was found of each: a Python object
    each would cost more than the work. Subclasses provide the memory."""

    __slots__ = ("bad", "descriptors", "keys", "placed", "transfer_type")

    is_partial: ClassVar[bool] = False
    """Whether only ranges are read, so that leases of earlier lookups continue."""

    def __init__(self, keys: Sequence[Key], transfer_type: type[ObjectReads] = ObjectReads) -> None:
        self.keys = keys
        self.transfer_type = transfer_type
        self.descriptors: list[bytes | None] = [None] * len(keys)
        """None: a miss."""
        self.placed: list[LeasedLocation | None] = [None] * len(keys)
        self.bad: dict[int, list[CorruptReplica]] = {}
        """By position: reads under a valid lease that found other bytes."""

    def allocate(
        self, numbers: Sequence[int], placed: Sequence[LeasedLocation]
    ) -> Sequence[Payload]:
        """Return memory of exactly the size of each. Raises BufferMismatchError: the caller's has
        less."""
        raise NotImplementedError

    def transfer(self, namespace: Namespace, group: ReadGroup, *, verify: bool) -> ObjectReads:
        """Return the transfer that reads a group. Raises BufferMismatchError."""
        numbers, placed, replicas = group
        reads = self.transfer_type(replicas[0].segment, namespace, verify=verify)
        keys = select(self.keys, numbers)
        payloads = self.allocate(numbers, placed)
        rows = [
            (offset, known.size, known.epoch, known.counter, key, payload, capability)
            for known, (_, offset, capability), key, payload in zip(
                placed, replicas, keys, payloads, strict=True
            )
        ]
        reads.rows = cast("list[ReadRow]", rows)  # or device memory, of ``DeviceReads``
        return reads

    def sizes(self) -> list[int | None]:
        """Return the size of each object that was read; None: a miss."""
        return [None if known is None else known.size for known in self.placed]


class NewMemory(ReadTargets):
    """Objects to read into memory that is allocated once their sizes are known."""

    __slots__ = ("rooms",)

    def __init__(self, keys: Sequence[Key]) -> None:
        super().__init__(keys)
        self.rooms: list[Bytes1D | None] = [None] * len(keys)
        """The payload, where there is a descriptor."""

    def allocate(
        self, numbers: Sequence[int], placed: Sequence[LeasedLocation]
    ) -> Sequence[Payload]:
        payloads: list[Payload] = []
        for number, known in zip(numbers, placed, strict=True):
            self.rooms[number] = room = np.empty(known.size, np.uint8)
            payloads.append([memoryview(room)] if known.size else [])  # type: ignore[arg-type]
        return payloads

    def found(self) -> Iterator[tuple[Key, bytes, Bytes1D] | None]:
        """Yield key, descriptor and payload of each object; None: a miss."""
        for key, descriptor, room in zip(self.keys, self.descriptors, self.rooms, strict=True):
            yield None if descriptor is None or room is None else (key, descriptor, room)

    def values(self, kind: Kind | None) -> list[Found]:
        """Return the values as ``kind``, or (None) as they were put; None: a miss."""
        return [each and _value_of(*each, kind) for each in self.found()]


class NewDeviceMemory(ReadTargets):
    __slots__ = ("device", "tensors")

    def __init__(self, keys: Sequence[Key], device: Device) -> None:
        super().__init__(keys, DeviceReads)
        self.device = device
        self.tensors = [device.driver.empty(0)] * len(keys)

    def allocate(
        self, numbers: Sequence[int], placed: Sequence[LeasedLocation]
    ) -> Sequence[Payload]:
        payloads: list[Payload] = []
        for number, known in zip(numbers, placed, strict=True):
            if self.tensors[number].numel() != known.size:
                self.tensors[number] = self.device.driver.empty(known.size)
            payloads.append(memory_of(self.device, self.tensors[number]) if known.size else [])
        return payloads

    def values(self) -> list[Found]:
        return [
            None if descriptor is None else tensor_of(key, descriptor, flat)
            for key, descriptor, flat in zip(self.keys, self.descriptors, self.tensors, strict=True)
        ]


class CallerMemory(ReadTargets):
    """Objects to read into memory of the caller, which is filled in sequence."""

    __slots__ = ("payloads",)

    def __init__(
        self,
        keys: Sequence[Key],
        payloads: Sequence[Payload],
        transfer_type: type[ObjectReads] = ObjectReads,
    ) -> None:
        super().__init__(keys, transfer_type)
        self.payloads = payloads

    def allocate(
        self, numbers: Sequence[int], placed: Sequence[LeasedLocation]
    ) -> Sequence[Payload]:
        payloads = select(self.payloads, numbers)
        return [
            views
            if type(views) is list and len(views) == 1 and len(views[0]) == known.size
            else _first_bytes(views, known.size, self.keys[number])
            for number, views, known in zip(numbers, payloads, placed, strict=True)
        ]


def select(column: Sequence[RowT], numbers: Sequence[int]) -> Sequence[RowT]:
    """Return the rows with these positions, which are in order and distinct."""
    return column if len(numbers) == len(column) else [column[number] for number in numbers]


def _value_of(key: Key, descriptor: bytes, payload: Bytes1D, kind: Kind | None) -> Found:
    try:
        return decode(descriptor, payload, kind)
    except UNREADABLE as error:
        return unreadable(error, key)


def tensor_of(key: Key, descriptor: bytes, flat: torch.Tensor) -> torch.Tensor | Unreadable:
    try:
        return decode_tensor(descriptor, flat)
    except UNREADABLE as error:
        return unreadable(error, key)


def unreadable(error: Unreadable, key: Key) -> Unreadable:
    """Return a copy of the error that names this object."""
    named = type(error)(
        f"no value can be made of {key_text(key)}: {error.message}", advice=error.advice
    )
    named.fields = {**error.fields, "key": key.hex()}
    return named


def _first_bytes(memory: Payload, size: int, key: Key) -> Payload:
    """Return the first ``size`` bytes of it. Raises BufferMismatchError: it has less."""
    if not isinstance(memory, list):
        _check_room(memory.nbytes, size, key)
        return memory.first(size) if size else []
    _check_room(sum(map(len, memory)), size, key)
    views = []
    for view in memory:
        if not size:
            break
        if len(view):  # an empty buffer has no memory to fill
            views.append(view[:size] if len(view) > size else view)
            size -= len(views[-1])
    return views


def _check_room(available: int, size: int, key: Key) -> None:
    if available < size:
        raise BufferMismatchError(
            f"the object has {size} bytes, the buffer {available}",
            advice="Call stat(key) for the size first.",
            size_bytes=size,
            buffer_bytes=available,
            key=key.hex(),
        )
