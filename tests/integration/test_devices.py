"""Values in the memory of a device, through a real master and node. The device is a fake whose
copies run late and in any order, so that a missing wait is a wrong byte."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvstore.calls import PutOutcome
from kvstore.client.aio import AsyncClient
from kvstore.client.flows import devices, getting, putting
from kvstore.client.sync import Client
from kvstore.device import device as device_module
from kvstore.device import ring
from kvstore.device.device import Device
from kvstore.device.driver import Way
from kvstore.device.drivers import use
from kvstore.device.memory import DeviceMemory
from kvstore.errors import (
    BufferMismatchError,
    DeadlineExceededError,
    DeviceError,
    InvalidArgumentError,
    KVStoreError,
    UnsupportedValueError,
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


class OnDevice:
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
        assert sum(self.fake.locked.values()) == self.device.locks.locked_bytes


@pytest.fixture(params=["shm", "shm-not-locked", "tcp"])
def make(
    request: pytest.FixtureRequest, store: Client, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    """Makes a device by a seed, with a client of its own."""
    monkeypatch.setattr(ring, "RING_BYTES", RING)
    made: list[OnDevice] = []

    def new(seed: int) -> OnDevice:
        settings = {"lock_max": 0} if request.param == "shm-not-locked" else {}
        client = Client(
            store.config.master,
            transports=(request.param.partition("-")[0],),
            placements_max=0,
        )
        made.append(OnDevice(client, seed, **settings))
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
def on(make: Any) -> OnDevice:
    device: OnDevice = make(1)
    return device


SIZES = [1, 100, 4_096, 65_537, MIB, 3 * MIB + 5]


def save_and_load(on: OnDevice, *, marks: bool = False, sizes: Sequence[int] = SIZES) -> None:
    """Blocks are written by kernels, saved, overwritten by kernels; loaded into blocks that kernels
    have written to before and write to afterwards."""
    blocks = [[on.fake.array(size // 3 + 1), on.fake.array(size)] for size in sizes]
    contents = [[on.bytes(len(run)) for run in block] for block in blocks]
    stream = 5 if marks else 0  # of which only a mark tells
    for block, content in zip(blocks, contents, strict=True):
        for run, values in zip(block, content, strict=True):
            on.later(run, values, stream)
    after = [on.fake.mark(stream)] if marks else []
    keys = [b"%d" % index for index in range(len(blocks))]
    outcomes = on.client.put_chain(keys, [on.memory(block, *after) for block in blocks])
    assert outcomes == [PutOutcome.STORED] * len(keys)
    for block in blocks:
        for run in block:
            on.later(run, np.zeros(len(run), np.uint8), stream)
    on.fake.finish()
    for key, content in zip(keys, contents, strict=True):
        assert on.client.get(key) == b"".join(each.tobytes() for each in content)

    others = [[on.fake.array(each) for each in (size, size // 3 + 1, 9)] for size in sizes]
    for run in (run for block in others for run in block):
        on.later(run, on.bytes(len(run)), stream)
    after = [on.fake.mark(stream)] if marks else []
    found = on.client.get_into(keys, [on.memory(block, *after) for block in others])
    assert found == [size + size // 3 + 1 for size in sizes]
    for content, block in zip(contents, others, strict=True):
        whole = b"".join(each.tobytes() for each in content)
        read = b"".join(each.tobytes() for each in block)
        assert read[: len(whole)] == whole
    on.check()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("marks", [False, True])
def test_blocks_are_saved_and_loaded(make: Any, seed: int, marks: bool) -> None:
    save_and_load(make(seed), marks=marks)


def test_memory_that_names_its_moments_waits_for_nothing_else(on: OnDevice) -> None:
    block = on.fake.array(100)
    on.later(block, np.full(100, 7, np.uint8))
    after = on.fake.mark()
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


def without_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "wait", lambda self, events, deadline: None)


def without_settle(monkeypatch: pytest.MonkeyPatch, way: Way) -> None:
    copy, settle = FakeDriver.copy, Device.settle
    forgotten: list[Any] = []

    def copies(self: FakeDriver, its_way: Way, *arrays: Any) -> Any:
        event = copy(self, its_way, *arrays)
        if its_way is way:
            forgotten.append(event)
        return event

    def settles(self: Device, event: Any, deadline: float) -> None:
        if not any(event is each for each in forgotten):
            settle(self, event, deadline)

    monkeypatch.setattr(FakeDriver, "copy", copies)
    monkeypatch.setattr(Device, "settle", settles)


def without_the_end_of_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    without_settle(monkeypatch, Way.SAVE)


def without_the_end_of_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    without_settle(monkeypatch, Way.LOAD)


def without_marks_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for flow in (getting, putting):
        monkeypatch.setattr(
            flow, "ready", lambda device, _, stream: devices.ready(device, [], stream)
        )


def without_mark_of_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    def first_dropped(*args: Any) -> Any:
        step = devices.ready(*args)
        return step._replace(events=step.events[1:])

    for flow in (getting, putting):
        monkeypatch.setattr(flow, "ready", first_dropped)


@pytest.mark.parametrize(
    ("mutant", "marks"),
    [
        (without_wait, False),
        (without_wait, True),
        (without_the_end_of_saves, False),
        (without_the_end_of_loads, False),
        (without_marks_of_memory, True),
        (without_mark_of_stream, False),
    ],
)
def test_a_missing_wait_is_found(
    make: Any, mutant: Any, marks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    with pytest.raises((AssertionError, KVStoreError)):  # noqa: PT012 - any of some orders
        for seed in range(5):
            on = make(seed)
            try:
                # Small enough for the ring: a late copy must not hit memory that was freed.
                save_and_load(on, marks=marks, sizes=SIZES[:4])
            finally:
                on.fake.forget()
    monkeypatch.undo()


def test_tensors_of_a_device_come_back_there(on: OnDevice) -> None:
    values = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    on.client.put("k", values)
    got = on.client.get("k", device=NAME)
    assert isinstance(got, torch.Tensor)
    assert got.data_ptr() in on.fake.memory
    assert (got.dtype, got.shape) == (torch.bfloat16, (2, 3))
    assert torch.equal(got, values)
    assert on.client.get("missing", device=NAME) is None


def test_many_values_come_back_on_a_device(on: OnDevice) -> None:
    on.client.put_many(
        [("a", b"abc"), ("b", b""), ("c", np.array([[1.5]], np.float32)), ("e", torch.empty(0, 3))]
    )
    values: list[Any] = on.client.get_many([*"abcde"], device=torch.device(NAME))
    a, b, c, d, e = values
    assert (bytes(a.numpy()), bytes(b.numpy()), d) == (b"abc", b"", None)
    assert (c.dtype, c.tolist()) == (torch.float32, [[1.5]])
    assert (e.dtype, e.shape) == (torch.float32, (0, 3))


def test_memory_of_a_host_is_copied_to_a_device(on: OnDevice) -> None:
    """Also where a view was asked for."""
    on.client.put("k", b"abc")
    copied: Any = on.client.get("k", device=NAME, copy=False)
    assert bytes(copied.numpy()) == b"abc"
    assert on.client.lease(copied) is None


def test_what_a_device_cannot_return_is_refused(on: OnDevice) -> None:
    on.client.put("k", b"abc")
    with pytest.raises(InvalidArgumentError):
        on.client.get("k", device=NAME, kind="numpy")
    with pytest.raises(DeviceError):
        on.client.get("k", device="cuda:99")
    assert on.client.get("k", device="cpu") == b"abc"


def test_buffers_of_a_device_that_do_not_fit(on: OnDevice) -> None:
    on.client.put("k", b"x" * 100)
    small = on.fake.array(99)
    with pytest.raises(BufferMismatchError, match="has 100 bytes, the buffer 99"):
        on.client.get_into("k", on.memory([small]))
    assert not small.any()
    with pytest.raises(BufferMismatchError, match="different memories"):
        on.client.get_into(["k", "k"], [on.memory([on.fake.array(100)]), bytearray(100)])
    large = on.fake.array(200)
    assert on.client.get_into("k", on.memory([large[:50], large[60:160]])) == [100]
    assert large[:50].tobytes() + large[60:110].tobytes() == b"x" * 100
    assert not large[50:60].any()
    assert not large[110:].any()
    assert on.client.get_into("missing", on.memory([large])) == [None]


def test_memory_of_a_device_does_not_go_with_other_values(on: OnDevice) -> None:
    with pytest.raises(UnsupportedValueError, match="mixes"):
        on.client.put_many([("a", on.memory([on.fake.array(5)])), ("b", b"abc")])
    with pytest.raises(UnsupportedValueError, match="mixes"):
        on.client.put("a", [on.memory([on.fake.array(5)]), b"abc"])
    one, two = on.fake.array(5), on.fake.array(3)
    one[:], two[:] = 1, 2
    on.client.put("both", [on.memory([one]), on.memory([two])])
    assert on.client.get("both") == bytes([1] * 5 + [2] * 3)


def test_a_value_larger_than_the_ring(on: OnDevice) -> None:
    block = on.fake.array(5 * RING // 4)
    block[:] = on.bytes(len(block))
    assert on.client.put("k", on.memory([block])) is PutOutcome.STORED
    other = on.fake.array(len(block))
    assert on.client.get_into("k", on.memory([other])) == [len(block)]
    assert np.array_equal(block, other)
    on.check()


def test_another_object_in_the_place_is_a_miss(on: OnDevice) -> None:
    """The memory is not touched, or filled as a whole."""
    block = on.fake.array(1_000)
    with Client(on.client.config.master, placements_max=100) as remembers:
        on.client.put("k", b"x" * 1_000)
        assert remembers.get("k") == b"x" * 1_000  # knows its place now
        on.client.put("k", b"y" * 1_000, overwrite=True)
        there = DeviceMemory(
            remembers.device(NAME), np.array([block.ctypes.data]), np.array([1_000])
        )
        assert remembers.get_into("k", there) == [1_000]
        assert set(block.tolist()) <= {ord("x"), ord("y")}
        assert len(set(block.tolist())) == 1


def damage(view: Any, at: int) -> None:
    """Writes to the file whose memory the view shows; the view itself is read-only."""
    address = np.frombuffer(view, np.uint8).ctypes.data + at
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, _, _, _, _, *path = line.split()
            start, stop = (int(each, 16) for each in span.split("-"))
            if start <= address < stop:
                with open(path[0], "r+b") as file:  # from its beginning
                    file.seek(address - start)
                    file.write(b"\0")
                return
    raise AssertionError("it is not mapped")


def test_damaged_bytes_do_not_count(on: OnDevice) -> None:
    on.client.put("k", b"x" * 100_000)
    with Client(on.client.config.master) as other:
        damage(other.get("k", copy=False), 50_000)
    block = on.fake.array(100_000)
    assert on.client.get_into("k", on.memory([block])) == [None]
    assert on.client.stats().counters["checksum_mismatches"] >= 1
    assert not on.client.exists("k")  # reported, and removed
    on.check()


def test_work_that_does_not_end_fails_the_call_and_no_node(on: OnDevice) -> None:
    block = on.fake.array(100)
    on.client.put("k", b"x" * 100)
    on.fake.is_stuck = True
    with pytest.raises(DeadlineExceededError, match="work before the copy"):
        on.client.put("other", on.memory([block]), timeout_ms=100)
    with pytest.raises(DeadlineExceededError, match="work before the copy"):
        on.client.get_into("k", on.memory([block]), timeout_ms=100)
    on.fake.is_stuck = False
    assert on.client.stats().counters.get("failed_transfers", 0) == 0
    assert on.client.put("other", on.memory([block])) is PutOutcome.STORED
    assert on.client.get_into("k", on.memory([block])) == [100]


def test_copies_that_do_not_end_fail_the_device(
    on: OnDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_module, "SETTLE_S", 0.01)
    on.client.put("k", b"x" * 100)
    block = on.fake.array(100)
    memory = on.memory([block])
    wait = on.device.wait

    def stuck_after_wait(events: Any, deadline: float) -> None:
        wait(events, deadline)
        on.fake.is_stuck = True

    monkeypatch.setattr(on.device, "wait", stuck_after_wait)
    with pytest.raises(DeviceError, match="did not finish copies"):
        on.client.get_into("k", memory, timeout_ms=200)
    with pytest.raises(DeviceError, match="did not finish copies"):
        on.client.put("other", memory, timeout_ms=200)
    assert on.client.get("k") == b"x" * 100  # the host's memory is not concerned
    on.fake.is_stuck = False
    on.fake.finish()
    on.device._failed = False  # so that the fixture can release everything
    on.device.locks._is_kept = False
    on.device.ring.taken = 0


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


def test_an_asyncio_call_that_is_cancelled_leaves_the_memory_alone(on: OnDevice) -> None:
    on.client.put("k", b"x" * MIB)
    block = on.fake.array(MIB)

    async def main() -> None:
        async with AsyncClient(config=on.client.config) as client:
            memory = DeviceMemory(
                client.device(NAME), np.array([block.ctypes.data]), np.array([MIB])
            )
            assert await client.get_into("k", memory) == [MIB]
            block[:] = 0
            on.fake.is_stuck = True
            call = asyncio.create_task(client.get_into("k", memory))
            await asyncio.sleep(0.05)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            on.fake.is_stuck = False
            on.fake.finish()
            assert not block.any()

    asyncio.run(main())
