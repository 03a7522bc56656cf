"""What the digest of live weights sees, and what it does not."""

from __future__ import annotations

import random
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from kvstore.connectors.vllm.weights import weight_monitor as weights
from kvstore.connectors.vllm.weights.weight_monitor import (
    LoraAdapters,
    WeightMonitor,
    WorkerWeights,
    attention_of,
    draft_layers,
    weights_of,
)
from kvstore.connectors.vllm_plugin import register
from tests.support.wait import until


class Rotary(nn.Module):
    """Its factors are a buffer that is not saved; which of them it uses is a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.uses_long = False
        self.register_buffer("cos_sin_cache", torch.arange(64.0), persistent=False)


class Kernel:
    """Keeps a layer's weights to itself."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: None) -> torch.Tensor:
        return x @ self.weight.t()


class Hidden(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0))
        self.params_dtype = weight.dtype
        self.input_size_per_partition = weight.shape[1]
        self.quant_method = Kernel(weight)


class RoutedExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w13 = nn.Parameter(torch.ones(4, 8))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.rotary = Rotary()
        self.hidden = Hidden(torch.randn(48, 96, generator=generator))
        self.linear = nn.Linear(300, 7, bias=False)
        self.linear.weight = nn.Parameter(torch.randn(7, 300, generator=generator))
        self.small = nn.Parameter(torch.randn(3, 5, generator=generator).to(torch.bfloat16))
        self.experts = RoutedExperts()


def digest(model: nn.Module, *, experts: bool = True) -> str:
    return weights_of({"model": model}, experts=experts).digest


def test_equal_weights_have_one_digest_wherever_they_lie() -> None:
    other = Model()
    other.linear.weight = nn.Parameter(torch.zeros(7, 301)[:, 1:])  # not in one piece
    other.linear.weight.data.copy_(Model().linear.weight)
    assert digest(Model()) == digest(other)
    assert weights_of({"model": other}, experts=True).unseen == ["model.hidden.weight"]


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.linear.weight.data[6, 299].add_(1e-3),
        lambda model: model.small.data[2, 4].neg_(),
        lambda model: model.rotary.cos_sin_cache[33].add_(1),
        lambda model: setattr(model.rotary, "uses_long", True),
        lambda model: model.hidden.quant_method.weight.mul_(1.01),
        lambda model: model.experts.w13.data.add_(1),
        lambda model: model.double(),
        lambda model: setattr(model, "more", nn.Parameter(torch.ones(1))),
    ],
    ids=["element", "bfloat16", "buffer", "factors", "hidden", "experts", "dtype", "new"],
)
def test_whatever_changes_gives_another_digest(change: Any) -> None:
    model = Model()
    before = digest(model)
    with torch.no_grad():
        change(model)
    assert digest(model) != before


