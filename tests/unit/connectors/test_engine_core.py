"""Finding vLLM's engine core, asking its workers, and noticing what may have changed them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.connectors.vllm.connector import (
    KVStoreConnector,
    MooncakeStoreConnector,
    _check_executor,
    _check_name,
)
from kvstore.connectors.vllm.scheduler.engine_core import EngineCoreAccess, before_reset
from kvstore.connectors.vllm_plugin import register
from kvstore.errors import ConfigError


class Executor:
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def collective_rpc(self, method: Any, *arguments: Any, **more: Any) -> list[Any]:
        self.calls.append(method)
        return [method(self, *more.get("args", ()))] if callable(method) else ["done"]


class EngineCore:
    """Makes its scheduler, which makes the connector."""

    def __init__(self) -> None:
        self.model_executor = Executor()
        self.found: EngineCoreAccess | None = None
        self.scheduler: Any = Scheduler(self)

    def collective_rpc(self, method: str) -> Any:
        return self.model_executor.collective_rpc(method)


class Scheduler:
    def __init__(self, core: EngineCore) -> None:
        core.found = EngineCoreAccess.from_call_stack()
        self.pause_state = SimpleNamespace(name="UNPAUSED")


def make() -> tuple[EngineCore, EngineCoreAccess]:
    engine = EngineCore()
    assert engine.found is not None
    return engine, engine.found


def test_the_engine_core_is_found_among_the_callers() -> None:
    engine, core = make()
    assert core.call(lambda worker, number: (worker, number), 7) == [(engine.model_executor, 7)]
    assert not core.is_paused
    engine.scheduler.pause_state.name = "PAUSED_NEW"
    assert core.is_paused


def test_without_an_engine_core_there_is_none() -> None:
    assert EngineCoreAccess.from_call_stack() is None


@pytest.mark.parametrize(
    ("method", "noticed"),
    [
        ("execute_model", []),
        ("sample_tokens", []),
        ("synchronize_device", []),
        ("reload_weights", ["weights"]),
        ("update_weights", ["weights"]),
        ("wake_up", ["weights"]),
        (lambda worker: None, ["weights"]),
        ("add_lora", ["adapters"]),
    ],
)
def test_calls_that_may_change_the_workers_are_noticed(
    method: str | Callable[..., Any], noticed: list[str]
) -> None:
    engine, core = make()
    seen: list[str] = []
    core.watch(weights=lambda: seen.append("weights"), adapters=lambda: seen.append("adapters"))
    engine.collective_rpc(method)  # type: ignore[arg-type]
    assert engine.model_executor.calls == [method]
    assert seen == noticed
    core.call(lambda worker: None)
    assert seen == noticed, "our own questions change nothing"


def test_what_is_prepared_comes_before_a_reset() -> None:
    done: list[str] = []

    def reset() -> bool:
        done.append("reset")
        return True

    pool = SimpleNamespace(reset_prefix_cache=reset)
    before_reset(pool, lambda: done.append("prepared"))
    assert pool.reset_prefix_cache() is True
    assert done == ["prepared", "reset"]


# --- blocks of requests that wait -----------------------------------------------------------------


class Waiting:
    """A request of vLLM's, and as much of its scheduler as holds its blocks."""

    def __init__(self, request_id: str, status: str, computed: int = 8) -> None:
        self.request_id = request_id
        self.status = SimpleNamespace(name=status)
        self.num_computed_tokens = computed

    def is_finished(self) -> bool:
        return str(self.status.name).startswith("FINISHED")


def holding(engine: EngineCore, *requests: Waiting) -> list[str]:
    """Whose blocks are freed from now on."""
    freed: list[str] = []
    scheduler = engine.scheduler
    scheduler.requests = {each.request_id: each for each in requests}
    scheduler.finished_recving_kv_req_ids = {"arrived"}
    scheduler.failed_recving_kv_req_ids = set()
    scheduler.deferred_frees = deque()
    scheduler._free_request_blocks = lambda request: freed.append(request.request_id)
    return freed


def test_requests_whose_blocks_were_loaded_begin_anew() -> None:
    engine, core = make()
    requests = [
        Waiting("ended", "WAITING_FOR_REMOTE_KVS"),
        Waiting("arrived", "WAITING_FOR_REMOTE_KVS"),
        Waiting("another connector's", "WAITING_FOR_REMOTE_KVS"),
        Waiting("aborted", "FINISHED_ABORTED"),
        Waiting("aborted, another connector's", "FINISHED_ABORTED"),
        Waiting("to be scheduled", "WAITING"),
        Waiting("new", "WAITING", 0),
        Waiting("preempted", "PREEMPTED", 0),
        Waiting("runs", "RUNNING"),
        Waiting("streams", "WAITING_FOR_STREAMING_REQ"),
    ]
    freed = holding(engine, *requests)
    core.free_waiting(frozenset({"ended", "aborted"}))
    assert freed == ["ended", "arrived", "aborted", "to be scheduled"]
    anew = [each.request_id for each in requests if not each.num_computed_tokens]
    assert anew == ["ended", "arrived", "to be scheduled", "new", "preempted"]
    assert engine.scheduler.failed_recving_kv_req_ids == {"ended", "arrived"}
    assert engine.model_executor.calls == []


def test_blocks_that_a_step_under_way_may_write_are_free_when_it_has_ended() -> None:
    engine, core = make()
    holding(engine)
    freed: list[str] = []

    def free_blocks(blocks: Iterable[str]) -> None:
        assert engine.model_executor.calls == ["synchronize_device"]
        freed.extend(blocks)

    pool = SimpleNamespace(free_blocks=free_blocks)
    engine.scheduler.kv_cache_manager = SimpleNamespace(block_pool=pool)
    engine.scheduler.deferred_frees = deque([(7, ["first", "tail"]), (9, ["other"])])
    core.free_waiting(frozenset())
    assert freed == ["tail", "first", "other"]
    assert not engine.scheduler.deferred_frees


# --- names ----------------------------------------------------------------------------------------


class MultiConnector:
    def __init__(self, kind: type) -> None:
        _check_name(kind)


def test_multi_connector_needs_the_name_that_is_ours_alone() -> None:
    MultiConnector(KVStoreConnector)
    _check_name(MooncakeStoreConnector)
    with pytest.raises(ConfigError, match='"kv_connector": "KVStoreConnector"'):
        MultiConnector(MooncakeStoreConnector)


def test_the_plug_in_makes_the_name_known_and_may_be_called_again() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for _ in range(2):
        register()
    found = KVConnectorFactory.get_connector_class_by_name("KVStoreConnector")
    assert found is KVStoreConnector


# --- engines that cannot be served ----------------------------------------------------------------


def test_ranks_with_a_scheduler_each_are_refused_by_name() -> None:
    def engine(backend: str, ranks: int) -> Any:
        return SimpleNamespace(
            parallel_config=SimpleNamespace(distributed_executor_backend=backend, world_size=ranks)
        )

    with pytest.raises(ConfigError, match="external_launcher"):
        _check_executor(engine("external_launcher", 2))
    _check_executor(engine("external_launcher", 1))
    _check_executor(engine("mp", 2))
