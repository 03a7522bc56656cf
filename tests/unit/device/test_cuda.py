"""The calls that the driver of CUDA makes, on a library that records them and copies memory of the
host. What a GPU does with them is tested by ``make test-gpu``."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvstore.device import cuda
from kvstore.device.cuda import CUDADriver, DeviceInfo, probe
from kvstore.device.driver import Direction
from kvstore.device.drivers import driver_of, use
from kvstore.errors import DeviceError
from kvstore.memory.process_memory import cuda_device_at

CONTEXT = 0x77
INVALID = 1
NOT_READY = 600
OF_DEVICE = 2


class Recorded:
    """In the place of ``libcuda.so.1``: every call, and which of them fail."""

    def __init__(self, *, batches: bool = True) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.fails: dict[str, int] = {}
        self.contexts: list[int] = []
        self.handles = iter(range(1_000, 10_000))
        self.batches = batches
        self.buffers: dict[int, Any] = {}
        self.reaches_host_memory = 1
        self.capture_mode = 0

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu") or (name == "cuMemcpyBatchAsync" and not self.batches):
            raise AttributeError(name)

        class Function:
            argtypes: Any = None
            restype: Any = None

            def __call__(self, *arguments: Any) -> int:
                return recorded.call(name, *arguments)

        recorded, function = self, Function()
        setattr(self, name, function)
        return function

    def call(self, name: str, *arguments: Any) -> int:
        needs_context = not name.startswith(
            ("cuInit", "cuDevice", "cuCtxPush", "cuGetError", "cuPointer")
        )
        assert not needs_context or self.contexts == [CONTEXT], name
        is_bracket = name.startswith(("cuCtx", "cuThreadExchange"))
        assert not needs_context or is_bracket or self.capture_mode == 2, name
        self.calls.append((name, arguments))
        if name in self.fails:
            return self.fails[name]
        act = getattr(self, "_" + name, None)
        return 0 if act is None else (act(*arguments) or 0)

    @property
    def used(self) -> list[str]:
        """The calls but for those that enter and leave the context."""
        bracket = ("cuCtx", "cuThreadExchange")
        return [name for name, _ in self.calls if not name.startswith(bracket)]

    def count(self, name: str) -> int:
        return sum(each == name for each, _ in self.calls)

    def _cuDevicePrimaryCtxRetain(self, made: Any, number: int) -> None:  # noqa: N802
        made._obj.value = CONTEXT

    def _cuDeviceGetAttribute(self, value: Any, attribute: int, device: int) -> None:  # noqa: N802
        assert attribute == 91
        value._obj.value = self.reaches_host_memory

    def _cuThreadExchangeStreamCaptureMode(self, mode: Any) -> None:  # noqa: N802
        self.capture_mode, mode._obj.value = mode._obj.value, self.capture_mode

    def _cuDeviceGetCount(self, count: Any) -> None:  # noqa: N802
        count._obj.value = 2

    def _cuCtxPushCurrent_v2(self, context: Any) -> None:  # noqa: N802
        self.contexts.append(context.value)

    def _cuCtxPopCurrent_v2(self, popped: Any) -> None:  # noqa: N802
        popped._obj.value = self.contexts.pop()

    def _cuCtxGetStreamPriorityRange(self, lowest: Any, highest: Any) -> None:  # noqa: N802
        lowest._obj.value, highest._obj.value = 0, -5

    def _cuStreamCreateWithPriority(self, made: Any, flags: int, priority: int) -> None:  # noqa: N802
        made._obj.value = next(self.handles)

    def _cuEventCreate(self, made: Any, flags: int) -> None:  # noqa: N802
        made._obj.value = next(self.handles)

    def _cuMemcpyAsync(self, to: int, source: int, size: int, stream: Any) -> None:  # noqa: N802
        ctypes.memmove(to, source, size)

    def _cuMemcpyBatchAsync(  # noqa: N802
        self, to: Any, source: Any, sizes: Any, count: int, attributes: Any, firsts: Any,
        attribute_count: int, refused: Any, stream: Any,
    ) -> None:  # fmt: skip
        assert (attributes._obj.source_order, firsts._obj.value, attribute_count) == (1, 0, 1)
        for row in range(count):
            ctypes.memmove(to[row], source[row], sizes[row])

    def _cuMemHostAlloc(self, made: Any, size: int, flags: int) -> None:  # noqa: N802
        buffer = np.zeros(size, np.uint8)
        self.buffers[buffer.ctypes.data] = buffer
        made._obj.value = buffer.ctypes.data

    def _cuMemFreeHost(self, address: int) -> None:  # noqa: N802
        del self.buffers[address]

    def _cuGetErrorString(self, status: int, text: Any) -> None:  # noqa: N802
        text._obj.value = b"invalid argument"

    def _cuPointerGetAttribute(self, value: Any, attribute: int, address: Any) -> int:  # noqa: N802
        if address.value < 4_096:
            return INVALID
        value._obj.value = {2: OF_DEVICE, 8: 0, 9: 3}[attribute]
        return 0


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorded]:
    recorded = Recorded()
    monkeypatch.setattr(cuda, "_libraries", [recorded])
    yield recorded
    assert not recorded.contexts  # what was current before is current again
    assert recorded.capture_mode == 0


def arrays(count: int, size: int) -> tuple[list[Any], list[Any], Any]:
    random = np.random.default_rng(count)
    source = [random.integers(0, 256, size, np.uint8) for _ in range(count)]
    to = [np.zeros(size, np.uint8) for _ in range(count)]
    return to, source, np.full(count, size, np.int64)


def addresses(memory: list[Any]) -> Any:
    return np.array([each.ctypes.data for each in memory], np.int64)


def test_one_call_copies_a_batch(library: Recorded) -> None:
    driver = CUDADriver(2)
    assert driver.name == "cuda:2"
    to, source, sizes = arrays(1_000, 50)
    event = driver.copy(Direction.SAVE, addresses(to), addresses(source), sizes)
    assert all(np.array_equal(left, right) for left, right in zip(to, source, strict=True))
    assert library.count("cuMemcpyBatchAsync") == 1
    assert library.count("cuMemcpyAsync") == 0
    assert library.used[-1] == "cuEventRecord"
    assert driver.is_done(event)
    library.fails["cuEventQuery"] = NOT_READY
    assert not driver.is_done(event)
    library.fails["cuEventQuery"] = 700
    with pytest.raises(
        DeviceError, match=r"cuEventQuery on cuda:2 failed: invalid argument \(700\)"
    ):
        driver.is_done(event)


def test_saves_and_loads_have_streams_of_their_own(library: Recorded) -> None:
    driver = CUDADriver(0)
    priorities = [args[2] for name, args in library.calls if name == "cuStreamCreateWithPriority"]
    assert priorities == [0, -5]  # saves yield
    to, source, sizes = arrays(2, 8)
    used = []
    for way in Direction:
        driver.copy(way, addresses(to), addresses(source), sizes)
        used.append([args for name, args in library.calls if name == "cuEventRecord"][-1][1])
    assert len(set(used)) == 2


def test_a_driver_without_the_batch_call(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = Recorded(batches=False)
    monkeypatch.setattr(cuda, "_libraries", [recorded])
    driver = CUDADriver(0)
    to, source, sizes = arrays(5, 9)
    driver.copy(Direction.LOAD, addresses(to), addresses(source), sizes)
    assert all(np.array_equal(left, right) for left, right in zip(to, source, strict=True))
    assert recorded.count("cuMemcpyAsync") == 5


@pytest.mark.parametrize("function", ["cuMemcpyBatchAsync", "cuMemcpyAsync"])
def test_what_was_queued_before_a_refusal_has_ended(library: Recorded, function: str) -> None:
    driver = CUDADriver(0)
    to, source, sizes = arrays(2, 8)
    library.fails[function] = INVALID
    copy = driver.copy if function == "cuMemcpyBatchAsync" else driver.copy_ordinary
    with pytest.raises(DeviceError, match=rf"{function} .* 8 bytes from 0x"):
        copy(Direction.SAVE, addresses(to), addresses(source), sizes)
    names = [name for name, _ in library.calls]
    assert "cuStreamSynchronize" in names[names.index(function) :]


def test_memory_of_the_host(library: Recorded) -> None:
    driver = CUDADriver(0)
    memory = driver.locked_memory(4_096)
    memory[:3] = b"abc"
    assert len(library.buffers) == 1
    driver.release(memory)
    assert not library.buffers
    assert driver.lock(0x1000, 4_096)
    driver.unlock(0x1000)
    assert [args for name, args in library.calls if name == "cuMemHostUnregister"] == [(0x1000,)]
    library.fails["cuMemHostRegister_v2"] = 2
    assert not driver.lock(0x1000, 4_096)


def test_a_device_that_is_not_there(library: Recorded) -> None:
    library.fails["cuDeviceGet"] = 101
    with pytest.raises(DeviceError, match=r"cuDeviceGet on cuda:7 failed: .*101"):
        driver_of("cuda:7")
    use("cuda:7", None)


def test_which_device_an_address_is_of(library: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: library)
    assert cuda_device_at(0x7F00_0000_0000) == "cuda:3"
    assert cuda_device_at(16) == ""


def test_what_is_there(library: Recorded) -> None:
    assert probe() == [DeviceInfo("cuda:0", True, True), DeviceInfo("cuda:1", True, True)]
    library.fails["cuMemHostRegister_v2"] = 2
    assert [each.locks for each in probe()] == [False, False]
    library.fails["cuDeviceGetCount"] = 999
    with pytest.raises(DeviceError, match="cuDeviceGetCount failed"):
        probe()


def test_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_libraries", [])
    monkeypatch.setattr(cuda, "LIBRARY", "libno-such-driver.so.1")
    with pytest.raises(DeviceError, match="NVIDIA's driver cannot be used"):
        CUDADriver(0)


def test_the_child_of_a_fork_is_told(library: Recorded) -> None:
    driver = CUDADriver(0)
    driver._pid = os.getpid() + 1
    with pytest.raises(DeviceError, match="child of a fork"):
        driver.record_event()


def test_memory_that_processes_share(library: Recorded) -> None:
    """The handle names the device by what identifies it in every process."""
    there = [b"u" * 16, b"v" * 16]
    handle = bytes(range(64))

    def allocate(made: Any, size: int) -> None:
        made._obj.value = 0x7000_0000

    def uuid(into: Any, device: Any) -> None:
        ctypes.memmove(into, there[device.value], 16)

    def get(device: Any, number: int) -> None:
        device._obj.value = number

    def count(made: Any) -> None:
        made._obj.value = len(there)

    def export(made: Any, address: int) -> None:
        assert address == 0x7000_0000
        ctypes.memmove(made, handle, 64)

    def opened(made: Any, given: Any, flags: int) -> None:
        assert (bytes(given), flags) == (handle, 1)
        made._obj.value = 0x8000_0000

    for name, act in {
        "cuMemAlloc_v2": allocate, "cuDeviceGetUuid_v2": uuid, "cuDeviceGet": get,
        "cuDeviceGetCount": count, "cuIpcGetMemHandle": export, "cuIpcOpenMemHandle_v2": opened,
    }.items():  # fmt: skip
        setattr(library, "_" + name, act)
    owner = CUDADriver(1)
    address = owner.allocate(1 << 20)
    exported = owner.export(address)
    assert len(exported) == 2 * (16 + 64)
    assert exported.isprintable()
    there.reverse()  # another process numbers the devices in another way
    assert cuda.name_of(exported) == "cuda:0"
    reader = CUDADriver(0)
    assert reader.open(exported) == 0x8000_0000
    reader.close(0x8000_0000)
    owner.free(address)
    ended = {"cuIpcCloseMemHandle", "cuMemFree_v2"}
    assert [args for name, args in library.calls if name in ended] == [
        (0x8000_0000,),
        (0x7000_0000,),
    ]
    there[:] = [b"w" * 16]
    with pytest.raises(DeviceError, match="does not see the device"):
        cuda.name_of(exported)
    for bad in ("", "no hex", "00" * 20):
        with pytest.raises(DeviceError):
            reader.open(bad)
    library.fails["cuMemAlloc_v2"] = 2
    with pytest.raises(DeviceError, match=r"cuMemAlloc.* 1024 MiB"):
        owner.allocate(1 << 30)


def test_a_device_without_a_number_is_the_current_one(library: Recorded) -> None:
    try:
        assert driver_of("cuda") is driver_of("cuda:0")
    finally:
        use("cuda:0", None)
