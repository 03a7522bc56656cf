"""Waits for a device end, by the deadline or when the call is cancelled; a device that does not end
its copies is not used again."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from kvstore.device import device as module
from kvstore.device.copies import CopyList
from kvstore.device.device import Device
from kvstore.device.driver import Direction
from kvstore.device.drivers import driver_of
from kvstore.errors import ClosedError, DeadlineExceededError, DeviceError
from kvstore.runtime.cancellation import CancelToken
from kvstore.runtime.clock import uptime
from tests.support.fake_device import FakeDriver


def made() -> tuple[FakeDriver, Device]:
    driver = FakeDriver()
    return driver, Device(driver, ring_bytes=8_000)


def one_copy(driver: FakeDriver, device: Device) -> CopyList:
    there = driver.array(100)
    there[:] = 7
    here = np.frombuffer(device.ring.take(uptime()), np.uint8)
    return CopyList(np.array([there.ctypes.data]), np.array([here.ctypes.data]), np.array([100]))


def test_work_that_does_not_end_by_the_deadline() -> None:
    driver, device = made()
    driver.is_stuck = True
    with pytest.raises(DeadlineExceededError):
        device.wait([driver.record_event()], uptime() + 0.01)
    assert not device.has_failed
    driver.is_stuck = False
    device.wait([driver.record_event(), driver.record_event()], uptime() + 30)


def test_a_wait_ends_when_the_call_is_cancelled() -> None:
    driver, device = made()
    driver.is_stuck = True
    stop = CancelToken()
    errors: list[BaseException] = []

    def call() -> None:
        try:
            with stop.here():
                device.wait([driver.record_event()], uptime() + 60)
        except ClosedError as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    stop.set()
    thread.join(30)
    assert len(errors) == 1


def test_a_wait_ends_when_the_client_is_closed() -> None:
    driver, device = made()
    driver.is_stuck = True
    closing = threading.Timer(0.05, device.close)
    closing.start()
    with pytest.raises(ClosedError):
        device.wait([driver.record_event()], uptime() + 60)
    closing.join()


def test_a_wait_is_for_all_of_its_events(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, device = made()
    first, second = driver.record_event(), driver.record_event(5)
    for done in (first, second):
        monkeypatch.setattr(driver, "is_done", lambda event, done=done: event is done)
        with pytest.raises(DeadlineExceededError):
            device.wait([first, second], uptime() + 0.01)


def test_copies_under_way_are_waited_for_though_the_call_was_stopped_and_late() -> None:
    driver, device = made()
    event = device.copy(Direction.SAVE, one_copy(driver, device))
    driver.is_stuck = True
    stop = CancelToken()
    stop.set()
    goes_on = threading.Timer(0.1, lambda: setattr(driver, "is_stuck", False))
    goes_on.start()
    with stop.here():
        device.wait_for_copies(
            event, uptime() - 1
        )  # as if the deadline had passed while they were queued
    assert driver.copied_bytes == 100
    goes_on.join()


def test_a_device_that_has_failed_is_used_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COPIES_WAIT_S", 0.01)
    driver, device = made()
    copies = one_copy(driver, device)
    segment = memoryview(bytearray(4_000))
    taken = device.ring.taken
    with device.locks.of(segment, lambda: True) as locked:
        assert device.locks.lock(locked, 0, 4_000)
    event = device.copy(Direction.SAVE, copies)
    driver.is_stuck = True
    with device.slot(uptime()), pytest.raises(DeviceError):
        device.wait_for_copies(event, uptime())
    assert device.ring.taken == taken + 1, "copies may still be under way there"
    driver.is_stuck = False
    uses: tuple[Callable[[], object], ...] = (
        lambda: device.wait([], uptime() + 1),
        lambda: device.copy(Direction.SAVE, copies),
        lambda: device.copy_ordinary(Direction.SAVE, copies),
        lambda: device.wait_for_copies(event, uptime() + 1),
    )
    for use_it in uses:
        with pytest.raises(DeviceError, match="did not finish"):
            use_it()
    device.close()
    assert list(driver.locked.values()) == [4_000]


@pytest.mark.parametrize("name", ["", "cpu", "cuda:x", "xpu:0", "cuda:-1"])
def test_names_that_are_no_device(name: str) -> None:
    with pytest.raises(DeviceError, match="is no device"):
        driver_of(name)
