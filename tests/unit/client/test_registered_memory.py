"""Memory by address: what was registered is lent piece by piece, and nothing else."""

from __future__ import annotations

import ctypes
import mmap
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvstore import Client
from kvstore.client.registered_memory import RegisteredBuffers
from kvstore.client.values import encode, writable
from kvstore.device.device import Device
from kvstore.device.memory import DeviceMemory
from kvstore.errors import BufferMismatchError, InvalidArgumentError
from kvstore.memory.process_memory import address_of, memory_at
from tests.support.fake_device import FakeDriver

PAGE = mmap.PAGESIZE


def test_memory_at_an_address_is_that_memory() -> None:
    array = np.arange(10_000, dtype=np.uint8)
    view = memory_at(array.ctypes.data, array.nbytes)
    assert view == memoryview(array)  # type: ignore[arg-type]
    view[5:7] = b"xy"
    assert array[5:7].tobytes() == b"xy"
    assert (view.format, view.ndim, view.readonly) == ("B", 1, False)
    assert address_of(view) == array.ctypes.data


@pytest.mark.parametrize(
    ("address", "size"),
    [(0, 10), (-4096, 10), (4096, 0), (4096, -1), ((1 << 64) - 8, 16), (1 << 65, 8)],
)
def test_what_is_no_range_of_addresses_is_refused(address: int, size: int) -> None:
    with pytest.raises(InvalidArgumentError, match="are no memory"):
        memory_at(address, size)


