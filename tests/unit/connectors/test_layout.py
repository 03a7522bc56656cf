"""The order of the cache that vLLM is asked for, and what its own code makes of it."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvstore.connectors.vllm.connector import KVStoreConnector
from kvstore.connectors.vllm.layout import stored_order
from kvstore.connectors.vllm.pages import survey
from kvstore.errors import ConfigError
from tests.unit.connectors.vllm_caches import FULL, Model

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


def test_where_a_backend_cannot_do_it_vllm_takes_its_own(gpu: Any) -> None:
    assert chosen(engine(), ["LBNHC"]) == "LBNHC"
    assert chosen(engine(), ["LBHNC", "LHBNC"]) == "LBHNC"


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


def test_nothing_is_asked_for_on_other_devices(gpu: Any) -> None:
    gpu.is_cuda = False
    assert wish(engine()) is None
    assert chosen(engine(), ["LBHNC"]) == "LBHNC"


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
            layouts[order.name] = survey(caches, config).layout
        except ConfigError:  # the heads of a page are apart
            assert order.name in ("LHBNC", "BHLNC")
    assert len(layouts) == 4
    for one, other in itertools.combinations(layouts, 2):
        is_equal = layouts[one] == layouts[other]
        assert is_equal == (stored_order(one) == stored_order(other)), (one, other)


def test_the_order_of_a_cpu_and_unknown_ones_keep_their_names() -> None:
    assert [stored_order(each) for each in ("LBHNC", "LBNHC", "None")] == ["LBHNC", "LBNHC", "None"]
