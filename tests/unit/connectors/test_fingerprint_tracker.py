"""When the workers are asked what their weights are, and what is used meanwhile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.calls.fleet_records import FleetRecord
from kvstore.config import ClientConfig
from kvstore.connectors.vllm.messages import WorkerIdentity
from kvstore.connectors.vllm.scheduler.fingerprint_tracker import FingerprintTracker


class Workers:
    """Two workers, and the calls to them."""

    def __init__(self) -> None:
        self.seem_equal = [True, True]
        self.number = 0

    def call(self, function: Any, *arguments: object) -> list[Any]:
        return [function(rank, *arguments) for rank in (0, 1)]

    def hello(self, rank: int) -> WorkerIdentity:
        return WorkerIdentity("layout", [0], [f"r{rank}"], rank=rank, weights="w")

    def recheck(self, rank: int) -> tuple[int, int]:
        self.number += 1
        return rank, self.number if self.seem_equal[rank] else 0


@pytest.fixture
def workers() -> Workers:
    return Workers()


@pytest.fixture
def identity(workers: Workers) -> FingerprintTracker:
    """Known."""
    engine = FleetRecord("vllm", ("model",), "", (), {"hash_algorithm": "xxhash_cbor"})
    client: Any = SimpleNamespace(
        config=ClientConfig(), list_objects=lambda **_: [], put=lambda *_, **__: None
    )
    made = FingerprintTracker(client, workers, engine, model_id="", what="blocks")  # type: ignore[arg-type]
    record = made.take(made.start(workers.hello))
    assert record is not None
    made.move(record)
    made.announcer.stop()
    made.announcer.join()
    assert made.is_verified
    return made


def test_doubted_weights_that_seem_equal_are_used_and_certain_once_all_are_read(
    identity: FingerprintTracker, workers: Workers
) -> None:
    before = identity.fingerprint
    steps = (
        identity.require_recheck,
        lambda: identity.recheck(workers.recheck),
        lambda: identity.take_verdicts({0: (1, True)}),  # the other worker is still reading
        lambda: identity.take_verdicts({1: (2, True)}),
    )
    certain = []
    for step in steps:
        step()
        assert identity.fingerprint == before
        certain.append(identity.is_verified)
    assert certain == [False, False, False, True]


def test_doubted_weights_of_which_samples_differ_are_not_used(
    identity: FingerprintTracker, workers: Workers
) -> None:
    workers.seem_equal[1] = False
    identity.require_recheck()
    identity.recheck(workers.recheck)
    assert identity.is_outdated
    assert not identity.fingerprint
    identity.take_verdicts({0: (1, True), 1: (0, True)})
    assert not identity.is_verified


def test_weights_that_turn_out_to_differ_are_used_no_longer(
    identity: FingerprintTracker, workers: Workers
) -> None:
    identity.require_recheck()
    identity.recheck(workers.recheck)
    identity.take_verdicts({1: (2, False)})
    assert identity.is_outdated
    assert not identity.fingerprint


def test_the_verdict_of_an_earlier_check_says_nothing(
    identity: FingerprintTracker, workers: Workers
) -> None:
    for _ in range(2):
        identity.require_recheck()
        identity.recheck(workers.recheck)
    identity.take_verdicts({0: (1, True), 1: (2, False)})
    assert identity.fingerprint
    assert not identity.is_verified
    identity.take_verdicts({0: (3, True), 1: (4, True)})
    assert identity.is_verified


def test_a_random_seed_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    request.getfixturevalue("identity")
    assert "xxhash_cbor starts from a random seed" in caplog.text
