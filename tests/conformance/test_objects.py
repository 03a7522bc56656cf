"""Whole objects, by the steps in Python as by the compiled ones, over every transport, from and to
the host's memory or a device's, in segments of the host's memory or a device's: the same bytes,
outcomes and errors."""

from __future__ import annotations

import mmap
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import native
from kvstore.calls import SegmentInfo
from kvstore.client.flows.device_io import DeviceReads, DeviceWrites
from kvstore.client.flows.object_transfers import ObjectReads, ObjectWrites
from kvstore.client.flows.steps import Transfer
from kvstore.device import drivers
from kvstore.device.device import Device
from kvstore.device.memory import DeviceMemory
from kvstore.errors import (
    DeadlineExceededError,
    InvalidRangeError,
    NodeUnreachableError,
    PermissionDeniedError,
    SegmentUnmountedError,
    UnavailableError,
)
from kvstore.limits import Namespace
from kvstore.memory.header import HEADER_BYTES, extent_bytes
from kvstore.memory.process_memory import address_of
from kvstore.native import pure_python
from kvstore.native.interface import CAPABILITY_BYTES, CORRUPT, STALE
from kvstore.runtime.clock import uptime
from kvstore.runtime.tcp_protocol import Op
from kvstore.security import certificates
from kvstore.security.data_port_tls import ClientTls
from kvstore.transport import shm, tcp_client
from kvstore.transport.base import Transport
from kvstore.transport.device import DeviceTransport
from kvstore.transport.shm import ShmTransport
from kvstore.transport.tcp import TcpTransport
from tests.conformance.peer import Peer
from tests.support.capabilities import HOLDER, capability, held
from tests.support.encryption import shared_ends
from tests.support.fake_device import FakeDriver
from tests.support.identities import ENGINE

MIB = 1 << 20
SPACE = Namespace("space")
POOLED = "fake:0"
LARGE = [8 * MIB] * 7
"""More than sockets buffer: in the middle of it both ends are at work."""


class TransportVariant:
    """A transport, and its steps; skips the test if those were not built."""

    def __init__(self, transport: Transport, steps: Any = native.steps) -> None:
        self.transport = transport
        self.steps = steps

    @classmethod
    def compiled(cls, make: Callable[[], Transport]) -> TransportVariant:
        if not native.is_compiled:
            pytest.skip("kvstore.native._native is not built here")
        return cls(make())

    def carry(self, transfer: Transfer, seconds: float = 30.0) -> None:
        with pytest.MonkeyPatch.context() as patch:
            for module in (shm, tcp_client):
                patch.setattr(module, "steps", self.steps)
            transfer.run(self.transport, uptime() + seconds)

    def close(self) -> None:
        self.transport.close()


class DeviceWay(TransportVariant):
    """A transport, and a device whose memory is that of the transfers' buffers."""

    def __init__(self, transport: Transport, *, lock_max: int = 1 << 40) -> None:
        super().__init__(transport)
        self.fake = FakeDriver(eager=True, lock_max=lock_max)
        self.device = Device(self.fake, ring_bytes=8 * MIB)

    def carry(self, transfer: Transfer, seconds: float = 30.0) -> None:
        deadline = uptime() + seconds
        if isinstance(transfer, ObjectReads):
            reads = DeviceReads(transfer.segment, SPACE, verify=transfer.verify)
            reads.rows = self._on_device(transfer.rows)
            reads.run(self.transport, deadline)
            transfer.outcomes = reads.outcomes
        else:
            assert isinstance(transfer, ObjectWrites)
            writes = DeviceWrites(transfer.segment, SPACE, deadline)
            writes.rows = self._on_device(transfer.rows)
            writes.run(self.transport, deadline)
        assert self.device.ring.taken == 0

    def close(self) -> None:
        super().close()
        self.device.close()

    def _on_device(self, rows: Sequence[Any]) -> list[Any]:
        made = []
        for row in rows:
            views = [view for view in row[5] if len(view)]
            at = np.array([address_of(view) for view in views], np.int64)
            sizes = np.array([len(view) for view in views], np.int64)
            if views:  # parts of one buffer
                self.fake.memory[int(at[0])] = int(sizes.sum())
            memory = DeviceMemory(self.device, at, sizes, (), views)
            made.append((*row[:5], memory if views else [], *row[6:]))
        return made


