"""Values in a device's memory as payloads. Tensors that say so stand in for those of a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest
import torch

from kvstore.client.devices import ClientDevices
from kvstore.client.values import as_writable, encode, encode_all
from kvstore.device.drivers import use
from kvstore.device.memory import DeviceMemory
from kvstore.errors import BufferMismatchError
from tests.support.fake_device import FakeDriver


class Elsewhere(torch.Tensor):
    """Says that it is on a GPU; ``cpu()`` gives its values."""

    name = "cuda:0"
    _is_param = True  # other subclasses are refused

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device(self.name)

    def cpu(self) -> torch.Tensor:  # type: ignore[override]
        return self.as_subclass(torch.Tensor)


class Further(Elsewhere):
    name = "cuda:1"


def there(values: torch.Tensor, kind: type[Elsewhere] = Elsewhere) -> Any:
    return values.as_subclass(kind)


@pytest.fixture
def devices() -> Iterator[ClientDevices]:
    for name in ("cuda:0", "cuda:1"):
        use(name, FakeDriver(name))
    yield ClientDevices()
    for name in ("cuda:0", "cuda:1"):
        use(name, None)


def runs(payload: object) -> list[tuple[int, int]]:
    memory = cast("DeviceMemory", payload)
    return list(zip(memory.addresses.tolist(), memory.sizes.tolist(), strict=True))


def test_a_tensor_stays_where_it_is(devices: ClientDevices) -> None:
    tensor = torch.arange(6, dtype=torch.int16).reshape(2, 3)
    columns = encode_all([there(tensor)], devices)
    assert columns.device is devices.of("cuda:0")
    assert runs(columns.parts[0]) == [(tensor.data_ptr(), 12)]
    assert columns.sizes == [12]
    assert columns.descriptors == [encode(tensor).descriptor]


def test_values_in_different_memories_go_through_the_hosts(devices: ClientDevices) -> None:
    tensor = torch.arange(6, dtype=torch.int16)
    for other in (b"abc", np.zeros(3, np.uint8), there(torch.ones(2), Further)):
        columns = encode_all([there(tensor), other], devices)
        assert columns.device is None
        assert bytes(columns.parts[0][0]) == tensor.numpy().tobytes()  # type: ignore[index]


def test_a_list_of_tensors_is_one_value(devices: ClientDevices) -> None:
    first, second = (torch.ones(size).view(torch.uint8) for size in (4, 2))
    columns = encode_all([[there(first), there(second)]], devices)
    assert runs(columns.parts[0]) == [(first.data_ptr(), 16), (second.data_ptr(), 8)]
    mixed = encode_all([[there(first), b"abc"]], devices)
    assert mixed.device is None
    assert b"".join(mixed.parts[0]) == first.numpy().tobytes() + b"abc"  # type: ignore[arg-type]


def test_tensors_to_fill(devices: ClientDevices) -> None:
    tensor = torch.zeros(2, 3, dtype=torch.bfloat16)
    payload, dtype = as_writable(there(tensor), devices)
    assert (runs(payload), dtype) == ([(tensor.data_ptr(), 12)], "bfloat16")
    payload, dtype = as_writable([there(tensor), there(tensor)], devices)
    assert (len(payload), dtype) == (24, "bfloat16")
    assert as_writable(bytearray(3), devices) == ([memoryview(bytearray(3))], "")


@pytest.mark.parametrize(
    "buffers",
    [
        [there(torch.zeros(2)), bytearray(3)],
        [there(torch.zeros(2)), there(torch.zeros(2), Further)],
        [there(torch.zeros(2)), there(torch.zeros(2).int())],
        there(torch.zeros(2, 3).t()),
    ],
    ids=["host-too", "two-devices", "two-dtypes", "strided"],
)
def test_tensors_that_cannot_be_filled(devices: ClientDevices, buffers: Any) -> None:
    with pytest.raises(BufferMismatchError):
        as_writable(buffers, devices)
