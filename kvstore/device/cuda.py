"""The NVIDIA driver, through its library ``libcuda.so.1``.

The library is called directly, with numpy arrays of addresses: for the 64,000 copies of 1,000
blocks, NVIDIA's Python package converts each address and size by itself and holds the GIL for 13 to
25 ms (measured with cuda-bindings 12.9.4).

Streams and events are handles of the device's primary context, as in torch. Each call makes that
context current and then restores the previous one.
"""

# mypy: allow-untyped-calls
# torch annotates its CUDA classes only in part.

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import numpy as np

from kvstore.device.driver import Direction, Event, Numbers
from kvstore.device.streams import current_stream
from kvstore.errors import DeviceError
from kvstore.memory.process_memory import address_of

if TYPE_CHECKING:
    import torch

log = logging.getLogger("kvstore.device")

LIBRARY: Final = "libcuda.so.1"

# Values of enums and flags of cuda.h.
_NOT_READY = 600
_STREAM_NON_BLOCKING = 1
_EVENT_DISABLE_TIMING = 2
_HOST_PORTABLE = 1
_IPC_LAZY_PEER_ACCESS = 1
_UUID_BYTES = 16
_IN_STREAM_ORDER = 1
_CAPTURE_RELAXED = 2

_Handle = ctypes.c_void_p
_Size = ctypes.c_size_t
_Address = ctypes.c_uint64
_Int = ctypes.c_int
_ToHandle = ctypes.POINTER(ctypes.c_void_p)
_ToInt = ctypes.POINTER(ctypes.c_int)
_ToAddress = ctypes.POINTER(ctypes.c_uint64)


class _IPCHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * 64),)


_FUNCTIONS: Final = {
    "cuInit": [ctypes.c_uint],
    "cuGetErrorString": [_Int, ctypes.POINTER(ctypes.c_char_p)],
    "cuDeviceGetCount": [_ToInt],
    "cuDeviceGet": [_ToInt, _Int],
    "cuDevicePrimaryCtxRetain": [_ToHandle, _Int],
    "cuCtxPushCurrent_v2": [_Handle],
    "cuCtxPopCurrent_v2": [_ToHandle],
    "cuCtxGetStreamPriorityRange": [_ToInt, _ToInt],
    "cuThreadExchangeStreamCaptureMode": [_ToInt],
    "cuStreamCreateWithPriority": [_ToHandle, ctypes.c_uint, _Int],
    "cuEventCreate": [_ToHandle, ctypes.c_uint],
    "cuEventRecord": [_Handle, _Handle],
    "cuEventQuery": [_Handle],
    "cuMemcpyAsync": [_Address, _Address, _Size, _Handle],
    "cuMemHostRegister_v2": [_Handle, _Size, ctypes.c_uint],
    "cuMemHostUnregister": [_Handle],
    "cuMemHostAlloc": [_ToHandle, _Size, ctypes.c_uint],
    "cuMemFreeHost": [_Handle],
    "cuDeviceGetUuid_v2": [_Handle, _Int],
    "cuMemAlloc_v2": [_ToAddress, _Size],
    "cuMemFree_v2": [_Address],
    "cuIpcGetMemHandle": [_Handle, _Address],
    "cuIpcOpenMemHandle_v2": [_ToAddress, _IPCHandle, ctypes.c_uint],
    "cuIpcCloseMemHandle": [_Address],
}
"""Argument types of the called functions; each returns a ``CUresult``."""


class _Location(ctypes.Structure):
    _fields_ = (("type", _Int), ("id", _Int))


class _Attributes(ctypes.Structure):
    """``CUmemcpyAttributes``: how the copies of a batch read their source."""

    _fields_ = (
        ("source_order", _Int),
        ("source", _Location),
        ("destination", _Location),
        ("flags", ctypes.c_uint),
    )