def protected(pages: int, which: int, how: int) -> tuple[mmap.mmap, int]:
    """Anonymous memory one page of which is protected so, and its address."""
    memory = mmap.mmap(-1, pages * PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    page = ctypes.c_void_p(address + which * PAGE)
    assert not ctypes.CDLL(None).mprotect(page, PAGE, how)
    return memory, address


@pytest.mark.parametrize("which", [0, 1, 500, 998, 999])
def test_a_hole_is_found_wherever_it_is(which: int) -> None:
    memory, address = protected(1000, which, 0)
    with pytest.raises(
        InvalidArgumentError, match=f"address {address + which * PAGE:#x} is not readable"
    ):
        memory_at(address, 1000 * PAGE)
    for start, pages in ((0, which), (which + 1, 999 - which)):
        if pages:
            memory_at(address + start * PAGE, pages * PAGE)
    with pytest.raises(InvalidArgumentError):
        memory_at(address + which * PAGE + 5, 3)
    del memory


@pytest.mark.parametrize("which", [0, 2, 4])
def test_memory_that_is_mapped_read_only_is_lent_read_only(which: int) -> None:
    memory, address = protected(5, which, mmap.PROT_READ)
    assert memory_at(address, 5 * PAGE).readonly
    assert memory_at(address + which * PAGE, 1).readonly
    beside = address + (4 if which == 0 else 0) * PAGE
    assert not memory_at(beside, PAGE).readonly
    lent = RegisteredBuffers()
    lent.add(memory_at(address, 5 * PAGE))
    with pytest.raises(BufferMismatchError, match="writable"):
        writable(lent.at(address + 7, 100))
    given: Any = encode(lent.at(address + 7, 100))
    assert [each.nbytes for each in given.parts] == [100]
    del memory


def test_parts_are_lent_of_one_region_only() -> None:
    registered = RegisteredBuffers()
    array = np.arange(200, dtype=np.uint8)
    left, right = memoryview(array[:100]), memoryview(array[100:])  # type: ignore[arg-type]
    start = address_of(left)
    registered.add(right)
    registered.add(left)
    assert registered.at(start, 100) == left
    assert registered.at(start + 90, 10).tolist() == list(range(90, 100))
    assert registered.at(start + 100, 100) == right
    for address, size in [(start - 1, 2), (start + 90, 11), (start + 199, 2), (start, -1), (5, 1)]:
        with pytest.raises(InvalidArgumentError, match="not within memory that was registered"):
            registered.at(address, size)


def test_what_overlaps_is_refused_and_what_was_taken_back_is_unknown() -> None:
    registered = RegisteredBuffers()
    array = np.zeros(100, np.uint8)
    whole = memoryview(array)  # type: ignore[arg-type]
    registered.add(whole[20:60])
    for overlapping in (whole[20:60], whole[:21], whole[59:], whole, whole[30:31]):
        with pytest.raises(InvalidArgumentError, match="registered already"):
            registered.add(overlapping)
    registered.add(whole[:20])
    registered.add(whole[60:])
    registered.add(whole[:0])
    assert registered.take(address_of(whole[20:])) is not None
    assert registered.take(address_of(whole[20:])) is None
    with pytest.raises(InvalidArgumentError):
        registered.at(address_of(whole[20:]), 1)
    registered.add(whole[25:30])


def test_unregister_waits_for_all_that_the_transports_may_still_write_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also for a part of what was registered: a read into it may have been given up."""
    array = np.arange(64, dtype=np.uint8)
    with Client("127.0.0.1:1") as client:
        waited: list[list[int]] = []
        engine = SimpleNamespace(
            register=lambda _: None, unregister=lambda view: waited.append(view.tolist())
        )
        monkeypatch.setattr(client._state.movers, "_engine", engine)
        client.register(array)
        client.unregister(array[8:16])
        client.unregister(array[:8])  # where the whole begins
        client.unregister(array[:8])
        client.unregister(array.ctypes.data)
        assert waited == [list(range(8, 16)), list(range(64)), list(range(8))]


def on_devices() -> tuple[RegisteredBuffers, Device, list[int]]:
    """Two neighbouring regions and a third of one device, one of another, one of the host."""
    registered = RegisteredBuffers()
    device, other = (Device(FakeDriver(name), ring_bytes=8) for name in "ab")
    starts = [1 << 20, (1 << 20) + 100, 1 << 30]
    for start in starts:
        registered.add_of(device, start, 100)
    registered.add_of(other, 1 << 25, 100)
    registered.add(memoryview(HOST))  # type: ignore[arg-type]
    return registered, device, starts


HOST = np.arange(64, dtype=np.uint8)


def test_runs_of_one_device_are_one_value() -> None:
    registered, device, (first, second, third) = on_devices()
    addresses, sizes = [third + 1, first, second + 10, first + 5], [99, 100, 90, 0]
    payload = registered.payload(addresses, sizes)
    assert isinstance(payload, DeviceMemory)
    assert payload.device is device
    assert payload.addresses.tolist() == addresses[:3]
    assert payload.sizes.tolist() == sizes[:3]
    assert (payload.nbytes, payload.after) == (289, ())
    host = HOST.ctypes.data
    parts = registered.payload([host + 2, host, host + 9], [3, 1, 0])
    assert isinstance(parts, list)
    assert [part.tolist() for part in parts] == [[2, 3, 4], [0]]
    assert registered.payload([5], [0]) == []


@pytest.mark.parametrize(
    ("start", "size"),
    [
        ((1 << 20) - 1, 2), ((1 << 20) + 99, 2), ((1 << 20) + 90, 20), ((1 << 30) + 101, 1),
        (1 << 20, -1), (1 << 25, 10), (0, 1), (1 << 20, (1 << 63) - 1), (1 << 64, 1),
        pytest.param(HOST.ctypes.data, 1, id="the host's"),
    ],
)  # fmt: skip
def test_a_run_elsewhere_is_refused(start: int, size: int) -> None:
    registered, _, (first, *_) = on_devices()
    with pytest.raises(InvalidArgumentError):
        registered.payload([first, start], [1, size])
    if start != 1 << 25 and start != HOST.ctypes.data:
        with pytest.raises(InvalidArgumentError):
            registered.payload([start], [size])


def test_memory_of_a_device_is_not_lent_as_the_hosts() -> None:
    registered, device, (first, second, _) = on_devices()
    with pytest.raises(InvalidArgumentError, match="memory of a"):
        registered.at(first, 10)
    with pytest.raises(InvalidArgumentError):
        registered.payload([HOST.ctypes.data, first], [1, 1])
    with pytest.raises(InvalidArgumentError, match="registered already"):
        registered.add_of(device, first + 50, 10)
    assert registered.take(first) is None
    with pytest.raises(InvalidArgumentError, match="not within memory that was registered"):
        registered.payload([first], [1])
    registered.payload([second], [1])
    registered.add_of(device, first, 100)
