from __future__ import annotations

import threading

import pytest

from kvstore.device.staging_ring import SLOTS, StagingRing
from kvstore.errors import ClosedError, DeadlineExceededError
from kvstore.runtime.clock import uptime
from tests.support.fake_device import FakeDriver


def test_slots_are_equal_parts_of_memory_that_is_locked_once() -> None:
    driver = FakeDriver()
    ring = StagingRing(driver, SLOTS * 1_000)
    assert driver.locked_own_bytes == 0
    slots = [ring.take(uptime()) for _ in range(SLOTS)]
    assert driver.locked_own_bytes == SLOTS * 1_000
    assert [len(slot) for slot in slots] == [1_000] * SLOTS
    for number, slot in enumerate(slots):
        slot[:] = bytes([number]) * 1_000
    assert [slot[999] for slot in slots] == list(range(SLOTS))  # they do not overlap
    with pytest.raises(DeadlineExceededError):
        ring.take(uptime() + 0.01)
    ring.give(slots[3])
    assert ring.take(uptime())[0] == 3


def test_a_slot_that_is_given_back_wakes_one_that_waits() -> None:
    ring = StagingRing(FakeDriver(), SLOTS * 8)
    slots = [ring.take(uptime()) for _ in range(SLOTS)]
    taken: list[memoryview] = []
    waiting = threading.Thread(target=lambda: taken.append(ring.take(uptime() + 30)))
    waiting.start()
    ring.give(slots.pop())
    waiting.join(30)
    assert len(taken) == 1


def test_memory_in_use_is_not_released() -> None:
    driver = FakeDriver()
    ring = StagingRing(driver, SLOTS * 8)
    slot = ring.take(uptime())
    ring.close()
    assert driver.locked_own_bytes
    slot[:] = b"12345678"
    with pytest.raises(ClosedError):
        ring.take(uptime() + 30)
    ring.give(slot)
    assert not driver.locked_own_bytes
    with pytest.raises(ClosedError):
        ring.take(uptime() + 30)

    other = StagingRing(driver, SLOTS * 8)
    other.give(other.take(uptime()))
    before = driver.locked_own_bytes
    other.close()
    assert driver.locked_own_bytes == before - SLOTS * 8


def test_a_wait_for_a_slot_ends_when_the_ring_is_closed() -> None:
    ring = StagingRing(FakeDriver(), SLOTS * 8)
    for _ in range(SLOTS):
        ring.take(uptime())
    closing = threading.Timer(0.05, ring.close)
    closing.start()
    with pytest.raises(ClosedError):
        ring.take(uptime() + 60)
    closing.join()
