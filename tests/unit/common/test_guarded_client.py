"""How long an adapter's call may last, and when the store is not asked."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import NoReturn

import pytest

from kvstore.connectors.common import guarded_client
from kvstore.connectors.common.guarded_client import (
    BYTES_PER_MS,
    REFUSALS_MAX,
    GuardedCall,
    GuardedClient,
)
from kvstore.errors import (
    DeadlineExceededError,
    KVStoreError,
    PermissionDeniedError,
    UnavailableError,
)

log = logging.getLogger("test")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(guarded_client, "time", clock)
    return clock


@pytest.fixture
def guarded(clock: Clock) -> GuardedClient:
    client = SimpleNamespace(config=SimpleNamespace(timeout_ms=2_000))
    return GuardedClient(client, log)  # type: ignore[arg-type]


def fails(error: KVStoreError, guarded: GuardedClient) -> None:
    def call(timeout_ms: int) -> NoReturn:
        raise error

    with pytest.raises(type(error)):
        guarded.run(call)


def test_a_call_has_time_for_the_bytes_that_it_moves(guarded: GuardedClient) -> None:
    assert guarded.run(lambda timeout_ms: timeout_ms) == 2_000
    assert guarded.run(lambda timeout_ms: timeout_ms, size=1 << 30) == 2_000 + 4_096
    assert guarded.run(lambda timeout_ms: timeout_ms, size=BYTES_PER_MS - 1) == 2_000


def test_one_deadline_for_all_exchanges_of_a_call(guarded: GuardedClient, clock: Clock) -> None:
    deadline, allowed = GuardedCall(guarded), []
    for _ in range(2):
        allowed.append(deadline.run(lambda timeout_ms: timeout_ms, size=100 * BYTES_PER_MS))
        clock.now += 0.25
    assert allowed == [2_100, 1_950], "100 ms more for the bytes, 250 ms less for the time"
    clock.now += 10
    assert deadline.run(lambda timeout_ms: timeout_ms) == 1


def test_a_store_that_keeps_failing_is_left_alone_for_a_while(
    guarded: GuardedClient, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    asked: list[int] = []
    for _ in range(3):
        fails(DeadlineExceededError("late"), guarded)
    with pytest.raises(UnavailableError, match="several times in a row"):
        guarded.run(asked.append)
    assert not asked
    clock.now += 1.1
    guarded.run(asked.append)
    guarded.run(asked.append)
    assert len(asked) == 2
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "the store is not asked for a while, calls are misses: late",
        "the store answers again",
    ]


def test_each_refusal_is_told_once_and_opens_no_breaker(
    guarded: GuardedClient, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(5):
        for name in ("a", "b"):
            fails(PermissionDeniedError(f"may not read {name}"), guarded)
    assert guarded.run(lambda _: "asked") == "asked"
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"refused_by_the_store, such calls are misses: may not read {n}" for n in "ab"]
    for number in range(2 * REFUSALS_MAX):
        fails(PermissionDeniedError(f"may not read {number}"), guarded)
    assert len(caplog.records) == REFUSALS_MAX