_Numbers = ctypes.POINTER(ctypes.c_uint64)
_BATCH_V1: Final[Any] = [
    _Numbers, _Numbers, _Numbers, _Size, ctypes.POINTER(_Attributes), ctypes.POINTER(_Size), _Size,
    ctypes.POINTER(_Size), _Handle,
]  # fmt: skip
"""Arguments of ``cuMemcpyBatchAsync`` since CUDA 12.8; one returns the refused copy."""


class _CudaEvent:
    """An event whose handle is recycled when dropped, without a lock or a call of CUDA."""

    __slots__ = ("handle", "spare")

    def __init__(self, handle: int, spare: deque[int]) -> None:
        self.handle = handle
        self.spare = spare

    def __del__(self) -> None:
        self.spare.append(self.handle)


class _CudaArrayInterface:
    """Device memory that torch adopts without a copy; the tensor's storage keeps this alive."""

    def __init__(self, address: int, size: int, keep: object) -> None:
        self.__cuda_array_interface__ = {
            "version": 2, "shape": (size,), "typestr": "|u1", "data": (address, False),
        }  # fmt: skip
        self.keep = keep


class CUDADriver:
    """The CUDA driver of one device. Threads: any. In the child of a fork every call fails."""

    def __init__(self, number: int) -> None:
        """Open a device. Raises DeviceError: no driver, or no such device."""
        self.name: Final = f"cuda:{number}"
        self._library = library()
        device = _Int()
        context = _Handle()
        self._call("cuDeviceGet", ctypes.byref(device), number)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device.value)
        self._context = context
        self._pid = os.getpid()
        self._number = number
        self._spare_events: deque[int] = deque()
        lowest, highest = _Int(), _Int()
        with self._current():
            self._call("cuCtxGetStreamPriorityRange", ctypes.byref(lowest), ctypes.byref(highest))
            self._streams = {
                Direction.SAVE: self._new_stream(lowest.value),
                Direction.LOAD: self._new_stream(highest.value),
            }
        self._batch = self._batch_function()

    @property
    def copies_batches(self) -> bool:
        return self._batch is not None

    def record_event(self, stream: int | None = None) -> Event:
        return self._record(current_stream(self._number) if stream is None else stream)

    def is_done(self, event: Event) -> bool:
        with self._current():
            status: int = self._library.cuEventQuery(cast("_CudaEvent", event).handle)
        if status == _NOT_READY:
            return False
        self._check("cuEventQuery", status)
        return True

    def _record(self, stream: int) -> Event:
        with self._current():
            try:
                handle = self._spare_events.popleft()
            except IndexError:
                made = _Handle()
                self._call("cuEventCreate", ctypes.byref(made), _EVENT_DISABLE_TIMING)
                handle = made.value or 0
            event = _CudaEvent(handle, self._spare_events)
            self._call("cuEventRecord", handle, stream)
        return event

    def copy(self, way: Direction, to: Numbers, source: Numbers, sizes: Numbers) -> Event:
        if self._batch is None or len(sizes) == 1:
            return self.copy_ordinary(way, to, source, sizes)
        attributes = _Attributes(source_order=_IN_STREAM_ORDER)
        first, refused = _Size(0), _Size(0)
        arrays = [np.ascontiguousarray(column, np.int64) for column in (to, source, sizes)]
        columns = [column.ctypes.data_as(_Numbers) for column in arrays]
        with self._current():
            status = self._batch(
                *columns, len(sizes), ctypes.byref(attributes), ctypes.byref(first), 1,
                ctypes.byref(refused), self._streams[way],
            )  # fmt: skip
            if status:
                self._synchronize_after_error(way)
                row = min(int(refused.value), len(sizes) - 1)
                what = f"{sizes[row]} bytes from {source[row]:#x} to {to[row]:#x}"
                self._check("cuMemcpyBatchAsync", status, what)
        return self._record(self._streams[way])

    def copy_ordinary(self, way: Direction, to: Numbers, source: Numbers, sizes: Numbers) -> Event:
        stream = self._streams[way]
        copy = self._library.cuMemcpyAsync
        with self._current():
            for row in zip(to.tolist(), source.tolist(), sizes.tolist(), strict=True):
                status = copy(*row, stream)
                if status:
                    self._synchronize_after_error(way)
                    into, out_of, size = row
                    what = f"{size} bytes from {out_of:#x} to {into:#x}"
                    self._check("cuMemcpyAsync", status, what)
        return self._record(stream)

    def _synchronize_after_error(self, way: Direction) -> None:
        """Wait for copies of a refused batch that were queued, before the error is raised."""
        self._library.cuStreamSynchronize(self._streams[way])

    def lock(self, address: int, size: int) -> bool:
        with self._current():
            return not self._library.cuMemHostRegister_v2(address, size, _HOST_PORTABLE)

    def unlock(self, address: int) -> None:
        with self._current():
            self._call("cuMemHostUnregister", address)

    def locked_memory(self, size: int) -> memoryview:
        made = _Handle()
        with self._current():
            self._call("cuMemHostAlloc", ctypes.byref(made), size, _HOST_PORTABLE)
        assert made.value is not None
        return memoryview((ctypes.c_char * size).from_address(made.value)).cast("B")

    def release(self, memory: memoryview) -> None:
        with self._current():
            self._call("cuMemFreeHost", address_of(memory))

    def empty(self, size: int) -> torch.Tensor:
        try:
            import torch
        except ImportError:
            raise DeviceError(
                "device memory is returned as a torch tensor, and torch is not installed here",
                device=self.name,
            ) from None
        # Memory of torch's pool for our stream is unused, because the host waits for that stream.
        ours = torch.cuda.ExternalStream(self._streams[Direction.LOAD], device=self.name)
        # Otherwise leaving the stream would make torch create a context on the previous device.
        chosen = torch.cuda.device(self.name)
        with self._current(), chosen, torch.cuda.stream(ours):
            tensor = torch.empty(size, dtype=torch.uint8, device=self.name)
        computing = current_stream(self._number)
        if computing:
            tensor.record_stream(torch.cuda.ExternalStream(computing, device=self.name))
        else:
            tensor.record_stream(torch.cuda.default_stream(self.name))
        return tensor

    def tensor_over(self, address: int, size: int, keep: object) -> torch.Tensor:
        import torch

        with self._current(), torch.cuda.device(self.name):
            return torch.as_tensor(_CudaArrayInterface(address, size, keep), device=self.name)

    def allocate(self, size: int) -> int:
        made = _Address()
        with self._current():
            status = self._library.cuMemAlloc_v2(ctypes.byref(made), size)
            self._check("cuMemAlloc", status, f"{size >> 20} MiB")
        return made.value

    def free(self, address: int) -> None:
        with self._current():
            self._call("cuMemFree_v2", address)

    def export(self, address: int) -> str:
        made = _IPCHandle()
        with self._current():
            self._call("cuIpcGetMemHandle", ctypes.byref(made), address)
        return uuid_of(self._number).hex() + bytes(made).hex()

    def open(self, handle: str) -> int:
        opened = _Address()
        try:
            raw = bytes.fromhex(handle)[_UUID_BYTES:]
            passed = _IPCHandle.from_buffer_copy(raw)
        except ValueError as error:
            raise DeviceError(f"no handle of memory: {error}", device=self.name) from None
        with self._current():
            self._call("cuIpcOpenMemHandle_v2", ctypes.byref(opened), passed, _IPC_LAZY_PEER_ACCESS)
        return opened.value

    def close(self, address: int) -> None:
        with self._current():
            self._call("cuIpcCloseMemHandle", address)

    def _new_stream(self, priority: int) -> int:
        made = _Handle()
        self._call("cuStreamCreateWithPriority", ctypes.byref(made), _STREAM_NON_BLOCKING, priority)
        return made.value or 0

    def _batch_function(self) -> Any:
        """Return ``cuMemcpyBatchAsync``; None: the driver is older than CUDA 12.8."""
        try:
            batch = self._library.cuMemcpyBatchAsync
        except AttributeError:
            return None
        batch.argtypes = _BATCH_V1
        batch.restype = _Int
        return batch

    @contextmanager
    def _current(self) -> Iterator[None]:
        if os.getpid() != self._pid:
            raise DeviceError(
                f"{self.name} cannot be used in the child of a fork",
                advice='Start processes with the method "spawn".',
                device=self.name,
            )
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            with self._relaxed():
                yield
        finally:
            before = _Handle()
            self._call("cuCtxPopCurrent_v2", ctypes.byref(before))

    @contextmanager
    def _relaxed(self) -> Iterator[None]:
        """Allow calls while another thread captures a graph, which they would invalidate."""
        mode = _Int(_CAPTURE_RELAXED)
        self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        try:
            yield
        finally:
            self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))

    def _call(self, function: str, *arguments: Any) -> None:
        self._check(function, getattr(self._library, function)(*arguments))

    def _check(self, function: str, status: int, what: str = "") -> None:
        if status:
            raise _refused(self._library, function, status, what, self.name)


