"""Calls are made on the caller's streams, in whatever thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.client.async_client import AsyncClient
from kvstore.client.client import Client
from kvstore.device import streams


class Recorded(threading.local):
    """The part of torch that is used, with a current stream per thread and device."""

    def __init__(self) -> None:
        self.current = {0: SimpleNamespace(cuda_stream=0), 1: SimpleNamespace(cuda_stream=0)}

    @property
    def cuda(self) -> Any:
        return SimpleNamespace(
            device_count=lambda: 2,
            current_stream=self.current.__getitem__,
            default_stream=lambda: SimpleNamespace(cuda_stream=0, number=0),
            ExternalStream=lambda handle: SimpleNamespace(cuda_stream=handle, number=0),
            stream=self.stream,
        )

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        number = getattr(stream, "number", 0)
        before, self.current[number] = self.current[number], stream
        try:
            yield
        finally:
            self.current[number] = before


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    torch = Recorded()
    monkeypatch.setattr(streams, "_torch", lambda: torch)
    return torch


def test_a_thread_computes_on_streams_by_handle_or_object(torch: Recorded) -> None:
    other: Any = SimpleNamespace(cuda_stream=9, number=1)
    with streams.computing_on([7, other]):
        assert [streams.current_stream(number) for number in (0, 1)] == [7, 9]
        with streams.computing_on([0]):
            assert streams.current_stream(0) == 0
        assert streams.current_stream(0) == 7
    assert [streams.current_stream(number) for number in (0, 1)] == [0, 0]


def test_without_cuda_there_is_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_torch", lambda: None)
    assert streams.current_streams() == []
    with streams.computing_on([7]):
        assert streams.current_stream(0) == 0


def test_the_thread_of_an_async_call_computes_on_the_streams_of_its_caller(
    torch: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[int]] = []

    def exists(*_: object, **__: object) -> bool:
        seen.append([streams.current_stream(number) for number in (0, 1)])
        return False

    async def call() -> None:
        async with AsyncClient("127.0.0.1:1") as client:
            ours = SimpleNamespace(cuda_stream=5, number=1)
            with torch.stream(SimpleNamespace(cuda_stream=4, number=0)), torch.stream(ours):
                await client._carry_out(exists)
            await client._carry_out(exists)

    asyncio.run(call())
    assert seen == [[4, 5], [0, 0]]


def test_values_are_made_contiguous_on_the_stream_of_a_put(
    torch: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def encode_all(*_: object) -> None:
        seen.append(streams.current_stream(0))
        raise ValueError("enough")

    monkeypatch.setattr("kvstore.client.flows.put.encode_all", encode_all)
    with Client("127.0.0.1:1") as client:
        for stream in (None, 7):
            with pytest.raises(ValueError, match="enough"):
                client.put("k", b"", stream=stream)
            with pytest.raises(ValueError, match="enough"):
                client.put_many([("k", b"")], stream=stream)
    assert seen == [0, 0, 7, 7]
