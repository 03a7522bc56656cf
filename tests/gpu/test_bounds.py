"""What a call leaves when it is cut short or fails."""

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
from kvstore.device import staging_ring
from kvstore.device.device import Device
from kvstore.device.driver import DeviceDriver
from kvstore.errors import DeadlineExceededError, DeviceError
from tests.gpu.caches import SPLIT, Cache, Case
from tests.gpu.machine import GPU, IS_REAL, MIB, NAME, tensor
from tests.gpu.test_caches import OLD, SAVED, distinct, keys_of, put
from tests.support.cluster import Cluster

CASE = Case("llama-8b-tp8-bf16", 32, 8192, SPLIT)


def telling(event: threading.Event, call: Callable[..., Any]) -> Callable[..., Any]:
    """The same call, which sets an event when it begins."""

    def told(*args: Any) -> Any:
        event.set()
        return call(*args)

    return told


def in_use(device: Device) -> tuple[int, int]:
    return device.ring.taken, sum(each.users for each in device.locks._segments.values())


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


def test_an_error_in_the_middle_leaves_nothing(
    gpu: GPU, connect: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging_ring, "RING_BYTES", 32 * MIB)
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
