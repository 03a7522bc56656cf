"""The fake finds what is wrong: otherwise the tests that use it would not."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from kvstore.device.driver import Direction
from kvstore.errors import DeviceError
from tests.support.fake_device import FakeDriver


def arrays(*values: int) -> list[np.ndarray[tuple[int], np.dtype[np.int64]]]:
    return [np.array([each], np.int64) for each in values]


def test_two_streams_run_in_any_order_and_one_in_its_own() -> None:
    seen = set()
    for seed in range(50):
        driver = FakeDriver(seed=seed)
        order: list[int] = []
        for number in range(3):
            driver.launch(partial(order.append, number), stream=number % 2)
        driver.finish()
        assert order.index(0) < order.index(2)
        seen.add(tuple(order))
    assert seen == {(0, 1, 2), (1, 0, 2), (0, 2, 1)}


def test_memory_that_is_not_locked_is_refused() -> None:
    driver = FakeDriver()
    there = driver.array(64)
    here = np.zeros(64, np.uint8)
    with pytest.raises(DeviceError, match="not page-locked"):
        driver.copy(Direction.SAVE, *arrays(here.ctypes.data, there.ctypes.data, 64))
    driver.lock(here.ctypes.data, 32)
    driver.lock(here.ctypes.data + 32, 32)
    with pytest.raises(DeviceError, match="not page-locked in one piece"):
        driver.copy(Direction.SAVE, *arrays(here.ctypes.data, there.ctypes.data, 64))
    driver.copy(Direction.SAVE, *arrays(here.ctypes.data, there.ctypes.data, 32))
    with pytest.raises(AssertionError, match="while a copy may use it"):
        driver.unlock(here.ctypes.data)
    driver.finish()
    driver.unlock(here.ctypes.data)
    other = np.zeros(64, np.uint8)
    with pytest.raises(DeviceError, match="without the device"):
        driver.copy_ordinary(Direction.SAVE, *arrays(here.ctypes.data, other.ctypes.data, 64))


def test_memory_that_drivers_share() -> None:
    owner, reader = FakeDriver(seed=1), FakeDriver(seed=2)
    address = owner.allocate(4_096)
    opened = reader.open(owner.export(address))
    assert opened != address
    source = reader.array(16)
    source[:] = 7
    done = reader.copy(Direction.SAVE, *arrays(opened + 100, source.ctypes.data, 16))
    reader.finish()
    assert reader.is_done(done)
    target = owner.array(16)
    owner.copy(Direction.LOAD, *arrays(target.ctypes.data, address + 100, 16))
    owner.finish()
    assert target.tolist() == [7] * 16
    reader.close(opened)
    with pytest.raises(DeviceError):
        reader.open("0/0/16")
    owner.free(address)
    with pytest.raises(DeviceError):
        owner.copy(Direction.LOAD, *arrays(target.ctypes.data, address + 100, 16))
