"""What a call leaves when it is cut short or fails, and how much memory is page-locked."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvstore import AsyncClient, Client
from kvstore.device import locks, ring
from kvstore.device.device import Device
from kvstore.device.driver import DeviceDriver
from kvstore.errors import DeadlineExceededError
from tests.gpu.caches import SPLIT, Cache, Case
from tests.gpu.machine import GPU, MIB, NAME
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


def test_a_call_ends_by_its_deadline_while_the_gpu_is_busy(gpu: GPU, client: Client) -> None:
    value = gpu.tensor(torch.ones(MIB, dtype=torch.uint8))
    gpu.finish()
    with gpu.busy(), pytest.raises(DeadlineExceededError):
        client.put("k", value, timeout_ms=300)
    gpu.finish()
    assert not client.exists("k")
    assert client.put("k", value) is not None