class SameDeviceWay(DeviceWay):
    """The memory of the transfers' buffers is of the device that holds the segment."""

    def __init__(self) -> None:
        super().__init__(DeviceTransport(8 * MIB))
        self.fake.name = POOLED

    def carry(self, transfer: Transfer, seconds: float = 30.0) -> None:
        drivers.use(POOLED, self.fake)
        super().carry(transfer, seconds)

    def close(self) -> None:
        super().close()
        drivers.use(POOLED, None)


class CapabilityVariant(TransportVariant):
    """A holder, which shows a capability for each extent."""

    holder = HOLDER

    def carry(self, transfer: Transfer, seconds: float = 30.0) -> None:
        assert isinstance(transfer, ObjectReads | ObjectWrites)
        known, op = transfer.segment, Op.WRITE if transfer.write else Op.READ
        transfer.rows = [  # pyright: ignore[reportAttributeAccessIssue]
            (*row[:-1], capability(known, *row[:2], op, self.holder) + row[-1][CAPABILITY_BYTES:])
            for row in transfer.rows
        ]
        transfer.segment = held(known, self.holder)
        super().carry(transfer, seconds)


class HolderDeviceWay(CapabilityVariant, DeviceWay):
    """Both of them."""


def encrypted(kind: type[CapabilityVariant]) -> CapabilityVariant:
    credentials = shared_ends().credentials(ENGINE)
    way = kind(TcpTransport(tls=ClientTls(credentials)))
    way.holder = int(certificates.inspect(credentials.path)["holder"], 16)
    return way


WAYS: dict[str, dict[str, Callable[[], TransportVariant]]] = {
    "host": {
        "shm-compiled": lambda: TransportVariant.compiled(ShmTransport),
        "shm-slow": lambda: TransportVariant(ShmTransport(), pure_python),
        "shm-device": lambda: DeviceWay(ShmTransport()),
        "shm-device-not-locked": lambda: DeviceWay(ShmTransport(), lock_max=0),
        "tcp-compiled": lambda: TransportVariant.compiled(TcpTransport),
        "tcp-slow": lambda: TransportVariant(TcpTransport(), pure_python),
        "tcp-device": lambda: DeviceWay(TcpTransport()),
    },
    "held": {
        "shm-slow": lambda: TransportVariant(ShmTransport(), pure_python),
        "tcp-holder-compiled": lambda: CapabilityVariant.compiled(TcpTransport),
        "tcp-holder-slow": lambda: CapabilityVariant(TcpTransport(), pure_python),
    },
    "device": {
        "same-device": SameDeviceWay,
        "other-device": lambda: DeviceWay(DeviceTransport(8 * MIB)),
        "host": lambda: TransportVariant(DeviceTransport(8 * MIB)),
        "tcp-compiled": lambda: TransportVariant.compiled(TcpTransport),
        "tcp-slow": lambda: TransportVariant(TcpTransport(), pure_python),
        "tcp-device": lambda: DeviceWay(TcpTransport()),
    },
    "held-device": {
        "host": lambda: TransportVariant(DeviceTransport(8 * MIB)),
        "tcp-holder-compiled": lambda: CapabilityVariant.compiled(TcpTransport),
    },
    "encrypted": {
        "tcp-holder": lambda: encrypted(CapabilityVariant),
        "tcp-holder-device": lambda: encrypted(HolderDeviceWay),
    },
}
"""By the memory that the segment is in; ``held``: with capabilities; ``encrypted``: of the host,
with capabilities, and the node encrypts."""
EVERY = [(memory, way) for memory, ways in WAYS.items() for way in ways]
HOST = [each for each in EVERY if each[0] == "host"]