def test_on_other_devices_every_element_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done on a GPU, without one."""

    def words(tensor: torch.Tensor) -> list[int]:
        return weights._sampled(tensor.view(torch.uint8)).tolist()

    monkeypatch.setattr(weights, "CHUNK_WORDS", 1_000)
    tensor = torch.arange(100_003, dtype=torch.int64).to(torch.int8)
    before = words(tensor)
    for at in (0, 1, 54_321, 100_000, 100_002):
        tensor[at] += 1
        assert words(tensor) != before, at
        tensor[at] -= 1
    assert words(tensor) == before
    assert len(before) == weights.SAMPLES + 2
    rows = tensor[:96_000].view(12, 1_000, 8)
    for swapped in (rows[:, [1, 0, *range(2, 1_000)]], rows[[1, 0, *range(2, 12)]]):
        assert words(swapped.contiguous().view(-1))[-1] != words(rows.view(-1))[-1], "another order"


def live(model: nn.Module) -> WeightMonitor:
    parallel = SimpleNamespace(data_parallel_size=1, enable_eplb=False)
    worker = SimpleNamespace(rank=0, model_runner=None, get_model=lambda: model)
    return WeightMonitor(worker, SimpleNamespace(parallel_config=parallel))


def test_weights_that_stayed_are_found_equal_in_the_background() -> None:
    """And kernels, which may be computing, are not called there."""
    model = Model()
    weights = live(model)
    weights.read()
    callers: list[int] = []

    class Told(Kernel):
        def apply(self, *given: Any) -> torch.Tensor:
            callers.append(threading.get_ident())
            return super().apply(*given)

    model.hidden.quant_method = Told(model.hidden.quant_method.weight)
    number = weights.start_check()
    assert until(weights.take_verdict) == (number, True)
    assert set(callers) == {threading.get_ident()}
    assert weights.take_verdict() is None, "told once"
    assert weights.start_check() == number + 1


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.linear.weight.data.mul_(1.01),
        lambda model: model.hidden.quant_method.weight.mul_(1.01),
        lambda model: setattr(model.rotary, "uses_long", True),
        lambda model: delattr(model, "small"),
    ],
    ids=["all of a tensor", "hidden", "factors", "gone"],
)
def test_samples_show_at_once_that_weights_were_replaced(change: Any) -> None:
    model = Model()
    weights = live(model)
    before = weights.read()
    change(model)
    assert not weights.start_check()
    assert weights.read() != before
    assert weights.start_check()
    weights.stop()


def test_a_check_that_fails_or_ends_early_does_not_say_that_weights_are_equal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go_on = threading.Event()

    def beside(*given: Any, multiplies: bool, stopped: Any = None, **how: Any) -> WorkerWeights:
        if multiplies:
            return weights_of(*given, **how)
        until(lambda: stopped() or go_on.is_set())
        raise RuntimeError("model code")

    monkeypatch.setattr(weights, "weights_of", beside)
    one = live(Model())
    one.read()
    assert one.start_check()
    one.stop()
    assert one.take_verdict() is None

    number = one.start_check()
    go_on.set()
    one.finish()
    assert one.take_verdict() == (number, False)


@pytest.mark.parametrize(
    ("method", "apart"),
    [("eagle", {"own"}), ("mtp", {"own"}), ("extract_hidden_states", None), ("custom_class", None)],
)
def test_layers_that_do_more_than_guess_are_not_a_draft_models(
    method: str, apart: set[str] | None
) -> None:
    """What vLLM keeps in them for its user would be filled with zeros."""
    model, draft = nn.Linear(2, 2), nn.Linear(2, 2)
    weights = live(nn.Sequential(model))
    assert draft_layers(weights) is None
    runner = SimpleNamespace(get_draft_model=lambda: nn.Sequential(model, draft))
    weights._worker.model_runner = runner
    weights.vllm_config.speculative_config = SimpleNamespace(method=method)
    layers = {"own": draft, "shared": model}
    weights.vllm_config.compilation_config = SimpleNamespace(static_forward_context=layers)
    assert draft_layers(weights) == apart


def test_a_wrapper_for_adapters_means_nothing() -> None:
    plain, wrapped = nn.Module(), nn.Module()
    plain.proj = nn.Linear(4, 4, bias=False)
    wrapped.proj = nn.Module()
    wrapped.proj.base_layer = plain.proj
    assert digest(plain) == digest(wrapped)


def test_experts_that_others_hold_and_what_cannot_be_read_are_told() -> None:
    model = Model()
    spread = weights_of({"model": model}, experts=False)
    assert spread.unseen == ["experts", "model.hidden.weight"]
    model.experts.w13.data.add_(1)
    assert weights_of({"model": model}, experts=False) == spread
    model.linear.weight = nn.Parameter(torch.empty(0))  # and no kernel that we could ask
    seen = weights_of({"model": model}, experts=True)
    assert seen.unseen == ["model.hidden.weight", "model.linear.weight"]


def packed(weight: torch.Tensor) -> str:
    """The digest of a layer that vLLM has packed for a CPU, where its weights cannot be read."""
    layer = nn.Module()
    layer.weight = nn.Parameter(weight, requires_grad=False)
    UnquantizedLinearMethod().process_weights_after_loading(layer)
    assert not layer.weight.numel()
    weights = weights_of({"model": layer}, experts=True)
    assert weights.unseen == []
    return weights.digest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_element_that_vllm_packs_counts(dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and not torch.cpu._is_avx512_supported():
        pytest.skip("without AVX-512 vLLM packs no bfloat16")
    register()
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(1)).to(dtype)
    before = packed(weight.clone())
    assert packed(weight.clone()) == before
    for at in random.Random(dtype.itemsize).sample(range(weight.numel()), 20):
        changed = weight.clone()
        words = changed.view(-1).view(torch.int16 if dtype == torch.bfloat16 else torch.int32)
        words[at] ^= 1  # by its last bit
        assert packed(changed) != before, at


def test_the_models_dtype_is_that_of_its_cache_however_it_was_asked_for() -> None:
    def layer(name: str, dtype: torch.dtype) -> Any:
        backend = SimpleNamespace(get_name=lambda: "CPU_ATTN")
        return SimpleNamespace(
            attn_backend=backend, impl=object(), kv_cache_dtype=name, kv_cache_torch_dtype=dtype
        )

    given = attention_of({"a": layer("bfloat16", torch.bfloat16)})
    assert given == attention_of({"a": layer("auto", torch.bfloat16)})
    assert given != attention_of({"a": layer("auto", torch.float16)})
    assert given != attention_of({"a": layer("fp8", torch.uint8)})


def test_attention_is_told_once_for_each_manner() -> None:
    def layer(isa: str = "vec", window: int | None = None) -> Any:
        backend = SimpleNamespace(get_name=lambda: "CPU_ATTN")
        return SimpleNamespace(attn_backend=backend, impl=object(), isa=isa, sliding_window=window)

    same = attention_of({"a": layer(), "b": layer(), "moe": object()})
    assert len(same) == 1
    assert "backend=CPU_ATTN" in same[0]
    assert attention_of({"a": layer("amx"), "b": layer("amx")}) != same
    assert len(attention_of({"a": layer(), "b": layer(window=128)})) == 2


# --- adapters -------------------------------------------------------------------------------------


class Manager:
    def __init__(self) -> None:
        self.loaded: dict[int, Any] = {}

    def list_adapters(self) -> dict[int, Any]:
        return dict(self.loaded)


def adapter(value: float, scaling: float = 1.0) -> Any:
    layer = SimpleNamespace(
        lora_a=torch.full((2, 8), value), lora_b=[torch.ones(8, 2), None], scaling=scaling
    )
    return SimpleNamespace(loras={"q_proj": layer})


def test_adapters_are_known_by_what_is_loaded() -> None:
    manager = Manager()
    runner = SimpleNamespace(lora_manager=SimpleNamespace(_adapter_manager=manager))
    adapters = LoraAdapters(SimpleNamespace(rank=3, model_runner=runner))
    assert adapters.digests() == {}
    assert not adapters.have_changed()
    manager.loaded[1] = adapter(1.0)
    assert adapters.have_changed()
    first = adapters.digests()
    assert not adapters.have_changed()
    manager.loaded[1] = adapter(2.0)  # loaded again from the same path
    assert adapters.have_changed()
    second = adapters.digests()
    assert first[1] != second[1]
    manager.loaded[1] = adapter(1.0, scaling=2.0)
    assert adapters.digests()[1] not in (first[1], second[1])
    manager.loaded[1] = adapter(1.0)
    assert adapters.digests() == first
    del manager.loaded[1]
    assert adapters.have_changed()
