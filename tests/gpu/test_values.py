"""Tensors of a GPU as values: what was put comes back, dtype and shape intact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvstore import Client
from kvstore.calls import PutOutcome
from kvstore.errors import BufferMismatchError
from tests.gpu.machine import GPU, IS_REAL, MIB, NAME, tensor

DTYPES = [
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool,
    torch.complex64,
]  # fmt: skip
SHAPE = (64, 2, 8, 128) if IS_REAL else (3, 2, 8, 16)
STORED, FOUND = PutOutcome.STORED, PutOutcome.FOUND


def values(dtype: torch.dtype = torch.bfloat16, *shape: int, seed: int = 0) -> torch.Tensor:
    """Any bytes of that dtype; of a bool, 0 and 1."""
    chance = torch.Generator().manual_seed(seed)
    shape = shape or SHAPE
    size = torch.empty(shape, dtype=dtype, device="meta").nbytes
    top = 2 if dtype is torch.bool else 256
    flat = torch.randint(0, top, (size,), dtype=torch.uint8, generator=chance)
    return flat.view(dtype).reshape(shape)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bits, because NaN is not itself."""
    assert (one.dtype, one.shape) == (other.dtype, other.shape)
    flat = (each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other))
    return torch.equal(*flat)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(gpu: GPU, client: Client, dtype: torch.dtype) -> None:
    value = values(dtype)
    assert client.put("k", gpu.tensor(value)) == STORED
    assert same(gpu.read(tensor(client.get("k", device=NAME))), value)
    in_host_memory = tensor(client.get("k"))
    assert in_host_memory.device.type == "cpu"
    assert same(in_host_memory, value)
    room = gpu.tensor(torch.zeros_like(value))
    assert client.get_into("k", room) == [value.nbytes]
    assert same(gpu.read(room), value)


def test_a_value_that_is_larger_than_a_slot_of_the_ring(gpu: GPU, client: Client) -> None:
    value = values(torch.uint8, (300 if IS_REAL else 9) * MIB + 3)
    assert client.put("k", gpu.tensor(value)) == STORED
    assert same(gpu.read(tensor(client.get("k", device=NAME))), value)


def test_tensors_that_are_not_contiguous(gpu: GPU, client: Client) -> None:
    value = values()
    views: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "transposed": lambda on: on.transpose(0, 1),
        "strided": lambda on: on[::2],
        "expanded": lambda on: on[:1].expand(4, *value.shape[1:]),
    }
    for name, view in views.items():
        assert client.put(name, view(gpu.tensor(value))) == STORED
        back = tensor(client.get(name, device=NAME))
        assert same(gpu.read(back), view(value).contiguous()), name


def test_tensors_to_fill_must_be_contiguous_and_of_the_dtype(gpu: GPU, client: Client) -> None:
    client.put("k", values(torch.bfloat16, 8, 8))
    with pytest.raises(BufferMismatchError):
        client.get_into("k", gpu.tensor(values(torch.bfloat16, 8, 8)).T)
    with pytest.raises(BufferMismatchError):
        client.get_into("k", gpu.tensor(values(torch.float32, 8, 8)))
    with pytest.raises(BufferMismatchError):
        client.get_into("k", gpu.tensor(values(torch.bfloat16, 8, 7)))


def test_a_batch_of_values_in_several_memories(gpu: GPU, client: Client) -> None:
    value = values()
    batch: list[tuple[str, Any]] = [("gpu", gpu.tensor(value)), ("cpu", value), ("bytes", b"abc")]
    assert client.put_many(batch) == [STORED] * 3
    raw = value.contiguous().reshape(-1).view(torch.uint8)
    assert client.put("list", [gpu.tensor(raw), raw]) == STORED
    for found in client.get_many(["gpu", "cpu"], device=NAME):
        assert same(gpu.read(tensor(found)), value)
    assert client.get("list") == raw.numpy().tobytes() * 2
    with pytest.raises(BufferMismatchError, match="in different memories"):
        client.get_into(["gpu", "cpu"], [gpu.tensor(value), value.clone()])


def test_a_chain_is_put_once_and_a_list_of_tensors_is_one_value(gpu: GPU, client: Client) -> None:
    blocks = [values(seed=seed) for seed in range(4)]
    keys = [b"block %d" % index for index in range(4)]
    on_gpu = [gpu.tensor(block) for block in blocks]
    assert client.put_chain(keys, on_gpu) == [STORED] * 4
    assert client.put_chain(keys, on_gpu) == [FOUND] * 4
    assert client.match_prefix([*keys, b"no"]) == 4
    rooms = [[gpu.tensor(torch.zeros_like(block[:1])), gpu.tensor(torch.zeros_like(block[1:]))]
             for block in blocks]  # fmt: skip
    assert client.get_into(keys, rooms) == [block.nbytes for block in blocks]
    for block, room in zip(blocks, rooms, strict=True):
        assert same(torch.cat([gpu.read(part) for part in room]), block)


def test_a_stream_that_is_named_is_waited_for(gpu: GPU, client: Client) -> None:
    before, after = values(seed=1), values(seed=2)
    source, room = gpu.tensor(before), gpu.tensor(before)
    new, old = gpu.tensor(after), gpu.tensor(before)
    gpu.finish()
    stream = gpu.stream()
    gpu.launch(lambda: source.copy_(new), stream)
    assert client.put("k", source, stream=stream) == STORED
    gpu.launch(lambda: room.copy_(old), stream)
    assert client.get_into("k", room, stream=stream) == [after.nbytes]
    assert same(gpu.read(room), after)
    handle = stream if isinstance(stream, int) else stream.cuda_stream
    gpu.launch(lambda: source.copy_(old), stream)
    assert client.put("k2", source, stream=handle) == STORED
    assert same(tensor(client.get("k2")), before)


def test_memory_of_a_get_can_be_used_at_once(gpu: GPU, client: Client) -> None:
    """Memory that torch hands out again while kernels of its last owner run."""
    value = values(torch.uint8, MIB)
    client.put("k", value)
    for _ in range(20):
        used = gpu.tensor(torch.zeros_like(value))
        gpu.launch(lambda used=used: used.fill_(7))  # type: ignore[misc]
        del used
        assert same(gpu.read(tensor(client.get("k", device=NAME))), value)