def by(ways: list[tuple[str, str]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("memory", "way"), ways, indirect=["way"])


def new_peer(memory: str, name: str) -> Peer:
    device = POOLED if "device" in memory else ""
    auth = shared_ends().node_file if memory == "encrypted" else ""
    name = f"{name}-{os.getpid()}"
    capabilities = memory not in ("host", "device")
    return Peer(name, 64 * MIB, device=device, capabilities=capabilities, auth=auth)


@pytest.fixture(scope="module")
def peers() -> Iterator[dict[str, Peer]]:
    peers = {memory: new_peer(memory, f"objects-{memory}") for memory in WAYS}
    yield peers
    for peer in peers.values():
        peer.close()


@pytest.fixture
def shared_peer(memory: str, peers: dict[str, Peer]) -> Peer:
    return peers[memory]


@pytest.fixture
def peer(memory: str) -> Iterator[Peer]:
    peer = new_peer(memory, "victim")
    yield peer
    peer.close()


@pytest.fixture
def way(memory: str, request: pytest.FixtureRequest) -> Iterator[TransportVariant]:
    way = WAYS[memory][request.param]()
    yield way
    way.close()


@pytest.fixture
def other(memory: str, request: pytest.FixtureRequest) -> Iterator[TransportVariant]:
    way = WAYS[memory][request.param]()
    yield way
    way.close()


@contextmanager
def memory_of(peer: Peer) -> Iterator[mmap.mmap]:
    """The memory of the peer's segment."""
    path = peer.entry
    if peer.info.device is not None:
        owned = Path(f"/proc/{peer.pid}/fd").iterdir()
        path = next(each for each in owned if "kvstore-fake-device" in os.readlink(each))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        yield memory


def values(sizes: list[int]) -> list[bytes]:
    chance = random.Random(str(sizes))
    return [chance.randbytes(size) for size in sizes]


def cut(data: memoryview, parts: int) -> list[memoryview]:
    step = -(-len(data) // parts) or 1
    return [data[start : start + step] for start in range(0, len(data), step)]


def writes(
    segment: SegmentInfo, some: list[bytes], *, start: int = MIB, parts: int = 1, version: int = 1
) -> ObjectWrites:
    transfer = ObjectWrites(segment, SPACE, uptime() + 60)
    offset = start
    for index, data in enumerate(some):
        views = cut(memoryview(data), parts)
        transfer.rows.append(
            (
                offset,
                len(data),
                version,
                index,
                b"k%d" % index,
                views,
                b"parent",
                b"descriptor",
                b"",
            )
        )
        offset += extent_bytes(len(data))
    return transfer


def reads(
    segment: SegmentInfo,
    sizes: list[int],
    *,
    start: int = MIB,
    parts: int = 1,
    version: int = 1,
    verify: bool = True,
) -> tuple[ObjectReads, list[bytearray]]:
    transfer = ObjectReads(segment, SPACE, verify=verify)
    targets = [bytearray(size) for size in sizes]
    offset = start
    for index, target in enumerate(targets):
        views = cut(memoryview(target), parts)
        transfer.rows.append((offset, len(target), version, index, b"k%d" % index, views, b""))
        offset += extent_bytes(len(target))
    return transfer, targets


SIZES: dict[str, dict[str, tuple[list[int], int]]] = {
    "host": {
        "empty": ([0], 1), "few": ([1, 0, 4096], 1), "batch": ([4096] * 64, 3),
        "odd": ([300_000, 5, MIB + 1], 7), "many": ([10] * 2_000, 1),
        "large": ([8 * MIB, 9 * MIB], 1_000), "gathered": ([100_000], 5_000),
    },
    "device": {
        "empty": ([0], 1), "few": ([1, 0, 4096], 1), "odd": ([300_000, 5, 9 * MIB], 7),
        "many": ([10] * 500, 1),
    },
    "held-device": {"few": ([1, 0, 4096], 1), "many": ([10] * 500, 1)},
} | {
    memory: {
        "few": ([1, 0, 4096], 1), "batch": ([4096] * 64, 3), "odd": ([300_000, 5, MIB + 1], 7),
        "gathered": ([100_000], 5_000),
    }
    for memory in ("held", "encrypted")
}  # fmt: skip
"""Of objects, and into how many parts their buffers are cut."""


@pytest.mark.parametrize(
    ("memory", "way", "other", "sizes"),
    [
        (memory, one, two, sizes)
        for memory, ways in WAYS.items()
        for one in ways
        for two in ways
        for sizes in SIZES[memory]
    ],
    indirect=["way", "other"],
)
def test_what_one_way_writes_every_other_reads(
    shared_peer: Peer, memory: str, way: TransportVariant, other: TransportVariant, sizes: str
) -> None:
    segment, (size_of, parts) = shared_peer.info, SIZES[memory][sizes]
    some = values(size_of)
    way.carry(writes(segment, some, parts=parts))
    for verify in (True,) if memory == "host" else (True, False):
        transfer, targets = reads(segment, size_of, parts=parts, verify=verify)
        other.carry(transfer)
        assert transfer.outcomes == [b"descriptor"] * len(some)
        assert targets == some


@by(EVERY)
def test_outcomes(shared_peer: Peer, way: TransportVariant) -> None:
    segment, sizes = shared_peer.info, [5_000] * 4
    way.carry(writes(segment, values(sizes)))
    extent = extent_bytes(5_000)
    with memory_of(shared_peer) as memory:
        memory[MIB + extent + HEADER_BYTES + 4_999] ^= 1  # payload of the second
        memory[MIB + 2 * extent + 70] ^= 1  # header of the third
        memory[MIB + 3 * extent : MIB + 3 * extent + 64] = bytes(64)  # the fourth is wiped
    for verify in (True, False):
        transfer, _ = reads(segment, sizes, verify=verify)
        way.carry(transfer)
        second = CORRUPT if verify else b"descriptor"
        assert transfer.outcomes == [b"descriptor", second, STALE, STALE]
    transfer, _ = reads(segment, sizes, version=2)
    way.carry(transfer)
    assert transfer.outcomes == [STALE] * 4


@by(HOST)
@pytest.mark.parametrize("verify", [True, False])
def test_of_another_object_nothing_is_written(
    shared_peer: Peer, way: TransportVariant, verify: bool
) -> None:
    """What is read in the end may be shorter than what stood there first."""
    segment, sizes = shared_peer.info, [0, 7, 5_000, 32 << 10, 40_000, 300_000, 3, 9, MIB]
    some = values(sizes)
    way.carry(writes(segment, some, parts=3))
    extents = [extent_bytes(size) for size in sizes]
    with memory_of(shared_peer) as memory:
        for index in range(0, len(sizes), 2):
            at = MIB + sum(extents[:index])
            memory[at : at + 64] = bytes(64)
    transfer, targets = reads(segment, sizes, parts=3, verify=verify)
    way.carry(transfer)
    assert transfer.outcomes == [STALE, b"descriptor"] * 4 + [STALE]
    for index, (target, value) in enumerate(zip(targets, some, strict=True)):
        assert target == (value if index % 2 else bytes(len(value))), index


@by(EVERY)
def test_bad_ranges_and_strangers(shared_peer: Peer, way: TransportVariant) -> None:
    segment = shared_peer.info
    for start in (0, 4095, segment.size - HEADER_BYTES - 99):
        with pytest.raises(InvalidRangeError):
            way.carry(writes(segment, values([100]), start=start))
        with pytest.raises(InvalidRangeError):
            way.carry(reads(segment, [100], start=start)[0])
    if way.transport.name == "tcp":
        with pytest.raises(PermissionDeniedError):
            way.carry(reads(segment._replace(token=bytes(16)), [100])[0])
        larger = segment._replace(size=2 * segment.size)
        with pytest.raises(InvalidRangeError):  # the node knows better
            way.carry(reads(larger, [100], start=segment.size)[0])
    way.carry(writes(segment, values([100])))


@by(EVERY)
def test_a_fence_ends_it(peer: Peer, way: TransportVariant) -> None:
    before = peer.info
    way.carry(writes(before, values([100])))
    after = peer.ask("bump")
    for transfer in (writes(before, values([200])), reads(before, [100])[0]):
        with pytest.raises(SegmentUnmountedError):
            way.carry(transfer)
    way.transport.forget(before)
    transfer, targets = reads(after, [100])
    way.carry(transfer)
    assert transfer.outcomes == [b"descriptor"]
    assert targets == values([100])


@by(HOST)
@pytest.mark.parametrize("verb", ["read", "write"])
@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_node_that_dies_or_freezes(
    peer: Peer, way: TransportVariant, verb: str, how: str
) -> None:
    segment = peer.info
    some = values(LARGE)
    way.carry(writes(segment, some))
    ended = threading.Event()

    def over_and_over() -> None:
        while True:
            is_write = verb == "write"
            way.carry(writes(segment, some) if is_write else reads(segment, LARGE)[0], 1.0)

    def maltreat() -> None:
        started.wait()
        time.sleep(random.Random(how + verb).random() * 0.05)  # somewhere in the middle
        (peer.kill if how == "kill" else peer.stop)()
        ended.set()

    if way.transport.name == "shm":
        return  # nobody is needed at the other end
    started = threading.Event()
    thread = threading.Thread(target=maltreat)
    thread.start()
    started.set()
    begun = uptime()
    with pytest.raises(UnavailableError) as caught:
        over_and_over()
    thread.join()
    assert uptime() - begun < 30
    if how == "kill":
        assert isinstance(caught.value, NodeUnreachableError)
    else:
        assert isinstance(caught.value, DeadlineExceededError)
    if verb == "read":
        assert caught.value.fields["quiesced"] == 1
    if how == "stop":
        peer.resume()
        way.carry(writes(segment, some))
