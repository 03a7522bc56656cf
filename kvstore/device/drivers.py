"""The drivers of this process, by device.

``cuda`` is the kind of NVIDIA's devices; tests add their own. Peers and settings choose among
``_kinds``, so a kind that is safe only in tests must not be registered otherwise.
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
    """Return the name with its number: ``cuda`` is this thread's current device, as for torch."""
    if name != "cuda":
        return name
    return f"cuda:{current_device()}"


def driver_of(name: str) -> DeviceDriver:
    """Return a device's driver, created once. Raises DeviceError: there is none."""
    name = full_name(name)
    with _lock:
        known = _drivers.get(name)
        if known is None:
            known = _drivers[name] = _new(name)
        return known


def driver_of_handle(name: str, handle: str) -> DeviceDriver:
    """Return the driver of an exported memory's device. Raises DeviceError: it cannot be used.

    ``name``: of the device in the exporting process; ``handle``: of ``DeviceDriver.export``.
    """
    if name.startswith("cuda:"):
        from kvstore.device.cuda import name_of  # loads the driver's library

        name = name_of(handle)
    return driver_of(name)


def use(name: str, driver: DeviceDriver | None) -> None:
    """Override the driver of this device; None: restore the usual one. For tests."""
    with _lock:
        _drivers.pop(name, None)
        if driver is not None:
            _drivers[name] = driver


def add_kind(kind: str, make: Callable[[int], DeviceDriver]) -> None:
    """Register devices of another kind. For tests."""
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