_libraries: Final[list[ctypes.CDLL]] = []
_loading: Final = threading.Lock()


def library() -> ctypes.CDLL:
    """Return the driver's library, initialised. Raises DeviceError: it is missing or fails."""
    with _loading:
        if _libraries:
            return _libraries[0]
        try:
            cuda = ctypes.CDLL(LIBRARY)
            for name, arguments in _FUNCTIONS.items():
                getattr(cuda, name).argtypes = arguments
            cuda.cuStreamSynchronize.argtypes = [_Handle]
        except (OSError, AttributeError) as error:
            raise DeviceError(
                f"NVIDIA's driver cannot be used: {error}",
                advice=f"Install a driver whose {LIBRARY} this process can load.",
            ) from None
        status = cuda.cuInit(0)
        if status:
            raise _refused(cuda, "cuInit", status, "", "")
        _libraries.append(cuda)
        return cuda


class DeviceInfo(NamedTuple):
    name: str
    copies_batches: bool
    """Whether one call copies a batch: CUDA 12.8 or later."""
    locks: bool


def probe() -> list[DeviceInfo]:
    """Return the usable devices, for ``kvstore doctor``. Raises DeviceError."""
    found = []
    page = mmap.mmap(-1, mmap.PAGESIZE)
    address = address_of(memoryview(page))
    for number in range(_count()):
        driver = CUDADriver(number)
        locks = driver.lock(address, mmap.PAGESIZE)
        if locks:
            driver.unlock(address)
        found.append(DeviceInfo(driver.name, driver.copies_batches, locks))
    return found


