"""Nodes that do not answer: a call costs a second, names the node, and troubles nobody else."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore import PutOutcome
from kvstore.errors import DeadlineExceededError, KVStoreError
from kvstore.transport import tcp_client
from tests.support.cluster import SHORT, Cluster
from tests.support.workload import content

STORED = PutOutcome.STORED
SLOW: dict[str, Any] = {"dead_ms": 60_000}
"""Of a master that does not find out for itself in time."""

STALL_S = 0.5
SETTINGS: dict[str, Any] = {"transports": ("tcp",)}
ABOUT_S = 1.5
"""A stall, and what a loaded machine adds."""


def timed(call: Callable[..., object], *args: Any, **more: Any) -> tuple[object, float]:
    started = time.monotonic()
    outcome: object
    try:
        outcome = call(*args, **more)
    except KVStoreError as error:
        outcome = error
    return outcome, time.monotonic() - started


@pytest.fixture(autouse=True)
def short_stalls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_client, "STALL_S", STALL_S)


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, settings=SHORT | SLOW) as cluster:
        yield cluster


def test_a_node_that_hangs_costs_about_a_second(slow: Cluster) -> None:
    slow.start(2)
    client = slow.client(**SETTINGS)
    keys = [f"key-{number}" for number in range(8)]
    for key in keys:
        assert client.put(key, content(key)) is STORED
    hangs = slow.nodes[0]
    hangs.freeze()
    try:
        found, took = timed(client.get_many, keys)
        assert took < ABOUT_S
        assert isinstance(found, list)
        assert {value for value in found if value} == {
            content(key) for key, value in zip(keys, found, strict=True) if value
        }
        assert None in found
        again, took = timed(client.get_many, keys)
        assert (again, took < STALL_S) == (found, True), "it is not asked again at once"
        for number in range(4):
            outcome, took = timed(client.put, f"new-{number}", content("x"))
            assert outcome is STORED
            assert took < STALL_S
        other = slow.client(**SETTINGS)
        for number in range(4):
            outcome, took = timed(other.put, f"more-{number}", content("x"), replicas=2)
            assert outcome is STORED
            assert took < ABOUT_S
        lost = next(key for key, value in zip(keys, found, strict=True) if value is None)
        for last in (False, False, False, False, True):  # the machine may be late at times
            short = slow.client(transports=("tcp",), timeout_ms=300)
            outcome, took = timed(short.get, lost)
            assert isinstance(outcome, DeadlineExceededError)
            named = f"node {hangs.name} (127.0.0.1:" in outcome.message  # and not the master
            in_time = took < 0.3 + 0.2
            assert not last or (named, in_time) == (True, True), (outcome, took)
            if named and in_time:
                break
    finally:
        hangs.resume()
