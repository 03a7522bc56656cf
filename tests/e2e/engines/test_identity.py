"""Who shares blocks on real engines: those whose live weights and attention mean the same."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from examples.tiny import BLOCK_TOKENS
from tests.e2e.engines.conftest import MakeModel, StartEngine, prompt
from tests.e2e.engines.engine import Engine, transfer_config
from tests.e2e.engines.test_engine import WHOLE, cached, tokens
from tests.support.cluster import Cluster


def objects(store: Cluster) -> dict[str, int]:
    """By fingerprint."""
    found: dict[str, int] = {}
    for each in store.client().status().namespaces:
        if each.name.startswith("vllm/"):
            fingerprint = each.name.split("/")[1]
            found[fingerprint] = found.get(fingerprint, 0) + each.objects
    return {fingerprint: number for fingerprint, number in found.items() if number}


def reload(engine: Engine, model: Path) -> None:
    """In place, as training loops do; vLLM's prefix cache is left as it is."""
    engine.run(f"llm.collective_rpc('reload_weights', kwargs={{'weights_path': {str(model)!r}}})")


@pytest.fixture(scope="module")
def trained(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other attention, of which one layer was left as it was."""
    from safetensors.torch import load_file, save_file

    directory = tmp_path_factory.mktemp("trained") / llama.name
    shutil.copytree(llama, directory)
    file = directory / "model.safetensors"
    weights = load_file(file)
    changed = [name for name in weights if "self_attn" in name and ".0." not in name]
    assert changed
    for name in changed:
        weights[name] = weights[name].flip(0).contiguous()
    save_file(weights, file, metadata={"format": "pt"})
    return directory


@pytest.mark.timeout(400)
def test_weights_that_are_replaced_in_place_have_blocks_of_their_own(
    store: Cluster, llama: Path, trained: Path, engine: StartEngine, tmp_path: Path
) -> None:
    """And an engine that loads the same files from elsewhere shares them."""
    one = engine(llama, transfer_config(store.address))
    asked = [prompt(1), prompt(2)]
    old = tokens(one.generate(asked))
    one.saved()
    (first,) = objects(store).items()

    reload(one, trained)
    new = one.generate([prompt(1)])
    assert cached(new) == [0], "neither from the store nor from vLLM's own prefix cache"
    one.saved()
    assert tokens(new) != old[:1]
    assert one.reset()
    again = one.generate([prompt(1)])
    assert cached(again) == [WHOLE]
    assert tokens(again) == tokens(new)

    assert one.reset(store=True)
    assert objects(store) == dict([first]), "only what these weights mean is removed"
    one.generate([prompt(1)])
    one.saved()

    copied = tmp_path / "another-name"
    shutil.copytree(trained, copied)
    other = engine(copied, transfer_config(store.address), served_model_name="llama")
    found = other.generate([prompt(1), prompt(2)])
    assert cached(found) == [WHOLE, 0]
    assert found[0].tokens == new[0].tokens

    reload(one, llama)
    back = one.generate(asked)
    assert cached(back) == [WHOLE, WHOLE]
    assert tokens(back) == old


EVERY_PARAMETER = """
    import random, torch
    from safetensors.torch import load_file

    model = llm.llm_engine.model_config.model
    files = load_file(f"{model}/model.safetensors")
    generator = random.Random(1)

    def weights(name):
        runner = core.model_executor.driver_worker.worker.model_runner
        changed = dict(files)
        if name:
            changed[name] = tensor = files[name].clone()
            words = tensor.view(-1).view(torch.int32)
            words[generator.randrange(len(words))] ^= 1 << 16  # the last bit of a bfloat16, too
        runner.reload_weights(weights_iterator=iter(changed.items()))
        (hello,) = llm.collective_rpc(lambda worker: connector_of(worker).worker_identity(worker))
        assert not hello.error, hello.error
        return hello.weights, hello.files

    def connector_of(worker):
        from vllm.distributed.kv_transfer import get_kv_transfer_group
        return get_kv_transfer_group()

    before = weights("")
    result = [name for name in files if weights(name) == before]
    assert weights("") == before
    assert len(files) > 10
"""


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("plain", "float32"),
        ("plain", "bfloat16"),
        ("sliding", "bfloat16"),
        ("recurrent", "bfloat16"),
    ],
)
def test_one_bit_of_any_parameter_gives_another_identity(
    store: Cluster, make_model: MakeModel, engine: StartEngine, kind: str, dtype: str
) -> None:
    options = ["--sliding"] if kind == "sliding" else ["--kind", kind]
    one = engine(make_model(*options), transfer_config(store.address), dtype=dtype)
    assert one.run(EVERY_PARAMETER) == []


def test_where_vllm_has_switched_prefix_caching_off_nothing_is_loaded_or_saved(
    store: Cluster, make_model: MakeModel, engine: StartEngine
) -> None:
    """Its latent attention on a CPU cannot go on from a prefix. Where the CPU has AMX, vLLM would
    take another one, for bfloat16 alone."""
    latent = make_model("--kind", "latent")
    one = engine(latent, transfer_config(store.address), attention_backend="CPU_MLA")
    first = one.generate([prompt(1)])
    assert first[0].params is None
    one.saved()
    one.reset()
    assert cached(one.generate([prompt(1)])) == [0]
    assert objects(store) == {}
    assert sum("neither loads nor saves" in line for line in one.log) == 1


def test_among_other_connectors_under_its_own_name(
    store: Cluster, llama: Path, tmp_path: Path, engine: StartEngine
) -> None:
    """vLLM finds it by the plug-in, and its figures by its name."""
    ours = transfer_config(store.address)
    del ours["kv_load_failure_policy"], ours["kv_connector_module_path"]
    theirs = {
        "kv_connector": "ExampleConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }  # fmt: skip

    among: dict[str, Any] = {
        "kv_connector": "MultiConnector", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "connectors": [{**ours, "kv_connector": "KVStoreConnector"}, theirs]
        },
    }  # fmt: skip

    one = engine(llama, among)
    first = one.generate([prompt(1)])
    one.saved()
    one.reset()
    again = one.generate([prompt(1)])
    assert cached(again) == [WHOLE]
    assert tokens(again) == tokens(first)
    assert one.metrics()["hit_tokens"] == WHOLE


@pytest.mark.timeout(400)
@pytest.mark.parametrize("number", [1, 2], ids=["in-place", "loaded-again"])
def test_an_adapter_that_is_overwritten_at_its_path_is_another_one(
    store: Cluster, llama: Path, tmp_path: Path, engine: StartEngine, number: int
) -> None:
    adapter = tmp_path / "adapter"
    make_adapter(adapter, 1)
    one = engine(
        llama, transfer_config(store.address), enable_lora=True, max_loras=1, max_lora_rank=8
    )

    def ask(number: int, before: str = "") -> list[Any]:
        found = one.run(
            f"""
            from vllm import SamplingParams
            from vllm.lora.request import LoRARequest
            path = {str(adapter)!r}
            {before}
            sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
            (done,) = llm.generate(
                [{{"prompt_token_ids": {prompt(1)}}}], sampling, use_tqdm=False,
                lora_request=LoRARequest("adapter", {number}, path),
            )
            result = [done.num_cached_tokens, list(done.outputs[0].token_ids)]
            """
        )
        one.saved()
        return list(found)

    first = ask(1)
    one.reset()
    assert ask(1) == [WHOLE, first[1]]
    assert cached(one.generate([prompt(1)])) == [0], "without the adapter"
    one.saved()

    make_adapter(adapter, 2)
    in_place = "llm.llm_engine.add_lora(LoRARequest('adapter', 1, path, load_inplace=True))"
    other = ask(number, in_place if number == 1 else "llm.llm_engine.remove_lora(1)")
    assert other[0] == 0, "neither from the store nor from vLLM's own prefix cache"
    assert other[1] != first[1]
    one.reset()
    assert ask(number) == [WHOLE, other[1]]


def test_adapters_for_which_a_worker_has_no_room_are_found_again(
    store: Cluster, llama: Path, tmp_path: Path, engine: StartEngine
) -> None:
    adapters = [tmp_path / f"adapter-{number}" for number in range(3)]
    for number, each in enumerate(adapters):
        make_adapter(each, number)
    one = engine(
        llama, transfer_config(store.address), enable_lora=True, max_loras=1, max_cpu_loras=2,
        max_lora_rank=8,
    )  # fmt: skip

    def ask_all() -> list[list[Any]]:
        found = one.run(
            f"""
            from vllm import SamplingParams
            from vllm.lora.request import LoRARequest
            sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
            result = []
            for number, path in enumerate({[str(each) for each in adapters]!r}):
                request = LoRARequest(f"adapter-{{number}}", number + 1, path)
                (done,) = llm.generate(
                    [{{"prompt_token_ids": {prompt(1)}}}], sampling, use_tqdm=False,
                    lora_request=request,
                )
                result.append([done.num_cached_tokens, list(done.outputs[0].token_ids)])
            """
        )
        one.saved()
        one.reset()
        return list(found)

    first = ask_all()
    assert [found for found, _ in first] == [0] * 3
    assert len({tuple(ids) for _, ids in first}) == 3
    for _ in range(2):
        assert ask_all() == [[WHOLE, ids] for _, ids in first]
    make_adapter(adapters[1], 7)  # dropped by now: loaded anew from these files
    last = ask_all()
    assert [found for found, _ in last] == [WHOLE, 0, WHOLE]
    assert last[1][1] != first[1][1]


def make_adapter(directory: Path, seed: int) -> None:
    """Of the query and value projections of ``tiny``'s Llama."""
    import json

    import torch
    from safetensors.torch import save_file

    directory.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(4):
        for name, width in (("q_proj", 256), ("v_proj", 128)):
            base = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{base}.lora_A.weight"] = torch.randn(8, 256, generator=generator) * 0.3
            weights[f"{base}.lora_B.weight"] = torch.randn(width, 8, generator=generator) * 0.3
    save_file(weights, directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"],
        "bias": "none", "task_type": "CAUSAL_LM", "base_model_name_or_path": "tiny",
    }  # fmt: skip
    (directory / "adapter_config.json").write_text(json.dumps(config))


IN_PLACE = """
    runner = core.model_executor.driver_worker.worker.model_runner
    embedded = runner.model.model.embed_tokens.weight.data
    CHANGE
"""


@pytest.mark.parametrize(
    "change", ["embedded.mul_(-1)", "embedded[-1, 1] += 1"], ids=["all", "one element"]
)
def test_weights_that_change_without_a_call_are_found_after_a_reset(
    store: Cluster, llama: Path, engine: StartEngine, change: str
) -> None:
    """As a training loop in the same process does it: no call to the workers says so. A change that
    no sample shows is found while the first request runs, whose blocks are not saved before."""
    one = engine(llama, transfer_config(store.address))
    one.generate([prompt(1)])
    one.saved()
    (first,) = objects(store)
    one.run(IN_PLACE.replace("CHANGE", change))
    assert one.reset()
    one.generate([prompt(2)], tokens=8)
    assert one.generate([prompt(1)])[0].cached in ((0,) if "mul" in change else (0, WHOLE))
    one.generate([prompt(3)])
    one.saved()
    stored = objects(store)
    assert stored.pop(first) == len(prompt(1)) // BLOCK_TOKENS, "nothing of the new weights"
    assert stored, "the new weights have blocks of their own"
