"""What only a real GPU has: torch's streams, and the driver's own answers."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time

import numpy as np
import torch

from kvstore import AsyncClient, Client
from kvstore.device.cuda import CUDADriver
from kvstore.device.driver import Direction
from kvstore.device.drivers import driver_of
from kvstore.memory.process_memory import cuda_device_at
from tests.gpu.machine import BUSY_CYCLES, GPU, MIB, NAME
from tests.gpu.test_values import same, values
from tests.support.cluster import Cluster


def cuda_driver() -> CUDADriver:
    driver = driver_of(NAME)
    assert isinstance(driver, CUDADriver)
    return driver


def test_the_current_stream_of_torch_is_waited_for(gpu: GPU, client: Client) -> None:
    source = gpu.tensor(values(seed=1))
    new = values(seed=2)
    on_gpu = gpu.tensor(new)
    gpu.finish()
    with torch.cuda.stream(torch.cuda.Stream(NAME)):  # type: ignore[no-untyped-call]
        gpu.launch(lambda: source.copy_(on_gpu))
        client.put("k", source)
    back = client.get("k")
    assert isinstance(back, torch.Tensor)
    assert same(back, new)


def test_an_async_call_is_after_the_stream_of_its_caller(
    gpu: GPU, client: Client, store: Cluster, namespace: str, transport: str
) -> None:
    source = gpu.tensor(values(torch.float32, 512, 1024, seed=1))
    new = values(torch.float32, 512, 1024, seed=2)
    on_gpu = gpu.tensor(new)
    gpu.finish()

    async def put() -> None:
        async with AsyncClient(
            store.address, namespace=namespace, transports=(transport,)
        ) as waiting:
            with torch.cuda.stream(torch.cuda.Stream(NAME)):  # type: ignore[no-untyped-call]
                gpu.launch(lambda: source.copy_(on_gpu))
                await waiting.put("whole", source)
                gpu.launch(lambda: source.copy_(on_gpu * 2))
                await waiting.put("transposed", source.T)

    asyncio.run(put())
    whole, transposed = client.get_many(["whole", "transposed"])
    assert isinstance(whole, torch.Tensor)
    assert isinstance(transposed, torch.Tensor)
    assert same(whole, new)
    assert same(transposed, (new * 2).T.contiguous())


def test_other_streams_do_not_wait_for_a_call(gpu: GPU, client: Client) -> None:
    """A kernel that never was in a call's way has not ended when the call has."""
    source = gpu.tensor(values(torch.uint8, 64 * MIB))
    gpu.finish()
    beside = torch.cuda.Stream(NAME)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(beside):
        torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]
    client.put("k", source)
    assert not beside.query()


def test_a_graph_is_captured_while_a_thread_moves_values(gpu: GPU, client: Client) -> None:
    """As an engine does at its start. CUDA refuses most calls of other threads meanwhile."""
    value = values(torch.uint8, 16 * MIB)
    source = gpu.tensor(value)
    static = gpu.empty(MIB)
    gpu.finish()
    stop, failures, count = threading.Event(), list[BaseException](), itertools.count()

    def move() -> None:
        try:
            while not stop.is_set():
                client.put(f"k{next(count)}", source)
                assert client.get_into("k0", source) == [value.nbytes]
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=move)
    thread.start()
    try:
        for number in range(5):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                static.add_(1)
                time.sleep(0.05)  # the thread makes calls meanwhile
            graph.replay()
            torch.cuda.synchronize()
            assert int(static[0]) == number + 1
    finally:
        stop.set()
        thread.join()
    assert not failures
    assert next(count) > 1


def test_the_driver_knows_its_memory(gpu: GPU) -> None:
    cuda_driver()
    tensor = gpu.empty(100)
    assert cuda_device_at(tensor.data_ptr()) == NAME
    assert cuda_device_at(np.zeros(10).ctypes.data) == ""
    driver = cuda_driver()
    locked = driver.locked_memory(MIB)
    try:
        assert cuda_device_at(np.frombuffer(locked, np.uint8).ctypes.data) == ""
    finally:
        driver.release(locked)


def test_copies_of_many_runs_one_by_one_and_as_a_batch(gpu: GPU) -> None:
    """The call of CUDA 12.8 and the one that older drivers have do the same."""
    driver = cuda_driver()
    memory = driver.locked_memory(4 * MIB)
    host = np.frombuffer(memory, np.uint8)
    try:
        host[:] = np.random.default_rng(1).integers(0, 256, len(host))
        expected = host.copy()
        runs = 64 * np.random.default_rng(2).permutation(len(host) // 64)
        sizes = np.full(len(runs), 64, np.int64)
        for batch in (driver._batch, None):
            before, driver._batch = driver._batch, batch
            try:
                tensor = gpu.empty(len(host))
                gpu.finish()
                at = tensor.data_ptr() + runs
                _wait(driver, driver.copy(Direction.LOAD, at, host.ctypes.data + runs, sizes))
                host[:] = 0
                backwards = host.ctypes.data + runs[::-1]
                _wait(driver, driver.copy(Direction.SAVE, backwards, at[::-1], sizes))
                assert (host == expected).all()
            finally:
                driver._batch = before
    finally:
        driver.release(memory)


def _wait(driver: CUDADriver, event: object) -> None:
    while not driver.is_done(event):
        pass