def uuid_of(number: int) -> bytes:
    """Return the UUID of a device, equal in all processes of a host."""
    cuda = library()
    device = _Int()
    uuid = (ctypes.c_char * _UUID_BYTES)()
    for name, arguments in (
        ("cuDeviceGet", (ctypes.byref(device), number)),
        ("cuDeviceGetUuid_v2", (uuid, device)),
    ):
        status = getattr(cuda, name)(*arguments)
        if status:
            raise _refused(cuda, name, status, "", f"cuda:{number}")
    return bytes(uuid)


def name_of(handle: str) -> str:
    """Return this process's name of an exporting device. Raises DeviceError: it has none."""
    for number in range(_count()):
        if handle.startswith(uuid_of(number).hex()):
            return f"cuda:{number}"
    raise DeviceError("this process does not see the device of that memory")


def _count() -> int:
    cuda = library()
    count = _Int()
    status = cuda.cuDeviceGetCount(ctypes.byref(count))
    if status:
        raise _refused(cuda, "cuDeviceGetCount", status, "", "")
    return count.value


def _refused(cuda: ctypes.CDLL, function: str, status: int, what: str, device: str) -> DeviceError:
    text = ctypes.c_char_p()
    cuda.cuGetErrorString(status, ctypes.byref(text))
    reason = (text.value or b"unknown error").decode(errors="replace")
    of = f" on {device}" if device else ""
    return DeviceError(f"{function}{of} failed: {reason} ({status}){what and ': ' + what}")
