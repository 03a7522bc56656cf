"""Values in the memory of a device, through a real master and node. The device is a fake whose
copies run late and in any order, so that a missing wait is a wrong byte."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvstore.calls import PutOutcome
from kvstore.client.client import Client
from kvstore.device import staging_ring
from kvstore.device.device import Device
from kvstore.device.drivers import use
from kvstore.device.memory import DeviceMemory
from kvstore.errors import (
    DeadlineExceededError,
)
from tests.support.fake_device import FakeDriver

Bytes = NDArray[np.uint8]
NAME = "cuda:0"
RING = 8 << 20
MIB = 1 << 20


@pytest.fixture(scope="module")
def store() -> Iterator[Client]:
    with Client.embedded("192MiB") as client:
        client.clear()  # opens its connections, which stay open
        yield client


class DeviceFixture:
    """A client, and a device beside it."""

    def __init__(self, client: Client, seed: int, **settings: Any) -> None:
        self.fake = FakeDriver(NAME, seed=seed, **settings)
        use(NAME, self.fake)
        self.client = client
        self.random = np.random.default_rng(seed)

    @property
    def device(self) -> Device:
        return self.client.device(NAME)

    def memory(self, runs: Sequence[Bytes], *after: Any) -> DeviceMemory:
        return DeviceMemory(
            self.device,
            np.array([each.ctypes.data for each in runs], np.int64),
            np.array([len(each) for each in runs], np.int64),
            after,
        )

    def bytes(self, size: int) -> Bytes:
        return self.random.integers(0, 256, size, np.uint8)

    def later(self, array: Bytes, values: Bytes, stream: int = 0) -> None:
        """Queues a kernel that writes to memory of the device."""
        self.fake.launch(lambda: np.copyto(array, values), stream)

    def check(self) -> None:
        """Nothing of a call runs on, and nothing is left but what is locked on purpose."""
        self.fake.finish()
        assert self.device.ring.taken == 0
        assert self.fake.locked_own_bytes <= RING


@pytest.fixture(params=["shm", "shm-not-locked", "tcp"])
def make(
    request: pytest.FixtureRequest, store: Client, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    """Makes a device by a seed, with a client of its own."""
    monkeypatch.setattr(staging_ring, "RING_BYTES", RING)
    made: list[DeviceFixture] = []

    def new(seed: int) -> DeviceFixture:
        settings = {"lock_max": 0} if request.param == "shm-not-locked" else {}
        client = Client(
            store.config.master,
            transports=(request.param.partition("-")[0],),
            placements_max=0,
        )
        made.append(DeviceFixture(client, seed, **settings))
        return made[-1]

    yield new
    for each in made:
        each.fake.finish()
        each.client.close()
        assert not each.fake.locked
        assert not each.fake.locked_own_bytes
    use(NAME, None)
    store.clear()


@pytest.fixture
def on(make: Any) -> DeviceFixture:
    device: DeviceFixture = make(1)
    return device


SIZES = [1, 100, 4_096, 65_537, MIB, 3 * MIB + 5]


def save_and_load(on: DeviceFixture, *, marks: bool) -> None:
    """Blocks are written by kernels, saved, overwritten by kernels; loaded into blocks that kernels
    have written to before and write to afterwards."""
    blocks = [[on.fake.array(size // 3 + 1), on.fake.array(size)] for size in SIZES]
    contents = [[on.bytes(len(run)) for run in block] for block in blocks]
    stream = 5 if marks else 0  # of which only a mark tells
    for block, content in zip(blocks, contents, strict=True):
        for run, values in zip(block, content, strict=True):
            on.later(run, values, stream)
    after = [on.fake.record_event(stream)] if marks else []
    keys = [b"%d" % index for index in range(len(blocks))]
    outcomes = on.client.put_chain(keys, [on.memory(block, *after) for block in blocks])
    assert outcomes == [PutOutcome.STORED] * len(keys)
    for block in blocks:
        for run in block:
            on.later(run, np.zeros(len(run), np.uint8), stream)
    on.fake.finish()
    for key, content in zip(keys, contents, strict=True):
        assert on.client.get(key) == b"".join(each.tobytes() for each in content)

    others = [[on.fake.array(each) for each in (size, size // 3 + 1, 9)] for size in SIZES]
    for run in (run for block in others for run in block):
        on.later(run, on.bytes(len(run)), stream)
    after = [on.fake.record_event(stream)] if marks else []
    found = on.client.get_into(keys, [on.memory(block, *after) for block in others])
    assert found == [size + size // 3 + 1 for size in SIZES]
    for content, block in zip(contents, others, strict=True):
        whole = b"".join(each.tobytes() for each in content)
        read = b"".join(each.tobytes() for each in block)
        assert read[: len(whole)] == whole
    on.check()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("marks", [False, True])
def test_blocks_are_saved_and_loaded(make: Any, seed: int, marks: bool) -> None:
    save_and_load(make(seed), marks=marks)


def test_memory_that_names_its_moments_waits_for_nothing_else(on: DeviceFixture) -> None:
    block = on.fake.array(100)
    on.later(block, np.full(100, 7, np.uint8))
    after = on.fake.record_event()
    on.fake.finish()
    on.fake.held = {0}  # the work that is queued from here on takes long
    on.later(block, np.zeros(100, np.uint8))
    assert on.client.put("k", on.memory([block], after)) is PutOutcome.STORED
    other = on.fake.array(100)
    assert on.client.get_into("k", on.memory([other], after)) == [100]
    assert other.tobytes() == bytes([7] * 100)
    with pytest.raises(DeadlineExceededError):
        on.client.put("late", on.memory([block]), timeout_ms=50)
    with pytest.raises(DeadlineExceededError):
        on.client.get_into("k", on.memory([other], after), timeout_ms=50, stream=0)
    on.fake.held.clear()
    on.check()


def test_many_values_come_back_on_a_device(on: DeviceFixture) -> None:
    on.client.put_many(
        [("a", b"abc"), ("b", b""), ("c", np.array([[1.5]], np.float32)), ("e", torch.empty(0, 3))]
    )
    values: list[Any] = on.client.get_many([*"abcde"], device=torch.device(NAME))
    a, b, c, d, e = values
    assert (bytes(a.numpy()), bytes(b.numpy()), d) == (b"abc", b"", None)
    assert (c.dtype, c.tolist()) == (torch.float32, [[1.5]])
    assert (e.dtype, e.shape) == (torch.float32, (0, 3))


def test_memory_of_a_host_is_copied_to_a_device(on: DeviceFixture) -> None:
    """Also where a view was asked for."""
    on.client.put("k", b"abc")
    copied: Any = on.client.get("k", device=NAME, copy=False)
    assert bytes(copied.numpy()) == b"abc"
    assert on.client.lease(copied) is None


def test_many_threads_at_once(make: Any) -> None:
    on = make(3)
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            random = np.random.default_rng(number)
            for turn in range(5):
                block = on.fake.array(200_000 + number)
                content = random.integers(0, 256, len(block), np.uint8)
                on.later(block, content, stream=0)
                key = f"{number}/{turn}"
                on.client.put(key, on.memory([block[:70_000], block[70_000:]]))
                other = on.fake.array(len(block))
                assert on.client.get_into(key, on.memory([other])) == [len(block)]
                assert np.array_equal(other, content)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not errors
    on.check()
