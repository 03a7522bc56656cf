"""The drivers of this process, by device.

``cuda`` is the kind of NVIDIA's devices. Tests add a kind of their own. Peers and settings choose
among ``_kinds``, so a kind that is safe in tests only must not be there otherwise.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from kvstore.device.driver import DeviceDriver
from kvstore.device.streams import current_device
from kvstore.errors import DeviceError

_drivers: Final[dict[str, DeviceDriver]] = {}
_lock: Final = threading.Lock()


def full_name(name: str) -> str:
    """The name of a device with its number: ``cuda`` is the device on which this thread computes,
    as it is for torch."""
    if name != "cuda":
        return name
    return f"cuda:{current_device()}"


def driver_of(name: str) -> DeviceDriver:
    """The driver of a device, made once per process.

    Raises:
        DeviceError: there is no such device, or no driver for it.
    """
    name = full_name(name)
    with _lock:
        known = _drivers.get(name)
        if known is None:
            known = _drivers[name] = _new(name)
        return known


def driver_of_handle(name: str, handle: str) -> DeviceDriver:
    """The driver of the device whose memory another process has exported, whatever number the
    device has in this process.

    Args:
        name: of the device in the exporting process.
        handle: as ``DeviceDriver.export`` returned it there.

    Raises:
        DeviceError: this process cannot use that device.
    """
    if name.startswith("cuda:"):
        from kvstore.device.cuda import name_of  # loads the driver's library

        name = name_of(handle)
    return driver_of(name)


def use(name: str, driver: DeviceDriver | None) -> None:
    """Makes ``driver`` the driver of this device in this process; None: the usual one again. For
    tests."""
    with _lock:
        _drivers.pop(name, None)
        if driver is not None:
            _drivers[name] = driver


def add_kind(kind: str, make: Callable[[int], DeviceDriver]) -> None:
    """Makes devices of another kind known in this process. For tests."""
    _kinds[kind] = make


def _new(name: str) -> DeviceDriver:
    kind, _, number = name.partition(":")
    make = _kinds.get(kind)
    if make is None or not (number.isascii() and number.isdigit()):
        raise DeviceError(
            f"{name} is no device whose memory kvstore can copy",
            advice="Name a CUDA device, such as cuda:0.",
            device=name,
        )
    return make(int(number))


def _cuda(number: int) -> DeviceDriver:
    from kvstore.device.cuda import CUDADriver  # loads the driver's library

    return CUDADriver(number)


_kinds: Final[dict[str, Callable[[int], DeviceDriver]]] = {"cuda": _cuda}
