"""Which memory is page-locked, and until when."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.device import page_locks as module
from kvstore.device.page_locks import PageLocks
from tests.support.fake_device import FakeDriver

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _windows_of_a_mebibyte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WINDOW_BYTES", MIB)


def segment(size: int) -> memoryview:
    return memoryview(np.zeros(size, np.uint8))  # type: ignore[arg-type]


def test_windows_are_locked_when_they_are_used_first() -> None:
    driver = FakeDriver()
    locks = PageLocks(driver)
    memory = segment(3 * MIB + 100)
    with locks.of(memory, lambda: True) as locked:
        assert locks.lock(locked, 10, 20)
        assert driver.locked == {locked.base: MIB}
        assert locks.lock(locked, MIB - 1, 2)
        assert locks.lock(locked, 3 * MIB, 100)
        assert driver.locked == {
            locked.base: MIB,
            locked.base + MIB: MIB,
            locked.base + 3 * MIB: 100,
        }
    assert sum(driver.locked.values()) == 2 * MIB + 100
    with locks.of(memory, lambda: True) as again:
        assert again is locked
    locks.close()
    assert driver.locked == {}
    with locks.of(memory, lambda: True) as late:
        assert not locks.lock(late, 0, 1)  # closed


def test_what_the_system_refuses_is_not_asked_again() -> None:
    driver = FakeDriver(lock_max=0)
    locks = PageLocks(driver)
    asked: list[int] = []
    lock = driver.lock

    def counted(address: int, size: int) -> bool:
        asked.append(address)
        return lock(address, size)

    driver.lock = counted  # type: ignore[method-assign]
    with locks.of(segment(MIB), lambda: True) as locked:
        assert not locks.lock(locked, 0, 10)
        assert not locks.lock(locked, 5, 10)
    assert len(asked) == 1


def test_a_segment_in_use_stays_locked_though_it_is_gone() -> None:
    driver = FakeDriver()
    locks = PageLocks(driver)
    with locks.of(segment(MIB), lambda: False) as locked:
        assert locks.lock(locked, 0, 10)
        locks.sweep()
        assert driver.locked
    locks.sweep()
    assert not driver.locked


def test_what_a_copy_may_use_for_ever_stays_locked() -> None:
    driver = FakeDriver()
    locks = PageLocks(driver)
    with locks.of(segment(MIB), lambda: False) as locked:
        assert locks.lock(locked, 0, 10)
        locks.keep()
    locks.sweep()
    locks.close()
    assert driver.locked
