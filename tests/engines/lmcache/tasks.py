"""An L2 adapter as LMCache's controllers use it: submit, wait for the descriptor, ask."""

from __future__ import annotations

import random
import select
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
from lmcache.v1.memory_management import (
    MemoryFormat,
    MemoryObj,
    MemoryObjMetadata,
    TensorMemoryObj,
)
from lmcache.v1.platform import consume_fd

MODEL: Final = "tests/tiny-model"
SHAPE: Final = (2, 4, 16, 128)
DTYPE: Final = torch.bfloat16
PATIENCE_S: Final = 30.0
DEADLINE_S: Final = 6.0
"""2 s of a call, the time that a loaded machine takes, and less than LMCache's own time-outs."""

ResultT = TypeVar("ResultT")


def key(number: int, **fields: Any) -> ObjectKey:
    given: dict[str, Any] = {"model_name": MODEL, "kv_rank": 0x01000100} | fields
    return ObjectKey(chunk_hash=number.to_bytes(32, "big"), **given)


def chunk(seed: int | None, shape: Sequence[int] = SHAPE, dtype: torch.dtype = DTYPE) -> MemoryObj:
    """Random bytes of a seed, or zeros."""
    size = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.zeros(size, dtype=torch.uint8)
    if seed is not None:
        raw.copy_(torch.frombuffer(bytearray(random.Random(seed).randbytes(size)), dtype=raw.dtype))
    metadata = MemoryObjMetadata(
        shape=torch.Size(shape),
        dtype=dtype,
        address=0,
        phy_size=size,
        ref_count=1,
        fmt=MemoryFormat.KV_2LTD,
        shapes=[torch.Size(shape)],
        dtypes=[dtype],
    )
    return TensorMemoryObj(raw, metadata, parent_allocator=None)


def same(one: MemoryObj, other: MemoryObj) -> bool:
    return bytes(one.byte_array) == bytes(other.byte_array)


def timed(call: Callable[[], Any]) -> Any:
    began = time.monotonic()
    result = call()
    assert time.monotonic() - began < DEADLINE_S
    return result


def layouts(shape: Sequence[int] = SHAPE, dtype: torch.dtype = DTYPE) -> dict[int, Any]:
    """As the daemon says them to a lookup."""
    return {0: MemoryLayoutDesc([torch.Size(shape)], [dtype])}


def config(settings: dict[str, Any]) -> PluginL2AdapterConfig:
    """As ``lmcache server --l2-adapter`` reads it."""
    return PluginL2AdapterConfig.from_dict(
        {
            "type": "plugin",
            "module_path": "kvstore.connectors.lmcache",
            "class_name": "KVStoreL2Adapter",
            "adapter_params": settings,
        }
    )


class Adapter:
    """Made by LMCache's factory."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.it = create_l2_adapter(config(settings))
        self._stored: dict[int, L2StoreResult] = {}

    def store(self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]) -> L2StoreResult:
        task = self.it.submit_store_task(list(keys), list(objects))

        def finished() -> L2StoreResult | None:
            self._stored |= self.it.pop_completed_store_tasks()
            return self._stored.pop(task, None)

        return self.wait(self.it.get_store_event_fd(), finished)

    def look_up(
        self, keys: Sequence[ObjectKey], described: dict[int, Any] | None = None
    ) -> list[int]:
        """The indices of what was found; that is locked."""
        task = self.it.submit_lookup_and_lock_task(
            list(keys), layouts() if described is None else described
        )
        found = self.wait(
            self.it.get_lookup_and_lock_event_fd(),
            lambda: self.it.query_lookup_and_lock_result(task),
        )
        return [index for index in range(len(keys)) if found.test(index)]

    def load(self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]) -> list[int]:
        """The indices of what was loaded."""
        task = self.it.submit_load_task(list(keys), list(objects))
        loaded = self.wait(self.it.get_load_event_fd(), lambda: self.it.query_load_result(task))
        return [index for index in range(len(keys)) if loaded.test(index)]

    def wait(self, descriptor: int, ask: Callable[[], ResultT | None]) -> ResultT:
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        deadline = time.monotonic() + PATIENCE_S
        while (answer := ask()) is None:
            assert poller.poll((deadline - time.monotonic()) * 1000), "the task did not end"
            consume_fd(descriptor)
        return answer

    def close(self) -> None:
        self.it.close()
