"""A loop that spins keeps its timers, and does not spin when nothing happens."""

from __future__ import annotations

import asyncio
import os
import socket
import time

import pytest

from kvstore.master.busy_poll import BusyPollSelector, new_event_loop
from kvstore.wire.busy_poll_gauge import BusyPollGauge


def test_timers_are_on_time_while_spinning() -> None:
    async def scenario() -> float:
        loop = asyncio.get_running_loop()
        here, there = socket.socketpair()
        with here, there:
            here.setblocking(False)
            there.setblocking(False)
            await loop.sock_sendall(there, b"x")
            await loop.sock_recv(here, 1)  # activity: now it spins, for a second
            started = time.perf_counter()
            await asyncio.sleep(0.02)
            return time.perf_counter() - started

    with asyncio.Runner(loop_factory=lambda: new_event_loop(1_000_000)) as runner:
        assert 0.019 < runner.run(scenario()) < 0.5


def test_timers_alone_make_no_spinning() -> None:
    async def scenario() -> float:
        await asyncio.sleep(0)
        used = time.thread_time()
        for _ in range(20):
            await asyncio.sleep(0.005)
        return time.thread_time() - used

    with asyncio.Runner(loop_factory=lambda: new_event_loop(1_000_000)) as runner:
        assert runner.run(scenario()) < 0.05


def test_it_spins_however_long_the_work_between_took(monkeypatch: pytest.MonkeyPatch) -> None:
    yields: list[None] = []
    monkeypatch.setattr(os, "sched_yield", lambda: yields.append(None))
    here, there = socket.socketpair()
    with here, there, BusyPollSelector(5_000) as selector:
        selector._gauge = BusyPollGauge(is_crowded=lambda: False)
        selector.register(here, 1)
        there.send(b"x")
        assert selector.select(None)
        here.recv(1)
        time.sleep(0.01)
        assert selector.select(0.001) == []
    assert yields


def test_a_lost_time_slice_ends_the_spinning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each yield gives the core to another process for 2 ms."""
    yields: list[float] = []

    def lose_the_core() -> None:
        yields.append(time.monotonic())
        time.sleep(0.002)

    monkeypatch.setattr(os, "sched_yield", lose_the_core)
    here, there = socket.socketpair()
    with here, there, BusyPollSelector(200) as selector:
        selector._gauge = BusyPollGauge(is_crowded=lambda: False)
        selector.register(here, 1)
        for _ in range(100):
            there.send(b"x")
            assert selector.select(None)
            here.recv(1)
            assert selector.select(0.0005) == []
    assert len(yields) <= 20


def test_an_event_while_spinning_is_returned() -> None:
    here, there = socket.socketpair()
    with here, there, BusyPollSelector(1_000_000) as selector:
        selector.register(here, 1)
        there.send(b"x")
        assert selector.select(None)
        assert selector.select(None), "level-triggered: it is still there"
        here.recv(1)
        started = time.perf_counter()
        assert selector.select(0.01) == []
        assert 0.009 < time.perf_counter() - started < 0.5
        assert selector.select(0) == []
        assert selector.select(-1) == []
