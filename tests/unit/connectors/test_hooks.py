"""The order in which vLLM's own model runners call the connector around a forward pass."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.worker import kv_connector_model_runner_mixin as first_runner
from vllm.v1.worker.gpu import kv_connector as second_runner

from kvstore.connectors.vllm.connector import KVStoreConnector
from kvstore.connectors.vllm.messages import TransferCommands


class Worker:
    """Writes down what the connector asks of it."""

    def __init__(self, seen: list[str]) -> None:
        self._seen = seen

    def begin(self, orders: TransferCommands) -> None:
        self._seen.append("begin")

    def load(self, orders: TransferCommands) -> None:
        self._seen.append("load")

    def save(self, orders: TransferCommands) -> None:
        self._seen.append("save")

    def take_arrived(self) -> tuple[set[str], set[str]]:
        return set(), set()

    def take_bad_blocks(self) -> set[int]:
        return set()

    def take_nothing(self) -> None:
        return None

    take_stats = take_report = take_nothing


@pytest.fixture
def seen() -> list[str]:
    return []


@pytest.fixture
def connector(seen: list[str], monkeypatch: pytest.MonkeyPatch) -> KVStoreConnector:
    made: Any = object.__new__(KVStoreConnector)
    made._worker = Worker(seen)
    made._scheduler = made._adapters = made._live = None
    made._kv_cache_config = SimpleNamespace(kv_cache_groups=[None])
    made.register_kv_caches = lambda caches: None
    for runner in (first_runner, second_runner):
        monkeypatch.setattr(runner, "get_kv_transfer_group", lambda: made)
        monkeypatch.setattr(runner, "get_forward_context", lambda: None)
    monkeypatch.setattr(second_runner, "is_forward_context_available", lambda: True)
    connector: KVStoreConnector = made
    return connector


def first(step: Any, forward: Callable[[], None]) -> None:
    with first_runner.KVConnectorModelRunnerMixin._get_kv_connector_output(step):
        forward()


def first_with_a_draft_model(step: Any, forward: Callable[[], None]) -> None:
    runner: Any = first_runner.KVConnectorModelRunnerMixin
    with runner._get_kv_connector_output(step, defer_finalize=True):
        pass
    forward()
    runner.finalize_kv_connector()


def second(step: Any, forward: Callable[[], None]) -> None:
    around: Any = second_runner.ActiveKVConnector(None, {})
    around.pre_forward(step)
    forward()
    around.finish_forward()
    around.post_forward(set())


@pytest.mark.parametrize("runner", [first, second])
def test_a_step_begins_before_its_forward_pass_is_queued(
    runner: Callable[..., None], connector: KVStoreConnector, seen: list[str]
) -> None:
    """And loads are ordered after it: a mark that they made then would wait for the step."""
    step = SimpleNamespace(
        kv_connector_metadata=TransferCommands(), has_sync_kv_loads=False, finished_req_ids=set()
    )
    runner(step, lambda: seen.append("forward"))
    assert seen == ["begin", "forward", "load", "save"]


def test_saves_come_after_the_pass_of_a_draft_model(
    connector: KVStoreConnector, seen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_runner, "has_kv_transfer_group", lambda: True)
    step = SimpleNamespace(
        kv_connector_metadata=TransferCommands(), has_sync_kv_loads=False, finished_req_ids=set()
    )
    first_with_a_draft_model(step, lambda: seen.append("draft"))
    assert seen == ["begin", "load", "draft", "save"]
