"""Access to the engine core where vLLM's connector interface has no hook.

* ``EngineCoreAccess.watch``: calls to the workers, other than those of each step, may change the
  weights.
* ``EngineCoreAccess.call``: between two steps, the workers report their weights.
* ``before_reset``, ``EngineCoreAccess.free_waiting``: before vLLM resets its prefix cache, blocks
  that are being saved or loaded, or not freed yet during a step, must become free.

vLLM creates the connector while it creates the engine core, so the core is found among the callers.
``watch`` and ``before_reset`` wrap one method each, which still does what it did.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any, Final, Self

from kvstore.connectors.vllm.call_stack import callers

log = logging.getLogger("vllm.kvstore")


HARMLESS: Final = frozenset(
    {
        "execute_model", "sample_tokens", "execute_dummy_batch", "take_draft_token_ids",
        "check_health", "profile", "synchronize_device", "reset_mm_cache", "reset_encoder_cache",
        "get_supported_tasks", "get_kv_connector_handshake_metadata", "get_kv_cache_spec",
        "compute_weight_checksums", "save_sharded_state", "save_tensorized_model", "list_loras",
        "shutdown",
    }
)  # fmt: skip
"""Calls to the workers that do not change their weights; any other call may change them."""

OF_ADAPTERS: Final = frozenset({"add_lora", "remove_lora", "pin_lora"})


class EngineCoreAccess:
    def __init__(self, core: Any) -> None:
        self._core = weakref.ref(core)
        self._executor = core.model_executor
        self._call = self._executor.collective_rpc

    @classmethod
    def from_call_stack(cls) -> Self | None:
        """Return the core that is creating this connector, or None, for example in a test."""
        for caller in callers():
            if hasattr(caller, "model_executor") and hasattr(caller, "collective_rpc"):
                return cls(caller)
        return None

    @property
    def is_paused(self) -> bool:
        """Whether vLLM schedules no new requests now, for example while its weights change."""
        state = getattr(self._scheduler, "pause_state", None)
        return getattr(state, "name", "UNPAUSED") != "UNPAUSED"

    @property
    def is_running(self) -> bool:
        """Whether there are running requests, which always keep their blocks."""
        return bool(getattr(self._scheduler, "running", None))

    @property
    def _scheduler(self) -> Any:
        core = self._core()
        return None if core is None else getattr(core, "scheduler", None)

    def free_waiting(self, loading: frozenset[str]) -> None:
        """Free the blocks of all requests that do not run, which then restart. vLLM itself does so
        for running requests, but cannot do so for loaded ones.

        Args:
            loading: requests whose load has ended on each worker, but may not be reported yet. vLLM
                will process the report as that of a failed load.
        """
        scheduler = self._scheduler
        for request in list(scheduler.requests.values()):
            status, name = request.status.name, request.request_id
            is_remote = status == "WAITING_FOR_REMOTE_KVS"
            if request.is_finished():
                if name in loading:
                    scheduler._free_request_blocks(request)
            elif (
                name in loading or name in scheduler.finished_recving_kv_req_ids
                if is_remote
                else status in ("WAITING", "PREEMPTED") and request.num_computed_tokens
            ):
                scheduler._free_request_blocks(request)
                request.num_computed_tokens = 0
                if is_remote:
                    scheduler.failed_recving_kv_req_ids.add(name)
        if scheduler.deferred_frees:  # steps in progress may still write to those blocks
            self._call("synchronize_device")
            pool = scheduler.kv_cache_manager.block_pool
            while scheduler.deferred_frees:
                _, blocks = scheduler.deferred_frees.popleft()
                pool.free_blocks(reversed(blocks))

    def call(self, function: Callable[..., Any], *arguments: object) -> list[Any]:
        """Call ``function`` on each worker, with vLLM's worker as its first argument; return the
        results in the order of ranks. Waits for steps in progress."""
        return list(self._call(function, args=arguments))

    def watch(self, *, weights: Callable[[], None], adapters: Callable[[], None]) -> None:
        """Call these after each call to the workers that may have changed weights or adapters."""
        call = self._executor.collective_rpc

        def watched(method: Any, *arguments: Any, **more: Any) -> Any:
            if isinstance(method, str) and method in HARMLESS:
                return call(method, *arguments, **more)
            try:
                return call(method, *arguments, **more)
            finally:
                if isinstance(method, str) and method in OF_ADAPTERS:
                    adapters()
                else:
                    weights()

        self._executor.collective_rpc = watched


def before_reset(pool: Any, prepare: Callable[[], None]) -> None:
    """Call ``prepare`` before each reset of the block pool's prefix cache."""
    reset = pool.reset_prefix_cache

    def prepared() -> Any:
        prepare()
        return reset()

    pool.reset_prefix_cache = prepared
