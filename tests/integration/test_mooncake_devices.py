"""Mooncake's store with memory of a device, by address. The device is a fake."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from kvstore.client import client as client_module
from kvstore.connectors.mooncake.mooncake_types import Code
from kvstore.connectors.mooncake.store import MooncakeDistributedStore
from kvstore.device.drivers import use
from tests.support.fake_device import FakeDriver

NAME = "cuda:3"
SIZE = 5_000


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    fake = FakeDriver(NAME)
    use(NAME, fake)

    def device_at(address: int) -> str:
        is_there = any(at <= address < at + size for at, size in fake.memory.items())
        return NAME if is_there else ""

    monkeypatch.setattr(client_module, "cuda_device_at", device_at)
    yield fake
    use(NAME, None)


@pytest.fixture
def store(fake: FakeDriver) -> Iterator[MooncakeDistributedStore]:
    with client_module.Client.embedded("16MiB") as client:
        store = MooncakeDistributedStore()
        assert store.setup(master_server_addr=client.config.master) == Code.OK
        yield store
        store.close()


def test_pages_of_a_device_go_there_and_back(
    store: MooncakeDistributedStore, fake: FakeDriver
) -> None:
    pages = [fake.array(SIZE) for _ in range(4)]
    for number, page in enumerate(pages):
        fake.launch(partial(page.fill, number + 1))
        assert store.register_buffer(page.ctypes.data, SIZE) == Code.OK
    one, two, three, four = (page.ctypes.data for page in pages)
    assert store.batch_put_from_multi_buffers(["k"], [[one, two + 7]], [[SIZE, 100]]) == [Code.OK]
    assert store.put_from("single", two, SIZE) == Code.OK
    assert store.get("k") == bytes([1] * SIZE + [2] * 100)
    assert store.batch_get_into_multi_buffers(["k"], [[three, four]], [[SIZE, 100]]) == [SIZE + 100]
    assert (pages[2] == 1).all()
    assert (pages[3][:100] == 2).all()
    assert (pages[3][100:] == 4).all()
    assert store.get_into("single", one, SIZE) == SIZE
    assert (pages[0] == 2).all()
    assert store.unregister_buffer(one) == Code.OK
    assert store.get_into("single", one, SIZE) == Code.INVALID_PARAMS
