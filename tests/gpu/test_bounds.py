"""What a call leaves when it is cut short or fails, and how much memory is page-locked."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from kvstore import AsyncClient, Client
from kvstore.calls import PutOutcome
from kvstore.device import locks, ring
from kvstore.device.device import Device
from kvstore.device.driver import DeviceDriver
from kvstore.errors import DeadlineExceededError, DeviceError
from tests.gpu.caches import SPLIT, Cache, Case
from tests.gpu.machine import GPU, IS_REAL, MIB, NAME, tensor
from tests.gpu.test_caches import OLD, SAVED, distinct, get, keys_of, put
from tests.support.cluster import Cluster

CASE = Case("llama-8b-tp8-bf16", 32, 8192, SPLIT)
RING = 8 * MIB


class Counted:
    """A driver's page-locked memory, in bytes, now and at most."""

    def __init__(self, driver: DeviceDriver, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.most = 0
        self._sizes: dict[Any, int] = {}
        self._changing = threading.Lock()
        lock, unlock = driver.lock, driver.unlock
        locked_memory, release = driver.locked_memory, driver.release

        def counting_lock(address: int, size: int) -> bool:
            is_locked = lock(address, size)
            if is_locked:
                self._count(address, size)
            return is_locked

        def counting_unlock(address: int) -> None:
            unlock(address)
            self._forget(address)

        def counting_memory(size: int) -> memoryview:
            memory = locked_memory(size)
            self._count(id(memory), size)
            return memory

        def counting_release(memory: memoryview) -> None:
            release(memory)
            self._forget(id(memory))

        monkeypatch.setattr(driver, "lock", counting_lock)
        monkeypatch.setattr(driver, "unlock", counting_unlock)
        monkeypatch.setattr(driver, "locked_memory", counting_memory)
        monkeypatch.setattr(driver, "release", counting_release)

    def _count(self, name: object, size: int) -> None:
        with self._changing:
            self._sizes[name] = size
            self.now += size
            self.most = max(self.most, self.now)

    def _forget(self, name: object) -> None:
        with self._changing:
            self.now -= self._sizes.pop(name)


def round_trip(gpu: GPU, client: Client) -> Cache:
    cache = Cache(gpu, CASE)
    sources, targets = distinct(cache, 2, cache.saved)
    gpu.finish()
    cache.fill(sources, SAVED)
    put(client, cache, 0, sources)
    get(client, cache, 0, targets)
    gpu.finish()
    assert cache.holds(targets, sources, SAVED)
    return cache


def telling(event: threading.Event, call: Callable[..., Any]) -> Callable[..., Any]:
    """The same call, which sets an event when it begins."""

    def told(*args: Any) -> Any:
        event.set()
        return call(*args)

    return told


def in_use(device: Device) -> tuple[int, int]:
    return device.ring.taken, sum(len(each.users) for each in device.locks._segments.values())


@pytest.mark.parametrize(
    ("locked", "most"),
    [(0, RING), (1 << 30, (1 << 30) + RING)],
    ids=["through-the-ring", "straight"],
)
def test_page_locked_memory_has_a_bound(
    gpu: GPU,
    connect: Callable[..., Client],
    monkeypatch: pytest.MonkeyPatch,
    transport: str,
    locked: int,
    most: int,
) -> None:
    monkeypatch.setattr(ring, "RING_BYTES", RING)
    monkeypatch.setattr(locks, "LOCKED_BYTES_MAX", locked)
    client = connect()
    device = client.device(NAME)
    counted = Counted(device.driver, monkeypatch)
    round_trip(gpu, client)
    assert 0 < counted.most <= most
    is_straight = transport == "shm" and bool(locked)
    assert (device.locks.locked_bytes > 0) == is_straight
    of_the_ring = counted.now - device.locks.locked_bytes
    assert of_the_ring in ((0, RING) if is_straight else (RING,))
    client.close()
    assert counted.now == 0


def test_a_get_that_is_cancelled_while_it_waits_touches_nothing(
    gpu: GPU, client: Client, store: Cluster, namespace: str, transport: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    cache = Cache(gpu, CASE)
    sources, targets = distinct(cache, 2, cache.saved)
    cache.fill(sources, SAVED)
    put(client, cache, 0, sources)
    cache.fill(targets, OLD)
    gpu.finish()
    looked = threading.Event()
    driver = client.device(NAME).driver
    monkeypatch.setattr(driver, "is_done", telling(looked, driver.is_done))

    async def cancelled() -> Device:
        async with AsyncClient(
            store.address, namespace=namespace, transports=(transport,)
        ) as waiting:
            device = waiting.device(NAME)
            with gpu.busy():
                rooms = [cache.memory(device, block) for block in targets]
                call = asyncio.create_task(waiting.get_into(keys_of(0, len(targets)), rooms))
                await asyncio.to_thread(looked.wait, 10)
                call.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await call
            assert in_use(device) == (0, 0)
            return device

    asyncio.run(cancelled())
    gpu.finish()
    assert cache.holds(targets, targets, OLD)


def test_a_put_that_is_cancelled_while_it_copies_leaves_nothing_running(
    gpu: GPU, store: Cluster, namespace: str, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring, "RING_BYTES", RING)
    value = gpu.tensor(torch.ones((512 if IS_REAL else 12) * MIB, dtype=torch.uint8))
    copying = threading.Event()

    async def cancelled() -> None:
        async with AsyncClient(
            store.address, namespace=namespace, transports=(transport,)
        ) as client:
            device = client.device(NAME)
            for name in ("copy", "copy_ordinary"):
                told = telling(copying, getattr(device.driver, name))
                monkeypatch.setattr(device.driver, name, told)
            parts = [(b"%d" % at, value[at * MIB : (at + 1) * MIB])
                     for at in range(value.numel() // MIB)]  # fmt: skip
            call = asyncio.create_task(client.put_many(parts))
            assert await asyncio.to_thread(copying.wait, 10)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert in_use(device) == (0, 0)
            assert await client.put("again", value[:MIB]) is not None

    asyncio.run(cancelled())
    gpu.finish()


def test_an_error_in_the_middle_leaves_nothing(
    gpu: GPU, connect: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring, "RING_BYTES", 32 * MIB)
    client = connect()
    device = client.device(NAME)
    size = (40 if IS_REAL else 2) * MIB
    sent = {b"%d" % number: torch.full((size,), number, dtype=torch.uint8) for number in range(17)}
    on_gpu = [(key, gpu.tensor(value)) for key, value in sent.items()]
    with failing_from_the_second_copy_on(device.driver, monkeypatch):
        with pytest.raises(DeviceError, match="planted"):
            client.put_many(on_gpu)
        assert in_use(device) == (0, 0)
    assert not any(client.exists_many(list(sent)))
    gpu.finish()
    assert client.put_many(on_gpu) == [PutOutcome.STORED] * len(sent)
    with failing_from_the_second_copy_on(device.driver, monkeypatch):
        with pytest.raises(DeviceError, match="planted"):
            client.get_many(list(sent), device=NAME)
        assert in_use(device) == (0, 0)
    gpu.finish()
    for key, value in sent.items():
        back = tensor(client.get(key, device=NAME))
        assert torch.equal(gpu.read(back), value)


@contextmanager
def failing_from_the_second_copy_on(
    driver: DeviceDriver, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    begun = itertools.count(1)

    def failing(copy: Callable[..., Any], *args: Any) -> Any:
        if next(begun) > 1:
            raise DeviceError("planted by the test", device=NAME)
        return copy(*args)

    with monkeypatch.context() as patched:
        for name in ("copy", "copy_ordinary"):
            patched.setattr(driver, name, partial(failing, getattr(driver, name)))
        yield
    assert next(begun) > 2


def test_a_call_ends_by_its_deadline_while_the_gpu_is_busy(gpu: GPU, client: Client) -> None:
    value = gpu.tensor(torch.ones(MIB, dtype=torch.uint8))
    gpu.finish()
    with gpu.busy(), pytest.raises(DeadlineExceededError):
        client.put("k", value, timeout_ms=300)
    gpu.finish()
    assert not client.exists("k")
    assert client.put("k", value) is not None
