"""Channels of a stub: one per master, replaced once it was idle."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest

from kvstore.client.rpc.channels import ChannelPool

ADDRESS = "127.0.0.1:1"


@pytest.fixture
def now() -> list[float]:
    return [100.0]


@pytest.fixture
def channels(now: list[float]) -> Iterator[ChannelPool]:
    made = ChannelPool(idle_s=25.0, clock=lambda: now[0])
    yield made
    made.close()


def test_an_idle_channel_is_replaced_and_one_in_use_is_not(
    channels: ChannelPool, now: list[float]
) -> None:
    with channels.acquire(ADDRESS, 200.0) as first:
        now[0] += 30.0
        with channels.acquire(ADDRESS, 200.0) as second:
            pass
    now[0] += 20.0
    with channels.acquire(ADDRESS, 200.0) as third:
        pass
    assert first is second is third
    now[0] += 26.0
    with channels.acquire(ADDRESS, 200.0) as fourth:
        assert fourth is not third
    ask: grpc.UnaryUnaryMultiCallable[bytes, bytes] = third.channel.unary_unary("/a/b")
    with pytest.raises(ValueError, match="closed"):
        ask(b"")
