"""Ranges of a device's memory, with a device that copies late and in a random order."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import xxhash

from kvstore.device.device import Device
from kvstore.runtime.clock import uptime
from kvstore.transport.common import RangeCopy
from kvstore.transport.device_ranges import DeviceRanges
from tests.support.fake_device import FakeDriver

SIZE = 1 << 20
RING_BYTES = 8 * 4096
"""Slots of 4 KiB: each half holds 2 KiB."""


def nothing() -> None:
    pass


@pytest.fixture(params=range(4))
def fake(request: pytest.FixtureRequest) -> FakeDriver:
    return FakeDriver("fake:0", seed=request.param)


@pytest.fixture
def device(fake: FakeDriver) -> Iterator[Device]:
    device = Device(fake, ring_bytes=RING_BYTES)
    yield device
    if not device.has_failed:
        assert fake.is_idle, "a copy was left under way"
        assert not device.ring.taken
    device.close()


@pytest.fixture
def pool(fake: FakeDriver, device: Device) -> tuple[DeviceRanges, memoryview]:
    memory = fake.array(SIZE)
    return DeviceRanges(device, memory.ctypes.data), memoryview(memory)  # type: ignore[arg-type]


def soon() -> float:
    return uptime() + 30


def noise(size: int, seed: int = 0) -> memoryview:
    return memoryview(bytearray(random.Random(seed).randbytes(size)))


@pytest.mark.parametrize("size", [0, 1, 2047, 2048, 2049, 70_001])
def test_what_is_written_is_read(pool: tuple[DeviceRanges, memoryview], size: int) -> None:
    ranges, memory = pool
    written, read = noise(size), memoryview(bytearray(size))
    hashers = xxhash.xxh3_64(), xxhash.xxh3_64()
    ranges.write([RangeCopy(5_000, written, hashers[0])], soon(), nothing)
    assert memory[5_000 : 5_000 + size] == written
    ranges.read([RangeCopy(5_000, read, hashers[1])], soon(), nothing)
    assert read == written
    [hashed] = ranges.hashed([(5_000, size)], soon(), nothing)
    wanted = xxhash.xxh3_64_intdigest(written)
    assert [each.intdigest() for each in (*hashers, hashed)] == [wanted] * 3


def test_a_header_lands_behind_its_payload(
    fake: FakeDriver, pool: tuple[DeviceRanges, memoryview]
) -> None:
    """At every moment, a header that is there has a whole payload behind it."""
    ranges, memory = pool
    payload, header = noise(900), memoryview(bytearray(16))
    hasher = xxhash.xxh3_64()
    late: list[int] = []
    moved = fake._move

    def watched(to: int, source: int, size: int) -> None:
        moved(to, source, size)
        if bytes(memory[:16]) != bytes(16) and memory[1024 : 1024 + 900] != payload:
            late.append(to)

    fake._move = watched  # type: ignore[method-assign]
    ranges.write([RangeCopy(0, memoryview(bytes(16)))], soon(), nothing)
    ranges.write([RangeCopy(1024, payload, hasher)], soon(), nothing)
    header[:8] = hasher.digest()
    ranges.write([RangeCopy(0, header)], soon(), nothing)
    assert not late
    assert bytes(memory[:8]) == xxhash.xxh3_64_digest(payload)


def test_a_call_that_is_ended_leaves_no_copy_under_way(
    fake: FakeDriver, pool: tuple[DeviceRanges, memoryview]
) -> None:
    ranges, _ = pool
    for call in (ranges.read, ranges.write):
        rounds: list[int] = []

        def check(rounds: list[int] = rounds) -> None:
            rounds.append(len(rounds))
            if len(rounds) == 3:
                raise InterruptedError

        with pytest.raises(InterruptedError):
            call([RangeCopy(0, noise(20_000))], soon(), check)
        assert fake.is_idle
        assert len(rounds) == 3
