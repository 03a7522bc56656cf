"""The order of the cache that vLLM is asked for, and what its own code makes of it."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvstore.connectors.vllm.connector import KVStoreConnector
from kvstore.connectors.vllm.worker.layout import NOT_SPLIT, PageSplit, split_of, stored_order
from kvstore.connectors.vllm.worker.pages import inspect_caches
from kvstore.errors import ConfigError
from tests.unit.connectors.vllm_caches import FULL, LATENT, WINDOW, Model

ANY = ["LBNHC", "LBHNC", "BLNHC", "BLHNC", "BHLNC", "LHBNC"]
"""What vLLM offers when no backend says anything, as on a GPU with FlashAttention."""
TRANSFER = {
    "kv_connector": "KVStoreConnector", "kv_role": "kv_both",
    "kv_connector_module_path": "kvstore.connectors.vllm",
}  # fmt: skip


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A platform with a GPU of the capability ``major``, as far as it is asked."""
    from vllm.platforms import current_platform

    asked = SimpleNamespace(major=9, is_cuda=True)
    monkeypatch.setattr(current_platform, "is_cuda", lambda: asked.is_cuda)
    monkeypatch.setattr(current_platform, "get_device_capability", lambda: asked)
    monkeypatch.delenv("VLLM_KV_CACHE_LAYOUT", raising=False)
    return asked


def engine(
    *, is_given: bool = False, block_size: int = 16, hisparse: object = None,
    skipped: tuple[str, ...] = (), **model: bool,
) -> Any:  # fmt: skip
    return SimpleNamespace(
        model_config=SimpleNamespace(**{"use_mla": False, "is_hybrid": False, **model}),
        cache_config=SimpleNamespace(
            user_specified_block_size=is_given, block_size=block_size,
            kv_cache_dtype_skip_layers=list(skipped), kv_cache_layout=None,
        ),
        attention_config=SimpleNamespace(hisparse_config=hisparse),
        kv_transfer_config=KVTransferConfig(**TRANSFER),
    )  # fmt: skip


def wish(config: Any) -> str | None:
    wished: str | None = KVStoreConnector.get_required_kvcache_layout(config)
    return wished


def chosen(config: Any, supported: list[str]) -> str:
    """What vLLM takes, of the orders that its backends support."""
    return str(resolve_kv_cache_layout(config, [supported]).name)


def test_a_block_is_one_run_where_every_backend_can_do_it(gpu: Any) -> None:
    assert chosen(engine(), ANY) == "BLNHC"
    gpu.major = 10
    assert chosen(engine(), ["LBHNC", "BLHNC"]) == "BLHNC"


def test_the_operators_order_comes_first(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "LBHNC")
    assert chosen(engine(), ANY) == "LBHNC"


def test_nothing_is_asked_for_where_vllm_may_refuse_to_start_with_it(gpu: Any) -> None:
    assert wish(engine()) == "BLNHC"
    assert wish(engine(use_mla=True)) is None
    assert wish(engine(is_hybrid=True)) is None
    assert wish(engine(skipped=("0",))) is None
    assert wish(engine(hisparse=object())) is None
    assert wish(engine(is_given=True, block_size=128)) is None
    assert wish(engine(is_given=True, block_size=16)) == "BLNHC"
    assert wish(engine(is_given=False, block_size=64)) == "BLNHC"
    without_model = engine()
    without_model.model_config = None
    assert wish(without_model) is None


def test_parts_of_a_multi_connector_have_no_wish(gpu: Any) -> None:
    config = engine()
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="MultiConnector", kv_role="kv_both",
        kv_connector_extra_config={"connectors": [TRANSFER]},
    )  # fmt: skip
    assert MultiConnector.get_required_kvcache_layout(config) is None
    assert chosen(config, ANY) == "LBNHC"


def test_orders_have_equal_names_when_they_store_equal_bytes() -> None:
    layouts = {}
    for order in KVCacheLayout:
        caches, config = Model([(3, FULL)], order.name).caches(4)
        try:
            layouts[order.name] = inspect_caches(caches, config).layout
        except ConfigError:  # the heads of a page are apart
            assert order.name in ("LHBNC", "BHLNC")
    assert len(layouts) == 4
    for one, other in itertools.combinations(layouts, 2):
        is_equal = layouts[one] == layouts[other]
        assert is_equal == (stored_order(one) == stored_order(other)), (one, other)


# --- shards for engines of other tensor-parallel sizes -------------------------------------------


def caches_of(*specs: KVCacheSpec, replicas: int = 1) -> Any:
    """As much of ``KVCacheConfig`` as says how pages are split."""
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs]
    return SimpleNamespace(kv_cache_groups=groups, kv_tp_replicas=replicas)


def test_ranks_hold_equal_numbers_of_shards() -> None:
    assert split_of(0, caches_of(FULL), 2) == NOT_SPLIT
    assert NOT_SPLIT.parts(1, 3) == ["p1t3"]
    assert split_of(8, caches_of(FULL, WINDOW), 2) == PageSplit(8, 4)
    assert split_of(8, caches_of(FULL), 8) == PageSplit(8, 1)
    with pytest.raises(ConfigError, match="tp_shards=6"):
        split_of(6, caches_of(FULL), 4)


def test_ranks_with_the_same_heads_hold_the_same_shards() -> None:
    """Eight ranks of a model with two heads."""
    split = split_of(2, caches_of(FULL, replicas=4), 8)
    assert split == PageSplit(2, 1)
    assert [split.parts(0, rank // 4) for rank in (0, 3, 4, 7)] == [
        ["p0s0"], ["p0s0"], ["p0s1"], ["p0s1"],
    ]  # fmt: skip


def test_latent_attention_is_not_split_and_states_cannot_be() -> None:
    assert split_of(8, caches_of(LATENT, replicas=8), 8) == PageSplit(1, 1)
    state = MambaSpec(block_size=16, shapes=((2, 2),), dtypes=(torch.float32,))
    with pytest.raises(ConfigError, match="recurrent"):
        split_of(2, caches_of(FULL, state), 2)
