"""The GPU of these tests: a real one through torch, or kvstore's fake, with the same verbs.

On the fake, memory of the GPU is memory of the host and a kernel is a function that runs when the
fake chooses; on a real GPU a kernel is a function that queues torch's work, behind a delay that
makes a missing wait a wrong byte.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

import torch

from kvstore.client.validation import Stream
from kvstore.device.drivers import driver_of, use
from tests.support.fake_device import FakeDriver

NAME: Final = "cuda:0"
VARIABLE: Final = "TEST_GPU"
"""``1``: use the real GPU."""
IS_REAL: Final = os.environ.get(VARIABLE) == "1"

MIB: Final = 1 << 20
GIB: Final = 1 << 30
POOL_BYTES: Final = min(20 * GIB, int(0.6 * shutil.disk_usage("/dev/shm").free)) if IS_REAL else (
    256 * MIB
)  # fmt: skip
SAVED_BYTES_MAX: Final = POOL_BYTES // 8
"""Of one test. What earlier tests have put is evicted once its lease has ended."""

DELAY_CYCLES: Final = 40_000_000
"""Some 20 ms of a GPU."""
BUSY_CYCLES: Final = 4_000_000_000
"""Some 2 s of a GPU."""


class GPU(Protocol):
    """Threads: that of the test, but for ``read``."""

    def empty(self, *shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """Memory of the GPU, zeroed. On the fake a plain tensor, for kernels of the test."""
        ...

    def tensor(self, values: torch.Tensor) -> torch.Tensor:
        """The same values as a tensor of the GPU, for kvstore's verbs."""
        ...

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """The values in the host's memory, after all that is queued."""
        ...

    def stream(self) -> Stream:
        """A stream beside the one on which the thread computes."""
        ...

    def launch(self, kernel: Callable[[], object], stream: Stream | None = None) -> None:
        """Queues a kernel. None: on the stream on which this thread computes."""
        ...

    def busy(self) -> AbstractContextManager[None]:
        """While it is open, nothing that is queued on the thread's stream ends; a real GPU may
        leave that state earlier, after some 2 s."""
        ...

    def finish(self) -> None:
        """Waits for all that is queued."""
        ...


class RealGPU:
    """Implements ``GPU``."""

    def empty(self, *shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=NAME)

    def tensor(self, values: torch.Tensor) -> torch.Tensor:
        on_gpu = torch.empty_strided(
            values.size(), values.stride(), dtype=values.dtype, device=NAME
        )
        on_gpu.copy_(values)
        return on_gpu

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        self.finish()
        return tensor.cpu()

    def stream(self) -> Stream:
        stream: torch.cuda.Stream = torch.cuda.Stream(NAME)  # type: ignore[no-untyped-call]
        return stream

    def launch(self, kernel: Callable[[], object], stream: Stream | None = None) -> None:
        assert not isinstance(stream, int)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(DELAY_CYCLES)  # type: ignore[no-untyped-call]
            kernel()

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]
        yield

    def finish(self) -> None:
        torch.cuda.synchronize()


class FakeGPU:
    """Implements ``GPU``."""

    def __init__(self, seed: int = 0) -> None:
        self.driver = FakeDriver(NAME, seed=seed)
        self._streams = iter(range(100, 1 << 30))

    def empty(self, *shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        size = torch.empty(shape, dtype=dtype, device="meta").nbytes
        return self.driver.empty(size).view(dtype).reshape(shape)

    def tensor(self, values: torch.Tensor) -> torch.Tensor:
        return _adopted(values.clone().as_subclass(FakeTensor))

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        self.finish()
        return tensor.as_subclass(torch.Tensor).clone()

    def stream(self) -> Stream:
        return next(self._streams)

    def launch(self, kernel: Callable[[], object], stream: Stream | None = None) -> None:
        assert stream is None or isinstance(stream, int)
        self.driver.launch(_step(kernel), stream or 0)

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        self.driver.is_stuck = True
        try:
            yield
        finally:
            self.driver.is_stuck = False

    def finish(self) -> None:
        self.driver.finish()


class FakeTensor(torch.Tensor):
    """A tensor of the host that says it is on the fake, and whose memory the fake knows."""

    _is_param = True  # other subclasses are refused

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device(NAME)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        driver = driver_of(NAME)
        assert isinstance(driver, FakeDriver)
        if func is torch.Tensor.cpu:
            driver.finish()
            return args[0].as_subclass(torch.Tensor).clone()
        if func is torch.Tensor.contiguous and not args[0].is_contiguous():
            source = args[0].as_subclass(torch.Tensor)
            copy = torch.zeros_like(source, memory_format=torch.contiguous_format)
            driver.launch(_step(lambda: copy.copy_(source)))
            return _adopted(copy.as_subclass(FakeTensor))
        made = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        return _adopted(made) if isinstance(made, FakeTensor) else made


def _step(kernel: Callable[[], object]) -> Callable[[], None]:
    def step() -> None:
        kernel()

    return step


def _adopted(tensor: torch.Tensor) -> torch.Tensor:
    """The fake knows the tensor's memory from now on."""
    driver = driver_of(NAME)
    assert isinstance(driver, FakeDriver)
    with torch._C.DisableTorchFunctionSubclass():
        storage = tensor.untyped_storage()
        if storage.nbytes():
            driver.memory[storage.data_ptr()] = storage.nbytes()
            driver._kept.append(storage)
    return tensor


def tensor(value: object) -> torch.Tensor:
    """What a get returned, which must be one."""
    assert isinstance(value, torch.Tensor)
    return value


@contextlib.contextmanager
def machine(seed: int = 0) -> Iterator[GPU]:
    """The GPU of this process, idle at the end."""
    if IS_REAL:
        yield RealGPU()
        torch.cuda.synchronize()
        return
    fake = FakeGPU(seed)
    use(NAME, fake.driver)
    try:
        yield fake
        fake.finish()
        assert not fake.driver.locked
        assert not fake.driver.locked_own_bytes
    finally:
        use(NAME, None)
