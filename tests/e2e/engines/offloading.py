"""vLLM's scheduler with its ``OffloadingConnector``, tiers and pool, in this process.

Only what needs a GPU is not vLLM's own: ``Engine`` takes the place of the engine core and of its
one worker. It computes blocks (their bytes follow from their hashes and the seed of the weights)
and copies them between the paged cache and the rows of vLLM's pool, as vLLM's worker does.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import torch
from torch import nn
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK_TOKENS: Final = 16
BLOCKS: Final = 200
TIER: Final = {"type": "KVStoreTier", "module_path": "kvstore.connectors.vllm_tier"}
STEPS_S: Final = 30.0


def weights(seed: int) -> nn.Module:
    """A model whose weights follow from the seed."""
    model = nn.Linear(8, 8)
    with torch.no_grad():
        model.weight.copy_(torch.randn(8, 8, generator=torch.Generator().manual_seed(seed)))
        model.bias.zero_()
    return model


class Worker:
    """What ``hello`` asks a worker of vLLM for."""

    rank = 0

    def __init__(self, vllm_config: VllmConfig, model: nn.Module) -> None:
        self.vllm_config = vllm_config
        self.model_runner = SimpleNamespace(get_draft_model=lambda: None)
        self.model = model

    def get_model(self) -> nn.Module:
        return self.model


class Executor:
    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def collective_rpc(self, method: Any, *arguments: Any, **more: Any) -> list[Any]:
        return [method(self.worker, *more.get("args", ()))] if callable(method) else []


class Engine:
    """One engine; ``close`` ends it."""

    def __init__(
        self, model: Path, tier: dict[str, object], *, seed: int = 0, pool: int = 64,
        window: int = 0, **extra: object,
    ) -> None:  # fmt: skip
        """
        Args:
            model: a directory with a model that ``tiny`` made, for its configuration.
            tier: settings of the tier.
            seed: of the weights.
            pool: chunks in vLLM's pool.
            window: tokens; besides the full attention there is a group with a sliding window.
            extra: further settings of the connector.
        """
        specs: list[Any] = [FullAttentionSpec(
            block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=32, dtype=torch.float32
        )]  # fmt: skip
        if window:
            specs.append(SlidingWindowSpec(
                block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=32, dtype=torch.float32,
                sliding_window=window,
            ))  # fmt: skip
        self.block_bytes = specs[0].page_size_bytes * 2  # two layers a group
        groups = [
            KVCacheGroupSpec([f"g{group}.layer{layer}" for layer in range(2)], spec)
            for group, spec in enumerate(specs)
        ]
        caches = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)
        config = _config(model, {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": pool * self.block_bytes * len(specs),
            "secondary_tiers": [TIER | tier],
            **extra,
        })  # fmt: skip
        self._config = config
        self.model_executor = Executor(Worker(config, weights(seed)))
        self.scheduler: Any = None
        self._memory = np.zeros((BLOCKS, self.block_bytes), np.uint8)
        self._seed = seed
        self._hasher = _hasher(config)
        self._numbers = 0
        self._late: dict[int, Any] = {}
        self.loaded_blocks = 0
        self._chunk_blocks = int(str(extra.get("blocks_per_chunk", 1)))
        self._make(caches)
        manager = self.connector.connector_scheduler.manager
        self.manager: Any = manager
        (self.tier,) = manager.secondary_tiers
        self.rows = np.asarray(manager.primary_tier.get_kv_memoryview()).view(np.uint8)

    def collective_rpc(self, method: Any) -> Any:
        return self.model_executor.collective_rpc(method)

    def _make(self, caches: KVCacheConfig) -> None:
        """The tier finds this object among its callers, as it finds vLLM's engine core."""
        self._config.cache_config.num_gpu_blocks = BLOCKS
        self.scheduler = Scheduler(
            vllm_config=self._config,
            kv_cache_config=caches,
            structured_output_manager=StructuredOutputManager(self._config),
            block_size=BLOCK_TOKENS,
            log_stats=True,
        )

    @property
    def connector(self) -> Any:
        return self.scheduler.connector

    def reload(self, seed: int) -> None:
        """Replaces the weights in place, by a call to the workers."""
        self.model_executor.worker.model.load_state_dict(weights(seed).state_dict())
        self._seed = seed
        self.model_executor.collective_rpc("reload_weights")

    def reset(self) -> bool:
        return bool(self.scheduler.reset_prefix_cache(reset_connector=True))

    # --- requests -----------------------------------------------------------------------------

    def request(self, tokens: Sequence[int]) -> Request:
        self._numbers += 1
        sampling = SamplingParams(max_tokens=1)
        sampling.update_from_generation_config({}, 1)
        return Request(
            request_id=f"request-{self._numbers}",
            prompt_token_ids=list(tokens),
            sampling_params=sampling,
            pooling_params=None,
            block_hasher=self._hasher,
        )

    def run(self, tokens: Sequence[int]) -> int:
        """Serves one prompt until every transfer has ended; returns how many of its tokens were
        loaded. Fails if a block of the prompt then has bytes other than those computed."""
        request = self.request(tokens)
        before = self.loaded_blocks
        self.scheduler.add_request(request)
        deadline = time.monotonic() + STEPS_S
        while self.scheduler.has_requests() or self.connector.has_pending_push_work() or self._late:
            self.step()
            assert time.monotonic() < deadline, "the request or its transfers did not end"
        return (self.loaded_blocks - before) * BLOCK_TOKENS

    def step(self) -> None:
        """One step of scheduler and worker. Saves begin a step after they were ordered."""
        output = self.scheduler.schedule()
        orders = output.kv_connector_metadata
        done: dict[int, int] = {}
        arrived = set()
        for number, job in self._late.items():
            for block, place in self._places(job.src_spec, job.dst_spec.chunk_ids):
                self.rows[place] = self._memory[block]
            done[number] = 1
        self._late = dict(orders.store_jobs)
        for number, job in orders.load_jobs.items():
            for block, place in self._places(job.dst_spec, job.src_spec.chunk_ids):
                self._memory[block] = self.rows[place]
                self.loaded_blocks += 1
            done[number] = 1
            arrived.add(job.req_id)
        ran = [self.scheduler.requests[name] for name in output.num_scheduled_tokens]
        known = {each.req_id: each.num_computed_tokens for each in output.scheduled_new_reqs}
        for request in ran:
            self._compute(request, known.get(request.request_id, 0) // BLOCK_TOKENS)
        worker = OffloadingWorkerMetadata(completed_jobs=done) if done else None
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=[each.request_id for each in ran],
                req_id_to_index={each.request_id: index for index, each in enumerate(ran)},
                sampled_token_ids=[[7] for _ in ran],
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=None,
                kv_connector_output=KVConnectorOutput(
                    finished_recving=arrived or None, kv_connector_worker_meta=worker
                ),
            ),
        )
        if not (ran or done):
            time.sleep(0.001)  # a step without work: the model's time

    def _places(self, spec: Any, rows: Sequence[int]) -> Iterator[tuple[int, tuple[int, slice]]]:
        """Where in the pool each block is: row and bytes. A group begins with a row of its own."""
        blocks, row = iter(spec.block_ids), 0
        for size, first in zip(spec.group_sizes, spec.block_indices, strict=True):
            skipped = first % self._chunk_blocks
            for position in range(skipped, skipped + size):
                at = position % self._chunk_blocks * self.block_bytes
                chunk = rows[row + position // self._chunk_blocks]
                yield next(blocks), (chunk, slice(at, at + self.block_bytes))
            row += -(-(skipped + size) // self._chunk_blocks) if size else 0

    def _compute(self, request: Request, known: int) -> None:
        """Fills the request's blocks, and checks the first ``known``, which vLLM has cached or
        loaded."""
        tables = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        for group, blocks in enumerate(tables):
            for index, block in enumerate(blocks[: len(request.block_hashes)]):
                if not block:
                    continue
                right = self._content(request.block_hashes[index], group)
                if index < known:
                    assert self._memory[block].tobytes() == right, f"block {index} of {group}"
                self._memory[block] = np.frombuffer(right, np.uint8)

    def _content(self, block_hash: bytes, group: int) -> bytes:
        data = hashlib.shake_128(b"%d %d " % (self._seed, group) + bytes(block_hash))
        return data.digest(self.block_bytes)

    def close(self) -> None:
        del self.rows  # vLLM unmaps its pool
        self.scheduler.shutdown()


def _config(model: Path, extra: dict[str, object]) -> VllmConfig:
    config = VllmConfig(
        model_config=ModelConfig(model=str(model), dtype="float32", max_model_len=4096),
        scheduler_config=SchedulerConfig(
            max_num_seqs=4, max_num_batched_tokens=4096, max_model_len=4096,
            is_encoder_decoder=False, async_scheduling=False,
        ),
        cache_config=CacheConfig(block_size=BLOCK_TOKENS, enable_prefix_caching=True),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=KVTransferConfig(
            kv_connector="OffloadingConnector", kv_role="kv_both", engine_id=uuid.uuid4().hex,
            kv_connector_extra_config=extra,
        ),
    )  # fmt: skip
    config.cache_config.kv_cache_layout = "LBHNC"  # resolved before connectors are made
    config.cache_config.block_size = BLOCK_TOKENS
    return config


def _hasher(config: VllmConfig) -> Any:
    hash_fn = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    init_none_hash(hash_fn)
    return get_request_block_hasher(BLOCK_TOKENS, hash_fn)
